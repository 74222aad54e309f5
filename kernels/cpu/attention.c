// Causal attention by tiles of 64 queries and 64 keys (Dao et al. 2022): no T x T matrix, no scratch beyond
// two tiles on the thread's stack. The GEMMs are those of tile.c.
//
// Forward, for a block of queries: walk the key tiles up to the diagonal, S = Q K^T / sqrt(D), keep each
// row's running maximum m and sum l, and rescale what `out` holds whenever m grows:
//   out = out exp(m_old - m) + exp(S - m) V,   at the end out / l and lse = m + log l.
// Backward, for a key/value head: walk its key tiles, and for each the query tiles from the diagonal on, of
// every query head that reads it. P = exp(S - lse) is recomputed, then
//   dV += P^T dO,   dS = P * (dO V^T - delta),   dQ += dS K / sqrt(D),   dK += dS^T Q / sqrt(D),
// with delta = rowsum(dO * O). Tiles whose keys lie before the queries' documents are skipped. One thread owns a key/value
// head of a sequence, so nothing is shared and the sums have one order, whatever the number of threads.
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

enum { TILE = 64 };

// Where one head's rows lie: row t starts at data + t * stride.
typedef struct {
  float *data;
  int64_t stride;
} Rows;

static Rows head_rows(Tensor t, int64_t b, int64_t seq_len, int64_t head, int64_t head_dim) {
  return (Rows){.data = cpu_row(t, b * seq_len) + head * head_dim, .stride = t.stride};
}

static CpuMatrix matrix(Rows rows, int64_t first, bool transposed) {
  return (CpuMatrix){
      .data = rows.data + first * rows.stride, .stride = rows.stride, .transposed = transposed};
}

static CpuMatrix tile_matrix(const float *tile, bool transposed) {
  return (CpuMatrix){.data = tile, .stride = TILE, .transposed = transposed};
}

// Of sequence b: how many tokens of its document precede each token; NULL: all of the sequence.
static const int32_t *preceding(Tensor documents, int64_t b, int64_t seq_len) {
  return tensor_exists(documents) ? (const int32_t *)documents.data + b * seq_len : NULL;
}

static int64_t first_visible(const int32_t *before, int64_t t) {
  return before ? t - before[t] : 0;
}

// The keys [first, end) of a tile of `keys` from key `first_key` on that query t sees; first == end: none.
typedef struct {
  int64_t first, end;
} Visible;

static Visible visible_keys(const int32_t *before, int64_t t, int64_t first_key, int64_t keys) {
  int64_t end = max_i64(0, min_i64(keys, t - first_key + 1));
  return (Visible){min_i64(end, max_i64(0, first_visible(before, t) - first_key)), end};
}

static void zero_masked(float *row, Visible v, int64_t keys) {
  for (int64_t j = 0; j < v.first; j++) row[j] = 0.0f;
  for (int64_t j = v.end; j < keys; j++) row[j] = 0.0f;
}

static Rows rows_from(Rows rows, int64_t first) {
  rows.data += first * rows.stride;
  return rows;
}

