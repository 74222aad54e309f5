// An entry of lce_divergence (operations.h). One formula for the CPU and a GPU, in fp32.
#pragma once

#include "kernels/lce/loss_row.h"
#include "tools/torch/liblce/operations.h"

// ENTRY_EXP(x) = exp(ENTRY_UNIT x)
#if defined(__cplusplus)
#include "kernels/cuda/cuda_common.cuh"
#define ENTRY                LOSS_ROW
#define ENTRY_EXP            exp2_approx
#define ENTRY_UNIT           0.6931471805599453f
#define ENTRY_QUOTIENT(x, y) __fdividef(x, y)
#else
#include "kernels/cpu/vector_math.h"
#define ENTRY                static inline __attribute__((always_inline)) // clang vectorizes no loop with a call
#define ENTRY_EXP            exp_f32
#define ENTRY_UNIT           1.0f
#define ENTRY_QUOTIENT(x, y) ((x) / (y))
#endif

// log(1 + x) of x in [0, 1], to within a few ulp: 2 artanh(x / (2 + x)).
ENTRY float log_1_plus(float x) {
  float s = ENTRY_QUOTIENT(x, 2 + x), z = s * s;
  float series = 1.0f / 7 + z * (1.0f / 9 + z * (1.0f / 11 + z * (1.0f / 13)));
  return 2 * s * (1 + z * (1.0f / 3 + z * (1.0f / 5 + z * series)));
}

// The least distance from a row's maximum: minus infinity would make NaN of a difference, or times 0.
#define LEAST_DISTANCE (-1e30f)

// A row's softmax: p = exp(v - max v) inv_sum, log p = v - max v - log_sum; distance = (v - max v) / ENTRY_UNIT.
typedef struct {
  float max, inv_sum;
  LossReal log_sum; // two of them nearly cancel
} RowSoftmax;

typedef struct {
  float p, q;
  float lead; // log p - log q; for JSD log((1 - beta) p / m): tiny, and as exact, where q is far below p
  float teacher_lead; // -lead; for JSD log(beta q / m)
} DivergenceEntry;

// A kind's constants: for JSD log(1 - beta) and log(beta).
typedef struct {
  DivergenceKind kind;
  float share, teacher_share, log_share, log_teacher_share;
} DivergenceTerms;

ENTRY DivergenceEntry divergence_entry(DivergenceTerms t, RowSoftmax student, RowSoftmax teacher,
                                       float distance, float teacher_distance) {
  float lead = ENTRY_UNIT * (distance - teacher_distance) - (float)(student.log_sum - teacher.log_sum);
  DivergenceEntry e = {ENTRY_EXP(distance) * student.inv_sum, ENTRY_EXP(teacher_distance) * teacher.inv_sum,
                       lead, -lead};
  if (t.kind == JSD) {
    lead += t.log_share - t.log_teacher_share;
    float rest = log_1_plus(ENTRY_EXP((lead > 0 ? -lead : lead) * (1 / ENTRY_UNIT)));
    e.lead = (lead > 0 ? 0 : lead) - rest;
    e.teacher_lead = (lead > 0 ? -lead : 0) - rest;
  }
  return e;
}

// Its part of the loss: of a KL with a difference of p and q that adds up to 0, so that no part is below 0 and those of
// nearly equal distributions do not cancel.
ENTRY float divergence_part(DivergenceTerms t, DivergenceEntry e) {
  if (t.kind == FORWARD_KL) return e.q * e.teacher_lead - (e.q - e.p);
  if (t.kind == REVERSE_KL) return e.p * e.lead - (e.p - e.q);
  return t.share * e.p * (e.lead - t.log_share) +
         t.teacher_share * e.q * (e.teacher_lead - t.log_teacher_share);
}

// d, with the lead at the student's largest logit and, under p, the mean of what leads exceed it by: where p is nearly 1
// there, both are as exact as differences of logits.
ENTRY float divergence_slope(DivergenceTerms t, DivergenceEntry e, float lead_at_max, float mean_excess) {
  if (t.kind == FORWARD_KL) return e.p - e.q;
  return t.share * e.p * ((e.lead - lead_at_max) - mean_excess);
}

static inline DivergenceTerms divergence_terms(DivergenceKind kind, double beta) {
  DivergenceTerms plain = {kind, 1, 1, 0, 0};
  DivergenceTerms jsd = {kind, (float)(1 - beta), (float)beta, (float)log1p(-beta), (float)log(beta)};
  return kind == JSD ? jsd : plain;
}
