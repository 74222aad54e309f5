// How much memory a run needs, found by running it on the plan backend, which allocates nothing.
#pragma once

#include "kernels/text.h"
#include "trainer/trainer.h"

// The ledger of a training step, and where the options have them a validation batch and a sampled token, of `options`
// (resolved) in `mode` on `device`; without a train_step of the validation batch alone.
Ledger plan_run(const Options *options, DeviceKind device, LceMode mode);

// Sizes the step's stack for a mode by planning it, and makes that mode the one that steps use.
void plan_set_mode(Trainer *trainer, LceMode mode);

// The chunk: --lce-chunk, or the largest with which LM head + loss never hold more than --lce-memory, in training and in
// validation, or the default.
void plan_resolve_chunk(Options *options, DeviceKind device);

// The largest batch whose step fits into `bytes`, total_batch following; 0 when not even one sequence does.
int64_t plan_largest_batch(const Options *options, DeviceKind device, LceMode mode, size_t bytes);

// Bytes that cross the host link: read from the host's memory by the device (in), and written to it (out).
typedef struct {
  size_t in, out;
} HostBytes;

typedef struct {
  // Copies, the embedding's rows, reduced gradients; of a step's first one, which adds to no gradients.
  HostBytes micro_batch;
  HostBytes update; // what the norm and the optimizer access, and gathered weights; once a step
} HostTraffic;

// What --offload costs each rank in a step of `options` (resolved), counted from the operations that the step calls.
HostTraffic plan_host_traffic(const Options *options, DeviceKind device);

// Fails when the run needs more than `usable` bytes of the device (0: unknown), with who holds what, and what would fit; or when
// it offloads more than the host has left.
void plan_require(const Options *options, DeviceKind device, size_t usable);

// --- what is printed about memory ---------------------------------------------------------------------------

// One column of the table.
typedef struct {
  Text title; // "fused, measured"
  Ledger memory;
  size_t device_bytes; // what the system counts, the ledger's included; 0 when not measured
  double pass_seconds; // one forward and backward; 0 when not measured
} MemoryColumn;

// At most 3 columns, of the device that they are for.
void plan_print_table(const MemoryColumn *columns, int count, DeviceKind device);

// --plan: what a run needs in both modes, also as a line of --log for each, and by --timeline. --fit: the largest batch with
// each choice of --offload in both modes, and what that costs, or a failure. Both finish the options.
void plan_print(Options *options);
void plan_print_fit(Options *options);

// --compare-modes: a few forward and backward passes in each mode; a mode that does not fit is planned.
void plan_compare_modes(Trainer *trainer);

// --timeline: bytes in use after every event of the ledger, one line each, by category, as CSV. `at` is the time since the
// first, or of a plan, which takes none, the bytes pushed and popped since then.
void plan_write_timeline(const char *path, const Ledger *ledger);
// Of a run: records the events of its second to fourth step until recording is false again, and writes the file.
void plan_record(Ledger *ledger, const Options *options, int64_t step);
void plan_write_recorded(const Options *options, Backend *backend);

// "gradients, master weights and moments are sharded over them": what --zero and --vocab-parallel do.
const char *sharding_name(const ParameterDtypes *dtypes);
