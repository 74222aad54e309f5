// Causal attention by tiles of 64 queries and 64 keys (Dao et al. 2022): no T x T matrix, no scratch beyond
// two tiles on the thread's stack. gemm.c has the GEMMs.
//
// Forward, for a block of queries: walk the key tiles up to the diagonal, S = Q K^T / sqrt(D), keep each
// row's running maximum m and sum l, and rescale what `out` holds whenever m grows:
//   out = out exp(m_old - m) + exp(S - m) V,   at the end out / l and lse = m + log l.
// Backward, for a key/value head: walk its key tiles, and for each the query tiles from the diagonal on, of
// every query head that reads it. P = exp(S - lse) is recomputed, then
//   dV += P^T dO,   dS = P * (dO V^T - delta),   dQ += dS K / sqrt(D),   dK += dS^T Q / sqrt(D),
// with delta = rowsum(dO * O). Tiles whose keys lie before the queries' documents are skipped. One thread
// owns a key/value head of a sequence, so the sums have one order for any number of threads.
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

enum { TILE = 64 };

// A head of sequence b from token `first` on: [up to TILE, D].
static Tensor head_of(Tensor t, AttentionShape s, int64_t b, int64_t head, int64_t first) {
  Tensor rows = tensor_rows(t, b * s.seq_len + first, min_i64(TILE, s.seq_len - first));
  return tensor_columns(rows, head * s.head_dim, s.head_dim);
}

// The same for row `head` of a cache.
static Tensor cached(Tensor cache, AttentionShape s, int64_t head, int64_t first, int64_t end) {
  Tensor all = tensor_2d(cpu_row(cache, head), DTYPE_F32, cache.shape[1] / s.head_dim, s.head_dim);
  return tensor_rows(all, first, min_i64(TILE, end - first));
}

static Tensor tile_of(float (*tile)[TILE], int64_t rows, int64_t columns) {
  return (Tensor){.data = tile, .dtype = DTYPE_F32, .rank = 2, .shape = {rows, columns}, .stride = TILE};
}

// The first key that query t of sequence b sees: 0, or the first of its document.
static int64_t first_visible(Tensor documents, AttentionShape s, int64_t b, int64_t t) {
  return tensor_exists(documents) ? t - ((const int32_t *)documents.data)[b * s.seq_len + t] : 0;
}

// The keys [first, end) of a tile of `keys` from key `first_key` on that a query at position t sees.
// `visible` is the first key it sees at all; first == end: none.
typedef struct {
  int64_t first, end;
} Visible;

static Visible visible_keys(int64_t visible, int64_t t, int64_t first_key, int64_t keys) {
  int64_t end = max_i64(0, min_i64(keys, t - first_key + 1));
  return (Visible){min_i64(end, max_i64(0, visible - first_key)), end};
}

static void zero_masked(float *row, Visible v, int64_t keys) {
  for (int64_t j = 0; j < v.first; j++) row[j] = 0.0f;
  for (int64_t j = v.end; j < keys; j++) row[j] = 0.0f;
}

