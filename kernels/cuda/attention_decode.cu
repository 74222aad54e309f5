// Attention of a few new tokens over cached keys and values. One kernel copies the new keys and values into
// the cache. In the second a block has one query of one head: its sixteen warps share the keys, each
// with a running maximum, sum and weighted values of its own, and at the end the warps' results are joined
// with their common maximum, in a fixed order. Bound by reading the cache: 2 P D elements for each query head.
#include "kernels/cuda/cuda_common.cuh"

namespace {

constexpr int WARPS = 16;

template <class Element> struct Arguments {
  Element *out, *keys, *values;
  const Element *qkv;
  int64_t out_stride, cache_stride, qkv_stride, past;
  int S, Q, K, D;
  float scale;
};

// Block: a new token. Thread: an element of its key and value heads.
template <class Element> __global__ void store_kernel(Arguments<Element> a) {
  int64_t n = blockIdx.x, b = n / a.S, position = a.past + n % a.S;
  const Element *key = a.qkv + n * a.qkv_stride + a.Q * a.D, *value = key + a.K * a.D;
  for (int i = threadIdx.x; i < a.K * a.D; i += blockDim.x) {
    int64_t to = (b * a.K + i / a.D) * a.cache_stride + position * a.D + i % a.D;
    a.keys[to] = key[i];
    a.values[to] = value[i];
  }
}

// Block: x a new token, y a query head. Shared: the query [D], each warp's weighted values [WARPS, D].
template <class Element> __global__ void attend_kernel(Arguments<Element> a) {
  extern __shared__ float shared[];
  __shared__ float maxima[WARPS], sums[WARPS];
  int h = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t n = blockIdx.x, b = n / a.S, count = a.past + n % a.S + 1, row = b * a.K + h / (a.Q / a.K);
  const Element *keys = a.keys + row * a.cache_stride, *values = a.values + row * a.cache_stride;
  float *query = shared, *weighted = shared + (1 + warp) * a.D;
  for (int d = threadIdx.x; d < a.D; d += blockDim.x)
    query[d] = a.scale * to_float(a.qkv[n * a.qkv_stride + h * a.D + d]);
  for (int d = lane; d < a.D; d += 32) weighted[d] = 0;
  __syncthreads();

  float largest = -INFINITY, total = 0;
  for (int64_t u = warp; u < count; u += WARPS) {
    float score = 0;
    for (int d = lane; d < a.D; d += 32) score += query[d] * to_float(keys[u * a.D + d]);
    score = warp_sum(score);
    float next = fmaxf(largest, score), rescale = expf(largest - next), p = expf(score - next);
    for (int d = lane; d < a.D; d += 32)
      weighted[d] = weighted[d] * rescale + p * to_float(values[u * a.D + d]);
    total = total * rescale + p;
    largest = next;
  }
  if (lane == 0) maxima[warp] = largest, sums[warp] = total;
  __syncthreads();

  float common = -INFINITY, sum = 0;
  for (int w = 0; w < WARPS; w++) common = fmaxf(common, maxima[w]);
  for (int w = 0; w < WARPS; w++) sum += sums[w] * expf(maxima[w] - common); // a warp without keys adds 0
  for (int d = threadIdx.x; d < a.D; d += blockDim.x) {
    float out = 0;
    for (int w = 0; w < WARPS; w++) out += shared[(1 + w) * a.D + d] * expf(maxima[w] - common);
    a.out[n * a.out_stride + h * a.D + d] = from_float<Element>(out / sum);
  }
}

template <class Element> void decode(const AttentionDecode *d, cudaStream_t stream) {
  AttentionShape s = d->shape;
  Arguments<Element> a = {};
  a.out = data_of<Element>(d->out), a.out_stride = d->out.stride;
  a.keys = data_of<Element>(d->keys), a.values = data_of<Element>(d->values), a.cache_stride = d->keys.stride;
  a.qkv = data_of<const Element>(d->qkv), a.qkv_stride = d->qkv.stride;
  a.past = d->past;
  a.S = (int)s.seq_len, a.Q = (int)s.num_heads, a.K = (int)s.num_key_value_heads, a.D = (int)s.head_dim;
  a.scale = 1 / sqrtf((float)s.head_dim);
  unsigned tokens = (unsigned)(s.batch * s.seq_len);
  store_kernel<<<tokens, row_threads(a.K * a.D, 256), 0, stream>>>(a);
  attend_kernel<<<dim3(tokens, (unsigned)a.Q), WARPS * 32, (1 + WARPS) * a.D * sizeof(float), stream>>>(a);
}

} // namespace

void cuda_attention_decode(Backend *backend, const AttentionDecode *a) {
  if (a->shape.head_dim > 512)
    fail("attention_decode: head_dim %lld is beyond what the CUDA backend takes, 512",
         (long long)a->shape.head_dim);
  with_float(a->qkv.dtype, [=](auto type) { decode<decltype(type)>(a, cuda_stream(backend)); });
  cuda_check_launch("attention_decode");
}
