// The loss as PyTorch defines it: every option alone and combined, computed there in float64 with autograd
// (tests/golden/make_loss_golden.py) and here by the reference, and by both modes of the layer on every
// backend.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/linear_cross_entropy.h"
#include "tests/harness.h"
#include "tests/process.h"
#include "tests/reference.h"

// --- the file ----------------------------------------------------------------------------------------------

// One case: what it starts from and what PyTorch made of it. Arrays that the case does without are NULL.
typedef struct {
  const char *name;
  int64_t rows, hidden, vocab;
  double *x, *weight, *bias, *class_weights, *token_weights, *entropy_weights;
  int32_t *targets;
  double label_smoothing, z_loss, softcap, temperature, scale;
  bool mean;
  double *loss, *token_z_loss, *log_prob, *logsumexp, *entropy, *max_logit, *predicted, *dx, *dweight, *dbias;
  double objective;
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

static double *numbers(Harness *h, const cJSON *object, const char *key, int64_t count) {
  const cJSON *array = cJSON_GetObjectItemCaseSensitive(object, key), *item;
  if (cJSON_GetArraySize(array) != count) fail_msg("%s in loss.json holds no %d numbers", key, (int)count);
  double *values = host_values(h, count);
  int64_t i = 0;
  cJSON_ArrayForEach(item, array) values[i++] = item->valuedouble;
  return values;
}

// One of the document's arrays, if the case is `with` it.
static double *shared(Harness *h, const cJSON *document, const cJSON *item, const char *with, const char *key,
                      int64_t count) {
  bool used = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(item, with));
  return used ? numbers(h, document, key, count) : NULL;
}

static Golden golden_case(Harness *h, const cJSON *document, const cJSON *item) {
  int64_t rows = (int64_t)number(document, "rows"), hidden = (int64_t)number(document, "hidden"),
          vocab = (int64_t)number(document, "vocab");
  Golden g = {.name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "name")),
              .rows = rows,
              .hidden = hidden,
              .vocab = vocab,
              .x = numbers(h, document, "x", rows * hidden),
              .weight = numbers(h, document, "weight", vocab * hidden),
              .bias = shared(h, document, item, "with_bias", "bias", vocab),
              .class_weights = shared(h, document, item, "with_class_weights", "class_weights", vocab),
              .token_weights = shared(h, document, item, "with_token_weights", "token_weights", rows),
              .entropy_weights = shared(h, document, item, "with_entropy_weights", "entropy_weights", rows),
              .targets = random_ids(h, rows, 1),
              .label_smoothing = number(item, "label_smoothing"),
              .z_loss = number(item, "z_loss"),
              .softcap = number(item, "softcap"),
              .temperature = number(item, "temperature"),
              .scale = number(item, "scale"),
              .mean = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(item, "mean")),
              .loss = numbers(h, item, "loss", rows),
              .token_z_loss = numbers(h, item, "token_z_loss", rows),
              .log_prob = numbers(h, item, "log_prob", rows),
              .logsumexp = numbers(h, item, "logsumexp", rows),
              .entropy = numbers(h, item, "entropy", rows),
              .max_logit = numbers(h, item, "max_logit", rows),
              .predicted = numbers(h, item, "predicted", rows),
              .dx = numbers(h, item, "dx", rows * hidden),
              .dweight = numbers(h, item, "dweight", vocab * hidden),
              .objective = number(item, "objective")};
  if (g.bias) g.dbias = numbers(h, item, "dbias", vocab);
  bool own_targets = cJSON_HasObjectItem(item, "targets");
  double *targets = numbers(h, own_targets ? item : document, "targets", rows);
  for (int64_t n = 0; n < rows; n++) g.targets[n] = (int32_t)targets[n];
  return g;
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

// Two float64 computations of the same numbers, up to 200, by different formulas.
static void check_double(const char *name, const char *what, const double *got, const double *want,
                         int64_t count) {
  double largest = 1;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < count; i++)
    if (!(fabs(got[i] - want[i]) <= 1e-14 * largest))
      fail_msg("%s: the reference's %s of %d is %.17g, should be %.17g", name, what, (int)i, got[i], want[i]);
}

