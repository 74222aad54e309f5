// What must happen before the libraries' constructors, which read the environment: linked into every program.
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
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
  void *probe = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe != MAP_FAILED) {
    munmap(probe, bytes);
    return;
  }
  dprintf(STDERR_FILENO,
          "lce: `ulimit -v` leaves less than the %zu MiB of address space that OpenBLAS needs for "
          "%d threads; raise it, or set OMP_NUM_THREADS=1\n",
          bytes >> 20, threads);
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
  if (openblas_get_parallel) require_address_space(environment);
  bound_spinning(arguments, environment);
}

__attribute__((section(".preinit_array"), used)) static void (*const first)(int, char **, char **) = start;
