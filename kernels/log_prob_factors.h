// What a token's log-probability and entropy give: the factors of its logits' gradient (LceGradientFactors).
// One formula for the CPU and a GPU, as loss_row.h has it.
#pragma once

#include "kernels/lce/loss_row.h"
#include "kernels/tensor.h"

// `scale` multiplies the gradient of loss and z-loss, `entropy_scale` that of the entropy.
typedef struct {
  LossReal log_total, per_p, per_distance, at_target;
} TokenFactors;

LOSS_ROW TokenFactors token_factors(LossReal target_v, LossReal nll, LossReal entropy, LossReal class_weight,
                                    LossReal z_loss, LossReal scale, LossReal entropy_scale) {
  LossReal p_scale = z_loss > 0 ? 2 * z_loss * (target_v + nll) : 0, p = exp(-nll);
  return (TokenFactors){nll, scale * (class_weight + p_scale) - entropy_scale * entropy, -entropy_scale,
                        scale * (class_weight * expm1(-nll) + p_scale * p) -
                            entropy_scale * entropy_at_target(p, nll, entropy)};
}

// log(R + target_e), where target_e / (R + target_e) = p[y].
LOSS_ROW LossReal log_total(LossReal row_sum, LossReal nll) {
  return nll > 0 ? log(row_sum / -expm1(-nll)) : 0;
}

// The given ids of row n (torch_operations.h): entries [first, end) of `count`, whatever the offsets hold.
typedef struct {
  int64_t first, end;
} IdRange;

LOSS_ROW IdRange ids_of_row(Tensor ids, Tensor offsets, int64_t rows, int64_t n) {
  int64_t count = ids.shape[0], per_row = count / rows;
  const int64_t *given = (const int64_t *)offsets.data;
  IdRange r = {given ? given[n] : n * per_row, given ? given[n + 1] : (n + 1) * per_row};
  r.first = r.first < 0 ? 0 : r.first > count ? count : r.first;
  r.end = r.end > count ? count : r.end;
  return r;
}

// The gradient of v at ids[m]. Its duplicates in the row count with it, so that none of the sums cancels.
LOSS_ROW LossReal id_gradient(const int32_t *ids, const float *dlog_probs, IdRange r, int64_t m,
                              LossReal log_prob, LossReal dlse) {
  LossReal own = 0, others = 0;
  for (int64_t i = r.first; i < r.end; i++) {
    if (ids[i] == ids[m]) own += dlog_probs[i];
    if (ids[i] != ids[m] && ids[i] >= 0) others += dlog_probs[i];
  }
  return exp(log_prob) * (dlse - others) - own * expm1(log_prob);
}