static void check_reference(Harness *h, Golden *g) {
  ReferenceLoss r = {.rows = g->rows,
                     .hidden = g->hidden,
                     .vocab = g->vocab,
                     .x = g->x,
                     .weight = g->weight,
                     .bias = g->bias,
                     .targets = g->targets,
                     .class_weights = g->class_weights,
                     .token_weights = g->token_weights,
                     .entropy_weights = g->entropy_weights,
                     .label_smoothing = g->label_smoothing,
                     .z_loss = g->z_loss,
                     .softcap = g->softcap,
                     .temperature = g->temperature,
                     .scale = g->scale,
                     .mean = g->mean,
                     .loss = host_values(h, g->rows),
                     .token_z_loss = host_values(h, g->rows),
                     .log_prob = host_values(h, g->rows),
                     .logsumexp = host_values(h, g->rows),
                     .entropy = host_values(h, g->rows),
                     .max_logit = host_values(h, g->rows),
                     .predicted = host_values(h, g->rows),
                     .dx = host_values(h, g->rows * g->hidden),
                     .dweight = host_values(h, g->vocab * g->hidden),
                     .dbias = g->bias ? host_values(h, g->vocab) : NULL};
  reference_loss(&r);
  check_double(g->name, "objective", &r.objective, &g->objective, 1);
  check_double(g->name, "loss", r.loss, g->loss, g->rows);
  check_double(g->name, "z-loss", r.token_z_loss, g->token_z_loss, g->rows);
  check_double(g->name, "log-probability", r.log_prob, g->log_prob, g->rows);
  check_double(g->name, "logsumexp", r.logsumexp, g->logsumexp, g->rows);
  check_double(g->name, "entropy", r.entropy, g->entropy, g->rows);
  check_double(g->name, "max_logit", r.max_logit, g->max_logit, g->rows);
  check_double(g->name, "predicted", r.predicted, g->predicted, g->rows);
  check_double(g->name, "dx", r.dx, g->dx, g->rows * g->hidden);
  check_double(g->name, "dweight", r.dweight, g->dweight, g->vocab * g->hidden);
  if (g->bias) check_double(g->name, "dbias", r.dbias, g->dbias, g->vocab);
}

