// What liblce computes besides linear_cross_entropy (tools/torch/liblce/log_probs.h): the outputs of a
// forward pass that keeps its exponentials, and what is refused. tests/kernels has the gradients: every term
// in test_loss_terms.c, hard rows in test_linear_cross_entropy.c.

#include "tests/log_prob_call.h"

// Losses and all outputs, where the forward pass keeps its exponentials, are those of linear_cross_entropy.
TEST(test_outputs) {
  Harness *h = *state;
  enum { ROWS = 67, HIDDEN = 33, VOCAB = 1031 };
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 2);
  loss_problem_add(h, &p, TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS | TERM_BIAS);
  for (int n = 1; n < ROWS; n += 3) p.targets[n] = IGNORE_INDEX;
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, ROWS);
  loss_call_all_outputs(h, &a, &p);
  Exponentials kept = {.exps = poisoned_strided(h, h->dtype, ROWS, VOCAB, VOCAB + 3),
                       .row_sum = poisoned_vector(h, DTYPE_F32, ROWS)};
  keep_exponentials(h->backend, a, kept);
  reference_loss(&p);
  Tolerance close = of_size(within(16, HIDDEN + VOCAB), 8);
  check_loss(h, "with kept exponentials", &a, &p, 0, (LossBefore){0}, close, close);
  check_gaps(h, "E", kept.exps);
}

TEST(test_refusals) {
  Harness *h = *state;
  ReferenceLoss p = loss_problem(h, 3, 4, 5, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy all = loss_call(h, &p, LCE_MATERIALIZED, 3), loss = all;
  LogProbGradients g = log_prob_call(h, &loss, (Tensor){0}, false);
  Tensor two = poisoned_vector(h, DTYPE_F32, 2), exps = poisoned(h, h->dtype, 3, 5);
#define GRADIENTS_REFUSED(part, change)                                                                      \
  do {                                                                                                       \
    LogProbGradients a = g;                                                                                  \
    change;                                                                                                  \
    assert_fails(h, part, log_prob_gradients(h->backend, a));                                                \
  } while (0)
  GRADIENTS_REFUSED("a chunk of 0 tokens", a.call.chunk = 0);
  GRADIENTS_REFUSED("log_prob is fp32 [2] where [3] is needed", a.log_prob = two);
  GRADIENTS_REFUSED("entropy is missing", a.entropy_weights = a.log_prob);
  GRADIENTS_REFUSED("label smoothing does not follow", a.call.terms.label_smoothing = 0.1f);
  GRADIENTS_REFUSED("row_sum is absent for a weight of", a.kept.exps = exps);
  GRADIENTS_REFUSED("[3, 4] and row_sum is fp32 [3] for",
                    (a.kept.exps = a.call.x, a.kept.row_sum = a.log_prob));
  GRADIENTS_REFUSED("row_sum is fp32 [2] where [3]", (a.kept.exps = exps, a.kept.row_sum = two));
  GRADIENTS_REFUSED("exponentials under a soft-cap",
                    (a.kept = (Exponentials){exps, a.log_prob}, a.call.terms.softcap = 30));
  GRADIENTS_REFUSED("a bias has a gradient where weight has one", a.call.dbias = two);
  GRADIENTS_REFUSED("dweight is fp32 [3, 5] for a weight of",
                    (a.call.dweight = poisoned(h, DTYPE_F32, 3, 5)));
  GRADIENTS_REFUSED("nothing is added to it", (a.call.dweight.dtype = DTYPE_BF16, a.call.accumulate = true));
  LinearCrossEntropy forward = all;
  forward.mode = LCE_FUSED, forward.dx = forward.dweight = (Tensor){0};
  Exponentials kept = {exps, g.log_prob};
#define KEEP_REFUSED(part, change)                                                                           \
  do {                                                                                                       \
    LinearCrossEntropy a = forward;                                                                          \
    Exponentials e = kept;                                                                                   \
    change;                                                                                                  \
    assert_fails(h, part, keep_exponentials(h->backend, a, e));                                              \
  } while (0)
  KEEP_REFUSED("without gradients, in one chunk", a.dx = all.dx);
  KEEP_REFUSED("without gradients, in one chunk", a.chunk = 2);
  KEEP_REFUSED("without soft-cap", a.terms.softcap = 30);
  KEEP_REFUSED("without soft-cap", a.terms.label_smoothing = 0.1f);
  KEEP_REFUSED("without soft-cap", a.mode = LCE_MATERIALIZED);
  KEEP_REFUSED("exps is", e.exps = a.x);
  KEEP_REFUSED("row_sum is fp32 [2] where [3]", e.row_sum = two);
  keep_exponentials(h->backend, forward, kept); // as they are, these calls are not refused
  log_prob_gradients(h->backend, g);
  assert_fails(h, "entropy_weights is fp32 [2]", materialized_with_entropies(h->backend, all, two));
}

int main(void) {
  return run_on_backends();
}
