// linear_cross_entropy against float64, in both modes, on ragged shapes and rows that are hard.

#include <omp.h>

#include "kernels/cpu/vector_math.h"
#include "tests/loss_problem.h"

static ReferenceLoss make_problem(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, double deviation) {
  ReferenceLoss p = loss_problem(h, rows, hidden, vocab, deviation);
  p.scale = 1.0 / (double)rows;
  return p;
}

static LinearCrossEntropy fused(Harness *h, ReferenceLoss *p) {
  reference_gradients(h, p);
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, p->rows);
  a.outputs = (TokenOutputs){0};
  linear_cross_entropy(h->backend, a);
  return a;
}

// The logits' error (H terms) multiplies the exponentials; then V or N of those are summed.
static double terms_of(const ReferenceLoss *p) {
  return (double)(p->hidden + p->vocab);
}

static SoftmaxStatistics poisoned_statistics(Harness *h, int64_t rows) {
  Tensor all = poisoned(h, DTYPE_F32, 4, rows);
  return (SoftmaxStatistics){.target_z = tensor_flat(tensor_rows(all, 0, 1)),
                             .anchor = tensor_flat(tensor_rows(all, 1, 1)),
                             .row_sum = tensor_flat(tensor_rows(all, 2, 1)),
                             .target_e = tensor_flat(tensor_rows(all, 3, 1))};
}

// The operation by itself: what lies between the rows of E stays; without E its scratch has no width of V.
HARNESS_TEST(test_logits_exp) {
  enum { ROWS = 131, HIDDEN = 3, VOCAB = 40009 };
  ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 3);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, ROWS);
  LceLogitsExp a = {
      .softmax = poisoned_statistics(h, ROWS), .x = call.x, .weight = call.weight, .targets = call.targets};
  // A GPU's tiles of logits have a size of their own.
  if (h->backend->device == ON_CPU)
    assert_true(h->backend->scratch->lce_logits_exp(&a) < ROWS * VOCAB * sizeof(float));
  lce_target_logits(h->backend, (LceTargetLogits){.target_z = a.softmax.target_z,
                                                  .x = call.x,
                                                  .weight = call.weight,
                                                  .targets = call.targets});
  a.exps = poisoned_strided(h, h->dtype, ROWS, VOCAB, VOCAB + 3);
  a.dx_raw = poisoned(h, DTYPE_F32, ROWS, HIDDEN);
  lce_logits_exp(h->backend, a);
  check_gaps(h, "E", a.exps);
}

static void check_row(Harness *h, const char *what, const double *got, const double *want, int count) {
  double largest = 0, allowed = h->dtype == DTYPE_F32 ? 2e-6 : 1. / 64;
  for (int i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
  for (int i = 0; i < count; i++)
    if (!(fabs(got[i] - want[i]) <= allowed * largest))
      fail_msg("%s[%d] of the worked example is %.7g, and the page says %.7g", what, i, got[i], want[i]);
}

// LCE.md's "An example with numbers": relative errors row by row, so that the certain token counts.
HARNESS_TEST(test_worked_example) {
  enum { ROWS = 3, HIDDEN = 2, VOCAB = 5 };
  double x[] = {1, 2, 20, 0, 3, -1}, weight[] = {2, 0, 0, 1, -1, 0, 0, -1, 1, 1};
  const int32_t targets[] = {4, 0, IGNORE_INDEX};
  const double anchor[] = {3, 40}, sum[] = {0.7608125, 2.061154e-9}, loss[] = {0.5657753, 2.061154e-9};
  const double e[][VOCAB] = {{0.3678794, 0.3678794, 0.01831564, 0.006737947, 0},
                             {0, 4.248354e-18, 8.756511e-27, 4.248354e-18, 2.061154e-9}};
  const double raw[][HIDDEN] = {{0.7174432, 0.3611415}, {2.061154e-9, 2.061154e-9}};
  const double dx[][HIDDEN] = {{-0.02463023, -0.2269810}, {-2.061154e-9, 2.061154e-9}, {0, 0}};
  const double dw[][HIDDEN] = {{0.2089259, 0.4178519},
                               {0.2089260, 0.4178519},
                               {0.01040181, 0.02080362},
                               {0.003826611, 0.007653222},
                               {-0.4320803, -0.8641607}};
  ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 1);
  p.x = x, p.weight = weight, p.scale = 1;
  memcpy(p.targets, targets, sizeof targets);
  LinearCrossEntropy a = fused(h, &p);
  SoftmaxStatistics s = poisoned_statistics(h, ROWS);
  lce_target_logits(h->backend, (LceTargetLogits){s.target_z, a.x, a.weight, .targets = a.targets});
  LceLogitsExp step = {.exps = poisoned(h, h->dtype, ROWS, VOCAB),
                       .dx_raw = poisoned(h, DTYPE_F32, ROWS, HIDDEN),
                       .softmax = s,
                       .x = a.x,
                       .weight = a.weight,
                       .targets = a.targets};
  lce_logits_exp(h->backend, step);
  for (int n = 0; n < 2; n++) {
    check_row(h, "a", values_of(h, s.anchor) + n, anchor + n, 1);
    check_row(h, "E", values_of(h, step.exps) + n * VOCAB, e[n], VOCAB);
    check_row(h, "R", values_of(h, s.row_sum) + n, sum + n, 1);
    check_row(h, "loss", values_of(h, a.loss) + n, loss + n, 1);
    check_row(h, "E W", values_of(h, step.dx_raw) + n * HIDDEN, raw[n], HIDDEN);
  }
  for (int n = 0; n < ROWS; n++) check_row(h, "dX", values_of(h, a.dx) + n * HIDDEN, dx[n], HIDDEN);
  for (int j = 0; j < VOCAB; j++) check_row(h, "dW", values_of(h, a.dweight) + j * HIDDEN, dw[j], HIDDEN);
}