static void reference_is_as_in_torch(void **state) {
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

static Tensor optional_vector(Harness *h, double *values, int64_t count) {
  return values ? vector_from(h, DTYPE_F32, values, count) : (Tensor){0};
}

static Tensor counted_rows(Harness *h, const Golden *g, int64_t *counted) {
  int32_t *rows = random_ids(h, g->rows, 1);
  for (int64_t n = 0; n < g->rows; n++)
    if (g->targets[n] != IGNORE_INDEX) rows[(*counted)++] = (int32_t)n;
  return ids_from(h, rows, g->rows);
}

static void check_layer(Harness *h, Golden *g, Way way) {
  TokenOutputs outputs = {.z_loss = poisoned_vector(h, DTYPE_F32, g->rows),
                          .log_prob = poisoned_vector(h, DTYPE_F32, g->rows),
                          .logsumexp = poisoned_vector(h, DTYPE_F32, g->rows)};
  if (way.all_outputs) {
    outputs.entropy = poisoned_vector(h, DTYPE_F32, g->rows);
    outputs.max_logit = poisoned_vector(h, DTYPE_F32, g->rows);
    outputs.predicted = poisoned_vector(h, DTYPE_I32, g->rows);
  }
  LinearCrossEntropy a = {.mode = way.mode,
                          .chunk = way.chunk,
                          .loss = poisoned_vector(h, DTYPE_F32, g->rows),
                          .outputs = outputs,
                          .dx = poisoned(h, h->dtype, g->rows, g->hidden),
                          .dweight = poisoned(h, DTYPE_F32, g->vocab, g->hidden),
                          .x = tensor_from(h, h->dtype, g->x, g->rows, g->hidden),
                          .weight = tensor_from(h, h->dtype, g->weight, g->vocab, g->hidden),
                          .targets = ids_from(h, g->targets, g->rows),
                          .token_weights = optional_vector(h, g->token_weights, g->rows),
                          .entropy_weights = optional_vector(h, g->entropy_weights, g->rows),
                          .terms = {.label_smoothing = (float)g->label_smoothing,
                                    .z_loss = (float)g->z_loss,
                                    .softcap = (float)g->softcap,
                                    .temperature = (float)g->temperature,
                                    .class_weights = optional_vector(h, g->class_weights, g->vocab)},
                          .scale = (float)g->scale,
                          .mean = g->mean};
  if (g->bias) {
    a.bias = vector_from(h, h->dtype, g->bias, g->vocab);
    a.dbias = poisoned_vector(h, DTYPE_F32, g->vocab);
  }
  if (way.packed) a.rows = counted_rows(h, g, &a.counted);
  linear_cross_entropy(h->backend, a);

  // The logits' error over H terms multiplies the exponentials, of which V are summed; a fused chunk holds what
  // statistics are made of in fp32, the materialized logits are the operands' dtype.
  double terms = (double)(g->hidden + g->vocab), over_rows = (double)(g->hidden + g->rows);
  Tolerance statistics = way.mode == LCE_FUSED ? within(4, terms) : within_stored(h, 4, terms);
  Tolerance gradients = within_stored(h, 4, terms), sums = within_stored(h, 4, over_rows);
  double step = g->mean ? g->scale / (double)g->rows : g->scale;
  const struct {
    const char *name;
    Tensor got;
    const double *want;
    Tolerance tolerance;
  } results[] = {{"loss", a.loss, g->loss, of_size(statistics, 1)},
                 {"z-loss", outputs.z_loss, g->token_z_loss, of_size(statistics, g->z_loss)},
                 {"log-probability", outputs.log_prob, g->log_prob, of_size(statistics, 1)},
                 {"logsumexp", outputs.logsumexp, g->logsumexp, of_size(statistics, 1)},
                 {"entropy", outputs.entropy, g->entropy, of_size(statistics, 1)},
                 {"max_logit", outputs.max_logit, g->max_logit, of_size(statistics, 1)},
                 {"predicted", outputs.predicted, g->predicted, (Tolerance){0}},
                 {"dx", a.dx, g->dx, of_size(gradients, step)},
                 {"dweight", a.dweight, g->dweight, of_size(sums, step)},
                 {"dbias", a.dbias, g->dbias, of_size(sums, step)}};
  for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
    char what[256];
    snprintf(what, sizeof what, "%s, %s, chunk %d%s%s: %s", g->name, lce_mode_name(way.mode), (int)way.chunk,
             way.packed ? ", packed" : "", way.all_outputs ? ", all outputs" : "", results[i].name);
    if (tensor_exists(results[i].got))
      check_values(h, what, results[i].got, results[i].want, results[i].tolerance);
  }
}

static void check_ways(Harness *h, Golden *g) {
  static const Way ways[] = {{LCE_FUSED, 4, false, false},      {LCE_FUSED, 4, false, true},
                             {LCE_FUSED, 3, true, false},       {LCE_FUSED, 3, true, true},
                             {LCE_FUSED, 13, false, false},     {LCE_MATERIALIZED, 1, false, false},
                             {LCE_MATERIALIZED, 1, false, true}};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) check_layer(h, g, ways[i]);
}

static void layer_is_as_in_torch(void **state) {
  for_each_case(*state, check_ways);
}

// --- groups ------------------------------------------------------------------------------------------------

int main(void) {
  const struct CMUnitTest reference[] = {cmocka_unit_test(reference_is_as_in_torch)};
  const struct CMUnitTest layer[] = {cmocka_unit_test(layer_is_as_in_torch)};
  return run_on_backend("reference", "cpu", reference, 1) + run_on_backends(layer, 1);
}
