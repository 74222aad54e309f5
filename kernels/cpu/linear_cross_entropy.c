// The operations of linear_cross_entropy on the CPU. kernels/linear_cross_entropy.c combines them.
//
// The logits-exp pass takes 256 rows of W at a time, a tile that stays in a core's second-level cache, and does with it
// everything there is to do before R is known: logits, exponentials and row sums, and the tile's share of E W. A chunk is
// cut into units of (up to 128 rows) x (a slice of the vocabulary), about 16 of them; each unit sums its share of dx, and
// the shares are added in the order of the slices. The cut follows from the shape alone, so the bits are the same for any
// number of threads.
//
// Measured as a ratio to three sgemm calls over all tokens (tools/bench_lce; H 256, V 128256, chunks of 128; one core with
// AVX-512, OpenBLAS 0.3.21, medians in turn):
//   0.98 to 1.03  as it stands
//   1.05 to 1.07  when the next tile of W is not prefetched during the exponentials
//   0.97 to 0.98  with prefetching spread over the GEMMs, and a tiled GEMM for dW: 100 lines more
//   1.30 to 1.38  sgemm -> exp -> sgemm on [C, 4096] of the vocabulary at a time, or on all of it: sgemm packs W for every
//                 chunk, which 128 rows do not pay back
#include <math.h>
#include <string.h>

#include "kernels/cpu/tile.h"
#include "kernels/cpu/vector_math.h"

enum {
  BLOCK_ROWS = 128,  // rows of x that share a tile of W
  BLOCK_VOCAB = 256, // rows of W that make the tile
  UNITS = 16         // pieces of work to cut a chunk into, if it is large enough
};

// Row sums above this are redone with the row's maximum as anchor: a logit exceeds the target's by
// more than 66. Far below infinity, so that no term of E W overflows and r = 1 / (1 + R) stays a normal number.
static const float ROW_SUM_LIMIT = 0x1p96f;

// How the chunk is cut. From its shape alone: the bits do not depend on the number of threads.
typedef struct {
  int64_t blocks, rows;    // of rows
  int64_t slices, columns; // of the vocabulary
} Grid;

static Grid make_grid(int64_t rows, int64_t vocab) {
  Grid g;
  g.blocks = ceil_div(rows, BLOCK_ROWS);
  g.rows = ceil_div(rows, g.blocks);
  int64_t tiles = ceil_div(vocab, BLOCK_VOCAB);
  g.slices = min_i64(tiles, ceil_div(UNITS, g.blocks));
  g.columns = ceil_div(tiles, g.slices) * BLOCK_VOCAB;
  g.slices = ceil_div(vocab, g.columns);
  return g;
}

// The workspace. Unit (block, slice) owns rows [slice * C + block * rows, ...) of both.
typedef struct {
  double *sums; // [slices * C]: row sums
  float *wide;  // [slices * C, H]: shares of dx_raw; or, without exps, [slices * C, BLOCK_VOCAB]: the tile
} Scratch;

// At least slices * C, and growing with C, so that a smaller chunk never needs more.
static int64_t scratch_rows(int64_t chunk, int64_t vocab) {
  int64_t beyond = chunk > BLOCK_ROWS ? chunk : 0;
  return min_i64(ceil_div(vocab, BLOCK_VOCAB) * chunk, UNITS * min_i64(chunk, BLOCK_ROWS) + beyond);
}

size_t cpu_lce_logits_exp_scratch(const LceLogitsExp *a) {
  int64_t width = tensor_exists(a->dx_raw) ? a->x.shape[1] : tensor_exists(a->exps) ? 0 : BLOCK_VOCAB;
  size_t rows = (size_t)scratch_rows(a->x.shape[0], a->weight.shape[0]);
  return rows * (sizeof(double) + (size_t)width * sizeof(float));
}

static Scratch split_scratch(const LceLogitsExp *a) {
  char *base = a->workspace.data;
  size_t sums_bytes = (size_t)scratch_rows(a->x.shape[0], a->weight.shape[0]) * sizeof(double);
  return (Scratch){.sums = a->workspace.data, .wide = (void *)(base + sums_bytes)};
}

static float inv_temperature_of(float temperature) {
  return temperature > 0 ? 1.0f / temperature : 1.0f;
}

// Part `part` of `parts` of `count` floats, into the second-level cache.
static void prefetch_part(const float *data, int64_t count, int64_t part, int64_t parts) {
  enum { LINE = 64 / sizeof(float) };
  for (int64_t i = part * LINE; i < count; i += parts * LINE) __builtin_prefetch(data + i, 0, 2);
}

