// Attention for every head size up to 256, in fp32 or bf16: one warp per row, the formulas as they stand.
//
// The warp's lanes share the head's D elements; a score is a dot product and a warp-wide sum. The forward
// pass keeps a running maximum and sum as the tensor-core kernel does, the backward pass has one warp per
// query for dq and one warp per key for dk and dv, which walks over the queries of every head of its group.
// Made for correctness (--dtype fp32, unusual heads), not for speed: each key is read again for every query.
#include "kernels/cuda/attention_documents.cuh"
#include "kernels/cuda/attention_kernels.h"

using attention::Documents, attention::documents_of;

namespace {

constexpr int WARPS = 4, MAX_PER_LANE = 256 / 32; // elements of a head that one lane holds

// One head of one token, over the warp's lanes: lane l holds elements l, l + 32, ...
struct Row {
  float x[MAX_PER_LANE];

  template <class Element> __device__ void read(const Element *row, int D) {
    EACH (i, MAX_PER_LANE) {
      int d = i * 32 + threadIdx.x % 32;
      x[i] = d < D ? to_float(row[d]) : 0;
    }
  }
  template <class Element> __device__ void write(Element *row, int D, float factor) const {
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

// Where things lie. A member that an operation has no use for is NULL.
template <class Element> struct Arguments {
  const Element *qkv, *dout, *out;
  Element *result, *dqkv; // out of the forward pass; dqkv of the backward pass
  float *lse, *delta;
  Documents documents;
  int64_t qkv_stride, out_stride, dout_stride, dqkv_stride, lse_stride;
  int64_t T;
  int Q, K, D, batch;
  float scale;

  __device__ const Element *query(int64_t n, int h) const { return qkv + n * qkv_stride + h * D; }
  __device__ const Element *key(int64_t n, int kv) const { return qkv + n * qkv_stride + (Q + kv) * D; }
  __device__ const Element *value(int64_t n, int kv) const { return qkv + n * qkv_stride + (Q + K + kv) * D; }
};

// The warp's place among heads * B * T of them: a head and a token. False beyond the end.
template <class Element>
__device__ bool place(const Arguments<Element> &a, int heads, int &head, int64_t &batch, int64_t &t) {
  int64_t index = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
  t = index % a.T;
  head = (int)(index / a.T % heads);
  batch = index / a.T / heads;
  return batch < a.batch;
}

template <class Element> __global__ void forward_kernel(Arguments<Element> a) {
  int h;
  int64_t b, t;
  if (!place(a, a.Q, h, b, t)) return;
  int kv = h / (a.Q / a.K);
  Row q, k, v, sums = {};
  q.read(a.query(b * a.T + t, h), a.D);
  float largest = -INFINITY, total = 0;
  for (int64_t u = a.documents.start(b * a.T, t); u <= t; u++) {
    k.read(a.key(b * a.T + u, kv), a.D);
    v.read(a.value(b * a.T + u, kv), a.D);
    float score = a.scale * q.dot(k), next = fmaxf(largest, score);
    float rescale = expf(largest - next), p = expf(score - next);
    for (float &x : sums.x) x *= rescale;
    sums.add(p, v);
    total = total * rescale + p;
    largest = next;
  }
  sums.write(a.result + (b * a.T + t) * a.out_stride + h * a.D, a.D, 1 / total);
  if (threadIdx.x % 32 == 0) a.lse[b * a.lse_stride + h * a.T + t] = largest + logf(total);
}

template <class Element> __global__ void delta_kernel(Arguments<Element> a) {
  int h;
  int64_t b, t;
  if (!place(a, a.Q, h, b, t)) return;
  Row out, dout;
  out.read(a.out + (b * a.T + t) * a.out_stride + h * a.D, a.D);
  dout.read(a.dout + (b * a.T + t) * a.dout_stride + h * a.D, a.D);
  float sum = out.dot(dout);
  if (threadIdx.x % 32 == 0) a.delta[(b * a.Q + h) * a.T + t] = sum;
}

template <class Element> __global__ void query_kernel(Arguments<Element> a) {
  int h;
  int64_t b, t;
  if (!place(a, a.Q, h, b, t)) return;
  int kv = h / (a.Q / a.K);
  Row q, k, v, dout, dq = {};
  q.read(a.query(b * a.T + t, h), a.D);
  dout.read(a.dout + (b * a.T + t) * a.dout_stride + h * a.D, a.D);
  float lse = a.lse[b * a.lse_stride + h * a.T + t], delta = a.delta[(b * a.Q + h) * a.T + t];
  for (int64_t u = a.documents.start(b * a.T, t); u <= t; u++) {
    k.read(a.key(b * a.T + u, kv), a.D);
    v.read(a.value(b * a.T + u, kv), a.D);
    float p = expf(a.scale * q.dot(k) - lse);
    dq.add(p * (dout.dot(v) - delta), k);
  }
  dq.write(a.dqkv + (b * a.T + t) * a.dqkv_stride + h * a.D, a.D, a.scale);
}

template <class Element> __global__ void key_kernel(Arguments<Element> a) {
  int kv;
  int64_t b, u;
  if (!place(a, a.K, kv, b, u)) return;
  int group = a.Q / a.K;
  int64_t end = a.documents.end(b * a.T, u, a.T);
  Row q, k, v, dout, dk = {}, dv = {};
  k.read(a.key(b * a.T + u, kv), a.D);
  v.read(a.value(b * a.T + u, kv), a.D);
  for (int h = kv * group; h < (kv + 1) * group; h++)
    for (int64_t t = u; t < end; t++) {
      q.read(a.query(b * a.T + t, h), a.D);
      dout.read(a.dout + (b * a.T + t) * a.dout_stride + h * a.D, a.D);
      float p = expf(a.scale * q.dot(k) - a.lse[b * a.lse_stride + h * a.T + t]);
      dv.add(p, dout);
      dk.add(p * (dout.dot(v) - a.delta[(b * a.Q + h) * a.T + t]), q);
    }
  Element *row = a.dqkv + (b * a.T + u) * a.dqkv_stride + (a.Q + kv) * a.D;
  dk.write(row, a.D, a.scale);
  dv.write(row + a.K * a.D, a.D, 1);
}

template <class Element>
Arguments<Element> arguments(AttentionShape s, Tensor qkv, Tensor lse, Tensor documents) {
  Arguments<Element> a = {};
  a.qkv = data_of<const Element>(qkv);
  a.qkv_stride = qkv.stride;
  a.lse = data_of<float>(lse);
  a.lse_stride = lse.stride;
  a.documents = documents_of(documents, s);
  a.T = s.seq_len;
  a.Q = (int)s.num_heads;
  a.K = (int)s.num_key_value_heads;
  a.D = (int)s.head_dim;
  a.batch = (int)s.batch;
  a.scale = 1 / sqrtf((float)s.head_dim);
  return a;
}

template <class Element> unsigned blocks(const Arguments<Element> &a, int heads) {
  return (unsigned)((a.batch * heads * a.T + WARPS - 1) / WARPS);
}

template <class Element> void forward(const AttentionForward *f, cudaStream_t stream) {
  Arguments<Element> a = arguments<Element>(f->shape, f->qkv, f->lse, f->documents);
  a.result = data_of<Element>(f->out);
  a.out_stride = f->out.stride;
  forward_kernel<<<blocks(a, a.Q), WARPS * 32, 0, stream>>>(a);
}

template <class Element> void backward(const AttentionBackward *g, float *delta, cudaStream_t stream) {
  Arguments<Element> a = arguments<Element>(g->shape, g->qkv, g->lse, g->documents);
  a.out = data_of<const Element>(g->out);
  a.out_stride = g->out.stride;
  a.dout = data_of<const Element>(g->dout);
  a.dout_stride = g->dout.stride;
  a.dqkv = data_of<Element>(g->dqkv);
  a.dqkv_stride = g->dqkv.stride;
  a.delta = delta;
  delta_kernel<<<blocks(a, a.Q), WARPS * 32, 0, stream>>>(a);
  key_kernel<<<blocks(a, a.K), WARPS * 32, 0, stream>>>(a);
  query_kernel<<<blocks(a, a.Q), WARPS * 32, 0, stream>>>(a);
}

void check_head(const char *op, AttentionShape s) {
  if (s.head_dim > MAX_PER_LANE * 32)
    fail("%s: head_dim %lld is beyond what the CUDA backend takes, 256", op, (long long)s.head_dim);
}

} // namespace

void attention_generic_forward(const AttentionForward *a, cudaStream_t stream) {
  check_head("attention_forward", a->shape);
  with_float(a->qkv.dtype, [=](auto type) { forward<decltype(type)>(a, stream); });
  cuda_check_launch("attention_forward");
}

void attention_generic_backward(const AttentionBackward *a, float *delta, cudaStream_t stream) {
  check_head("attention_backward", a->shape);
  with_float(a->qkv.dtype, [=](auto type) { backward<decltype(type)>(a, delta, stream); });
  cuda_check_launch("attention_backward");
}
