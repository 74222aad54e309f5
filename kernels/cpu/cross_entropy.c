// The materialized mode's pass over the logits: each row becomes its own gradient in place.
//
// Three walks over a row, which stays in the second-level cache up to a few hundred thousand entries: the
// maximum; e = exp(z - maximum), stored, and its sum; the scaling. The target is kept out of the sum, so that
// its entry, p - 1 = -others / (others + e_target), and the loss of a nearly certain token do not cancel.
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

// One row: returns the loss. The target's logit is hidden from the sums behind -infinity, whose exp is 0.
static float row_in_place(float *z, int64_t vocab, int32_t target, float alpha, bool forward_only) {
  float target_z = z[target];
  z[target] = -INFINITY;
  float others_maximum = maximum_of(z, vocab);
  float anchor = target_z > others_maximum ? target_z : others_maximum;
  double others = exp_and_sum(z, anchor, vocab, forward_only ? NULL : z);
  double target_e = exp((double)target_z - anchor);
  float loss = (float)(target_e == 1.0 ? log1p(others) : anchor - (double)target_z + log(others + target_e));
  if (forward_only) {
    z[target] = target_z;
    return loss;
  }
  float scale = (float)(alpha / (others + target_e));
#pragma omp simd
  for (int64_t j = 0; j < vocab; j++) z[j] *= scale;
  z[target] = (float)(-alpha * (others / (others + target_e)));
  return loss;
}

void cpu_cross_entropy_in_place(Backend *backend, const CrossEntropyInPlace *a) {
  (void)backend;
  int64_t vocab = a->logits.shape[1];
  const int32_t *targets = a->targets.data;
  float *loss = a->loss.data;
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < a->logits.shape[0]; n++) {
    float *z = cpu_row(a->logits, n);
    if (targets[n] != IGNORE_INDEX) {
      loss[n] = row_in_place(z, vocab, targets[n], a->alpha, a->forward_only);
      continue;
    }
    loss[n] = 0.0f;
    if (!a->forward_only) memset(z, 0, (size_t)vocab * sizeof *z);
  }
}
