// Begins and ends a call: the mean's factor, and label smoothing, whose gradient is two rank-one updates of
// sums over all rows of W and over all tokens.
#include "kernels/lce/call.h"

static void find_factor(Call *call) {
  Tensor targets = call->args->targets;
  call->factor = push_vector(call, "the mean's factor", DTYPE_F32, 1);
  if (call->ranks > 1) {
    targets = push_vector(call, "targets of all ranks' tokens", DTYPE_I32, targets.shape[0] * call->ranks);
    all_gather(call->backend, (Collective){.out = targets, .x = call->args->targets});
  }
  loss_factor(
      call->backend,
      (LossFactor){.factor = call->factor, .targets = targets, .class_weights = call->terms.class_weights});
}

static void begin_smoothing(Call *call) {
  const LinearCrossEntropy *args = call->args;
  Smoothing *s = &call->smoothing;
  int64_t hidden_size = args->x.shape[1];
  s->row = s->local_row = push_vector(call, "weighted sum of W", DTYPE_F32, hidden_size);
  if (call->ranks > 1) s->local_row = push_vector(call, "weighted sum of local W", DTYPE_F32, hidden_size);
  if (tensor_exists(args->dweight))
    fill_zero(call->backend, s->x = push_vector(call, "weighted sum of x", DTYPE_F32, hidden_size));
  sum_columns(call->backend,
              (SumColumns){.sum = s->local_row, .x = args->weight, .coefficients = call->class_weights});
  if (call->ranks > 1) all_reduce(call->backend, (Collective){.out = s->row, .x = s->local_row});
  if (!tensor_exists(args->bias)) return;
  s->bias = push_vector(call, "weighted sum of the bias", DTYPE_F32, 1);
  if (tensor_exists(args->dbias))
    fill_zero(call->backend, s->scales = push_vector(call, "sum of uniform scales", DTYPE_F32, 1));
  sum_columns(call->backend,
              (SumColumns){.sum = s->bias, .x = as_column(args->bias), .coefficients = call->class_weights});
  if (call->ranks > 1) all_reduce(call->backend, (Collective){.out = s->bias, .x = s->bias});
}

Call lce_begin(Backend *backend, const LinearCrossEntropy *args) {
  Call call = {.backend = backend,
               .args = args,
               .mark = memory_mark(&backend->memory),
               .tokens = {{args->x, args->targets, args->token_weights, args->loss, args->dx, args->outputs}},
               .ranks = 1,
               .backward = tensor_exists(args->dx) || tensor_exists(args->dweight),
               .vocab_size = args->weight.shape[0],
               .class_weights = args->terms.class_weights,
               .terms = args->terms};
  if (args->shard.vocab_size) {
    call.ranks = backend->ranks;
    call.vocab_size = args->shard.vocab_size;
    call.class_weights = tensor_rows(args->terms.class_weights, args->shard.first, args->weight.shape[0]);
  }
  if (tensor_exists(args->sampling.stats)) fill_zero(backend, args->sampling.stats);
  bool smoothing = args->terms.label_smoothing > 0;
  if (smoothing && tensor_exists(args->terms.class_weights)) {
    call.terms.class_weight_sum = push_vector(&call, "sum of class weights", DTYPE_F32, 1);
    sum_elements(backend, (SumElements){.sum = call.terms.class_weight_sum, .x = call.terms.class_weights});
  }
  if (args->mean) find_factor(&call);
  if (smoothing && args->mode == LCE_FUSED) begin_smoothing(&call);
  return call;
}

void lce_add_smoothing(const Call *call, const Chunk *k) {
  const Smoothing *s = &call->smoothing;
  Tensor scales = k->softmax.scale_uniform;
  if (tensor_exists(s->x))
    sum_columns(call->backend,
                (SumColumns){.sum = s->x, .x = k->tokens.x, .coefficients = scales, .accumulate = true});
  if (tensor_exists(s->scales))
    sum_elements(call->backend, (SumElements){.sum = s->scales, .x = scales, .accumulate = true});
}

void lce_end(const Call *call) {
  const Smoothing *s = &call->smoothing;
  AddOuter update = {
      .out = call->args->dweight, .rows = call->class_weights, .columns = s->x, .alpha = call->args->scale};
  if (tensor_exists(s->x)) add_outer(call->backend, update);
  update.out = as_column(call->args->dbias), update.columns = s->scales;
  if (tensor_exists(s->scales)) add_outer(call->backend, update);
  memory_pop_to(&call->backend->memory, call->mark);
}