HARNESS_TEST(test_overflow_repair) {
  ReferenceLoss p = make_problem(h, 9, 31, 1511, 1);
  loss_problem_lead_far(&p);
  LinearCrossEntropy a = fused(h, &p), with_entropy = a;
  reference_loss(&p);
  with_entropy.outputs.entropy = poisoned_vector(h, DTYPE_F32, p.rows);
  with_entropy.outputs.log_sum_sq_probs = poisoned_vector(h, DTYPE_F32, p.rows);
  linear_cross_entropy(h->backend, with_entropy);
  Tolerance gradients = with_size(within_stored(h, 8, 0), p.scale);
  double *loss = values_of(h, a.loss);
  assert_true(fabs(loss[1] - 500) < 4 && fabs(loss[6] - 1e4) < 100);
  check_loss(h, "repaired rows", &with_entropy, &p, 0, (LossBefore){0}, with_size(within(8, terms_of(&p)), 1),
             gradients);
}

// A row that is repaired several times on its way: a slice of the CPU has three tiles of 192 columns.
HARNESS_TEST(test_overflow_on_the_way) {
  ReferenceLoss p = make_problem(h, 7, 31, 7001, 1);
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)(100 * n + 5);
    for (int64_t i = 0; i < p.rows; i++) p.x[n * p.hidden + i] = 0;
  }
  for (int64_t i = 0; i < p.vocab; i++) p.weight[i * p.hidden + 4] = 0;
  loss_problem_lead(&p, 1, 10, 70); // three tiles, each above the one before
  loss_problem_lead(&p, 1, 300, 140);
  loss_problem_lead(&p, 1, 500, 140.5);
  loss_problem_lead(&p, 1, 6000, 139); // another slice
  loss_problem_lead(&p, 2, 300, 200);  // the tile before it underflows
  loss_problem_lead(&p, 3, 20, 66);    // no slice's sum is too large, and all slices' is
  loss_problem_lead(&p, 3, 3000, 66.2);
  loss_problem_lead(&p, 4, 700, 67);
  loss_problem_lead(&p, 4, 1500, 66);
  loss_problem_lead(&p, 5, 4000, 65); // none is
  LinearCrossEntropy a = fused(h, &p);
  reference_loss(&p);
  a.outputs.entropy = poisoned_vector(h, DTYPE_F32, p.rows);
  a.outputs.log_sum_sq_probs = poisoned_vector(h, DTYPE_F32, p.rows);
  linear_cross_entropy(h->backend, a);
  check_loss(h, "repaired on the way", &a, &p, 0, (LossBefore){0}, with_size(within(8, terms_of(&p)), 1),
             with_size(within_stored(h, 8, 0), p.scale));
}

// Targets from 100 above all other logits to 100 below one, in the plain row of squares and in repaired rows.
HARNESS_TEST(test_log_sum_sq_probs) {
  enum { ROWS = 41, HIDDEN = 48, VOCAB = 1200 };
  for (int way = 0; way < 3; way++) {
    ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 0);
    p.temperature = way == 1 ? 0.5 : 0, p.softcap = way == 2 ? 0x1p-100 : 0; // so small a cap makes all 0
    for (int n = 0; n < ROWS; n++) {
      int lead = 5 * (n - ROWS / 2);
      p.targets[n] = 29 * n;
      loss_problem_lead(&p, n, 29 * n + 7, lead > 0 ? lead : 0);
      if (lead < 0) p.weight[p.targets[n] * HIDDEN + n] = -lead;
    }
    LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, ROWS / 2);
    a.outputs = (TokenOutputs){.log_sum_sq_probs = poisoned_vector(h, DTYPE_F32, ROWS)};
    linear_cross_entropy(h->backend, a);
    reference_loss(&p);
    const double *got = values_of(h, a.outputs.log_sum_sq_probs);
    for (int n = 0; n < ROWS; n++)
      if (!(fabs(got[n] - p.log_sum_sq_probs[n]) <= 1e-5))
        fail_msg("way %d, row %d: log sum p^2 is %.8g, not %.8g", way, n, got[n], p.log_sum_sq_probs[n]);
  }
}