// One block of rows against one slice of the vocabulary.
static void logits_exp_unit(bool plain, const LceLogitsExp *a, const Grid *g, const Scratch *scratch,
                            int64_t block, int64_t slice) {
  int64_t chunk = a->x.shape[0], hidden = a->x.shape[1], vocab = a->weight.shape[0];
  int64_t first_row = block * g->rows, rows = min_i64(g->rows, chunk - first_row);
  int64_t slice_first = slice * g->columns, slice_last = min_i64(vocab, slice_first + g->columns);
  const int32_t *targets = (const int32_t *)a->targets.data + first_row;
  const float *anchor = (const float *)a->rows.anchor.data + first_row;
  double *sums = scratch->sums + slice * chunk + first_row;
  bool keep = tensor_exists(a->exps);
  float *scratch_tile = scratch->wide + (slice * chunk + first_row) * BLOCK_VOCAB;
  float *dx = scratch->wide + (slice * chunk + first_row) * hidden;
  float inv_temperature = inv_temperature_of(a->temperature);
  CpuMatrix x = {.data = cpu_row(a->x, first_row), .stride = a->x.stride};
  for (int64_t i = 0; i < rows; i++) sums[i] = 0;
  for (int64_t first = slice_first; first < slice_last; first += BLOCK_VOCAB) {
    int64_t columns = min_i64(BLOCK_VOCAB, slice_last - first);
    float *tile = keep ? cpu_row(a->exps, first_row) + first : scratch_tile;
    int64_t stride = keep ? a->exps.stride : BLOCK_VOCAB;
    CpuMatrix w = {.data = cpu_row(a->weight, first), .stride = a->weight.stride, .transposed = true};
    tile_multiply(plain, rows, columns, hidden, 1.0f, x, w, false, tile, stride);
    int64_t next_rows = min_i64(BLOCK_VOCAB, vocab - first - columns);
    for (int64_t i = 0; i < rows; i++) {
      prefetch_part(w.data + columns * w.stride, next_rows * w.stride, i, rows);
      float *z = tile + i * stride;
      int64_t target = targets[i] - first;
      if (target >= 0 && target < columns) z[target] = -INFINITY; // its exponential is exactly 0
      sums[i] += exp_and_sum(z, anchor[i], inv_temperature, columns, z);
    }
    if (!tensor_exists(a->dx_raw)) continue;
    w.transposed = false;
    tile_multiply(plain, rows, hidden, columns, 1.0f, (CpuMatrix){.data = tile, .stride = stride}, w,
                  first > slice_first, dx, hidden);
  }
}

// The slices' shares of row n, added in the order of the slices.
static void add_slices(const LceLogitsExp *a, const Grid *g, const Scratch *scratch, int64_t n) {
  int64_t chunk = a->x.shape[0], hidden = a->x.shape[1];
  double sum = 0.0;
  for (int64_t s = 0; s < g->slices; s++) sum += scratch->sums[s * chunk + n];
  ((float *)a->rows.row_sum.data)[n] = (float)sum;
  if (!tensor_exists(a->dx_raw)) return;
  float *dx = cpu_row(a->dx_raw, n);
  for (int64_t s = 0; s < g->slices; s++) {
    const float *share = scratch->wide + (s * chunk + n) * hidden;
#pragma omp simd
    for (int64_t i = 0; i < hidden; i++) dx[i] = s ? dx[i] + share[i] : share[i];
  }
}

// sum of x[i] * w[i].
static double dot(const float *x, const float *w, int64_t count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) sum += (double)x[i] * w[i];
  return sum;
}

void cpu_lce_target_logits(Backend *backend, const LceTargetLogits *a) {
  (void)backend;
  const int32_t *targets = a->targets.data;
  float *target_z = a->target_z.data;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < a->x.shape[0]; n++)
    target_z[n] =
        targets[n] < 0 ? 0.0f : (float)dot(cpu_row(a->x, n), cpu_row(a->weight, targets[n]), a->x.shape[1]);
}

// Row n with its maximum as anchor. Rare, so each logit is simply computed twice.
static void redo_row(bool plain, const LceLogitsExp *a, int64_t n) {
  int64_t vocab = a->weight.shape[0], hidden = a->x.shape[1];
  int32_t target = ((const int32_t *)a->targets.data)[n];
  const float *x = cpu_row(a->x, n), target_z = ((const float *)a->rows.target_z.data)[n];
  float *e = tensor_exists(a->exps) ? cpu_row(a->exps, n) : NULL;
  float inv_temperature = inv_temperature_of(a->temperature), maximum = -INFINITY;
  double sum = 0;
  for (int64_t j = 0; j < vocab; j++) maximum = fmaxf(maximum, (float)dot(x, cpu_row(a->weight, j), hidden));
  for (int64_t j = 0; j < vocab; j++) {
    float z = (float)dot(x, cpu_row(a->weight, j), hidden);
    float value = j == target ? 0.0f : exp_f32((z - maximum) * inv_temperature);
    if (e) e[j] = value;
    sum += (double)value;
  }
  ((float *)a->rows.anchor.data)[n] = maximum;
  ((float *)a->rows.row_sum.data)[n] = (float)sum;
  ((float *)a->rows.target_e.data)[n] = expf((target_z - maximum) * inv_temperature);
  if (!tensor_exists(a->dx_raw)) return;
  CpuMatrix exps = {.data = e, .stride = a->exps.stride},
            w = {.data = a->weight.data, .stride = a->weight.stride};
  tile_multiply(plain, 1, hidden, vocab, 1.0f, exps, w, false, cpu_row(a->dx_raw, n), a->dx_raw.stride);
}

