// Attention for heads of up to 256, in fp32 or bf16, straight from the formulas, and decoding over a cache.
//
// In the forward pass and in decoding a block takes one query of one head: its warps share the keys, each
// with a running maximum, sum and weighted values, which are joined at the end in a fixed order. Decoding is
// bound by reading the cache: 2 P D elements for each query head. In the backward pass one warp takes one
// query, for dq, or one key, for dk and dv, and walks over the queries of every head of its group. Written
// for correctness (--dtype fp32, unusual heads), not for speed.
#include "kernels/cuda/attention_documents.cuh"
#include "kernels/cuda/attention_kernels.h"

using attention::Documents, attention::documents_of;

namespace {

constexpr int WARPS = 4, DECODE_WARPS = 16, MAX_PER_LANE = 256 / 32; // elements of a head that one lane holds

// Head `h` of the packed row n.
template <class Element> __device__ Element *head_of(const Tensor &t, int64_t n, int64_t h, int64_t D) {
  return data_of<Element>(t) + n * t.stride + h * D;
}

// --- one query over many keys ------------------------------------------------------------------------------

// Key and value u, in [first, end), lie at u * stride.
template <class Element> struct Query {
  Element *out;
  const Element *query, *keys, *values;
  int64_t stride, first, end;
  int D;
  float *lse; // or NULL
};

// Shared: the query [D], each warp's weighted values [warps, D].
template <class Element> __device__ void attend(const Query<Element> &a) {
  extern __shared__ float shared[];
  __shared__ float maxima[DECODE_WARPS], sums[DECODE_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, D = a.D;
  const float scale = 1 / sqrtf((float)D);
  float *query = shared, *weighted = shared + (1 + warp) * D;
  for (int d = threadIdx.x; d < D; d += blockDim.x) query[d] = scale * to_float(a.query[d]);
  for (int d = lane; d < D; d += 32) weighted[d] = 0;
  __syncthreads();

  float largest = -INFINITY, total = 0;
  for (int64_t u = a.first + warp; u < a.end; u += warps) {
    const Element *key = a.keys + u * a.stride, *value = a.values + u * a.stride;
    float score = 0;
    for (int d = lane; d < D; d += 32) score += query[d] * to_float(key[d]);
    score = warp_sum(score);
    float next = fmaxf(largest, score), rescale = expf(largest - next), p = expf(score - next);
    for (int d = lane; d < D; d += 32) weighted[d] = weighted[d] * rescale + p * to_float(value[d]);
    total = total * rescale + p;
    largest = next;
  }
  if (lane == 0) maxima[warp] = largest, sums[warp] = total;
  __syncthreads();

  float common = -INFINITY, sum = 0;
  for (int w = 0; w < warps; w++) common = fmaxf(common, maxima[w]);
  for (int w = 0; w < warps; w++) sum += sums[w] * expf(maxima[w] - common); // a warp without keys adds 0
  for (int d = threadIdx.x; d < D; d += blockDim.x) {
    float out = 0;
    for (int w = 0; w < warps; w++) out += shared[(1 + w) * D + d] * expf(maxima[w] - common);
    a.out[d] = from_float<Element>(out / sum);
  }
  if (a.lse && threadIdx.x == 0) *a.lse = common + logf(sum);
}

// Block: x a token, y a query head.
template <class Element> __global__ void forward_kernel(const __grid_constant__ AttentionForward a) {
  const AttentionShape &s = a.shape;
  int64_t n = blockIdx.x, h = blockIdx.y, T = s.seq_len, t = n % T, first = n - t;
  int64_t key = s.num_heads + h / (s.num_heads / s.num_key_value_heads);
  attend<Element>({.out = head_of<Element>(a.out, n, h, s.head_dim),
                   .query = head_of<Element>(a.qkv, n, h, s.head_dim),
                   .keys = head_of<Element>(a.qkv, first, key, s.head_dim),
                   .values = head_of<Element>(a.qkv, first, key + s.num_key_value_heads, s.head_dim),
                   .stride = a.qkv.stride,
                   .first = documents_of(a.documents).start(first, t),
                   .end = t + 1,
                   .D = (int)s.head_dim,
                   .lse = data_of<float>(a.lse) + n / T * a.lse.stride + h * T + t});
}

template <class Element> __global__ void decode_kernel(const __grid_constant__ AttentionDecode a) {
  const AttentionShape &s = a.shape;
  int64_t n = blockIdx.x, h = blockIdx.y;
  int64_t row = n / s.seq_len * s.num_key_value_heads + h / (s.num_heads / s.num_key_value_heads);
  attend<Element>({.out = head_of<Element>(a.out, n, h, s.head_dim),
                   .query = head_of<Element>(a.qkv, n, h, s.head_dim),
                   .keys = head_of<Element>(a.keys, row, 0, s.head_dim),
                   .values = head_of<Element>(a.values, row, 0, s.head_dim),
                   .stride = s.head_dim,
                   .end = a.past + n % s.seq_len + 1,
                   .D = (int)s.head_dim});
}

// Block: a new token. Thread: an element of its key and value heads, which go into the cache.
template <class Element> __global__ void store_kernel(const __grid_constant__ AttentionDecode a) {
  const AttentionShape &s = a.shape;
  int64_t n = blockIdx.x, K = s.num_key_value_heads, D = s.head_dim;
  const Element *key = head_of<Element>(a.qkv, n, s.num_heads, D);
  for (int64_t i = threadIdx.x; i < K * D; i += blockDim.x) {
    int64_t row = n / s.seq_len * K + i / D, position = a.past + n % s.seq_len;
    head_of<Element>(a.keys, row, position, D)[i % D] = key[i];
    head_of<Element>(a.values, row, position, D)[i % D] = key[K * D + i];
  }
}

// --- the backward pass -------------------------------------------------------------------------------------

// One head of one token, over the warp's lanes: lane l holds elements l, l + 32, ...
struct Row {
  float x[MAX_PER_LANE];

  template <class Element> __device__ void read(const Element *row, int64_t D) {
    EACH (i, MAX_PER_LANE) {
      int d = i * 32 + threadIdx.x % 32;
      x[i] = d < D ? to_float(row[d]) : 0;
    }
  }
  template <class Element> __device__ void write(Element *row, int64_t D, float factor) const {
    EACH (i, MAX_PER_LANE) {
      int d = i * 32 + threadIdx.x % 32;
      if (d < D) row[d] = from_float<Element>(x[i] * factor);
    }
  }
  __device__ void add(float factor, const Row &other) {
    EACH (i, MAX_PER_LANE) x[i] += factor * other.x[i];
  }
  __device__ float dot(const Row &other) const {
    float sum = 0;
    EACH (i, MAX_PER_LANE) sum += x[i] * other.x[i];
    return warp_sum(sum);
  }
};

// Finds the warp's head and token among heads * B * T of them; false beyond the end.
__device__ bool place(AttentionShape s, int64_t heads, int64_t &head, int64_t &batch, int64_t &t) {
  int64_t index = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
  t = index % s.seq_len;
  head = index / s.seq_len % heads;
  batch = index / s.seq_len / heads;
  return batch < s.batch;
}

// Writes delta, [B, Q, T], to the workspace.
template <class Element> __global__ void delta_kernel(const __grid_constant__ AttentionBackward a) {
  const AttentionShape &s = a.shape;
  int64_t h, b, t;
  if (!place(s, s.num_heads, h, b, t)) return;
  Row out, dout;
  out.read(head_of<Element>(a.out, b * s.seq_len + t, h, s.head_dim), s.head_dim);
  dout.read(head_of<Element>(a.dout, b * s.seq_len + t, h, s.head_dim), s.head_dim);
  float sum = out.dot(dout);
  if (threadIdx.x % 32 == 0) data_of<float>(a.workspace)[(b * s.num_heads + h) * s.seq_len + t] = sum;
}

// Sums over one query's keys or, if KEYS, over one key's queries in every head of its group.
template <class Element, bool KEYS>
__global__ void gradient_kernel(const __grid_constant__ AttentionBackward a) {
  const AttentionShape &s = a.shape;
  const int64_t T = s.seq_len, Q = s.num_heads, K = s.num_key_value_heads, D = s.head_dim, group = Q / K;
  const float scale = 1 / sqrtf((float)D);
  int64_t head, b, own;
  if (!place(s, KEYS ? K : Q, head, b, own)) return;
  const Documents documents = documents_of(a.documents);
  const int64_t key_head = Q + (KEYS ? head : head / group), first = b * T;
  Row q, k, v, dout, dq_or_dk = {}, dv = {};
  auto read_query = [&](int64_t t, int64_t h) {
    q.read(head_of<Element>(a.qkv, first + t, h, D), D);
    dout.read(head_of<Element>(a.dout, first + t, h, D), D);
  };
  auto read_key = [&](int64_t u) {
    k.read(head_of<Element>(a.qkv, first + u, key_head, D), D);
    v.read(head_of<Element>(a.qkv, first + u, key_head + K, D), D);
  };
  auto add = [&](int64_t t, int64_t h) {
    float p = expf(scale * q.dot(k) - data_of<float>(a.lse)[b * a.lse.stride + h * T + t]);
    float ds = p * (dout.dot(v) - data_of<float>(a.workspace)[(b * Q + h) * T + t]);
    dq_or_dk.add(ds, KEYS ? q : k);
    if (KEYS) dv.add(p, dout);
  };
  if (KEYS) {
    read_key(own);
    for (int64_t h = head * group; h < (head + 1) * group; h++)
      for (int64_t t = own, end = documents.end(first, own, T); t < end; t++) read_query(t, h), add(t, h);
    dv.write(head_of<Element>(a.dqkv, first + own, key_head + K, D), D, 1);
  } else {
    read_query(own, head);
    for (int64_t u = documents.start(first, own); u <= own; u++) read_key(u), add(own, head);
  }
  dq_or_dk.write(head_of<Element>(a.dqkv, first + own, KEYS ? key_head : head, D), D, scale);
}

void check_head(const char *op, AttentionShape s, int64_t largest) {
  if (s.head_dim > largest)
    fail("%s: head_dim %lld is beyond what the CUDA backend takes, %lld", op, (long long)s.head_dim,
         (long long)largest);
}

// One block for each query of each head.
template <class Operation>
void launch_queries(const char *op, void (*kernel)(Operation), const Operation *a, int warps,
                    cudaStream_t stream) {
  Grid grid(a->shape.batch * a->shape.seq_len, a->shape.num_heads);
  size_t shared_bytes = (1 + warps) * a->shape.head_dim * sizeof(float);
  launch_kernel({op, stream, grid, warps * 32, false, shared_bytes}, kernel, *a);
}

} // namespace

void attention_generic_forward(const AttentionForward *a, cudaStream_t stream) {
  check_head("attention_forward", a->shape, 256);
  with_float(a->qkv.dtype, [=](auto type) {
    launch_queries("attention_forward", forward_kernel<decltype(type)>, a, WARPS, stream);
  });
}

void attention_generic_backward(const AttentionBackward *a, cudaStream_t stream) {
  check_head("attention_backward", a->shape, MAX_PER_LANE * 32);
  with_float(a->qkv.dtype, [=](auto type) {
    using Element = decltype(type);
    auto launch = [=](auto *kernel, int64_t heads) {
      int64_t blocks = ceil_div(a->shape.batch * heads * a->shape.seq_len, WARPS);
      launch_kernel({"attention_backward", stream, blocks, WARPS * 32}, kernel, *a);
    };
    launch(delta_kernel<Element>, a->shape.num_heads);
    launch(gradient_kernel<Element, true>, a->shape.num_key_value_heads);
    launch(gradient_kernel<Element, false>, a->shape.num_heads);
  });
}

void cuda_attention_decode(Backend *backend, const AttentionDecode *a) {
  check_head("attention_decode", a->shape, 512);
  cudaStream_t stream = cuda_stream(backend);
  with_float(a->qkv.dtype, [=](auto type) {
    using Element = decltype(type);
    launch_kernel(per_row(backend, "attention_decode", a->shape.batch * a->shape.seq_len,
                          a->shape.num_key_value_heads * a->shape.head_dim),
                  store_kernel<Element>, *a);
    launch_queries("attention_decode", decode_kernel<Element>, a, DECODE_WARPS, stream);
  });
}
