// Where a run begins: with drawn weights, with a model (--init), or where another run stopped (--resume).
#ifndef LCE_TRAINER_RESUME_H
#define LCE_TRAINER_RESUME_H

#include <cjson/cJSON.h>

#include "trainer/options.h"

// Settles origin, resumed_from and first_step from init, resume and save, after checking that the files are
// intact (only their lengths where nothing but a plan is asked for). Fails in one sentence when what is named
// is not there or is damaged.
void resume_find(Options *options);

// What decides the numbers of a run, as {"seed": "1", "lr": "0.002", ...}: options as the command line has
// them. Those of the same name that a checkpoint holds are taken up again where the command line is silent.
// The caller deletes it.
cJSON *resume_settings(const Options *options);

// What a run knows beside its tensors.
typedef struct {
  int64_t step;                           // steps done
  double first_loss, last_loss, val_loss; // NAN where there is none
  const char *data;                       // what the loader says it reads
} RunState;

cJSON *resume_write(const Options *options,
                    const RunState *state); // trainer_state.json; the caller deletes it
// The state that options->resumed_from holds. Warns of every setting, and of data, that differ from those of
// now: the run then goes on, but not as it would have gone on without the stop.
RunState resume_read(const Options *options, const char *data);

#endif
