// Collectives over GPUs, through NCCL, concurrent with the GEMMs.
//
// They run on a stream of their own with the highest priority. A collective waits for what was queued before
// it; what follows waits for it at once or, if asynchronous, at collectives_join. So a bucket of gradients
// travels while the layers below compute theirs. NCCL may take 16 SMs.
//
// NCCL adds in an order that follows from the number of ranks, the size and the machine's links, so runs
// repeat to the bit on one machine. bf16 sums are rounded at every hop of a ring.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/ranks/ranks.h"

// out[i] += x[i].
template <typename T> static __global__ void add_kernel(T *out, const T *x, int64_t count) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(to_float(out[i]) + to_float(x[i]));
}

static void add(cudaStream_t stream, Tensor out, const void *x) {
  int64_t count = tensor_count(out);
  with_float(out.dtype, [&](auto type) {
    using T = decltype(type);
    launch_kernel({"reduce_scatter's sum", stream, ceil_div(count, 256), 256}, add_kernel<T>, data_of<T>(out),
                  static_cast<const T *>(x), count);
  });
}

// With one rank every collective is a copy, or a sum with what is there.
static void copy_or_add(Backend *backend, const Collective *a) {
  if (a->accumulate)
    add(cuda_stream(backend), a->out, a->x.data);
  else if (a->out.data != a->x.data)
    cuda_check(cudaMemcpyAsync(a->out.data, a->x.data, tensor_bytes(a->x), cudaMemcpyDeviceToDevice,
                               cuda_stream(backend)),
               "copying on the device");
}

#ifdef HAVE_NCCL
#include <nccl.h>

static void nccl_check(ncclResult_t result, ncclComm_t comm, const char *doing) {
  if (result != ncclSuccess && result != ncclInProgress)
    fail("NCCL failed in %s: %s (%s); NCCL_DEBUG=WARN says more", doing, ncclGetErrorString(result),
         ncclGetLastError(comm));
}

static ncclDataType_t type_of(Dtype dtype) {
  return dtype == DTYPE_F32 ? ncclFloat32 : dtype == DTYPE_BF16 ? ncclBfloat16 : ncclInt32;
}

// Queues on the collectives' stream what `start` starts, given the count and type of x's elements.
template <typename F>
static void collective(Backend *backend, const Collective *a, const char *name, F start) {
  ncclComm_t comm = cuda_state(backend)->comm;
  if (!comm) return copy_or_add(backend, a);
  cudaStream_t stream = side_begin(backend, STREAM_COLLECTIVES);
  nccl_check(start((size_t)tensor_count(a->x), type_of(a->x.dtype), comm, stream), comm, name);
  side_end(backend, STREAM_COLLECTIVES);
  if (!a->async) side_join(backend, STREAM_COLLECTIVES, cuda_stream(backend), 0);
}

// For the watchdog, from its own thread: NCCL's errors, and how many collectives the GPU has done.
static bool poll_nccl(void *context, char *text, size_t size) {
  CudaState *state = static_cast<CudaState *>(context);
  const SideStream *side = &state->concurrent[STREAM_COLLECTIVES];
  ncclResult_t error = ncclSuccess;
  if (ncclCommGetAsyncError(state->comm, &error) == ncclSuccess && error != ncclSuccess &&
      error != ncclInProgress) {
    snprintf(text, size, "NCCL failed, maybe because another rank has ended: %s (%s)",
             ncclGetErrorString(error), ncclGetLastError(state->comm));
    return true;
  }
  cudaSetDevice(state->ordinal); // of this thread, which else would begin with GPU 0
  int64_t count = side->count, i = max_i64(0, count - ASYNC_EVENTS);
  while (i < count && cudaEventQuery(side->done[i % ASYNC_EVENTS]) != cudaErrorNotReady) i++;
  if (i < count)
    snprintf(text, size, "its GPU has done %lld of %lld collectives", (long long)i, (long long)count);
  return false;
}

