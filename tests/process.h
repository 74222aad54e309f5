// Runs ./train as a user would, and keeps its output.
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

typedef struct {
  int status;      // the exit status, or 128 + the signal that ended it
  char *out, *err; // all of standard output and standard error
} Output;

// `format` makes the arguments, as a shell reads them. The program is $LCE_TRAIN, or
// the one of the build's directory. No GPU is visible to it. A run that takes longer than two
// minutes is killed, and the test fails.
Output train(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The same as `ranks` ranks, started by mpirun or, where LCE_GPU_RANKS is set, by tools/launch with GPUs in
// sight.
Output train_ranks(int ranks, const char *format, ...) __attribute__((format(printf, 2, 3)));
// The same with the test program itself.
Output launch_self(int ranks, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Whether train_ranks can start anything here; prints why not.
bool can_launch(void);
// A program of tools/, of the same build.
Output run_tool(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void output_free(Output *output);

// A run that is observed while it continues.
typedef struct {
  pid_t pid;
  FILE *out, *err;
} Process;

Output process_finish(Process *process);
// The whole of a file, which must be there; the caller frees it.
char *read_text(const char *path);
// The test fails unless `text` holds `part`.
void assert_says(const char *text, const char *part);
