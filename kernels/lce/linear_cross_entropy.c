// linear_cross_entropy: LM head and loss without the [N, V] logits. kernels/lce/LCE.md derives it and lists what was tried.
//
// A token's loss and gradient need no other token, and the loss is the last operation of the forward pass. So the fused
// mode takes the tokens in chunks of C and computes their gradients at once, while the chunk's [C, V] exponentials are at
// hand. For a row with logits z and target y:
//
//     a     = z[y]                                  the anchor: one dot product in fp32
//     E[j]  = exp(z[j] - a), j != y;  E[y] = 0      logits-exp pass: final as soon as the GEMM's tile is there
//     R     = sum_j E[j]                            in fp32, before E is rounded for storage
//     loss  = log1p(R)                              p_y = 1 / (1 + R)
//     dX    = r (E W)  + c W[y]                     r = 1 / (1 + R),  c = p_y - 1 = -R / (1 + R)
//     dW   += E^T (r X), and row y += c X
//
// No pass waits for a row's maximum or sum: only r and c depend on the whole row, and both act on vectors of length H. Where R
// exceeds LCE_LARGEST_SUM, the row is computed again with its maximum as the anchor. (In the code `a` is the call's arguments
// and `c` the call.)
//
// This file has the plain loop. Others have loops of their own: split_head.c (a head split over ranks) and materialized.c
// (logits, not exponentials). Below them: steps.c, sampling.c, terms.c (label smoothing, and a bias's gradient), check.c.
#include "kernels/integers.h"
#include "kernels/lce/call.h"

// The targets' rows of W and dW are touched for thousands of tokens at a time, before the first chunk and after the last: that
// keeps a GPU busy where a chunk of a thousand takes almost as long.
static void add_all_targets(const Call *c, const Chunk *buffers) {
  enum { AT_ONCE = 16384 };
  const LinearCrossEntropy *a = c->a;
  for (int64_t first = 0, tokens = a->x.shape[0]; first < tokens; first += AT_ONCE) {
    int64_t count = min_i64(tokens - first, AT_ONCE);
    lce_add_targets(c, tensor_rows(buffers->rows.scale_target, first, count), tensor_rows(a->x, first, count),
                    tensor_rows(a->targets, first, count));
    if (c->backend->memory.planning) break;
  }
}

static Chunk chunk_at(const Call *c, const Chunk *buffers, int64_t first, int64_t count) {
  Chunk k = lce_first_rows(buffers, count);
  k.tokens = tokens_range(&c->tokens, first, count);
  k.targets = k.tokens.targets;
  k.rows.target_z = tensor_rows(buffers->rows.target_z, first, count);
  k.rows.scale_target = first_rows(buffers->rows.scale_target, first, count);
  k.local_rows = k.rows;
  return k;
}

static void fused(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  Memory *memory = &c->backend->memory;
  int64_t tokens = a->x.shape[0], size = lce_used_chunk(tokens, a->chunk);
  bool of_weight = tensor_exists(a->dweight);
  Chunk buffers = lce_push_buffers(c, size, tokens);
  lce_target_z(c, buffers.rows.target_z, a->x, a->targets);
  for (int64_t first = 0; first < tokens; first += size) {
    Chunk k = chunk_at(c, &buffers, first, min_i64(size, tokens - first));
    bool accumulate = a->accumulate || first > 0, last = first + size >= tokens;
    MemoryMark mark = memory_mark(memory);
    lce_exponentials(c, &k); // E, R, dX = E W
    if (c->backward) lce_push_scaled_x(c, &k);
    lce_rows_of(c, &k.tokens, k.rows, k.scaled_x,
                c->targets_in_exps ? k.exps : (Tensor){0}); // loss, r, c, r X
    if (c->backward) {
      if (c->sampled) lce_sampling_gradients(c, &k, first / size, last);
      if (of_weight && !c->sampled) lce_add_non_targets(c, &k, accumulate); // dW += E^T (r X)
      if (tensor_exists(a->dbias)) lce_bias_non_targets(c, &k, accumulate);
      lce_finish_dx(c, &k); // dX = r dX + c W[y]
      lce_terms_add(c, &k, first == 0);
    }
    memory_pop_to(memory, mark);
    if (memory->planning) break; // the chunks after the first need no more
  }
  if (of_weight && !c->targets_in_exps) add_all_targets(c, &buffers);
  lce_terms_end(c);
}

// --- the call ----------------------------------------------------------------------------------------------

static Call begin_call(Backend *backend, LinearCrossEntropy *a) {
  Call c = {.backend = backend,
            .a = a,
            .tokens = {.x = a->x,
                       .targets = a->targets,
                       .token_weights = a->token_weights,
                       .loss = a->loss,
                       .dx = a->dx,
                       .outputs = a->outputs},
            .backward = tensor_exists(a->dx) || tensor_exists(a->dweight),
            .ranks = a->shard.vocab_size ? backend->ranks : 1,
            .vocab_size = a->weight.shape[0],
            .class_weights = a->terms.class_weights};
  c.targets_in_exps = tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32;
  if (a->shard.vocab_size) {
    c.vocab_size = a->shard.vocab_size;
    c.class_weights = first_rows(a->terms.class_weights, a->shard.first, a->weight.shape[0]);
  }
  lce_sampling_begin(&c, a);
  lce_terms_begin(&c, a);
  return c;
}

void linear_cross_entropy(Backend *backend, LinearCrossEntropy a) {
  lce_check(backend, &a);
  MemoryMark mark = memory_mark(&backend->memory);
  Call c = begin_call(backend, &a);
  if (lce_holds_logits(&a))
    lce_materialized(&c);
  else if (a.shard.vocab_size)
    lce_split_head(&c);
  else
    fused(&c);
  memory_pop_to(&backend->memory, mark);
}