// A tiny loss keeps its digits, and so does p - 1, which is all that row y[n] of dW holds in column n.
HARNESS_TEST(test_nearly_certain) {
  ReferenceLoss p = make_problem(h, 5, 13, 17, 0.02);
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)n;
    loss_problem_lead(&p, n, n + 8, 0);
  }
  for (int64_t n = 0; n < p.rows; n++) p.weight[n * p.hidden + n] = 20; // e^-20 = 2e-9 for each non-target
  for (int64_t n = 0; n < p.rows; n++) p.weight[(n + 8) * p.hidden + n] = -3;
  LinearCrossEntropy a = fused(h, &p);
  reference_loss(&p);
  double *loss = values_of(h, a.loss), *dweight = values_of(h, a.dweight);
  for (int64_t n = 0; n < p.rows; n++) {
    // exp(z - a) has the relative error of z - a, which is 20 ulp of fp32 here.
    double relative = 32 * dtype_epsilon(DTYPE_F32), want = p.loss[n];
    int64_t entry = n * p.hidden + n;
    assert_true(want > 1e-9 && want < 1e-7 && fabs(loss[n] - want) <= relative * want);
    assert_true(fabs(dweight[entry] / p.dweight[entry] - 1) <= relative);
  }
}

// An offset of all logits in a row, at which bf16 logits would differ by 32: it costs fp32's digits at 6400.
HARNESS_TEST(test_common_offset) {
  ReferenceLoss p = make_problem(h, 9, 21, 333, 1);
  for (int64_t n = 0; n < p.rows; n++) p.x[n * p.hidden] = 64;
  for (int64_t v = 0; v < p.vocab; v++) p.weight[v * p.hidden] = 100;
  LinearCrossEntropy a = fused(h, &p);
  reference_loss(&p);
  Tolerance outputs = with_size(within(8, terms_of(&p)), 6400),
            gradients = with_size(within_stored(h, 8, 0), 1600 * p.scale);
  check_loss(h, "a common offset", &a, &p, 0, (LossBefore){0}, outputs, gradients);
  double *loss = values_of(h, a.loss);
  for (int64_t n = 0; n < p.rows; n++) assert_true(fabs(loss[n] - p.loss[n]) < 0.02);
}

// Logits of 2^17 / T that differ by whole numbers, in exact arithmetic: nothing of them is lost, nor is a
// logit that is far below them.
HARNESS_TEST(test_low_temperature) {
  enum { ROWS = 9, HIDDEN = 8, VOCAB = 411 };
  ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 0);
  p.temperature = 0x1p-17;
  p.entropy_weights = random_values(h, ROWS, 1);
  for (int i = 0; i < ROWS * HIDDEN; i++) p.x[i] = i % HIDDEN == 0;
  for (int n = 0; n < ROWS; n++) p.x[n * HIDDEN + 1] = (1 + n) * 0x1p-17, p.targets[n] = 7 * (3 * n + 1);
  for (int v = 0; v < VOCAB; v += 7) p.weight[v * HIDDEN] = 1, p.weight[v * HIDDEN + 1] = v % 5;
  reference_gradients(h, &p);
  Tensor entropy_weights = vector_from(h, DTYPE_F32, p.entropy_weights, ROWS);
  if (h->dtype == DTYPE_F32) { // bf16 cannot store such logits
    LinearCrossEntropy a = loss_call(h, &p, LCE_MATERIALIZED, ROWS);
    loss_call_all_outputs(h, &a, &p);
    loss_with_entropies(h->backend, a, entropy_weights);
    reference_loss(&p);
    check_loss(h, "a low temperature", &a, &p, 0, (LossBefore){0}, with_size(within(16, 1), 1),
               with_size(within_stored(h, 8, 0), p.scale));
  }
}

// If fp32's rounding of a logit over T is far above 1, losses are as exact as that, and gradients stay
// finite, even with log-probabilities that are wrong.
HARNESS_TEST(test_lowest_temperature) {
  ReferenceLoss p = make_problem(h, 40, 16, 300, 30);
  p.temperature = 0x1p-19;
  LinearCrossEntropy a = fused(h, &p);
  reference_loss(&p);
  check_values(h, "loss", a.loss, p.loss, within(8, (double)p.hidden));
  const double *dx = values_of(h, a.dx), *dweight = values_of(h, a.dweight);
  for (int64_t i = 0; i < p.rows * p.hidden; i++) assert_true(isfinite(dx[i]) && isfinite(dweight[i]));
}

