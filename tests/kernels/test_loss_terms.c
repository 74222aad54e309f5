// Every term of the loss against float64: alone, in pairs, and all at once, in the fused mode (several
// chunks) and the materialized one, with and without ignored targets, on shapes that nothing divides.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/linear_cross_entropy.h"
#include "tests/harness.h"
#include "tests/reference.h"

// --- terms, each of which may be on ------------------------------------------------------------------------

enum {
  TERM_SMOOTHING = 1,
  TERM_Z_LOSS = 2,
  TERM_SOFTCAP = 4,
  TERM_TEMPERATURE = 8,
  TERM_CLASS_WEIGHTS = 16,
  TERM_TOKEN_WEIGHTS = 32,
  TERM_ENTROPY = 64,
  TERM_BIAS = 128,
  TERM_MEAN = 256,
  TERM_IGNORED = 512, // some targets are
  TERM_ROWS = 1024,   // and the counted ones are named
  TERMS = 11
};

static const char *const term_names[TERMS] = {"smoothing",     "z-loss",        "soft-cap", "temperature",
                                              "class weights", "token weights", "entropy",  "bias",
                                              "mean",          "ignored",       "rows"};

static const char *name_of(int terms) {
  static char name[256];
  name[0] = 0;
  for (int i = 0; i < TERMS; i++)
    if (terms >> i & 1) strcat(strcat(name, name[0] ? " + " : ""), term_names[i]);
  return name[0] ? name : "plain";
}

static double *positive_values(Harness *h, int64_t count) {
  double *values = random_values(h, count, 1);
  for (int64_t i = 0; i < count; i++) values[i] = 0.25 + fabs(values[i]);
  return values;
}

typedef struct {
  ReferenceLoss r;
  double *x, *weight, *bias; // what r reads
  int32_t *targets, *counted_rows;
  int64_t counted;
} Problem;

static Problem make_problem(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab) {
  Problem p = {.x = random_values(h, rows * hidden, 1),
               .weight = random_values(h, vocab * hidden, 2 / sqrt((double)hidden)),
               .targets = random_ids(h, rows, vocab),
               .counted_rows = random_ids(h, rows, 1)};
  p.r = (ReferenceLoss){.rows = rows, .hidden = hidden, .vocab = vocab, .scale = 0.5};
  if (terms & TERM_SMOOTHING) p.r.label_smoothing = (float)0.1;
  if (terms & TERM_Z_LOSS) p.r.z_loss = (float)0.02;
  if (terms & TERM_SOFTCAP) p.r.softcap = 3;
  if (terms & TERM_TEMPERATURE) p.r.temperature = 1.5;
  if (terms & TERM_CLASS_WEIGHTS) p.r.class_weights = positive_values(h, vocab);
  if (terms & TERM_TOKEN_WEIGHTS) p.r.token_weights = random_values(h, rows, 1);
  if (terms & TERM_ENTROPY) p.r.entropy_weights = random_values(h, rows, 1);
  if (terms & TERM_BIAS) p.bias = random_values(h, vocab, 1);
  p.r.mean = terms & TERM_MEAN;
  for (int64_t n = 0; n < rows; n++)
    if ((terms & (TERM_IGNORED | TERM_ROWS)) && n % 3 == 1)
      p.targets[n] = IGNORE_INDEX;
    else
      p.counted_rows[p.counted++] = (int32_t)n;
  p.r.x = p.x, p.r.weight = p.weight, p.r.bias = p.bias, p.r.targets = p.targets;
  double **const per_token[] = {&p.r.loss,    &p.r.token_z_loss, &p.r.log_prob, &p.r.logsumexp,
                                &p.r.entropy, &p.r.max_logit,    &p.r.predicted};
  for (size_t i = 0; i < sizeof per_token / sizeof *per_token; i++) *per_token[i] = host_values(h, rows);
  return p;
}

static void with_gradients(Harness *h, Problem *p) {
  p->r.dx = host_values(h, p->r.rows * p->r.hidden);
  p->r.dweight = host_values(h, p->r.vocab * p->r.hidden);
  if (p->bias) p->r.dbias = host_values(h, p->r.vocab);
}

