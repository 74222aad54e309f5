// Refusals and memory of log_probs.h; test_log_prob_values.c tests the values.

#include "tests/pytorch/log_prob_call.h"

HARNESS_TEST(test_refusals) {
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
  GRADIENTS_REFUSED("exps are kept for a whole head",
                    (a.kept = (Exponentials){exps, a.log_prob}, a.call.shard.vocab_size = 5));
  GRADIENTS_REFUSED("5 rows from 2 on are no part", a.call.shard = ((VocabShard){2, 6}));
  GRADIENTS_REFUSED("dweight is bf16 [5, 4] for a weight of",
                    (a.call.shard.vocab_size = 5, a.call.dweight.dtype = DTYPE_BF16));
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
  KEEP_REFUSED("is fp32 [2] for 3 tokens", a.outputs.token_z_loss = two);
  KEEP_REFUSED("exps is", e.exps = a.x);
  KEEP_REFUSED("row_sum is fp32 [2] where [3]", e.row_sum = two);
  keep_exponentials(h->backend, forward, kept); // as they are, these calls are not refused
  log_prob_gradients(h->backend, g);
  assert_fails(h, "entropy_weights is fp32 [2]", loss_of_logits(h->backend, all, two));
}

// A head of one part is as a whole one, in chunks too; and a part without rows adds nothing to dx.
HARNESS_TEST(test_shards) {
  enum { ROWS = 37, HIDDEN = 24, VOCAB = 301 };
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 1);
  loss_problem_add(h, &p, TERM_ENTROPY | TERM_TOKEN_WEIGHTS | TERM_SOFTCAP | TERM_BIAS | TERM_MEAN);
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, 16);
  a.shard.vocab_size = VOCAB;
  LogProbGradients g = log_prob_call(h, &a, vector_from(h, DTYPE_F32, p.entropy_weights, ROWS), false);
  log_prob_gradients(h->backend, g);
  reference_loss(&p);
  check_loss(h, "one part", &a, &p, 0, (LossBefore){0}, with_size(within(16, HIDDEN + VOCAB), 8),
             with_size(within_stored(h, 8, 0), p.scale));
  g.call.shard.first = VOCAB;
  g.call.weight = tensor_rows(a.weight, 0, 0), g.call.bias = tensor_rows(a.bias, 0, 0);
  g.call.dweight = g.call.dbias = (Tensor){0};
  log_prob_gradients(h->backend, g);
  check_values(h, "dx", g.call.dx, host_values(h, ROWS * HIDDEN), within(0, 1));
}

// A block's gradient takes half of what a chunk's exponentials do, and what is held beside it is small.
HARNESS_TEST(test_held_bytes) {
  enum { ROWS = 512, HIDDEN = 8, CHUNK = 256, VOCAB = 64 * LCE_TILE_COLUMNS };
  Harness *plan = &(Harness){.backend = plan_backend_create(ON_CPU, DTYPE_F32), .dtype = DTYPE_F32};
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(plan, &p, LCE_FUSED, CHUNK);
  Ledger *ledger = &plan->backend->memory.ledger;
  LogProbGradients g = log_prob_call(plan, &a, (Tensor){0}, false);
  size_t before = ledger->stack;
  ledger_reset_peak(ledger);
  log_prob_gradients(plan->backend, g);
  size_t half = CHUNK * VOCAB * sizeof(float) / 2, held = ledger->stack_peak - before;
  assert_in_range(held, half, half + half / 4);
  backend_destroy(plan->backend);
}

TEST_MAIN(run_on_backends())
