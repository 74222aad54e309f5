#include "tools/torch/liblce/blas/found_blas.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/base/fail.h"
#include "kernels/cpu/blas_core.h"
#include "tools/torch/liblce/blas/cblas.h"

// The Fortran interface, which every BLAS has: column-major, all arguments by address, then the texts' lengths.
typedef void Sgemm(const char *transposed_a, const char *transposed_b, const int *m, const int *n,
                   const int *k, const float *alpha, const float *a, const int *a_stride, const float *b,
                   const int *b_stride, const float *beta, float *c, const int *c_stride, size_t, size_t);

static struct {
  const char *name;
  Sgemm *sgemm;
  int (*set_threads)(int); // MKL's, of the calling thread; returns what was set
} found;

// True if kernels that the environment names compute rightly, in a child of one thread.
static bool core_works(const char *name) {
  pid_t child = fork();
  if (child == 0) {
    alarm(10); // in case a lock was held as the child began
    omp_set_num_threads(1);
    void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    *(void **)&found.sgemm = library ? dlsym(library, "sgemm_") : NULL;
    _exit(!found.sgemm || !blas_multiplies_rightly(cblas_sgemm));
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// Opens a BLAS; an OpenBLAS that does not know the CPU once more, with better kernels.
static void *open_blas(const char *name, int flags) {
  void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL | flags);
  char *(*core_name)(void);
  *(void **)&core_name =
      library && !getenv("OPENBLAS_CORETYPE") ? dlsym(library, "openblas_get_corename") : NULL;
  const char *core = core_name ? blas_better_core(core_name()) : NULL;
  if (!core || dlclose(library) || dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
    return library; // others use it, too
  setenv("OPENBLAS_CORETYPE", core, true);
  if (!core_works(name)) {
    unsetenv("OPENBLAS_CORETYPE");
    warn("%s does not know this CPU, and its kernels for a %s do not work here; it computes slowly, and a "
         "newer "
         "one would not",
         name, core);
  }
  library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  unsetenv("OPENBLAS_CORETYPE");
  return library;
}

static bool find_in(const char *name, int flags) {
  void *library = open_blas(name, flags);
  if (!library) return false;
  void *sgemm = dlsym(library, "sgemm_"), *set_threads = dlsym(library, "MKL_Set_Num_Threads_Local");
  int (*parallel)(void), (*threads)(void);
  *(void **)&parallel = dlsym(library, "openblas_get_parallel");
  *(void **)&threads = dlsym(library, "openblas_get_num_threads");
  if (!sgemm) return false;
  found.name = name;
  *(void **)&found.sgemm = sgemm;
  *(void **)&found.set_threads = set_threads;
  if (parallel && threads && parallel() == 1 && threads() > 1)
    warn("%s has threads of its own, which slow the loss down; name one that uses OpenMP's in LCE_BLAS, as "
         "libopenblas0-openmp installs",
         name);
  return true;
}

// PyTorch's own BLAS comes first: both then share their threads, and there is nothing to install.
static void find(void) {
  static const char *const names[] = {"libopenblas.so.0", "libmkl_rt.so.2", "libflexiblas.so.3"};
  const char *given = getenv("LCE_BLAS");
  if (given) {
    if (*given) find_in(given, 0);
    return;
  }
  if (find_in("libtorch_cpu.so", RTLD_NOLOAD)) return;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (find_in(names[i], 0)) return;
  warn("there is no BLAS here, so the CPU's matrix products are plain loops, many times slower; install "
       "libopenblas0-openmp, or name a BLAS in LCE_BLAS");
}

const char *found_blas(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find);
  const char *given = getenv("LCE_BLAS");
  if (given && *given && !found.sgemm)
    fail("LCE_BLAS: %s is no library with the BLAS function sgemm_ that this process can load", given);
  return found.name;
}

void cblas_sgemm(int order, int transposed_a, int transposed_b, int m, int n, int k, float alpha,
                 const float *a, int a_stride, const float *b, int b_stride, float beta, float *c,
                 int c_stride) {
  bool alone = found.set_threads && omp_in_parallel();
  int threads = alone ? found.set_threads(1) : 0;
  // By columns what is here by rows: c^T = b^T a^T.
  found.sgemm(transposed_b == CblasTrans ? "T" : "N", transposed_a == CblasTrans ? "T" : "N", &n, &m, &k,
              &alpha, b, &b_stride, a, &a_stride, &beta, c, &c_stride, 1, 1);
  if (alone) found.set_threads(threads);
}