// A bias of minus infinity at every second target: that loss is infinite, and all else as with a bias of a
// large number.
HARNESS_TEST(test_masked_targets) {
  enum { ROWS = 21, HIDDEN = 16, VOCAB = 611 };
  for (int way = 0; way < 2; way++) { // fused, materialized
    ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 1);
    loss_problem_add(h, &p, TERM_BIAS | (way ? TERM_ENTROPY : 0) | (way < 2 ? TERM_Z_LOSS : 0));
    for (int n = 0; n < ROWS; n++) p.targets[n] = 4 * n;
    for (int v = 0; v < VOCAB; v += 8) p.bias[v] = -98304;
    reference_gradients(h, &p);
    LinearCrossEntropy a = loss_call(h, &p, way == 1 ? LCE_MATERIALIZED : LCE_FUSED, ROWS);
    double *bias = copied_values(h, p.bias, VOCAB);
    for (int v = 0; v < VOCAB; v += 8) bias[v] = -INFINITY;
    a.bias = vector_from(h, h->dtype, bias, VOCAB);
    loss_call_all_outputs(h, &a, &p);
    Tensor entropy_weights = way ? vector_from(h, DTYPE_F32, p.entropy_weights, ROWS) : (Tensor){0};
    if (way == 1)
      loss_with_entropies(h->backend, a, entropy_weights);
    else
      linear_cross_entropy(h->backend, a);
    reference_loss(&p);
    const double *loss = values_of(h, a.loss), *log_prob = values_of(h, a.outputs.log_prob);
    for (int n = 0; n < ROWS; n++) {
      double off = way == 1 ? 8 * dtype_epsilon(h->dtype) * (1 + fabs(p.loss[n])) : 1e-4;
      assert_true(n % 2 ? fabs(loss[n] - p.loss[n]) < off : loss[n] == INFINITY && log_prob[n] == -INFINITY);
    }
    a.loss = a.outputs.log_prob = (Tensor){0};
    Tolerance outputs = way == 1 ? within_stored(h, 16, 16) : within(16, terms_of(&p));
    check_loss(h, "masked targets", &a, &p, 0, (LossBefore){0}, with_size(outputs, 1),
               with_size(within_stored(h, 8, 0), 2 * p.scale));
  }
}

// The first of equal logits is predicted, over tiles too; no row whose loss is NaN is correct.
HARNESS_TEST(test_ties_and_nans) {
  enum { ROWS = 5, HIDDEN = 8, VOCAB = 6500, NANS = 3 }; // the rows from there on
  ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 1);
  for (int n = 0; n < ROWS; n++) p.targets[n] = n == 1 || n == NANS ? 6400 : 0;
  for (int i = 0; i < ROWS * HIDDEN; i++) p.x[i] = i / HIDDEN >= NANS ? NAN : 0;
  double *bias = host_values(h, VOCAB);
  for (int way = 0; way < 4; way++) {
    bias[7] = way / 2 ? NAN : 0; // one wrong logit in every row
    LinearCrossEntropy a = loss_call(h, &p, way % 2 ? LCE_MATERIALIZED : LCE_FUSED, ROWS);
    a.bias = vector_from(h, h->dtype, bias, VOCAB);
    loss_call_all_outputs(h, &a, &p);
    linear_cross_entropy(h->backend, a);
    const double *predicted = values_of(h, a.outputs.predicted), *correct = values_of(h, a.outputs.correct);
    for (int n = 0; n < ROWS; n++)
      assert_true(predicted[n] == 0 && correct[n] == (way < 2 && n != 1 && n < NANS));
  }
}

// A bias of minus infinity, a saturated soft-cap: finite entropies, and the first of equal logits.
HARNESS_TEST(test_masked_and_saturated) {
  enum { ROWS = 37, HIDDEN = 24, VOCAB = 611 };
  for (int capped = 0; capped < 2; capped++) {
    ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, capped ? 60 : 1);
    double *bias = host_values(h, VOCAB), *z = host_values(h, (int64_t)ROWS * VOCAB);
    reference_linear(z, p.x, p.weight, false, NULL, NULL, ROWS, HIDDEN, VOCAB);
    for (int v = 0; v < VOCAB; v++) bias[v] = v % 3 ? 0 : -INFINITY;
    for (int n = 0; n < ROWS; n++) p.targets[n] = 1 + 3 * (n % 200);
    LinearCrossEntropy a = fused(h, &p);
    a.dx = a.dweight = (Tensor){0};
    loss_call_all_outputs(h, &a, &p);
    a.bias = vector_from(h, h->dtype, bias, VOCAB);
    a.terms.softcap = capped ? 1 : 0;
    linear_cross_entropy(h->backend, a);
    const double *entropy = values_of(h, a.outputs.entropy), *predicted = values_of(h, a.outputs.predicted);
    const double *squares = values_of(h, a.outputs.log_sum_sq_probs);
    for (int n = 0; n < ROWS; n++) {
      int first = -1, unsure = 0;
      for (int v = 0; v < VOCAB && first < 0; v++) {
        double u = z[n * VOCAB + v];
        if (v % 3 && capped) unsure |= u > 8 && u < 12, first = u >= 12 ? v : first;
      }
      assert_true(isfinite(entropy[n]) && entropy[n] > 0 && isfinite(squares[n]) && squares[n] < 0);
      assert_true((int)predicted[n] % 3);
      if (capped && first >= 0 && !unsure) assert_true(predicted[n] == first);
    }
  }
}

