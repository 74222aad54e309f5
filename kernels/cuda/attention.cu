// Attention: chooses among the kernels of attention_kernels.h, and prepares their backward passes.
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"

// delta[b, h, t] = sum_d dout * out, next to the lse of the forward pass (attention_mma.cuh says where). A
// warp takes 32 tokens of one head, D/8 lanes per row; then each lane has one token's sum. Traffic: dout and
// out once.
namespace attention {

template <int D>
static __global__ void __launch_bounds__(256)
    statistics_kernel(const __grid_constant__ AttentionBackward a, int *counters, int tiles, int64_t warps) {
  constexpr int LANES = D / 8, AT_ONCE = 32 / LANES;
  if (blockIdx.x == 0 && threadIdx.x < ATTENTION_COUNTERS) counters[threadIdx.x] = 0;
  int64_t index = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
  if (index >= warps) return;
  const int num_heads = (int)a.shape.num_heads, seq_len = (int)a.shape.seq_len;
  int head = (int)(index % num_heads), part = threadIdx.x % LANES, first = threadIdx.x % 32 / LANES;
  int64_t tile = index / num_heads % tiles, batch = index / num_heads / tiles;
  float sum[LANES];
  EACH (i, LANES) {
    int64_t n = batch * seq_len + min(tile * 32 + i * AT_ONCE + first, (int64_t)seq_len - 1);
    float x[8], y[8];
    load(x, data_of<const bf16>(a.dout) + n * a.dout.stride + head * D + part * 8);
    load(y, data_of<const bf16>(a.out) + n * a.out.stride + head * D + part * 8);
    sum[i] = 0;
    EACH (k, 8) sum[i] += x[k] * y[k];
  }
  // Each step halves the rows that a lane adds up, until sum[0] is row `part`'s.
#pragma unroll
  for (int half = LANES / 2; half > 0; half /= 2) add_halves(sum, half, half);
  int64_t t = tile * 32 + part * AT_ONCE + first;
  float *place = data_of<float>(a.workspace) + (batch * num_heads + head) * tiles * 64 + statistics_place(t);
  const float *lse = data_of<const float>(a.lse) + batch * a.lse.stride + (int64_t)head * seq_len;
  place[0] = t < seq_len ? lse[t] * -LOG2_E : 0;
  place[STATISTICS_TILE] = t < seq_len ? -sum[0] : 0;
}

} // namespace attention

void attention_statistics(const AttentionBackward *a, int *counters, cudaStream_t stream) {
  // The padding up to whole tiles is written too.
  int64_t tiles = ceil_div(a->shape.seq_len, attention::STATISTICS_TILE) * (attention::STATISTICS_TILE / 32);
  int64_t warps = a->shape.batch * tiles * a->shape.num_heads;
  launch_kernel({"attention_backward", stream, ceil_div(warps, 8), 256},
                a->shape.head_dim == 64 ? attention::statistics_kernel<64>
                                        : attention::statistics_kernel<128>,
                *a, counters, (int)tiles, warps);
}

// True if the tensor-core kernels support this shape.
static bool takes(AttentionShape s, Tensor qkv, Tensor out) {
  return qkv.dtype == DTYPE_BF16 && (s.head_dim == 64 || s.head_dim == 128) && rows_align({qkv, out}, 8);
}

void cuda_attention_forward(Backend *backend, const AttentionForward *a) {
  cudaStream_t stream = cuda_stream(backend);
  if (!takes(a->shape, a->qkv, a->out))
    attention_generic_forward(a, stream);
  else if (!attention_hopper_forward(backend, a, data_of<int>(a->workspace)))
    attention_tensor_core_forward(a, stream);
}

void cuda_attention_backward(Backend *backend, const AttentionBackward *a) {
  cudaStream_t stream = cuda_stream(backend);
  char *after = data_of<char>(a->workspace) + cuda_attention_statistics_bytes(a->shape);
  float *partials = tensor_exists(a->dbias) ? reinterpret_cast<float *>(after + MEMORY_ALIGNMENT) : nullptr;
  bool summed = false;
  if (takes(a->shape, a->qkv, a->out) && rows_align({a->dout, a->dqkv}, 8)) {
    int *counters = reinterpret_cast<int *>(after);
    attention_statistics(a, counters, stream);
    summed = attention_hopper_backward(backend, a, counters, partials);
    if (!summed) attention_tensor_core_backward(a, stream);
  } else {
    attention_generic_backward(a, stream);
  }
  if (summed && partials)
    add_partials(backend, {a->dbias}, partials, cuda_attention_slices(a->shape), a->dqkv.shape[1], 1,
                 a->accumulate);
  else if (partials)
    column_sums(backend, a->dbias, a->dqkv, nullptr, 1, a->accumulate, partials);
}
