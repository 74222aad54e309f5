// What a run prints, with its record in the log: one function for each event.
#pragma once

#include <stdio.h>

#include "kernels/system.h" // now_seconds
#include "trainer/data.h"
#include "trainer/resume.h"
#include "trainer/trainer.h"

enum { PROFILE_WARM_UP = 2 }; // steps before those that --profile counts

typedef struct {
  const Options *options;
  FILE *log; // one JSON object a line; NULL: none
  // The progress line: it rewrites itself on a terminal, and is a plain line every few seconds when piped.
  bool terminal, drawn;
  double last_printed;
  double flops_per_step;   // model flops, see model_flops_per_token
  double peak;             // gpu_peak_flops of all ranks
  double smoothed_seconds; // per step
  int64_t steps_done;      // by this run
  int64_t steps_timed;     // after the first ones,
  double seconds_timed;    // without validation and samples
  double since; // when the steps began whose results wait; set it when something else has taken time
  double dropped_tiles, dropped_mass; // sums over steps_done; NaN without --lce-sample
} Report;

// Before anything runs: device, model, job, data.
void report_settings(const Options *options, const Backend *backend, const char *data, const Source *source,
                     const Source *val_source);

// Opens the log (of rank 0; a resumed run appends).
Report report_open(const Options *options, const Backend *backend);
void report_close(Report *report);
bool report_log_lost(const Report *report); // it could not be written

void report_start(Report *report, const Backend *backend, const char *data_name);
// Whether to fetch the results of the steps that are under way: about twice a second, which costs nothing; all ranks after
// the same step. And that, which waits for the device.
bool report_due(const Report *report, const Trainer *trainer);
void report_collect(Report *report, Trainer *trainer, RunState *state);
// `count` steps that took `seconds` together: a record each, then the progress line. Fails at one that diverged.
void report_steps(Report *report, Trainer *trainer, const StepResult *results, int count, double seconds);
void report_validation(Report *report, int64_t step, double loss, double bits_per_byte, // NaN: not known
                       const Loader *loader);
void report_sample(Report *report, int64_t step, const Prompt *prompt, const int32_t *tokens, int64_t count);
void report_checkpoint(Report *report, int64_t step, double seconds);
// At the end, on all ranks: losses, speed and peak memory. `entropy` is that of the tokens' frequencies.
void report_summary(Report *report, Trainer *trainer, const RunState *state, double entropy, bool stopped);
void report_evaluation(Report *report, double val_loss);

// What became of the weights: the command that resumes a run that was stopped, or that nothing is saved.
void report_resuming(const Report *report, bool stopped);

// Ends a progress line that rewrites itself, so that something else can be printed below it.
void report_break(Report *report);

// Flops a second of dense bf16 GEMMs by NVIDIA's data sheet for the GPU with this name, for MFU; NaN: not known.
double gpu_peak_flops(const char *name);