// One block of queries of one head: q, out and lse (or NULL) begin with it, and its first query sees the keys up to
// number `first_query`.
static void forward_block(bool plain, Rows q, Rows k, Rows values, Rows out, float *lse,
                          const int32_t *before, int64_t first_query, int64_t queries, int64_t head_dim) {
  float scores[TILE][TILE], maximum[TILE], sum[TILE];
  float scale = 1.0f / sqrtf((float)head_dim);
  for (int64_t i = 0; i < queries; i++) maximum[i] = -INFINITY, sum[i] = 0.0f;
  int64_t start = first_visible(before, first_query) / TILE * TILE;
  for (int64_t first_key = start; first_key < first_query + queries; first_key += TILE) {
    int64_t keys = min_i64(TILE, first_query + queries - first_key);
    tile_multiply(plain, queries, keys, head_dim, scale, matrix(q, 0, false), matrix(k, first_key, true),
                  false, &scores[0][0], TILE);
    for (int64_t i = 0; i < queries; i++) {
      Visible v = visible_keys(before, first_query + i, first_key, keys);
      zero_masked(scores[i], v, keys);
      if (v.first == v.end) continue;
      float *seen = scores[i] + v.first, tile_maximum = maximum_of(seen, v.end - v.first);
      float grown = tile_maximum > maximum[i] ? tile_maximum : maximum[i];
      float shrink = expf(maximum[i] - grown);
      sum[i] = sum[i] * shrink + (float)exp_and_sum(seen, grown, 1.0f, v.end - v.first, seen);
      maximum[i] = grown;
      if (first_key == start || shrink == 1.0f) continue;
      float *row = out.data + i * out.stride;
      EACH_SIMD (d, head_dim) row[d] *= shrink;
    }
    tile_multiply(plain, queries, head_dim, keys, 1.0f, tile_matrix(&scores[0][0], false),
                  matrix(values, first_key, false), first_key > start, out.data, out.stride);
  }
  for (int64_t i = 0; i < queries; i++) {
    float *row = out.data + i * out.stride, factor = 1.0f / sum[i];
    EACH_SIMD (d, head_dim) row[d] *= factor;
    if (lse) lse[i] = maximum[i] + logf(sum[i]);
  }
}

void cpu_attention_forward(Backend *backend, const AttentionForward *a) {
  bool plain = cpu_plain_loops(backend);
  AttentionShape s = a->shape;
  int64_t group = s.num_heads / s.num_key_value_heads, blocks = ceil_div(s.seq_len, TILE);
#pragma omp parallel for collapse(3) schedule(dynamic)
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t h = 0; h < s.num_heads; h++)
      for (int64_t block = 0; block < blocks; block++) {
        int64_t first = (blocks - 1 - block) * TILE; // the longest first
        int64_t key_head = s.num_heads + h / group, value_head = key_head + s.num_key_value_heads;
        forward_block(plain, rows_from(head_rows(a->qkv, b, s.seq_len, h, s.head_dim), first),
                      head_rows(a->qkv, b, s.seq_len, key_head, s.head_dim),
                      head_rows(a->qkv, b, s.seq_len, value_head, s.head_dim),
                      rows_from(head_rows(a->out, b, s.seq_len, h, s.head_dim), first),
                      cpu_row(a->lse, b) + h * s.seq_len + first, preceding(a->documents, b, s.seq_len),
                      first, min_i64(TILE, s.seq_len - first), s.head_dim);
      }
}

// The new keys and values go into the cache, then every block of new queries walks the keys up to its positions.
void cpu_attention_decode(Backend *backend, const AttentionDecode *a) {
  bool plain = cpu_plain_loops(backend);
  AttentionShape s = a->shape;
  int64_t kv_heads = s.num_key_value_heads, group = s.num_heads / kv_heads;
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
#pragma omp parallel for collapse(3) schedule(dynamic)
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t h = 0; h < s.num_heads; h++)
      for (int64_t first = 0; first < s.seq_len; first += TILE) {
        int64_t row = b * kv_heads + h / group;
        forward_block(plain, rows_from(head_rows(a->qkv, b, s.seq_len, h, s.head_dim), first),
                      (Rows){cpu_row(a->keys, row), s.head_dim}, (Rows){cpu_row(a->values, row), s.head_dim},
                      rows_from(head_rows(a->out, b, s.seq_len, h, s.head_dim), first), NULL, NULL,
                      a->past + first, min_i64(TILE, s.seq_len - first), s.head_dim);
      }
}

// What the backward pass of one query head against one key/value head reads and writes.
typedef struct {
  Rows q, k, v, out, dout, dq, dk, dv;
  const float *lse;      // [T]
  const int32_t *before; // of preceding()
  int64_t head_dim;
} HeadBackward;

