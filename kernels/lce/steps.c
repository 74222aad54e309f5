// The steps of a chunk, of which the loops of linear_cross_entropy.c, sampling.c and split_head.c are made.
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
static SoftmaxStatistics push_softmax(const Call *c, int64_t rows, int64_t lasting) {
  struct { // elements; 0: not needed
#define MEMBER(name, ...) int64_t name;
    SOFTMAX_STATISTICS(MEMBER)
#undef MEMBER
  } count = {.target_z = lasting, .target_e = rows, .anchor = rows, .row_sum = rows};
#define NEED(name, type, statistic)                                                                          \
  if (tensor_exists(c->a->outputs.name)) count.statistic = rows;
  TOKEN_OUTPUTS(NEED)
#undef NEED
  count.best = count.max;
  if (c->a->shard.vocab_size) count.rescale = rows;
  if (c->backward) count.scale_non_target = rows, count.scale_target = lasting;
  if (c->backward && c->a->terms.label_smoothing > 0) count.scale_uniform = rows;
  SoftmaxStatistics r = {0};
#define PUSH(name, type, label)                                                                              \
  if (count.name) r.name = push_vector(c, label, DTYPE_##type, count.name);
  SOFTMAX_STATISTICS(PUSH)
#undef PUSH
  return r;
}

Chunk lce_push_buffers(const Call *c, int64_t rows, int64_t lasting) {
  Chunk b = {.softmax = push_softmax(c, rows, lasting)};
  if (c->backward) b.exps = push_logits(c, "exponentials", rows);
  return b;
}

Chunk lce_first_rows(const Chunk *buffers, int64_t rows) {
  return (Chunk){.softmax = softmax_statistics_range(&buffers->softmax, 0, rows),
                 .exps = tensor_rows(buffers->exps, 0, rows)};
}

Chunk lce_chunk_at(const Call *c, const Chunk *buffers, int64_t first) {
  int64_t count = min_i64(buffers->softmax.anchor.shape[0], c->a->x.shape[0] - first);
  Chunk k = lce_first_rows(buffers, count);
  k.tokens = tokens_range(&c->tokens, first, count);
  k.targets = k.tokens.targets;
  k.softmax.target_z = tensor_rows(buffers->softmax.target_z, first, count);
  k.softmax.scale_target = tensor_rows(buffers->softmax.scale_target, first, count);
  return k;
}

void lce_target_z(const Call *c, Tensor target_z, Tensor x, Tensor targets) {
  lce_target_logits(c->backend, (LceTargetLogits){.target_z = target_z,
                                                  .x = x,
                                                  .weight = c->a->weight,
                                                  .bias = c->a->bias,
                                                  .targets = targets,
                                                  .softcap = c->a->terms.softcap});
}

// x in codes, if W has them.
static Fp8Rows push_codes(const Call *c, Tensor x) {
  Fp8Rows codes = {0};
  if (!tensor_exists(c->a->weight_codes.codes)) return codes;
  codes.codes = push_matrix(c, "codes of x", DTYPE_E4M3, x.shape[0], x.shape[1]);
  codes.scale = push_vector(c, "scales of x", DTYPE_F32, x.shape[0]);
  quantize_rows(c->backend, (QuantizeRows){.out = codes, .x = x});
  return codes;
}

LceLogitsExp lce_logits_exp_of(const Call *c, const Chunk *k) {
  return (LceLogitsExp){.exps = k->exps,
                        .dx_raw = k->tokens.dx,
                        .softmax = k->softmax,
                        .x = k->tokens.x,
                        .weight = c->a->weight,
                        .x_codes = push_codes(c, k->tokens.x),
                        .weight_codes = c->a->weight_codes,
                        .bias = c->a->bias,
                        .targets = k->targets,
                        .first = c->a->shard.first,
                        .softcap = c->a->terms.softcap,
                        .temperature = c->a->terms.temperature};
}

void lce_exponentials(const Call *c, const Chunk *k) {
  lce_logits_exp(c->backend, lce_logits_exp_of(c, k));
}

// A dweight of W's dtype is written once, by the GEMM of its only chunk, and E then has the targets' part.
static bool targets_in_exps(const Call *c) {
  return tensor_exists(c->a->dweight) && c->a->dweight.dtype != DTYPE_F32;
}

static LceRowLosses row_losses_of(const Call *c, const Tokens *t, SoftmaxStatistics softmax) {
  return (LceRowLosses){.loss = t->loss,
                        .outputs = t->outputs,
                        .softmax = softmax,
                        .x = t->x,
                        .targets = t->targets,
                        .token_weights = t->token_weights,
                        .factor = c->factor,
                        .smoothing_row = c->smoothing.row,
                        .smoothing_bias = c->smoothing.bias,
                        .terms = c->terms,
                        .vocab_size = c->vocab_size};
}

void lce_losses_alone(const Call *c, const Tokens *t, SoftmaxStatistics softmax) {
  lce_row_losses(c->backend, row_losses_of(c, t, softmax));
}

void lce_losses(const Call *c, Chunk *k) {
  LceRowLosses a = row_losses_of(c, &k->tokens, k->softmax);
  const Tensor *x = &k->tokens.x;
  if (c->backward) a.scaled_x = k->scaled_x = push_matrix(c, "scaled x", x->dtype, x->shape[0], x->shape[1]);
  if (targets_in_exps(c)) a.exps = k->exps;
  lce_row_losses(c->backend, a);
  lce_add_smoothing(c, k);
}

void lce_finish_dx(const Call *c, const Chunk *k) {
  if (!tensor_exists(k->tokens.dx)) return;
  lce_input_gradient(c->backend, (LceInputGradient){.dx = k->tokens.dx,
                                                    .softmax = k->softmax,
                                                    .smoothing_row = c->smoothing.local_row,
                                                    .weight = c->a->weight,
                                                    .targets = k->targets,
                                                    .alpha = c->a->scale});
}

// The caller's scale is the GEMM's alpha, so that r X stays within the normal numbers.
void lce_add_non_targets(const Call *c, const Chunk *k, bool accumulate) {
  const LinearCrossEntropy *a = c->a;
  LinearBackwardWeight dweight = {
      .dweight = a->dweight, .dout = k->exps, .x = k->scaled_x, .alpha = a->scale, .accumulate = accumulate};
  if (tensor_exists(a->dweight)) linear_backward_weight(c->backend, dweight);
  SumColumns dbias = {.sum = a->dbias,
                      .x = k->exps,
                      .coefficients = k->softmax.scale_non_target,
                      .alpha = a->scale,
                      .accumulate = accumulate};
  if (tensor_exists(a->dbias)) sum_columns(c->backend, dbias);
}

void lce_add_targets(const Call *c, Tensor scale_target, Tensor x, Tensor targets) {
  if (!tensor_exists(c->a->dweight)) return;
  LceTargetGradient of_weight = {.dweight = c->a->dweight,
                                 .scale_target = scale_target,
                                 .x = x,
                                 .targets = targets,
                                 .alpha = c->a->scale};
  lce_target_gradient(c->backend, of_weight);
  if (!tensor_exists(c->a->dbias)) return;
  LceTargetGradient of_bias = of_weight;
  of_bias.dweight = as_column(c->a->dbias), of_bias.x = as_column(scale_target);
  of_bias.scale_target = (Tensor){0};
  lce_target_gradient(c->backend, of_bias);
}

// Thousands of tokens at a time: a chunk of a thousand would take a GPU almost as long.
void lce_add_all_targets(const Call *c, const Chunk *buffers) {
  enum { AT_ONCE = 16384 };
  const LinearCrossEntropy *a = c->a;
  if (!tensor_exists(a->dweight) || targets_in_exps(c)) return;
  for (int64_t first = 0, tokens = a->x.shape[0]; first < tokens; first += AT_ONCE) {
    int64_t count = min_i64(tokens - first, AT_ONCE);
    lce_add_targets(c, tensor_rows(buffers->softmax.scale_target, first, count),
                    tensor_rows(a->x, first, count), tensor_rows(a->targets, first, count));
  }
}
