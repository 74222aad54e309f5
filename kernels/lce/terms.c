// The terms of linear_cross_entropy's loss that need more than a row's sums: label smoothing, whose gradient
// is two rank-one updates, the mean's factor, and a bias's gradient.
#include "kernels/lce/call.h"

static void sum_class_weights(Call *c) {
  c->terms.class_weight_sum = push_vector(c, "sum of class weights", DTYPE_F32, 1);
  sum_elements(c->backend, (SumElements){.sum = c->terms.class_weight_sum, .x = c->terms.class_weights});
}

static void find_factor(Call *c) {
  Tensor targets = c->a->targets;
  c->factor = push_vector(c, "the mean's factor", DTYPE_F32, 1);
  if (c->ranks > 1) {
    targets = push_vector(c, "targets of all ranks' tokens", DTYPE_I32, targets.shape[0] * c->ranks);
    all_gather(c->backend, (Collective){.out = targets, .x = c->a->targets});
  }
  loss_factor(c->backend,
              (LossFactor){.factor = c->factor, .targets = targets, .class_weights = c->terms.class_weights});
}

static void begin_smoothing(Call *c) {
  const LinearCrossEntropy *a = c->a;
  Smoothing *s = &c->smoothing;
  int64_t hidden_size = a->x.shape[1];
  s->row = s->local_row = push_vector(c, "weighted sum of W", DTYPE_F32, hidden_size);
  if (c->ranks > 1) s->local_row = push_vector(c, "weighted sum of local W", DTYPE_F32, hidden_size);
  if (tensor_exists(a->dweight)) s->x = push_vector(c, "weighted sum of x", DTYPE_F32, hidden_size);
  sum_columns(c->backend,
              (SumColumns){.sum = s->local_row, .x = a->weight, .coefficients = c->class_weights});
  if (c->ranks > 1) all_reduce(c->backend, (Collective){.out = s->row, .x = s->local_row});
  if (!tensor_exists(a->bias)) return;
  s->bias = push_vector(c, "weighted sum of the bias", DTYPE_F32, 1);
  if (tensor_exists(a->dbias)) s->scales = push_vector(c, "sum of uniform scales", DTYPE_F32, 1);
  sum_columns(c->backend,
              (SumColumns){.sum = s->bias, .x = as_column(a->bias), .coefficients = c->class_weights});
  if (c->ranks > 1) all_reduce(c->backend, (Collective){.out = s->bias, .x = s->bias});
}

void lce_terms_begin(Call *c) {
  bool smoothing = c->terms.label_smoothing > 0;
  if (smoothing && tensor_exists(c->terms.class_weights)) sum_class_weights(c);
  if (c->a->mean) find_factor(c);
  if (smoothing && c->a->mode == LCE_FUSED) begin_smoothing(c);
}

// dbias (+)= scale E^T r, and the sums of label smoothing.
void lce_terms_add(const Call *c, const Chunk *k, bool first) {
  const Smoothing *s = &c->smoothing;
  if (tensor_exists(c->a->dbias))
    sum_columns(c->backend, (SumColumns){.sum = c->a->dbias,
                                         .x = k->exps,
                                         .coefficients = k->softmax.scale_non_target,
                                         .alpha = c->a->scale,
                                         .accumulate = c->a->accumulate || !first});
  if (tensor_exists(s->x))
    sum_columns(c->backend, (SumColumns){.sum = s->x,
                                         .x = k->tokens.x,
                                         .coefficients = k->softmax.scale_uniform,
                                         .accumulate = !first});
  if (tensor_exists(s->scales))
    sum_elements(c->backend,
                 (SumElements){.sum = s->scales, .x = k->softmax.scale_uniform, .accumulate = !first});
}

void lce_terms_end(const Call *c) {
  const Smoothing *s = &c->smoothing;
  AddOuter of_weight = {
      .out = c->a->dweight, .rows = c->class_weights, .columns = s->x, .alpha = c->a->scale};
  if (tensor_exists(s->x)) add_outer(c->backend, of_weight);
  if (!tensor_exists(s->scales)) return;
  AddOuter of_bias = of_weight;
  of_bias.out = as_column(c->a->dbias), of_bias.columns = s->scales;
  add_outer(c->backend, of_bias);
}
