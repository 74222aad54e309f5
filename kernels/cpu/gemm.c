// The GEMM behind every layer: BLAS where there is one, plain loops otherwise or on request.
#include <limits.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/fail.h"

#if defined(HAVE_FOUND_BLAS)
#include "kernels/cpu/found_blas.h"
#elif defined(HAVE_CBLAS)
#include <cblas.h>
#endif

static void plain_gemm(int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
                       bool accumulate, float *out, int64_t out_stride) {
  EACH_PARALLEL (i, m) {
    float *row = out + i * out_stride;
    if (!accumulate) memset(row, 0, (size_t)n * sizeof *row);
    if (b.transposed) { // rows of both operands are contiguous: dot products
      for (int64_t j = 0; j < n; j++) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t p = 0; p < k; p++) sum += a.data[i * a.stride + p] * b.data[j * b.stride + p];
        row[j] += alpha * sum;
      }
    } else { // rows of b are contiguous: a sum of rows
      for (int64_t p = 0; p < k; p++) {
        float factor = alpha * (a.transposed ? a.data[p * a.stride + i] : a.data[i * a.stride + p]);
        EACH_SIMD (j, n) row[j] += factor * b.data[p * b.stride + j];
      }
    }
  }
}

void cpu_gemm(const Backend *backend, int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b,
              bool accumulate, float *out, int64_t out_stride) {
#if defined(HAVE_CBLAS) || defined(HAVE_FOUND_BLAS)
  // An sgemm's rows may be summed in an order that depends on how many there are.
  bool rows_matter = backend->batch_invariant && !a.transposed;
  if (!((const CpuState *)backend->state)->no_blas && !rows_matter) {
    if (m > INT_MAX || n > INT_MAX || k > INT_MAX || a.stride > INT_MAX || b.stride > INT_MAX ||
        out_stride > INT_MAX)
      fail("a GEMM of %lld by %lld by %lld has an axis that CBLAS cannot count", (long long)m, (long long)n,
           (long long)k);
#ifdef HAVE_FOUND_BLAS
    found_sgemm(m, n, k, alpha, a, b, accumulate, out, out_stride);
#else
    cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
                b.transposed ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a.data,
                (int)a.stride, b.data, (int)b.stride, accumulate ? 1.0f : 0.0f, out, (int)out_stride);
#endif
    return;
  }
#endif
  plain_gemm(m, n, k, alpha, a, b, accumulate, out, out_stride);
}
