// A run's beginning: with random weights, with a model (--init), or where another run stopped (--resume).
#pragma once

#include "model/checkpoint/checkpoint.h"
#include "trainer/data.h"

// Finds origin, resumed_from and first_step for init, resume and save. Options that were not given take the
// checkpoint's values, if the given ones allow it. Fails if a named model or checkpoint is absent or damaged.
void resume_find(Options *options);
// Fails unless all ranks have the same options, checkpoints and `data` (loader_describe's). Call it on all.
void resume_require_same(const Options *options, Backend *backend, const char *data);

// The state of a run besides its tensors.
typedef struct {
  double first_loss, last_loss, val_loss; // NaN: none
  int64_t val_step;                       // the step that val_loss was measured after; -1: none
  int64_t skipped;                        // steps without a target that counts
} RunState;

typedef struct {
  CheckpointStore store; // of rank 0, with --save
  int64_t saved_step;    // of the last checkpoint in --save; -1 before the first
  RunState state;        // the losses so far
} Checkpoints;

// With the state of options->resumed_from. Warns of every setting, and of data, that differ from the current
// ones. Call it on all ranks.
Checkpoints resume_open(const Options *options, Backend *backend, const RunData *data);
// The checkpoint after `step` steps. False, with a warning, if it cannot be written. Call it on all ranks.
bool resume_save(Checkpoints *checkpoints, const Options *options, const Model *model, Backend *backend,
                 int64_t step, const RunData *data);