static double objective(void *context) {
  ReferenceLoss r = ((Problem *)context)->r;
  r.dx = r.dweight = r.dbias = NULL;
  reference_loss(&r);
  return r.objective;
}

// --- the reference itself ----------------------------------------------------------------------------------

// The float64 gradients are the slopes of the float64 objective, for all terms at once.
static void test_reference(void **state) {
  Harness *h = *state;
  for (int all = 0; all < 2; all++) {
    int terms = all ? (1 << TERMS) - 1 : 0;
    Problem p = make_problem(h, terms, 5, 7, 11);
    with_gradients(h, &p);
    reference_loss(&p.r);
    Tolerance close = of_size(within(4, 16), p.r.scale);
    Tensor dx = tensor_from(h, DTYPE_F32, p.r.dx, 5, 7),
           dweight = tensor_from(h, DTYPE_F32, p.r.dweight, 11, 7);
    check_gradient(h, "reference dx", dx, NULL, p.x, objective, &p, close);
    check_gradient(h, "reference dweight", dweight, NULL, p.weight, objective, &p, close);
    if (!all) continue;
    Tensor dbias = vector_from(h, DTYPE_F32, p.r.dbias, 11);
    check_gradient(h, "reference dbias", dbias, NULL, p.bias, objective, &p, close);
  }
}

// --- the layer ---------------------------------------------------------------------------------------------

static Tensor optional_vector(Harness *h, const double *values, int64_t count) {
  if (!values) return (Tensor){0};
  return vector_from(h, DTYPE_F32, (double *)values, count);
}

typedef struct {
  LceMode mode;
  int64_t chunk;
  bool forward_only, accumulate, outputs;
} Way;

