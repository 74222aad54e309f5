// linear_cross_entropy with logits, in x's type, which become their own gradient in place: what a plain trainer does, with every
// term of the loss. With all tokens in one chunk this is the materialized mode, the baseline. The fused mode takes it in its
// chunks for label smoothing with a soft-cap, whose gradient is no product of E and a row's factor.
#include "kernels/integers.h"
#include "kernels/lce/call.h"

static void logits_and_gradients(const Call *c, const Tokens *t, Tensor logits, bool accumulate) {
  const LinearCrossEntropy *a = c->a;
  linear_forward(c->backend, (LinearForward){.out = logits, .x = t->x, .weight = a->weight});
  cross_entropy_in_place(c->backend, (CrossEntropyInPlace){.loss = t->loss,
                                                           .outputs = t->outputs,
                                                           .logits = logits,
                                                           .backward = c->backward,
                                                           .bias = a->bias,
                                                           .targets = t->targets,
                                                           .token_weights = t->token_weights,
                                                           .factor = c->factor,
                                                           .terms = a->terms,
                                                           .alpha = a->scale});
  if (tensor_exists(t->dx))
    linear_backward_input(c->backend,
                          (LinearBackwardInput){.dx = t->dx, .dout = logits, .weight = a->weight});
  if (tensor_exists(a->dweight))
    linear_backward_weight(c->backend, (LinearBackwardWeight){.dweight = a->dweight,
                                                              .dbias = a->dbias,
                                                              .dout = logits,
                                                              .x = t->x,
                                                              .alpha = 1,
                                                              .accumulate = accumulate});
}

void lce_materialized(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  int64_t tokens = a->x.shape[0];
  int64_t size = a->mode == LCE_MATERIALIZED ? tokens : lce_used_chunk(tokens, a->chunk);
  Tensor logits = push_logits(c, "logits", size);
  for (int64_t first = 0; first < tokens; first += size) {
    Tokens chunk = tokens_range(&c->tokens, first, min_i64(size, tokens - first));
    logits_and_gradients(c, &chunk, tensor_rows(logits, 0, chunk.x.shape[0]), a->accumulate || first > 0);
    if (c->backend->memory.planning) break;
  }
}
