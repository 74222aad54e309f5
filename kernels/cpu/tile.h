// Small products on the calling thread, for kernels that multiply a tile and use it while it is in cache.
//
// A general product has to copy both operands into its own layout before it starts, and a call on a small
// tile pays for that every time. These kernels keep 6 rows by TILE_COLUMNS columns of the result in registers
// and read the left operand where it lies, in any strides: 2 * 6 * TILE_COLUMNS flops for 6 + TILE_COLUMNS
// numbers read. Only the right operand is copied, into panels [k][TILE_COLUMNS] that stay in the first-level
// cache.
#ifndef LCE_KERNELS_CPU_TILE_H
#define LCE_KERNELS_CPU_TILE_H

#include "kernels/cpu/cpu.h"

// The vector that the machine has registers for, and how many of them a row of the result takes.
#if defined(__AVX512F__)
enum { TILE_LANES = 16, TILE_VECTORS = 4 };
#elif defined(__AVX__)
enum { TILE_LANES = 8, TILE_VECTORS = 2 };
#else
enum { TILE_LANES = 4, TILE_VECTORS = 4 };
#endif
enum {
  TILE_ROWS = 6,
  TILE_COLUMNS = TILE_LANES * TILE_VECTORS,
  TILE_DEPTH = 64 // inner length of a panel that tile_multiply packs
};

// panel[p][j] = b(p, j) for p < depth, j < columns; zeros in the columns beyond, up to TILE_COLUMNS.
void tile_pack(float *panel, CpuMatrix b, int64_t depth, int64_t columns);

// out[m, columns] = (accumulate ? out : 0) + alpha * a[m, depth] panel[depth, columns], columns <=
// TILE_COLUMNS. a(i, p) = a[i * row_step + p * depth_step].
void tile_panel_product(int64_t m, int64_t columns, int64_t depth, float alpha, const float *a,
                        int64_t row_step, int64_t depth_step, const float *panel, bool accumulate, float *out,
                        int64_t out_stride);

// Memory to bring into the second-level cache along the way, spread over the work.
typedef struct {
  const char *next;
  int64_t lines; // of 64 bytes
} TileAhead;

// out[m, n] = (accumulate ? out : 0) + alpha * a[m, k] b[k, n]; k at least 1. `ahead` may be NULL. `plain`
// asks for the loops of cpu_gemm instead.
void tile_multiply(bool plain, int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
                   bool accumulate, float *out, int64_t out_stride, TileAhead *ahead);

#endif
