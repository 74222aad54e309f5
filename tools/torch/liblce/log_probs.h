// Computes what liblce has besides linear_cross_entropy: gradients of log-probabilities and entropies whose
// weights in the objective are known only after the forward pass, as those of a policy gradient. kernels.h
// ("the loss") defines the terms, and tools/torch/REFERENCE.md derives the formulas. The caller owns every tensor; what a call needs beyond them is pushed as MEMORY_HEAD and popped
// before it returns. Wrong shapes fail with one sentence.
#pragma once

#include "kernels/lce/call.h"
#include "tools/torch/liblce/operations.h"

// E and R of all tokens, as LceLogitsExp defines them. log_prob_gradients overwrites E.
typedef struct {
  Tensor exps;    // x's dtype [N, V]; may be strided, best by BackendScratch.logits_stride
  Tensor row_sum; // fp32 [N]
} Exponentials;

// linear_cross_entropy without gradients and in one chunk of all tokens, whose E and R it leaves in `kept`. A
// soft-cap, label smoothing, sampling, a shard and the materialized mode are refused.
void keep_exponentials(Backend *backend, LinearCrossEntropy a, Exponentials kept);

// The gradients of
//
//   scale * factor * sum_n (token_weights[n] (loss[n] + z_loss[n]) + entropy_weights[n] entropy[n])
//
// with respect to x, W and bias, where log_prob and entropy are outputs of an earlier forward pass with the
// same x, weight, bias, targets, soft-cap and temperature. factor is 1, or with `mean` 1 over the sum of the
// counted tokens' class weights. A log_prob of minus infinity does not say what lse is: without `kept` such a
// token's gradient is NaN.
typedef struct {
  // Without loss, outputs, label smoothing and sampling, whatever the mode. dx: fp32 or of x's dtype; dweight:
  // fp32, or without `accumulate` and shard of W's dtype. scale: finite and not 0. chunk: a block of W's rows
  // takes half the memory of a chunk of so many tokens; with a shard, every rank gives as many at a time.
  LinearCrossEntropy call;
  Tensor log_prob;        // fp32 [N]
  Tensor entropy;         // fp32 [N]; given when entropy_weights are
  Tensor entropy_weights; // fp32 [N], or absent: 0
  Exponentials kept;      // by keep_exponentials, and overwritten; or absent: the logits are computed again
} LogProbGradients;

void log_prob_gradients(Backend *backend, LogProbGradients a);

// Fails where the call's tensors do not fit a pass over blocks of W's rows.
void check_gradients(const LinearCrossEntropy *call, const Exponentials *kept);

// Vectors for the factors of so many tokens.
GradientFactors push_factors(const Call *c, int64_t tokens);

// That pass, for the call of `c` and its targets: dx, dweight and dbias of the gradient that
// LceLogitsGradient makes of factors and anchor, with the entries of given ids unless `ids` is NULL.
void gradients_by_blocks(const Call *c, GradientFactors factors, Tensor anchor, Tensor exps,
                         const LceIdGradients *ids);

// linear_cross_entropy from stored logits, as the materialized mode has them, and with every term: label smoothing
// under a soft-cap, and entropies added to the objective, each token's by its entry of entropy_weights (fp32 [N], or
// absent) times scale and the mean's factor. LCE_FUSED: a chunk of logits at a time.
void loss_of_logits(Backend *backend, LinearCrossEntropy args, Tensor entropy_weights);
