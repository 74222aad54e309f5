#include "kernels/cpu/blas_core.h"

#include <stddef.h>
#include <strings.h>

const char *blas_better_core(const char *core) {
#if defined(__x86_64__)
  static const char *const good[] = {"Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++)
    if (!strcasecmp(core, good[i])) return NULL;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return NULL;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return "SkylakeX";
  return __builtin_cpu_is("amd") ? "Zen" : "Haswell";
#else
  return NULL;
#endif
}

// Sums of small whole numbers are exact: C = A B of [m, k] and [k, n], or their transposes.
static bool multiplies(Cblas *sgemm, int m, int n, int k, bool a_transposed, bool b_transposed) {
  enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112, MOST = 1 << 16 };
  static float a[MOST], b[MOST], c[MOST];
  for (int i = 0; i < m * k; i++) a[i] = (float)(i * 7 % 9 - 4);
  for (int i = 0; i < k * n; i++) b[i] = (float)(i * 5 % 11 - 5);
  sgemm(ROW_MAJOR, a_transposed ? TRANSPOSED : PLAIN, b_transposed ? TRANSPOSED : PLAIN, m, n, k, 1, a,
        a_transposed ? m : k, b, b_transposed ? k : n, 0, c, n);
  for (int i = 0; i < m * n; i++) {
    float sum = 0;
    for (int p = 0; p < k; p++)
      sum +=
          a[a_transposed ? p * m + i / n : i / n * k + p] * b[b_transposed ? i % n * k + p : p * n + i % n];
    if (c[i] != sum) return false;
  }
  return true;
}

bool blas_multiplies_rightly(Cblas *sgemm) {
  static const int shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 33, 65}, {130, 1, 257}, {97, 129, 191}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int t = 0; t < 4; t++)
      if (!multiplies(sgemm, shapes[i][0], shapes[i][1], shapes[i][2], t & 1, t & 2)) return false;
  return true;
}
