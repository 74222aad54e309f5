// Logits become their own gradient in place, row by row: all terms of the loss, as kernels.h defines them.
//
// Three passes over a row, which stays in the second-level cache up to a few hundred thousand entries: the
// largest non-target; the sums over exp(v - anchor); the gradient. The target is kept out of the sums, so
// that its entry, p - 1 = -R / (R + e_target), and the loss of a nearly certain token do not cancel. The
// plain loss keeps the exponentials of the second pass; the other terms need v as well, and recompute them.
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/lce/loss_row.h"

// dv/dz = (1 - (u/c)^2) / T
static inline float derivative_of(float v, float cap, float inv_temperature) {
  if (cap == 0) return inv_temperature;
  float ratio = v / (inv_temperature * cap);
  return inv_temperature * (1.0f - ratio * ratio);
}

// Processes row n, whose target counts.
static void one_row(const CrossEntropyInPlace *a, int64_t n) {
  const LossTerms *t = &a->terms;
  int64_t vocab = a->logits.shape[1];
  int32_t target = ((const int32_t *)a->targets.data)[n];
  float *v = cpu_row(a->logits, n), cap = t->softcap, inv_temperature = inverse_temperature(t->temperature);
  const float *w = t->class_weights.data;
  bool needs_entropy = tensor_exists(a->entropy_weights) || tensor_exists(a->outputs.entropy);
  bool plain = cap == 0 && t->label_smoothing == 0 && !needs_entropy; // E is the gradient, but for a factor
  bias_and_cap(v, a->bias.data, cap, vocab, NULL); // dv/dz is found again from v (derivative_of)
  EACH_SIMD (j, inv_temperature != 1 ? vocab : 0) v[j] *= inv_temperature;
  float target_v = v[target];
  int64_t predicted = 0;
  if (tensor_exists(a->outputs.predicted) || tensor_exists(a->outputs.correct))
    predicted = index_of(v, vocab, maximum_of(v, vocab));
  if (tensor_exists(a->outputs.predicted)) ((int32_t *)a->outputs.predicted.data)[n] = (int32_t)predicted;
  double weighted = t->label_smoothing > 0 ? weighted_sum(v, w, vocab) : 0;
  v[target] = -INFINITY; // hidden from the sums: its exponential is 0
  float non_target_max = maximum_of(v, vocab), anchor = target_v > non_target_max ? target_v : non_target_max;
  cpu_store(a->outputs.max_logit, n, anchor);
  double distance = needs_entropy ? exp_times_distance(v, anchor, 1.0f, vocab) : 0;
  double alpha = a->alpha * cpu_read(a->factor, 0, 1);
  RowSums row = row_sums_of(*t, (double)vocab, target,
                            exp_and_sum(v, anchor, 1.0f, vocab, plain && a->backward ? v : NULL),
                            exp((double)target_v - anchor), anchor - (double)target_v, anchor, weighted,
                            alpha * cpu_read(a->token_weights, n, 1));
  RowLoss r = loss_of_row(row);
  double entropy = entropy_of_row(row, r, distance);
  cpu_store(a->loss, n, r.loss);
  cpu_store(a->outputs.token_z_loss, n, r.z_loss);
  cpu_store(a->outputs.log_prob, n, -r.nll);
  cpu_store(a->outputs.logsumexp, n, r.lse);
  cpu_store(a->outputs.entropy, n, entropy);
  cpu_store(a->outputs.correct, n, predicted == target && !isnan(r.nll));
  if (!a->backward) return;

  double entropy_scale = alpha * cpu_read(a->entropy_weights, n, 0);
  double target_gradient = r.target - r.uniform * row.class_weight -
                           entropy_scale * entropy_at_target(row.target_e / r.total, r.nll, entropy);
  if (plain) {
    float scale = (float)(r.per_e * inv_temperature);
    EACH_SIMD (j, vocab) v[j] *= scale;
  } else {
    float per_e = (float)r.per_e, entropy_per_e = (float)(entropy_scale / r.total);
    float from_anchor = (float)(entropy - r.log_total), uniform = (float)r.uniform;
    EACH_SIMD (j, vocab) {
      float d = v[j] - anchor, e = exp_f32(d);
      float g = e * per_e - (e == 0.0f ? 0.0f : e * entropy_per_e * (d + from_anchor));
      v[j] = (g - uniform * (w ? w[j] : 1.0f)) * derivative_of(v[j], cap, inv_temperature);
    }
  }
  v[target] = (float)(target_gradient * (double)derivative_of(target_v, cap, inv_temperature));
}

static void ignored_row(const CrossEntropyInPlace *a, int64_t n) {
  cpu_store(a->loss, n, 0);
  for (size_t i = 0; i < sizeof a->outputs.all / sizeof a->outputs.all[0]; i++)
    if (tensor_exists(a->outputs.all[i])) memset((int32_t *)a->outputs.all[i].data + n, 0, sizeof(int32_t));
  if (a->backward) memset(cpu_row(a->logits, n), 0, (size_t)a->logits.shape[1] * sizeof(float));
}

void cpu_cross_entropy_in_place(Backend *backend, const CrossEntropyInPlace *a) {
  const int32_t *targets = a->targets.data;
  EACH_PARALLEL (n, a->logits.shape[0])
    if (targets[n] == IGNORE_INDEX)
      ignored_row(a, n);
    else
      one_row(a, n);
}

void cpu_loss_factor(Backend *backend, const LossFactor *a) {
  const int32_t *targets = a->targets.data;
  const float *class_weights = a->class_weights.data;
  double sum = 0;
  for (int64_t n = 0; n < a->targets.shape[0]; n++)
    if (targets[n] != IGNORE_INDEX) sum += class_weights ? class_weights[targets[n]] : 1.0;
  *(float *)a->factor.data = sum != 0 ? (float)(1 / sum) : 0.0f;
}
