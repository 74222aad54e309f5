// Rotary positions, in place on the q and k heads of the packed rows: one block a token, whose angles it
// reads once for all heads. Traffic: q and k read and written once (measured on an H200: 3.8 TB/s).
#include "kernels/cuda/cuda_common.cuh"

template <typename T, int W>
static __global__ void rope_kernel(T *qkv, int64_t stride, const float *cos_sin, int64_t table_stride,
                                   const int32_t *positions, int seq_len, int heads, int half, float sign) {
  int64_t row = blockIdx.x;
  const float *angles = cos_sin + (positions ? positions[row] : row % seq_len) * table_stride;
  int groups = half / W;
  for (int i = threadIdx.x; i < heads * groups; i += blockDim.x) {
    int at = i % groups * W;
    T *head = qkv + row * stride + (int64_t)(i / groups) * 2 * half;
    float lower[W], upper[W], cosine[W], sine[W];
    load(lower, head + at);
    load(upper, head + half + at);
    load(cosine, angles + at);
    load(sine, angles + half + at);
    EACH (k, W) {
      float s = sign * sine[k], x = lower[k];
      lower[k] = x * cosine[k] - upper[k] * s;
      upper[k] = upper[k] * cosine[k] + x * s;
    }
    store(head + at, lower);
    store(head + half + at, upper);
  }
}

void cuda_rope(Backend *backend, const Rope *a) {
  int64_t rows = a->qkv.shape[0];
  int half = (int)a->shape.head_dim / 2, heads = (int)(a->shape.num_heads + a->shape.num_key_value_heads);
  with_float(a->qkv.dtype, [&](auto type) {
    using T = decltype(type);
    bool aligned = half % WIDTH<T> == 0 && rows_align({a->qkv, a->cos_sin}, WIDTH<T>);
    with_width<T>(aligned, [&](auto W) {
      launch_kernel(per_row(backend, "rope", rows, heads * half / W), rope_kernel<T, W>, data_of<T>(a->qkv),
                    a->qkv.stride, data_of<float>(a->cos_sin), a->cos_sin.stride,
                    data_of<int32_t>(a->positions), (int)a->shape.seq_len, heads, half,
                    a->inverse ? -1.0f : 1.0f);
    });
  });
}
