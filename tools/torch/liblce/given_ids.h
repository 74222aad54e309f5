// The outputs of a row's given ids (operations.h). One formula for the CPU and a GPU, as loss_row.h has it.
#pragma once

#include "kernels/lce/loss_row.h"
#include "tools/torch/liblce/operations.h"

// Those of row n: entries [first, end), within `ids` whatever the offsets hold.
typedef struct {
  const int32_t *ids;
  int64_t first, end;
} RowIds;

LOSS_ROW RowIds ids_of_row(Tensor ids, Tensor offsets, int64_t rows, int64_t n) {
  int64_t count = ids.shape[0], per_row = count / rows;
  const int64_t *given = (const int64_t *)offsets.data;
  int64_t first = given ? given[n] : n * per_row, end = given ? given[n + 1] : (n + 1) * per_row;
  return (RowIds){(const int32_t *)ids.data, first < 0 ? 0 : first, end > count ? count : end};
}

LOSS_ROW LossReal entry(Tensor vector, int64_t i) {
  return vector.data ? ((const float *)vector.data)[i] : 0;
}

// lce_id_log_probs of row n.
LOSS_ROW void id_log_probs_of_row(const LceIdLogProbs *a, int64_t n, float inv_temperature) {
  RowIds r = ids_of_row(a->ids, a->offsets, a->anchor_nll.shape[0], n);
  float *u = (float *)a->log_probs.data, max = -INFINITY;
  for (int64_t m = r.first; m < r.end; m++)
    if (r.ids[m] >= 0) max = fmaxf(max, u[m]);
  for (int64_t m = r.first; m < r.end; m++) {
    LossReal lead = u[m] == max ? 0 : ((LossReal)u[m] - max) * inv_temperature; // both may be infinite
    if (r.ids[m] >= 0) u[m] = (float)(lead - entry(a->anchor_nll, n));
  }
}

LOSS_ROW void set_entry(Tensor vector, int64_t i, LossReal value) {
  ((float *)vector.data)[i] = (float)value;
}

// lce_id_factors of row n.
LOSS_ROW void id_factors_of_row(const LceIdGradients *a, int64_t n, float inv_temperature) {
  RowIds r = ids_of_row(a->ids, a->offsets, a->targets.shape[0], n);
  LossReal dlse = entry(a->dlse, n), dentropy = entry(a->dentropy, n), sum = 0, best = -INFINITY;
  bool counts = dlse != 0 || dentropy != 0;
  int32_t anchor = IGNORE_INDEX;
  for (int64_t m = r.first; m < r.end; m++) {
    if (r.ids[m] < 0) continue;
    sum += entry(a->dlog_probs, m);
    counts = true;
    if (!(entry(a->log_probs, m) <= best)) best = entry(a->log_probs, m), anchor = r.ids[m];
  }
  set_entry(a->factors.log_total, n, anchor >= 0 ? -best : entry(a->lse, n));
  set_entry(a->factors.per_p, n, (dlse - sum - dentropy * entry(a->entropy, n)) * inv_temperature);
  set_entry(a->factors.per_distance, n, -dentropy * inv_temperature);
  set_entry(a->factors.at_target, n, 0);
  ((int32_t *)a->anchors.data)[n] = anchor;
  ((int32_t *)a->targets.data)[n] = counts ? ELSEWHERE : IGNORE_INDEX;
}

// lce_id_gradients of entry m of row n, whose duplicates count with it, so that none of the sums cancels.
LOSS_ROW LossReal id_gradient(const LceIdGradients *a, RowIds r, int64_t n, int64_t m) {
  LossReal log_prob = entry(a->log_probs, m), p = exp(log_prob), own = 0, others = 0;
  for (int64_t i = r.first; i < r.end; i++) {
    if (r.ids[i] == r.ids[m]) own += entry(a->dlog_probs, i);
    if (r.ids[i] != r.ids[m] && r.ids[i] >= 0) others += entry(a->dlog_probs, i);
  }
  LossReal temperature = a->temperature > 0 ? a->temperature : 1, cap = a->softcap;
  LossReal slope = cap > 0 ? capped_slope(temperature * (log_prob + entry(a->lse, n)), cap) : 1;
  LossReal d = p * (entry(a->dlse, n) - others) - own * expm1(log_prob);
  if (p > 0) d -= p * entry(a->dentropy, n) * (log_prob + entry(a->entropy, n));
  return d * slope / temperature;
}