// Up to TILE queries of one head from `first` on, over keys and values in qkv or, with `decode`, in caches.
static void forward_block(const Backend *backend, const AttentionForward *a, const AttentionDecode *decode,
                          int64_t b, int64_t h, int64_t first) {
  AttentionShape s = a->shape;
  float scores[TILE][TILE], maximum[TILE], sum[TILE], scale = 1.0f / sqrtf((float)s.head_dim);
  int64_t past = decode ? decode->past : 0, queries = min_i64(TILE, s.seq_len - first);
  int64_t end = past + first + queries, kv_heads = s.num_key_value_heads, kv = h / (s.num_heads / kv_heads);
  int64_t cache_head = b * kv_heads + kv, key_head = s.num_heads + kv;
  Tensor q = head_of(a->qkv, s, b, h, first), out = head_of(a->out, s, b, h, first);
  for (int64_t i = 0; i < queries; i++) maximum[i] = -INFINITY, sum[i] = 0.0f;
  int64_t start = first_visible(a->documents, s, b, first) / TILE * TILE;
  for (int64_t first_key = start; first_key < end; first_key += TILE) {
    Tensor keys = decode ? cached(decode->keys, s, cache_head, first_key, end)
                         : head_of(a->qkv, s, b, key_head, first_key);
    Tensor values = decode ? cached(decode->values, s, cache_head, first_key, end)
                           : head_of(a->qkv, s, b, key_head + kv_heads, first_key);
    int64_t count = keys.shape[0];
    Tensor tile = tile_of(scores, queries, count);
    cpu_gemm(backend, tile, q, false, keys, true, scale, false);
    for (int64_t i = 0; i < queries; i++) {
      int64_t visible = first_visible(a->documents, s, b, first + i);
      Visible v = visible_keys(visible, past + first + i, first_key, count);
      zero_masked(scores[i], v, count);
      if (v.first == v.end) continue;
      float *seen = scores[i] + v.first, tile_maximum = maximum_of(seen, v.end - v.first);
      float grown = tile_maximum > maximum[i] ? tile_maximum : maximum[i];
      float shrink = expf(maximum[i] - grown);
      sum[i] = sum[i] * shrink + (float)exp_and_sum(seen, grown, 1.0f, v.end - v.first, seen);
      maximum[i] = grown;
      if (first_key == start || shrink == 1.0f) continue;
      float *row = cpu_row(out, i);
      EACH_SIMD (d, s.head_dim) row[d] *= shrink;
    }
    cpu_gemm(backend, out, tile, false, values, false, 1.0f, first_key > start);
  }
  for (int64_t i = 0; i < queries; i++) {
    float *row = cpu_row(out, i), factor = 1.0f / sum[i];
    EACH_SIMD (d, s.head_dim) row[d] *= factor;
    if (tensor_exists(a->lse)) cpu_row(a->lse, b)[h * s.seq_len + first + i] = maximum[i] + logf(sum[i]);
  }
}

static void forward(const Backend *backend, const AttentionForward *a, const AttentionDecode *decode) {
  AttentionShape s = a->shape;
#pragma omp parallel for collapse(3) schedule(dynamic)
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t h = 0; h < s.num_heads; h++)
      for (int64_t first = 0; first < s.seq_len; first += TILE)
        forward_block(backend, a, decode, b, h, first);
}

void cpu_attention_forward(Backend *backend, const AttentionForward *a) {
  forward(backend, a, NULL);
}

// Stores the new keys and values, then every block of new queries walks the keys up to its positions.
void cpu_attention_decode(Backend *backend, const AttentionDecode *a) {
  AttentionShape s = a->shape;
  int64_t kv_heads = s.num_key_value_heads;
  size_t head_bytes = (size_t)s.head_dim * sizeof(float);
  EACH_PARALLEL (n, s.batch * s.seq_len) {
    const float *key = cpu_row(a->qkv, n) + s.num_heads * s.head_dim;
    int64_t at = (a->past + n % s.seq_len) * s.head_dim;
    for (int64_t kv = 0; kv < kv_heads; kv++, key += s.head_dim) {
      int64_t row = n / s.seq_len * kv_heads + kv;
      memcpy(cpu_row(a->keys, row) + at, key, head_bytes);
      memcpy(cpu_row(a->values, row) + at, key + kv_heads * s.head_dim, head_bytes);
    }
  }
  forward(backend, &(AttentionForward){.out = a->out, .qkv = a->qkv, .shape = s}, a);
}

