// How much memory a run needs, found by running it on the plan backend, which allocates nothing.
#pragma once

#include "data/file.h"
#include "trainer/trainer.h"

// Names the training step that plans run, before all else here. A program that trains nothing has none.
void plan_set_step(TrainStep *step);

// The ledger of a training step of `options` (resolved) in `mode` on `device`, and of a validation batch and
// a sampled token if the options have them; without training, of the validation batch alone.
Ledger plan_run(const Options *options, DeviceKind device, LceMode mode);
// The same, and how many seconds the whole step (or that batch) takes on o->card by kernels/cost.h.
typedef struct {
  Ledger ledger;
  double seconds;
} TimedPlan;
TimedPlan plan_run_timed(const Options *options, DeviceKind device, LceMode mode);
// Sizes the step's stack for a mode by planning it, and makes that mode the one that steps use.
void plan_set_mode(Trainer *trainer, LceMode mode);
int plan_host_ranks(const Options *options); // of one host
// Bytes of the host that all its ranks need together to offload; a CPU's tensors are there, too.
size_t plan_host_bytes(const Ledger *plan, const Options *options, DeviceKind device);
size_t plan_host_left(const Options *options); // what the host can give; of several ranks the least
bool plan_fits_host(const Ledger *plan, const Options *options, DeviceKind device);

// --compare-modes: measures a few forward and backward passes in each mode; plans a mode that does not fit.
void plan_compare_modes(Trainer *trainer);

// --timeline of a run: records the second to fourth step until the caller sets recording to false, and writes
// the bytes in use after each event as CSV, before the steps with BACK_UP and after them with OVERWRITE.
void plan_record(Ledger *ledger, const Options *options, int64_t step);
void plan_write_recorded(const Options *options, Backend *backend, EarlierOutput earlier);
// The same of three planned steps.
void plan_write_timeline(const Options *options, DeviceKind device);

// --- plan_print.c ------------------------------------------------------------------------------------------

// With --fit chooses what is open (fit.h), for a device that can give `usable` bytes (0: unknown). Else only
// the default chunk, if --lce-chunk gives none.
void plan_resolve(Options *options, DeviceKind device, size_t usable);
// Fails if the run needs more than `usable` bytes of the device (0: unknown), and says what holds them; or if
// it offloads more than the host has left.
void plan_require(const Options *options, DeviceKind device, size_t usable);
// --plan: what a run needs in both modes, with --log also as a line for each, with --timeline as its events.
void plan_print(Options *options);
