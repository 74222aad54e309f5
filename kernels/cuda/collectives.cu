// Collectives over GPUs, through NCCL, concurrent with the GEMMs.
//
// They run on a stream of their own with the highest priority. A collective waits for what was queued before
// it; what follows waits for it at once or, if asynchronous, at collectives_join. So a bucket of gradients
// travels while the layers below compute theirs.
//
// Copy engines carry gradients and weights where they can (copy_engines.cu). NCCL's kernels do the rest, on
// 16 SMs at most. They add in an order that follows from the number of ranks, the size and the machine's
// links, so runs repeat bit for bit on one machine. bf16 sums are rounded at every hop of a ring.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/ranks/ranks.h"

// With one rank every collective is a copy, or an addition to `out`.
static void copy_or_add(Backend *backend, const Collective *a) {
  if (a->accumulate)
    sum_shares(cuda_stream(backend), a->out, a->x.data, 1, true);
  else if (a->out.data != a->x.data)
    cuda_check(cudaMemcpyAsync(a->out.data, a->x.data, tensor_bytes(a->x), cudaMemcpyDeviceToDevice,
                               cuda_stream(backend)),
               "copying on the device");
}

#ifdef HAVE_NCCL
#include "kernels/cuda/nccl_calls.cuh"

// Has `start`, given the count and type of x's elements, queue its work on the collectives' stream.
template <typename F>
static void collective(Backend *backend, const Collective *a, const char *name, F start) {
  ncclComm_t comm = cuda_state(backend)->comm;
  if (!comm) return copy_or_add(backend, a);
  cudaStream_t stream = side_begin(backend, STREAM_COLLECTIVES);
  nccl_check(start((size_t)tensor_count(a->x), nccl_type(a->x.dtype), comm, stream), comm, name);
  side_end(backend, STREAM_COLLECTIVES);
  if (!a->async) side_join(backend, STREAM_COLLECTIVES, cuda_stream(backend), 0);
}

// Tells the watchdog's thread NCCL's errors, and how many collectives the GPU has finished.
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
  cudaSetDevice(state->ordinal); // this thread would otherwise use GPU 0
  int64_t count = side->count, i = max_i64(0, count - ASYNC_EVENTS);
  while (i < count && cudaEventQuery(side->done[i % ASYNC_EVENTS]) != cudaErrorNotReady) i++;
  if (i < count)
    snprintf(text, size, "its GPU has done %lld of %lld collectives", (long long)i, (long long)count);
  return false;
}

// Runs one of each collective that a step uses, on `bytes` of zeros.
static void try_links(Backend *backend, void *data, int64_t bytes) {
  int64_t part = bytes / (int64_t)sizeof(float) / backend->ranks / 128 * 128;
  Tensor all = tensor_1d(data, DTYPE_F32, part * backend->ranks),
         local = tensor_rows(all, part * backend->rank, part);
  all_reduce(backend, Collective{.out = all, .x = all});
  reduce_scatter(backend, Collective{.out = local, .x = all});
  all_gather(backend, Collective{.out = all, .x = local});
  broadcast_rank_0(backend, Collective{.out = all, .x = all});
  backend_synchronize(backend);
}

// NCCL connects, and takes its memory, at the first call; by kernels and by copy engines.
static void warm_up(Backend *backend) {
  void *data = nullptr;
  cuda_check(cudaMalloc(&data, BUCKET_BYTES), "allocating memory to try the links with");
  cuda_check(cudaMemsetAsync(data, 0, BUCKET_BYTES, cuda_stream(backend)), "zeroing new memory");
  try_links(backend, data, BUCKET_BYTES);
  cuda_check(cudaFree(data), "freeing device memory");
  const CudaState *state = cuda_state(backend);
  if (state->sharing) try_links(backend, state->shares + BUCKET_BYTES / 2, BUCKET_BYTES / 2);
}

// Gets NCCL's id of the job from rank 0 by MPI, else from NCCL_COMM_ID=ADDRESS:PORT of a common subnet, where
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
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 16; // so many SMs do not compute while it runs
#ifdef NCCL_CTA_POLICY_ZERO
  int driver = 0;
  cudaDriverGetVersion(&driver);
  state->sharing = l->local_ranks == l->ranks && driver >= 12050; // all that NCCL's copy engines need
  if (state->sharing) {
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    setenv("NCCL_NVLS_ENABLE", "0", 0); // sharing would use NVLink multicast, which not every machine grants
  }
#endif
  ncclUniqueId id = job_id(l);
  ranks_enter("ncclCommInitRank");
  nccl_check(ncclCommInitRankConfig(&state->comm, l->ranks, id, l->rank, &config), nullptr,
             "ncclCommInitRank");
  ranks_leave();
  ranks_watch_device(poll_nccl, state);
  state->shares = static_cast<char *>(memory_reserve(&backend->memory, "shares of gradients",
                                                     MEMORY_GRADIENTS, backend->scratch->ranks_bytes));
  warm_up(backend);
  size_t now = backend->ops->device_bytes_now(backend) - backend->scratch->ranks_bytes;
  if (now > held) backend->device_overhead += now - held;
  backend->ops->device_peak_reset(backend);
}

void cuda_collectives_end(Backend *backend) {
  ncclComm_t comm = cuda_state(backend)->comm;
  if (!comm) return;
  ranks_watch_device(nullptr, nullptr);
  ncclCommDestroy(comm);
}

#else // one rank only: the calls of the operations below are not compiled

#define collective(backend, a, ...) copy_or_add(backend, a)

void cuda_collectives_end(Backend *backend) {}

void cuda_join_ranks(Backend *backend) {
  fail("%d ranks on GPUs need NCCL, and this program was built without it", backend->ranks);
}

#endif

void cuda_all_reduce(Backend *backend, const Collective *a) {
  collective(backend, a, "all_reduce", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    if (by_copy_engines(backend, a, stream)) return ncclSuccess;
    return ncclAllReduce(a->x.data, a->out.data, count, type, ncclSum, comm, stream);
  });
}

void cuda_reduce_scatter(Backend *backend, const Collective *a) {
  collective(backend, a, "reduce_scatter", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    if (by_copy_engines(backend, a, stream)) return ncclSuccess;
    // A sum to be added to `out` is first formed in place in x.
    void *slice = data_of<char>(a->x) + backend->rank * tensor_bytes(a->out);
    void *out = a->accumulate ? slice : a->out.data;
    ncclResult_t result =
        ncclReduceScatter(a->x.data, out, count / backend->ranks, type, ncclSum, comm, stream);
    if (a->accumulate) sum_shares(stream, a->out, out, 1, true);
    return result;
  });
}

void cuda_all_gather(Backend *backend, const Collective *a) {
  collective(backend, a, "all_gather", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    if (by_copy_engines(backend, a, stream)) return ncclSuccess;
    return ncclAllGather(a->x.data, a->out.data, count, type, comm, stream);
  });
}

void cuda_broadcast_rank_0(Backend *backend, const Collective *a) {
  collective(backend, a, "broadcast_rank_0", [&](size_t count, ncclDataType_t type, auto comm, auto stream) {
    return ncclBroadcast(a->x.data, a->out.data, count, type, 0, comm, stream);
  });
}
