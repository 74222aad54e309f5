// Collectives over GPUs, through NCCL, beside the products.
//
// They run on a stream of their own, which goes before the others where an SM is free. An event lets a
// collective wait for what was queued before it; another, recorded behind it, lets what follows wait for it:
// at once, or, for those that run beside, at collectives_join. The host never waits, so a bucket of gradients
// travels while the layers below compute theirs. NCCL may take 16 thread blocks: products lose an eighth of
// the SMs for as long as something travels.
//
// NCCL adds in an order that follows from the number of ranks, the size and the machine's links, so runs
// repeat to the bit on one machine. bf16 sums are rounded at every hop of a ring.
#include <atomic>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/ranks/ranks.h"

// out[i] += x[i].
template <typename T> static __global__ void add_kernel(T *out, const T *x, int64_t count) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(to_float(out[i]) + to_float(x[i]));
}

static void add(cudaStream_t stream, Tensor out, const void *x) {
  int64_t count = tensor_count(out);
  if (!count) return;
  with_float(out.dtype, [&](auto type) {
    using T = decltype(type);
    add_kernel<<<(unsigned)ceil_div(count, 256), 256, 0, stream>>>(data_of<T>(out), static_cast<const T *>(x),
                                                                   count);
  });
  cuda_check_launch("reduce_scatter's sum");
}

// Of one rank every collective is a copy, or a sum with what is there.
static void alone(Backend *backend, const Collective *a) {
  if (a->accumulate)
    add(cuda_stream(backend), a->out, a->x.data);
  else if (a->out.data != a->x.data)
    cuda_check(cudaMemcpyAsync(a->out.data, a->x.data, tensor_bytes(a->x), cudaMemcpyDeviceToDevice,
                               cuda_stream(backend)),
               "copying on the device");
}

#ifdef HAVE_NCCL
#include <nccl.h>

struct CudaCollectives {
  enum { EVENTS = 64, BLOCKS = 16 };
  int rank, ranks, ordinal;
  ncclComm_t comm;
  cudaStream_t stream;
  cudaEvent_t before;       // what was queued before the latest collective
  cudaEvent_t done[EVENTS]; // done[i % EVENTS]: collective i
  std::atomic<int64_t> count;
};

static void nccl_check(ncclResult_t result, ncclComm_t comm, const char *doing) {
  if (result != ncclSuccess && result != ncclInProgress)
    fail("NCCL failed in %s: %s (%s); NCCL_DEBUG=WARN says more", doing, ncclGetErrorString(result),
         ncclGetLastError(comm));
}

static ncclDataType_t type_of(Dtype dtype) {
  return dtype == DTYPE_F32 ? ncclFloat32 : dtype == DTYPE_BF16 ? ncclBfloat16 : ncclInt32;
}

static char *slice(Tensor t, int64_t index, int64_t count) {
  return data_of<char>(t) + index * count * (int64_t)dtype_bytes(t.dtype);
}

// Queues what `start` starts on the collectives' stream.
template <typename F>
static void collective(Backend *backend, const Collective *a, const char *name, F start) {
  CudaState *state = cuda_state(backend);
  CudaCollectives *c = state->collectives;
  if (!c) {
    alone(backend, a);
    return;
  }
  cuda_check(cudaEventRecord(c->before, state->stream), "recording an event");
  cuda_check(cudaStreamWaitEvent(c->stream, c->before, 0), "queueing a wait");
  nccl_check(start(c), c->comm, name);
  cudaEvent_t done = c->done[c->count % CudaCollectives::EVENTS];
  cuda_check(cudaEventRecord(done, c->stream), "recording an event");
  c->count++;
  if (!a->async) cuda_check(cudaStreamWaitEvent(state->stream, done, 0), "queueing a wait");
}

void cuda_all_reduce(Backend *backend, const Collective *a) {
  collective(backend, a, "all_reduce", [&](CudaCollectives *c) {
    return ncclAllReduce(a->x.data, a->out.data, (size_t)tensor_count(a->x), type_of(a->x.dtype), ncclSum,
                         c->comm, c->stream);
  });
}

void cuda_reduce_scatter(Backend *backend, const Collective *a) {
  collective(backend, a, "reduce_scatter", [&](CudaCollectives *c) {
    int64_t count = tensor_count(a->out);
    // What is to be added to `out` is summed where it lies in x.
    void *out = a->accumulate ? slice(a->x, c->rank, count) : a->out.data;
    ncclResult_t result =
        ncclReduceScatter(a->x.data, out, (size_t)count, type_of(a->x.dtype), ncclSum, c->comm, c->stream);
    if (a->accumulate) add(c->stream, a->out, out);
    return result;
  });
}

void cuda_all_gather(Backend *backend, const Collective *a) {
  collective(backend, a, "all_gather", [&](CudaCollectives *c) {
    return ncclAllGather(a->x.data, a->out.data, (size_t)tensor_count(a->x), type_of(a->x.dtype), c->comm,
                         c->stream);
  });
}

void cuda_broadcast(Backend *backend, const Collective *a) {
  collective(backend, a, "broadcast", [&](CudaCollectives *c) {
    return ncclBroadcast(a->x.data, a->out.data, (size_t)tensor_count(a->x), type_of(a->x.dtype), 0, c->comm,
                         c->stream);
  });
}

