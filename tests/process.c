#include "tests/process.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/system.h"

enum { MAX_ARGUMENTS = 96, DEADLINE_SECONDS = 120 };

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

// Cuts `line` into words behind the `argc` that are there; 'a word in quotes' may hold spaces or nothing.
static void split(char *line, int argc, char *argv[MAX_ARGUMENTS + 1]) {
  for (char *at = line; *at;) {
    at += strspn(at, " ");
    if (!*at) break;
    assert_true(argc < MAX_ARGUMENTS);
    char end = *at == '\'' ? '\'' : ' ';
    if (end == '\'') at++;
    argv[argc++] = at;
    at += strcspn(at, end == '\'' ? "'" : " ");
    if (*at) *at++ = 0;
  }
  argv[argc] = NULL;
}

static int temporary_file(void) {
  char name[] = "/tmp/test_output.XXXXXX";
  int file = mkstemp(name);
  assert_true(file >= 0);
  unlink(name);
  return file;
}

// A program of the same build as ./train.
static const char *tool_program(const char *name) {
  static char path[4096];
  const char *train = program(), *slash = strrchr(train, '/');
  assert_in_range(snprintf(path, sizeof path, "%.*s/tools/%s", (int)(slash - train), train, name), 1,
                  sizeof path - 1);
  return path;
}

// How a program is started: alone, by mpirun (or on GPUs), the test program likewise; or, alone, the one that the first
// word names.
typedef enum { ALONE, AS_RANKS, SELF_AS_RANKS, NAMED } Way;

// The words that go before the program's own; returns how many there are.
static int launcher(Way way, int ranks, char *argv[MAX_ARGUMENTS + 1]) {
  static char number[16];
  snprintf(number, sizeof number, "%d", ranks);
  char *const tool[] = {(char *)tool_program("launch"), number, NULL};
  char *const mpi[] = {"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", number,
                       NULL};
  char *const *words = getenv("LCE_GPU_RANKS") ? tool : mpi;
  int count = 0;
  for (; way != ALONE && way != NAMED && words[count]; count++) argv[count] = words[count];
  return count;
}

static Process start(Way way, int ranks, const char *format, va_list arguments) {
  char line[4096];
  char *argv[MAX_ARGUMENTS + 1];
  int argc = launcher(way, ranks, argv);
  if (way != NAMED) argv[argc++] = (char *)(way == SELF_AS_RANKS ? test_program() : program());
  assert_in_range(vsnprintf(line, sizeof line, format, arguments), 0, sizeof line - 1);
  split(line, argc, argv);
  Process p = {.out = temporary_file(), .err = temporary_file()};
  p.pid = fork();
  assert_true(p.pid >= 0);
  if (p.pid == 0) {
    if (!getenv("LCE_GPU_RANKS")) setenv("CUDA_VISIBLE_DEVICES", "", 1);
    if (way != ALONE) setenv("ASAN_OPTIONS", "detect_leaks=0", 1); // MPI never frees what it starts with
    setenv("OMP_WAIT_POLICY", "passive", 1); // several tests' threads may share few cores
    dup2(p.out, STDOUT_FILENO);
    dup2(p.err, STDERR_FILENO);
    execvp(argv[0], argv);
    _exit(127);
  }
  return p;
}

// Defines p, the program that the function's format and arguments start.
#define START(p, way, ranks)                                                                                 \
  va_list arguments;                                                                                         \
  va_start(arguments, format);                                                                               \
  Process p = start(way, ranks, format, arguments);                                                          \
  va_end(arguments)

Process train_start(const char *format, ...) {
  START(p, ALONE, 0);
  return p;
}

static char *contents(int file) {
  off_t size = lseek(file, 0, SEEK_END);
  assert_true(size >= 0);
  char *text = calloc((size_t)size + 1, 1);
  assert_non_null(text);
  ssize_t got = pread(file, text, (size_t)size, 0);
  assert_true(got >= 0);
  text[got] = 0;
  return text;
}

static void pause_briefly(void) {
  nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
}

static void give_up(const Process *p, const char *waiting_for) {
  kill(p->pid, SIGKILL);
  char *out = contents(p->out), *err = contents(p->err);
  fail_msg("waited in vain for %s; the output is: %s%s", waiting_for, out, err);
}

void process_wait_for(Process *p, const char *text) {
  for (double started = now_seconds();; pause_briefly()) {
    char *out = contents(p->out);
    bool found = strstr(out, text);
    free(out);
    if (found) return;
    if (now_seconds() - started > DEADLINE_SECONDS || waitpid(p->pid, NULL, WNOHANG) != 0) give_up(p, text);
  }
}

Output process_finish(Process *p) {
  int status = 0;
  for (double started = now_seconds(); waitpid(p->pid, &status, WNOHANG) == 0; pause_briefly()) {
    if (now_seconds() - started > DEADLINE_SECONDS) give_up(p, "the end");
  }
  Output output = {.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                   .out = contents(p->out),
                   .err = contents(p->err)};
  close(p->out);
  close(p->err);
  return output;
}

Output train(const char *format, ...) {
  START(p, ALONE, 0);
  return process_finish(&p);
}

Output train_ranks(int ranks, const char *format, ...) {
  START(p, AS_RANKS, ranks);
  return process_finish(&p);
}

Output launch_self(int ranks, const char *format, ...) {
  START(p, SELF_AS_RANKS, ranks);
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

static Output __attribute__((format(printf, 1, 2))) run_named(const char *format, ...) {
  START(p, NAMED, 0);
  return process_finish(&p);
}

Output run_tool(const char *name, const char *format, ...) {
  char line[4096];
  int length = snprintf(line, sizeof line, "%s ", tool_program(name));
  va_list arguments;
  va_start(arguments, format);
  assert_in_range(vsnprintf(line + length, sizeof line - (size_t)length, format, arguments), 0,
                  (int)sizeof line - length - 1);
  va_end(arguments);
  return run_named("%s", line);
}

void output_free(Output *output) {
  free(output->out);
  free(output->err);
  *output = (Output){0};
}

// --- text in output -----------------------------------------------------------------------------------------

char *read_text(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) fail_msg("there is no %s: run the tests from the repository's root", path);
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  char *text = calloc((size_t)size + 1, 1);
  assert_int_equal(fread(text, 1, (size_t)size, file), size);
  fclose(file);
  return text;
}

void assert_says(const char *text, const char *part) {
  if (!strstr(text, part)) fail_msg("the text lacks \"%s\": %s", part, text);
}
