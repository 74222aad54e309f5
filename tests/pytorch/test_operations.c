// The package's operations (tools/torch/liblce/operations.h), and gradients of log-probabilities by value.

#include "tests/pytorch/log_prob_call.h"

HARNESS_TEST(test_read_targets) {
  enum { TOKENS = 300, VOCAB = 7 };
  // Of the wide ones two are wrong only above their lower 32 bits.
  const int64_t few[] = {0, 6, -100, 7, -1, -99, INT32_MAX, INT32_MIN, 1LL << 32, (1LL << 33) + 3};
  enum { FEW = sizeof few / sizeof *few };
  for (int wide = 0; wide < 2; wide++) {
    int64_t ids[TOKENS];
    int32_t narrow[TOKENS];
    for (int n = 0; n < TOKENS; n++) narrow[n] = (int32_t)(ids[n] = few[n % (wide ? FEW : FEW - 2)]);
    Tensor given =
        memory_push_1d(&h->backend->memory, "ids", MEMORY_TABLES, wide ? DTYPE_I64 : DTYPE_I32, TOKENS);
    backend_to_device(h->backend, given, wide ? (void *)ids : narrow);
    double *ones = host_values(h, TOKENS);
    for (int n = 0; n < TOKENS; n++) ones[n] = 1;
    Tensor targets = poisoned_vector(h, DTYPE_I32, TOKENS), loss = vector_from(h, DTYPE_F32, ones, TOKENS);
    read_targets(h->backend, (ReadTargets){.targets = targets, .ids = given, .vocab_size = VOCAB});
    read_targets(h->backend, (ReadTargets){.loss = loss, .ids = given, .vocab_size = VOCAB});
    double *got = values_of(h, targets), *losses = values_of(h, loss);
    for (int n = 0; n < TOKENS; n++) {
      bool counts = ids[n] >= 0 && ids[n] < VOCAB;
      assert_true(got[n] == (counts ? (double)ids[n] : IGNORE_INDEX));
      assert_true(counts || ids[n] == IGNORE_INDEX ? losses[n] == 1 : isnan(losses[n]));
    }
  }
}

// From every dtype to every other, in place too, in pieces of 8 elements and one by one.
HARNESS_TEST(test_scale_by) {
  const Dtype dtypes[] = {DTYPE_F32, h->dtype};
  for (int i = 0; i < 32; i++) {
    int64_t count = i & 1 ? 1013 : 1024;
    Dtype from = dtypes[i >> 1 & 1], to = dtypes[i >> 2 & 1];
    bool in_place = i & 8;
    double factor = i & 16 ? -0.75 : 1, *values = random_values(h, count, 1);
    if (in_place && from != to) continue;
    Tensor x = vector_from(h, from, values, count), out = in_place ? x : poisoned_vector(h, to, count);
    Tensor by = vector_from(h, DTYPE_F32, &factor, 1);
    scale_by(h->backend, (ScaleBy){.out = out, .x = x, .factor = by});
    for (int64_t n = 0; n < count; n++) values[n] *= factor;
    check_values(h, "scale_by", out, values, within(1, 1));
  }
}

HARNESS_TEST(test_refused_ids) {
  Tensor v3 = poisoned_vector(h, DTYPE_F32, 3), ids = poisoned_vector(h, DTYPE_I32, 3);
  assert_fails(h, "ids is fp32 [3] where int32 or int64",
               read_targets(h->backend, (ReadTargets){.targets = ids, .ids = v3, .vocab_size = 5}));
}

// --- gradients of known log-probabilities, in ways that each term and all of them at once must not disturb --

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

// Logits far above the target's, and far below.
HARNESS_TEST(test_repaired_rows) {
  for (int kept = 0; kept < 2; kept++) {
    ReferenceLoss p = loss_problem(h, 9, 31, 1511, 1);
    loss_problem_lead(&p, 1, 1, 500);
    loss_problem_lead(&p, 5, p.vocab - 1, 120);
    loss_problem_lead(&p, 7, 0, 60);
    reference_gradients(h, &p);
    LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, p.rows);
    log_prob_gradients(h->backend, log_prob_call(h, &a, (Tensor){0}, kept));
    a.loss = (Tensor){0}, a.outputs = (TokenOutputs){0};
    reference_loss(&p);
    Tolerance gradients = with_size(within_stored(h, 8, 0), p.scale);
    check_loss(h, kept ? "repaired rows, kept" : "repaired rows", &a, &p, 0, (LossBefore){0}, gradients,
               gradients);
    harness_clear(h);
  }
}

TEST_MAIN(run_on_backends())
