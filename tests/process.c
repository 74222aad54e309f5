#include "tests/process.h"

#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

static char *contents(FILE *file) {
  char *text = NULL;
  size_t size = 0;
  if (getdelim(&text, &size, 0, file) >= 0) return text; // up to the end: text holds no 0
  free(text);
  return strdup("");
}

Output launch_self(int ranks, const char *arguments) {
  bool gpus = getenv("LCE_GPU_RANKS");
  char path[4080], line[8192];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  assert_true(length > 0);
  path[length] = 0;
  // MPI never frees what it starts with; several tests' threads may share few cores.
  snprintf(line, sizeof line,
           "%s ASAN_OPTIONS=detect_leaks=0 OMP_WAIT_POLICY=passive exec timeout 120 %s %d %s %s 2>&1",
           gpus ? "" : "CUDA_VISIBLE_DEVICES=",
           gpus ? "tools/launch" : "mpirun --allow-run-as-root --oversubscribe --bind-to none -n", ranks,
           path, arguments);
  FILE *out = popen(line, "r");
  assert_non_null(out);
  Output output = {.text = contents(out)};
  output.status = pclose(out);
  return output;
}

bool can_launch(void) {
  if (getenv("LCE_GPU_RANKS")) return true;
#ifdef HAVE_MPI
  if (system("command -v mpirun >/dev/null") == 0) return true;
  print_message("skipped: there is no mpirun\n");
#else
  print_message("skipped: this build has no MPI\n");
#endif
  return false;
}

char *read_text(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) fail_msg("there is no %s: run the tests from the repository's root", path);
  char *text = contents(file);
  fclose(file);
  return text;
}
