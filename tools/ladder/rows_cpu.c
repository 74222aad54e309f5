// The ladder's work on rows, in plain loops.
#include <math.h>
#include <string.h>

#include "kernels/base/integers.h"
#include "kernels/base/random.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/lce/loss_row.h"
#include "tools/ladder/ladder.h"

// Row n of x times row j of W.
static float logit(const Anchored *a, int64_t n, int64_t j) {
  return (float)weighted_sum(cpu_row(a->call.x, n), cpu_row(a->call.weight, j), a->call.x.shape[1]);
}

// --- rungs 1 to 3: softmax as it is usually written --------------------------------------------------------

// Two reads of the row: its maximum, then the sum of exp(z - maximum).
void ladder_losses(Tensor loss, Tensor lse, Tensor logits, Tensor targets) {
  const int32_t *target = targets.data;
  float *loss_of = loss.data, *lse_of = lse.data;
  int64_t vocab = logits.shape[1];
  EACH_PARALLEL (n, logits.shape[0]) {
    const float *z = cpu_row(logits, n);
    float maximum = maximum_of(z, vocab);
    double sum = exp_and_sum(z, maximum, 1, vocab, NULL);
    lse_of[n] = maximum + (float)log(sum);
    loss_of[n] = target[n] == IGNORE_INDEX ? 0 : lse_of[n] - z[target[n]];
  }
}

// A third read, and the row is written.
void ladder_gradients(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, float scale) {
  const int32_t *target = targets.data;
  const float *lse_of = lse.data;
  int64_t vocab = logits.shape[1];
  EACH_PARALLEL (n, logits.shape[0]) {
    const float *z = cpu_row(logits, n);
    float *dz = cpu_row(dlogits, n), row_lse = lse_of[n];
    if (target[n] == IGNORE_INDEX) {
      memset(dz, 0, (size_t)vocab * sizeof *dz);
      continue;
    }
    EACH_SIMD (j, vocab) dz[j] = scale * exp_f32(z[j] - row_lse);
    dz[target[n]] -= scale;
  }
}

// --- rungs 4 and 5: anchored at the target -----------------------------------------------------------------

void ladder_anchors(const Anchored *a) {
  const int32_t *target = a->call.targets.data;
  float *target_z = a->target_z.data, *anchor = a->anchor.data, *target_e = a->target_e.data;
  EACH_PARALLEL (n, a->call.x.shape[0]) {
    bool counts = target[n] != IGNORE_INDEX;
    // Exercise 1: target_z, anchor and target_e of row n. An ignored target, -100, is no row of W.
    target_z[n] = counts ? logit(a, n, target[n]) : 0;
    anchor[n] = counts ? target_z[n] : INFINITY; // makes every exponential of the row 0
    target_e[n] = 1;
    // end of exercise 1
  }
}

// Columns [first, first + count) of row n: logits become exponentials in place. Returns their sum.
static double exponentials_of(const Anchored *a, int64_t n, int64_t first, int64_t count) {
  float *z = cpu_row(a->exps, n) + first;
  int64_t target = ((const int32_t *)a->call.targets.data)[n] - first;
  if (target >= 0 && target < count) z[target] = -INFINITY; // its exponential is 0
  return exp_and_sum(z, ((const float *)a->anchor.data)[n], 1, count, z);
}

// One read and one write of the row.
void ladder_exponentials(const Anchored *a) {
  float *row_sum = a->row_sum.data;
  EACH_PARALLEL (n, a->exps.shape[0]) row_sum[n] = (float)exponentials_of(a, n, 0, a->exps.shape[1]);
}

// Multiplies a tile of W at a time, and exponentiates while the tile of logits is in cache.
void ladder_matmul_exponentials(Backend *backend, const Anchored *a) {
  enum { TILE = 1024 };
  float *row_sum = a->row_sum.data;
  int64_t vocab = a->exps.shape[1];
  fill_zero(backend, a->row_sum);
  for (int64_t first = 0; first < vocab; first += TILE) {
    int64_t count = min_i64(TILE, vocab - first);
    linear_forward(backend, (LinearForward){.out = tensor_columns(a->exps, first, count),
                                            .x = a->call.x,
                                            .weight = tensor_rows(a->call.weight, first, count)});
    EACH_PARALLEL (n, a->exps.shape[0]) row_sum[n] += (float)exponentials_of(a, n, first, count);
  }
}

void ladder_repair(const Anchored *a) {
  float *row_sum = a->row_sum.data, *anchor = a->anchor.data, *target_e = a->target_e.data;
  const float *target_z = a->target_z.data;
  int64_t vocab = a->exps.shape[1];
  for (int64_t n = 0; n < a->exps.shape[0]; n++) {
    if (!(row_sum[n] > LCE_LARGEST_SUM)) continue;
    // Exercise 4: row n once more, with its maximum as anchor: exps, anchor, target_e and row_sum.
    float *z = cpu_row(a->exps, n);
    for (int64_t j = 0; j < vocab; j++) z[j] = logit(a, n, j);
    anchor[n] = maximum_of(z, vocab);
    target_e[n] = exp_f32(target_z[n] - anchor[n]);
    row_sum[n] = (float)exponentials_of(a, n, 0, vocab);
    // end of exercise 4
  }
}

