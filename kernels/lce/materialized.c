// linear_cross_entropy with the logits of all tokens, in x's type, which become their own gradient in place:
// what a plain trainer does, with every term of the loss. It is the baseline.
#include "kernels/lce/call.h"

void lce_materialized(const Call *c, Tensor entropy_weights) {
  const LinearCrossEntropy *a = c->a;
  Tensor logits = push_logits(c, "logits", a->x.shape[0]);
  linear_forward(c->backend, (LinearForward){.out = logits, .x = a->x, .weight = a->weight});
  cross_entropy_in_place(c->backend, (CrossEntropyInPlace){.loss = a->loss,
                                                           .outputs = a->outputs,
                                                           .logits = logits,
                                                           .backward = c->backward,
                                                           .bias = a->bias,
                                                           .targets = a->targets,
                                                           .token_weights = a->token_weights,
                                                           .entropy_weights = entropy_weights,
                                                           .factor = c->factor,
                                                           .terms = c->terms,
                                                           .alpha = a->scale});
  if (tensor_exists(a->dx))
    linear_backward_input(c->backend,
                          (LinearBackwardInput){.dx = a->dx, .dout = logits, .weight = a->weight});
  if (tensor_exists(a->dweight))
    linear_backward_weight(c->backend, (LinearBackwardWeight){.dweight = a->dweight,
                                                              .dbias = a->dbias,
                                                              .dout = logits,
                                                              .x = a->x,
                                                              .accumulate = a->accumulate});
}
