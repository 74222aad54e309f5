// The one function of CBLAS that kernels/cpu/gemm.c calls, by the BLAS that found_blas.c finds when it is loaded.
#pragma once

enum { CblasRowMajor = 101, CblasNoTrans = 111, CblasTrans = 112 };

void cblas_sgemm(int order, int transposed_a, int transposed_b, int m, int n, int k, float alpha,
                 const float *a, int a_stride, const float *b, int b_stride, float beta, float *c,
                 int c_stride);
