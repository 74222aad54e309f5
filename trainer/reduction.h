// Gradients all-reduced or reduce-scattered (ZeRO 1 and 2) over the ranks in buckets, during the backward pass.
#pragma once

#include "model/transformer.h"

typedef struct {
  Backend *backend;
  const Model *model;
  bool first, last;               // micro-batch of the step
  int64_t unreduced[GROUP_COUNT]; // elements of each group, from its start
} Reduction;

// Sets the hooks for the backward pass of a micro-batch; nothing with one rank. Where gradients are accumulated over
// the micro-batches only the last one's pass reduces them. The Reduction must stay where it is until the pass is over.
void reduction_begin(Reduction *reduction, Backend *backend, const Model *model, bool first, bool last,
                     TransformerOptions *options);
