// The gradients' way from every rank's own to the sum over all, while the backward pass still runs.
#ifndef LCE_TRAINER_REDUCTION_H
#define LCE_TRAINER_REDUCTION_H

#include "model/transformer.h"

typedef struct {
  Backend *backend;
  const Parameters *parameters;
  bool first, last;          // micro-batch of the step
  int64_t left[GROUP_COUNT]; // elements of each group that have not been sent off, from its start
} Reduction;

// Lets the backward pass of a micro-batch, run with these options, sum its gradients over the ranks; nothing
// with one rank. Where gradients are added up over the micro-batches first, only the last one's pass does.
// The Reduction must stay where it is until the pass is over.
void reduction_begin(Reduction *reduction, Backend *backend, const Parameters *parameters, bool first,
                     bool last, TransformerOptions *options);

#endif