// Targets drawn from the model nearly cancel the rest of dweight: they are added before it is rounded.
HARNESS_TEST(test_narrow_dweight) {
  enum { ROWS = 16384, HIDDEN = 8, VOCAB = 16 };
  ReferenceLoss p = make_problem(h, ROWS, HIDDEN, VOCAB, 1);
  double *z = host_values(h, (int64_t)ROWS * VOCAB);
  reference_linear(z, p.x, p.weight, false, NULL, NULL, ROWS, HIDDEN, VOCAB);
  for (int64_t n = 0; n < ROWS; n++) {
    double sum = 0, drawn = fmod((double)n * 0.6180339887498949, 1), whole;
    for (int j = 0; j < VOCAB; j++) sum += exp(z[n * VOCAB + j]);
    int target = 0;
    for (whole = exp(z[n * VOCAB]); whole < drawn * sum && target < VOCAB - 1;)
      whole += exp(z[n * VOCAB + ++target]);
    p.targets[n] = target;
  }
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, ROWS);
  a.dweight = poisoned(h, h->dtype, VOCAB, HIDDEN);
  linear_cross_entropy(h->backend, a);
  reference_loss(&p);
  double off = relative_distance(values_of(h, a.dweight), p.dweight, VOCAB * HIDDEN);
  if (!(off < fmax(1e-4, 2 * dtype_epsilon(h->dtype)))) fail_msg("dweight is off by %g of its size", off);
}

// E's entry of the target times r x is c x, also where r is 0 since terms cancel, and 0 where the token's
// weight is.
HARNESS_TEST(test_target_in_exps) {
  enum { ROWS = 3, WIDTH = 8 };
  double ones[] = {1, 1, 1}, z[] = {-1, -1, 0.5}, sums[] = {0, 2, 3}, weights[] = {1, 0, 1}, *x;
  const int32_t targets[] = {2, 0, 7};
  LceRowLosses a = {.x = random_tensor(h, &x, ROWS, WIDTH, 1), .targets = ids_from(h, targets, ROWS)};
  a.softmax.target_z = a.softmax.anchor = vector_from(h, DTYPE_F32, z, ROWS);
  a.softmax.row_sum = vector_from(h, DTYPE_F32, sums, ROWS);
  a.softmax.target_e = vector_from(h, DTYPE_F32, ones, ROWS);
  a.token_weights = vector_from(h, DTYPE_F32, weights, ROWS);
  a.softmax.scale_non_target = poisoned_vector(h, DTYPE_F32, ROWS);
  a.softmax.scale_target = poisoned_vector(h, DTYPE_F32, ROWS);
  a.scaled_x = poisoned(h, h->dtype, ROWS, WIDTH), a.exps = poisoned(h, h->dtype, ROWS, WIDTH);
  a.terms.z_loss = 0.5f, a.vocab_size = WIDTH;
  lce_row_losses(h->backend, a);
  const double *c = values_of(h, a.softmax.scale_target), *e = values_of(h, a.exps),
               *scaled = values_of(h, a.scaled_x);
  assert_true(c[0] == -1 && c[1] == 0 && c[2] < 0);
  for (int i = 0; i < ROWS * WIDTH; i++) {
    double want = c[i / WIDTH] * x[i], got = e[i / WIDTH * WIDTH + targets[i / WIDTH]] * scaled[i];
    assert_true(fabs(got - want) <= 2 * dtype_epsilon(h->dtype) * fabs(want));
  }
}

// All rows but one have the bits that they have when nothing is wrong with that one.
static void check_other_rows(Harness *h, LinearCrossEntropy a, LinearCrossEntropy clean, int64_t wrong) {
  for (int64_t n = 0; n < a.loss.shape[0]; n++) {
    if (n == wrong) continue;
    check_bitwise_equal(h, "loss beside a wrong row", tensor_rows(a.loss, n, 1),
                        tensor_rows(clean.loss, n, 1));
    check_bitwise_equal(h, "dx beside a wrong row", tensor_rows(a.dx, n, 1), tensor_rows(clean.dx, n, 1));
  }
}

// A row with a NaN, then one that is computed again: neither shows in the others' bits.
static void wrong_rows_case(Harness *h, const void *shape) {
  const int64_t *sizes = shape, hidden = sizes[1], last = sizes[2] - 1;
  ReferenceLoss p = make_problem(h, sizes[0], hidden, sizes[2], 1);
  p.targets[1] = 5;
  p.targets[2] = (int32_t)last;
  LinearCrossEntropy clean = fused(h, &p);
  double kept = p.x[3 * hidden + 2];
  p.x[3 * hidden + 2] = NAN;
  LinearCrossEntropy a = fused(h, &p);
  assert_true(isnan(values_of(h, a.loss)[3]) && isnan(values_of(h, a.dx)[3 * hidden]));
  check_other_rows(h, a, clean, 3);
  p.x[3 * hidden + 2] = kept;
  for (int64_t i = 0; i < hidden; i++)
    p.x[hidden + i] = 400 * (p.weight[last * hidden + i] - p.weight[5 * hidden + i]);
  a = fused(h, &p);
  assert_true(values_of(h, a.loss)[1] > 100);
  check_other_rows(h, a, clean, 1);
}

