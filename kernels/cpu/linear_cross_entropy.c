// The operations of linear_cross_entropy on the CPU. kernels/lce/linear_cross_entropy.c combines them.
//
// The logits-exp pass takes LCE_TILE_COLUMNS rows of W at a time, a tile that stays in a core's second-level
// cache, and does with it all that can be done before R is known: logits, exponentials, row sums, and the
// tile's share of E W. A chunk is cut into about 16 units of (up to 128 rows) x (a slice of the vocabulary);
// each sums its share of dx, and the shares are added in the order of the slices. The cut follows from the
// shape alone, so losses and dX have the same bits for any number of threads. So has dW where V is far larger
// than a chunk; else it is one sgemm, whose bits may depend on it. A row whose sum becomes too large takes a
// higher anchor on the way, and rescales its results so far: each unit for itself, and at the end all units of
// the row to a common anchor.
//
// With sampling, E W waits for R and the draws, and then runs over the kept tiles in the same units and
// order; dW over the kept tiles of a tile's columns, in the order of their rows. REFERENCE.md has figures.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/random.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/lce/loss_row.h"

enum { UNITS = 16 }; // pieces of work to cut a chunk into, if it is large enough

// The chunk's division into units, by its shape alone.
typedef struct {
  int64_t blocks;        // of LCE_TILE_ROWS rows
  int64_t tiles, slices; // of LCE_TILE_COLUMNS vocabulary entries; of tiles_of_slice tiles
  int64_t tiles_of_slice;
} Grid;

static Grid make_grid(const Backend *backend, int64_t rows, int64_t vocab) {
  Grid g = {.blocks = ceil_div(rows, LCE_TILE_ROWS), .tiles = ceil_div(vocab, LCE_TILE_COLUMNS)};
  int64_t slices = backend->fixed_order ? 1 : ceil_div(UNITS, g.blocks);
  g.tiles_of_slice = ceil_div(g.tiles, min_i64(g.tiles, slices));
  g.slices = ceil_div(g.tiles, g.tiles_of_slice);
  return g;
}

// The workspace. Unit (block, slice) owns rows [slice * C + block * LCE_TILE_ROWS, ...) of both.
typedef struct {
  // [slices * C]: row sums S; sums of E times distance and of E^2, or NULL. If S exceeds LCE_LARGEST_SUM, it
  // is stored as -log S, and E, distances and shares are divided by S, squares by S^2.
  double *sums, *distances, *squares;
  double *max, *best; // likewise: largest logits and their columns, or NULL
  float *wide;        // [slices * C, H]: shares of dx_raw
  Tensor x, weight;   // the logits' operands or, with weight_codes, their codes decoded
} Scratch;

// At least slices * C, and growing with C, so that a smaller chunk never needs more.
static int64_t scratch_rows(int64_t chunk, int64_t vocab) {
  int64_t beyond = chunk > LCE_TILE_ROWS ? chunk : 0;
  return min_i64(ceil_div(vocab, LCE_TILE_COLUMNS) * chunk, UNITS * min_i64(chunk, LCE_TILE_ROWS) + beyond);
}

static size_t sums_of(const LceLogitsExp *a) {
  return (size_t)lce_row_parts(&a->softmax) - 1; // without the anchors
}

// Columns of Scratch.wide.
static int64_t wide_columns(const LceLogitsExp *a) {
  return tensor_exists(a->dx_raw) ? a->x.shape[1] : 0;
}

size_t cpu_lce_logits_exp_scratch(const LceLogitsExp *a) {
  size_t rows = (size_t)scratch_rows(a->x.shape[0], a->weight.shape[0]);
  size_t bytes = rows * (sums_of(a) * sizeof(double) + (size_t)wide_columns(a) * sizeof(float));
  int64_t decoded = tensor_exists(a->weight_codes.codes) ? tensor_count(a->weight) + tensor_count(a->x) : 0;
  return bytes + (size_t)decoded * sizeof(float);
}

size_t cpu_lce_sampled_gradients_scratch(const LceSampledGradients *a) {
  return (size_t)(scratch_rows(a->exps.shape[0], a->exps.shape[1]) * a->weight.shape[1]) * sizeof(float);
}

