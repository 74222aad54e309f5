// The gradients' way from every rank's own to the sum over all, while the backward pass still runs.
#ifndef LCE_TRAINER_REDUCTION_H
#define LCE_TRAINER_REDUCTION_H

#include "model/transformer.h"

// Gradients travel in buckets of this many bytes: large enough for the links' full speed, and small enough that the
// last of a step, which nothing hides, takes little time.
enum { REDUCTION_BUCKET_BYTES = 32 << 20 };

typedef struct {
  Backend *backend;
  const Parameters *parameters;
  int64_t left[GROUP_COUNT]; // elements of each group that have not been sent off, from its start
} Reduction;

// Before the backward pass whose gradients count (the last micro-batch of a step).
Reduction reduction_begin(Backend *backend, const Parameters *parameters);
// A GradientsReady; the context is the Reduction. Sums the buckets that are whole over the ranks, beside what follows.
void reduction_ready(void *reduction, ParameterGroup group, int64_t first);

#endif