HARNESS_TEST(test_wrong_rows_stay_alone) {
  static const int64_t shapes[][3] = {{7, 11, 1301}, {9, 31, 1511}, {7, 33, 777}, {5, 64, 1000}},
                       tiles[][3] = {{40, 128, 30011}};
  RUN_CASES(h, wrong_rows_case, shapes);
  if (!small_shapes()) RUN_CASES(h, wrong_rows_case, tiles);
}

typedef struct {
  int64_t rows, vocab;
  double *logits, *loss, alpha;
  int32_t *targets;
} CrossEntropyCase;

static double cross_entropy_objective(void *context) {
  CrossEntropyCase *c = context;
  double sum = 0;
  reference_cross_entropy(c->loss, c->logits, c->targets, c->rows, c->vocab);
  for (int64_t n = 0; n < c->rows; n++) sum += c->alpha * c->loss[n];
  return sum;
}

static void cross_entropy_case(Harness *h, const void *shape) {
  const int64_t *sizes = shape, rows = sizes[0], vocab = sizes[1], pad = sizes[2];
  CrossEntropyCase c = {.rows = rows, .vocab = vocab, .alpha = 0.5};
  c.logits = random_values(h, rows * vocab, 3);
  c.loss = host_values(h, rows);
  c.targets = random_ids(h, rows, vocab);
  if (rows > 2) {
    c.targets[1] = IGNORE_INDEX;
    c.logits[2 * vocab + c.targets[2]] += 25;                  // nearly certain
    c.logits[0] = c.targets[0] == 0 ? c.logits[0] - 500 : 500; // hopeless
  }
  CrossEntropyInPlace a = {.targets = ids_from(h, c.targets, rows), .alpha = 0.5f};
  for (int backward = 0; backward < 2; backward++) {
    a.logits = strided_from(h, h->dtype, c.logits, rows, vocab, vocab + pad);
    a.backward = backward;
    a.loss = poisoned_vector(h, DTYPE_F32, rows);
    cross_entropy_in_place(h->backend, a);
    cross_entropy_objective(&c);
    check_values(h, "loss", a.loss, c.loss, with_size(within(8, h->recording ? 32 : (double)vocab), 1));
  }
  Tolerance bound = within(32, 1);
  if (!h->recording) bound = with_size(within_stored(h, 8, (double)vocab), c.alpha);
  check_gradient(h, "the gradient", a.logits, NULL, c.logits, cross_entropy_objective, &c, bound);
  check_gaps(h, "the gradient", a.logits);
  if (rows <= 2) return;
  cross_entropy_objective(&c); // the loss at the point itself again
  double *got = values_of(h, a.loss), *gradient = values_of(h, a.logits);
  assert_true(fabs(got[2] - c.loss[2]) <= 64 * dtype_epsilon(DTYPE_F32) * c.loss[2]);
  for (int64_t j = 0; j < vocab; j++) assert_true(gradient[vocab + j] == 0);
}

HARNESS_TEST(test_cross_entropy_in_place) {
  static const int64_t shapes[][3] = {{1, 1, 0}, {5, 13, 3}, {3, 5003, 1}};
  // Rows wider than shared memory, and misaligned ones.
  static const int64_t mirrored[][3] = {{5, 50257, 47}, {3, 128256, 0}, {7, 1001, 0}, {4, 3, 5}, {1, 1, 0}};
  RUN_CASES(h, cross_entropy_case, shapes);
  RUN_MIRRORED(h, cross_entropy_case, mirrored);
}

typedef struct {
  int64_t rows, hidden, vocab, chunk, ignored; // every ignored-th target is ignored; 0: none
  double deviation;                            // of the logits; 0: 2
  bool materialized, accumulate, wide_dx;
} LayerShape;

static void layer_case(Harness *h, const void *shape) {
  LayerShape s = *(const LayerShape *)shape;
  LceMode mode = s.materialized ? LCE_MATERIALIZED : LCE_FUSED;
  double deviation = s.deviation > 0 ? s.deviation : 2;
  ReferenceLoss p = make_problem(h, s.rows, s.hidden, s.vocab, deviation);
  for (int64_t n = 0; n < s.rows && s.ignored; n += s.ignored) p.targets[n] = IGNORE_INDEX;
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, mode, s.chunk);
  a.outputs = (TokenOutputs){0};
  if (s.wide_dx) a.dx = poisoned(h, DTYPE_F32, s.rows, s.hidden);
  LossBefore before = {0};
  if (s.accumulate) loss_call_adds(h, &a, &before);
  linear_cross_entropy(h->backend, a);
  LinearCrossEntropy forward = a;
  forward.loss = poisoned_vector(h, DTYPE_F32, s.rows);
  forward.dx = forward.dweight = (Tensor){0};
  linear_cross_entropy(h->backend, forward);
  if (!s.materialized) check_bitwise_equal(h, "loss of the forward pass alone", forward.loss, a.loss);
  if (!h->recording) reference_loss(&p);
  for (int64_t i = 0; i < s.vocab * s.hidden && s.accumulate; i++) p.dweight[i] += before.dweight[i];
  // Against float64: a random walk over all terms. Beside the CPU: logits reach four deviations, their error
  // multiplies the exponential. Fused, that error is of `hidden` products in fp32; materialized, half a unit
  // of the stored dtype. E (or the logits' gradient) and r x are stored, too: a unit more.
  double size = 4 * deviation, terms = terms_of(&p);
  Tolerance loss = s.materialized ? within_stored(h, 8, terms) : within(8, terms);
  Tolerance dx = with_size(within_stored(h, 8, terms), p.scale);
  Tolerance dweight = with_size(within_stored(h, 8, (double)(s.hidden + s.rows)), p.scale);
  if (h->recording) {
    bool fp32 = h->dtype == DTYPE_F32;
    Tolerance exact = within(8 * (1 + size), (double)s.hidden), rounded = within_stored(h, 1 + size / 2, 1);
    loss = fp32 || !s.materialized ? exact : rounded;
    dx = fp32 ? exact : rounded;
    dweight = with_size(dx, p.scale);
  }
  check_values(h, "layer loss", a.loss, p.loss, with_size(loss, 1));
  check_values(h, "layer dx", a.dx, p.dx, dx);
  check_values(h, "layer dweight", a.dweight, p.dweight, dweight);
}