// The parts of the workspace; codes are decoded into the last.
static Scratch split_scratch(const LceLogitsExp *a) {
  double *sums = a->workspace.data;
  int64_t rows = scratch_rows(a->x.shape[0], a->weight.shape[0]);
  Scratch s = {
      .sums = sums, .wide = (void *)(sums + (int64_t)sums_of(a) * rows), .x = a->x, .weight = a->weight};
  if (tensor_exists(a->softmax.e_distance)) s.distances = sums += rows;
  if (tensor_exists(a->softmax.e_squared)) s.squares = sums += rows;
  if (tensor_exists(a->softmax.max)) s.max = sums + rows, s.best = sums + 2 * rows;
  if (!tensor_exists(a->weight_codes.codes)) return s;
  float *decoded = s.wide + rows * wide_columns(a);
  s.x = cpu_dequantize_rows(a->x_codes, decoded);
  s.weight = cpu_dequantize_rows(a->weight_codes, decoded + tensor_count(a->x));
  return s;
}

// Prefetches part `part` of `parts` of `count` floats into the second-level cache.
static void prefetch_part(const float *data, int64_t count, int64_t part, int64_t parts) {
  enum { LINE = 64 / sizeof(float) };
  for (int64_t i = part * LINE; i < count; i += parts * LINE) __builtin_prefetch(data + i, 0, 2);
}

// dx (+)= E W over one tile.
static void add_tile(const Backend *backend, Tensor dx, Tensor exps, Tensor weight, int64_t b, int64_t t,
                     bool accumulate) {
  cpu_gemm(backend, dx, cpu_tile(exps, b, t), false, cpu_part(weight, LCE_TILE_COLUMNS, t), false, 1.0f,
           accumulate);
}

// Multiplies row n's E, sums and share of dx that come from tiles [first, end) by factor.
static void scale_row(const LceLogitsExp *a, int64_t n, int64_t first, int64_t end, float *dx, float factor) {
  int64_t column = first * LCE_TILE_COLUMNS,
          columns = min_i64(end * LCE_TILE_COLUMNS, a->weight.shape[0]) - column;
  float *e = tensor_exists(a->exps) && end > first ? cpu_row(a->exps, n) + column : NULL;
  float *sums = tensor_exists(a->tile_sums) ? cpu_row(a->tile_sums, n) : NULL;
  EACH_SIMD (j, e ? columns : 0) e[j] *= factor;
  EACH_SIMD (i, tensor_exists(a->dx_raw) && end > first ? a->x.shape[1] : 0) dx[i] *= factor;
  for (int64_t t = first; sums && t < end; t++) sums[t] *= factor;
}

// Updates the scratch's sums at `at` after their anchor has risen by -shift / T.
static void shift_sums(const Scratch *s, int64_t at, double shift) {
  double factor = exp(shift);
  if (s->distances) s->distances[at] = factor > 0 ? factor * (s->distances[at] + shift * s->sums[at]) : 0;
  if (s->squares) s->squares[at] *= factor * factor;
  s->sums[at] *= factor;
}