static void check_case(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab, Way way) {
  Problem p = make_problem(h, terms, rows, hidden, vocab);
  ReferenceLoss *r = &p.r;
  LinearCrossEntropy a = {.mode = way.mode,
                          .chunk = way.chunk,
                          .loss = poisoned_vector(h, DTYPE_F32, rows),
                          .x = tensor_from(h, h->dtype, p.x, rows, hidden),
                          .weight = tensor_from(h, h->dtype, p.weight, vocab, hidden),
                          .targets = ids_from(h, p.targets, rows),
                          .token_weights = optional_vector(h, r->token_weights, rows),
                          .entropy_weights = optional_vector(h, r->entropy_weights, rows),
                          .terms = {.label_smoothing = (float)r->label_smoothing,
                                    .z_loss = (float)r->z_loss,
                                    .softcap = (float)r->softcap,
                                    .temperature = (float)r->temperature,
                                    .class_weights = optional_vector(h, r->class_weights, vocab)},
                          .scale = (float)r->scale,
                          .mean = r->mean,
                          .accumulate = way.accumulate};
  if (p.bias) a.bias = vector_from(h, h->dtype, p.bias, vocab);
  if (terms & TERM_ROWS) a.rows = ids_from(h, p.counted_rows, rows), a.counted = p.counted;
  a.outputs.z_loss = poisoned_vector(h, DTYPE_F32, rows);
  a.outputs.log_prob = poisoned_vector(h, DTYPE_F32, rows);
  a.outputs.logsumexp = poisoned_vector(h, DTYPE_F32, rows);
  if (way.outputs) {
    a.outputs.entropy = poisoned_vector(h, DTYPE_F32, rows);
    a.outputs.max_logit = poisoned_vector(h, DTYPE_F32, rows);
    a.outputs.predicted = poisoned_vector(h, DTYPE_I32, rows);
    a.outputs.correct = poisoned_vector(h, DTYPE_F32, rows);
  }
  double *before = NULL, *bias_before = NULL;
  if (!way.forward_only) {
    with_gradients(h, &p);
    before = way.accumulate ? random_values(h, vocab * hidden, 1) : host_values(h, vocab * hidden);
    bias_before = way.accumulate ? random_values(h, vocab, 1) : host_values(h, vocab);
    a.dx = poisoned(h, h->dtype, rows, hidden);
    a.dweight = way.accumulate ? tensor_from(h, DTYPE_F32, before, vocab, hidden)
                               : poisoned(h, DTYPE_F32, vocab, hidden);
    if (p.bias)
      a.dbias = way.accumulate ? vector_from(h, DTYPE_F32, bias_before, vocab)
                               : poisoned_vector(h, DTYPE_F32, vocab);
  }
  linear_cross_entropy(h->backend, a);
  reference_loss(r);

  // Where logits are stored their rounding shows; the anchored way and fp32 have none of it.
  bool exact = way.mode == LCE_FUSED;
  double size = 8 + 64 * r->z_loss; // of the sums that make a loss
  Tolerance told =
      of_size(exact ? within(16, (double)(hidden + vocab)) : within_stored(h, 16, (double)hidden), size);
  const struct {
    const char *name;
    Tensor got;
    const double *want;
  } outputs[] = {{"loss", a.loss, r->loss},
                 {"z_loss", a.outputs.z_loss, r->token_z_loss},
                 {"log_prob", a.outputs.log_prob, r->log_prob},
                 {"logsumexp", a.outputs.logsumexp, r->logsumexp},
                 {"entropy", a.outputs.entropy, r->entropy},
                 {"max_logit", a.outputs.max_logit, r->max_logit}};
  char what[320];
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    if (!tensor_exists(outputs[i].got)) continue;
    snprintf(what, sizeof what, "%s (%s, %s)", outputs[i].name, name_of(terms), lce_mode_name(way.mode));
    check_values(h, what, outputs[i].got, outputs[i].want, told);
  }
  if (way.outputs && (exact || h->dtype == DTYPE_F32)) {
    double *predicted = values_of(h, a.outputs.predicted), *correct = values_of(h, a.outputs.correct);
    for (int64_t n = 0; n < rows; n++) {
      assert_true(predicted[n] == r->predicted[n]);
      assert_true(correct[n] == (r->predicted[n] == p.targets[n]));
    }
  }
  if (way.forward_only) return;
  double gradient_size = r->scale * (1 + 8 * r->z_loss);
  for (int64_t i = 0; i < vocab * hidden; i++) r->dweight[i] += before[i];
  snprintf(what, sizeof what, "dx (%s, %s)", name_of(terms), lce_mode_name(way.mode));
  check_values(h, what, a.dx, r->dx, of_size(within_stored(h, 8, (double)(hidden + vocab)), gradient_size));
  snprintf(what, sizeof what, "dweight (%s, %s)", name_of(terms), lce_mode_name(way.mode));
  check_values(h, what, a.dweight, r->dweight,
               of_size(within_stored(h, 8, (double)(hidden + rows)), gradient_size));
  if (!p.bias) return;
  for (int64_t v = 0; v < vocab; v++) r->dbias[v] += bias_before[v];
  snprintf(what, sizeof what, "dbias (%s, %s)", name_of(terms), lce_mode_name(way.mode));
  check_values(h, what, a.dbias, r->dbias,
               of_size(within_stored(h, 8, (double)(hidden + rows)), gradient_size));
}

static void check_both_modes(void **state, int terms, int64_t rows, int64_t hidden, int64_t vocab, Way way) {
  for (int mode = 0; mode < 2; mode++) {
    way.mode = mode ? LCE_MATERIALIZED : LCE_FUSED;
    check_case(*state, terms, rows, hidden, vocab, way);
    harness_pop(state);
  }
}

// The named rows are the fused mode's way to ignore; without it ignored targets pass through the operations.
static void test_alone_and_in_pairs(void **state) {
  check_both_modes(state, 0, 29, 17, 101, (Way){.chunk = 7});
  for (int i = 0; i < TERMS; i++)
    for (int j = i; j < TERMS; j++)
      check_both_modes(state, 1 << i | 1 << j, 29, 17, 101, (Way){.chunk = 7, .outputs = (i + j) % 2});
}

static void test_all_at_once(void **state) {
  const int64_t shapes[][4] = {
      {1, 1, 1, 1}, {7, 13, 1, 5}, {5, 3, 1031, 2}, {131, 40, 515, 37}, {67, 33, 2053, 64}};
  const int everything = (1 << TERMS) - 1;
  const int anchored = everything & ~(TERM_SOFTCAP | TERM_ENTROPY | TERM_BIAS);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int variant = 0; variant < 4; variant++) {
      Way way = {.chunk = shapes[i][3], .accumulate = variant & 1};
      int terms = variant & 2 ? anchored : everything;
      way.outputs = terms == everything;
      check_both_modes(state, terms, shapes[i][0], shapes[i][1], shapes[i][2], way);
    }
}

