// Log-probabilities of the ids that each token names, beside its lse, and their gradients. The caller owns
// every tensor; what a call needs beyond them, O(N) and a chunk, is pushed as MEMORY_HEAD and popped before
// it returns. Wrong shapes fail with one sentence.
#pragma once

#include "kernels/lce/linear_cross_entropy.h"

typedef struct {
  LinearCrossEntropy call; // chunk, x, weight, bias, soft-cap, temperature; dx, dweight, dbias
  Tensor ids, offsets;     // int32 [M], int64 [N + 1] or absent, as LceIdLogits has them
  Tensor log_probs, lse;   // fp32 [M], fp32 [N]
  Tensor entropy;          // fp32 [N], or absent
  Tensor dlog_probs;       // fp32 [M]
  Tensor dlse, dentropy;   // fp32 [N], or absent: 0
} IdLogProbs;

// log_probs[m] = log p[ids[m]], 0 for IGNORE_INDEX, and lse[n] and entropy[n] of every row, also one without ids: a
// loss without gradients, and M dot products.
void id_log_probs(Backend *backend, IdLogProbs a);

// Given those, the gradients of sum_m dlog_probs[m] log_probs[m] + sum_n (dlse[n] lse[n] + dentropy[n] entropy[n]):
// dx in fp32 or x's dtype, dweight in fp32 or W's.
void id_log_prob_gradients(Backend *backend, IdLogProbs a);
