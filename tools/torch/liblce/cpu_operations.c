// The package's operations on the CPU.
#include "tools/torch/liblce/operations.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"
#include "tools/torch/liblce/given_ids.h"
#include "tools/torch/liblce/log_prob_factors.h"

void cpu_lce_gradient_factors(Backend *backend, const LceGradientFactors *a) {
  const int32_t *targets = a->targets.data;
  double inv_temperature = (double)inverse_temperature(a->terms.temperature);
  EACH_PARALLEL (n, a->targets.shape[0]) {
    bool counts = targets[n] != IGNORE_INDEX;
    double scale = counts ? inv_temperature * (double)a->alpha * cpu_read(a->factor, 0, 1) : 0;
    TokenFactors r =
        token_factors(a->terms, counts ? cpu_read(a->terms.class_weights, targets[n], 1) : 0,
                      inv_temperature * cpu_read(a->target_z, n, 0), -cpu_read(a->log_prob, n, 0),
                      cpu_read(a->entropy, n, 0), scale * cpu_read(a->token_weights, n, 1),
                      scale * cpu_read(a->entropy_weights, n, 0));
    double cap = (double)a->terms.softcap, u = cpu_read(a->target_z, n, 0);
    if (cap > 0) r.at_target *= capped_slope(u, cap);
    if (tensor_exists(a->row_sum))
      r.log_total = log_total(cpu_read(a->row_sum, n, 0), -cpu_read(a->log_prob, n, 0));
    cpu_store(a->factors.log_total, n, counts ? r.log_total : 0);
    cpu_store(a->factors.per_p, n, counts ? r.per_p : 0);
    cpu_store(a->factors.per_distance, n, counts ? r.per_distance : 0);
    cpu_store(a->factors.at_target, n, counts ? r.at_target : 0);
  }
}

// Tile t of a block: logits, or kept exponentials, become their gradient.
static void logits_gradient_tile(const Backend *backend, const LceLogitsGradient *a, int64_t block,
                                 int64_t t) {
  Tensor tile = cpu_tile(a->dlogits, block, t);
  int64_t row = block * LCE_TILE_ROWS, column = t * LCE_TILE_COLUMNS, columns = tile.shape[1];
  float inv_temperature = inverse_temperature(a->temperature);
  const float *bias = a->bias.data;
  bool kept = !tensor_exists(a->x);
  if (!kept)
    cpu_tile_logits(backend, tile, cpu_part(a->x, LCE_TILE_ROWS, block),
                    cpu_part(a->weight, LCE_TILE_COLUMNS, t));
  for (int64_t n = row; n < row + tile.shape[0]; n++) {
    float *d = cpu_row(tile, n - row);
    int64_t target = ((const int32_t *)a->targets.data)[n];
    if (target == IGNORE_INDEX) {
      memset(d, 0, (size_t)columns * sizeof *d);
      continue;
    }
    float total = ((const float *)a->factors.log_total.data)[n], scale = expf(-total);
    float per_p = ((const float *)a->factors.per_p.data)[n];
    float per_distance = ((const float *)a->factors.per_distance.data)[n];
    float anchor = kept ? 0 : ((const float *)a->anchor.data)[n];
    EACH_SIMD (j, kept ? columns : 0) {
      float distance = per_distance != 0 && d[j] > 0 ? logf(d[j]) - total : 0;
      d[j] = d[j] * scale * (per_p + per_distance * distance);
    }
    float slope[LCE_TILE_COLUMNS];
    bias_and_cap(d, bias ? bias + column : NULL, a->softcap, columns, slope);
    EACH_SIMD (j, kept ? 0 : columns) {
      float distance = (d[j] - anchor) * inv_temperature - total;
      if (distance < -1e4f) distance = -1e4f; // a bias of minus infinity: p is 0, times a number
      d[j] = exp_f32(distance > 0 ? 0 : distance) * (per_p + per_distance * distance);
    }
    if (a->softcap > 0)
      EACH_SIMD (j, columns) d[j] *= slope[j];
    if (target >= column && target < column + columns)
      d[target - column] = ((const float *)a->factors.at_target.data)[n];
  }
}

void cpu_lce_logits_gradient(Backend *backend, const LceLogitsGradient *a) {
  int64_t blocks = ceil_div(a->dlogits.shape[0], LCE_TILE_ROWS),
          tiles = ceil_div(a->dlogits.shape[1], LCE_TILE_COLUMNS);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t t = 0; t < tiles; t++)
    for (int64_t block = 0; block < blocks; block++) logits_gradient_tile(backend, a, block, t);
}

void cpu_lce_id_logits(Backend *backend, const LceIdLogProbs *a) {
  float *logits = a->log_probs.data;
  double cap = a->softcap;
  EACH_PARALLEL (n, a->x.shape[0]) {
    RowIds r = ids_of_row(a->ids, a->offsets, a->x.shape[0], n);
    int64_t best = -1;
    for (int64_t m = r.first; m < r.end; m++) {
      int32_t id = r.ids[m];
      logits[m] = 0;
      if (id < 0) continue;
      double z = weighted_sum(cpu_row(a->x, n), cpu_row(a->weight, id), a->x.shape[1]) + entry(a->bias, id);
      logits[m] = (float)(cap > 0 ? cap * tanh(z / cap) : z);
      if (best < 0 || logits[m] > logits[best]) best = m;
    }
    ((int32_t *)a->anchors.data)[n] = best < 0 ? 0 : r.ids[best];
  }
}

void cpu_lce_id_log_probs(Backend *backend, const LceIdLogProbs *a) {
  EACH_PARALLEL (n, a->anchor_nll.shape[0]) id_log_probs_of_row(a, n, inverse_temperature(a->temperature));
}

void cpu_lce_id_factors(Backend *backend, const LceIdGradients *a) {
  EACH_PARALLEL (n, a->targets.shape[0]) id_factors_of_row(a, n, inverse_temperature(a->temperature));
}

void cpu_lce_id_gradients(Backend *backend, const LceIdGradients *a) {
  EACH_PARALLEL (n, a->lse.shape[0]) {
    RowIds r = ids_of_row(a->ids, a->offsets, a->lse.shape[0], n);
    for (int64_t m = r.first; m < r.end; m++) {
      int64_t column = r.ids[m] - a->first;
      if (r.ids[m] >= 0 && column >= 0 && column < a->dlogits.shape[1])
        cpu_row(a->dlogits, n)[column] = (float)id_gradient(a, r, n, m);
    }
  }
}

void cpu_scale_by(Backend *backend, const ScaleBy *a) {
  const float *x = a->x.data, factor = (float)cpu_read(a->factor, 0, 1);
  float *out = a->out.data;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < a->x.shape[0]; i++) out[i] = factor * x[i];
}

void cpu_read_targets(Backend *backend, const ReadTargets *a) {
  const int32_t *narrow = a->ids.data;
  const int64_t *wide = a->ids.data;
  int32_t *targets = a->targets.data;
  float *loss = a->loss.data;
  for (int64_t n = 0; n < a->ids.shape[0]; n++) {
    int64_t id = a->ids.dtype == DTYPE_I64 ? wide[n] : narrow[n];
    bool counts = id >= 0 && id < a->vocab_size;
    if (targets) targets[n] = counts ? (int32_t)id : IGNORE_INDEX;
    if (loss && !counts && id != IGNORE_INDEX) loss[n] = NAN;
  }
}
