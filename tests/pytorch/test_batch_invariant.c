// batch_invariant (operations.h): what a row gets has the same bits wherever it stands, whatever rows are beside it
// and in chunks of any size. A GPU that lacks the kernels for it says so.

#include "tests/loss_problem.h"
#include "tests/pytorch/log_prob_call.h"
#include "tools/torch/liblce/ids.h"

typedef struct {
  int64_t rows, hidden, vocab, chunk, other_chunk;
  int terms;
} Shape;

enum { OUTPUTS = 6 };

static void results(Harness *h, const LinearCrossEntropy *a, double *values[OUTPUTS]) {
  const TokenOutputs *o = &a->outputs;
  const Tensor all[OUTPUTS] = {a->loss, o->entropy, o->log_sum_sq_probs, o->log_prob, o->max_logit, a->dx};
  for (int i = 0; i < OUTPUTS; i++) values[i] = values_of(h, all[i]);
}

// lse and dx of a call for given ids: a row's target alone.
static void compute_ids(Harness *h, const LinearCrossEntropy *call, double *values[2]) {
  int64_t rows = call->x.shape[0];
  double *ones = host_values(h, rows);
  for (int64_t n = 0; n < rows; n++) ones[n] = 1;
  IdLogProbs a = {.call = *call,
                  .ids = call->targets,
                  .log_probs = poisoned_vector(h, DTYPE_F32, rows),
                  .lse = poisoned_vector(h, DTYPE_F32, rows),
                  .dlog_probs = vector_from(h, DTYPE_F32, ones, rows)};
  a.call.outputs = (TokenOutputs){0}, a.call.token_weights = (Tensor){0};
  a.call.dx = poisoned(h, h->dtype, rows, call->x.shape[1]);
  id_log_probs(h->backend, a);
  id_log_prob_gradients(h->backend, a);
  values[0] = values_of(h, a.lse), values[1] = values_of(h, a.call.dx);
}

// The losses, outputs and dx of a call, and dx once more from its log-probabilities and entropies.
static void compute(Harness *h, const ReferenceLoss *p, int64_t chunk, double *values[OUTPUTS], double **dx,
                    double *ids[2]) {
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, chunk);
  loss_call_all_outputs(h, &a, p);
  linear_cross_entropy(h->backend, a);
  results(h, &a, values);
  LinearCrossEntropy alone = a; // without outputs, and without dweight
  alone.outputs = (TokenOutputs){0};
  alone.dweight = alone.dbias = (Tensor){0};
  alone.loss = poisoned_vector(h, DTYPE_F32, p->rows);
  alone.dx = poisoned(h, h->dtype, p->rows, p->hidden);
  linear_cross_entropy(h->backend, alone);
  check_bitwise_equal(h, "the loss alone", alone.loss, a.loss);
  check_bitwise_equal(h, "dx alone", alone.dx, a.dx);
  alone.dx = (Tensor){0};
  linear_cross_entropy(h->backend, alone);
  check_bitwise_equal(h, "the loss without gradients", alone.loss, a.loss);
  LogProbGradients g = log_prob_call(h, &a, a.token_weights, false);
  log_prob_gradients(h->backend, g);
  *dx = values_of(h, g.call.dx);
  compute_ids(h, &a, ids);
}

// Row n of the part is row rows[n] of the whole.
static ReferenceLoss part_of(Harness *h, const ReferenceLoss *whole, const int64_t *rows, int64_t count) {
  ReferenceLoss part = *whole;
  part.rows = count;
  part.x = host_values(h, count * whole->hidden);
  part.targets = random_ids(h, count, 1);
  if (whole->token_weights) part.token_weights = host_values(h, count);
  for (int64_t n = 0; n < count; n++) {
    memcpy(part.x + n * whole->hidden, whole->x + rows[n] * whole->hidden,
           (size_t)whole->hidden * sizeof *part.x);
    part.targets[n] = whole->targets[rows[n]];
    if (part.token_weights) part.token_weights[n] = whole->token_weights[rows[n]];
  }
  reference_outputs(h, &part);
  reference_gradients(h, &part);
  return part;
}

static void check_rows(const char *what, const double *part, const double *whole, const int64_t *rows,
                       int64_t count, int64_t width) {
  for (int64_t n = 0; n < count; n++)
    if (memcmp(part + n * width, whole + rows[n] * width, (size_t)width * sizeof *part) != 0)
      fail_msg("%s: row %lld of %lld beside others, row %lld of the whole, has other bits", what,
               (long long)n, (long long)count, (long long)rows[n]);
}

static void check_invariant(Harness *h, const void *shape) {
  const Shape *s = shape;
  static const char *const names[OUTPUTS] = {"loss",     "entropy",   "log_sum_sq_probs",
                                             "log_prob", "max_logit", "dx"};
  ReferenceLoss whole = loss_problem(h, s->rows, s->hidden, s->vocab, 2);
  loss_problem_add(h, &whole, s->terms);
  loss_problem_lead(&whole, 5, s->vocab - 1, 100); // its row is repaired
  whole.targets[7] = IGNORE_INDEX;
  reference_outputs(h, &whole);
  reference_gradients(h, &whole);
  double *all[OUTPUTS], *all_dx, *few[OUTPUTS], *few_dx, *all_ids[2], *few_ids[2];
  compute(h, &whole, s->chunk, all, &all_dx, all_ids);
  int64_t rows[1000], counts[] = {s->rows, s->rows / 2 + 1, 3, 1};
  for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
    // Backwards, in strides that leave rows out; the repaired row is always there.
    for (int64_t n = 0; n < counts[c]; n++) rows[n] = s->rows - 1 - n * s->rows / counts[c];
    rows[counts[c] / 2] = 5;
    ReferenceLoss part = part_of(h, &whole, rows, counts[c]);
    compute(h, &part, c % 2 ? s->chunk : s->other_chunk, few, &few_dx, few_ids);
    for (int i = 0; i < OUTPUTS; i++)
      check_rows(names[i], few[i], all[i], rows, counts[c], i == OUTPUTS - 1 ? s->hidden : 1);
    check_rows("dx of log-probabilities", few_dx, all_dx, rows, counts[c], s->hidden);
    check_rows("lse beside given ids", few_ids[0], all_ids[0], rows, counts[c], 1);
    check_rows("dx of given ids", few_ids[1], all_ids[1], rows, counts[c], s->hidden);
  }
}

