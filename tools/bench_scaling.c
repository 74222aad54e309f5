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
#include "base/option_rows.h"
#include "base/text.h"

enum { MAX_WORDS = 256, MAX_RANKS = 4096 };

// --- options -----------------------------------------------------------------------------------------------

typedef struct {
  int ranks;          // the largest number; 0: not given
  const char *device; // of ./train; NULL: not given
  const char *ignored;
  bool flag;
} Settings;

// --ranks is this program's. The others are ./train's: one that is looked at, and those that a timed run has no
// use for, or would take from the run before it.
#define OPTION_VALUES Settings
static const Option option_rows[] = {
    {WHOLE("ranks", "N", ranks, 1, MAX_RANKS),
     HELP("The largest number of ranks (default: as many as there are GPUs, else 4)")},
    {TEXT("device", "DEVICE", device), .flags = OPTION_SHARED,
     HELP("./train's: cpu starts the ranks by mpirun, as where there is no GPU")},
    {OPTION_END}};
static const Option refused_rows[] = {{FLAG("plan", flag, true)},
                                      {FLAG("fit", flag, true)},
                                      {FLAG("eval-only", flag, true)},
                                      {FLAG("compare-modes", flag, true)},
                                      {TEXT("save", "DIR", ignored)},
                                      {TEXT("resume", "WHERE", ignored)},
                                      {TEXT("log", "FILE", ignored)},
                                      {TEXT("timeline", "FILE", ignored)},
                                      {OPTION_END}};

// Returns how many words are left for ./train.
static int parse(Settings *o, int argc, char **argv) {
  static const OptionTable refused_table = {refused_rows, NULL, NULL};
  static const OptionTable table = {
      option_rows,
      "How training scales: the same run on 1, 2, 4, 8, ... and at last N ranks of this machine, the batch "
      "of each rank fixed. Prints tokens a second, the time of a step, the efficiency (tokens a second and "
      "rank over those of one rank alone), the bytes that a rank sends in a step, and the ledger's peak on a "
      "rank.\v"
      "All else goes to ./train (./train --help): --model, --batch, --seq-len, --zero, --vocab-parallel, ... "
      "--steps is 30 unless it is given, and nothing is validated or sampled. tools/launch starts ranks on "
      "GPUs.\n\n"
      "  tools/bench_scaling --model llama-1b --batch 4 --seq-len 4096\n"
      "  tools/bench_scaling --ranks 2 --device cpu --model llama-tiny\n",
      NULL};
  bool refused[OPTION_ROWS_MAX] = {false};
  int words = option_table_take(&table, o, NULL, argc, argv);
  words = option_table_take(&refused_table, o, refused, words, argv);
  for (int i = 0; refused_rows[i].type != OPTION_END; i++)
    if (refused[i])
      fail("bench_scaling times runs and does nothing else: leave out --%s", refused_rows[i].name);
  return words;
}

// --- a run -------------------------------------------------------------------------------------------------

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

// The path of a program of the build that `self`, tools/bench_scaling, is of.
static const char *same_build(const char *self, const char *name) {
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
static Figures run(char **argv, int argc, int ranks, bool cpu) {
  char log[] = "/tmp/bench_scaling.XXXXXX", count[16];
  int file = mkstemp(log), words = 0;
  if (file < 0) fail("cannot make a file in /tmp: %s", strerror(errno));
  close(file);
  snprintf(count, sizeof count, "%d", ranks);
  const char *by_mpi[] = {
      "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", count, NULL};
  const char *by_launch[] = {same_build(argv[0], "tools/launch"), count, NULL};
  const char *const train[] = {same_build(argv[0], "train"),
                               "--steps=30",
                               "--val-fraction=0",
                               "--sample-every=0",
                               "--eval-every=0",
                               "--log",
                               log,
                               NULL};
  char *command[MAX_WORDS + 1];
  for (const char *const *w = cpu ? by_mpi : by_launch; ranks > 1 && *w; w++) command[words++] = (char *)*w;
  for (const char *const *w = train; *w; w++) command[words++] = (char *)*w;
  if (words + argc > MAX_WORDS) fail("%d options are more than the %d that fit", argc, MAX_WORDS - words);
  for (int i = 1; i < argc; i++) command[words++] = argv[i];
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

int main(int argc, char **argv) {
  Settings o = {0};
  int words = parse(&o, argc, argv);
  bool cpu = gpus() == 0 || (o.device && !strcmp(o.device, "cpu"));
  int max = o.ranks ? o.ranks : cpu ? 4 : gpus();
  double alone = 0;
  for (int ranks = 1, next; ranks <= max; ranks = next) {
    Figures f = run(argv, words, ranks, cpu);
    if (ranks == 1) {
      alone = f.rate;
      printf("%5s %12s %14s %10s %12s %22s %14s\n", "ranks", "tokens/s", "each", "ms a step", "efficiency",
             "sent a step by each", "ledger's peak");
    }
    printf("%5d %12s %14s %10.1f %11.1f%% %22s %14s\n", ranks, text_count(f.rate).text,
           text_count(f.rate / ranks).text, 1e3 * f.seconds, 100 * f.rate / ranks / alone,
           text_bytes((uint64_t)f.wire_bytes).text, text_bytes((uint64_t)f.peak_bytes).text);
    fflush(stdout);
    next = ranks < max && 2 * ranks > max ? max : 2 * ranks;
  }
  return 0;
}
