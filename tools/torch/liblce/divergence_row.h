// An entry of a divergence (divergence.h). One formula for the CPU and a GPU, in fp32.
#pragma once

#include "kernels/lce/loss_row.h"
#include "tools/torch/liblce/divergence.h"

// Exponents are in units of ENTRY_UNIT: ENTRY_EXP(x) = exp(ENTRY_UNIT x) and
// ENTRY_LOG_1_PLUS(x) = log(1 + x) / ENTRY_UNIT.
#if defined(__cplusplus)
#include "kernels/cuda/cuda_common.cuh"
#define ENTRY               LOSS_ROW
#define ENTRY_UNIT          0.6931471805599453f
#define ENTRY_EXP           exp2_approx
#define ENTRY_LOG_1_PLUS(x) log2_approx(1 + (x)) // defined by the file that includes this one
#else
#include "kernels/cpu/vector_math.h"
#define ENTRY      static inline __attribute__((always_inline)) // clang vectorizes no loop with a call
#define ENTRY_UNIT 1.0f
#define ENTRY_EXP  exp_f32

// For x in [0, 1], to within a few ulp: 2 artanh(x / (2 + x)).
ENTRY float ENTRY_LOG_1_PLUS(float x) {
  float s = x / (2 + x), z = s * s;
  float series = 1.0f / 7 + z * (1.0f / 9 + z * (1.0f / 11 + z * (1.0f / 13)));
  return 2 * s * (1 + z * (1.0f / 3 + z * (1.0f / 5 + z * series)));
}
#endif

// The least distance from a row's maximum: minus infinity would make NaN of a difference, or times 0.
#define LEAST_DISTANCE (-1e30f)

// A row's softmax times the share that a kind gives it: p = exp(v - max v) inv_sum, log p = v - max v - log_sum.
// log_sum, a distance v - max v and what follows from them are in units of ENTRY_UNIT.
typedef struct {
  float max, inv_sum;
  LossReal log_sum; // two of them nearly cancel
} RowSoftmax;

// A kind's constants. JSD: the shares are 1 - beta and beta; of a KL both are 1.
typedef struct {
  DivergenceKind kind;
  float share, teacher_share, log_share, log_teacher_share;
} DivergenceTerms;

typedef struct {
  float p, q;         // with their shares
  float lead;         // log p - log q; for JSD log(p / (p + q))
  float teacher_lead; // log q - log p; for JSD log(q / (p + q))
} DivergenceEntry;

static inline DivergenceTerms divergence_terms(DivergenceKind kind, double beta) {
  double unit = (double)ENTRY_UNIT;
  if (kind != JSD) return (DivergenceTerms){kind, 1, 1, 0, 0};
  return (DivergenceTerms){kind, (float)(1 - beta), (float)beta, (float)(log1p(-beta) / unit),
                           (float)(log(beta) / unit)};
}

ENTRY RowSoftmax row_softmax(float max, LossReal sum, float share) {
  LossReal log_sum = log(sum / share) / ENTRY_UNIT;
  return (RowSoftmax){max, (float)(share / sum), log_sum};
}

// lead: log p - log q.
ENTRY DivergenceEntry divergence_entry(DivergenceTerms t, float p, float q, float lead) {
  if (t.kind != JSD) return (DivergenceEntry){p, q, lead, -lead};
  float rest = ENTRY_LOG_1_PLUS(ENTRY_EXP(-fabsf(lead)));
  return (DivergenceEntry){p, q, 0.5f * (lead - fabsf(lead)) - rest, -0.5f * (lead + fabsf(lead)) - rest};
}

ENTRY DivergenceEntry entry_of_distances(DivergenceTerms t, RowSoftmax student, RowSoftmax teacher,
                                         float distance, float teacher_distance) {
  return divergence_entry(t, ENTRY_EXP(distance) * student.inv_sum,
                          ENTRY_EXP(teacher_distance) * teacher.inv_sum,
                          (distance - teacher_distance) - (float)(student.log_sum - teacher.log_sum));
}

// Adds its part to a loss: of a KL with a difference of p and q that adds up to 0, so that no part is below 0 and those
// of nearly equal distributions do not cancel.
ENTRY float plus_divergence(float loss, DivergenceTerms t, DivergenceEntry e) {
  if (t.kind == FORWARD_KL) return loss + e.q * e.teacher_lead + (e.p - e.q) * (1 / ENTRY_UNIT);
  if (t.kind == REVERSE_KL) return loss + e.p * e.lead - (e.p - e.q) * (1 / ENTRY_UNIT);
  return loss + e.p * (e.lead - t.log_share) + e.q * (e.teacher_lead - t.log_teacher_share);
}

// Computes d, in units of 1 / ENTRY_UNIT but for the forward KL. excess: the lead less the one at the student's
// largest logit; its mean is under p. Where p is nearly 1 there, both are as exact as differences of logits.
ENTRY float divergence_slope(DivergenceTerms t, float p, float q, float excess, float mean_excess) {
  return t.kind == FORWARD_KL ? p - q : p * (excess - mean_excess);
}