// One tile of queries against one tile of keys.
static void backward_tile(bool plain, const HeadBackward *h, int64_t first_query, int64_t queries,
                          int64_t first_key, int64_t keys) {
  float p[TILE][TILE], ds[TILE][TILE];
  float scale = 1.0f / sqrtf((float)h->head_dim);
  CpuMatrix q = matrix(h->q, first_query, false), dout = matrix(h->dout, first_query, false);
  tile_multiply(plain, queries, keys, h->head_dim, scale, q, matrix(h->k, first_key, true), false, &p[0][0],
                TILE);
  tile_multiply(plain, queries, keys, h->head_dim, 1.0f, dout, matrix(h->v, first_key, true), false,
                &ds[0][0], TILE);
  for (int64_t i = 0; i < queries; i++) {
    int64_t t = first_query + i;
    Visible v = visible_keys(h->before, t, first_key, keys);
    const float *out_row = h->out.data + t * h->out.stride, *dout_row = h->dout.data + t * h->dout.stride;
    float delta = 0.0f, lse = h->lse[t];
#pragma omp simd reduction(+ : delta)
    for (int64_t d = 0; d < h->head_dim; d++) delta += out_row[d] * dout_row[d];
#pragma omp simd
    for (int64_t j = v.first; j < v.end; j++) {
      p[i][j] = exp_f32(p[i][j] - lse);
      ds[i][j] = p[i][j] * (ds[i][j] - delta);
    }
    zero_masked(p[i], v, keys);
    zero_masked(ds[i], v, keys);
  }
  tile_multiply(plain, keys, h->head_dim, queries, 1.0f, tile_matrix(&p[0][0], true), dout, true,
                h->dv.data + first_key * h->dv.stride, h->dv.stride);
  tile_multiply(plain, keys, h->head_dim, queries, scale, tile_matrix(&ds[0][0], true), q, true,
                h->dk.data + first_key * h->dk.stride, h->dk.stride);
  tile_multiply(plain, queries, h->head_dim, keys, scale, tile_matrix(&ds[0][0], false),
                matrix(h->k, first_key, false), true, h->dq.data + first_query * h->dq.stride, h->dq.stride);
}

static void zero_rows(Rows rows, int64_t count, int64_t head_dim) {
  for (int64_t t = 0; t < count; t++)
    memset(rows.data + t * rows.stride, 0, (size_t)head_dim * sizeof(float));
}

void cpu_attention_backward(Backend *backend, const AttentionBackward *a) {
  bool plain = cpu_plain_loops(backend);
  AttentionShape s = a->shape;
  int64_t group = s.num_heads / s.num_key_value_heads;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t kv = 0; kv < s.num_key_value_heads; kv++) {
      int64_t key_head = s.num_heads + kv, value_head = key_head + s.num_key_value_heads;
      HeadBackward h = {.k = head_rows(a->qkv, b, s.seq_len, key_head, s.head_dim),
                        .v = head_rows(a->qkv, b, s.seq_len, value_head, s.head_dim),
                        .dk = head_rows(a->dqkv, b, s.seq_len, key_head, s.head_dim),
                        .dv = head_rows(a->dqkv, b, s.seq_len, value_head, s.head_dim),
                        .before = preceding(a->documents, b, s.seq_len),
                        .head_dim = s.head_dim};
      zero_rows(h.dk, s.seq_len, s.head_dim);
      zero_rows(h.dv, s.seq_len, s.head_dim);
      for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
        h.q = head_rows(a->qkv, b, s.seq_len, head, s.head_dim);
        h.dq = head_rows(a->dqkv, b, s.seq_len, head, s.head_dim);
        h.out = head_rows(a->out, b, s.seq_len, head, s.head_dim);
        h.dout = head_rows(a->dout, b, s.seq_len, head, s.head_dim);
        h.lse = cpu_row(a->lse, b) + head * s.seq_len;
        zero_rows(h.dq, s.seq_len, s.head_dim);
        for (int64_t first_key = 0; first_key < s.seq_len; first_key += TILE)
          for (int64_t first_query = first_key;
               first_query < s.seq_len && first_visible(h.before, first_query) < first_key + TILE;
               first_query += TILE)
            backward_tile(plain, &h, first_query, min_i64(TILE, s.seq_len - first_query), first_key,
                          min_i64(TILE, s.seq_len - first_key));
      }
    }
  if (tensor_exists(a->dbias)) cpu_column_sums(a->dbias.data, a->dqkv, NULL, 1.0f, a->accumulate);
}
