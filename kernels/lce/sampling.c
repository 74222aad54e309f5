// linear_cross_entropy with sampled gradients: a random part of the softmax gradient's tiles, scaled so that dx and dweight
// keep their expectation (LceSampledGradients).
#include "kernels/lce/call.h"

// Below this full mass so many tiles are kept that skipping the others costs more than it saves, and the gradients are exact.
// Measured on an H200 (GPT-2 124M after 540 steps, chunk 4096), in times of the exact gradients: 1.00 at 2^-5, 1.12 at 2^-6.
static const float LEAST_FULL_MASS = 0x1p-5f;

void lce_sampling_begin(Call *c, LinearCrossEntropy *a) {
  const BackendScratch *scratch = c->backend->scratch;
  c->sampled =
      tensor_exists(a->dweight) && a->sampling.full_mass >= LEAST_FULL_MASS && !c->backend->no_sampling;
  if (c->sampled && scratch->lce_kept_bytes) {
    int64_t rows = lce_used_chunk(a->x.shape[0], a->chunk) * c->ranks;
    c->kept_bytes = scratch->lce_kept_bytes(a->weight, a->dx, a->dweight, rows, a->sampling.full_mass);
    c->sampled = c->kept_bytes > 0;
  }
  if (c->sampled && !tensor_exists(a->sampling.stats))
    a->sampling.stats = push_vector(c, "tiles dropped", DTYPE_F32, 3);
  if (tensor_exists(a->sampling.stats)) fill_zero(c->backend, a->sampling.stats);
}

void lce_sampling_buffers(const Call *c, Chunk *b, int64_t rows) {
  int64_t across = ceil_div(c->a->weight.shape[0], LCE_TILE_COLUMNS);
  b->tile_sums = push_matrix(c, "row sums of tiles", DTYPE_F32, rows, across);
  b->tiles = push_matrix(c, "tiles", DTYPE_F32, ceil_div(rows, LCE_TILE_ROWS), across);
  b->kept_rows = rows;
  if (c->kept_bytes) b->kept = push_vector(c, "kept tiles", DTYPE_I32, (int64_t)(c->kept_bytes / 4));
}

// dx_raw from the tiles that are drawn, and their part of dweight. Chunks and ranks draw from streams of their own.
void lce_sampling_gradients(const Call *c, const Chunk *k, int64_t chunk, bool last) {
  const LinearCrossEntropy *a = c->a;
  lce_sampled_gradients(
      c->backend, (LceSampledGradients){.dx_raw = k->tokens.dx,
                                        .dweight = a->dweight,
                                        .tiles = k->tiles,
                                        .stats = a->sampling.stats,
                                        .exps = k->exps,
                                        .tile_sums = k->tile_sums,
                                        .rows = k->rows,
                                        .weight = a->weight,
                                        .scaled_x = k->scaled_x,
                                        .full_mass = a->sampling.full_mass,
                                        .seed = a->sampling.seed,
                                        .stream = (uint64_t)(chunk * c->backend->ranks + c->backend->rank),
                                        .alpha = a->scale,
                                        .kept = k->kept,
                                        .kept_rows = k->kept_rows,
                                        .first = chunk == 0,
                                        .flush = last,
                                        .accumulate = a->accumulate});
}
