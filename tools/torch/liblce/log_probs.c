// The gradients of log-probabilities, by log p[y] of every token from an earlier forward pass.
//
// The sums over the vocabulary are then known, so the loop takes the vocabulary in blocks of W rows, not the
// tokens in chunks. A block's gradient of the logits, G [N, W], is final as soon as it is computed:
//
//     G           = gradient of x W_block^T        (LceLogitsGradient; the target's own entry included)
//     dX         += G W_block                      in fp32
//     dW of block = G^T X                          written once, over all tokens, in fp32 or in W's dtype
//     dbias       = sum of G's rows
//
// Three GEMMs of N tokens, as a chunk loop has, but no sum of dW over chunks: nothing of [V, H] besides W and
// dW, whose sum is the GEMM's own. Where the forward pass has kept E of all tokens, there is one block, G
// takes E's place, and the GEMMs are two.
#include "tools/torch/liblce/log_probs.h"

#include "kernels/fail.h"
#include "kernels/integers.h"
#include "kernels/lce/call.h"
#include "kernels/torch_operations.h"

static Tensor vector(Backend *backend, const char *name, int64_t count) {
  return memory_push_1d(&backend->memory, name, MEMORY_HEAD, DTYPE_F32, count);
}

// Absent without `mean`.
static Tensor factor_of_mean(Backend *backend, bool mean, Tensor targets, const LossTerms *terms) {
  if (!mean) return (Tensor){0};
  Tensor factor = vector(backend, "the mean's factor", 1);
  loss_factor(backend,
              (LossFactor){.factor = factor, .targets = targets, .class_weights = terms->class_weights});
  return factor;
}

// --- the forward pass --------------------------------------------------------------------------------------

void keep_exponentials(Backend *backend, LinearCrossEntropy a, Exponentials kept) {
  lce_check(backend, &a);
  int64_t tokens = a.x.shape[0];
  if (tensor_exists(a.dx) || tensor_exists(a.dweight) || a.chunk < tokens || a.mode != LCE_FUSED ||
      a.sampling.full_mass > 0 || a.shard.vocab_size || a.terms.softcap > 0 || a.terms.label_smoothing > 0)
    fail("keep_exponentials: exps are kept by a call without gradients, in one chunk of all tokens, and "
         "without soft-cap, label smoothing, sampling, split head and materialized mode");
  MemoryMark mark = memory_mark(&backend->memory);
  SoftmaxStatistics softmax = {.row_sum = kept.row_sum,
                               .target_e = vector(backend, "target exponentials", tokens),
                               .target_z = vector(backend, "target logits", tokens),
                               .anchor = vector(backend, "anchors", tokens)};
  if (tensor_exists(a.outputs.entropy)) softmax.e_distance = vector(backend, "sums of distances", tokens);
  if (token_outputs_need_max(&a.outputs)) {
    softmax.max = vector(backend, "largest logits", tokens);
    softmax.best =
        memory_push_1d(&backend->memory, "columns of the largest logits", MEMORY_HEAD, DTYPE_I32, tokens);
  }
  lce_target_logits(
      backend,
      (LceTargetLogits){
          .target_z = softmax.target_z, .x = a.x, .weight = a.weight, .bias = a.bias, .targets = a.targets});
  lce_logits_exp(backend, (LceLogitsExp){.exps = kept.exps,
                                         .softmax = softmax,
                                         .x = a.x,
                                         .weight = a.weight,
                                         .bias = a.bias,
                                         .targets = a.targets,
                                         .temperature = a.terms.temperature});
  lce_row_losses(backend, (LceRowLosses){.loss = a.loss,
                                         .outputs = a.outputs,
                                         .softmax = softmax,
                                         .x = a.x,
                                         .targets = a.targets,
                                         .terms = a.terms,
                                         .vocab_size = a.weight.shape[0]});
  memory_pop_to(&backend->memory, mark);
}

// --- gradients ---------------------------------------------------------------------------------------------

