// Attention: chooses among the kernels of attention_kernels.h; and the table that the tensor-core backward passes read.
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"

// delta[b, h, t] = sum_d dout * out, next to the lse of the forward pass (attention_mma.cuh says where). D/8 lanes per
// row of one head. Memory traffic: dout and out once, 8 bytes per query and head.
namespace attention {

template <int D>
static __global__ void statistics_kernel(float *statistics, int *counters, const bf16 *dout, const bf16 *out,
                                         const float *lse, int64_t dout_stride, int64_t out_stride,
                                         int64_t lse_stride, int num_heads, int seq_len, int64_t padded_len,
                                         int64_t rows) {
  constexpr int LANES = D / 8;
  if (blockIdx.x == 0 && threadIdx.x < ATTENTION_COUNTERS) counters[threadIdx.x] = 0;
  // Rows run over [B, padded_len, Q]: the padding is written too.
  int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / LANES;
  int part = threadIdx.x % LANES, head = (int)(row % num_heads);
  int64_t t = row / num_heads % padded_len, batch = row / num_heads / padded_len, n = batch * seq_len + t;
  bool inside = row < rows && t < seq_len;
  float sum = 0;
  if (inside) {
    float x[8], y[8];
    load(x, dout + n * dout_stride + head * D + part * 8);
    load(y, out + n * out_stride + head * D + part * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x[i] * y[i];
  }
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (row < rows && part == 0) {
    float *place = statistics + (batch * num_heads + head) * padded_len * 2 + statistics_place(t);
    place[0] = inside ? lse[batch * lse_stride + (int64_t)head * seq_len + t] * -LOG2_E : 0;
    place[STATISTICS_TILE] = inside ? -sum : 0;
  }
}

} // namespace attention

void attention_statistics(const AttentionBackward *a, float *statistics, int *counters, cudaStream_t stream) {
  AttentionShape s = a->shape;
  int64_t padded_len = ceil_div(s.seq_len, attention::STATISTICS_TILE) * attention::STATISTICS_TILE;
  int64_t rows = s.batch * padded_len * s.num_heads;
  unsigned blocks = (unsigned)ceil_div(rows * (s.head_dim / 8), 256);
  (s.head_dim == 64 ? attention::statistics_kernel<64>
                    : attention::statistics_kernel<128>)<<<blocks, 256, 0, stream>>>(
      statistics, counters, data_of<const bf16>(a->dout), data_of<const bf16>(a->out),
      data_of<const float>(a->lse), a->dout.stride, a->out.stride, a->lse.stride, (int)s.num_heads,
      (int)s.seq_len, padded_len, rows);
  cuda_check_launch("attention_backward");
}

// Whether the tensor-core kernels take this shape.
static bool takes(AttentionShape s, Tensor qkv, Tensor out) {
  return qkv.dtype == DTYPE_BF16 && (s.head_dim == 64 || s.head_dim == 128) && rows_align(qkv, 8) &&
         rows_align(out, 8);
}

void cuda_attention_forward(Backend *backend, const AttentionForward *a) {
  cudaStream_t stream = cuda_stream(backend);
  if (!takes(a->shape, a->qkv, a->out))
    attention_generic_forward(a, stream);
  else if (!attention_hopper_forward(a, data_of<int>(a->workspace), stream))
    attention_tensor_core_forward(a, stream);
}

void cuda_attention_backward(Backend *backend, const AttentionBackward *a) {
  cudaStream_t stream = cuda_stream(backend);
  float *statistics = data_of<float>(a->workspace);
  if (takes(a->shape, a->qkv, a->out) && rows_align(a->dout, 8) && rows_align(a->dqkv, 8)) {
    size_t offset = cuda_attention_statistics_bytes(a->shape);
    int *counters = reinterpret_cast<int *>(data_of<char>(a->workspace) + offset);
    attention_statistics(a, statistics, counters, stream);
    if (!attention_hopper_backward(a, statistics, counters, stream))
      attention_tensor_core_backward(a, statistics, stream);
  } else {
    attention_generic_backward(a, statistics, stream);
  }
}