// Multiplies one block of rows with one slice of the vocabulary.
static void logits_exp_unit(const Backend *backend, const LceLogitsExp *a, const Grid *g,
                            const Scratch *scratch, int64_t block, int64_t slice) {
  int64_t chunk = a->x.shape[0], hidden = a->x.shape[1];
  Tensor x = cpu_part(scratch->x, LCE_TILE_ROWS, block);
  int64_t first_row = block * LCE_TILE_ROWS, rows = x.shape[0];
  int64_t first_tile = slice * g->tiles_of_slice,
          end_tile = min_i64(g->tiles, first_tile + g->tiles_of_slice);
  int64_t offset = slice * chunk + first_row; // its part of the scratch
  const int32_t *targets = (const int32_t *)a->targets.data + first_row;
  const float *first_anchor = (const float *)a->softmax.anchor.data + first_row;
  double *sums = scratch->sums + offset;
  double *distances = scratch->distances ? scratch->distances + offset : NULL;
  double *squares = scratch->squares ? scratch->squares + offset : NULL;
  double *max = scratch->max ? scratch->max + offset : NULL, *best = max ? scratch->best + offset : NULL;
  bool keep = tensor_exists(a->exps), tile_sums = tensor_exists(a->tile_sums);
  Tensor dx = tensor_2d(scratch->wide + offset * hidden, DTYPE_F32, rows, hidden);
  float inv_temperature = inverse_temperature(a->temperature);
  const float *bias = a->bias.data;
  float anchor[LCE_TILE_ROWS]; // the unit's own
  // On the heap: it takes 96 KiB, and threads may have small stacks.
  float *logits = host_alloc(LCE_TILE_ROWS * LCE_TILE_COLUMNS, sizeof *logits, "a tile of logits");
  float unkept[LCE_TILE_COLUMNS] = {0};
  for (int64_t i = 0; i < rows; i++) {
    anchor[i] = first_anchor[i];
    sums[i] = 0;
    if (distances) distances[i] = 0;
    if (squares) squares[i] = 0;
    if (max) max[i] = -INFINITY, best[i] = 0;
  }
  for (int64_t t = first_tile; t < end_tile; t++) {
    Tensor w = cpu_part(scratch->weight, LCE_TILE_COLUMNS, t);
    int64_t column = t * LCE_TILE_COLUMNS, columns = w.shape[0];
    Tensor tile = tensor_2d(logits, DTYPE_F32, rows, columns); // dense: in E, rows are V floats apart
    cpu_tile_logits(backend, tile, x, w);
    Tensor next = t + 1 < g->tiles ? cpu_part(scratch->weight, LCE_TILE_COLUMNS, t + 1) : (Tensor){0};
    for (int64_t i = 0; i < rows; i++) {
      prefetch_part(next.data, next.shape[0] * next.stride, i, rows);
      float *z = cpu_row(tile, i), slope[LCE_TILE_COLUMNS];
      float *e = keep ? cpu_row(a->exps, first_row + i) + column : unkept;
      bias_and_cap(z, bias ? bias + column : NULL, a->softcap, columns, slope);
      float largest = max ? maximum_of(z, columns) : 0;
      if (max && largest > max[i])
        max[i] = largest, best[i] = (double)(column + index_of(z, columns, largest));
      int64_t target = targets[i] - column;
      if (target >= 0 && target < columns) z[target] = -INFINITY; // its exponential is exactly 0
      double sum = exp_and_sum(z, anchor[i], inv_temperature, columns, e);
      if (sums[i] + sum > LCE_LARGEST_SUM) {
        float raised = fmaxf(anchor[i], maximum_of(z, columns));
        double shift = ((double)anchor[i] - raised) * inv_temperature;
        anchor[i] = raised;
        shift_sums(scratch, offset + i, shift);
        scale_row(a, first_row + i, first_tile, t, cpu_row(dx, i), (float)exp(shift));
        sum = exp_and_sum(z, anchor[i], inv_temperature, columns, e);
      }
      if (squares) squares[i] += weighted_sum(e, e, columns);
      if (distances) distances[i] += exp_times_distance(z, anchor[i], inv_temperature, columns);
      sums[i] += sum;
      if (tile_sums) cpu_row(a->tile_sums, first_row + i)[t] = (float)sum;
      EACH_SIMD (j, keep && a->softcap > 0 ? columns : 0) e[j] *= slope[j];
    }
    if (tensor_exists(a->dx_raw)) add_tile(backend, dx, a->exps, a->weight, block, t, t > first_tile);
  }
  free(logits);
  for (int64_t i = 0; i < rows; i++) {
    if (!(sums[i] > LCE_LARGEST_SUM || anchor[i] > first_anchor[i])) continue;
    double log_sum = log(sums[i]);
    scale_row(a, first_row + i, first_tile, end_tile, cpu_row(dx, i), (float)(1 / sums[i]));
    if (distances) distances[i] = distances[i] / sums[i] - log_sum;
    if (squares) squares[i] /= sums[i] * sums[i];
    sums[i] = -(((double)anchor[i] - first_anchor[i]) * inv_temperature + log_sum);
  }
}

// out = the slices' shares of row n, added in the order of the slices.
static void add_shares(float *out, const float *wide, int64_t slices, int64_t chunk, int64_t hidden,
                       int64_t n) {
  for (int64_t s = 0; s < slices; s++) {
    const float *share = wide + (s * chunk + n) * hidden;
    EACH_SIMD (i, hidden) out[i] = s ? out[i] + share[i] : share[i];
  }
}

