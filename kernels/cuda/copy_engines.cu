// Sums of gradients over the ranks, and weights for all, without SMs for the transfers.
//
// Our GEMMs have a CTA on every SM, whose tiles are given beforehand, so an SM that a kernel of NCCL holds
// delays the whole GEMM. From 2.28 on, NCCL has copy engines carry an all-to-all or an all-gather between
// GPUs of one machine, where both tensors lie in memory that all ranks have registered. A sum over R ranks is
//
//   all-to-all   every rank sends slice r of x to rank r, which receives R of them in state->shares
//   sum          a kernel adds them in fp32, in the order of the ranks, and rounds once
//   all-gather   of the sums, in place; of an all-reduce alone
//
// All run on the collectives' stream. A transfer begins when all ranks have reached it and ends when all have
// their data, so the next one may overwrite the shares.
#ifdef HAVE_NCCL
#include "kernels/cuda/nccl_calls.cuh"
#else
#include "kernels/cuda/cuda_common.cuh"
#endif

template <typename T, int W>
static __global__ void sum_shares_kernel(T *out, const T *shares, int ranks, int64_t count, bool accumulate) {
  int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
  if (i >= count) return;
  float sum[W], next[W];
  load(sum, shares + i);
  for (int r = 1; r < ranks; r++) {
    load(next, shares + r * count + i);
    EACH (k, W) sum[k] += next[k];
  }
  if (accumulate) {
    load(next, out + i);
    EACH (k, W) sum[k] = next[k] + to_float(from_float<T>(sum[k]));
  }
  store(out + i, sum);
}

// Short blocks all over the GPU: few long ones would hold up the CTAs of a GEMM that starts beside them.
void sum_shares(cudaStream_t stream, Tensor out, const void *shares, int ranks, bool accumulate) {
  int64_t count = tensor_count(out);
  Tensor all = tensor_2d(const_cast<void *>(shares), out.dtype, ranks, count);
  with_access(out.dtype, {out, all}, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int W = decltype(width)::value;
    launch_kernel({"the sum over ranks", stream, ceil_div(count, 256 * W), 256}, sum_shares_kernel<T, W>,
                  data_of<T>(out), data_of<T>(all), ranks, count, accumulate);
  });
}

#ifdef NCCL_CTA_POLICY_ZERO

static SharedBlock *block_of(CudaState *state, const void *data) {
  for (SharedBlock &b : state->shared)
    if (b.data && (uintptr_t)data - (uintptr_t)b.data < b.bytes) return &b;
  return nullptr;
}

// True if `yes` is true on all ranks.
static bool agreed(Backend *backend, bool yes) {
  float votes = yes;
  Tensor sum = tensor_1d(cuda_state(backend)->gemm_workspace, DTYPE_F32, 1);
  backend_to_device(backend, sum, &votes);
  all_reduce(backend, Collective{.out = sum, .x = sum});
  backend_to_host(backend, &votes, sum);
  return votes == (float)backend->ranks;
}

// All ranks allocate in one order. A block that one lacks is none: the others would wait to register theirs.
void *cuda_shared_allocate(Backend *backend, size_t bytes) {
  CudaState *state = cuda_state(backend);
  void *data = nullptr;
  for (SharedBlock &b : state->shared) {
    if (b.data) continue;
    if (!state->sharing) break;
    bool allocated = ncclMemAlloc(&data, bytes) == ncclSuccess;
    if (agreed(backend, allocated)) {
      b = {static_cast<char *>(data), bytes, nullptr};
      return data;
    }
    if (allocated) nccl_check(ncclMemFree(data), state->comm, "ncclMemFree");
    break;
  }
  return nullptr;
}

bool cuda_shared_release(Backend *backend, void *data) {
  CudaState *state = cuda_state(backend);
  SharedBlock *b = block_of(state, data);
  if (!b) return false;
  if (b->window) nccl_check(ncclCommWindowDeregister(state->comm, b->window), state->comm, "deregistering");
  nccl_check(ncclMemFree(data), state->comm, "ncclMemFree");
  *b = {};
  return true;
}

