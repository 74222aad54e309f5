// The steps of a chunk, which the loops of linear_cross_entropy.c, sampling.c and split_head.c call.
#include "kernels/lce/call.h"

const char *lce_mode_name(LceMode mode) {
  return mode == LCE_FUSED ? "fused" : "materialized";
}

int64_t lce_default_chunk(DeviceKind device, int64_t tokens) {
  return min_i64(4096,
                 device == ON_CUDA ? max_i64(1024, ceil_div(tokens, 8)) : max_i64(112, ceil_div(tokens, 9)));
}

int64_t lce_used_chunk(int64_t tokens, int64_t chunk) {
  int64_t max = min_i64(chunk, tokens), even = ceil_div(tokens, ceil_div(tokens, max));
  int64_t rounded = round_up(even, 128);
  return rounded <= max ? rounded : even;
}

// target_z and the target's scale last beyond the chunk.
static SoftmaxStatistics push_softmax(const Call *call, int64_t rows, int64_t lasting) {
  struct { // elements; 0: not needed
#define MEMBER(name, ...) int64_t name;
    SOFTMAX_STATISTICS(MEMBER)
#undef MEMBER
  } count = {.target_z = lasting, .target_e = rows, .anchor = rows, .row_sum = rows};
#define NEED(name, type, statistic)                                                                          \
  if (tensor_exists(call->args->outputs.name)) count.statistic = rows;
  TOKEN_OUTPUTS(NEED)
#undef NEED
  count.best = count.max;
  if (call->args->shard.vocab_size) count.rescale = rows;
  if (call->backward) count.scale_non_target = rows, count.scale_target = lasting;
  if (call->backward && call->args->terms.label_smoothing > 0) count.scale_uniform = rows;
  SoftmaxStatistics r = {0};
#define PUSH(name, type, label)                                                                              \
  if (count.name) r.name = push_vector(call, label, DTYPE_##type, count.name);
  SOFTMAX_STATISTICS(PUSH)
#undef PUSH
  return r;
}

Chunk lce_push_buffers(const Call *call, int64_t rows, int64_t lasting) {
  Chunk b = {.softmax = push_softmax(call, rows, lasting)};
  if (call->backward) b.exps = push_logits(call, "exponentials", rows);
  return b;
}

Chunk lce_first_rows(const Chunk *buffers, int64_t rows) {
  return (Chunk){.softmax = softmax_statistics_range(&buffers->softmax, 0, rows),
                 .exps = tensor_rows(buffers->exps, 0, rows)};
}

Chunk lce_chunk_at(const Call *call, const Chunk *buffers, int64_t first) {
  int64_t count = min_i64(buffers->softmax.anchor.shape[0], call->args->x.shape[0] - first);
  Chunk k = lce_first_rows(buffers, count);
  k.tokens = tokens_range(&call->tokens, first, count);
  k.targets = k.tokens.targets;
  k.softmax.target_z = tensor_rows(buffers->softmax.target_z, first, count);
  k.softmax.scale_target = tensor_rows(buffers->softmax.scale_target, first, count);
  return k;
}

void lce_target_z(const Call *call, Tensor target_z, Tensor x, Tensor targets) {
  lce_target_logits(call->backend, (LceTargetLogits){.target_z = target_z,
                                                     .x = x,
                                                     .weight = call->args->weight,
                                                     .bias = call->args->bias,
                                                     .targets = targets,
                                                     .softcap = call->args->terms.softcap});
}

// x in codes, if W has them.
static QuantizedRows push_codes(const Call *call, Tensor x) {
  QuantizedRows codes = {0};
  Tensor weight_codes = call->args->weight_codes.codes;
  if (!tensor_exists(weight_codes)) return codes;
  codes.codes = push_matrix(call, "codes of x", weight_codes.dtype, x.shape[0], x.shape[1]);
  codes.scale = push_vector(call, "scales of x", DTYPE_F32, x.shape[0]);
  quantize_rows(call->backend, (QuantizeRows){.out = codes, .x = x});
  return codes;
}

LceLogitsExp lce_logits_exp_of(const Call *call, const Chunk *k) {
  return (LceLogitsExp){.exps = k->exps,
                        .dx_raw = k->tokens.dx,
                        .softmax = k->softmax,
                        .x = k->tokens.x,
                        .weight = call->args->weight,
                        .x_codes = push_codes(call, k->tokens.x),
                        .weight_codes = call->args->weight_codes,
                        .bias = call->args->bias,
                        .targets = k->targets,
                        .first = call->args->shard.first,
                        .softcap = call->args->terms.softcap,
                        .temperature = call->args->terms.temperature};
}

void lce_exponentials(const Call *call, const Chunk *k) {
  lce_logits_exp(call->backend, lce_logits_exp_of(call, k));
}

// A dweight of W's dtype is written once, by the GEMM of its only chunk, and E then has the targets' part.
static bool targets_in_exps(const Call *call) {
  return tensor_exists(call->args->dweight) && call->args->dweight.dtype != DTYPE_F32;
}

static LceRowLosses row_losses_of(const Call *call, const Tokens *t, SoftmaxStatistics softmax) {
  return (LceRowLosses){.loss = t->loss,
                        .outputs = t->outputs,
                        .softmax = softmax,
                        .x = t->x,
                        .targets = t->targets,
                        .token_weights = t->token_weights,
                        .factor = call->factor,
                        .smoothing_row = call->smoothing.row,
                        .smoothing_bias = call->smoothing.bias,
                        .terms = call->terms,
                        .vocab_size = call->vocab_size};
}

void lce_losses_only(const Call *call, const Tokens *t, SoftmaxStatistics softmax) {
  lce_row_losses(call->backend, row_losses_of(call, t, softmax));
}

void lce_losses(const Call *call, Chunk *k) {
  LceRowLosses losses = row_losses_of(call, &k->tokens, k->softmax);
  const Tensor *x = &k->tokens.x;
  if (call->backward)
    losses.scaled_x = k->scaled_x = push_matrix(call, "scaled x", x->dtype, x->shape[0], x->shape[1]);
  if (targets_in_exps(call)) losses.exps = k->exps;
  lce_row_losses(call->backend, losses);
  lce_add_smoothing(call, k);
}

void lce_finish_dx(const Call *call, const Chunk *k) {
  if (!tensor_exists(k->tokens.dx)) return;
  lce_input_gradient(call->backend, (LceInputGradient){.dx = k->tokens.dx,
                                                       .softmax = k->softmax,
                                                       .smoothing_row = call->smoothing.local_row,
                                                       .weight = call->args->weight,
                                                       .targets = k->targets,
                                                       .alpha = call->args->scale});
}

// The caller's scale is the GEMM's alpha, so that r X stays within the normal numbers.
void lce_add_non_targets(const Call *call, const Chunk *k, bool accumulate) {
  const LinearCrossEntropy *args = call->args;
  LinearBackwardWeight dweight = {.dweight = args->dweight,
                                  .dout = k->exps,
                                  .x = k->scaled_x,
                                  .alpha = args->scale,
                                  .accumulate = accumulate};
  if (tensor_exists(args->dweight)) linear_backward_weight(call->backend, dweight);
  SumColumns dbias = {.sum = args->dbias,
                      .x = k->exps,
                      .coefficients = k->softmax.scale_non_target,
                      .alpha = args->scale,
                      .accumulate = accumulate};
  if (tensor_exists(args->dbias)) sum_columns(call->backend, dbias);
}

void lce_add_targets(const Call *call, Tensor scale_target, Tensor x, Tensor targets) {
  if (!tensor_exists(call->args->dweight)) return;
  LceTargetGradient of_weight = {.dweight = call->args->dweight,
                                 .scale_target = scale_target,
                                 .x = x,
                                 .targets = targets,
                                 .alpha = call->args->scale};
  lce_target_gradient(call->backend, of_weight);
  if (!tensor_exists(call->args->dbias)) return;
  LceTargetGradient of_bias = of_weight;
  of_bias.dweight = as_column(call->args->dbias), of_bias.x = as_column(scale_target);
  of_bias.scale_target = (Tensor){0};
  lce_target_gradient(call->backend, of_bias);
}

// Thousands of tokens at a time: a chunk of a thousand would take a GPU almost as long.
void lce_add_all_targets(const Call *call, const Chunk *buffers) {
  enum { AT_ONCE = 16384 };
  const LinearCrossEntropy *args = call->args;
  if (!tensor_exists(args->dweight) || targets_in_exps(call)) return;
  for (int64_t first = 0, tokens = args->x.shape[0]; first < tokens; first += AT_ONCE) {
    int64_t count = min_i64(tokens - first, AT_ONCE);
    lce_add_targets(call, tensor_rows(buffers->softmax.scale_target, first, count),
                    tensor_rows(args->x, first, count), tensor_rows(args->targets, first, count));
  }
}