void cpu_lce_target_logits(Backend *backend, const LceTargetLogits *a) {
  const int32_t *targets = a->targets.data;
  float *target_z = a->target_z.data;
  double cap = a->softcap;
  EACH_PARALLEL (n, a->x.shape[0]) {
    target_z[n] = 0;
    if (targets[n] < 0) continue;
    double z = weighted_sum(cpu_row(a->x, n), cpu_row(a->weight, targets[n]), a->x.shape[1]) +
               cpu_read(a->bias, targets[n], 0);
    target_z[n] = (float)(cap > 0 ? cap * tanh(z / cap) : z);
  }
}

// If the sum of row n is too large, raises its anchor to about the sum's logarithm, for all slices.
static void repair_row(const LceLogitsExp *a, const Grid *g, const Scratch *s, int64_t n) {
  int64_t rows = a->x.shape[0];
  double sum = 0, log_sum = 0, inv_temperature = inverse_temperature(a->temperature);
  for (int64_t at = n; at < g->slices * rows; at += rows) {
    double part = s->sums[at];
    sum += part < 0 ? INFINITY : part;
    log_sum = fmax(log_sum, part < 0 ? -part : log(part));
  }
  if (!(sum > LCE_LARGEST_SUM)) return;
  float *anchor = (float *)a->softmax.anchor.data + n;
  const float *target_z = a->softmax.target_z.data;
  float raised = (float)(*anchor + log_sum / inv_temperature);
  double rise = ((double)raised - *anchor) * inv_temperature;
  *anchor = raised;
  cpu_store(a->softmax.target_e, n, exp(((double)target_z[n] - raised) * inv_temperature));
  for (int64_t slice = 0; slice < g->slices; slice++) {
    int64_t at = slice * rows + n, first = slice * g->tiles_of_slice;
    double shift = (s->sums[at] < 0 ? -s->sums[at] : 0) - rise;
    if (s->sums[at] < 0) s->sums[at] = 1;
    shift_sums(s, at, shift);
    scale_row(a, n, first, min_i64(g->tiles, first + g->tiles_of_slice), s->wide + at * a->x.shape[1],
              (float)exp(shift));
  }
}

static void finish_row(const LceLogitsExp *a, const Grid *g, const Scratch *s, int64_t n) {
  int64_t rows = a->x.shape[0];
  double sum = 0.0, distance = 0.0, square = 0.0, max = -INFINITY, best = 0;
  for (int64_t at = n; at < g->slices * rows; at += rows) {
    sum += s->sums[at];
    if (s->distances) distance += s->distances[at];
    if (s->squares) square += s->squares[at];
    if (s->max && s->max[at] > max) max = s->max[at], best = s->best[at];
  }
  cpu_store(a->softmax.row_sum, n, sum);
  cpu_store(a->softmax.e_distance, n, distance);
  cpu_store(a->softmax.e_squared, n, (double)LCE_SQUARED * LCE_SQUARED * square);
  cpu_store(a->softmax.max, n, max);
  if (s->max) ((int32_t *)a->softmax.best.data)[n] = (int32_t)(a->first + (int64_t)best);
  if (tensor_exists(a->dx_raw)) add_shares(cpu_row(a->dx_raw, n), s->wide, g->slices, rows, a->x.shape[1], n);
}

void cpu_lce_logits_exp(Backend *backend, const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0];
  Grid g = make_grid(backend, rows, a->weight.shape[0]);
  Scratch scratch = split_scratch(a);
  const int32_t *targets = a->targets.data;
  const float *target_z = a->softmax.target_z.data;
  float *target_e = a->softmax.target_e.data, *anchor = a->softmax.anchor.data;
  for (int64_t n = 0; n < rows; n++) {
    target_e[n] = 1.0f;
    anchor[n] = target_z[n];
    if (target_z[n] == -INFINITY) anchor[n] = target_e[n] = 0;
    if (targets[n] == IGNORE_INDEX) anchor[n] = INFINITY; // every E of an ignored row is 0
  }
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t block = 0; block < g.blocks; block++)
    for (int64_t slice = 0; slice < g.slices; slice++)
      logits_exp_unit(backend, a, &g, &scratch, block, slice);
  EACH_PARALLEL (n, rows) {
    repair_row(a, &g, &scratch, n);
    finish_row(a, &g, &scratch, n);
  }
}

// --- sampling ----------------------------------------------------------------------------------------------

