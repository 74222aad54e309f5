// Every term of the loss against float64, alone, in pairs, all at once, in both modes; and the float64
// reference against PyTorch's values and gradients (tests/golden/make_loss_golden.py).

#include <cjson/cJSON.h>

#include "tests/loss_problem.h"
#include "tests/process.h"

enum { TERM_IGNORED = 512, TERMS = 10 }; // some targets are ignored

static ReferenceLoss make_problem(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab) {
  ReferenceLoss p = loss_problem(h, rows, hidden, vocab, 2);
  loss_problem_add(h, &p, terms);
  for (int64_t n = 1; n < rows && terms & TERM_IGNORED; n += 3) p.targets[n] = IGNORE_INDEX;
  return p;
}

static double number(const cJSON *object, const char *key) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
  if (!cJSON_IsNumber(item)) fail_msg("loss.json lacks the number %s", key);
  return item->valuedouble;
}

static double *elements(Harness *h, const cJSON *object, const char *key, int64_t count) {
  const cJSON *array = cJSON_GetObjectItemCaseSensitive(object, key), *item;
  if (cJSON_GetArraySize(array) != count) fail_msg("%s in loss.json holds no %d elements", key, (int)count);
  double *values = host_values(h, count);
  int64_t i = 0;
  cJSON_ArrayForEach(item, array) values[i++] = item->valuedouble;
  return values;
}

// Inputs that a case does without are NULL.
static ReferenceLoss golden_case(Harness *h, const cJSON *document, const cJSON *item) {
  ReferenceLoss r = {.rows = (int64_t)number(document, "rows"),
                     .hidden = (int64_t)number(document, "hidden"),
                     .vocab = (int64_t)number(document, "vocab"),
                     .label_smoothing = number(item, "label_smoothing"),
                     .z_loss = number(item, "z_loss"),
                     .softcap = number(item, "softcap"),
                     .temperature = number(item, "temperature"),
                     .scale = number(item, "scale"),
                     .mean = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(item, "mean")),
                     .objective = number(item, "objective")};
  double *targets = elements(h, cJSON_HasObjectItem(item, "targets") ? item : document, "targets", r.rows);
  int32_t *ids = random_ids(h, r.rows, 1);
  for (int64_t n = 0; n < r.rows; n++) ids[n] = (int32_t)targets[n];
  r.targets = ids;
  for (const LossField *f = loss_fields; f->name; f++) {
    char with[64];
    snprintf(with, sizeof with, "with_%s", f->name);
    bool without = cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(item, with)) ||
                   !strcmp(f->name, "correct") || !strcmp(f->name, "log_sum_sq_probs");
    if (without || (!strcmp(f->name, "dbias") && !r.bias)) continue;
    *loss_values(&r, f) = elements(h, f->kind < LOSS_OUTPUT ? document : item, f->name, loss_count(&r, f));
  }
  return r;
}

// Two float64 computations of the same elements, by different formulas.
static void check_double(const char *name, const char *what, const double *got, const double *want,
                         int64_t count) {
  double largest = 1;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < count; i++)
    if (!(fabs(got[i] - want[i]) <= 1e-14 * largest))
      fail_msg("%s: the reference's %s of %d is %.17g, should be %.17g", name, what, (int)i, got[i], want[i]);
}

HARNESS_TEST(test_reference_is_as_in_torch) {
  char *text = read_text("tests/golden/loss.json");
  cJSON *document = cJSON_Parse(text), *item;
  int count = 0;
  cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(document, "cases")) {
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "name"));
    ReferenceLoss want = golden_case(h, document, item), r = want;
    reference_outputs(h, &r);
    reference_gradients(h, &r);
    reference_loss(&r);
    check_double(name, "objective", &r.objective, &want.objective, 1);
    for (const LossField *f = loss_fields; f->name; f++)
      if (*loss_values(&want, f))
        check_double(name, f->name, *loss_values(&r, f), *loss_values(&want, f), loss_count(&want, f));
    count++;
  }
  assert_in_range(count, 20, 1000);
  cJSON_Delete(document);
  free(text);
}

typedef struct {
  LceMode mode;
  int64_t chunk;
  bool forward_only, accumulate, outputs;
  bool apart;     // each gradient in a call of its own
  bool narrow;    // dweight in W's dtype
  double softcap; // or 0: the problem's
} Way;