void cuda_collectives_join(Backend *backend, int64_t behind) {
  CudaState *state = cuda_state(backend);
  CudaCollectives *c = state->collectives;
  if (!c || c->count <= behind) return;
  cudaEvent_t done = c->done[(c->count - 1 - behind) % CudaCollectives::EVENTS];
  cuda_check(cudaStreamWaitEvent(state->stream, done, 0), "queueing a wait");
}

// For the watch, from its own thread: NCCL's own failures, and how far the device has come.
static bool look(void *context, char *text, size_t size) {
  CudaCollectives *c = static_cast<CudaCollectives *>(context);
  ncclResult_t error = ncclSuccess;
  if (ncclCommGetAsyncError(c->comm, &error) == ncclSuccess && error != ncclSuccess &&
      error != ncclInProgress) {
    snprintf(text, size, "NCCL failed: %s (%s)", ncclGetErrorString(error), ncclGetLastError(c->comm));
    return true;
  }
  int64_t count = c->count, i = count > CudaCollectives::EVENTS ? count - CudaCollectives::EVENTS : 0;
  while (i < count && cudaEventQuery(c->done[i % CudaCollectives::EVENTS]) != cudaErrorNotReady) i++;
  if (i < count)
    snprintf(text, size, "its GPU has done %lld of %lld collectives", (long long)i, (long long)count);
  return false;
}

// Once through what a step will use: NCCL connects, and takes its memory, at the first need.
static void warm_up(Backend *backend) {
  int ranks = backend->ranks;
  int64_t part = (8 << 20) / ranks / 128 * 128, whole = part * ranks;
  void *data = nullptr;
  cuda_check(cudaMalloc(&data, (size_t)whole * sizeof(float)), "allocating memory to try the links with");
  cuda_check(cudaMemsetAsync(data, 0, (size_t)whole * sizeof(float), cuda_stream(backend)),
             "zeroing new memory");
  Tensor all = tensor_1d(data, DTYPE_F32, whole), own = tensor_rows(all, part * backend->rank, part);
  all_reduce(backend, Collective{.out = all, .x = all});
  reduce_scatter(backend, Collective{.out = own, .x = all});
  all_gather(backend, Collective{.out = all, .x = own});
  broadcast(backend, Collective{.out = all, .x = all});
  backend_synchronize(backend);
  cuda_check(cudaFree(data), "freeing device memory");
}

extern "C" void cuda_backend_join_ranks(Backend *backend) {
  const Launch *l = ranks_self();
  if (l->ranks == 1) return;
  CudaState *state = cuda_state(backend);
  size_t held = backend->ops->device_bytes_now(backend);
  CudaCollectives *c = new CudaCollectives();
  c->rank = l->rank;
  c->ranks = l->ranks;
  c->ordinal = state->ordinal;
  ncclUniqueId id;
  if (l->rank == 0) nccl_check(ncclGetUniqueId(&id), nullptr, "making a job's id");
  static_assert(sizeof id <= RANKS_SHARED, "an id is shared at once");
  ranks_share(&id, sizeof id);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = CudaCollectives::BLOCKS;
  ranks_enter("connecting the GPUs", true);
  nccl_check(ncclCommInitRankConfig(&c->comm, l->ranks, id, l->rank, &config), nullptr,
             "connecting the GPUs");
  ranks_leave();
  int lowest = 0, highest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for the priorities of streams");
  cuda_check(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, highest), "creating a stream");
  cuda_check(cudaEventCreateWithFlags(&c->before, cudaEventDisableTiming), "creating an event");
  for (cudaEvent_t &event : c->done)
    cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  state->collectives = c;
  backend->rank = l->rank;
  backend->ranks = l->ranks;
  warm_up(backend);
  ranks_watch_device(look, c);
  size_t now = backend->ops->device_bytes_now(backend);
  if (now > held) backend->device_overhead += now - held;
  backend->ops->device_peak_reset(backend);
}

void cuda_collectives_end(Backend *backend) {
  CudaCollectives *c = cuda_state(backend)->collectives;
  if (!c) return;
  ranks_watch_device(nullptr, nullptr);
  ncclCommDestroy(c->comm);
  for (cudaEvent_t event : c->done) cudaEventDestroy(event);
  cudaEventDestroy(c->before);
  cudaStreamDestroy(c->stream);
  delete c;
}

#else

void cuda_all_reduce(Backend *backend, const Collective *a) {
  alone(backend, a);
}

void cuda_reduce_scatter(Backend *backend, const Collective *a) {
  alone(backend, a);
}

void cuda_all_gather(Backend *backend, const Collective *a) {
  alone(backend, a);
}

void cuda_broadcast(Backend *backend, const Collective *a) {
  alone(backend, a);
}

void cuda_collectives_join(Backend *backend, int64_t behind) {
  (void)backend;
  (void)behind;
}

extern "C" void cuda_backend_join_ranks(Backend *backend) {
  (void)backend;
  int ranks = ranks_self()->ranks;
  if (ranks > 1) fail("%d ranks on GPUs talk through NCCL, and this program was built without it", ranks);
}

void cuda_collectives_end(Backend *backend) {
  (void)backend;
}

#endif
