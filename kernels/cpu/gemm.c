// The GEMM behind every layer: BLAS if available, plain loops otherwise or on request.
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/cpu/cpu.h"

#if defined(HAVE_CBLAS)
#include <cblas.h>
#endif

extern char *openblas_get_corename(void) __attribute__((weak));

const char *cpu_blas(void) {
#if defined(OPENBLAS_VERSION)
  static char name[64];
  snprintf(name, sizeof name, "OpenBLAS for %s", openblas_get_corename ? openblas_get_corename() : "any CPU");
  return name;
#elif defined(HAVE_CBLAS)
  return "CBLAS";
#else
  return NULL;
#endif
}

// row[j] += row i of a times column j of b, in blocks of terms: thousands, one after the other, would lose digits.
static void add_in_blocks(float *row, int64_t n, Tensor a, bool a_transposed, int64_t i, Tensor b,
                          float alpha) {
  enum { COLUMNS = 512, TERMS = 256 };
  int64_t k = b.shape[0];
  for (int64_t first = 0; first < n; first += COLUMNS)
    for (int64_t begin = 0; begin < k; begin += TERMS) {
      int64_t count = min_i64(COLUMNS, n - first), end = min_i64(begin + TERMS, k);
      float sum[COLUMNS] = {0};
      for (int64_t p = begin; p < end; p++) {
        float factor = alpha * (a_transposed ? cpu_row(a, p)[i] : cpu_row(a, i)[p]);
        const float *term = cpu_row(b, p) + first;
        EACH_SIMD (j, count) sum[j] += factor * term[j];
      }
      EACH_SIMD (j, count) row[first + j] += sum[j];
    }
}

static void plain_gemm(Tensor out, Tensor a, bool a_transposed, Tensor b, bool b_transposed, float alpha,
                       bool accumulate, bool in_blocks) {
  int64_t n = out.shape[1], k = a.shape[!a_transposed];
  EACH_PARALLEL (i, out.shape[0]) {
    float *row = cpu_row(out, i);
    if (!accumulate) memset(row, 0, (size_t)n * sizeof *row);
    if (b_transposed) { // rows of both operands are contiguous: dot products
      for (int64_t j = 0; j < n; j++) {
        const float *x = cpu_row(a, i), *y = cpu_row(b, j);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t p = 0; p < k; p++) sum += x[p] * y[p];
        row[j] += alpha * sum;
      }
    } else if (in_blocks) {
      add_in_blocks(row, n, a, a_transposed, i, b, alpha);
    } else { // rows of b are contiguous: a sum of rows
      for (int64_t p = 0; p < k; p++) {
        float factor = alpha * (a_transposed ? cpu_row(a, p)[i] : cpu_row(a, i)[p]);
        const float *term = cpu_row(b, p);
        EACH_SIMD (j, n) row[j] += factor * term[j];
      }
    }
  }
}

void cpu_gemm(const Backend *backend, Tensor out, Tensor a, bool a_transposed, Tensor b, bool b_transposed,
              float alpha, bool accumulate) {
#if defined(HAVE_CBLAS)
  // An sgemm's rows may be summed in an order that depends on how many there are.
  bool rows_matter = backend->fixed_order && !a_transposed;
  if (!((const CpuState *)backend->state)->no_blas && !rows_matter) {
    int64_t m = out.shape[0], n = out.shape[1], k = a.shape[!a_transposed];
    if (m > INT_MAX || n > INT_MAX || k > INT_MAX || a.stride > INT_MAX || b.stride > INT_MAX ||
        out.stride > INT_MAX)
      fail("a GEMM of %lld by %lld by %lld is too large for this CBLAS, whose sizes have 32 bits",
           (long long)m, (long long)n, (long long)k);
    cblas_sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans,
                b_transposed ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a.data,
                (int)a.stride, b.data, (int)b.stride, accumulate ? 1.0f : 0.0f, out.data, (int)out.stride);
    return;
  }
#endif
  plain_gemm(out, a, a_transposed, b, b_transposed, alpha, accumulate, backend->fixed_order);
}
