// linear_cross_entropy where log p[y] of every token is known from an earlier call: the gradients alone.
//
// The sums over the vocabulary are then known too, so the loop takes the vocabulary in blocks of W rows, not the tokens in
// chunks. A block's gradient of the logits, G [N, W], is final as soon as it is computed:
//
//     G           = gradient of x W_block^T        (LceLogitsGradient; the target's own entry included)
//     dX         += G W_block                      in fp32
//     dW of block = G^T X                          written once, over all tokens, in fp32 or in W's dtype
//     dbias       = sum of G's rows
//
// Three GEMMs of N tokens, as a chunk loop has, but no sum of dW over chunks: nothing of [V, H] besides W and dW, whose
// sum is the GEMM's own. Where the forward pass has kept E of all tokens, there is one block, G takes E's place, and the
// GEMMs are two.
#include "kernels/integers.h"
#include "kernels/lce/call.h"
#include "kernels/torch_operations.h"

// Rows of W at a time, such that G takes half of what a chunk's exponentials would.
static int64_t block_rows(const LinearCrossEntropy *a) {
  int64_t vocab_size = a->weight.shape[0], chunk = lce_used_chunk(a->x.shape[0], a->chunk);
  int64_t tiles = chunk * ceil_div(vocab_size, LCE_TILE_COLUMNS) / (2 * a->x.shape[0]);
  return min_i64(vocab_size, max_i64(1, tiles) * LCE_TILE_COLUMNS);
}

static GradientFactors gradient_factors(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  static const char *const names[] = {"logsumexp", "factors of p", "factors of p times distance",
                                      "target entries"};
  Tensor target_z = push_vector(c, "target logits", DTYPE_F32, a->x.shape[0]);
  GradientFactors factors;
  for (int i = 0; i < 4; i++) factors.all[i] = push_vector(c, names[i], DTYPE_F32, a->x.shape[0]);
  lce_target_z(c, target_z, a->x, a->targets);
  lce_gradient_factors(c->backend, (LceGradientFactors){.factors = factors,
                                                        .target_z = target_z,
                                                        .log_prob = a->known_log_prob,
                                                        .row_sum = a->exps_sum,
                                                        .entropy = a->known_entropy,
                                                        .targets = a->targets,
                                                        .token_weights = a->token_weights,
                                                        .entropy_weights = a->entropy_weights,
                                                        .factor = c->factor,
                                                        .terms = a->terms,
                                                        .vocab_size = c->vocab_size,
                                                        .alpha = a->scale});
  return factors;
}

void lce_known_gradients(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  if (!c->backward) return;
  int64_t tokens = a->x.shape[0], hidden_size = a->x.shape[1], vocab_size = c->vocab_size;
  bool kept = tensor_exists(a->exps);
  int64_t size = kept ? vocab_size : block_rows(a);
  int64_t stride = c->backend->scratch->logits_stride(size, a->x.dtype);
  GradientFactors factors = gradient_factors(c);
  Tensor targets = push_vector(c, "targets in the block", DTYPE_I32, tokens), dx = a->dx;
  Tensor buffer = kept ? a->exps : push_matrix(c, "gradient of logits", a->x.dtype, tokens, stride);
  if (tensor_exists(dx) && dx.dtype != DTYPE_F32 && size < vocab_size)
    dx = push_matrix(c, "sum of dx", DTYPE_F32, tokens, hidden_size);
  for (int64_t first = 0; first < vocab_size; first += size) {
    int64_t count = min_i64(size, vocab_size - first);
    Tensor weight = tensor_rows(a->weight, first, count), dlogits = tensor_columns(buffer, 0, count);
    shard_indices(c->backend,
                  (ShardIndices){.out = targets, .indices = a->targets, .first = first, .count = count});
    LceLogitsGradient gradient = {.dlogits = dlogits,
                                  .factors = factors,
                                  .targets = targets,
                                  .softcap = a->terms.softcap,
                                  .temperature = a->terms.temperature};
    if (!kept) gradient.x = a->x, gradient.weight = weight, gradient.bias = first_rows(a->bias, first, count);
    lce_logits_gradient(c->backend, gradient);
    if (tensor_exists(dx))
      linear_backward_input(
          c->backend,
          (LinearBackwardInput){.dx = dx, .dout = dlogits, .weight = weight, .accumulate = first > 0});
    if (tensor_exists(a->dweight))
      linear_backward_weight(c->backend,
                             (LinearBackwardWeight){.dweight = tensor_rows(a->dweight, first, count),
                                                    .dbias = first_rows(a->dbias, first, count),
                                                    .dout = dlogits,
                                                    .x = a->x,
                                                    .accumulate = a->accumulate});
  }
  if (tensor_exists(dx) && dx.data != a->dx.data)
    scale_by(c->backend, (ScaleBy){.out = tensor_flat(a->dx), .x = tensor_flat(dx)});
}