HARNESS_TEST(test_layer) {
  static const LayerShape shapes[] = {
      {1, 1, 1, 1, .ignored = 0},
      {1, 7, 13, 5, .ignored = 0},
      {13, 11, 1, 5, .ignored = 0},
      {13, 11, 1, 5, .ignored = 3},
      {29, 17, 101, 7, .ignored = 0},
      {29, 17, 101, 7, .ignored = 2},
      {29, 17, 101, 64, .ignored = 5},
      {131, 13, 1031, 37, .ignored = 4},
      {257, 5, 2003, 128, .ignored = 0},
      {150, 66, 4099, 64, .ignored = 3},
      {200, 5, 61, 200, .ignored = 2},
      {6, 5, 7, 4, .ignored = 1}, // all of them
      {130, 7, 33, 130, .ignored = 0},
      {257, 8, 4100, 257, .ignored = 0},
      {127, 67, 4611, 127, .ignored = 0},
      {19, 259, 613, 19, .ignored = 0},
      {5, 2051, 401, 5, .ignored = 0},
      {20000, 4, 40, 4096, .ignored = 0}, // more tokens than targets are added at once
  };
  static const LayerShape mirrored[] = {
      {96, 64, 1024, 32, .deviation = 0.8},
      {101, 72, 1003, 37, .ignored = 3, .deviation = 0.8},
      {70, 37, 501, 64, .deviation = 0.6, .wide_dx = true, .accumulate = true},
      {64, 64, 4096, 64, .deviation = 8}, // sharp
      {1, 8, 1, 5, .deviation = 3},
      {3, 8, 255, 5, .deviation = 3, .accumulate = true},
      {300, 128, 50257, 256, .ignored = 3}, // several tiles
      {290, 64, 1001, 128, .deviation = 2.4},
      {290, 63, 1001, 128, .deviation = 2.4}, // rows that are misaligned
      {1700, 64, 1001, 1700, .deviation = 2.4, .wide_dx = true},
  };
  for (int variant = 0; variant < 4; variant++)
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
      LayerShape shape[] = {shapes[i]};
      shape->materialized = variant & 1, shape->accumulate = variant & 2;
      RUN_CASES(h, layer_case, shape);
    }
  for (int materialized = 0; materialized < 2; materialized++)
    for (size_t i = 0; i < sizeof mirrored / sizeof *mirrored; i++) {
      LayerShape shape[] = {mirrored[i]};
      shape->materialized = materialized;
      if (!small_shapes() || shape->rows * shape->vocab < 300000) RUN_MIRRORED(h, layer_case, shape);
    }
}

// A chunk is cut by its shape alone: threads show in no bit, in dweight's where its GEMM is our own.
HARNESS_TEST(test_bitwise_repeatable) {
  ReferenceLoss p = make_problem(h, 113, 33, 9001, 2);
  for (int64_t n = 0; n < p.rows; n += 2) p.targets[n] %= 5; // many tokens of one row
  int own = omp_get_max_threads(), threads[] = {own, own, 1, 3};
  LinearCrossEntropy runs[4];
  for (int i = 0; i < (h->backend->device == ON_CPU ? 4 : 2); i++) {
    omp_set_num_threads(threads[i]);
    runs[i] = fused(h, &p);
    check_bitwise_equal(h, "loss", runs[i].loss, runs[0].loss);
    check_bitwise_equal(h, "dx", runs[i].dx, runs[0].dx);
    if (threads[i] == own || !strcmp(harness_backend(), "cpu-plain"))
      check_bitwise_equal(h, "dweight", runs[i].dweight, runs[0].dweight);
  }
  omp_set_num_threads(own);
}