static void test_forward_only(void **state) {
  const int terms[] = {0, TERM_SMOOTHING | TERM_Z_LOSS | TERM_ROWS, TERM_SOFTCAP | TERM_IGNORED,
                       TERM_BIAS | TERM_SMOOTHING | TERM_CLASS_WEIGHTS | TERM_TEMPERATURE};
  for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
    for (int outputs = 0; outputs < 2; outputs++)
      check_both_modes(state, terms[i], 31, 19, 203,
                       (Way){.chunk = 8, .forward_only = true, .outputs = outputs});
}

// No token counts: nothing is divided by the sum of no weights.
static void test_nothing_counts(void **state) {
  Harness *h = *state;
  const int64_t rows = 4, hidden = 6, vocab = 10;
  int32_t targets[] = {IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX};
  double *weight = random_values(h, vocab * hidden, 1), *x = random_values(h, rows * hidden, 1);
  double *zeros = host_values(h, vocab * hidden);
  for (int mode = 0; mode < 2; mode++) {
    LinearCrossEntropy a = {.mode = mode ? LCE_MATERIALIZED : LCE_FUSED,
                            .chunk = 3,
                            .loss = poisoned_vector(h, DTYPE_F32, rows),
                            .dx = poisoned(h, h->dtype, rows, hidden),
                            .dweight = poisoned(h, DTYPE_F32, vocab, hidden),
                            .x = tensor_from(h, h->dtype, x, rows, hidden),
                            .weight = tensor_from(h, h->dtype, weight, vocab, hidden),
                            .targets = ids_from(h, targets, rows),
                            .terms = {.label_smoothing = 0.1f, .z_loss = 0.1f},
                            .scale = 1,
                            .mean = true};
    linear_cross_entropy(h->backend, a);
    check_values(h, "loss of nothing", a.loss, zeros, within(0, 1));
    check_values(h, "dx of nothing", a.dx, zeros, within(0, 1));
    check_values(h, "dweight of nothing", a.dweight, zeros, within(0, 1));
  }
}

static void test_refusals(void **state) {
  Harness *h = *state;
  Tensor x = poisoned(h, h->dtype, 3, 4), weight = poisoned(h, h->dtype, 5, 4);
  Tensor loss = poisoned_vector(h, DTYPE_F32, 3), targets = ids_from(h, (int32_t[]){0, 1, 2}, 3);
  const LinearCrossEntropy a = {.chunk = 1, .loss = loss, .x = x, .weight = weight, .targets = targets};
  LinearCrossEntropy b = a;
  b.terms.label_smoothing = 1.5f;
  assert_fails(h, "label_smoothing is 1.5, which is not in [0, 1]", linear_cross_entropy(h->backend, b));
  b = a, b.terms.z_loss = -1;
  assert_fails(h, "z_loss is -1", linear_cross_entropy(h->backend, b));
  b = a, b.terms.softcap = NAN;
  assert_fails(h, "softcap is nan", linear_cross_entropy(h->backend, b));
  b = a, b.terms.class_weights = loss;
  assert_fails(h, "class_weights is fp32 [3] where [5] is needed", linear_cross_entropy(h->backend, b));
  b = a, b.token_weights = poisoned_vector(h, DTYPE_F32, 4);
  assert_fails(h, "token_weights is fp32 [4]", linear_cross_entropy(h->backend, b));
  b = a, b.dbias = poisoned_vector(h, DTYPE_F32, 5);
  assert_fails(h, "a bias has a gradient where x has one", linear_cross_entropy(h->backend, b));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_reference, harness_pop),
      cmocka_unit_test_teardown(test_alone_and_in_pairs, harness_pop),
      cmocka_unit_test_teardown(test_all_at_once, harness_pop),
      cmocka_unit_test_teardown(test_forward_only, harness_pop),
      cmocka_unit_test_teardown(test_nothing_counts, harness_pop),
      cmocka_unit_test_teardown(test_refusals, harness_pop),
  };
  return run_on_backends(tests, sizeof tests / sizeof *tests);
}
