// The materialized mode's classifier: logits become their own gradient in place, as in llm.c.
//
// One block of 1024 threads owns a row and reads it twice: once for the maximum and the sum of exponentials,
// kept together and rescaled when the maximum grows, then backwards for the gradient. A row of 128,256 bf16
// logits is 256 KB, and one block on each of 132 multiprocessors holds 34 MB of rows at a time, which the L2
// cache keeps: device memory is read once and written once. Measured on an H200, counting those bytes: 3.1
// TB/s at a vocabulary of 50,304, 2.9 at 128,256; two exponentials a logit keep it from more.
#include <float.h>

#include "kernels/cuda/cuda_common.cuh"

// The sum of exp(z - max) over what was seen so far. It starts at the lowest finite number, so that a logit
// of minus infinity counts as 0 and only NaN gives NaN.
struct Softmax {
  float max = -FLT_MAX, sum = 0;
};

static __device__ __forceinline__ Softmax join(Softmax a, Softmax b) {
  float most = fmaxf(a.max, b.max);
  return {most, a.sum * __expf(a.max - most) + b.sum * __expf(b.max - most)};
}

static __device__ __forceinline__ Softmax warp_join(Softmax s) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2)
    s = join(s, Softmax{__shfl_xor_sync(~0u, s.max, offset), __shfl_xor_sync(~0u, s.sum, offset)});
  return s;
}

template <typename T, int W>
static __global__ void __launch_bounds__(1024, 1)
    cross_entropy_kernel(float *loss, T *logits, int64_t stride, const int32_t *targets, int vocab_size,
                         float alpha, bool forward_only) {
  __shared__ Softmax of_warp[32];
  int64_t row = blockIdx.x;
  int target = targets[row], step = blockDim.x * W, first = threadIdx.x * W;
  int body = vocab_size / W * W, tail = body + threadIdx.x; // whole groups, then one element for each thread
  logits += row * stride;
  if (target == IGNORE_INDEX) {
    float zero[W] = {};
    if (threadIdx.x == 0) loss[row] = 0;
    if (forward_only) return;
    for (int i = first; i < body; i += step) store(logits + i, zero);
    if (tail < vocab_size) logits[tail] = from_float<T>(0);
    return;
  }
  float target_logit = to_float(logits[target]); // before anybody writes

  Softmax s;
  int last = first;
#pragma unroll 4
  for (int i = first; i < body; i += step) {
    float z[W], most = s.max, sum = 0;
    load(z, logits + i);
#pragma unroll
    for (int k = 0; k < W; k++) most = fmaxf(most, z[k]);
#pragma unroll
    for (int k = 0; k < W; k++) sum += __expf(z[k] - most);
    s.sum = s.sum * __expf(s.max - most) + sum;
    s.max = most;
    last = i;
  }
  if (tail < vocab_size) {
    float z = to_float(logits[tail]), most = fmaxf(s.max, z);
    s.sum = s.sum * __expf(s.max - most) + __expf(z - most);
    s.max = most;
  }
  s = warp_join(s);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = s;
  __syncthreads();
  s = Softmax();
  if (threadIdx.x % 32 < blockDim.x / 32) s = of_warp[threadIdx.x % 32];
  s = warp_join(s);
  if (threadIdx.x == 0) loss[row] = logf(s.sum) + s.max - target_logit;
  if (forward_only) return;

  float scale = alpha / s.sum;
  auto gradient = [&](float z, int i) { return __expf(z - s.max) * scale - (i == target ? alpha : 0); };
  if (tail < vocab_size) logits[tail] = from_float<T>(gradient(to_float(logits[tail]), tail));
  if (first >= body) return;
#pragma unroll 4
  for (int i = last; i >= 0; i -= step) {
    float z[W];
    load(z, logits + i);
#pragma unroll
    for (int k = 0; k < W; k++) z[k] = gradient(z[k], i + k);
    store(logits + i, z);
  }
}

void cuda_cross_entropy_in_place(Backend *backend, const CrossEntropyInPlace *a) {
  int64_t rows = a->logits.shape[0], vocab_size = a->logits.shape[1];
  if (rows == 0) return;
  with_real(a->logits.dtype, [&](auto type) {
    using T = decltype(type);
    with_bool(rows_start_aligned(a->logits, WIDTH<T>), [&](auto wide) {
      constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
      cross_entropy_kernel<T, W>
          <<<(unsigned)rows, row_threads(cuda_ceil_div(vocab_size, W), 1024), 0, cuda_stream(backend)>>>(
              data_of<float>(a->loss), data_of<T>(a->logits), a->logits.stride, data_of<int32_t>(a->targets),
              (int)vocab_size, a->alpha, a->forward_only);
    });
  });
  cuda_check_launch("cross_entropy_in_place");
}
