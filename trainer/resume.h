// Where a run begins: with random weights, with a model (--init), or where another run stopped (--resume).
#pragma once

#include <cjson/cJSON.h>

#include "trainer/options.h"

// Finds origin, resumed_from and first_step for init, resume and save, and checks that a checkpoint is whole. Fails
// in one sentence when what is named is missing or damaged.
void resume_find(Options *options);

// Sets the options that are not given to what resumed_from holds, where those that are given allow it.
void resume_take_settings(Options *options);

// Fails unless all ranks have the same options, checkpoints and `data` (loader_describe's). Call it on all at once.
void resume_require_same(const Options *options, Backend *backend, const char *data);

// The state of a run besides its tensors.
typedef struct {
  double first_loss, last_loss, val_loss; // NAN where there is none
  int64_t val_step;                       // the step that val_loss was measured after; -1 where there is none
} RunState;

// trainer_state.json after `step` steps; the caller deletes it.
cJSON *resume_write(const Options *options, const RunState *state, int64_t step, const char *data);
// The state that options->resumed_from holds. Warns of every setting, and of data, that differ from those of now.
RunState resume_read(const Options *options, const char *data);
