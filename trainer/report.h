// What a person sees: the memory table and the progress line.
#ifndef LCE_TRAINER_REPORT_H
#define LCE_TRAINER_REPORT_H

#include <stdio.h>

#include "trainer/plan.h"
#include "trainer/trainer.h"

// One column of the memory table.
typedef struct {
  const char *title; // "fused, measured"
  Plan memory;
  size_t device_bytes; // what the system says, beside the ledger; 0 when not measured
  double pass_seconds; // one forward and backward; 0 when not measured
} MemoryColumn;

void report_memory(FILE *out, const MemoryColumn *columns, int count, const char *device_row);

// Bytes in use after every event of the ledger's timeline, one line each, by category, as CSV.
void report_timeline(const char *path, const Ledger *ledger);

// The run's progress: a line that rewrites itself on a terminal, a plain line a second or so when piped.
typedef struct {
  bool terminal, drawn;
  int64_t steps;         // of the whole run
  int64_t first_step;    // where this run began
  double flops_per_step; // model flops, see model_flops_per_token
  double gemm_rate;      // flops a second that the machine's products reach, measured at the start
  double started, last_printed;
  double smoothed_seconds; // per step
} Progress;

Progress progress_begin(int64_t steps, double flops_per_step, double gemm_rate);
// After `count` steps that took `seconds` together; `bytes` is what the system says is in use.
void progress_update(Progress *progress, const StepResult *last, int count, double seconds,
                     int64_t tokens_per_step, size_t bytes);
// Leaves the line standing, so that something else can be printed below it.
void progress_break(Progress *progress);

// Share of the machine's speed of light: the time that the step's flops take at the products' rate, over its
// time.
double progress_share(const Progress *progress, double seconds_per_step);

#endif