void ladder_finish(const Anchored *a) {
  const LinearCrossEntropy *call = &a->call;
  const float *row_sum = a->row_sum.data, *target_e = a->target_e.data, *target_z = a->target_z.data;
  const float *anchor = a->anchor.data;
  const int32_t *target = call->targets.data;
  float *loss = call->loss.data, *r = a->r.data, *c = a->c.data;
  EACH_PARALLEL (n, call->x.shape[0]) {
    bool counts = target[n] != IGNORE_INDEX;
    // Exercise 1: loss, r and c of row n, from row_sum, target_e (1 unless repaired), anchor and target_z.
    float total = row_sum[n] + target_e[n]; // 1 + R
    float nll = target_e[n] == 1 ? log1pf(row_sum[n]) : anchor[n] - target_z[n] + logf(total);
    loss[n] = counts ? nll : 0;
    r[n] = counts ? 1 / total : 0;
    c[n] = counts ? -row_sum[n] / total : 0;
    // end of exercise 1
    const float *x = cpu_row(call->x, n);
    float *scaled = cpu_row(a->scaled_x, n);
    for (int64_t i = 0; i < call->x.shape[1]; i++) scaled[i] = r[n] * x[i];
  }
}

// Several tokens may have one target, so rows of dweight are added to by one thread.
void ladder_add_targets(const Anchored *a) {
  const LinearCrossEntropy *call = &a->call;
  const int32_t *target = call->targets.data;
  const float *r = a->r.data, *c = a->c.data;
  for (int64_t n = 0; n < call->x.shape[0]; n++) {
    float *dx = cpu_row(call->dx, n);
    if (target[n] == IGNORE_INDEX) {
      memset(dx, 0, (size_t)call->x.shape[1] * sizeof *dx);
      continue;
    }
    const float *x = cpu_row(call->x, n), *w = cpu_row(call->weight, target[n]);
    float *dw = cpu_row(call->dweight, target[n]);
    for (int64_t i = 0; i < call->x.shape[1]; i++) {
      dx[i] = call->scale * (r[n] * dx[i] + c[n] * w[i]);
      dw[i] += call->scale * c[n] * x[i];
    }
  }
}

void ladder_join(const Anchored ranks[2], Tensor rescale) {
  float *anchors[] = {ranks[0].anchor.data, ranks[1].anchor.data};
  float *row_sums[] = {ranks[0].row_sum.data, ranks[1].row_sum.data};
  const float *target_z = ranks[0].target_z.data;
  for (int64_t n = 0; n < ranks[0].exps.shape[0]; n++) {
    float anchor = 0, row_sum = 0, target_e = 1, factor[2] = {1, 1};
    // Exercise 7: the row's anchor, row_sum, target_e, and each rank's factor of E. An anchor is target_z
    // except in a repaired row, and infinite in an ignored one.
    anchor = fmaxf(anchors[0][n], anchors[1][n]);
    for (int i = 0; i < 2; i++) {
      if (anchors[i][n] < anchor) factor[i] = exp_f32(anchors[i][n] - anchor); // infinity in both stays 1
      row_sum += factor[i] * row_sums[i][n];
    }
    if (target_z[n] < anchor && anchor < INFINITY) target_e = exp_f32(target_z[n] - anchor);
    // end of exercise 7
    for (int i = 0; i < 2; i++) {
      anchors[i][n] = anchor, row_sums[i][n] = row_sum, ((float *)ranks[i].target_e.data)[n] = target_e;
      cpu_row(rescale, i)[n] = factor[i];
    }
  }
}

// A tile's mass is its sum of probabilities, r E. The draws are independent, linear_cross_entropy's
// systematic. Dropped tiles are multiplied as zeros, so this shows what sampling does but saves no time.
void ladder_sample(const Anchored *a) {
  const TileSampling *s = &a->call.sampling;
  const float *r = a->r.data;
  int64_t rows = a->exps.shape[0], vocab = a->exps.shape[1];
  uint64_t tile = 0;
  for (int64_t top = 0; top < rows; top += LCE_TILE_ROWS)
    for (int64_t left = 0; left < vocab; left += LCE_TILE_COLUMNS, tile++) {
      int64_t bottom = min_i64(top + LCE_TILE_ROWS, rows), right = min_i64(left + LCE_TILE_COLUMNS, vocab);
      // Exercise 5: keep the tile or drop it at random, keeping E's expectation. Likely tiles should stay:
      // random_uniform(s->seed, 0, tile) draws, and M0 is s->full_mass.
      double mass = 0;
      for (int64_t n = top; n < bottom; n++)
        for (int64_t j = left; j < right; j++) mass += (double)r[n] * (double)cpu_row(a->exps, n)[j];
      double q = fmin(1, mass / (double)s->full_mass);
      float factor = random_uniform(s->seed, 0, tile) < q ? (float)(1 / q) : 0;
      for (int64_t n = top; n < bottom; n++)
        for (int64_t j = left; j < right; j++) cpu_row(a->exps, n)[j] *= factor;
      // end of exercise 5
    }
}
