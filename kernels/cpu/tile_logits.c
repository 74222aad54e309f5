// Logits of a tile, which lies in a core's second-level cache, on the calling thread.
//
// A BLAS copies both operands into the order of its kernel, which takes a third as long as to multiply them.
// Here W alone is copied, a strip of its rows at a time, which all rows of x then read from the first-level
// cache. Whatever rows are beside it, an element is summed in the same order.
#include "kernels/cpu/cpu.h"

// clang would split the vectors.
#if defined(__AVX512F__) && !defined(__clang__)

// ROWS * VECTORS of the 32 registers hold sums, and the others a row of the strip and an element of x.
// A strip takes 32 KiB.
enum { LANES = 16, VECTORS = 4, ROWS = 6, STRIP = LANES * VECTORS, TERMS = 128 };

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef float Quad __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int QuadOrder __attribute__((vector_size(4 * sizeof(int))));

static void transpose_quads(float *to, const float *from, int64_t stride) {
  const QuadOrder low = {0, 4, 1, 5}, high = {2, 6, 3, 7}; // of two vectors' eight elements
  Quad a = *(const Quad *)from, b = *(const Quad *)(from + stride), c = *(const Quad *)(from + 2 * stride),
       d = *(const Quad *)(from + 3 * stride);
  Quad ac = __builtin_shuffle(a, c, low), bd = __builtin_shuffle(b, d, low);
  *(Quad *)to = __builtin_shuffle(ac, bd, low);
  *(Quad *)(to + STRIP) = __builtin_shuffle(ac, bd, high);
  ac = __builtin_shuffle(a, c, high), bd = __builtin_shuffle(b, d, high);
  *(Quad *)(to + 2 * STRIP) = __builtin_shuffle(ac, bd, low);
  *(Quad *)(to + 3 * STRIP) = __builtin_shuffle(ac, bd, high);
}

// strip[p][j] = w[j][p] for p < terms and j < columns.
static void transpose(float *strip, const float *w, int64_t stride, int64_t columns, int64_t terms) {
  int64_t quads = columns / 4 * 4, quad_terms = terms / 4 * 4;
  for (int64_t j = 0; j < quads; j += 4)
    for (int64_t p = 0; p < quad_terms; p += 4)
      transpose_quads(strip + p * STRIP + j, w + j * stride + p, stride);
  for (int64_t p = 0; p < terms; p++)
    for (int64_t j = p < quad_terms ? quads : 0; j < columns; j++) strip[p * STRIP + j] = w[j * stride + p];
}

// out[i][j] (+)= sum_p x[i][p] strip[p][j]; inlined for each constant `rows`.
static inline __attribute__((always_inline)) void multiply(int rows, float *out, int64_t stride, Tensor x,
                                                           const float *strip, bool accumulate) {
  Vector sum[ROWS][VECTORS] = {0};
  for (int64_t p = 0; p < x.shape[1]; p++)
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        sum[i][v] += cpu_row(x, i)[p] * *(const Vector *)(strip + p * STRIP + v * LANES);
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      Vector *to = (Vector *)(out + i * stride + v * LANES);
      if (accumulate) sum[i][v] += *to;
      *to = sum[i][v];
    }
}

// Adds columns [j, j + columns) of x times the strip to out.
static void multiply_strip(Tensor out, Tensor x, const float *strip, int64_t j, int64_t columns,
                           bool accumulate) {
  float part[ROWS * STRIP];
  bool whole = columns == STRIP;
  for (int64_t i = 0, rows; i < x.shape[0]; i += rows) {
    Tensor left = tensor_rows(x, i, x.shape[0] - i);
    float *to = whole ? cpu_row(out, i) + j : part;
    int64_t stride = whole ? out.stride : STRIP;
    rows = left.shape[0] >= ROWS ? ROWS : left.shape[0] >= 2 ? 2 : 1;
    if (rows == ROWS)
      multiply(ROWS, to, stride, left, strip, whole && accumulate);
    else if (rows == 2)
      multiply(2, to, stride, left, strip, whole && accumulate);
    else
      multiply(1, to, stride, left, strip, whole && accumulate);
    for (int64_t r = i; !whole && r < i + rows; r++)
      for (int64_t c = 0; c < columns; c++)
        cpu_row(out, r)[j + c] = (accumulate ? cpu_row(out, r)[j + c] : 0) + part[(r - i) * STRIP + c];
  }
}

void cpu_tile_logits(const Backend *backend, Tensor out, Tensor x, Tensor weight) {
  enum { WIDEST = 2048 }; // from here on it is not faster
  if (x.shape[1] > WIDEST && !backend->fixed_order) {
    cpu_gemm(backend, out, x, false, weight, true, 1.0f, false);
    return;
  }
  float strip[TERMS * STRIP] __attribute__((aligned(64))) = {0};
  for (int64_t j = 0; j < out.shape[1]; j += STRIP)
    for (int64_t p = 0; p < x.shape[1]; p += TERMS) {
      int64_t columns = min_i64(STRIP, out.shape[1] - j), terms = min_i64(TERMS, x.shape[1] - p);
      transpose(strip, cpu_row(weight, j) + p, weight.stride, columns, terms);
      multiply_strip(out, tensor_columns(x, p, terms), strip, j, columns, p > 0);
    }
}

#else

void cpu_tile_logits(const Backend *backend, Tensor out, Tensor x, Tensor weight) {
  cpu_gemm(backend, out, x, false, weight, true, 1.0f, false);
}

#endif
