// How training scales: the same run on 1, 2, 4, 8, ... ranks with the batch of each rank fixed (weak scaling).
//
//   tools/bench_scaling --model llama-1b --batch 4 --seq-len 4096           GPUs, by tools/launch
//   tools/bench_scaling --ranks 2 --device cpu --model llama-tiny           CPU processes, by mpirun
//
// --ranks N, first, is the largest number (default: the GPUs that are there, or 4); the rest are ./train's
// options. Efficiency is the tokens a second and rank over those of one rank alone; the bytes are what a rank
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
#include "base/text.h"
#include "checkpoint/files.h"
#include "checkpoint/json.h"

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
  for (const char *const *w = cpu ? by_mpi : by_launch; *w; w++) command[words++] = (char *)*w;
  for (const char *const *w = train; *w; w++) command[words++] = (char *)*w;
  for (int i = 0; i < argc && words < MOST_WORDS; i++) command[words++] = argv[i];
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
  if (status) fail("the run with %d rank%s failed", ranks, ranks > 1 ? "s" : "");
  if (!(f.rate > 0)) fail("the run with %d ranks was too short to be timed: give more --steps", ranks);
  return f;
}

int main(int argc, char **argv) {
  int first = 1, most = 0;
  if (argc > 2 && !strcmp(argv[1], "--ranks")) most = atoi(argv[2]), first = 3;
  bool cpu = gpus() == 0;
  for (int i = first; i < argc; i++)
    if (!strcmp(argv[i], "cpu") && !strcmp(argv[i - 1], "--device")) cpu = true;
  if (most < 1) most = cpu ? 4 : gpus();
  printf("%5s %12s %14s %10s %12s %22s %14s\n", "ranks", "tokens/s", "each", "ms a step", "efficiency",
         "sent a step by each", "ledger's peak");
  double alone = 0;
  for (int ranks = 1; ranks <= most; ranks *= 2) {
    Figures f = run(argv[0], ranks, cpu, argc - first, argv + first);
    if (ranks == 1) alone = f.rate;
    printf("%5d %12s %14s %10.1f %11.1f%% %22s %14s\n", ranks, text_count(f.rate).text,
           text_count(f.rate / ranks).text, 1e3 * f.seconds, 100 * f.rate / ranks / alone,
           text_bytes((uint64_t)f.wire_bytes).text, text_bytes((uint64_t)f.peak_bytes).text);
    fflush(stdout);
  }
  return 0;
}
