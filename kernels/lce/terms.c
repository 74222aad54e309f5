// The terms of linear_cross_entropy's loss that need more than a row's sums: label smoothing, whose gradient is two rank-one
// updates, the mean's factor, and a bias's gradient.
#include "kernels/lce/call.h"

void lce_terms_begin(Call *c, LinearCrossEntropy *a) {
  Backend *backend = c->backend;
  bool smoothing = a->terms.label_smoothing > 0;
  if (smoothing && tensor_exists(a->terms.class_weights)) {
    a->terms.class_weight_sum = push_vector(c, "sum of class weights", DTYPE_F32, 1);
    reduce(backend, (Reduce){.sum = a->terms.class_weight_sum, .x = a->terms.class_weights});
  }
  if (a->mean) {
    Tensor targets = a->targets;
    c->factor = push_vector(c, "the mean's factor", DTYPE_F32, 1);
    if (c->ranks > 1) {
      targets = push_vector(c, "targets of all ranks' tokens", DTYPE_I32, targets.shape[0] * backend->ranks);
      all_gather(backend, (Collective){.out = targets, .x = a->targets});
    }
    loss_factor(
        backend,
        (LossFactor){.factor = c->factor, .targets = targets, .class_weights = a->terms.class_weights});
  }
  if (!smoothing || lce_holds_logits(a)) return;
  int64_t hidden_size = a->x.shape[1];
  c->smoothing_row = c->smoothing_local = push_vector(c, "weighted sum of W", DTYPE_F32, hidden_size);
  if (c->ranks > 1) c->smoothing_local = push_vector(c, "weighted sum of local W", DTYPE_F32, hidden_size);
  if (tensor_exists(a->dweight)) c->smoothing_x = push_vector(c, "weighted sum of x", DTYPE_F32, hidden_size);
  linear_backward_weight(backend, (LinearBackwardWeight){.dbias = c->smoothing_local,
                                                         .dout = a->weight,
                                                         .coefficients = c->class_weights});
  if (c->ranks > 1) all_reduce(backend, (Collective){.out = c->smoothing_row, .x = c->smoothing_local});
  if (!tensor_exists(a->bias)) return;
  c->smoothing_bias = push_vector(c, "weighted sum of the bias", DTYPE_F32, 1);
  if (tensor_exists(a->dbias)) c->smoothing_sum = push_vector(c, "sum of uniform scales", DTYPE_F32, 1);
  linear_backward_weight(backend, (LinearBackwardWeight){.dbias = c->smoothing_bias,
                                                         .dout = as_column(a->bias),
                                                         .coefficients = c->class_weights});
  if (c->ranks > 1) all_reduce(backend, (Collective){.out = c->smoothing_bias, .x = c->smoothing_bias});
}

void lce_terms_add(const Call *c, const Chunk *k, bool first) {
  if (tensor_exists(c->smoothing_x))
    linear_backward_weight(c->backend, (LinearBackwardWeight){.dbias = c->smoothing_x,
                                                              .dout = k->tokens.x,
                                                              .coefficients = k->rows.scale_uniform,
                                                              .accumulate = !first});
  if (tensor_exists(c->smoothing_sum))
    reduce(c->backend, (Reduce){.sum = c->smoothing_sum, .x = k->rows.scale_uniform, .accumulate = !first});
}

void lce_terms_end(const Call *c) {
  if (tensor_exists(c->smoothing_x))
    add_outer(c->backend, (AddOuter){.out = c->a->dweight,
                                     .rows = c->class_weights,
                                     .columns = c->smoothing_x,
                                     .alpha = c->a->scale});
  if (tensor_exists(c->smoothing_sum))
    add_outer(c->backend, (AddOuter){.out = as_column(c->a->dbias),
                                     .rows = c->class_weights,
                                     .columns = c->smoothing_sum,
                                     .alpha = c->a->scale});
}

// dbias (+)= scale E^T r.
void lce_bias_non_targets(const Call *c, const Chunk *k, bool accumulate) {
  linear_backward_weight(c->backend, (LinearBackwardWeight){.dbias = c->a->dbias,
                                                            .dout = k->exps,
                                                            .coefficients = k->rows.scale_non_target,
                                                            .alpha = c->a->scale,
                                                            .accumulate = accumulate});
}