void cpu_lce_logits_exp(Backend *backend, const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0];
  if (rows == 0) return;
  bool plain = cpu_plain_loops(backend);
  Grid g = make_grid(rows, a->weight.shape[0]);
  Scratch scratch = split_scratch(a);
  const int32_t *targets = a->targets.data;
  const float *target_z = a->rows.target_z.data, *row_sum = a->rows.row_sum.data;
  float *target_e = a->rows.target_e.data, *anchor = a->rows.anchor.data;
  for (int64_t n = 0; n < rows; n++) {
    target_e[n] = 1.0f;
    anchor[n] = targets[n] == IGNORE_INDEX ? INFINITY : target_z[n]; // every E of an ignored row is 0
  }
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t block = 0; block < g.blocks; block++)
    for (int64_t slice = 0; slice < g.slices; slice++) logits_exp_unit(plain, a, &g, &scratch, block, slice);
#pragma omp parallel for schedule(dynamic)
  for (int64_t n = 0; n < rows; n++) {
    add_slices(a, &g, &scratch, n);
    if (row_sum[n] > ROW_SUM_LIMIT) redo_row(plain, a, n);
  }
}

// --- a vocabulary split over ranks -------------------------------------------------------------------------

void cpu_shard_indices(Backend *backend, const ShardIndices *a) {
  (void)backend;
  const int32_t *indices = a->indices.data;
  int32_t *out = a->out.data;
  for (int64_t n = 0; n < a->indices.shape[0]; n++) {
    int64_t local = indices[n] - a->first;
    if (indices[n] != IGNORE_INDEX)
      out[n] = local >= 0 && local < a->count ? (int32_t)local : ELSEWHERE;
    else
      out[n] = IGNORE_INDEX;
  }
}

void cpu_lce_combine(Backend *backend, const LceCombine *a) {
  const LossRows *r = &a->rows;
  int64_t rows = a->targets.shape[0];
  const int32_t *targets = a->targets.data;
  const float *parts = a->parts.data, *target_z = r->target_z.data;
  float *row_sum = r->row_sum.data, *target_e = r->target_e.data, *common_anchor = r->anchor.data;
  float *rescale = r->rescale.data;
  double inv_temperature = inv_temperature_of(a->temperature);
  for (int64_t n = 0; n < rows; n++) {
    bool counts = targets[n] != IGNORE_INDEX;
    double anchor = counts ? -INFINITY : INFINITY, sum = 0, local = 1;
    for (int64_t rank = 0; rank < backend->ranks && counts; rank++)
      anchor = fmax(anchor, (double)parts[rank * 2 * rows + n]);
    for (int64_t rank = 0; rank < backend->ranks && counts; rank++) {
      double factor = exp(((double)parts[rank * 2 * rows + n] - anchor) * inv_temperature);
      sum += parts[(rank * 2 + 1) * rows + n] * factor;
      if (rank == backend->rank) local = factor;
    }
    row_sum[n] = (float)sum;
    common_anchor[n] = (float)anchor;
    target_e[n] = counts ? (float)exp((target_z[n] - anchor) * inv_temperature) : 1.0f;
    rescale[n] = (float)local;
  }
}

// --- what follows from a row's sums ------------------------------------------------------------------------

static float *optional(Tensor t) {
  return t.data;
}

static void store(Tensor output, int64_t n, double value) {
  if (tensor_exists(output)) ((float *)output.data)[n] = (float)value;
}

