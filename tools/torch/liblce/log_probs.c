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

#include "kernels/base/fail.h"
#include "kernels/base/integers.h"

void keep_exponentials(Backend *backend, LinearCrossEntropy a, Exponentials kept) {
  lce_check(backend, &a);
  int64_t tokens = a.x.shape[0];
  if (tensor_exists(a.dx) || tensor_exists(a.dweight) || a.chunk < tokens || a.mode != LCE_FUSED ||
      a.sampling.full_mass > 0 || a.shard.vocab_size || a.terms.softcap > 0 || a.terms.label_smoothing > 0)
    fail("keep_exponentials: exps are kept by a call without gradients, in one chunk of all tokens, and "
         "without soft-cap, label smoothing, sampling, split head and materialized mode");
  a.mean = false; // it acts on gradients alone
  Call c = lce_begin(backend, &a);
  Chunk buffers = lce_push_buffers(&c, tokens, tokens), k = lce_chunk_at(&c, &buffers, 0);
  k.exps = kept.exps, k.softmax.row_sum = kept.row_sum;
  lce_target_z(&c, k.softmax.target_z, a.x, a.targets);
  lce_exponentials(&c, &k);
  lce_losses(&c, &k);
  lce_end(&c);
}

// The operations check what they get: whole tensors, or their parts in a block.
void check_gradients(const LinearCrossEntropy *a, const Exponentials *kept) {
  const char *op = "log_prob_gradients";
  if (a->chunk < 1) fail("%s: a chunk of %lld tokens; give 1 or more", op, (long long)a->chunk);
  if (tensor_exists(kept->exps) &&
      (kept->exps.shape[1] != a->weight.shape[0] || !tensor_exists(kept->row_sum)))
    fail("%s: exps is %s and row_sum is %s for a weight of %s", op, tensor_text(kept->exps).text,
         tensor_text(kept->row_sum).text, tensor_text(a->weight).text);
  if (tensor_exists(kept->exps) && a->shard.vocab_size)
    fail("%s: exps are kept for a whole head, and this one is split over ranks; leave them out", op);
  if (tensor_exists(a->dbias) != (tensor_exists(a->bias) && tensor_exists(a->dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(a->bias).text, tensor_text(a->dbias).text);
  bool narrow = a->dweight.dtype == a->weight.dtype && !a->accumulate && !a->shard.vocab_size;
  if (tensor_exists(a->dweight) &&
      (!tensor_same_shape(a->dweight, a->weight) || (a->dweight.dtype != DTYPE_F32 && !narrow)))
    fail("%s: dweight is %s for a weight of %s; it needs that shape, in fp32 or, where nothing is added to "
         "it, in weight's type",
         op, tensor_text(a->dweight).text, tensor_text(a->weight).text);
}

enum { INVARIANT_TILES = 64 };

// Rows of W at a time, such that G takes half of what a chunk's exponentials would; where the batch may not
// matter always as many, since they say how dX is summed.
static int64_t block_rows(const Backend *backend, const LinearCrossEntropy *a) {
  int64_t vocab_size = a->weight.shape[0], chunk = lce_used_chunk(a->x.shape[0], a->chunk);
  if (backend->fixed_order) return min_i64(vocab_size, INVARIANT_TILES * LCE_TILE_COLUMNS);
  int64_t tiles = chunk * ceil_div(vocab_size, LCE_TILE_COLUMNS) / (2 * a->x.shape[0]);
  return min_i64(vocab_size, max_i64(1, tiles) * LCE_TILE_COLUMNS);
}

void gradients_by_blocks(const Call *c, GradientFactors factors, Tensor anchor, Tensor exps,
                         const LceIdGradients *ids) {
  const LinearCrossEntropy *a = c->args;
  Backend *backend = c->backend;
  int64_t tokens = a->x.shape[0], vocab_size = a->weight.shape[0];
  bool kept = tensor_exists(exps);
  int64_t size = kept ? vocab_size : block_rows(backend, a);
  int64_t stride = backend->scratch->logits_stride(size, a->x.dtype);
  Tensor targets = push_vector(c, "targets in the block", DTYPE_I32, tokens);
  Tensor buffer = kept ? exps : push_matrix(c, "gradient of logits", a->x.dtype, tokens, stride);
  Tensor dx = a->dx;
  if (tensor_exists(dx) && dx.dtype != DTYPE_F32 && size < vocab_size)
    dx = push_matrix(c, "sum of dx", DTYPE_F32, tokens, a->x.shape[1]);
  for (int64_t first = 0; first < vocab_size; first += size) {
    int64_t count = min_i64(size, vocab_size - first);
    Tensor weight = tensor_rows(a->weight, first, count), dlogits = tensor_columns(buffer, 0, count);
    shard_indices(
        backend, (ShardIndices){
                     .out = targets, .indices = a->targets, .first = a->shard.first + first, .count = count});
    LceLogitsGradient gradient = {.dlogits = dlogits,
                                  .factors = factors,
                                  .targets = targets,
                                  .softcap = a->terms.softcap,
                                  .temperature = a->terms.temperature};
    if (!kept) gradient.x = a->x, gradient.weight = weight, gradient.anchor = anchor;
    if (!kept) gradient.bias = tensor_rows(a->bias, first, count);
    lce_logits_gradient(backend, gradient);
    if (ids) {
      LceIdGradients entries = *ids;
      entries.dlogits = dlogits, entries.first = first;
      lce_id_gradients(backend, entries);
    }
    if (tensor_exists(dx))
      linear_backward_input(
          backend,
          (LinearBackwardInput){.dx = dx, .dout = dlogits, .weight = weight, .accumulate = first > 0});
    if (tensor_exists(a->dweight))
      linear_backward_weight(backend, (LinearBackwardWeight){.dweight = tensor_rows(a->dweight, first, count),
                                                             .dbias = tensor_rows(a->dbias, first, count),
                                                             .dout = dlogits,
                                                             .x = a->x,
                                                             .accumulate = a->accumulate});
  }
  if (tensor_exists(dx) && dx.data != a->dx.data)
    scale_by(backend, (ScaleBy){.out = tensor_flat(a->dx), .x = tensor_flat(dx)});
}

GradientFactors push_factors(const Call *c, int64_t tokens) {
  static const char *const names[] = {"log of total", "factors of p", "factors of p times distance",
                                      "target entries"};
  GradientFactors factors;
  for (int i = 0; i < 4; i++) factors.all[i] = push_vector(c, names[i], DTYPE_F32, tokens);
  return factors;
}

// The pass over W's rows, with the factors that log_prob and entropy give.
static void gradients_of_tokens(const Call *c, const LogProbGradients *known) {
  const LinearCrossEntropy *a = c->args;
  int64_t tokens = a->x.shape[0];
  Tensor target_z = push_vector(c, "target logits", DTYPE_F32, tokens);
  GradientFactors factors = push_factors(c, tokens);
  if (a->shard.vocab_size) {
    Tensor local = push_vector(c, "targets in local rows", DTYPE_I32, tokens);
    lce_split_target_z(c, target_z, local, a->x, a->targets);
  } else {
    lce_target_z(c, target_z, a->x, a->targets);
  }
  lce_gradient_factors(c->backend, (LceGradientFactors){.factors = factors,
                                                        .target_z = target_z,
                                                        .log_prob = known->log_prob,
                                                        .row_sum = known->kept.row_sum,
                                                        .entropy = known->entropy,
                                                        .targets = a->targets,
                                                        .token_weights = a->token_weights,
                                                        .entropy_weights = known->entropy_weights,
                                                        .factor = c->factor,
                                                        .terms = c->terms,
                                                        .vocab_size = c->vocab_size,
                                                        .alpha = a->scale});
  gradients_by_blocks(c, factors, target_z, known->kept.exps, NULL);
}

// With a head split over ranks, tokens travel and W stays, as in kernels/lce/split_head.c: of every rank a
// chunk of tokens, with what is known of them, against this rank's rows.
static void split_gradients(const Call *c, const LogProbGradients *known) {
  const LinearCrossEntropy *a = c->args;
  Memory *memory = &c->backend->memory;
  int64_t tokens = a->x.shape[0], size = lce_used_chunk(tokens, a->chunk);
  for (int64_t first = 0; first < tokens; first += size) {
    MemoryMark mark = memory_mark(memory);
    int64_t count = min_i64(size, tokens - first), rows = count * c->ranks;
    LogProbGradients all = *known;
    Tensor *gathered[] = {&all.call.x,   &all.call.targets, &all.call.token_weights,
                          &all.log_prob, &all.entropy,      &all.entropy_weights};
    for (size_t i = 0; i < sizeof gathered / sizeof *gathered; i++) {
      if (!tensor_exists(*gathered[i])) continue;
      Tensor local = tensor_rows(*gathered[i], first, count);
      *gathered[i] = local.rank == 2 ? push_matrix(c, "x of all ranks", local.dtype, rows, local.shape[1])
                                     : push_vector(c, "a vector of all ranks", local.dtype, rows);
      all_gather(c->backend, (Collective){.out = *gathered[i], .x = local});
    }
    all.call.chunk = rows;
    all.call.accumulate = a->accumulate || first > 0;
    if (tensor_exists(a->dx)) {
      all.call.dx = push_matrix(c, "parts of dx", a->dx.dtype, rows, a->dx.shape[1]);
      if (a->weight.shape[0] == 0) fill_zero(c->backend, all.call.dx);
    }
    Call chunk = *c;
    chunk.args = &all.call;
    gradients_of_tokens(&chunk, &all);
    Collective sum = {.out = tensor_rows(a->dx, first, count), .x = all.call.dx};
    if (tensor_exists(a->dx)) reduce_scatter(c->backend, sum);
    memory_pop_to(memory, mark);
    if (memory->planning) break; // the chunks after the first need no more
  }
}

void log_prob_gradients(Backend *backend, LogProbGradients known) {
  const LinearCrossEntropy *a = &known.call;
  bool split = a->shard.vocab_size;
  check_gradients(a, &known.kept);
  lce_check_shard(backend, a);
  if (!tensor_exists(a->dx) && !tensor_exists(a->dweight) && !split) return;
  Call c = lce_begin(backend, a);
  if (split)
    split_gradients(&c, &known);
  else
    gradients_of_tokens(&c, &known);
  lce_end(&c);
}

void loss_of_logits(Backend *backend, LinearCrossEntropy args, Tensor entropy_weights) {
  int64_t tokens = args.x.shape[0], size = tokens;
  if (tensor_exists(entropy_weights) && entropy_weights.shape[0] != tokens)
    fail("loss_of_logits: entropy_weights is %s for %lld tokens", tensor_text(entropy_weights).text,
         (long long)tokens);
  if (args.mode == LCE_FUSED) size = lce_used_chunk(tokens, args.chunk);
  args.mode = LCE_MATERIALIZED;
  lce_check(backend, &args);
  Call call = lce_begin(backend, &args); // the mean is over all tokens
  for (int64_t first = 0; first < tokens; first += size) {
    MemoryMark mark = memory_mark(&backend->memory);
    int64_t count = min_i64(size, tokens - first);
    Tokens t = tokens_range(&call.tokens, first, count);
    LinearCrossEntropy part = args;
    part.x = t.x, part.targets = t.targets, part.token_weights = t.token_weights;
    part.loss = t.loss, part.dx = t.dx, part.outputs = t.outputs;
    part.accumulate = args.accumulate || first > 0;
    Call chunk = call;
    chunk.args = &part;
    lce_materialized(&chunk, tensor_rows(entropy_weights, first, count));
    memory_pop_to(&backend->memory, mark);
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
  lce_end(&call);
}