static void run(Harness *h, const LinearCrossEntropy *a, Tensor entropy_weights) {
  if (tensor_exists(entropy_weights))
    loss_with_entropies(h->backend, *a, entropy_weights);
  else
    linear_cross_entropy(h->backend, *a);
}

static void check_case(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab, Way way) {
  ReferenceLoss p = make_problem(h, terms, rows, hidden, vocab);
  ReferenceLoss *r = &p;
  if (way.softcap > 0) r->softcap = way.softcap;
  if (!way.forward_only) reference_gradients(h, r);
  LinearCrossEntropy a = loss_call(h, r, way.mode, way.chunk);
  if (way.outputs) loss_call_all_outputs(h, &a, r);
  LossBefore before = {0};
  if (way.accumulate && !way.forward_only) loss_call_adds(h, &a, &before);
  Tensor entropy_weights = {0};
  if (r->entropy_weights) entropy_weights = vector_from(h, DTYPE_F32, r->entropy_weights, rows);
  if (way.narrow) a.dweight = poisoned(h, h->dtype, vocab, hidden);
  LinearCrossEntropy x_alone = a, weight_alone = a;
  x_alone.dweight = x_alone.dbias = weight_alone.dx = (Tensor){0};
  run(h, way.apart ? &x_alone : &a, entropy_weights);
  if (way.apart) run(h, &weight_alone, entropy_weights);
  reference_loss(r);
  // Stored logits show their rounding; the anchored form and fp32 have none.
  bool stored = way.mode == LCE_MATERIALIZED;
  Tolerance outputs = stored ? within_stored(h, 16, (double)hidden) : within(16, (double)(hidden + vocab));
  char what[64];
  snprintf(what, sizeof what, "terms %d, %s", terms, lce_mode_name(way.mode));
  check_loss(h, what, &a, r, 0, before, with_size(outputs, 8 + 64 * r->z_loss),
             with_size(within_stored(h, 8, 0), r->scale * (1 + 8 * r->z_loss)));
}

// True if the fused mode computes the gradients in the forward pass.
static bool is_fused(int terms) {
  return !(terms & TERM_ENTROPY) && !(terms & TERM_SMOOTHING && terms & TERM_SOFTCAP);
}

static void check_both_modes(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab, Way way) {
  for (int mode = is_fused(terms) ? LCE_FUSED : LCE_MATERIALIZED; mode <= LCE_MATERIALIZED; mode++) {
    way.mode = (LceMode)mode;
    check_case(h, terms, rows, hidden, vocab, way);
    harness_clear(h);
  }
}

HARNESS_TEST(test_alone_and_in_pairs) {
  check_both_modes(h, 0, 29, 17, 101, (Way){.chunk = 7});
  check_both_modes(h, 0, 29, 17, 101, (Way){.chunk = 7, .apart = true});
  for (int i = 0; i < TERMS; i++)
    for (int j = i; j < TERMS; j++)
      check_both_modes(h, 1 << i | 1 << j, 29, 17, 101, (Way){.chunk = 7, .outputs = (i + j) % 2});
  for (int i = 1; i < TERMS; i++) // in one chunk
    check_both_modes(h, 1 << i, 29, 17, 101, (Way){.chunk = 32, .narrow = true});
}

HARNESS_TEST(test_all_at_once) {
  const int64_t shapes[][4] = {
      {1, 1, 1, 1}, {7, 13, 1, 5}, {5, 3, 1031, 2}, {131, 40, 515, 37}, {67, 33, 2053, 64}};
  const int everything = (1 << TERMS) - 1;
  const int forward = everything & ~TERM_ENTROPY; // what gives gradients in the forward pass
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int variant = 0; variant < 8; variant++) {
      Way way = {.chunk = shapes[i][3], .accumulate = variant & 1};
      int terms =
          (const int[]){everything, forward, forward & ~TERM_SOFTCAP, forward & ~TERM_SMOOTHING}[variant / 2];
      way.outputs = variant < 6;
      way.apart = i % 2;
      check_both_modes(h, terms, shapes[i][0], shapes[i][1], shapes[i][2], way);
    }
}