// One tile of queries of head h against one tile of its keys.
static void backward_tile(const Backend *backend, const AttentionBackward *a, int64_t b, int64_t h,
                          int64_t first_query, int64_t first_key) {
  AttentionShape s = a->shape;
  float p[TILE][TILE], ds[TILE][TILE], scale = 1.0f / sqrtf((float)s.head_dim);
  int64_t queries = min_i64(TILE, s.seq_len - first_query), keys = min_i64(TILE, s.seq_len - first_key);
  int64_t key_head = s.num_heads + h / (s.num_heads / s.num_key_value_heads),
          value_head = key_head + s.num_key_value_heads;
  Tensor q = head_of(a->qkv, s, b, h, first_query), dq = head_of(a->dqkv, s, b, h, first_query);
  Tensor out = head_of(a->out, s, b, h, first_query), dout = head_of(a->dout, s, b, h, first_query);
  Tensor k = head_of(a->qkv, s, b, key_head, first_key), dk = head_of(a->dqkv, s, b, key_head, first_key);
  Tensor v = head_of(a->qkv, s, b, value_head, first_key), dv = head_of(a->dqkv, s, b, value_head, first_key);
  Tensor p_tile = tile_of(p, queries, keys), ds_tile = tile_of(ds, queries, keys);
  const float *lse = cpu_row(a->lse, b) + h * s.seq_len + first_query;
  cpu_gemm(backend, p_tile, q, false, k, true, scale, false);
  cpu_gemm(backend, ds_tile, dout, false, v, true, 1.0f, false);
  for (int64_t i = 0; i < queries; i++) {
    int64_t t = first_query + i;
    Visible seen = visible_keys(first_visible(a->documents, s, b, t), t, first_key, keys);
    const float *out_row = cpu_row(out, i), *dout_row = cpu_row(dout, i);
    float delta = 0.0f;
#pragma omp simd reduction(+ : delta)
    for (int64_t d = 0; d < s.head_dim; d++) delta += out_row[d] * dout_row[d];
#pragma omp simd
    for (int64_t j = seen.first; j < seen.end; j++) {
      p[i][j] = exp_f32(p[i][j] - lse[i]);
      ds[i][j] = p[i][j] * (ds[i][j] - delta);
    }
    zero_masked(p[i], seen, keys);
    zero_masked(ds[i], seen, keys);
  }
  cpu_gemm(backend, dv, p_tile, true, dout, false, 1.0f, true);
  cpu_gemm(backend, dk, ds_tile, true, q, false, scale, true);
  cpu_gemm(backend, dq, ds_tile, false, k, false, scale, true);
}

void cpu_attention_backward(Backend *backend, const AttentionBackward *a) {
  AttentionShape s = a->shape;
  int64_t group = s.num_heads / s.num_key_value_heads;
  cpu_fill_zero(backend, &a->dqkv);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t kv = 0; kv < s.num_key_value_heads; kv++)
      for (int64_t h = kv * group; h < (kv + 1) * group; h++)
        for (int64_t first_key = 0; first_key < s.seq_len; first_key += TILE)
          for (int64_t first_query = first_key;
               first_query < s.seq_len && first_visible(a->documents, s, b, first_query) < first_key + TILE;
               first_query += TILE)
            backward_tile(backend, a, b, h, first_query, first_key);
  SumColumns bias = {.sum = a->dbias, .x = a->dqkv, .alpha = 1, .accumulate = a->accumulate};
  if (tensor_exists(a->dbias)) cpu_sum_columns(backend, &bias);
}

// Rotary positions: pairs (i, i + D/2) of every query and key head turn by their position's angle, in place.
void cpu_rope(Backend *backend, const Rope *a) {
  AttentionShape s = a->shape;
  int64_t half = a->cos_sin.shape[1] / 2, heads = s.num_heads + s.num_key_value_heads;
  float sign = a->inverse ? -1.0f : 1.0f;
  const int32_t *positions = a->positions.data;
  EACH_PARALLEL (n, s.batch * s.seq_len) {
    const float *cosine = cpu_row(a->cos_sin, positions ? positions[n] : n % s.seq_len),
                *sine = cosine + half;
    for (int64_t h = 0; h < heads; h++) {
      float *low = cpu_row(a->qkv, n) + h * s.head_dim, *high = low + half;
      EACH_SIMD (i, half) {
        float x = low[i], y = high[i], turn = sign * sine[i];
        low[i] = x * cosine[i] - y * turn;
        high[i] = y * cosine[i] + x * turn;
      }
    }
  }
}
