// What must happen before the constructors of the libraries: the Makefile links it into every program.
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/limits.h"

extern int openblas_get_parallel(void) __attribute__((weak));

// The value of a variable; getenv works only once libc's constructor has run.
static const char *value_of(char **environment, const char *name) {
  size_t length = strlen(name);
  for (; *environment; environment++)
    if (!strncmp(*environment, name, length) && (*environment)[length] == '=')
      return *environment + length + 1;
  return NULL;
}

// OpenBLAS's constructor allocates for each thread, and would try for ever.
static void require_address_space(char **environment) {
  cpu_set_t cores;
  int threads = sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
  const char *names[] = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"};
  for (int i = 0; i < 2; i++) {
    const char *given = value_of(environment, names[i]);
    if (given && atoi(given) > 0 && atoi(given) < threads) threads = atoi(given);
  }
  size_t bytes = (size_t)threads * OPENBLAS_THREAD_BYTES + ((size_t)16 << 20);
  void *probe = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe != MAP_FAILED) {
    munmap(probe, bytes);
    return;
  }
  dprintf(
      STDERR_FILENO,
      "lce: `ulimit -v` leaves less than the %zu MiB of address space that OpenBLAS needs for %d thread%s; "
      "raise it%s\n",
      bytes >> 20, threads, threads == 1 ? "" : "s", threads == 1 ? "" : ", or set OMP_NUM_THREADS=1");
  _exit(1);
}

// At a barrier libgomp's threads spin for milliseconds, which keeps those that they wait for from a core where
// the machine has other work, too. Its settings come from the environment alone: start over with a short spin.
static void bound_spinning(char **arguments, char **environment) {
  if (value_of(environment, "GOMP_SPINCOUNT") || value_of(environment, "OMP_WAIT_POLICY")) return;
  size_t count = 0;
  while (environment[count]) count++;
  char **with = malloc((count + 2) * sizeof *with), setting[] = "GOMP_SPINCOUNT=1000";
  if (!with) return;
  memcpy(with, environment, count * sizeof *with);
  with[count] = setting;
  with[count + 1] = NULL;
  execve((const char *)getauxval(AT_EXECFN), arguments, with); // where it fails, the run continues as it is
  free(with);
}

static void start(int count, char **arguments, char **environment) {
  if (openblas_get_parallel) require_address_space(environment);
  bound_spinning(arguments, environment);
}

__attribute__((section(".preinit_array"), used)) static void (*const first)(int, char **, char **) = start;
