// The LM head + loss alone, on random data, and its errors against float64.
#pragma once

#include "kernels/linear_cross_entropy.h"
#include "trainer/trainer.h"

// The tensors of a call of linear_cross_entropy, in the backend's memory.
typedef struct {
  Backend *backend;
  Tensor x, weight, targets, loss, dx, dweight;
} LceTensors;

// The backend of --device cpu (fp32) or cuda (bf16, on the GPU of that ordinal); fails when there is none.
Backend *layer_backend(DeviceKind device, int ordinal);

// Reserves the tensors on the backend (a plan's too) and fills x with N(0, 1), weight with N(0, 0.02), targets
// uniformly: functions of the element alone, rounded to the backend's dtype.
LceTensors layer_reserve(Backend *backend, LceShape shape);
// A trainer's head and targets, with x (the same random numbers) and dx pushed on the stack: the caller
// pops them.
LceTensors layer_push(Trainer *trainer);

// The call that computes forward and backward once, the mean over all tokens; terms may be added to it.
LinearCrossEntropy layer_call(const LceTensors *layer, LceMode mode, int64_t chunk);
// Runs any call and returns the bytes that it pushed at its peak, its operations' scratch included.
size_t layer_held(Backend *backend, LinearCrossEntropy call);

// The three GEMMs that no implementation can do without (logits = X W^T, dX = L W, dW = L^T X), for
// `rows` of the tokens at a time; needs a stack of layer_gemms_stack bytes.
void layer_gemms(const LceTensors *layer, int64_t rows);
size_t layer_gemms_stack(const Backend *backend, LceShape shape, int64_t rows);

// Relative errors in the Frobenius norm, against float64, over the sampled rows. `dweight` takes each token's
// normaliser from the loss that was computed (the fused one: good to 1e-7), since summing it again for every
// token would cost as much as the LM head + loss itself.
typedef struct {
  double loss, dx, dweight;
} Errors;

// The truth for a layer made by layer_reserve, at sampled tokens and vocabulary entries. Runs the fused mode once, for
// its losses.
typedef struct Reference Reference;
Reference *reference_create(const LceTensors *layer, int64_t chunk);
void reference_destroy(Reference *reference);

// The errors of what was computed last in loss, dx and dweight.
Errors reference_errors(const Reference *reference, const LceTensors *layer);
