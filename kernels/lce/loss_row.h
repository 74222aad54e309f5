// Computes a row's loss and its gradient's coefficients from its sums over exponentials. One formula for all
// modes, in double on the CPU and in fp32 on a GPU; kernels.h ("the loss") defines the terms.
#pragma once

#include <math.h>

#include "kernels/kernels.h"

#if defined(__cplusplus)
typedef float LossReal;
#define LOSS_ROW static __device__ __forceinline__
#else
typedef double LossReal;
#define LOSS_ROW static inline
#endif

// A row with a sum R above this gets a higher anchor: a logit leads the target's by 66. It leaves E W a
// factor of 2^32 below overflow, and r x, r = 1 / (1 + R), 2^30 above the subnormals.
#define LCE_LARGEST_SUM     0x1p96f
#define LCE_LOG_LARGEST_SUM 66.542129f

// Sums of squares take E times this: none overflows while R is at most LCE_LARGEST_SUM, and squares that
// underflow in fp32, of an E below 2^-30, are nothing beside the target's 1.
#define LCE_SQUARED 0x1p-33f

// A row's first anchor, from u[y]. One of minus infinity makes NaN of every masked entry; this makes R too
// large, so that the row is repaired.
#define LCE_LEAST_ANCHOR (-0x1p98f)
LOSS_ROW float finite_anchor(float target_z) {
  return target_z < LCE_LEAST_ANCHOR ? LCE_LEAST_ANCHOR : target_z;
}

static inline float inverse_temperature(float temperature) {
  return temperature > 0 ? 1.0f / temperature : 1.0f;
}

typedef struct {
  LossReal row_sum;  // R: the sum of exp(v - anchor) over the non-targets
  LossReal target_e; // exp(v[y] - anchor)
  LossReal offset;   // anchor - v[y]; infinite where v[y] is minus infinity
  LossReal anchor_v; // the anchor
  LossReal weighted; // sum_j w[j] v[j]; read with label smoothing
  LossReal scale;    // of the row's gradient
  LossReal class_weight, class_weight_sum, vocab_size;
  LossTerms terms;
} RowSums;

// All fields of a row, in order, so that a backend that forgets one does not compile.
LOSS_ROW RowSums row_sums_of(LossTerms terms, LossReal vocab_size, int32_t target, LossReal row_sum,
                             LossReal target_e, LossReal offset, LossReal anchor_v, LossReal weighted,
                             LossReal scale) {
  const float *w = (const float *)terms.class_weights.data, *sum = (const float *)terms.class_weight_sum.data;
  RowSums s = {row_sum, target_e, offset, anchor_v, weighted, scale, 1, vocab_size, vocab_size, terms};
  if (w && target != IGNORE_INDEX) s.class_weight = w[target];
  if (sum) s.class_weight_sum = *sum;
  return s;
}

typedef struct {
  LossReal total, log_total; // R + target_e, and its logarithm
  LossReal nll, lse;         // lse - v[y]; lse
  LossReal loss, z_loss;
  // d / d v[j] = per_e exp(v[j] - anchor) - uniform w[j], and for the target `target` - uniform w[y]
  LossReal per_e, target, uniform;
} RowLoss;

LOSS_ROW RowLoss loss_of_row(RowSums s) {
  RowLoss r;
  LossReal smoothing = s.terms.label_smoothing, lambda = s.terms.z_loss;
  LossReal share = smoothing / s.vocab_size, target_scale = (1 - smoothing) * s.class_weight;
  r.total = s.row_sum + s.target_e;
  // A target that is nearly certain: no cancellation. One of minus infinity: lse stays finite.
  r.log_total = s.target_e == 1 ? log1p(s.row_sum) : log(r.total);
  r.nll = s.offset + r.log_total;
  r.lse = s.anchor_v + r.log_total;
  r.loss = target_scale * r.nll;
  if (smoothing > 0) r.loss += share * (s.class_weight_sum * r.lse - s.weighted);
  r.z_loss = lambda * r.lse * r.lse;
  // p's factor, apart from the target's weight.
  LossReal p_scale = share * s.class_weight_sum + 2 * lambda * r.lse;
  r.per_e = s.scale * (target_scale + p_scale) / r.total;
  // p - 1 = -R / total, not computed from p.
  r.target = s.scale * (p_scale * (s.target_e / r.total) - target_scale * (s.row_sum / r.total));
  r.uniform = s.scale * share;
  return r;
}

// du/dz of u = cap tanh(z / cap), from u.
LOSS_ROW LossReal capped_slope(LossReal u, LossReal cap) {
  return (1 - u / cap) * (1 + u / cap);
}

// The entropy, from e_v = sum of exp(v - anchor) (v - anchor) over the non-targets.
LOSS_ROW LossReal entropy_of_row(RowSums s, RowLoss r, LossReal e_v) {
  return r.log_total - (e_v - (s.target_e > 0 ? s.target_e * s.offset : 0)) / r.total;
}

// log sum_j p[j]^2, from the sum of (LCE_SQUARED E[j])^2 over the non-targets.
LOSS_ROW LossReal log_sum_sq_probs_of_row(RowSums s, RowLoss r, LossReal e_squared) {
  LossReal target = LCE_SQUARED * s.target_e, total = LCE_SQUARED * r.total;
  return log((e_squared + target * target) / (total * total));
}

// - d entropy / d v[y], with p = p[y].
LOSS_ROW LossReal entropy_at_target(LossReal p, LossReal nll, LossReal entropy) {
  return p > 0 ? p * (entropy - nll) : 0;
}

// A dweight in W's dtype has no separate sum for the targets, so r multiplies their entry of E, too. If terms
// cancel and r is 0, or nearly, it gets a value beside which the rest of the row is nothing.
LOSS_ROW LossReal scale_with_target(RowLoss r) {
  LossReal least = fabs(r.target) * 0x1p-24f / r.total;
  return fabs(r.per_e) < least ? least : r.per_e;
}
