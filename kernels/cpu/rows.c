// Rows: zeros, gather, scatter, sums of columns, the largest element, the scatter-add of embedding gradients.
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

void cpu_fill_zero(Backend *backend, const Tensor *t) {
  enum { BLOCK = 1 << 20 };
  size_t bytes = tensor_bytes(*t);
#pragma omp parallel for schedule(static)
  for (size_t first = 0; first < bytes; first += BLOCK)
    memset((char *)t->data + first, 0, bytes - first < BLOCK ? bytes - first : BLOCK);
}

// Row lengths in bytes, so that one loop serves every dtype.
static char *row_address(Tensor t, int64_t i) {
  return (char *)t.data + (size_t)(i * t.stride) * dtype_bytes(t.dtype);
}

// A vector is a matrix of rows of one element.
static Tensor as_rows(Tensor t) {
  if (t.rank == 1) t.stride = t.shape[1] = 1;
  return t;
}

static void move_rows(const MoveRows *a, bool scatter) {
  const int32_t *indices = a->indices.data;
  Tensor out = as_rows(a->out), x = as_rows(a->x);
  size_t bytes = (size_t)x.shape[1] * dtype_bytes(x.dtype);
  EACH_PARALLEL (i, a->indices.shape[0])
    memcpy(row_address(out, scatter ? indices[i] : i), row_address(x, scatter ? i : indices[i]), bytes);
}

void cpu_gather_rows(Backend *backend, const MoveRows *a) {
  move_rows(a, false);
}

void cpu_scatter_rows(Backend *backend, const MoveRows *a) {
  move_rows(a, true);
}

// Sums in double, in the order of n.
void cpu_sum_columns(Backend *backend, const SumColumns *a) {
  enum { COLUMNS = 64 };
  Tensor x = a->x;
  const float *coefficients = a->coefficients.data;
  float *out = a->sum.data, alpha = a->alpha;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < x.shape[1]; first += COLUMNS) {
    int64_t width = min_i64(COLUMNS, x.shape[1] - first);
    double sum[COLUMNS] = {0};
    for (int64_t n = 0; n < x.shape[0]; n++) {
      const float *row = cpu_row(x, n) + first;
      double coefficient = coefficients ? coefficients[n] : 1.0;
      EACH_SIMD (i, width) sum[i] += coefficient * row[i];
    }
    for (int64_t i = 0; i < width; i++)
      out[first + i] = (float)(alpha * sum[i] + (a->accumulate ? out[first + i] : 0.0f));
  }
}

// The bits of |x| are ordered as the values are, with NaN above infinity.
void cpu_amax(Tensor amax, Tensor x) {
  if (!tensor_exists(amax)) return;
  uint32_t max = 0;
#pragma omp parallel for schedule(static) reduction(max : max)
  for (int64_t n = 0; n < x.shape[0]; n++)
    for (int64_t i = 0; i < x.shape[1]; i++) {
      uint32_t bits;
      memcpy(&bits, cpu_row(x, n) + i, sizeof bits);
      bits &= 0x7FFFFFFF;
      if (bits > max) max = bits;
    }
  memcpy(amax.data, &max, sizeof max);
}

static int compare_keys(const void *a, const void *b) {
  uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
  return (left > right) - (left < right);
}

// Adds the terms of keys[0 .. count), which all name one row, to that row.
static void add_segment(float *out, const uint64_t *keys, int64_t count, Tensor x, const float *coefficients,
                        float alpha) {
  enum { COLUMNS = 256 };
  for (int64_t first = 0; first < x.shape[1]; first += COLUMNS) {
    int64_t width = min_i64(COLUMNS, x.shape[1] - first);
    double sum[COLUMNS] = {0};
    for (int64_t k = 0; k < count; k++) {
      int64_t n = (int64_t)(keys[k] & UINT32_MAX);
      const float *term = cpu_row(x, n) + first;
      double factor = coefficients ? (double)alpha * coefficients[n] : alpha;
      EACH_SIMD (i, width) sum[i] += factor * term[i];
    }
    EACH_SIMD (i, width) out[first + i] += (float)sum[i];
  }
}

void cpu_scatter_add(Tensor out, Tensor ids, Tensor x, const float *coefficients, float alpha,
                     uint64_t *keys) {
  int64_t count = x.shape[0];
  for (int64_t n = 0; n < count; n++) keys[n] = (uint64_t)((const uint32_t *)ids.data)[n] << 32 | (uint64_t)n;
  qsort(keys, (size_t)count, sizeof *keys, compare_keys);
  // The thread that has the first key of a row sums the whole row.
#pragma omp parallel for schedule(dynamic, 16)
  for (int64_t first = 0; first < count; first++) {
    uint64_t id = keys[first] >> 32;
    if (id > INT32_MAX) continue; // IGNORE_INDEX or ELSEWHERE
    if (first > 0 && keys[first - 1] >> 32 == id) continue;
    int64_t last = first + 1;
    while (last < count && keys[last] >> 32 == id) last++;
    add_segment(cpu_row(out, (int64_t)id), keys + first, last - first, x, coefficients, alpha);
  }
}
