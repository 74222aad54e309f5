// The GEMMs: of tiles, by the calling thread; and of layers, by CBLAS where it was found at build time, else by tiles.
#include <limits.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/fail.h"

#ifdef HAVE_CBLAS
#include <cblas.h>
#endif

// The vector that the machine has registers for, and how many of them a row of the result takes: TILE_ROWS x TILE_COLUMNS
// of it stay in registers, and a packed panel [TILE_DEPTH][TILE_COLUMNS] of the right operand in the first-level cache.
#if defined(__AVX512F__)
enum { TILE_LANES = 16, TILE_VECTORS = 4 };
#elif defined(__AVX__)
enum { TILE_LANES = 8, TILE_VECTORS = 2 };
#else
enum { TILE_LANES = 4, TILE_VECTORS = 4 };
#endif
enum { TILE_ROWS = 6, TILE_COLUMNS = TILE_LANES * TILE_VECTORS, TILE_DEPTH = 64 };

// A vector register's worth of floats, at any address. Arithmetic on it is elementwise (GCC and clang).
typedef float Vector
    __attribute__((vector_size(TILE_LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

// --- packing -----------------------------------------------------------------------------------------------

// The two halves of a and b, one lane from each alternately: log2(lanes) such rounds transpose a square.
#if defined(__AVX512F__)
#define INTERLEAVE_LOW(a, b)                                                                                 \
  __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b)                                                                                \
  __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif defined(__AVX__)
#define INTERLEAVE_LOW(a, b)  __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define INTERLEAVE_LOW(a, b)  __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

// to[p][j] = from[j][p] for a square of TILE_LANES.
static void transpose_square(float *to, const float *from, int64_t from_stride) {
  Vector rows[TILE_LANES], mixed[TILE_LANES];
#pragma GCC unroll 16
  for (int i = 0; i < TILE_LANES; i++) rows[i] = *(const Vector *)(from + i * from_stride);
#pragma GCC unroll 4
  for (int width = 1; width < TILE_LANES; width *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < TILE_LANES / 2; i++) {
      mixed[2 * i] = INTERLEAVE_LOW(rows[i], rows[i + TILE_LANES / 2]);
      mixed[2 * i + 1] = INTERLEAVE_HIGH(rows[i], rows[i + TILE_LANES / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LANES; i++) rows[i] = mixed[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < TILE_LANES; i++) *(Vector *)(to + i * TILE_COLUMNS) = rows[i];
}

static void pack_transposed(float *panel, CpuMatrix b, int64_t depth, int64_t columns) {
  int64_t whole_depth = depth / TILE_LANES * TILE_LANES, whole_columns = columns / TILE_LANES * TILE_LANES;
  for (int64_t j = 0; j < whole_columns; j += TILE_LANES) {
    for (int64_t p = 0; p < whole_depth; p += TILE_LANES)
      transpose_square(panel + p * TILE_COLUMNS + j, b.data + j * b.stride + p, b.stride);
    for (int64_t p = whole_depth; p < depth; p++)
      for (int64_t l = j; l < j + TILE_LANES; l++) panel[p * TILE_COLUMNS + l] = b.data[l * b.stride + p];
  }
  for (int64_t p = 0; p < depth; p++)
    for (int64_t j = whole_columns; j < TILE_COLUMNS; j++)
      panel[p * TILE_COLUMNS + j] = j < columns ? b.data[j * b.stride + p] : 0.0f;
}

// panel[p][j] = b(p, j) for p < depth, j < columns; zeros in the columns beyond, up to TILE_COLUMNS.
static void pack(float *panel, CpuMatrix b, int64_t depth, int64_t columns) {
  if (b.transposed) {
    pack_transposed(panel, b, depth, columns);
    return;
  }
  for (int64_t p = 0; p < depth; p++) {
    float *row = panel + p * TILE_COLUMNS;
    if (columns == TILE_COLUMNS) {
      memcpy(row, b.data + p * b.stride, TILE_COLUMNS * sizeof *row); // of constant size: no call
      continue;
    }
    for (int64_t j = 0; j < TILE_COLUMNS; j++) row[j] = j < columns ? b.data[p * b.stride + j] : 0.0f;
  }
}

// --- tiles -------------------------------------------------------------------------------------------------

// out[TILE_ROWS, TILE_COLUMNS] = (accumulate ? out : 0) + alpha * a panel; a(i, p) = a[i * row_step + p * depth_step].
// Not inlined: together with its callers' variables the sums would not all stay in registers.
__attribute__((noinline)) static void multiply_panel(int64_t depth, float alpha, const float *a,
                                                     int64_t row_step, int64_t depth_step, const float *panel,
                                                     bool accumulate, float *out, int64_t out_stride) {
  Vector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
      sum[i][v] = (Vector){0};
      // The sums take far longer than memory does: what they will be added to arrives meanwhile.
      if (accumulate) __builtin_prefetch(out + i * out_stride + v * TILE_LANES, 1);
    }
  for (int64_t p = 0; p < depth; p++) {
    Vector right[TILE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++)
      right[v] = *(const Vector *)(panel + p * TILE_COLUMNS + v * TILE_LANES);
#pragma GCC unroll 6
    for (int i = 0; i < TILE_ROWS; i++) {
      float left = a[i * row_step + p * depth_step];
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; v++) sum[i][v] += left * right[v];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
      Vector *place = (Vector *)(out + i * out_stride + v * TILE_LANES);
      *place = accumulate ? *place + alpha * sum[i][v] : alpha * sum[i][v];
    }
}

// The same for what is left of rows and columns, by way of copies of whole size.
static void multiply_edge(int64_t rows, int64_t columns, int64_t depth, float alpha, const float *a,
                          int64_t row_step, int64_t depth_step, const float *panel, bool accumulate,
                          float *out, int64_t out_stride) {
  float left[TILE_ROWS][TILE_DEPTH] = {{0}}, tile[TILE_ROWS][TILE_COLUMNS];
  for (int64_t i = 0; i < rows; i++)
    for (int64_t p = 0; p < depth; p++) left[i][p] = a[i * row_step + p * depth_step];
  multiply_panel(depth, alpha, &left[0][0], TILE_DEPTH, 1, panel, false, &tile[0][0], TILE_COLUMNS);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++)
      out[i * out_stride + j] = (accumulate ? out[i * out_stride + j] : 0.0f) + tile[i][j];
}

void tile_multiply(int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b, bool accumulate,
                   float *out, int64_t out_stride) {
  float panel[TILE_DEPTH * TILE_COLUMNS] __attribute__((aligned(64)));
  int64_t row_step = a.transposed ? 1 : a.stride, depth_step = a.transposed ? a.stride : 1;
  for (int64_t j = 0; j < n; j += TILE_COLUMNS)
    for (int64_t p = 0; p < k; p += TILE_DEPTH) {
      int64_t columns = min_i64(TILE_COLUMNS, n - j), depth = min_i64(TILE_DEPTH, k - p);
      CpuMatrix part = b;
      part.data += b.transposed ? j * b.stride + p : p * b.stride + j;
      pack(panel, part, depth, columns);
      for (int64_t i = 0; i < m; i += TILE_ROWS) {
        const float *left = a.data + i * row_step + p * depth_step;
        float *to = out + i * out_stride + j;
        if (m - i >= TILE_ROWS && columns == TILE_COLUMNS)
          multiply_panel(depth, alpha, left, row_step, depth_step, panel, accumulate || p > 0, to,
                         out_stride);
        else
          multiply_edge(min_i64(TILE_ROWS, m - i), columns, depth, alpha, left, row_step, depth_step, panel,
                        accumulate || p > 0, to, out_stride);
      }
    }
}

// --- layers ------------------------------------------------------------------------------------------------

// Where threads have rows of their own; with k = 0 nothing is added.
static void gemm_of_tiles(int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
                          bool accumulate, float *out, int64_t out_stride) {
  enum { ROWS = 8 * TILE_ROWS };
  EACH_PARALLEL (block, ceil_div(m, ROWS)) {
    int64_t first = block * ROWS, rows = min_i64(ROWS, m - first);
    CpuMatrix part = a;
    part.data += first * (a.transposed ? 1 : a.stride);
    for (int64_t i = first; i < first + rows && k == 0 && !accumulate; i++)
      memset(out + i * out_stride, 0, (size_t)n * sizeof *out);
    tile_multiply(rows, n, k, alpha, part, b, accumulate, out + first * out_stride, out_stride);
  }
}

void cpu_gemm(const Backend *backend, int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
              bool accumulate, float *out, int64_t out_stride) {
#ifdef HAVE_CBLAS
  if (!((const CpuState *)backend->state)->no_blas) {
    if (m > INT_MAX || n > INT_MAX || k > INT_MAX || a.stride > INT_MAX || b.stride > INT_MAX ||
        out_stride > INT_MAX)
      fail("a GEMM of %lld by %lld by %lld has an axis that CBLAS cannot count", (long long)m, (long long)n,
           (long long)k);
    cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
                b.transposed ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a.data,
                (int)a.stride, b.data, (int)b.stride, accumulate ? 1.0f : 0.0f, out, (int)out_stride);
    return;
  }
#endif
  gemm_of_tiles(m, n, k, alpha, a, b, accumulate, out, out_stride);
}