HARNESS_TEST(test_forward_only) {
  const int terms[] = {0, TERM_SMOOTHING | TERM_Z_LOSS | TERM_IGNORED, TERM_SOFTCAP | TERM_IGNORED,
                       TERM_BIAS | TERM_SMOOTHING | TERM_CLASS_WEIGHTS | TERM_TEMPERATURE};
  for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
    for (int outputs = 0; outputs < 2; outputs++)
      check_both_modes(h, terms[i], 31, 19, 203, (Way){.chunk = 8, .forward_only = true, .outputs = outputs});
}

// From saturated to as good as none: u has the relative error of its fp32 logit.
HARNESS_TEST(test_soft_caps) {
  static const double caps[] = {1, 3, 7, 1e3, 1e6};
  for (int i = 0; i < 5; i++)
    check_both_modes(h, TERM_SOFTCAP, 29, 24, 101, (Way){.chunk = 29, .softcap = caps[i], .outputs = true});
}

// No token counts: nothing is divided by the sum of no weights.
HARNESS_TEST(test_nothing_counts) {
  double *zeros = host_values(h, 10 * 6);
  for (int way = 0; way < 4; way++) {
    ReferenceLoss p = loss_problem(h, 4, 6, 10, 1);
    loss_problem_add(h, &p, TERM_SMOOTHING | TERM_Z_LOSS | TERM_MEAN | (way & 2 ? TERM_BIAS : 0));
    for (int n = 0; n < 4; n++) p.targets[n] = IGNORE_INDEX;
    reference_gradients(h, &p);
    LinearCrossEntropy a = loss_call(h, &p, way & 1 ? LCE_MATERIALIZED : LCE_FUSED, 3);
    linear_cross_entropy(h->backend, a);
    const Tensor results[] = {a.loss, a.dx, a.dweight, a.dbias};
    for (int i = 0; i < (way & 2 ? 4 : 3); i++)
      check_values(h, "result of nothing", results[i], zeros, within(0, 1));
  }
}

// Each number of LOSS_TERMS, alone: the ways to compute it agree with differences of their own loss.
static double objective(LinearCrossEntropy a, Harness *h) {
  a.dx = a.dweight = (Tensor){0};
  linear_cross_entropy(h->backend, a);
  const double *loss = values_of(h, a.loss), *z_loss = values_of(h, a.outputs.token_z_loss);
  double sum = 0;
  for (int64_t n = 0; n < a.x.shape[0]; n++) sum += (double)a.scale * (loss[n] + z_loss[n]);
  return sum;
}

static void check_term(Harness *h, const char *name, size_t offset, const char *which, Way way) {
  enum { ROWS = 3, HIDDEN = 5, VOCAB = 11 };
  const double step = 1. / 64;
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, way.mode, ROWS);
  double without = objective(a, h);
  const float value = strcmp(name, "label_smoothing") ? 1.5f : 0.5f;
  memcpy((char *)&a.terms + offset, &value, sizeof value);
  run(h, &a, (Tensor){0});
  const double *dx = copied_values(h, values_of(h, a.dx), ROWS * HIDDEN);
  if (fabs(objective(a, h) - without) < 1e-3) fail_msg("LossTerms.%s changes no loss (%s)", name, which);
  for (int i = 0; i < ROWS * HIDDEN; i++) {
    double sums[2], x = p.x[i];
    for (int up = 0; up < 2; up++) {
      p.x[i] = x + (up ? step : -step);
      a.x = tensor_from(h, h->dtype, p.x, ROWS, HIDDEN);
      sums[up] = objective(a, h);
    }
    p.x[i] = x;
    double want = (sums[1] - sums[0]) / (2 * step);
    if (!(fabs(dx[i] - want) <= 2e-3 * (1 + fabs(want))))
      fail_msg("with LossTerms.%s (%s) dx[%d] is %g, and its loss's difference says %g", name, which, i,
               dx[i], want);
  }
}

HARNESS_TEST(test_every_number_alone) {
  if (h->dtype != DTYPE_F32) skip(); // a difference of bf16 x is none
  static const struct {
    const char *name;
    Way way;
  } ways[] = {{"fused", {.mode = LCE_FUSED}}, {"materialized", {.mode = LCE_MATERIALIZED}}};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
#define CHECK_TERM(term, ...)                                                                                \
  check_term(h, #term, offsetof(LossTerms, term), ways[i].name, ways[i].way);                                \
  harness_clear(h);
    LOSS_TERMS(CHECK_TERM)
  }
}

TEST_MAIN(run_on_backends())
