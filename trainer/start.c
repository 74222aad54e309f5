// Sets up the libraries, which read the environment as they start: before their constructors, and after them
// for OpenBLAS, which says only then which CPU it computes for. Linked into every program.
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/base/system.h"

extern int openblas_get_parallel(void) __attribute__((weak));

// The value of the variable that begins with "NAME="; libc has no environment yet.
static const char *value_of(char **environment, const char *begin) {
  for (; *environment; environment++)
    if (!strncmp(*environment, begin, strlen(begin))) return *environment + strlen(begin);
  return NULL;
}

// OpenBLAS's constructor allocates for each thread, and would try for ever.
static void require_address_space(char **environment) {
  cpu_set_t cores;
  const char *given = value_of(environment, "OMP_NUM_THREADS=");
  int threads = sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
  if (given && atoi(given) > 0 && atoi(given) < threads) threads = atoi(given);
  size_t bytes = (size_t)threads * OPENBLAS_THREAD_BYTES + ((size_t)16 << 20);
  void *probe = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe != MAP_FAILED) {
    munmap(probe, bytes);
    return;
  }
  dprintf(STDERR_FILENO,
          "lce: `ulimit -v` or `-d` leaves less than the %zu MiB of memory that OpenBLAS needs for "
          "%d threads; raise it, or set OMP_NUM_THREADS=1\n",
          bytes >> 20, threads);
  _exit(1);
}

// libgomp's list of threads, and our own arrays, are on the stack.
static void require_stack(char **environment) {
  enum { LEAST_STACK = 256 << 10, MOST_THREADS = 10000 };
  struct rlimit stack;
  const char *threads = value_of(environment, "OMP_NUM_THREADS=");
  bool small = !getrlimit(RLIMIT_STACK, &stack) && stack.rlim_cur < LEAST_STACK;
  if (!small && !(threads && atoi(threads) > MOST_THREADS)) return;
  if (small)
    dprintf(STDERR_FILENO, "lce: `ulimit -s` leaves less than %d KiB for the stack; raise it\n",
            LEAST_STACK >> 10);
  else
    dprintf(STDERR_FILENO, "lce: OMP_NUM_THREADS is above %d; set it to the number of cores\n", MOST_THREADS);
  _exit(1);
}

// At a barrier libgomp's threads spin for milliseconds, and on a busy machine keep those that they wait for
// from a core. Only the environment sets that: start over with a short spin, unless the user has set one.
static void bound_spinning(char **arguments, char **environment) {
  size_t count = 0;
  while (environment[count]) count++;
  char *with[count + 2], setting[] = "GOMP_SPINCOUNT=1000";
  memcpy(with, environment, count * sizeof *with);
  with[count] = setting;
  with[count + 1] = NULL;
  if (!value_of(environment, "GOMP_SPINCOUNT=") && !value_of(environment, "OMP_WAIT_POLICY="))
    execve((const char *)getauxval(AT_EXECFN), arguments, with); // where it fails, the run goes on as it is
}

static void start(int count, char **arguments, char **environment) {
  require_stack(environment);
  if (openblas_get_parallel) require_address_space(environment);
  bound_spinning(arguments, environment);
}

__attribute__((section(".preinit_array"), used)) static void (*const first)(int, char **, char **) = start;

// --- OpenBLAS's kernels ------------------------------------------------------------------------------------

// An OpenBLAS that is older than the CPU may take it for one of 2004 and run many times slower than it can.
// Its kernels for these instructions are chosen by starting over, once a child has computed rightly with
// them.

#define PROBE "LCE_PROBE_BLAS"

extern char *openblas_get_corename(void) __attribute__((weak));
extern void cblas_sgemm(int order, int a_transposed, int b_transposed, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc)
    __attribute__((weak));

// The core whose kernels use the CPU's instructions, if OpenBLAS's own choice does not; else NULL.
static const char *better_core(void) {
#if defined(__x86_64__)
  static const char *const good[] = {"Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids"};
  const char *core = openblas_get_corename();
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

// Small whole numbers, whose products have exact sums: C = A B of [m, k] and [k, n], or their transposes.
static bool multiplies_rightly(int m, int n, int k, bool a_transposed, bool b_transposed) {
  enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112, MOST = 1 << 16 };
  static float a[MOST], b[MOST], c[MOST];
  for (int i = 0; i < m * k; i++) a[i] = (float)(i * 7 % 9 - 4);
  for (int i = 0; i < k * n; i++) b[i] = (float)(i * 5 % 11 - 5);
  cblas_sgemm(ROW_MAJOR, a_transposed ? TRANSPOSED : PLAIN, b_transposed ? TRANSPOSED : PLAIN, m, n, k, 1, a,
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

static void probe(void) {
  static const int shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 33, 65}, {130, 1, 257}, {97, 129, 191}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int t = 0; t < 4; t++)
      if (!multiplies_rightly(shapes[i][0], shapes[i][1], shapes[i][2], t & 1, t & 2)) _exit(1);
  _exit(0);
}

__attribute__((constructor)) static void choose_core(int count, char **arguments, char **environment) {
  if (!openblas_get_corename || !cblas_sgemm) return;
  if (getenv(PROBE)) probe();
  const char *core = getenv("OPENBLAS_CORETYPE") ? NULL : better_core(), *program;
  if (!core) return;
  program = (const char *)getauxval(AT_EXECFN);
  setenv("OPENBLAS_CORETYPE", core, true);
  pid_t child = fork();
  if (child == 0) {
    setenv(PROBE, "1", true);
    execve(program, arguments, environ);
    _exit(1);
  }
  int status = 1;
  if (child > 0 && waitpid(child, &status, 0) == child && status == 0) execve(program, arguments, environ);
  unsetenv("OPENBLAS_CORETYPE");
  dprintf(STDERR_FILENO,
          "lce: this OpenBLAS takes the CPU for a %s, and its kernels for a %s do not work here; it computes "
          "slowly, and a newer one would not\n",
          openblas_get_corename(), core);
}
