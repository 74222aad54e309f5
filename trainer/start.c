// Sets up the libraries, which read the environment as they start: before their constructors, and after them
// for OpenBLAS, which says only then which CPU it computes for. Linked into every program.
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/base/system.h"
#include "kernels/cpu/blas_core.h"

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

// Better ones are chosen by starting over, once a child has computed rightly with them.

static char trial[] = "lce-probe-blas"; // the child's name: it has no other arguments

extern char *openblas_get_corename(void) __attribute__((weak));
extern Cblas cblas_sgemm __attribute__((weak));

__attribute__((constructor)) static void choose_core(int count, char **arguments, char **environment) {
  if (!openblas_get_corename || !cblas_sgemm) return;
  if (count == 1 && !strcmp(arguments[0], trial)) _exit(!blas_multiplies_rightly(cblas_sgemm));
  const char *core = getenv("OPENBLAS_CORETYPE") ? NULL : blas_better_core(openblas_get_corename()), *program;
  if (!core) return;
  program = (const char *)getauxval(AT_EXECFN);
  setenv("OPENBLAS_CORETYPE", core, true);
  pid_t child = fork();
  if (child == 0) {
    execve(program, (char *[]){trial, NULL}, environ);
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
