// Errors of the LM head + loss against float64.
#ifndef LCE_TOOLS_CURVES_ACCURACY_H
#define LCE_TOOLS_CURVES_ACCURACY_H

#include "tools/curves/layer.h"

// Relative errors in the Frobenius norm, against float64, over the sampled rows. `dweight` takes each token's
// normaliser from the loss that was computed (the fused one: good to 1e-7), since summing it again for every
// token would cost as much as the LM head + loss itself.
typedef struct {
  double loss, dx, dweight;
} Errors;

// The truth for a layer made by layer_reserve(backend, shape, seed), at sampled tokens and vocabulary entries.
typedef struct Reference Reference;
Reference *reference_create(LceShape shape, uint64_t seed);
void reference_destroy(Reference *reference);

// Compares what layer_run left in loss, dx and dweight. The first call must follow a fused run, whose losses
// complete the reference.
Errors reference_errors(Reference *reference, const LceTensors *layer);

#endif
