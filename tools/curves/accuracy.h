// Errors of the LM head + loss against float64.
#pragma once

#include "tools/curves/layer.h"

// Relative errors in the Frobenius norm, against float64, over the sampled rows. `dweight` takes each token's
// normaliser from the loss that was computed (the fused one: good to 1e-7), since summing it again for every
// token would cost as much as the LM head + loss itself.
typedef struct {
  double loss, dx, dweight;
} Errors;

// The truth for a layer made by layer_reserve(backend, shape, seed), at sampled tokens and vocabulary entries. Runs the
// fused mode once, for its losses.
typedef struct Reference Reference;
Reference *reference_create(const LceTensors *layer, uint64_t seed, int64_t chunk);
void reference_destroy(Reference *reference);

// The errors of what was computed last in loss, dx and dweight.
Errors reference_errors(const Reference *reference, const LceTensors *layer);