// min(1, mass / full_mass), rounded to a power of two from 2^-32 on; 1 for a NaN.
static double keep_probability(double mass, double full_mass) {
  if (!(mass < full_mass)) return 1;
  if (mass <= 0) return 0;
  int exponent;
  double mantissa = frexp(mass / full_mass, &exponent);
  return fmax(0x1p-32, ldexp(mantissa < 0.70710678118654752 ? 0.5 : 1, exponent));
}

static double tile_mass(const LceSampledGradients *a, int64_t b, int64_t t) {
  const float *row_sum = a->softmax.row_sum.data, *target_e = a->softmax.target_e.data;
  double mass = 0;
  for (int64_t n = b * LCE_TILE_ROWS; n < min_i64((b + 1) * LCE_TILE_ROWS, a->exps.shape[0]); n++)
    mass += (double)cpu_row(a->tile_sums, n)[t] * cpu_read(a->softmax.rescale, n, 1) /
            ((double)row_sum[n] + (double)target_e[n]);
  return mass;
}

static void scale_tile(Tensor tile, float factor) {
  for (int64_t n = 0; n < tile.shape[0]; n++)
    for (int64_t i = 0; i < tile.shape[1]; i++) cpu_row(tile, n)[i] *= factor;
}

static void draw_tiles(const LceSampledGradients *a) {
  int64_t blocks = a->tiles.shape[0], across = a->tiles.shape[1];
#pragma omp parallel for schedule(dynamic)
  for (int64_t b = 0; b < blocks; b++) {
    uint32_t sum = (uint32_t)(random_bits(a->seed, a->stream, (uint64_t)b) >> 32); // fraction of S
    for (int64_t t = 0; t < across; t++) {
      double mass = tile_mass(a, b, t), q = keep_probability(mass, (double)a->full_mass);
      uint64_t step = (uint64_t)(q * 0x1p32);
      bool kept = sum + step >= (uint64_t)1 << 32;
      cpu_row(a->tiles, b)[t] = kept ? (float)(1 / q) : -(float)mass;
      if (kept && q < 1) scale_tile(cpu_tile(a->exps, b, t), (float)(1 / q));
      sum += (uint32_t)step;
    }
  }
  float *stats = a->stats.data;
  double dropped = 0, mass = 0;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t t = 0; t < across; t++) {
      float tile = cpu_row(a->tiles, b)[t];
      if (!(tile > 0)) dropped++, mass -= (double)tile;
    }
  stats[0] += (float)dropped;
  stats[1] += (float)(blocks * across);
  stats[2] += (float)mass;
}

// Uses the units and sums of the logits-exp pass without sampling.
static void sampled_dx(const Backend *backend, const LceSampledGradients *a) {
  int64_t chunk = a->exps.shape[0], hidden = a->weight.shape[1];
  Grid g = make_grid(backend, chunk, a->exps.shape[1]);
  float *wide = a->workspace.data;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < g.blocks; b++)
    for (int64_t slice = 0; slice < g.slices; slice++) {
      int64_t first = b * LCE_TILE_ROWS, rows = min_i64(LCE_TILE_ROWS, chunk - first);
      Tensor share = tensor_2d(wide + (slice * chunk + first) * hidden, DTYPE_F32, rows, hidden);
      bool begun = false;
      for (int64_t t = slice * g.tiles_of_slice; t < min_i64(g.tiles, (slice + 1) * g.tiles_of_slice); t++) {
        if (!(cpu_row(a->tiles, b)[t] > 0)) continue; // dropped
        add_tile(backend, share, a->exps, a->weight, b, t, begun);
        begun = true;
      }
      if (!begun) memset(share.data, 0, tensor_bytes(share));
    }
  EACH_PARALLEL (n, chunk) add_shares(cpu_row(a->dx_raw, n), wide, g.slices, chunk, hidden, n);
}

// Computes dW's rows under column t of the tiles, from the kept ones.
static void sampled_dweight(const Backend *backend, const LceSampledGradients *a, int64_t t) {
  bool begun = a->accumulate || !a->first;
  Tensor out = cpu_part(a->dweight, LCE_TILE_COLUMNS, t);
  for (int64_t b = 0; b < a->tiles.shape[0]; b++) {
    if (!(cpu_row(a->tiles, b)[t] > 0)) continue; // dropped
    cpu_gemm(backend, out, cpu_tile(a->exps, b, t), true, cpu_part(a->scaled_x, LCE_TILE_ROWS, b), false,
             a->alpha, begun);
    begun = true;
  }
  if (!begun) memset(out.data, 0, tensor_bytes(out));
}

