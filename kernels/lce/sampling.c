// linear_cross_entropy with sampled gradients: a random part of the softmax gradient's tiles, scaled so that
// dx and dweight keep their expectation (LceSampledGradients).
#include "kernels/lce/call.h"

// Below this full mass too many tiles are kept to save time, and the gradients are exact. On an H200 (GPT-2
// 124M after 540 steps, chunk 4096), relative to the exact gradients' time: 1.00 at 2^-5, 1.12 at 2^-6.
static const float LEAST_FULL_MASS = 0x1p-5f;

static size_t kept_bytes(const Call *call) {
  const LinearCrossEntropy *args = call->args;
  int64_t rows = lce_used_chunk(args->x.shape[0], args->chunk) * call->ranks;
  return call->backend->scratch->lce_kept_bytes(args->weight, args->dx, args->dweight, rows,
                                                args->sampling.full_mass);
}

bool lce_samples(const Call *call) {
  const LinearCrossEntropy *args = call->args;
  return tensor_exists(args->dweight) && args->sampling.full_mass >= LEAST_FULL_MASS &&
         !call->backend->no_sampling && (!call->backend->scratch->lce_kept_bytes || kept_bytes(call) > 0);
}

Sampling lce_push_sampling(const Call *call, int64_t rows) {
  int64_t across = ceil_div(call->args->weight.shape[0], LCE_TILE_COLUMNS);
  Sampling s = {.stats = call->args->sampling.stats, .rows = rows};
  if (!tensor_exists(s.stats))
    fill_zero(call->backend, s.stats = push_vector(call, "tiles dropped", DTYPE_F32, 3));
  s.tile_sums = push_matrix(call, "row sums of tiles", DTYPE_F32, rows, across);
  s.tiles = push_matrix(call, "tiles", DTYPE_F32, ceil_div(rows, LCE_TILE_ROWS), across);
  if (call->backend->scratch->lce_kept_bytes)
    s.kept = push_vector(call, "kept tiles", DTYPE_I32, (int64_t)(kept_bytes(call) / 4));
  return s;
}

void lce_sampled_exponentials(const Call *call, const Sampling *s, LceLogitsExp exponentials) {
  exponentials.dx_raw = (Tensor){0}; // needs R first
  exponentials.tile_sums = tensor_rows(s->tile_sums, 0, exponentials.x.shape[0]);
  lce_logits_exp(call->backend, exponentials);
}

void lce_sampled_gradients_of(const Call *call, const Sampling *s, const Chunk *k, int64_t chunk, bool last) {
  const LinearCrossEntropy *args = call->args;
  int64_t rows = k->exps.shape[0];
  lce_sampled_gradients(
      call->backend,
      (LceSampledGradients){.dx_raw = k->tokens.dx,
                            .dweight = args->dweight,
                            .tiles = tensor_rows(s->tiles, 0, ceil_div(rows, LCE_TILE_ROWS)),
                            .stats = s->stats,
                            .exps = k->exps,
                            .tile_sums = tensor_rows(s->tile_sums, 0, rows),
                            .softmax = k->softmax,
                            .weight = args->weight,
                            .scaled_x = k->scaled_x,
                            .full_mass = args->sampling.full_mass,
                            .seed = args->sampling.seed,
                            .stream = (uint64_t)(chunk * call->backend->ranks + call->backend->rank),
                            .alpha = args->scale,
                            .kept = s->kept,
                            .kept_rows = s->rows,
                            .first = chunk == 0,
                            .flush = last,
                            .accumulate = args->accumulate});
}

// The plain loop, but dX = E W waits for R and is computed together with dW.
void lce_sampled(const Call *call) {
  const LinearCrossEntropy *args = call->args;
  Memory *memory = &call->backend->memory;
  int64_t tokens = args->x.shape[0], size = lce_used_chunk(tokens, args->chunk);
  Chunk buffers = lce_push_buffers(call, size, tokens);
  Sampling sampling = lce_push_sampling(call, size);
  lce_target_z(call, buffers.softmax.target_z, args->x, args->targets);
  for (int64_t first = 0; first < tokens; first += size) {
    Chunk k = lce_chunk_at(call, &buffers, first);
    MemoryMark mark = memory_mark(memory);
    lce_sampled_exponentials(call, &sampling, lce_logits_exp_of(call, &k)); // E, R
    lce_losses(call, &k);                                                   // loss, r, c, r X
    lce_sampled_gradients_of(call, &sampling, &k, first / size, first + size >= tokens);
    lce_finish_dx(call, &k); // dX = r dX + c W[y]
    memory_pop_to(memory, mark);
  }
  lce_add_all_targets(call, &buffers);
}
