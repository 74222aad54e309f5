// What a row's sums over exponentials give: its loss, and what multiplies the entries of its gradient. One
// formula for all modes, in double on the CPU and in fp32 on a GPU; kernels.h ("the loss") defines the terms.
#pragma once

#include <math.h>

#if defined(__cplusplus)
typedef float LossReal;
#define LOSS_ROW static __device__ __forceinline__
#else
typedef double LossReal;
#define LOSS_ROW static inline
#endif

// A row whose sum R exceeds this gets a higher anchor: a logit leads the target's by 66. It leaves E W a factor
// of 2^32 below overflow, and r x, r = 1 / (1 + R), 2^30 above the subnormals.
#define LCE_LARGEST_SUM 0x1p96f

static inline float inverse_temperature(float temperature) {
  return temperature > 0 ? 1.0f / temperature : 1.0f;
}

typedef struct {
  LossReal row_sum;  // R: of exp(v - anchor) over the non-targets
  LossReal target_e; // exp(v[y] - anchor)
  LossReal offset;   // anchor - v[y]
  LossReal target_v; // v[y]
  LossReal weighted; // sum_j w[j] v[j]; read with label smoothing
  LossReal class_weight, class_weight_sum, vocab_size;
  LossReal label_smoothing, z_loss;
  LossReal scale; // of the row's gradient
} RowSums;

typedef struct {
  LossReal total, nll, lse; // R + target_e; lse - v[y]; lse
  LossReal loss, z_loss;
  // d / d v[j] = per_e exp(v[j] - anchor) - uniform w[j], and for the target `target` - uniform w[y]
  LossReal per_e, target, uniform;
} RowLoss;

LOSS_ROW RowLoss loss_of_row(RowSums s) {
  RowLoss r;
  LossReal share = s.label_smoothing / s.vocab_size, target_scale = (1 - s.label_smoothing) * s.class_weight;
  r.total = s.row_sum + s.target_e;
  // A target that is nearly certain: no cancellation.
  r.nll = s.target_e == 1 ? log1p(s.row_sum) : s.offset + log(r.total);
  r.lse = s.target_v + r.nll;
  r.loss = target_scale * r.nll;
  if (s.label_smoothing > 0) r.loss += share * (s.class_weight_sum * r.lse - s.weighted);
  r.z_loss = s.z_loss * r.lse * r.lse;
  LossReal p_scale =
      share * s.class_weight_sum + 2 * s.z_loss * r.lse; // what multiplies p besides the target's weight
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
  return (s.target_e == 1 ? r.nll : log(r.total)) - (e_v - s.target_e * s.offset) / r.total;
}
