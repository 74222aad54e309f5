#include "kernels/cpu/tile.h"

#include <string.h>

// A vector register's worth of floats, at any address. Arithmetic on it is elementwise (GCC and clang).
typedef float Vector
    __attribute__((vector_size(TILE_LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

// --- packing -----------------------------------------------------------------------------------------------

// The two halves of a and b, one lane from each in turn: log2(lanes) rounds of it transpose a square.
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

void tile_pack(float *panel, CpuMatrix b, int64_t depth, int64_t columns) {
  if (b.transposed) {
    pack_transposed(panel, b, depth, columns);
    return;
  }
  for (int64_t p = 0; p < depth; p++) {
    float *row = panel + p * TILE_COLUMNS;
    if (columns == TILE_COLUMNS) {
      memcpy(row, b.data + p * b.stride, TILE_COLUMNS * sizeof *row);
    } else {
      memcpy(row, b.data + p * b.stride, (size_t)columns * sizeof *row);
      memset(row + columns, 0, (size_t)(TILE_COLUMNS - columns) * sizeof *row);
    }
  }
}

// --- the product -------------------------------------------------------------------------------------------

// `rows` whole rows of TILE_COLUMNS. Inlined with a constant number of rows, so that `sum` lives in
// registers.
__attribute__((always_inline)) static inline void
product_rows(const int rows, int64_t depth, float alpha, const float *a, int64_t row_step, int64_t depth_step,
             const float *panel, bool accumulate, float *out, int64_t out_stride) {
  Vector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
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
    for (int i = 0; i < rows; i++) {
      float left = a[i * row_step + p * depth_step];
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; v++) sum[i][v] += left * right[v];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) {
      Vector *place = (Vector *)(out + i * out_stride + v * TILE_LANES);
      *place = accumulate ? *place + alpha * sum[i][v] : alpha * sum[i][v];
    }
}

// At most TILE_ROWS rows of TILE_COLUMNS.
static void product_block(int64_t rows, int64_t depth, float alpha, const float *a, int64_t row_step,
                          int64_t depth_step, const float *panel, bool accumulate, float *out,
                          int64_t out_stride) {
#define ROWS(count)                                                                                          \
  case count:                                                                                                \
    product_rows(count, depth, alpha, a, row_step, depth_step, panel, accumulate, out, out_stride);          \
    break
  switch (rows) {
    ROWS(6);
    ROWS(5);
    ROWS(4);
    ROWS(3);
    ROWS(2);
    ROWS(1);
  default:
    break;
  }
#undef ROWS
}

void tile_panel_product(int64_t m, int64_t columns, int64_t depth, float alpha, const float *a,
                        int64_t row_step, int64_t depth_step, const float *panel, bool accumulate, float *out,
                        int64_t out_stride) {
  for (int64_t i = 0; i < m; i += TILE_ROWS) {
    int64_t rows = min_i64(TILE_ROWS, m - i);
    const float *left = a + i * row_step;
    float *result = out + i * out_stride;
    if (columns == TILE_COLUMNS) {
      product_block(rows, depth, alpha, left, row_step, depth_step, panel, accumulate, result, out_stride);
      continue;
    }
    float edge[TILE_ROWS][TILE_COLUMNS];
    product_block(rows, depth, alpha, left, row_step, depth_step, panel, false, &edge[0][0], TILE_COLUMNS);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t j = 0; j < columns; j++) {
        float before = accumulate ? result[r * out_stride + j] : 0.0f;
        result[r * out_stride + j] = before + edge[r][j];
      }
  }
}

static void fetch(TileAhead *ahead, int64_t calls_left) {
  int64_t lines = ahead->lines / calls_left;
  for (int64_t i = 0; i < lines; i++) __builtin_prefetch(ahead->next + 64 * i, 0, 2);
  ahead->next += 64 * lines;
  ahead->lines -= lines;
}

void tile_multiply(bool plain, int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
                   bool accumulate, float *out, int64_t out_stride, TileAhead *ahead) {
  if (plain) {
    cpu_gemm(true, m, n, k, alpha, a, b, accumulate ? 1.0f : 0.0f, out, out_stride);
    return;
  }
  float panel[TILE_DEPTH * TILE_COLUMNS] __attribute__((aligned(64)));
  int64_t row_step = a.transposed ? 1 : a.stride, depth_step = a.transposed ? a.stride : 1;
  int64_t calls = ceil_div(n, TILE_COLUMNS) * ceil_div(k, TILE_DEPTH) * ceil_div(m, TILE_ROWS);
  for (int64_t j = 0; j < n; j += TILE_COLUMNS)
    for (int64_t p = 0; p < k; p += TILE_DEPTH) {
      int64_t columns = min_i64(TILE_COLUMNS, n - j), depth = min_i64(TILE_DEPTH, k - p);
      CpuMatrix part = b;
      part.data += b.transposed ? j * b.stride + p : p * b.stride + j;
      tile_pack(panel, part, depth, columns);
      for (int64_t i = 0; i < m; i += TILE_ROWS) {
        if (ahead) fetch(ahead, calls--);
        tile_panel_product(min_i64(TILE_ROWS, m - i), columns, depth, alpha,
                           a.data + i * row_step + p * depth_step, row_step, depth_step, panel,
                           accumulate || p > 0, out + i * out_stride + j, out_stride);
      }
    }
}