// Runs the test with the backend's batches of no matter, where it can do that.
static void with_invariance(Harness *h, void (*test)(Harness *h)) {
  const BackendOps *usual = h->backend->ops;
  BackendOps ops = *usual;
  h->backend->ops = &ops;
  batch_invariant(h->backend, &ops, true);
  if (h->backend->device == ON_CPU || (h->dtype == DTYPE_BF16 && !h->backend->no_sampling)) {
    test(h);
  } else {
    ReferenceLoss p = loss_problem(h, 3, 8, 50, 1);
    LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, 3);
    assert_fails(h, "batch_invariant needs the kernels for Hopper", linear_cross_entropy(h->backend, a));
  }
  batch_invariant(h->backend, &ops, false);
  h->backend->ops = usual;
}

static void check_rows_of_batches(Harness *h) {
  static const Shape shapes[] = {{300, 40, 1000, 300, 37, 0},
                                 {260, 72, 3001, 128, 260, TERM_TOKEN_WEIGHTS | TERM_TEMPERATURE},
                                 {150, 64, 13000, 77, 150, TERM_SOFTCAP | TERM_BIAS | TERM_Z_LOSS}};
  static const Shape small[] = {{20, 64, 13000, 11, 20, 0}};
  if (small_shapes())
    RUN_CASES(h, check_invariant, small);
  else
    RUN_CASES(h, check_invariant, shapes);
}

HARNESS_TEST(test_rows_do_not_depend_on_their_batch) {
  with_invariance(h, check_rows_of_batches);
}

static void check_values_of(Harness *h, const char *what, ReferenceLoss *p) {
  p->scale = 1.0 / (double)p->rows;
  reference_gradients(h, p);
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, p->rows), again = a;
  loss_call_all_outputs(h, &a, p);
  linear_cross_entropy(h->backend, a);
  again.dx = poisoned(h, h->dtype, p->rows, p->hidden);
  log_prob_gradients(h->backend, log_prob_call(h, &again, (Tensor){0}, false));
  again.loss = (Tensor){0}, again.outputs = (TokenOutputs){0};
  reference_loss(p);
  Tolerance outputs = with_size(within(8, (double)(p->hidden + p->vocab)), 1),
            gradients = with_size(within_stored(h, 8, 0), p->scale);
  check_loss(h, what, &a, p, 0, (LossBefore){0}, outputs, gradients);
  check_loss(h, what, &again, p, 0, (LossBefore){0}, outputs, gradients);
}

// Against float64: on Hopper dX in segments of V, a wave of tiles and slices of one more; on the CPU, where V is one
// slice, rows that are repaired several times on their way.
static void check_against_float64(Harness *h) {
  ReferenceLoss long_sums = loss_problem(h, 5, 392, 12300, 1), p = loss_problem(h, 7, 32, 7001, 1);
  check_values_of(h, "long sums", &long_sums);
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)(100 * n + 5);
    for (int64_t i = 0; i < p.rows; i++) p.x[n * p.hidden + i] = 0;
  }
  loss_problem_lead(&p, 1, 10, 70); // three tiles, each above the one before
  loss_problem_lead(&p, 1, 300, 140);
  loss_problem_lead(&p, 1, 500, 140.5);
  loss_problem_lead(&p, 1, 6000, 139);
  loss_problem_lead(&p, 2, 300, 200); // the tile before it underflows
  loss_problem_lead(&p, 3, 20, 66);   // their sum is too large
  loss_problem_lead(&p, 3, 3000, 66.2);
  check_values_of(h, "repaired on the way", &p);
}

// V terms added one after the other would lose two digits of dx where W's entries have a mean.
static void check_long_sums(Harness *h) {
  if (h->backend->device != ON_CPU) return; // sums of bf16 products show bf16's rounding
  ReferenceLoss p = loss_problem(h, 3, 8, 60000, 1);
  for (int64_t i = 0; i < p.vocab * p.hidden; i++) p.weight[i] += 1;
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, p.rows), again = a;
  linear_cross_entropy(h->backend, a);
  again.dx = poisoned(h, h->dtype, p.rows, p.hidden);
  log_prob_gradients(h->backend, log_prob_call(h, &again, (Tensor){0}, false));
  reference_loss(&p);
  const Tensor dx[] = {a.dx, again.dx};
  for (int i = 0; i < 2; i++) {
    double off = relative_distance(values_of(h, dx[i]), p.dx, p.rows * p.hidden);
    if (!(off < 2e-6)) fail_msg("dx is off by %g (%s)", off, i ? "by log-probabilities" : "fused");
  }
}

HARNESS_TEST(test_long_sums) {
  with_invariance(h, check_long_sums);
}

HARNESS_TEST(test_values) {
  with_invariance(h, check_against_float64);
}

TEST_MAIN(run_on_backends())
