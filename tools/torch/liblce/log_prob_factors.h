// The factors of a token's logits' gradient, from its log-probability and entropy (LceGradientFactors).
// One formula for the CPU and a GPU, as loss_row.h has it.
#pragma once

#include "kernels/lce/loss_row.h"

// `scale` multiplies the gradient of loss and z-loss, `entropy_scale` that of the entropy.
typedef struct {
  LossReal log_total, per_p, per_distance, at_target;
} TokenFactors;

LOSS_ROW TokenFactors token_factors(LossTerms terms, LossReal class_weight, LossReal target_v, LossReal nll,
                                    LossReal entropy, LossReal scale, LossReal entropy_scale) {
  LossReal lambda = terms.z_loss, p_scale = lambda > 0 ? 2 * lambda * (target_v + nll) : 0, p = exp(-nll);
  return (TokenFactors){nll, scale * (class_weight + p_scale) - entropy_scale * entropy, -entropy_scale,
                        scale * (class_weight * expm1(-nll) + p_scale * p) -
                            entropy_scale * entropy_at_target(p, nll, entropy)};
}

// log(R + target_e), where target_e / (R + target_e) = p[y].
LOSS_ROW LossReal log_total(LossReal row_sum, LossReal nll) {
  return nll > 0 ? log(row_sum / -expm1(-nll)) : 0;
}
