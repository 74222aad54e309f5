// The divergence of a student's head from a teacher's without either's logits of all tokens, and its gradient. The
// caller owns every tensor; a call pushes two matrices [C, V] of logits as MEMORY_HEAD, and pops them before it
// returns. Wrong shapes fail with one sentence.
#pragma once

#include "tools/torch/liblce/operations.h"

typedef struct {
  Tensor x, weight, bias; // fp32/bf16 [N, H], [V, H], and [V] or absent; H is the head's own
  float softcap, temperature;
} DivergenceHead;

typedef struct {
  DivergenceHead student, teacher;
  DivergenceKind kind;
  float beta;                 // of JSD: above 0, below 1
  int64_t chunk;              // tokens at a time
  Tensor mask, token_weights; // as LceDivergence has them
  Tensor loss, entropy;
  Tensor dx, dweight, dbias; // x's dtype [N, H]; fp32, or in one chunk W's dtype, [V, H]; fp32 [V]: or absent
} LinearDivergence;

// The library's choice of a chunk.
int64_t divergence_chunk(const Backend *backend, int64_t tokens);

// loss and entropy of each token, and the gradients of sum_n token_weights[n] loss[n] that are given.
void linear_divergence(Backend *backend, LinearDivergence a);
