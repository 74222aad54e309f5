// Begins and ends a call: the mean's factor, and label smoothing, whose gradient is two rank-one updates of
// sums over all rows of W and over all tokens.
#include "kernels/lce/call.h"

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
  if (tensor_exists(a->dweight))
    fill_zero(c->backend, s->x = push_vector(c, "weighted sum of x", DTYPE_F32, hidden_size));
  sum_columns(c->backend,
              (SumColumns){.sum = s->local_row, .x = a->weight, .coefficients = c->class_weights});
  if (c->ranks > 1) all_reduce(c->backend, (Collective){.out = s->row, .x = s->local_row});
  if (!tensor_exists(a->bias)) return;
  s->bias = push_vector(c, "weighted sum of the bias", DTYPE_F32, 1);
  if (tensor_exists(a->dbias))
    fill_zero(c->backend, s->scales = push_vector(c, "sum of uniform scales", DTYPE_F32, 1));
  sum_columns(c->backend,
              (SumColumns){.sum = s->bias, .x = as_column(a->bias), .coefficients = c->class_weights});
  if (c->ranks > 1) all_reduce(c->backend, (Collective){.out = s->bias, .x = s->bias});
}

Call lce_begin(Backend *backend, const LinearCrossEntropy *a) {
  Call c = {.backend = backend,
            .a = a,
            .mark = memory_mark(&backend->memory),
            .tokens = {{a->x, a->targets, a->token_weights, a->loss, a->dx, a->outputs}},
            .ranks = 1,
            .backward = tensor_exists(a->dx) || tensor_exists(a->dweight),
            .vocab_size = a->weight.shape[0],
            .class_weights = a->terms.class_weights,
            .terms = a->terms};
  if (a->shard.vocab_size) {
    c.ranks = backend->ranks;
    c.vocab_size = a->shard.vocab_size;
    c.class_weights = tensor_rows(a->terms.class_weights, a->shard.first, a->weight.shape[0]);
  }
  if (tensor_exists(a->sampling.stats)) fill_zero(backend, a->sampling.stats);
  bool smoothing = a->terms.label_smoothing > 0;
  if (smoothing && tensor_exists(a->terms.class_weights)) {
    c.terms.class_weight_sum = push_vector(&c, "sum of class weights", DTYPE_F32, 1);
    sum_elements(backend, (SumElements){.sum = c.terms.class_weight_sum, .x = c.terms.class_weights});
  }
  if (a->mean) find_factor(&c);
  if (smoothing && a->mode == LCE_FUSED) begin_smoothing(&c);
  return c;
}

void lce_add_smoothing(const Call *c, const Chunk *k) {
  const Smoothing *s = &c->smoothing;
  Tensor scales = k->softmax.scale_uniform;
  if (tensor_exists(s->x))
    sum_columns(c->backend,
                (SumColumns){.sum = s->x, .x = k->tokens.x, .coefficients = scales, .accumulate = true});
  if (tensor_exists(s->scales))
    sum_elements(c->backend, (SumElements){.sum = s->scales, .x = scales, .accumulate = true});
}

void lce_end(const Call *c) {
  const Smoothing *s = &c->smoothing;
  AddOuter update = {.out = c->a->dweight, .rows = c->class_weights, .columns = s->x, .alpha = c->a->scale};
  if (tensor_exists(s->x)) add_outer(c->backend, update);
  update.out = as_column(c->a->dbias), update.columns = s->scales;
  if (tensor_exists(s->scales)) add_outer(c->backend, update);
  memory_pop_to(&c->backend->memory, c->mark);
}
