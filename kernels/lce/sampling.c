// linear_cross_entropy with sampled gradients: a random part of the softmax gradient's tiles, scaled so that
// dx and dweight keep their expectation (LceSampledGradients).
#include "kernels/lce/call.h"

// Below this full mass too many tiles are kept to save time, and the gradients are exact. On an H200 (GPT-2
// 124M after 540 steps, chunk 4096), in times of the exact gradients: 1.00 at 2^-5, 1.12 at 2^-6.
static const float LEAST_FULL_MASS = 0x1p-5f;

static size_t kept_bytes(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  int64_t rows = lce_used_chunk(a->x.shape[0], a->chunk) * c->ranks;
  return c->backend->scratch->lce_kept_bytes(a->weight, a->dx, a->dweight, rows, a->sampling.full_mass);
}

bool lce_samples(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  return tensor_exists(a->dweight) && a->sampling.full_mass >= LEAST_FULL_MASS && !c->backend->no_sampling &&
         (!c->backend->scratch->lce_kept_bytes || kept_bytes(c) > 0);
}

Sampling lce_push_sampling(const Call *c, int64_t rows) {
  int64_t across = ceil_div(c->a->weight.shape[0], LCE_TILE_COLUMNS);
  Sampling s = {.stats = c->a->sampling.stats, .rows = rows};
  if (!tensor_exists(s.stats)) fill_zero(c->backend, s.stats = push_vector(c, "tiles dropped", DTYPE_F32, 3));
  s.tile_sums = push_matrix(c, "row sums of tiles", DTYPE_F32, rows, across);
  s.tiles = push_matrix(c, "tiles", DTYPE_F32, ceil_div(rows, LCE_TILE_ROWS), across);
  if (c->backend->scratch->lce_kept_bytes)
    s.kept = push_vector(c, "kept tiles", DTYPE_I32, (int64_t)(kept_bytes(c) / 4));
  return s;
}

void lce_sampled_exponentials(const Call *c, const Sampling *s, LceLogitsExp a) {
  a.dx_raw = (Tensor){0}; // needs R first
  a.tile_sums = tensor_rows(s->tile_sums, 0, a.x.shape[0]);
  lce_logits_exp(c->backend, a);
}

void lce_sampled_gradients_of(const Call *c, const Sampling *s, const Chunk *k, int64_t chunk, bool last) {
  const LinearCrossEntropy *a = c->a;
  int64_t rows = k->exps.shape[0];
  lce_sampled_gradients(
      c->backend, (LceSampledGradients){.dx_raw = k->tokens.dx,
                                        .dweight = a->dweight,
                                        .tiles = tensor_rows(s->tiles, 0, ceil_div(rows, LCE_TILE_ROWS)),
                                        .stats = s->stats,
                                        .exps = k->exps,
                                        .tile_sums = tensor_rows(s->tile_sums, 0, rows),
                                        .softmax = k->softmax,
                                        .weight = a->weight,
                                        .scaled_x = k->scaled_x,
                                        .full_mass = a->sampling.full_mass,
                                        .seed = a->sampling.seed,
                                        .stream = (uint64_t)(chunk * c->backend->ranks + c->backend->rank),
                                        .alpha = a->scale,
                                        .kept = s->kept,
                                        .kept_rows = s->rows,
                                        .first = chunk == 0,
                                        .flush = last,
                                        .accumulate = a->accumulate});
}

// The plain loop, but dX = E W waits for R and is made together with dW.
void lce_sampled(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  Memory *memory = &c->backend->memory;
  int64_t tokens = a->x.shape[0], size = lce_used_chunk(tokens, a->chunk);
  Chunk buffers = lce_push_buffers(c, size, tokens);
  Sampling sampling = lce_push_sampling(c, size);
  lce_target_z(c, buffers.softmax.target_z, a->x, a->targets);
  for (int64_t first = 0; first < tokens; first += size) {
    Chunk k = lce_chunk_at(c, &buffers, first);
    MemoryMark mark = memory_mark(memory);
    lce_sampled_exponentials(c, &sampling, lce_logits_exp_of(c, &k)); // E, R
    lce_losses(c, &k);                                                // loss, r, c, r X
    lce_sampled_gradients_of(c, &sampling, &k, first / size, first + size >= tokens);
    lce_finish_dx(c, &k); // dX = r dX + c W[y]
    memory_pop_to(memory, mark);
  }
  lce_add_all_targets(c, &buffers);
}
