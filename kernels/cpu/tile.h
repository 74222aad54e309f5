// A small GEMM on the calling thread, for kernels that multiply a tile and use it while it is in cache. sgemm packs both
// operands at every call, which a small tile does not pay back; this one reads the left operand where it lies, in any
// strides, and packs the right one alone.
#ifndef LCE_KERNELS_CPU_TILE_H
#define LCE_KERNELS_CPU_TILE_H

#include "kernels/cpu/cpu.h"

// out[m, n] = (accumulate ? out : 0) + alpha * a[m, k] b[k, n]; k at least 1. `plain` selects the loops of cpu_gemm
// instead.
void tile_multiply(bool plain, int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
                   bool accumulate, float *out, int64_t out_stride);

#endif
