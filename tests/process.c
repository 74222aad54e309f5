#include "tests/process.h"

#include <unistd.h>

#include "kernels/ranks/ranks.h"

static char *contents(FILE *file) {
  char *text = NULL;
  size_t size = 0;
  if (getdelim(&text, &size, 0, file) >= 0) return text; // up to the end: text holds no 0
  free(text);
  return strdup("");
}

static bool can_launch(void) {
  if (getenv("LCE_GPU_RANKS")) return true;
#ifdef HAVE_MPI
  if (system("command -v mpirun >/dev/null") == 0) return true;
  print_message("skipped: there is no mpirun\n");
#else
  print_message("skipped: this build has no MPI\n");
#endif
  return false;
}

static void check_job(int ranks, bool gpus) {
  char path[4080], line[8192];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  assert_true(length > 0);
  path[length] = 0;
  // MPI never frees what it starts with; several ranks' and tests' threads share few cores.
  snprintf(line, sizeof line,
           "%s %s ASAN_OPTIONS=detect_leaks=0 OMP_WAIT_POLICY=passive exec %s %d %s rank %s 2>&1",
           gpus ? "" : "CUDA_VISIBLE_DEVICES=", ranks > 1 && !gpus ? "OMP_NUM_THREADS=1" : "",
           gpus ? "tools/launch" : "mpirun --allow-run-as-root --oversubscribe --bind-to none -n", ranks,
           path, gpus ? "gpus" : "cpus");
  FILE *out = popen(line, "r");
  assert_non_null(out);
  char *text = contents(out);
  int status = pclose(out);
  if (status || !strstr(text, "all cases hold"))
    fail_msg("%d ranks: exit status %d: %s", ranks, status, text);
  free(text);
}

void check_on_ranks(void) {
  if (!can_launch()) skip();
  const char *gpus = getenv("LCE_GPU_RANKS");
  int most = gpus ? atoi(gpus) : 4;
  for (int ranks = 1; ranks <= most; ranks++)
    if (!gpus || ranks == 2 || ranks == most) check_job(ranks, gpus);
}

static void run_on(const char *backend, void (*cases)(Harness *h)) {
  Harness *h = harness_open(backend);
  if (!h) fail("there is no %s here", backend);
  backend_join_ranks(h->backend);
  cases(h);
  harness_close(h);
}

bool ran_as_rank(int argc, char **argv, void (*cases)(Harness *h)) {
  if (argc != 3 || strcmp(argv[1], "rank") != 0) return false;
  bool gpus = !strcmp(argv[2], "gpus");
  ranks_begin();
  run_on(gpus ? "cuda-fp32" : "cpu", cases);
  run_on(gpus ? "cuda" : "cpu-plain", cases);
  printf("all cases hold\n");
  return true;
}

char *read_text(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) fail_msg("there is no %s: run the tests from the repository's root", path);
  char *text = contents(file);
  fclose(file);
  return text;
}
