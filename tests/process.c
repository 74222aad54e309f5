#include "tests/process.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/system.h"
#include "tests/test.h"

enum { DEADLINE_SECONDS = 120, LINE = 8192 };

// Where this program lies: build/VARIANT/tests/test_x.
static const char *test_program(void) {
  static char path[4080];
  ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  assert_true(length > 0);
  path[length] = 0;
  return path;
}

static const char *program(void) {
  static char built[4096];
  const char *named = getenv("LCE_TRAIN");
  if (named) return named;
  strcpy(built, test_program());
  for (int i = 0; i < 2; i++) *strrchr(built, '/') = 0;
  strcat(built, "/train");
  return access(built, X_OK) == 0 ? built : "./train"; // the release build's lies in the root
}

// The folder of ./train, where tools/ is.
static int folder_length(void) {
  return (int)(strrchr(program(), '/') - program());
}

static FILE *temporary_file(void) {
  FILE *file = tmpfile();
  assert_non_null(file);
  return file;
}

// A program by its path, alone (0 ranks) or as ranks.
static Process start(const char *path, int ranks, const char *format, va_list arguments) {
  char line[LINE], launcher[4200] = "";
  if (ranks && getenv("LCE_GPU_RANKS"))
    snprintf(launcher, sizeof launcher, "tools/launch %d", ranks);
  else if (ranks)
    snprintf(launcher, sizeof launcher, "mpirun --allow-run-as-root --oversubscribe --bind-to none -n %d",
             ranks);
  int length = snprintf(line, sizeof line, "exec %s %s ", launcher, path);
  assert_in_range(vsnprintf(line + length, sizeof line - (size_t)length, format, arguments), 0,
                  LINE - length - 1);
  Process p = {.out = temporary_file(), .err = temporary_file()};
  p.pid = fork();
  assert_true(p.pid >= 0);
  if (p.pid == 0) {
    if (!getenv("LCE_GPU_RANKS")) setenv("CUDA_VISIBLE_DEVICES", "", 1);
    if (ranks) setenv("ASAN_OPTIONS", "detect_leaks=0", 1); // MPI never frees what it starts with
    setenv("OMP_WAIT_POLICY", "passive", 1);                // several tests' threads may share few cores
    dup2(fileno(p.out), STDOUT_FILENO);
    dup2(fileno(p.err), STDERR_FILENO);
    execl("/bin/sh", "sh", "-c", line, NULL);
    _exit(127);
  }
  return p;
}

// Defines p, the program that the function's format and arguments start.
#define START(p, path, ranks)                                                                                \
  va_list arguments;                                                                                         \
  va_start(arguments, format);                                                                               \
  Process p = start(path, ranks, format, arguments);                                                         \
  va_end(arguments)

static char *contents(FILE *file) {
  off_t size = lseek(fileno(file), 0, SEEK_END);
  assert_true(size >= 0);
  char *text = calloc((size_t)size + 1, 1);
  assert_non_null(text);
  ssize_t got = pread(fileno(file), text, (size_t)size, 0);
  assert_true(got >= 0);
  text[got] = 0;
  return text;
}

// Waits a little, and gives up when that has taken too long.
static void pause_briefly(const Process *p, double started, const char *waiting_for) {
  nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  if (now_seconds() - started <= DEADLINE_SECONDS) return;
  kill(p->pid, SIGKILL);
  fail_msg("waited in vain for %s; the output is: %s%s", waiting_for, contents(p->out), contents(p->err));
}

Output process_finish(Process *p) {
  int status = 0;
  for (double started = now_seconds(); waitpid(p->pid, &status, WNOHANG) == 0;)
    pause_briefly(p, started, "the end");
  Output output = {.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                   .out = contents(p->out),
                   .err = contents(p->err)};
  fclose(p->out);
  fclose(p->err);
  return output;
}

Output train(const char *format, ...) {
  START(p, program(), 0);
  return process_finish(&p);
}

Output train_ranks(int ranks, const char *format, ...) {
  START(p, program(), ranks);
  return process_finish(&p);
}

Output launch_self(int ranks, const char *format, ...) {
  START(p, test_program(), ranks);
  return process_finish(&p);
}

Output run_tool(const char *name, const char *format, ...) {
  char path[4200];
  snprintf(path, sizeof path, "%.*s/tools/%s", folder_length(), program(), name);
  START(p, path, 0);
  return process_finish(&p);
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

void output_free(Output *output) {
  free(output->out);
  free(output->err);
  *output = (Output){0};
}

// --- text in output -----------------------------------------------------------------------------------------

char *read_text(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    fail_msg("there is no %s: run the tests from the repository's root", path);
    return NULL;
  }
  char *text = contents(file);
  fclose(file);
  return text;
}

void assert_says(const char *text, const char *part) {
  if (!strstr(text, part)) fail_msg("the text lacks \"%s\": %s", part, text);
}
