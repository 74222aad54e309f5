// What is printed about memory: the table of --plan, --compare-modes and the summary, --fit, --timeline.
#ifndef LCE_TRAINER_MEMORY_TABLE_H
#define LCE_TRAINER_MEMORY_TABLE_H

#include "trainer/plan.h"
#include "trainer/trainer.h"

// One column of the table.
typedef struct {
  const char *title; // "fused, measured"
  Plan memory;
  uint64_t device_bytes; // what the system counts, besides the ledger; 0 when not measured
  double pass_seconds;   // one forward and backward; 0 when not measured
} MemoryColumn;

// At most 3 columns, of the device that they are for.
void memory_table_print(const MemoryColumn *columns, int count, DeviceKind device);

// --plan: what a run needs, in both modes. --fit: the largest batch in both modes, or a failure with a
// sentence. Both finish the options for the device.
void memory_print_plan(Options *options);
void memory_print_fit(Options *options);

// --compare-modes: a few forward and backward passes in each mode; a mode that does not fit is planned.
void memory_compare_modes(Trainer *trainer);

// --timeline: bytes in use after every event of the ledger, one line each, by category, as CSV.
void memory_write_timeline(const char *path, const Ledger *ledger);

// "gradients, master weights and moments are spread over them": what --zero and --vocab-parallel do.
const char *spread_name(const ParameterDtypes *dtypes);

#endif
