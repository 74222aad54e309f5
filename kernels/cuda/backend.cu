// The CUDA backend: finds the device, gives memory, moves bytes between host and device.
//
// Operations run in the order of one stream, so memory popped off the step's stack can be pushed again at
// once. The host waits only for what it reads: uploads go through slots of pinned memory, from which the copy
// engine reads when the stream gets there, so the caller's buffer is free. Full slots make it wait.
#include <stdio.h>
#include <string.h>

#include "kernels/base/system.h"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

#if __has_include(<nvtx3/nvToolsExt.h>) // headers alone: they look for a profiler, and else do nothing
#include <nvtx3/nvToolsExt.h>
#else
#define nvtxRangePushA(name) ((void)(name))
#define nvtxRangePop()       ((void)0)
#endif

// --- between host and device -------------------------------------------------------------------------------

static void join_collectives(Backend *backend, int64_t behind) {
  side_join(backend, STREAM_COLLECTIVES, cuda_stream(backend), behind);
}

static void join_copies(Backend *backend, int64_t in, int64_t out) {
  side_join(backend, STREAM_COPY_IN, cuda_stream(backend), in);
  side_join(backend, STREAM_COPY_OUT, cuda_stream(backend), out);
}

static void to_device(Backend *backend, Tensor destination, const void *host) {
  CudaState *state = cuda_state(backend);
  int64_t bytes = (int64_t)tensor_bytes(destination), part;
  for (int64_t done = 0; done < bytes; done += part) {
    part = min_i64(bytes - done, STAGING_SLOT_BYTES);
    int64_t slot = state->uploads++ % STAGING_SLOTS;
    char *from = state->staging + slot * STAGING_SLOT_BYTES;
    cuda_check(cudaEventSynchronize(state->uploaded[slot]), "waiting for an upload");
    copy_bytes(from, static_cast<const char *>(host) + done, (size_t)part);
    cuda_check(cudaMemcpyAsync(data_of<char>(destination) + done, from, (size_t)part, cudaMemcpyDefault,
                               state->stream), // to offloaded tensors too
               "uploading");
    cuda_check(cudaEventRecord(state->uploaded[slot], state->stream), "recording an event");
  }
}

static void synchronize(Backend *backend) {
  join_copies(backend, 0, 0);
  cuda_check(cudaStreamSynchronize(cuda_stream(backend)), "running the kernels queued so far");
}

static void to_host(Backend *backend, void *host, Tensor source) {
  cuda_check(
      cudaMemcpyAsync(host, source.data, tensor_bytes(source), cudaMemcpyDefault, cuda_stream(backend)),
      "downloading");
  synchronize(backend);
}

// --- memory ------------------------------------------------------------------------------------------------

// Bytes in use on the whole device, other programs' included: cudaMemGetInfo does not separate owners.
static size_t device_bytes_now(Backend *backend) {
  size_t available = 0, total = 0;
  cuda_check(cudaMemGetInfo(&available, &total), "querying the free memory");
  return total - available;
}

// Sampled after each allocation and when queried: cuBLASLt takes memory too, at its first GEMM.
static size_t device_bytes_peak(Backend *backend) {
  CudaState *state = cuda_state(backend);
  size_t now = device_bytes_now(backend);
  if (now > state->peak_bytes) state->peak_bytes = now;
  return state->peak_bytes;
}

static void device_peak_reset(Backend *backend) {
  cuda_state(backend)->peak_bytes = device_bytes_now(backend);
}

static void *zeroed(Backend *backend, void *data, size_t bytes) {
  cuda_check(cudaMemsetAsync(data, 0, bytes, cuda_stream(backend)), "zeroing new memory");
  device_bytes_peak(backend);
  return data;
}

static void *allocate(void *context, size_t bytes) {
  void *data = nullptr;
  cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError(); // the ledger reports it in a sentence; the device is as it was
    return nullptr;
  }
  cuda_check(error, "allocating device memory");
  return zeroed(static_cast<Backend *>(context), data, bytes);
}

static void *allocate_shared(void *context, size_t bytes) {
  Backend *backend = static_cast<Backend *>(context);
  void *data = cuda_shared_allocate(backend, bytes);
  return data ? zeroed(backend, data, bytes) : allocate(context, bytes);
}

static void release(void *context, void *data, size_t bytes) {
  Backend *backend = static_cast<Backend *>(context);
  synchronize(backend);
  if (!cuda_shared_release(backend, data)) cuda_check(cudaFree(data), "freeing device memory");
}

// Pinned pages with one address for host and device: kernels access AdamW's state, say, over PCIe.
static void *allocate_host(void *context, size_t bytes) {
  void *data = memory_pages.allocate(nullptr, bytes);
  if (data && bytes && cudaHostRegister(data, bytes, cudaHostRegisterDefault) != cudaSuccess) {
    cudaGetLastError(); // the system may limit pinned memory
    memory_pages.release(nullptr, data, bytes);
    return nullptr;
  }
  return data;
}

static void release_host(void *context, void *data, size_t bytes) {
  synchronize(static_cast<Backend *>(context));
  if (bytes) cuda_check(cudaHostUnregister(data), "unpinning host memory");
  memory_pages.release(nullptr, data, bytes);
}

static void poison(void *context, void *data, size_t bytes) {
  cuda_check(cudaMemsetAsync(data, 0xFF, bytes, cuda_stream(static_cast<Backend *>(context))), "poisoning");
}

