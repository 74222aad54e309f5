#include "tests/runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Options options_on(bool cuda, char *line) {
  enum { MAX_ARGUMENTS = 64 };
  char *argv[MAX_ARGUMENTS + 1] = {"train"}, *rest = NULL;
  int argc = 1;
  for (char *word = strtok_r(line, " ", &rest); word && argc < MAX_ARGUMENTS;
       word = strtok_r(NULL, " ", &rest))
    argv[argc++] = word;
  Options options;
  setup_options(&options, argc, argv);
  setup_device(&options, cuda ? ON_CUDA : ON_CPU);
  return options;
}

static Run *open_line(const char *backend, const char *format, va_list arguments) {
  Run *run = calloc(1, sizeof *run);
  assert_non_null(run);
  run->h = harness_open(backend);
  if (!run->h) {
    free(run);
    return NULL;
  }
  bool cuda = !strncmp(backend, "cuda", 4), fp32 = strstr(backend, "fp32") != NULL;
  int length = vsnprintf(run->line, sizeof run->line, format, arguments);
  if (cuda && fp32)
    length += snprintf(run->line + length, sizeof run->line - (size_t)length, " --dtype fp32");
  assert_in_range(length, 0, sizeof run->line - 1);
  run->options = options_on(cuda, run->line);
  const Options *o = &run->options;
  run->data = setup_data(o);
  trainer_create(&run->trainer, o, run->h->backend);
  plan_set_mode(&run->trainer, o->mode);
  return run;
}

Run *run_open(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Run *run = open_line("cpu", format, arguments);
  va_end(arguments);
  assert_non_null(run);
  return run;
}

Run *run_open_on(const char *backend, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Run *run = open_line(backend, format, arguments);
  va_end(arguments);
  return run;
}

void run_close(Run *run) {
  trainer_destroy(&run->trainer);
  setup_data_close(&run->data);
  harness_close(run->h);
  options_free(&run->options);
  free(run);
}

StepResult run_step(Run *run, int64_t step) {
  StepResult results[TRAINER_PENDING];
  trainer_step(&run->trainer, &run->data.loader, step);
  assert_int_equal(trainer_collect(&run->trainer, results), 1);
  assert_int_equal(results[0].step, step);
  return results[0];
}