// One of each collective that a step uses: NCCL connects, and takes its memory, at the first call.
static void warm_up(Backend *backend) {
  int ranks = backend->ranks;
  int64_t part = (8 << 20) / ranks / 128 * 128, whole = part * ranks;
  void *data = nullptr;
  cuda_check(cudaMalloc(&data, (size_t)whole * sizeof(float)), "allocating memory to try the links with");
  cuda_check(cudaMemsetAsync(data, 0, (size_t)whole * sizeof(float), cuda_stream(backend)),
             "zeroing new memory");
  Tensor all = tensor_1d(data, DTYPE_F32, whole), local = tensor_rows(all, part * backend->rank, part);
  all_reduce(backend, Collective{.out = all, .x = all});
  reduce_scatter(backend, Collective{.out = local, .x = all});
  all_gather(backend, Collective{.out = all, .x = local});
  broadcast_rank_0(backend, Collective{.out = all, .x = all});
  backend_synchronize(backend);
  cuda_check(cudaFree(data), "freeing device memory");
}

// NCCL's id of the job: from rank 0 by MPI, else from NCCL_COMM_ID=ADDRESS:PORT of a common subnet, where
// rank 0's ncclCommInitRank listens.
static ncclUniqueId job_id(const Launch *l) {
  ncclUniqueId id = {};
  if (!ranks_have_mpi() && !getenv("NCCL_COMM_ID")) {
    const char *address = l->local_ranks == l->ranks ? "127.0.0.1" : l->address;
    if (!*address || !l->port)
      fail("%s started %d ranks and names no rendezvous address: set MASTER_ADDR and MASTER_PORT, or "
           "use torchrun or tools/launch",
           l->launcher, l->ranks);
    char text[sizeof l->address + 16];
    snprintf(text, sizeof text, strchr(address, ':') ? "[%s]:%d" : "%s:%d", address, l->port); // IPv6, others
    setenv("NCCL_COMM_ID", text, 1);
    setenv("NCCL_SOCKET_RETRY_CNT", "76", 0); // connects for up to 5 minutes, while rank 0 starts
  }
  if (l->rank == 0 || !ranks_have_mpi()) nccl_check(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId");
  ranks_broadcast(&id, sizeof id);
  return id;
}

void cuda_join_ranks(Backend *backend) {
  const Launch *l = ranks_self();
  CudaState *state = cuda_state(backend);
  size_t held = backend->ops->device_bytes_now(backend);
  ncclUniqueId id = job_id(l);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 16; // so many SMs do not compute while it runs
  ranks_enter("ncclCommInitRank");
  nccl_check(ncclCommInitRankConfig(&state->comm, l->ranks, id, l->rank, &config), nullptr,
             "ncclCommInitRank");
  ranks_leave();
  ranks_watch_device(poll_nccl, state);
  warm_up(backend);
  size_t now = backend->ops->device_bytes_now(backend);
  if (now > held) backend->device_overhead += now - held;
  backend->ops->device_peak_reset(backend);
}

void cuda_collectives_end(Backend *backend) {
  ncclComm_t comm = cuda_state(backend)->comm;
  if (!comm) return;
  ranks_watch_device(nullptr, nullptr);
  ncclCommDestroy(comm);
}

#else // there is one rank; what the operations below would call is not compiled

#define collective(backend, a, ...) copy_or_add(backend, a)

void cuda_collectives_end(Backend *backend) {}

void cuda_join_ranks(Backend *backend) {
  fail("%d ranks on GPUs need NCCL, and this program was built without it", backend->ranks);
}

#endif

void cuda_all_reduce(Backend *backend, const Collective *a) {
  collective(backend, a, "all_reduce", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    return ncclAllReduce(a->x.data, a->out.data, count, type, ncclSum, comm, stream);
  });
}

void cuda_reduce_scatter(Backend *backend, const Collective *a) {
  collective(backend, a, "reduce_scatter", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    // What is to be added to `out` is summed where it lies in x.
    void *slice = data_of<char>(a->x) + backend->rank * tensor_bytes(a->out);
    void *out = a->accumulate ? slice : a->out.data;
    ncclResult_t result =
        ncclReduceScatter(a->x.data, out, count / backend->ranks, type, ncclSum, comm, stream);
    if (a->accumulate) add(stream, a->out, out);
    return result;
  });
}

void cuda_all_gather(Backend *backend, const Collective *a) {
  collective(backend, a, "all_gather", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    return ncclAllGather(a->x.data, a->out.data, count, type, comm, stream);
  });
}

void cuda_broadcast_rank_0(Backend *backend, const Collective *a) {
  collective(backend, a, "broadcast_rank_0", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    return ncclBroadcast(a->x.data, a->out.data, count, type, 0, comm, stream);
  });
}
