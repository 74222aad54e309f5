// Gradients of known log-probabilities (tools/torch/liblce/log_probs.h) against float64: every term of the loss, and
// rows that are hard.

#include "tests/pytorch/log_prob_call.h"

// --- terms, in ways that each alone and all at once must not disturb ---------------------------------------

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  bool kept, apart, accumulate, narrow;
} Way;

static void check_problem(Harness *h, ReferenceLoss *p, const char *what, Way way) {
  reference_gradients(h, p);
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, way.chunk);
  LossBefore before = {0};
  if (way.accumulate) loss_call_adds(h, &a, &before);
  Tensor entropy_weights = {0};
  if (p->entropy_weights) entropy_weights = vector_from(h, DTYPE_F32, p->entropy_weights, p->rows);
  LogProbGradients g = log_prob_call(h, &a, entropy_weights, way.kept), x_alone;
  if (way.narrow) g.call.dweight = a.dweight = poisoned(h, h->dtype, p->vocab, p->hidden);
  x_alone = g;
  x_alone.call.dweight = x_alone.call.dbias = (Tensor){0};
  if (way.apart) g.call.dx = (Tensor){0};
  log_prob_gradients(h->backend, g);
  if (way.apart) log_prob_gradients(h->backend, x_alone);
  reference_loss(p);
  check_loss(h, what, &a, p, 0, before,
             with_size(within(16, (double)(p->hidden + p->vocab)), 8 + 64 * p->z_loss),
             with_size(within_stored(h, 8, 0), p->scale * (1 + 8 * p->z_loss)));
  harness_clear(h);
}

static void check_terms(Harness *h, int terms, bool ignored, Way way) {
  ReferenceLoss p = loss_problem(h, way.rows, way.hidden, way.vocab, 2);
  loss_problem_add(h, &p, terms);
  for (int64_t n = 1; n < way.rows && ignored; n += 3) p.targets[n] = IGNORE_INDEX;
  char what[64];
  snprintf(what, sizeof what, "terms %d%s", terms, way.kept ? ", kept" : "");
  check_problem(h, &p, what, way);
}

HARNESS_TEST(test_terms) {
  static const Way ways[] = {{7, 13, 5, 5, .kept = false},
                             {131, 40, 515, 37, .accumulate = true},
                             {67, 33, 2053, 64, .apart = true},
                             {67, 33, 2053, 64, .narrow = true}};
  const int all = (2 * TERM_MEAN - 1) & ~TERM_SMOOTHING;
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
    for (int kept = 0; kept < 2; kept++) {
      Way way = ways[i];
      way.kept = kept;
      if (kept && way.apart) continue; // the exponentials serve once
      for (int term = TERM_Z_LOSS; term <= TERM_MEAN; term *= 2)
        if (!kept || term != TERM_SOFTCAP) check_terms(h, term, term & TERM_TOKEN_WEIGHTS, way);
      check_terms(h, kept ? all & ~TERM_SOFTCAP : all, true, way);
    }
}

// Each number of LOSS_TERMS makes the gradients that it makes in the forward pass, or is refused.
static void check_number(Harness *h, const char *name, size_t offset, bool kept, const char *refused) {
  enum { ROWS = 3, HIDDEN = 5, VOCAB = 11 };
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, ROWS);
  linear_cross_entropy(h->backend, a);
  const double *without = values_of(h, a.dx);
  const float value = strcmp(name, "label_smoothing") ? 1.5f : 0.5f;
  memcpy((char *)&a.terms + offset, &value, sizeof value);
  if (strstr(refused, name)) {
    assert_fails(h, "", log_prob_gradients(h->backend, log_prob_call(h, &a, (Tensor){0}, kept)));
    return;
  }
  linear_cross_entropy(h->backend, a);
  const double *want = values_of(h, a.dx);
  log_prob_gradients(h->backend, log_prob_call(h, &a, (Tensor){0}, kept));
  char what[64];
  snprintf(what, sizeof what, "dx with LossTerms.%s%s", name, kept ? ", kept" : "");
  assert_true(relative_distance(want, without, ROWS * HIDDEN) > 1e-3);
  check_values(h, what, a.dx, want, within_stored(h, 16, HIDDEN + VOCAB));
}

