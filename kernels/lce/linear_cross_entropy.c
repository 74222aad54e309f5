// linear_cross_entropy: LM head and loss without the [N, V] logits. kernels/lce/LCE.md derives it,
// REFERENCE.md lists what was tried.
//
// A token's loss and gradient need no other token, and the loss is the last operation of the forward pass. So
// the fused mode takes the tokens in chunks of C and computes their gradients at once, while the chunk's
// [C, V] exponentials are at hand. For a row with logits z and target y:
//
//     a     = z[y]                                  the anchor: one dot product in fp32
//     E[j]  = exp(z[j] - a), j != y;  E[y] = 0      final as soon as the GEMM's tile is there
//     R     = sum_j E[j]                            in fp32, before E is rounded for storage
//     loss  = log1p(R)                              p_y = 1 / (1 + R)
//     dX    = r (E W)  + c W[y]                     r = 1 / (1 + R),  c = p_y - 1 = -R / (1 + R)
//     dW   += E^T (r X), and row y += c X
//
// No pass waits for a row's maximum or sum: only r and c depend on the whole row, and both act on vectors of
// length H. Where R exceeds LCE_LARGEST_SUM, the row gets a higher anchor.
//
// This file has the plain loop; in it `a` is the call's arguments and `c` the call. sampling.c, split_head.c
// (a head split over ranks) and materialized.c (logits, not exponentials) have loops of their own. steps.c
// has the loops' steps, call.c what a call begins and ends with, check.c what it refuses.
#include "kernels/lce/call.h"

static void fused(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  Memory *memory = &c->backend->memory;
  int64_t tokens = a->x.shape[0], size = lce_used_chunk(tokens, a->chunk);
  Chunk buffers = lce_push_buffers(c, size, tokens);
  lce_target_z(c, buffers.softmax.target_z, a->x, a->targets); // a = z[y]
  for (int64_t first = 0; first < tokens; first += size) {
    Chunk k = lce_chunk_at(c, &buffers, first);
    MemoryMark mark = memory_mark(memory);
    lce_exponentials(c, &k);                                // E, R, dX = E W
    lce_losses(c, &k);                                      // loss = log1p(R), r, c, r X
    lce_add_non_targets(c, &k, a->accumulate || first > 0); // dW += E^T (r X)
    lce_finish_dx(c, &k);                                   // dX = r dX + c W[y]
    memory_pop_to(memory, mark);
  }
  lce_add_all_targets(c, &buffers); // dW[y] += c X
}

void linear_cross_entropy(Backend *backend, LinearCrossEntropy a) {
  lce_check(backend, &a);
  Call c = lce_begin(backend, &a);
  if (a.mode == LCE_MATERIALIZED)
    lce_materialized(&c, (Tensor){0});
  else if (a.shard.vocab_size)
    lce_split_head(&c);
  else if (lce_samples(&c))
    lce_sampled(&c);
  else
    fused(&c);
  lce_end(&c);
}
