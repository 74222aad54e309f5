// Attention of a few new tokens over cached keys and values: first the new keys and values go into the cache,
// then every query walks the keys up to its position, in tiles of 256 scores, with a running maximum and
// sum as in attention.c. It is bound by reading the cache once: 2 P D elements a key/value head.
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

enum { TILE = 256 };

static float dot(const float *a, const float *b, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < count; d++) sum += a[d] * b[d];
  return sum;
}

// One query of one head over `count` keys and values, each a row of head_dim.
static void attend(float *out, const float *q, const float *keys, const float *values, int64_t count,
                   int64_t head_dim) {
  float scores[TILE], maximum = -INFINITY, sum = 0.0f, scale = 1.0f / sqrtf((float)head_dim);
  memset(out, 0, (size_t)head_dim * sizeof *out);
  for (int64_t first = 0; first < count; first += TILE) {
    int64_t width = min_i64(TILE, count - first);
    for (int64_t u = 0; u < width; u++) scores[u] = scale * dot(q, keys + (first + u) * head_dim, head_dim);
    float tile_maximum = maximum_of(scores, width);
    float grown = tile_maximum > maximum ? tile_maximum : maximum, shrink = expf(maximum - grown);
    sum = sum * shrink + (float)exp_and_sum(scores, grown, 1.0f, width, scores);
    maximum = grown;
    for (int64_t d = 0; d < head_dim; d++) out[d] *= shrink;
    for (int64_t u = 0; u < width; u++) {
      const float *value = values + (first + u) * head_dim;
      EACH_SIMD (d, head_dim) out[d] += scores[u] * value[d];
    }
  }
  for (int64_t d = 0; d < head_dim; d++) out[d] /= sum;
}

void cpu_attention_decode(Backend *backend, const AttentionDecode *a) {
  AttentionShape s = a->shape;
  int64_t kv_heads = s.num_key_value_heads, group = s.num_heads / kv_heads;
  size_t head_bytes = (size_t)s.head_dim * sizeof(float);
#pragma omp parallel
  {
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t t = 0; t < s.seq_len; t++) {
        const float *key = cpu_row(a->qkv, b * s.seq_len + t) + s.num_heads * s.head_dim;
        for (int64_t kv = 0; kv < kv_heads; kv++, key += s.head_dim) {
          int64_t row = b * kv_heads + kv, at = (a->past + t) * s.head_dim;
          memcpy(cpu_row(a->keys, row) + at, key, head_bytes);
          memcpy(cpu_row(a->values, row) + at, key + kv_heads * s.head_dim, head_bytes);
        }
      }
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t b = 0; b < s.batch; b++)
      for (int64_t h = 0; h < s.num_heads; h++)
        for (int64_t t = 0; t < s.seq_len; t++) {
          int64_t n = b * s.seq_len + t, row = b * kv_heads + h / group;
          attend(cpu_row(a->out, n) + h * s.head_dim, cpu_row(a->qkv, n) + h * s.head_dim,
                 cpu_row(a->keys, row), cpu_row(a->values, row), a->past + t + 1, s.head_dim);
        }
  }
}