HARNESS_TEST(test_every_number_alone) {
  for (int kept = 0; kept < 2; kept++) {
    const char *refused = kept ? "label_smoothing softcap" : "label_smoothing"; // which log p does not say
#define CHECK_NUMBER(term, ...)                                                                              \
  check_number(h, #term, offsetof(LossTerms, term), kept, refused);                                          \
  harness_clear(h);
    LOSS_TERMS(CHECK_NUMBER)
  }
}

// --- hard rows ---------------------------------------------------------------------------------------------

static ReferenceLoss make_problem(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, double deviation) {
  ReferenceLoss p = loss_problem(h, rows, hidden, vocab, deviation);
  p.scale = 1.0 / (double)rows;
  reference_gradients(h, &p);
  return p;
}

// The gradients alone, maybe from exponentials that the forward pass has kept.
static LinearCrossEntropy by_log_probs(Harness *h, const ReferenceLoss *p, Tensor entropy_weights,
                                       bool kept) {
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, p->rows);
  log_prob_gradients(h->backend, log_prob_call(h, &a, entropy_weights, kept));
  a.loss = (Tensor){0}, a.outputs = (TokenOutputs){0};
  return a;
}

static void check_hard_rows(Harness *h, const char *what, ReferenceLoss *p, double size) {
  for (int kept = 0; kept < 2; kept++) {
    LinearCrossEntropy a = by_log_probs(h, p, (Tensor){0}, kept);
    reference_loss(p);
    Tolerance gradients = with_size(within_stored(h, 8, 0), size * p->scale);
    char which[64];
    snprintf(which, sizeof which, "%s%s", what, kept ? ", kept" : "");
    check_loss(h, which, &a, p, 0, (LossBefore){0}, gradients, gradients);
  }
}

HARNESS_TEST(test_repaired_rows) {
  ReferenceLoss p = make_problem(h, 9, 31, 1511, 1);
  loss_problem_lead_far(&p);
  check_hard_rows(h, "repaired rows", &p, 1);
}

// p - 1 keeps its digits, which are all that row y[n] of dW holds in column n.
HARNESS_TEST(test_nearly_certain) {
  ReferenceLoss p = make_problem(h, 5, 13, 17, 0.02);
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)n;
    loss_problem_lead(&p, n, n + 8, 0);
  }
  for (int64_t n = 0; n < p.rows; n++) p.weight[n * p.hidden + n] = 20; // e^-20 = 2e-9 for each non-target
  for (int64_t n = 0; n < p.rows; n++) p.weight[(n + 8) * p.hidden + n] = -3;
  for (int kept = 0; kept < 2; kept++) {
    const double *dweight = values_of(h, by_log_probs(h, &p, (Tensor){0}, kept).dweight);
    reference_loss(&p);
    for (int64_t entry = 0; entry < p.rows * p.hidden; entry += p.hidden + 1)
      assert_true(fabs(dweight[entry] / p.dweight[entry] - 1) <=
                  32 * dtype_epsilon(DTYPE_F32) + dtype_epsilon(h->dtype));
  }
}

// An offset of all logits in a row, at which bf16 logits would differ by 32: it costs fp32's digits at 6400.
HARNESS_TEST(test_common_offset) {
  ReferenceLoss p = make_problem(h, 9, 21, 333, 1);
  for (int64_t n = 0; n < p.rows; n++) p.x[n * p.hidden] = 64;
  for (int64_t v = 0; v < p.vocab; v++) p.weight[v * p.hidden] = 100;
  LinearCrossEntropy kept = by_log_probs(h, &p, (Tensor){0}, true);
  reference_loss(&p);
  Tolerance gradients = with_size(within_stored(h, 8, 0), 1600 * p.scale);
  check_loss(h, "a common offset, kept", &kept, &p, 0, (LossBefore){0}, gradients, gradients);
}

// A repaired row's p come from the logits of its sum: they add up to 1, times an offset that all logits share.
HARNESS_TEST(test_repaired_rows_with_an_offset) {
  ReferenceLoss p = make_problem(h, 9, 400, 333, 4);
  p.temperature = 0.1;
  for (int64_t n = 0; n < p.rows; n++) p.x[n * p.hidden] = 8;
  for (int64_t v = 0; v < p.vocab; v++) p.weight[v * p.hidden] = 16;
  LinearCrossEntropy a = by_log_probs(h, &p, (Tensor){0}, false);
  const double *dx = values_of(h, a.dx);
  for (int64_t n = 0; n < p.rows; n++) // p's sum less 1, times 16 / T
    assert_true(fabs(dx[n * p.hidden]) <= p.scale * (h->dtype == DTYPE_F32 ? 0.005 : 1));
}

