// How training scales: the same run on 1, 2, 4, 8, ... and at last N ranks with the batch of each rank fixed
// (weak scaling).
//
//   tools/bench_scaling --model llama-1b --batch 4 --seq-len 4096           GPUs, by tools/launch
//   tools/bench_scaling --ranks 2 --device cpu --model llama-tiny           CPU processes, by mpirun
//
// --ranks N is the largest number (default: the GPUs that are there, or 4); the rest are ./train's options.
// Efficiency is the tokens a second and rank over those of one rank alone; the bytes are what a rank
// sends in a step.
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fail.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"

enum { MOST_WORDS = 256 };

// What one run came to.
typedef struct {
  double rate, seconds, wire_bytes, peak_bytes;
} Figures;

static int gpus(void) {
  glob_t found;
  int count = glob("/dev/nvidia[0-9]*", 0, NULL, &found) ? 0 : (int)found.gl_pathc;
  if (count) globfree(&found);
  return count;
}

// "train" beside this program's folder: the same build's.
static const char *beside(const char *self, const char *name) {
  char *path, *folder = strdup(self), *slash = folder ? strrchr(folder, '/') : NULL;
  if (slash) *slash = 0;
  char *tools = slash ? strrchr(folder, '/') : NULL;
  if (tools) *tools = 0;
  if (asprintf(&path, "%s/%s", tools ? folder : ".", name) < 0)
    fail("out of host memory for the path of %s", name);
  free(folder);
  return path;
}

static double number(const cJSON *json, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);
  return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

static Figures read_summary(const char *log) {
  size_t length;
  char *text = file_read(log, &length), *rest = NULL;
  Figures f = {0};
  for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line; line = strtok_r(NULL, "\n", &rest)) {
    Reason reason;
    cJSON *json = json_parse(line, strlen(line), &reason);
    const char *event = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "event"));
    if (event && !strcmp(event, "summary"))
      f = (Figures){.rate = number(json, "tokens_per_second"),
                    .seconds = number(json, "seconds_per_step"),
                    .wire_bytes = number(json, "wire_bytes_per_step"),
                    .peak_bytes = number(json, "peak_bytes")};
    cJSON_Delete(json);
  }
  free(text);
  return f;
}

// One rank needs no launcher.
static Figures run(const char *self, int ranks, bool cpu, int argc, char **argv) {
  char log[] = "/tmp/bench_scaling.XXXXXX", count[16];
  int file = mkstemp(log), words = 0;
  if (file < 0) fail("cannot make a file in /tmp: %s", strerror(errno));
  close(file);
  snprintf(count, sizeof count, "%d", ranks);
  const char *by_mpi[] = {
      "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", count, NULL};
  const char *by_launch[] = {beside(self, "tools/launch"), count, NULL};
  const char *const train[] = {beside(self, "train"),
                               "--steps",
                               "30",
                               "--val-fraction",
                               "0",
                               "--sample-every",
                               "0",
                               "--eval-every",
                               "0",
                               "--log",
                               log,
                               NULL};
  char *command[MOST_WORDS + 1];
  for (const char *const *w = cpu ? by_mpi : by_launch; ranks > 1 && *w; w++) command[words++] = (char *)*w;
  for (const char *const *w = train; *w; w++) command[words++] = (char *)*w;
  if (words + argc > MOST_WORDS) fail("%d options are more than the %d that fit", argc, MOST_WORDS - words);
  for (int i = 0; i < argc; i++) command[words++] = argv[i];
  command[words] = NULL;
  pid_t child = fork();
  if (child < 0) fail("cannot start %s: %s", command[0], strerror(errno));
  if (child == 0) {
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    execvp(command[0], command);
    fprintf(stderr, "lce: cannot start %s: %s\n", command[0], strerror(errno));
    _exit(127);
  }
  int status;
  waitpid(child, &status, 0);
  Figures f = read_summary(log);
  unlink(log);
  free((char *)by_launch[0]);
  free((char *)train[0]);
  const char *plural = ranks > 1 ? "s" : "";
  if (ranks == 1 && WIFEXITED(status) && status) exit(WEXITSTATUS(status)); // it has said why
  if (status) fail("the run with %d rank%s failed", ranks, plural);
  if (!(f.rate > 0))
    fail("the run with %d rank%s was too short to be timed: give more --steps", ranks, plural);
  return f;
}

