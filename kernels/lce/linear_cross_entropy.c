// linear_cross_entropy: LM head and loss without the [N, V] logits. kernels/lce/LCE.md derives it,
// REFERENCE.md lists what was tried.
//
// A token's loss and gradient need no other token, and the loss is the last operation of the forward pass. So
// the fused mode takes the tokens in chunks of C and computes their gradients at once, while the chunk's
// [C, V] exponentials are at hand. For a row with logits z and target y:
//
//     a     = z[y]                                  the anchor: one dot product in fp32
//     E[j]  = exp(z[j] - a), j != y;  E[y] = 0      final as soon as the GEMM's tile is done
//     R     = sum_j E[j]                            in fp32, before E is rounded for storage
//     loss  = log1p(R)                              p_y = 1 / (1 + R)
//     dX    = r (E W)  + c W[y]                     r = 1 / (1 + R),  c = p_y - 1 = -R / (1 + R)
//     dW   += E^T (r X), and row y += c X
//
// No pass waits for a row's maximum or sum: only r and c depend on the whole row, and both act on vectors of
// length H. Where R exceeds LCE_LARGEST_SUM, the row gets a higher anchor.
//
// This file has the plain loop. sampling.c, split_head.c (a head split over ranks) and materialized.c
// (logits, not exponentials) have loops of their own. steps.c has the loops' steps, call.c a call's beginning
// and end, check.c its checks.
#include "kernels/lce/call.h"

static void fused(const Call *call) {
  const LinearCrossEntropy *args = call->args;
  Memory *memory = &call->backend->memory;
  int64_t tokens = args->x.shape[0], size = lce_used_chunk(tokens, args->chunk);
  Chunk buffers = lce_push_buffers(call, size, tokens);
  lce_target_z(call, buffers.softmax.target_z, args->x, args->targets); // a = z[y]
  for (int64_t first = 0; first < tokens; first += size) {
    Chunk k = lce_chunk_at(call, &buffers, first);
    MemoryMark mark = memory_mark(memory);
    lce_exponentials(call, &k);                                   // E, R, dX = E W
    lce_losses(call, &k);                                         // loss = log1p(R), r, c, r X
    lce_add_non_targets(call, &k, args->accumulate || first > 0); // dW += E^T (r X)
    lce_finish_dx(call, &k);                                      // dX = r dX + c W[y]
    memory_pop_to(memory, mark);
  }
  lce_add_all_targets(call, &buffers); // dW[y] += c X
}

void linear_cross_entropy(Backend *backend, LinearCrossEntropy args) {
  lce_check(backend, &args);
  Call call = lce_begin(backend, &args);
  if (args.mode == LCE_MATERIALIZED)
    lce_materialized(&call, (Tensor){0});
  else if (args.shard.vocab_size)
    lce_split_head(&call);
  else if (lce_samples(&call))
    lce_sampled(&call);
  else
    fused(&call);
  lce_end(&call);
}