// --- profiles ----------------------------------------------------------------------------------------------

static bool event_record(Backend *backend, void **event, StreamKind stream) {
  CudaState *state = cuda_state(backend);
  cudaStream_t on = stream == STREAM_COMPUTE ? state->stream : state->concurrent[stream].stream;
  if (!on) return false;
  if (!*event) cuda_check(cudaEventCreate(reinterpret_cast<cudaEvent_t *>(event)), "creating an event");
  cuda_check(cudaEventRecord(static_cast<cudaEvent_t>(*event), on), "recording an event");
  return true;
}

static double event_seconds(void *from, void *to) {
  float milliseconds = 0;
  auto begin = static_cast<cudaEvent_t>(from), end = static_cast<cudaEvent_t>(to);
  cuda_check(cudaEventSynchronize(end), "waiting for an event");
  cuda_check(cudaEventElapsedTime(&milliseconds, begin, end), "reading the time between two events");
  return 1e-3 * (double)milliseconds;
}

static void event_destroy(void *event) {
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

static void range(const char *name) {
  if (name)
    nvtxRangePushA(name);
  else
    nvtxRangePop();
}

// --- life --------------------------------------------------------------------------------------------------

static void destroy(Backend *backend) {
  CudaState *state = cuda_state(backend);
  cuda_collectives_end(backend);
  for (SideStream &side : state->concurrent) side_destroy(&side);
  gemms_destroy(state->gemms);
  cudaFreeHost(state->staging);
  for (cudaEvent_t event : state->uploaded) cudaEventDestroy(event);
  hopper_destroy(state->hopper);
  cudaStreamDestroy(state->stream);
  cudaGetLastError(); // clears the errors of parts that an unfinished backend lacks
}

static const BackendOps operations = {.join_ranks = cuda_join_ranks,
                                      .collectives_join = join_collectives,
                                      .copies_join = join_copies,
                                      .to_device = to_device,
                                      .to_host = to_host,
                                      .synchronize = synchronize,
                                      .event_record = event_record,
                                      .event_seconds = event_seconds,
                                      .event_destroy = event_destroy,
                                      .range = range,
                                      .device_bytes_now = device_bytes_now,
                                      .device_bytes_peak = device_bytes_peak,
                                      .device_peak_reset = device_peak_reset,
                                      .destroy = destroy,
#define ENTRY(name, Arguments, group) .name = cuda_##name,
                                      OPERATIONS(ENTRY, ENTRY)
#undef ENTRY
};

static bool usable(int ordinal, Reason *reason) {
  int driver = 0, runtime = 0, count = 0, major = 0, minor = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return refuse(reason, "no NVIDIA driver was found");
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver)
    return refuse(reason, "the NVIDIA driver is for CUDA %d.%d and the program was built with CUDA %d.%d",
                  driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    return refuse(reason, "no NVIDIA GPU was found");
  if (error != cudaSuccess) return refuse(reason, "CUDA did not start: %s", cudaGetErrorString(error));
  if (ordinal < 0 || ordinal >= count)
    return refuse(reason, "there is no GPU %d, only %d of them, counted from 0", ordinal, count);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  if (major < 8)
    return refuse(reason, "GPU %d has compute capability %d.%d, and bf16 GEMMs need 8.0 (Ampere) or later",
                  ordinal, major, minor);
  error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = cudaFree(nullptr); // makes the context
  return error == cudaSuccess ||
         refuse(reason, "GPU %d did not start: %s", ordinal, cudaGetErrorString(error));
}

extern "C" Backend *cuda_backend_create(int ordinal, Dtype dtype, const char **reason) {
  static thread_local Reason why;
  if (!usable(ordinal, &why)) {
    cudaGetLastError();
    *reason = why.text;
    return nullptr;
  }
  Backend *backend = backend_begin(&operations, &cuda_scratch, ON_CUDA, dtype, sizeof(CudaState));
  CudaState *state = cuda_state(backend);
  MemorySource source = {.allocate = allocate,
                         .release = release,
                         .allocate_shared = allocate_shared,
                         .allocate_host = allocate_host,
                         .release_host = release_host,
                         .poison = poison,
                         .context = backend};
  backend->memory = memory_create(&source);
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, ordinal), "querying the device's properties");
  state->ordinal = ordinal;
  state->multiprocessors = properties.multiProcessorCount;
  backend->no_fp8 = 10 * properties.major + properties.minor < 89;
  state->stream = new_stream(false);
  cuda_check(cudaMallocHost(reinterpret_cast<void **>(&state->staging), STAGING_SLOTS * STAGING_SLOT_BYTES),
             "allocating 16 MiB of pinned host memory");
  for (cudaEvent_t &event : state->uploaded) event = new_event();

  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  snprintf(backend->description, sizeof backend->description, "%.80s, CUDA %d.%d", properties.name,
           runtime / 1000, runtime % 1000 / 10);
  backend->device_capacity = properties.totalGlobalMem;
  gemms_create(backend);
  state->hopper = hopper_create(backend);
  backend->no_sampling = !hopper_runs(backend);
  backend->device_overhead = device_bytes_now(backend);
  state->gemm_workspace =
      memory_reserve(&backend->memory, "GEMM workspace", MEMORY_WORKSPACE, CUDA_GEMM_WORKSPACE_BYTES);
  device_peak_reset(backend);
  return backend_finish(backend);
}