void cpu_lce_sampled_gradients(Backend *backend, const LceSampledGradients *a) {
  draw_tiles(a);
  sampled_dx(backend, a);
#pragma omp parallel for schedule(dynamic)
  for (int64_t t = 0; t < a->tiles.shape[1]; t++) sampled_dweight(backend, a, t);
}

// --- a vocabulary split over ranks -------------------------------------------------------------------------

void cpu_shard_indices(Backend *backend, const ShardIndices *a) {
  const int32_t *indices = a->indices.data;
  int32_t *out = a->out.data;
  for (int64_t n = 0; n < a->indices.shape[0]; n++) {
    int64_t local = indices[n] - a->first;
    bool here = local >= 0 && local < a->count;
    out[n] = indices[n] == IGNORE_INDEX ? IGNORE_INDEX : here ? (int32_t)local : ELSEWHERE;
  }
}

void cpu_lce_combine(Backend *backend, const LceCombine *a) {
  const SoftmaxStatistics *r = &a->softmax;
  int64_t rows = a->targets.shape[0];
  const int32_t *targets = a->targets.data;
  const float *parts = a->parts.data, *target_z = r->target_z.data;
  float *row_sum = r->row_sum.data, *target_e = r->target_e.data, *common_anchor = r->anchor.data;
  float *rescale = r->rescale.data;
  bool distances = tensor_exists(r->e_distance), squares = tensor_exists(r->e_squared);
  bool largest = tensor_exists(r->max);
  int64_t rank_stride = lce_row_parts(r) * rows;
  double inv_temperature = inverse_temperature(a->temperature);
  for (int64_t n = 0; n < rows; n++) {
    bool counts = targets[n] != IGNORE_INDEX;
    double anchor = counts ? -INFINITY : INFINITY, sum = 0, local = 1, distance = 0, square = 0,
           max = -INFINITY;
    if (largest) ((int32_t *)r->best.data)[n] = 0;
    for (int64_t rank = 0; rank < backend->ranks && counts; rank++)
      anchor = fmax(anchor, (double)parts[rank * rank_stride + n]);
    for (int64_t rank = 0; rank < backend->ranks && counts; rank++) {
      const float *part = parts + rank * rank_stride + n;
      double shift = ((double)part[0] - anchor) * inv_temperature, factor = exp(shift);
      sum += part[rows] * factor;
      if (distances && factor > 0) distance += factor * (part[2 * rows] + shift * part[rows]);
      if (squares) square += factor * factor * part[(2 + distances) * rows];
      if (rank == backend->rank) local = factor;
      part += (2 + distances + squares) * rows;
      if (!largest || !(*part > max)) continue;
      max = *part;
      memcpy((int32_t *)r->best.data + n, part + rows, sizeof(int32_t));
    }
    cpu_store(r->e_distance, n, distance);
    cpu_store(r->e_squared, n, square);
    cpu_store(r->max, n, max);
    row_sum[n] = (float)sum;
    common_anchor[n] = (float)anchor;
    target_e[n] = counts ? (float)exp((target_z[n] - anchor) * inv_temperature) : 1.0f;
    rescale[n] = (float)local;
  }
}

// --- losses and gradients from the row sums ----------------------------------------------------------------

