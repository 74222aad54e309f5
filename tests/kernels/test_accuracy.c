// The fused layer's error where rounding hurts most. E and r x are rounded to bf16, 1.4e-3 each on average,
// and nothing else is: bf16 logits would miss all bounds by one to two orders of magnitude.

#include "tests/loss_problem.h"

enum { TOKENS = 125, HIDDEN = 512, CHUNK = 48 };
static int64_t vocab; // 32768 where there is a GPU; float64 alone would take a CPU half a minute

// Logits have the deviation given; `lead` is added to a target's logit.
static ReferenceLoss make_problem(Harness *h, double deviation, double lead) {
  ReferenceLoss p = loss_problem(h, TOKENS, HIDDEN, vocab, deviation);
  p.scale = 1.0 / TOKENS;
  reference_gradients(h, &p);
  for (int64_t n = 0; n < TOKENS && lead > 0; n++) { // x leans towards its target's row of W
    double *x = p.x + n * HIDDEN, *w = p.weight + p.targets[n] * HIDDEN, size = 0;
    for (int64_t i = 0; i < HIDDEN; i++) size += w[i] * w[i];
    for (int64_t i = 0; i < HIDDEN; i++) x[i] += lead * w[i] / size;
  }
  return p;
}

static double mean(const double *values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += values[i];
  return sum / (double)count;
}

static void check(Harness *h, const char *name, double deviation, double lead, double dx_bound,
                  double dweight_bound) {
  ReferenceLoss p = make_problem(h, deviation, lead);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, CHUNK);
  a.dx = poisoned(h, DTYPE_F32, TOKENS, HIDDEN);
  linear_cross_entropy(h->backend, a);
  reference_loss(&p);
  double dx = relative_distance(values_of(h, a.dx), p.dx, TOKENS * HIDDEN);
  double dweight = relative_distance(values_of(h, a.dweight), p.dweight, vocab * HIDDEN);
  double *loss = values_of(h, a.loss), worst = 0;
  for (int64_t n = 0; n < TOKENS; n++) worst = fmax(worst, fabs(loss[n] / p.loss[n] - 1));
  print_message("%s: loss %.2f; off by %.2e in dX, %.2e in dW, %.1e in the mean loss, %.1e in a token's\n",
                name, mean(p.loss, TOKENS), dx, dweight, fabs(mean(loss, TOKENS) / mean(p.loss, TOKENS) - 1),
                worst);
  // The few elements that dominate sharp weights round up or down by the draw: by a tenth, as measured.
  assert_true(dx <= 1.15 * dx_bound);
  assert_true(dweight <= 1.15 * dweight_bound);
  assert_true(fabs(mean(loss, TOKENS) / mean(p.loss, TOKENS) - 1) < 1e-6);
  assert_true(worst < 5e-5); // of a loss of 1e-4 as of one of 30
  memory_pop_to(&h->backend->memory, 0);
}

HARNESS_TEST(test_weight_scales) {
  check(h, "as at initialisation", 0.02 * sqrt(HIDDEN), 0, 1.1e-5, 1.6e-5);
  check(h, "sharp", 3.1, 0, 3.5e-4, 4.9e-4);
  check(h, "very sharp", 9.6, 0, 1.0e-3, 1.4e-3);
  check(h, "as training leaves it", 1.5, 9, 5.7e-5, 1.4e-3);
}

int main(void) {
  Harness *gpu = harness_open("cuda");
  vocab = gpu ? 32768 : 3001;
  if (gpu) harness_close(gpu);
  return run_on_backends();
}
