// OpenBLAS's choice of kernels. One that is older than the CPU may take it for one of 2004 and run many times
// slower than it can; OPENBLAS_CORETYPE names other kernels as the library is loaded.
#pragma once

#include <stdbool.h>

// The kernels that use this CPU's instructions, where those for `core` (openblas_get_corename) do not; else
// NULL.
const char *blas_better_core(const char *core);

typedef void Cblas(int order, int a_transposed, int b_transposed, int m, int n, int k, float alpha,
                   const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);

// True if products of small whole numbers, in odd shapes, are exact: kernels of another CPU may be wrong.
bool blas_multiplies_rightly(Cblas *sgemm);