// Logits of 2^17 / T that differ by whole numbers, in exact arithmetic: nothing of them is lost, nor is a logit that
// is far below them.
HARNESS_TEST(test_low_temperature) {
  enum { ROWS = 9, HIDDEN = 8, VOCAB = 411 };
  ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 0);
  p.temperature = 0x1p-17;
  p.entropy_weights = random_values(h, ROWS, 1);
  for (int i = 0; i < ROWS * HIDDEN; i++) p.x[i] = i % HIDDEN == 0;
  for (int n = 0; n < ROWS; n++) p.x[n * HIDDEN + 1] = (1 + n) * 0x1p-17, p.targets[n] = 7 * (3 * n + 1);
  for (int v = 0; v < VOCAB; v += 7) p.weight[v * HIDDEN] = 1, p.weight[v * HIDDEN + 1] = v % 5;
  Tensor entropy_weights = vector_from(h, DTYPE_F32, p.entropy_weights, ROWS);
  for (int kept = 0; kept < 2; kept++) {
    LinearCrossEntropy a = by_log_probs(h, &p, entropy_weights, kept);
    reference_loss(&p);
    Tolerance gradients = with_size(within_stored(h, 8, 0), p.scale);
    check_loss(h, "a low temperature", &a, &p, 0, (LossBefore){0}, gradients, gradients);
  }
}

// Gradients stay finite where fp32 rounds a logit over T by far more than 1, even with wrong log-probabilities.
HARNESS_TEST(test_lowest_temperature) {
  ReferenceLoss p = make_problem(h, 40, 16, 300, 30);
  p.temperature = 0x1p-19;
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, p.rows);
  LogProbGradients wrong = log_prob_call(h, &a, (Tensor){0}, false);
  wrong.log_prob = vector_from(h, DTYPE_F32, host_values(h, p.rows), p.rows);
  log_prob_gradients(h->backend, wrong);
  const LinearCrossEntropy ways[] = {a, by_log_probs(h, &p, (Tensor){0}, false),
                                     by_log_probs(h, &p, (Tensor){0}, true)};
  for (int way = 0; way < 3; way++) {
    const double *dx = values_of(h, ways[way].dx), *dweight = values_of(h, ways[way].dweight);
    for (int64_t i = 0; i < p.rows * p.hidden; i++) assert_true(isfinite(dx[i]) && isfinite(dweight[i]));
  }
}

// A bias of minus infinity at every second target gives, from kept exponentials, the gradients of one of a large
// number.
HARNESS_TEST(test_masked_targets) {
  enum { ROWS = 21, HIDDEN = 16, VOCAB = 611 };
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 1);
  p.scale = 1.0 / ROWS;
  loss_problem_add(h, &p, TERM_BIAS | TERM_ENTROPY);
  for (int n = 0; n < ROWS; n++) p.targets[n] = 4 * n;
  for (int v = 0; v < VOCAB; v += 8) p.bias[v] = -98304;
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, ROWS);
  double *bias = copied_values(h, p.bias, VOCAB);
  for (int v = 0; v < VOCAB; v += 8) bias[v] = -INFINITY;
  a.bias = vector_from(h, h->dtype, bias, VOCAB);
  Tensor entropy_weights = vector_from(h, DTYPE_F32, p.entropy_weights, ROWS);
  log_prob_gradients(h->backend, log_prob_call(h, &a, entropy_weights, true));
  reference_loss(&p);
  const double *log_prob = values_of(h, a.outputs.log_prob);
  for (int n = 0; n < ROWS; n += 2) assert_true(log_prob[n] == -INFINITY);
  a.loss = a.outputs.log_prob = a.outputs.token_z_loss = (Tensor){0};
  check_loss(h, "masked targets", &a, &p, 0, (LossBefore){0}, with_size(within(16, HIDDEN + VOCAB), 1),
             with_size(within_stored(h, 8, 0), 2 * p.scale));
}

// Without them other entries that a bias of minus infinity masks get no gradient, under a saturated soft-cap too.
HARNESS_TEST(test_masked_and_saturated) {
  enum { ROWS = 37, HIDDEN = 24, VOCAB = 611 };
  for (int capped = 0; capped < 2; capped++) {
    ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, capped ? 60 : 1);
    double *bias = host_values(h, VOCAB);
    for (int v = 0; v < VOCAB; v++) bias[v] = v % 3 ? 0 : -INFINITY;
    for (int n = 0; n < ROWS; n++) p.targets[n] = 1 + 3 * (n % 200);
    LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, ROWS);
    a.bias = vector_from(h, h->dtype, bias, VOCAB);
    a.terms.softcap = capped ? 1 : 0;
    a.dweight = poisoned(h, h->dtype, VOCAB, HIDDEN), a.dbias = poisoned_vector(h, DTYPE_F32, VOCAB);
    Tensor entropy_weights = vector_from(h, DTYPE_F32, random_values(h, ROWS, 1), ROWS);
    log_prob_gradients(h->backend, log_prob_call(h, &a, entropy_weights, false));
    const double *dbias = values_of(h, a.dbias);
    for (int v = 0; v < VOCAB; v++) assert_true(v % 3 ? isfinite(dbias[v]) : dbias[v] == 0);
  }
}

TEST_MAIN(run_on_backends())