// The fewest chunks, nearly equal, of a multiple of 128 where that is no larger than asked for.
HARNESS_TEST(test_used_chunk) {
  const int64_t tokens[] = {250, 300, 300, 100, 4097, 1}, chunks[] = {128, 128, 200, 4096, 4096, 7};
  const int64_t used[] = {128, 128, 150, 100, 2176, 1};
  for (int i = 0; i < 6; i++) assert_int_equal(lce_used_chunk(tokens[i], chunks[i]), used[i]);
  const int64_t asked[] = {500, 9000, 50000}, on_cpu[] = {112, 1000, 4096}, on_gpu[] = {1024, 1125, 4096};
  for (int i = 0; i < 3; i++) assert_int_equal(lce_default_chunk(ON_CPU, asked[i]), on_cpu[i]);
  for (int i = 0; i < 3; i++) assert_int_equal(lce_default_chunk(ON_CUDA, asked[i]), on_gpu[i]);
}

// The CPU's exponential, from its smallest normal result to its largest, and tanh around its two forms.
HARNESS_TEST(test_exponential_and_tanh) {
  for (int i = -8733; i < 8872; i += 3) {
    float x = (float)i / 100, y = x / 100;
    assert_true(fabs(exp_f32(x) / exp((double)x) - 1) < 2 * dtype_epsilon(DTYPE_F32));
    assert_true(fabs(tanh_f32(y) - tanh((double)y)) <= 8 * dtype_epsilon(DTYPE_F32) * fabs(tanh((double)y)));
  }
  assert_true(exp_f32(-88) == 0 && exp_f32(-INFINITY) == 0 && exp_f32(89) == INFINITY && isnan(exp_f32(NAN)));
}

// On a plan, since no CPU has a dweight in another type than fp32.
HARNESS_TEST(test_narrow_dweight_is_written_once) {
  Harness *plan = &(Harness){.backend = plan_backend_create(ON_CUDA, DTYPE_BF16), .dtype = DTYPE_BF16};
  ReferenceLoss p = make_problem(h, 3, 8, 16, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(plan, &p, LCE_FUSED, 3);
  call.dweight = poisoned(plan, DTYPE_BF16, 16, 8);
  const char *part = "where it is written once";
  ASSERT_REFUSED(plan, call, part, a.chunk = 2);
  ASSERT_REFUSED(plan, call, part, a.accumulate = true);
  ASSERT_REFUSED(plan, call, part, a.terms.label_smoothing = 0.1f);
  ASSERT_REFUSED(plan, call, part, a.sampling.full_mass = 1);
  ASSERT_REFUSED(plan, call, part, a.shard.vocab_size = 16);
  linear_cross_entropy(plan->backend, call);
  backend_destroy(plan->backend);
}

HARNESS_TEST(test_refusals) {
  ReferenceLoss p = make_problem(h, 3, 4, 5, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 1);
  call.outputs = (TokenOutputs){0};
  Tensor two = poisoned_vector(h, DTYPE_F32, 2), wide = poisoned(h, h->dtype, 5, 6);
  ASSERT_REFUSED(h, call, "whose hidden sizes differ", a.weight = wide);
  ASSERT_REFUSED(h, call, "a chunk of 0 tokens", a.chunk = 0);
  ASSERT_REFUSED(h, call, "scale is inf, which is not finite", a.scale = INFINITY);
  ASSERT_REFUSED(h, call, "pass dx as well", (a.dx.data = NULL, a.sampling.full_mass = 1));
  ASSERT_REFUSED(h, call, "where it is written once", (a.dweight.dtype = DTYPE_BF16, a.accumulate = true));
  call.dx = call.dweight = (Tensor){0};
  ASSERT_REFUSED(h, call, "which holds no token", a.x = tensor_rows(a.x, 0, 0));
  ASSERT_REFUSED(h, call, "targets is int32 [2] for 3 tokens", a.targets = tensor_rows(a.targets, 0, 2));
  ASSERT_REFUSED(h, call, "loss is fp32 [2] and targets is int32 [3] for 3 tokens", a.loss = two);
  ASSERT_REFUSED(h, call, "token_weights is fp32 [2]", a.token_weights = two);
  ASSERT_REFUSED(h, call, "outputs.correct is fp32 [2] for 3 tokens", a.outputs.correct = two);
  ASSERT_REFUSED(h, call, "class_weights is fp32 [2] where [5] is needed", a.terms.class_weights = two);
  ASSERT_REFUSED(h, call, "a bias has a gradient where weight has one", a.dbias = two);
  ASSERT_REFUSED(h, call, "label_smoothing is 1.5, which is not in [0, 1]", a.terms.label_smoothing = 1.5f);
  ASSERT_REFUSED(h, call, "z_loss is -1", a.terms.z_loss = -1);
  ASSERT_REFUSED(h, call, "softcap is nan", a.terms.softcap = NAN);
  ASSERT_REFUSED(h, call, "the materialized mode has no log_sum_sq_probs",
                 (a.mode = LCE_MATERIALIZED, a.outputs.log_sum_sq_probs = a.loss));
  ASSERT_REFUSED(h, call, "use the materialized mode alone (./train: ",
                 (a.terms.softcap = 30, a.terms.label_smoothing = 0.1f));
}

TEST_MAIN(run_on_backends())
