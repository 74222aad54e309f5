// The loss as PyTorch defines it: every option alone and combined, computed there in float64 with autograd
// (tests/golden/make_loss_golden.py) and here by the reference, and by both modes of the layer on every
// backend.

#include <cjson/cJSON.h>

#include "tests/loss_problem.h"
#include "tests/process.h"

// --- the file ----------------------------------------------------------------------------------------------

// One case: what it starts from and what PyTorch made of it. Arrays that the case does without are NULL.
typedef struct {
  const char *name;
  ReferenceLoss r;
} Golden;

static cJSON *read_golden(void) {
  char *text = read_text("tests/golden/loss.json");
  cJSON *document = cJSON_Parse(text);
  free(text);
  if (!document) fail_msg("tests/golden/loss.json is not JSON");
  return document;
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

static Golden golden_case(Harness *h, const cJSON *document, const cJSON *item) {
  int64_t rows = (int64_t)number(document, "rows"), hidden = (int64_t)number(document, "hidden"),
          vocab = (int64_t)number(document, "vocab");
  bool has_targets = cJSON_HasObjectItem(item, "targets");
  double *targets = elements(h, has_targets ? item : document, "targets", rows);
  int32_t *ids = random_ids(h, rows, 1);
  for (int64_t n = 0; n < rows; n++) ids[n] = (int32_t)targets[n];
  ReferenceLoss r = {.rows = rows,
                     .hidden = hidden,
                     .vocab = vocab,
                     .targets = ids,
                     .label_smoothing = number(item, "label_smoothing"),
                     .z_loss = number(item, "z_loss"),
                     .softcap = number(item, "softcap"),
                     .temperature = number(item, "temperature"),
                     .scale = number(item, "scale"),
                     .mean = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(item, "mean")),
                     .objective = number(item, "objective")};
  for (const LossField *f = loss_fields; f->name; f++) {
    char with[64];
    snprintf(with, sizeof with, "with_%s", f->name);
    cJSON *used = cJSON_GetObjectItemCaseSensitive(item, with); // of an input that a case may do without
    if (cJSON_IsFalse(used) || (!strcmp(f->name, "dbias") && !r.bias)) continue;
    *loss_values(&r, f) = elements(h, f->kind < LOSS_OUTPUT ? document : item, f->name, loss_count(&r, f));
  }
  return (Golden){cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "name")), r};
}

static void for_each_case(Harness *h, void (*check)(Harness *, Golden *)) {
  cJSON *document = read_golden(), *item;
  int count = 0;
  cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(document, "cases")) {
    Golden g = golden_case(h, document, item);
    check(h, &g);
    memory_pop_to(&h->backend->memory, 0);
    count++;
  }
  cJSON_Delete(document);
  assert_in_range(count, 20, 1000);
}

// --- the reference -----------------------------------------------------------------------------------------

// Two float64 computations of the same elements, up to 200, by different formulas.
static void check_double(const char *name, const char *what, const double *got, const double *want,
                         int64_t count) {
  double largest = 1;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < count; i++)
    if (!(fabs(got[i] - want[i]) <= 1e-14 * largest))
      fail_msg("%s: the reference's %s of %d is %.17g, should be %.17g", name, what, (int)i, got[i], want[i]);
}

static void check_reference(Harness *h, Golden *g) {
  const ReferenceLoss *want = &g->r;
  ReferenceLoss r = *want;
  reference_outputs(h, &r);
  reference_gradients(h, &r);
  reference_loss(&r);
  check_double(g->name, "objective", &r.objective, &want->objective, 1);
  for (const LossField *f = loss_fields; f->name; f++)
    if (*loss_values(want, f))
      check_double(g->name, f->name, *loss_values(&r, f), *loss_values(want, f), loss_count(want, f));
}

TEST(reference_is_as_in_torch) {
  for_each_case(*state, check_reference);
}

// --- the layer ---------------------------------------------------------------------------------------------

// How the layer is run. `packed`: only the tokens that count are computed. `all_outputs`: with those that
// make it hold logits side by side, so that without them the exponentials' path is taken where the terms
// allow.
typedef struct {
  LceMode mode;
  int64_t chunk;
  bool packed, all_outputs;
} Way;

static void check_layer(Harness *h, Golden *g, Way way) {
  const ReferenceLoss *want = &g->r;
  LinearCrossEntropy a = loss_call(h, want, way.mode, way.chunk);
  if (way.all_outputs) loss_call_all_outputs(h, &a, want);
  if (way.packed)
    a.rows = ids_from(h, counted_positions(h, want->targets, want->rows, &a.counted), want->rows);
  linear_cross_entropy(h->backend, a);

  // The logits' error over H terms multiplies the exponentials, of which V are summed; a fused chunk holds what
  // statistics are made of in fp32, the materialized logits are the operands' dtype.
  double terms = (double)(want->hidden + want->vocab);
  Tolerance statistics = way.mode == LCE_FUSED ? within(4, terms) : within_stored(h, 4, terms);
  double step = want->mean ? want->scale / (double)want->rows : want->scale;
  char what[256];
  snprintf(what, sizeof what, "%s, %s, chunk %d%s%s", g->name, lce_mode_name(way.mode), (int)way.chunk,
           way.packed ? ", packed" : "", way.all_outputs ? ", all outputs" : "");
  check_loss(h, what, &a, want, 0, (LossBefore){0}, of_size(statistics, 1),
             of_size(within_stored(h, 4, 0), step));
  if (way.all_outputs) check_values(h, what, a.outputs.predicted, want->predicted, (Tolerance){0});
}

static void check_ways(Harness *h, Golden *g) {
  static const Way ways[] = {{LCE_FUSED, 4, false, false},      {LCE_FUSED, 4, false, true},
                             {LCE_FUSED, 3, true, false},       {LCE_FUSED, 3, true, true},
                             {LCE_FUSED, 13, false, false},     {LCE_MATERIALIZED, 1, false, false},
                             {LCE_MATERIALIZED, 1, false, true}};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) check_layer(h, g, ways[i]);
}

TEST(layer_is_as_in_torch) {
  for_each_case(*state, check_ways);
}

int main(void) {
  return run_on_backends();
}
