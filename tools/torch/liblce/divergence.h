// The divergence of a student's head from a teacher's without either's logits of all tokens, and its gradient. The
// caller owns every tensor; a call pushes the student's logits [C, V] and the teacher's, on a GPU of half as many
// tokens, as MEMORY_HEAD, and pops them before it returns. Wrong shapes fail with one sentence.
#pragma once

#include "tools/torch/liblce/operations.h"

typedef struct {
  LceDivergence divergence;         // without logits
  Tensor x, weight;                 // fp32/bf16 [N, H], [V, H]
  Tensor teacher_x, teacher_weight; // likewise, with an H of its own
  int64_t chunk;                    // tokens at a time
  // Each may be absent: x's dtype [N, H]; fp32, or in few chunks W's dtype, [V, H]; fp32 [V].
  Tensor dx, dweight, dbias;
} LinearDivergence;

// So many chunks may be summed in bf16: their roundings come to 1.6 to 1.9 times the one of a sum in fp32.
enum { DIVERGENCE_NARROW_CHUNKS = 4 };

// The library's choice of a chunk.
int64_t divergence_chunk(const Backend *backend, int64_t tokens);

// loss and entropy of each token, and the gradients of sum_n weights[n] loss[n] that are given.
void linear_divergence(Backend *backend, LinearDivergence a);
