#include "tests/loss_problem.h"

#include <math.h>
#include <stdio.h>

LossProblem loss_problem(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, double deviation) {
  LossProblem p = {.x = random_values(h, rows * hidden, 1),
                   .weight = random_values(h, vocab * hidden, deviation / sqrt((double)hidden)),
                   .targets = random_ids(h, rows, vocab)};
  p.r = (ReferenceLoss){.rows = rows,
                        .hidden = hidden,
                        .vocab = vocab,
                        .x = p.x,
                        .weight = p.weight,
                        .targets = p.targets,
                        .scale = 0.5};
  reference_outputs(h, &p.r);
  return p;
}

void loss_problem_add(Harness *h, LossProblem *p, int terms) {
  ReferenceLoss *r = &p->r;
  if (terms & TERM_SMOOTHING) r->label_smoothing = (float)0.1;
  if (terms & TERM_Z_LOSS) r->z_loss = (float)0.02;
  if (terms & TERM_SOFTCAP) r->softcap = 3;
  if (terms & TERM_TEMPERATURE) r->temperature = 1.5;
  if (terms & TERM_CLASS_WEIGHTS) {
    double *weights = random_values(h, r->vocab, 1);
    for (int64_t j = 0; j < r->vocab; j++) weights[j] = 0.25 + fabs(weights[j]);
    r->class_weights = weights;
  }
  if (terms & TERM_TOKEN_WEIGHTS) r->token_weights = random_values(h, r->rows, 1);
  if (terms & TERM_ENTROPY) r->entropy_weights = random_values(h, r->rows, 1);
  if (terms & TERM_BIAS) r->bias = p->bias = random_values(h, r->vocab, 1);
  r->mean = terms & TERM_MEAN;
}

void loss_problem_lead(LossProblem *p, int64_t n, int64_t column, double lead) {
  int64_t hidden = p->r.hidden, axis = n % hidden;
  for (int64_t i = 0; i < hidden; i++) p->x[n * hidden + i] = i == axis;
  p->weight[column * hidden + axis] = p->weight[p->targets[n] * hidden + axis] + lead;
}

int32_t *counted_positions(Harness *h, const int32_t *targets, int64_t rows, int64_t *counted) {
  int32_t *positions = random_ids(h, rows, 1);
  int64_t count = 0;
  for (int ignored = 0; ignored < 2; ignored++) {
    for (int64_t n = 0; n < rows; n++)
      if ((targets[n] == IGNORE_INDEX) == ignored) positions[count++] = (int32_t)n;
    if (!ignored) *counted = count;
  }
  return positions;
}

void reference_outputs(Harness *h, ReferenceLoss *r) {
  double **const arrays[] = {&r->loss,    &r->token_z_loss, &r->log_prob, &r->logsumexp,
                             &r->entropy, &r->max_logit,    &r->predicted};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) *arrays[i] = host_values(h, r->rows);
}

void reference_gradients(Harness *h, ReferenceLoss *r) {
  r->dx = host_values(h, r->rows * r->hidden);
  r->dweight = host_values(h, r->vocab * r->hidden);
  r->dbias = r->bias ? host_values(h, r->vocab) : NULL;
}

double reference_objective(void *reference) {
  ReferenceLoss r = *(ReferenceLoss *)reference;
  r.dx = r.dweight = r.dbias = NULL;
  reference_loss(&r);
  return r.objective;
}

static Tensor optional_vector(Harness *h, Dtype dtype, const double *values, int64_t count) {
  return values ? vector_from(h, dtype, (double *)values, count) : (Tensor){0};
}

LinearCrossEntropy loss_call(Harness *h, const ReferenceLoss *r, LceMode mode, int64_t chunk) {
  LinearCrossEntropy a = {
      .mode = mode,
      .chunk = chunk,
      .loss = poisoned_vector(h, DTYPE_F32, r->rows),
      .outputs = {.z_loss = poisoned_vector(h, DTYPE_F32, r->rows),
                  .log_prob = poisoned_vector(h, DTYPE_F32, r->rows),
                  .logsumexp = poisoned_vector(h, DTYPE_F32, r->rows)},
      .x = tensor_from(h, h->dtype, (double *)r->x, r->rows, r->hidden),
      .weight = tensor_from(h, h->dtype, (double *)r->weight, r->vocab, r->hidden),
      .bias = optional_vector(h, h->dtype, r->bias, r->vocab),
      .targets = ids_from(h, r->targets, r->rows),
      .token_weights = optional_vector(h, DTYPE_F32, r->token_weights, r->rows),
      .entropy_weights = optional_vector(h, DTYPE_F32, r->entropy_weights, r->rows),
      .terms = {.label_smoothing = (float)r->label_smoothing,
                .z_loss = (float)r->z_loss,
                .softcap = (float)r->softcap,
                .temperature = (float)r->temperature,
                .class_weights = optional_vector(h, DTYPE_F32, r->class_weights, r->vocab)},
      .sampling = {.full_mass = (float)r->full_mass, .seed = r->seed},
      .scale = (float)r->scale,
      .mean = r->mean};
  if (!r->dx) return a;
  a.dx = poisoned(h, h->dtype, r->rows, r->hidden);
  a.dweight = poisoned(h, DTYPE_F32, r->vocab, r->hidden);
  if (r->bias) a.dbias = poisoned_vector(h, DTYPE_F32, r->vocab);
  return a;
}

void loss_call_all_outputs(Harness *h, LinearCrossEntropy *a) {
  int64_t rows = a->x.shape[0];
  a->outputs.entropy = poisoned_vector(h, DTYPE_F32, rows);
  a->outputs.max_logit = poisoned_vector(h, DTYPE_F32, rows);
  a->outputs.predicted = poisoned_vector(h, DTYPE_I32, rows);
  a->outputs.correct = poisoned_vector(h, DTYPE_F32, rows);
}

void check_outputs(Harness *h, const char *which, const LinearCrossEntropy *a, const ReferenceLoss *r,
                   int64_t first, Tolerance tolerance) {
  const struct {
    const char *name;
    Tensor got;
    const double *want;
  } outputs[] = {{"loss", a->loss, r->loss},
                 {"z_loss", a->outputs.z_loss, r->token_z_loss},
                 {"log_prob", a->outputs.log_prob, r->log_prob},
                 {"logsumexp", a->outputs.logsumexp, r->logsumexp},
                 {"entropy", a->outputs.entropy, r->entropy},
                 {"max_logit", a->outputs.max_logit, r->max_logit}};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    char what[320];
    snprintf(what, sizeof what, "%s (%s)", outputs[i].name, which);
    if (tensor_exists(outputs[i].got))
      check_values(h, what, outputs[i].got, outputs[i].want + first, tolerance);
  }
}