static const char help[] =
    "Usage: bench_scaling [--ranks N] [OPTION...]\n"
    "How training scales: the same run on 1, 2, 4, 8, ... and at last N ranks of this machine, the batch of\n"
    "each rank fixed. Prints tokens a second, the time of a step, the efficiency (tokens a second and rank\n"
    "over those of one rank alone), the bytes that a rank sends in a step, and the ledger's peak on a rank.\n"
    "\n"
    "  --ranks N          the largest number of ranks (default: as many as there are GPUs, else 4)\n"
    "  --help             says this\n"
    "\n"
    "All else goes to ./train (./train --help): --model, --batch, --seq-len, --zero, --vocab-parallel, ...\n"
    "--steps is 30 unless it is given, and nothing is validated or sampled. Ranks on GPUs are started by\n"
    "tools/launch, those of --device cpu (or where there is no GPU) by mpirun.\n"
    "\n"
    "  tools/bench_scaling --model llama-1b --batch 4 --seq-len 4096\n"
    "  tools/bench_scaling --ranks 2 --device cpu --model llama-tiny\n";

// Whether argument i is --name VALUE or --name=VALUE, which *value then is; NULL where it is missing.
static bool is_option(const char *name, int argc, char **argv, int i, const char **value) {
  size_t length = strlen(name);
  if (strncmp(argv[i], name, length) != 0 || (argv[i][length] && argv[i][length] != '=')) return false;
  *value = argv[i][length] ? argv[i] + length + 1 : i + 1 < argc ? argv[i + 1] : NULL;
  return true;
}

static int whole_number(const char *text) {
  char *end;
  long value = text ? strtol(text, &end, 10) : 0;
  if (!text || end == text || *end || value < 1 || value > 4096)
    fail("--ranks %s: give a whole number from 1 to 4096", text ? text : "");
  return (int)value;
}

// What ./train knows and a run that is timed has no use for, or that each run would take from the one before.
static void refuse_other_work(const char *argument) {
  static const char *const others[] = {"--plan",   "--fit", "--eval-only", "--save",
                                       "--resume", "--log", "--timeline",  "--compare-modes"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    if (!strncmp(argument, others[i], strlen(others[i])) && strchr("=", argument[strlen(others[i])]))
      fail("bench_scaling times runs and does nothing else: leave out %s", others[i]);
}

// Takes this program's own options out of the command line; returns how many words are left for ./train.
static int take_own(int argc, char **argv, int *most, bool *cpu) {
  int rest = 0;
  for (int i = 1; i < argc; i++) {
    const char *value;
    if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-?")) {
      fputs(help, stdout);
      exit(0);
    }
    refuse_other_work(argv[i]);
    if (is_option("--ranks", argc, argv, i, &value)) {
      *most = whole_number(value);
      i += value == argv[i + 1];
      continue;
    }
    if (is_option("--device", argc, argv, i, &value) && value && !strcmp(value, "cpu")) *cpu = true;
    argv[rest++] = argv[i];
  }
  return rest;
}

int main(int argc, char **argv) {
  const char *self = argv[0];
  bool cpu = gpus() == 0;
  int most = 0, count = take_own(argc, argv, &most, &cpu);
  if (!most) most = cpu ? 4 : gpus();
  double alone = 0;
  for (int ranks = 1, next; ranks <= most; ranks = next) {
    Figures f = run(self, ranks, cpu, count, argv);
    if (ranks == 1) {
      alone = f.rate;
      printf("%5s %12s %14s %10s %12s %22s %14s\n", "ranks", "tokens/s", "each", "ms a step", "efficiency",
             "sent a step by each", "ledger's peak");
    }
    printf("%5d %12s %14s %10.1f %11.1f%% %22s %14s\n", ranks, text_count(f.rate).text,
           text_count(f.rate / ranks).text, 1e3 * f.seconds, 100 * f.rate / ranks / alone,
           text_bytes((uint64_t)f.wire_bytes).text, text_bytes((uint64_t)f.peak_bytes).text);
    fflush(stdout);
    next = ranks < most && 2 * ranks > most ? most : 2 * ranks;
  }
  return 0;
}
