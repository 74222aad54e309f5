// Prints a run's output and writes its log: one function for each event.
#pragma once

#include <stdio.h>

#include "kernels/base/system.h" // now_seconds
#include "trainer/data.h"
#include "trainer/resume.h"
#include "trainer/trainer.h"

enum { PROFILE_WARM_UP = 2 }; // steps before those that --profile counts

typedef struct {
  const Options *options;
  FILE *log; // one JSON object per line; NULL: none
  // The progress line: it rewrites itself on a terminal, and is a plain line every few seconds when piped.
  bool terminal, drawn; // a line stands unfinished
  double last_printed;
  double flops_per_step;   // model flops, see model_flops_per_token
  double peak;             // gpu_peak_flops of all ranks
  double smoothed_seconds; // per step
  int64_t steps_done;      // by this run
  int64_t steps_skipped;   // of these: without a target that counts
  int64_t steps_timed;     // after the first ones,
  double seconds_timed;    // without validation and samples
  double since; // when the steps under way began; the caller sets it again after whatever else takes time
  double dropped_tiles, dropped_mass; // sums over steps_done; NaN without --lce-sample
} Report;

// Before anything runs: device, model, job, data.
void report_settings(const Options *options, const Backend *backend, const RunData *data);
// Opens the log (of rank 0; a resumed run appends).
Report report_open(const Options *options, const Backend *backend);
void report_close(Report *report);
bool report_log_lost(const Report *report); // it could not be written

void report_start(Report *report, const Backend *backend, const char *data_name);
// True if it is time to fetch the steps' results: about twice a second, on all ranks after the same step.
bool report_due(const Report *report, const Trainer *trainer);
// Fetches and reports them, which waits for the device.
void report_collect(Report *report, Trainer *trainer, RunState *state);
// `count` steps that took `seconds` together: a line of the log for each, then the progress line. Fails if a
// loss or norm is not finite.
void report_steps(Report *report, Trainer *trainer, RunState *state, const StepResult *results, int count,
                  double seconds);
// Trainer.on_validated, of a Report: the progress of a long evaluation, which began at `since`.
void report_validating(void *report, int64_t done, int64_t batches, double loss);
// bits_per_byte: NaN if not known.
void report_validation(Report *report, int64_t step, double loss, double bits_per_byte, const Loader *loader);
void report_sample(Report *report, int64_t step, const Prompt *prompt, const int32_t *tokens, int64_t count);
void report_checkpoint(Report *report, int64_t step, double seconds);
// At the end, on all ranks: losses, speed and peak memory. `entropy` is the tokens' frequencies'.
void report_summary(Report *report, Trainer *trainer, const RunState *state, double entropy, bool stopped);
// Prints the command that resumes a stopped run, or that nothing was saved.
void report_resuming(const Report *report, bool stopped);
// Ends a progress line that rewrites itself; call it before printing anything else.
void report_break(Report *report);

// --- memory ------------------------------------------------------------------------------------------------

// One column of the table.
typedef struct {
  Text title; // "fused, measured"
  Ledger memory;
  size_t device_bytes; // by the system's count, the ledger's included; 0 if not measured
  double pass_seconds; // one forward and backward; 0 when not measured
} MemoryColumn;

// Prints a table of at most 3 columns; a row is left out if no column has bytes.
void report_memory(const MemoryColumn *columns, int count, DeviceKind device);

// Describes the effect of --zero and --vocab-parallel: "master weights and moments are sharded over them".
const char *sharding_name(const ParameterDtypes *dtypes);

// --- the log: one JSON object a line -----------------------------------------------------------------------

// A member of an object: an item, which the object then owns, else a text, else a number, null if not finite.
typedef struct {
  const char *name;
  double number;
  bool optional; // left out if the number is not finite
  const char *text;
  struct cJSON *item;
} LogField;

// clang-format off
#define NUM(name, value)      {name, .number = (double)(value)}
#define OPTIONAL(name, value) {name, .number = value, .optional = true}
#define STR(name, value)      {name, .text = value}
// The fields of a line: log_line(log, LOG_EVENT("step", NUM("step", 1), ...)).
#define LOG_EVENT(event, ...) (const LogField[]) {STR("event", event), __VA_ARGS__, {0}}
// The fields that describe a run, in its log's lines and in a plan's.
#define LOG_RUN(o, mode)                                                                                     \
  STR("model", (o)->model.name), STR("loss_mode", lce_mode_name(mode)), NUM("seq_len", (o)->seq_len),        \
  NUM("lce_chunk", (mode) == LCE_FUSED ? options_used_chunk(o) : 0), NUM("batch", (o)->batch),               \
  STR("recompute", options_recompute(o).text), NUM("vocab_size", (o)->model.vocab_size),                     \
  NUM("hidden_size", (o)->model.hidden_size), STR("dtype", dtype_name((o)->dtypes.weight))
// clang-format on

// An object of the fields up to one without a name.
struct cJSON *log_object(const LogField *fields);
// Writes the object as a line and flushes it; without a log (NULL) nothing. False, with errno: it failed.
bool log_line(FILE *log, const LogField *fields);