// True if copy engines reach the block. The first call, on all ranks together, registers blocks of one size.
// A window is device memory, unless NCCL cannot share any: then NULL or, before 2.29, on the host.
static bool reach(CudaState *state, SharedBlock *b) {
  cudaPointerAttributes window = {};
  if (!b || b->window) return b;
  nccl_check(ncclCommWindowRegister(state->comm, b->data, b->bytes, &b->window, NCCL_WIN_COLL_SYMMETRIC),
             state->comm, "ncclCommWindowRegister");
  if (b->window) cuda_check(cudaPointerGetAttributes(&window, b->window), "querying a window");
  return state->sharing = window.type == cudaMemoryTypeDevice;
}

static void gather(const CudaState *state, const void *x, void *out, int64_t count, Dtype dtype,
                   cudaStream_t stream) {
  nccl_check(ncclAllGather(x, out, (size_t)count, nccl_type(dtype), state->comm, stream), state->comm,
             "ncclAllGather");
}

// out (+)= the sum of all ranks' slice `rank` of x.
static void sum_slices(Backend *backend, Tensor out, const void *x, bool accumulate, cudaStream_t stream) {
  const CudaState *state = cuda_state(backend);
  nccl_check(
      ncclAlltoAll(x, state->shares, (size_t)tensor_count(out), nccl_type(out.dtype), state->comm, stream),
      state->comm, "ncclAlltoAll");
  sum_shares(stream, out, state->shares, backend->ranks, accumulate);
}

// Works in slices of whole 16-byte accesses; every rank sums the few elements left over itself.
static void sum_and_gather(Backend *backend, Tensor out, Tensor x, cudaStream_t stream) {
  const CudaState *state = cuda_state(backend);
  int64_t count = tensor_count(x), width = (int64_t)dtype_bytes(x.dtype), ranks = backend->ranks;
  int64_t step = 16 / width * ranks, whole = count / step * step, most = BUCKET_BYTES / width / step * step;
  for (int64_t at = 0, slice; at < whole; at += slice * ranks) {
    slice = min_i64(whole - at, most) / ranks;
    Tensor mine = tensor_rows(out, at + backend->rank * slice, slice);
    sum_slices(backend, mine, tensor_rows(x, at, slice * ranks).data, false, stream);
    gather(state, mine.data, tensor_rows(out, at, slice * ranks).data, slice, x.dtype, stream);
  }
  if (whole == count) return;
  Tensor rest = tensor_rows(out, whole, count - whole);
  gather(state, tensor_rows(x, whole, count - whole).data, state->shares, count - whole, x.dtype, stream);
  sum_shares(stream, rest, state->shares, backend->ranks, false);
}

bool by_copy_engines(Backend *backend, const Collective *a, cudaStream_t stream) {
  CudaState *state = cuda_state(backend);
  int64_t count = tensor_count(a->x), out_count = tensor_count(a->out);
  SharedBlock *x = block_of(state, a->x.data), *out = block_of(state, a->out.data);
  bool scatter = out_count < count;
  if (!state->sharing || (scatter ? tensor_bytes(a->x) > BUCKET_BYTES : !out)) return false;
  if (!reach(state, x) || (!scatter && !reach(state, out))) return false;
  if (scatter)
    sum_slices(backend, a->out, a->x.data, a->accumulate, stream);
  else if (out_count == count)
    sum_and_gather(backend, tensor_flat(a->out), tensor_flat(a->x), stream);
  else
    gather(state, a->x.data, a->out.data, count, a->x.dtype, stream);
  return true;
}

#else // no NCCL, or an older one

void *cuda_shared_allocate(Backend *backend, size_t bytes) {
  return nullptr;
}

bool cuda_shared_release(Backend *backend, void *data) {
  return false;
}

bool by_copy_engines(Backend *backend, const Collective *a, cudaStream_t stream) {
  return false;
}

#endif