// The operations check what they get: whole tensors, or their parts in a block.
static void check(const LogProbGradients *a) {
  const char *op = "log_prob_gradients";
  Tensor exps = a->kept.exps, dweight = a->dweight;
  if (a->chunk < 1) fail("%s: a chunk of %lld tokens; give 1 or more", op, (long long)a->chunk);
  if (tensor_exists(exps) && (exps.shape[1] != a->weight.shape[0] || !tensor_exists(a->kept.row_sum)))
    fail("%s: exps is %s and row_sum is %s for a weight of %s", op, tensor_text(exps).text,
         tensor_text(a->kept.row_sum).text, tensor_text(a->weight).text);
  if (tensor_exists(a->dbias) != (tensor_exists(a->bias) && tensor_exists(dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(a->bias).text, tensor_text(a->dbias).text);
  if (!tensor_exists(dweight)) return;
  bool narrow = dweight.dtype == a->weight.dtype && !a->accumulate;
  if (!tensor_same_shape(dweight, a->weight) || (dweight.dtype != DTYPE_F32 && !narrow))
    fail("%s: dweight is %s for a weight of %s; it needs that shape, in fp32 or, where nothing is added to "
         "it, in weight's type",
         op, tensor_text(dweight).text, tensor_text(a->weight).text);
}

// Rows of W at a time, such that G takes half of what a chunk's exponentials would.
static int64_t block_rows(const LogProbGradients *a) {
  int64_t vocab_size = a->weight.shape[0], chunk = lce_used_chunk(a->x.shape[0], a->chunk);
  int64_t tiles = chunk * ceil_div(vocab_size, LCE_TILE_COLUMNS) / (2 * a->x.shape[0]);
  return min_i64(vocab_size, max_i64(1, tiles) * LCE_TILE_COLUMNS);
}

static GradientFactors gradient_factors(Backend *backend, const LogProbGradients *a) {
  static const char *const names[] = {"logsumexp", "factors of p", "factors of p times distance",
                                      "target entries"};
  int64_t tokens = a->x.shape[0];
  Tensor factor = factor_of_mean(backend, a->mean, a->targets, &a->terms);
  Tensor target_z = vector(backend, "target logits", tokens);
  GradientFactors factors;
  for (int i = 0; i < 4; i++) factors.all[i] = vector(backend, names[i], tokens);
  lce_target_logits(backend, (LceTargetLogits){.target_z = target_z,
                                               .x = a->x,
                                               .weight = a->weight,
                                               .bias = a->bias,
                                               .targets = a->targets,
                                               .softcap = a->terms.softcap});
  lce_gradient_factors(backend, (LceGradientFactors){.factors = factors,
                                                     .target_z = target_z,
                                                     .log_prob = a->log_prob,
                                                     .row_sum = a->kept.row_sum,
                                                     .entropy = a->entropy,
                                                     .targets = a->targets,
                                                     .token_weights = a->token_weights,
                                                     .entropy_weights = a->entropy_weights,
                                                     .factor = factor,
                                                     .terms = a->terms,
                                                     .vocab_size = a->weight.shape[0],
                                                     .alpha = a->scale});
  return factors;
}

void log_prob_gradients(Backend *backend, LogProbGradients a) {
  check(&a);
  if (!tensor_exists(a.dx) && !tensor_exists(a.dweight)) return;
  Memory *memory = &backend->memory;
  MemoryMark mark = memory_mark(memory);
  int64_t tokens = a.x.shape[0], vocab_size = a.weight.shape[0];
  bool kept = tensor_exists(a.kept.exps);
  int64_t size = kept ? vocab_size : block_rows(&a);
  int64_t stride = backend->scratch->logits_stride(size, a.x.dtype);
  GradientFactors factors = gradient_factors(backend, &a);
  Tensor targets = memory_push_1d(memory, "targets in the block", MEMORY_HEAD, DTYPE_I32, tokens);
  Tensor buffer = kept ? a.kept.exps
                       : memory_push_2d(memory, "gradient of logits", MEMORY_HEAD, a.x.dtype, tokens, stride);
  Tensor dx = a.dx;
  if (tensor_exists(dx) && dx.dtype != DTYPE_F32 && size < vocab_size)
    dx = memory_push_2d(memory, "sum of dx", MEMORY_HEAD, DTYPE_F32, tokens, a.x.shape[1]);
  for (int64_t first = 0; first < vocab_size; first += size) {
    int64_t count = min_i64(size, vocab_size - first);
    Tensor weight = tensor_rows(a.weight, first, count), dlogits = tensor_columns(buffer, 0, count);
    shard_indices(backend,
                  (ShardIndices){.out = targets, .indices = a.targets, .first = first, .count = count});
    LceLogitsGradient gradient = {.dlogits = dlogits,
                                  .factors = factors,
                                  .targets = targets,
                                  .softcap = a.terms.softcap,
                                  .temperature = a.terms.temperature};
    if (!kept) gradient.x = a.x, gradient.weight = weight, gradient.bias = first_rows(a.bias, first, count);
    lce_logits_gradient(backend, gradient);
    if (tensor_exists(dx))
      linear_backward_input(
          backend,
          (LinearBackwardInput){.dx = dx, .dout = dlogits, .weight = weight, .accumulate = first > 0});
    if (tensor_exists(a.dweight))
      linear_backward_weight(backend, (LinearBackwardWeight){.dweight = tensor_rows(a.dweight, first, count),
                                                             .dbias = first_rows(a.dbias, first, count),
                                                             .dout = dlogits,
                                                             .x = a.x,
                                                             .accumulate = a.accumulate});
  }
  if (tensor_exists(dx) && dx.data != a.dx.data)
    scale_by(backend, (ScaleBy){.out = tensor_flat(a.dx), .x = tensor_flat(dx)});
  memory_pop_to(memory, mark);
}

// --- the materialized mode ---------------------------------------------------------------------------------

void materialized_with_entropies(Backend *backend, LinearCrossEntropy a, Tensor entropy_weights) {
  lce_check(backend, &a);
  MemoryMark mark = memory_mark(&backend->memory);
  int64_t tokens = a.x.shape[0], vocab_size = a.weight.shape[0];
  int64_t stride = backend->scratch->logits_stride(vocab_size, a.x.dtype);
  if (a.terms.label_smoothing > 0 && tensor_exists(a.terms.class_weights)) {
    a.terms.class_weight_sum = vector(backend, "sum of class weights", 1);
    sum_elements(backend, (SumElements){.sum = a.terms.class_weight_sum, .x = a.terms.class_weights});
  }
  Tensor factor = factor_of_mean(backend, a.mean, a.targets, &a.terms);
  Tensor logits = tensor_columns(
      memory_push_2d(&backend->memory, "logits", MEMORY_HEAD, a.x.dtype, tokens, stride), 0, vocab_size);
  linear_forward(backend, (LinearForward){.out = logits, .x = a.x, .weight = a.weight});
  cross_entropy_in_place(backend,
                         (CrossEntropyInPlace){.loss = a.loss,
                                               .outputs = a.outputs,
                                               .logits = logits,
                                               .backward = tensor_exists(a.dx) || tensor_exists(a.dweight),
                                               .bias = a.bias,
                                               .targets = a.targets,
                                               .token_weights = a.token_weights,
                                               .entropy_weights = entropy_weights,
                                               .factor = factor,
                                               .terms = a.terms,
                                               .alpha = a.scale});
  if (tensor_exists(a.dx))
    linear_backward_input(backend, (LinearBackwardInput){.dx = a.dx, .dout = logits, .weight = a.weight});
  if (tensor_exists(a.dweight))
    linear_backward_weight(
        backend,
        (LinearBackwardWeight){
            .dweight = a.dweight, .dbias = a.dbias, .dout = logits, .x = a.x, .accumulate = a.accumulate});
  memory_pop_to(&backend->memory, mark);
}