void cpu_lce_rows(Backend *backend, const LceRows *a) {
  (void)backend;
  const LossTerms *terms = &a->terms;
  const LossRows *r = &a->rows;
  const float *row_sum = r->row_sum.data, *target_e = r->target_e.data, *target_z = r->target_z.data;
  const float *anchor = r->anchor.data, *class_weights = optional(terms->class_weights);
  const float *token_weights = optional(a->token_weights), *rescale = optional(r->rescale);
  const int32_t *targets = a->targets.data;
  double inv_temperature = inv_temperature_of(terms->temperature), epsilon = terms->label_smoothing,
         lambda = terms->z_loss;
  double factor = tensor_exists(a->factor) ? *(float *)a->factor.data : 1.0;
  double weight_sum =
      tensor_exists(terms->class_weight_sum) ? *(float *)terms->class_weight_sum.data : (double)a->vocab_size;
  double share = epsilon / (double)a->vocab_size; // of each class in a smoothed target
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < a->targets.shape[0]; n++) {
    bool counts = targets[n] != IGNORE_INDEX;
    double all = row_sum[n] + target_e[n];
    double nll = target_e[n] == 1.0f ? log1p((double)row_sum[n])
                                     : ((double)anchor[n] - target_z[n]) * inv_temperature + log(all);
    double target_v = target_z[n] * inv_temperature, lse = target_v + nll;
    double class_weight = class_weights && counts ? class_weights[targets[n]] : 1.0;
    const float *x = cpu_row(a->x, n);
    double loss = (1 - epsilon) * class_weight * nll;
    if (epsilon > 0 && counts)
      loss += share * (weight_sum * lse - inv_temperature * dot(x, a->smoothing_row.data, a->x.shape[1]));
    store(a->loss, n, counts ? loss : 0);
    store(a->outputs.z_loss, n, counts ? lambda * lse * lse : 0);
    store(a->outputs.log_prob, n, counts ? -nll : 0);
    store(a->outputs.logsumexp, n, counts ? lse : 0);
    if (!tensor_exists(a->scaled_x)) continue;
    double s = counts ? factor * inv_temperature * (token_weights ? token_weights[n] : 1.0) : 0;
    double spread = share * weight_sum + 2 * lambda * lse; // what multiplies p, besides the target's weight
    float scale = (float)(s * ((1 - epsilon) * class_weight + spread) / all * (rescale ? rescale[n] : 1.0));
    store(r->scale_non_target, n, scale);
    store(r->scale_target, n,
          s * (spread * (target_e[n] / all) - (1 - epsilon) * class_weight * (row_sum[n] / all)));
    if (epsilon > 0) store(r->scale_uniform, n, -s * share);
    float *scaled = cpu_row(a->scaled_x, n);
    if (!counts) scale = 0;
#pragma omp simd
    for (int64_t i = 0; i < a->x.shape[1]; i++) scaled[i] = scale * x[i];
  }
}

void cpu_lce_input_gradient(Backend *backend, const LceInputGradient *a) {
  (void)backend;
  const float *non_target = a->rows.scale_non_target.data, *target = a->rows.scale_target.data;
  const float *uniform = optional(a->rows.scale_uniform), *smoothing_row = optional(a->smoothing_row);
  const int32_t *targets = a->targets.data;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < a->dx.shape[0]; n++) {
    float *dx = cpu_row(a->dx, n);
    if (targets[n] == IGNORE_INDEX) {
      memset(dx, 0, (size_t)a->dx.shape[1] * sizeof *dx);
      continue;
    }
    float r = a->alpha * non_target[n], c = a->alpha * target[n];
#pragma omp simd
    for (int64_t i = 0; i < a->dx.shape[1]; i++) dx[i] *= r;
    const float *w = targets[n] == ELSEWHERE ? NULL : cpu_row(a->weight, targets[n]);
#pragma omp simd
    for (int64_t i = 0; i < (w ? a->dx.shape[1] : 0); i++) dx[i] += c * w[i];
    if (!smoothing_row) continue;
    float u = a->alpha * uniform[n];
#pragma omp simd
    for (int64_t i = 0; i < a->dx.shape[1]; i++) dx[i] += u * smoothing_row[i];
  }
}

void cpu_lce_target_gradient(Backend *backend, const LceTargetGradient *a) {
  (void)backend;
  cpu_scatter_add(a->dweight, a->targets.data, a->x.shape[0], a->x, a->scale_target.data, a->alpha,
                  a->workspace.data);
}

// --- the rank-one terms of label smoothing -----------------------------------------------------------------

void cpu_weighted_column_sum(Backend *backend, const WeightedColumnSum *a) {
  (void)backend;
  cpu_column_sums(a->out.data, a->x, optional(a->coefficients), 1.0f, a->accumulate);
}

void cpu_add_outer(Backend *backend, const AddOuter *a) {
  (void)backend;
  const float *rows = optional(a->rows), *columns = a->columns.data;
#pragma omp parallel for schedule(static)
  for (int64_t v = 0; v < a->out.shape[0]; v++) {
    float *out = cpu_row(a->out, v), factor = rows ? a->alpha * rows[v] : a->alpha;
#pragma omp simd
    for (int64_t i = 0; i < a->out.shape[1]; i++) out[i] += factor * columns[i];
  }
}