void cpu_lce_row_losses(Backend *backend, const LceRowLosses *a) {
  const LossTerms *terms = &a->terms;
  const SoftmaxStatistics *r = &a->softmax;
  const float *row_sum = r->row_sum.data, *target_e = r->target_e.data, *target_z = r->target_z.data;
  const float *anchor = r->anchor.data;
  const int32_t *targets = a->targets.data;
  bool smoothing = terms->label_smoothing > 0;
  double inv_temperature = inverse_temperature(terms->temperature), factor = cpu_read(a->factor, 0, 1);
  EACH_PARALLEL (n, a->targets.shape[0]) {
    bool counts = targets[n] != IGNORE_INDEX;
    const float *x = cpu_row(a->x, n);
    double weighted = 0;
    if (smoothing && counts)
      weighted = weighted_sum(x, a->smoothing_row.data, a->x.shape[1]) + cpu_read(a->smoothing_bias, 0, 0);
    RowSums sums = row_sums_of(*terms, (double)a->vocab_size, targets[n], row_sum[n], target_e[n],
                               ((double)anchor[n] - target_z[n]) * inv_temperature,
                               counts ? anchor[n] * inv_temperature : 0, inv_temperature * weighted,
                               counts ? factor * inv_temperature * cpu_read(a->token_weights, n, 1) : 0);
    RowLoss row = loss_of_row(sums);
    cpu_store(a->loss, n, counts ? row.loss : 0);
    cpu_store(a->outputs.token_z_loss, n, counts ? row.z_loss : 0);
    cpu_store(a->outputs.log_prob, n, counts ? -row.nll : 0);
    cpu_store(a->outputs.logsumexp, n, counts ? row.lse : 0);
    cpu_store(a->outputs.entropy, n, counts ? entropy_of_row(sums, row, cpu_read(r->e_distance, n, 0)) : 0);
    cpu_store(a->outputs.log_sum_sq_probs, n,
              counts ? log_sum_sq_probs_of_row(sums, row, cpu_read(r->e_squared, n, 0)) : 0);
    double cap = terms->softcap;
    if (tensor_exists(r->max)) {
      int32_t best = counts ? ((const int32_t *)r->best.data)[n] : 0;
      cpu_store(a->outputs.max_logit, n, counts ? inv_temperature * cpu_read(r->max, n, 0) : 0);
      cpu_store(a->outputs.correct, n, counts && best == targets[n] && !isnan(row.nll));
      if (tensor_exists(a->outputs.predicted)) ((int32_t *)a->outputs.predicted.data)[n] = best;
    }
    if (!tensor_exists(a->scaled_x)) continue;
    if (cap > 0) row.target *= capped_slope(target_z[n], cap);
    bool with_target = tensor_exists(a->exps) && targets[n] >= 0;
    if (with_target) row.per_e = scale_with_target(row);
    float scale = (float)(row.per_e * cpu_read(r->rescale, n, 1));
    cpu_store(r->scale_non_target, n, scale);
    cpu_store(r->scale_target, n, row.target);
    if (smoothing) cpu_store(r->scale_uniform, n, -row.uniform);
    if (with_target) cpu_row(a->exps, n)[targets[n]] = scale != 0 ? (float)(row.target / row.per_e) : 0;
    float *scaled = cpu_row(a->scaled_x, n);
    EACH_SIMD (i, a->x.shape[1]) scaled[i] = scale * x[i];
  }
}

void cpu_lce_input_gradient(Backend *backend, const LceInputGradient *a) {
  const float *non_target = a->softmax.scale_non_target.data, *target = a->softmax.scale_target.data;
  const float *uniform = a->softmax.scale_uniform.data, *smoothing_row = a->smoothing_row.data;
  const int32_t *targets = a->targets.data;
  EACH_PARALLEL (n, a->dx.shape[0]) {
    float *dx = cpu_row(a->dx, n);
    if (targets[n] == IGNORE_INDEX) {
      memset(dx, 0, (size_t)a->dx.shape[1] * sizeof *dx);
      continue;
    }
    float r = a->alpha * non_target[n], c = a->alpha * target[n];
    EACH_SIMD (i, a->dx.shape[1]) dx[i] *= r;
    const float *w = targets[n] == ELSEWHERE ? NULL : cpu_row(a->weight, targets[n]);
    EACH_SIMD (i, w ? a->dx.shape[1] : 0) dx[i] += c * w[i];
    if (!smoothing_row) continue;
    float u = a->alpha * uniform[n];
    EACH_SIMD (i, a->dx.shape[1]) dx[i] += u * smoothing_row[i];
  }
}

void cpu_lce_target_gradient(Backend *backend, const LceTargetGradient *a) {
  cpu_scatter_add(a->dweight, a->targets, a->x, a->scale_target.data, a->alpha, a->workspace.data);
}

// --- the rank-one terms of label smoothing -----------------------------------------------------------------

void cpu_add_outer(Backend *backend, const AddOuter *a) {
  const float *rows = a->rows.data, *columns = a->columns.data;
  EACH_PARALLEL (v, a->out.shape[0]) {
    float *out = cpu_row(a->out, v), factor = rows ? a->alpha * rows[v] : a->alpha;
    EACH_SIMD (i, a->out.shape[1]) out[i] += factor * columns[i];
  }
}
