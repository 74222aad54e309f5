// linear_cross_entropy with the full logits, in x's type, which become their own gradient in place, as in a
// plain trainer, with every term of the loss: the baseline.
#include "kernels/lce/call.h"

void lce_materialized(const Call *call, Tensor entropy_weights) {
  const LinearCrossEntropy *args = call->args;
  Tensor logits = push_logits(call, "logits", args->x.shape[0]);
  linear_forward(call->backend, (LinearForward){.out = logits, .x = args->x, .weight = args->weight});
  cross_entropy_in_place(call->backend, (CrossEntropyInPlace){.loss = args->loss,
                                                              .outputs = args->outputs,
                                                              .logits = logits,
                                                              .backward = call->backward,
                                                              .bias = args->bias,
                                                              .targets = args->targets,
                                                              .token_weights = args->token_weights,
                                                              .entropy_weights = entropy_weights,
                                                              .factor = call->factor,
                                                              .terms = call->terms,
                                                              .alpha = args->scale});
  if (tensor_exists(args->dx))
    linear_backward_input(call->backend,
                          (LinearBackwardInput){.dx = args->dx, .dout = logits, .weight = args->weight});
  if (tensor_exists(args->dweight))
    linear_backward_weight(call->backend, (LinearBackwardWeight){.dweight = args->dweight,
                                                                 .dbias = args->dbias,
                                                                 .dout = logits,
                                                                 .x = args->x,
                                                                 .accumulate = args->accumulate});
}
