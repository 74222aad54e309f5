// Gradient filtering against float64 that applies the same rule: tiles that are ragged in both directions,
// several chunks, counted tokens packed or not, the terms that may be combined with it; all tiles left out, or
// none; tiles on the border; stats; and the two operations by themselves.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "tests/loss_problem.h"

// --- problems with tiles to leave out ----------------------------------------------------------------------

// Tokens come in runs of KINDS kinds, and the logits of kind k are 0 in every KINDS-th tile of the vocabulary
// from the k-th on, GAP less in all others, but for a little noise: probabilities are of two sizes, and no
// rounding moves one across the border between them.
enum { KINDS = 3, RUN = 150 };
static const double GAP = 2;

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  int64_t size;         // of the chunks that result, all but the last
  bool ignored, packed; // some targets are ignored, and the counted ones named
  bool terms;           // those that a filter may be combined with
  bool mean, accumulate;
} Case;

typedef struct {
  ReferenceLoss r;
  double *x, *before; // before: dweight's first values
  LinearCrossEntropy call;
} Problem;

static void add_terms(Harness *h, ReferenceLoss *r) {
  double *class_weights = random_values(h, r->vocab, 0.1), *token_weights = random_values(h, r->rows, 0.1);
  for (int64_t j = 0; j < r->vocab; j++) class_weights[j] += 1;
  for (int64_t n = 0; n < r->rows; n++) token_weights[n] += 1;
  r->label_smoothing = 0.125;
  r->z_loss = 0.015625;
  r->class_weights = class_weights, r->token_weights = token_weights;
}

static Problem make_problem(Harness *h, Case c) {
  Problem p = {.x = random_values(h, c.rows * c.hidden, 0.05)};
  double *weight = random_values(h, c.vocab * c.hidden, 0.02);
  int32_t *targets = random_ids(h, c.rows, c.vocab);
  for (int64_t n = 0; n < c.rows; n++) {
    p.x[n * c.hidden + n / RUN % KINDS] += 4;
    if (c.ignored && n % 3 == 1) targets[n] = IGNORE_INDEX;
  }
  for (int64_t j = 0; j < c.vocab; j++)
    for (int k = 0; k < KINDS; k++)
      if (j / LCE_FILTER_COLUMNS % KINDS != k) weight[j * c.hidden + k] -= GAP / 4;
  double temperature = c.terms ? 1.25 : 1, low = exp(-GAP / temperature);
  double high = 1 / ((double)c.vocab * (1 + (KINDS - 1) * low) / KINDS); // the larger probabilities, about
  p.r = (ReferenceLoss){.rows = c.rows,
                        .hidden = c.hidden,
                        .vocab = c.vocab,
                        .x = p.x,
                        .weight = weight,
                        .targets = targets,
                        .scale = 0.5,
                        .mean = c.mean,
                        .temperature = temperature,
                        .filter = (float)(high * sqrt(low)),
                        .chunk = c.size,
                        .counted_alone = c.packed};
  reference_outputs(h, &p.r);
  reference_gradients(h, &p.r);
  if (c.terms) add_terms(h, &p.r);
  p.call = loss_call(h, &p.r, LCE_FUSED, c.chunk);
  p.call.outputs = (TokenOutputs){0};
  p.call.filtered = poisoned_vector(h, DTYPE_F32, 3);
  p.before = c.accumulate ? random_values(h, c.vocab * c.hidden, 0.001) : host_values(h, c.vocab * c.hidden);
  p.call.accumulate = c.accumulate;
  if (c.accumulate) p.call.dweight = tensor_from(h, DTYPE_F32, p.before, c.vocab, c.hidden);
  if (c.packed) p.call.rows = ids_from(h, counted_positions(h, targets, c.rows, &p.call.counted), c.rows);
  return p;
}

static double distance(const double *a, const double *b, int64_t count) {
  double squares = 0;
  for (int64_t i = 0; i < count; i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return sqrt(squares);
}

// `got` is what `want` says, and not what it would be without a filter.
static void check_filtered(Harness *h, const char *what, Tensor got, const double *want, const double *whole,
                           double terms, double size) {
  int64_t count = tensor_count(got);
  double off = distance(values_of(h, got), want, count), filter = distance(whole, want, count);
  check_values(h, what, got, want, of_size(within_stored(h, 8, terms), size));
  if (!(off < 0.1 * filter)) fail_msg("%s is off by %g, and the filter changes %g", what, off, filter);
}

static void check_stats(Harness *h, const Problem *p) {
  double *stats = values_of(h, p->call.filtered), epsilon = dtype_epsilon(h->dtype);
  const double *want = p->r.filtered;
  if (!(stats[0] == want[0] && stats[1] == want[1] &&
        fabs(stats[2] - want[2]) <= (0.5 * epsilon + 1e-5) * want[2]))
    fail_msg("%g of %g tiles and a mass of %.9g are left out, not %g of %g and %.9g", stats[0], stats[1],
             stats[2], want[0], want[1], want[2]);
}

static void check_case(Harness *h, Case c) {
  Problem p = make_problem(h, c);
  int64_t dx_count = c.rows * c.hidden, dweight_count = c.vocab * c.hidden;
  ReferenceLoss whole = p.r;
  whole.filter = 0;
  whole.dx = host_values(h, dx_count), whole.dweight = host_values(h, dweight_count);
  reference_loss(&whole);
  reference_loss(&p.r);
  assert_true(p.r.filtered[0] > 0 && p.r.filtered[0] < p.r.filtered[1]);
  linear_cross_entropy(h->backend, p.call);
  for (int64_t i = 0; i < dweight_count; i++) p.r.dweight[i] += p.before[i], whole.dweight[i] += p.before[i];
  check_stats(h, &p);
  check_values(h, "loss", p.call.loss, p.r.loss, of_size(within(16, (double)(c.hidden + c.vocab)), 8));
  check_filtered(h, "dx", p.call.dx, p.r.dx, whole.dx, (double)(c.hidden + c.vocab), p.r.scale);
  check_filtered(h, "dweight", p.call.dweight, p.r.dweight, whole.dweight, (double)(c.hidden + c.rows),
                 p.r.scale);
  memory_pop_to(&h->backend->memory, 0);
}

static void test_cases(void **state) {
  static const Case cases[] = {
      {.rows = 150, .hidden = 24, .vocab = 768, .chunk = 150, .size = 150},
      {.rows = 150, .hidden = 24, .vocab = 768, .chunk = 40, .size = 38},
      {.rows = 301, .hidden = 40, .vocab = 1401, .chunk = 1000, .size = 301},
      {.rows = 600, .hidden = 17, .vocab = 777, .chunk = 256, .size = 256, .accumulate = true},
      {.rows = 450, .hidden = 72, .vocab = 2003, .chunk = 150, .size = 150, .terms = true, .mean = true},
      {.rows = 450, .hidden = 16, .vocab = 1030, .chunk = 225, .size = 225, .ignored = true},
      {.rows = 450, .hidden = 16, .vocab = 1030, .chunk = 225, .size = 150, .ignored = true, .packed = true},
      {.rows = 900,
       .hidden = 40,
       .vocab = 900,
       .chunk = 500,
       .size = 384,
       .ignored = true,
       .packed = true,
       .terms = true,
       .mean = true,
       .accumulate = true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(*state, cases[i]);
}

// --- the border and the ends -------------------------------------------------------------------------------

// x is 0, so all probabilities are 1 / 1024, in every arithmetic.
static Problem uniform(Harness *h, int64_t rows, float filter) {
  Problem p = make_problem(h, (Case){.rows = rows, .hidden = 16, .vocab = 1024, .chunk = rows, .size = rows});
  fill_zero(h->backend, p.call.x);
  for (int64_t i = 0; i < rows * 16; i++) p.x[i] = 0;
  p.r.filter = p.call.terms.filter = filter;
  return p;
}

static void test_border(void **state) {
  Harness *h = *state;
  const float border = 1.0f / 1024;
  for (int beyond = 0; beyond < 2; beyond++) {
    Problem p = uniform(h, 200, beyond ? nextafterf(border, 1) : border);
    reference_loss(&p.r);
    assert_true(p.r.filtered[0] == (beyond ? 8 : 0) && p.r.filtered[1] == 8);
    linear_cross_entropy(h->backend, p.call);
    check_stats(h, &p);
    check_values(h, "dx on the border", p.call.dx, p.r.dx, within_stored(h, 2, 1024));
    harness_pop(state);
  }
}

// A NaN is not below anything: its tiles count, and spoil no other row of dx.
static void test_nan(void **state) {
  Harness *h = *state;
  Problem p = uniform(h, 200, 0.25f);
  p.x[5 * 16 + 3] = NAN;
  p.call.x = tensor_from(h, h->dtype, p.x, 200, 16);
  linear_cross_entropy(h->backend, p.call);
  double *stats = values_of(h, p.call.filtered), *dx = values_of(h, p.call.dx);
  assert_true(stats[0] == 4 && stats[1] == 8);
  for (int64_t i = 0; i < 200 * 16; i++) assert_int_equal(isnan(dx[i]) != 0, i / 16 == 5);
}

static void test_off(void **state) {
  Harness *h = *state;
  const Case c = {.rows = 301, .hidden = 40, .vocab = 1401, .chunk = 128, .size = 128};
  Problem p = make_problem(h, c);
  // A filter that nothing is below changes no more than the order of sums.
  p.r.filter = p.call.terms.filter = 0x1p-60f;
  linear_cross_entropy(h->backend, p.call);
  reference_loss(&p.r);
  assert_true(p.r.filtered[0] == 0);
  check_stats(h, &p);
  check_values(h, "dx", p.call.dx, p.r.dx, of_size(within_stored(h, 8, (double)(c.hidden + c.vocab)), 0.5));
  check_values(h, "dweight", p.call.dweight, p.r.dweight,
               of_size(within_stored(h, 8, (double)(c.hidden + c.rows)), 0.5));
  // 0 is no filter, to the bit.
  LinearCrossEntropy zero = p.call, none = p.call;
  zero.terms.filter = 0, zero.filtered = (Tensor){0};
  none.terms = (LossTerms){.temperature = p.call.terms.temperature}, none.filtered = (Tensor){0};
  none.dx = poisoned(h, h->dtype, c.rows, c.hidden);
  none.dweight = poisoned(h, DTYPE_F32, c.vocab, c.hidden);
  none.loss = poisoned_vector(h, DTYPE_F32, c.rows);
  linear_cross_entropy(h->backend, zero);
  linear_cross_entropy(h->backend, none);
  check_bitwise_equal(h, "loss with a filter of 0", zero.loss, none.loss);
  check_bitwise_equal(h, "dx with a filter of 0", zero.dx, none.dx);
  check_bitwise_equal(h, "dweight with a filter of 0", zero.dweight, none.dweight);
}

// The same bits again, with more threads; losses are those without a filter; zero stats without gradients.
static void test_repeats(void **state) {
  Harness *h = *state;
  const Case c = {.rows = 450, .hidden = 72, .vocab = 2003, .chunk = 150, .size = 150};
  Problem p = make_problem(h, c);
  LinearCrossEntropy again = p.call;
  again.dx = poisoned(h, h->dtype, c.rows, c.hidden);
  again.dweight = poisoned(h, DTYPE_F32, c.vocab, c.hidden);
  again.filtered = poisoned_vector(h, DTYPE_F32, 3);
  int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  linear_cross_entropy(h->backend, p.call);
  omp_set_num_threads(3);
  linear_cross_entropy(h->backend, again);
  omp_set_num_threads(threads);
  check_bitwise_equal(h, "dx again", again.dx, p.call.dx);
  check_bitwise_equal(h, "dweight again", again.dweight, p.call.dweight);
  check_bitwise_equal(h, "stats again", again.filtered, p.call.filtered);
  LinearCrossEntropy whole = again, forward = again;
  whole.terms.filter = 0, whole.filtered = (Tensor){0};
  whole.loss = poisoned_vector(h, DTYPE_F32, c.rows);
  linear_cross_entropy(h->backend, whole);
  check_bitwise_equal(h, "loss", whole.loss, p.call.loss);
  forward.dx = forward.dweight = (Tensor){0};
  linear_cross_entropy(h->backend, forward);
  check_values(h, "stats of the forward pass", forward.filtered, (double[]){0, 0, 0}, within(0, 1));
}

// --- the operations by themselves --------------------------------------------------------------------------

typedef struct {
  int64_t rows, hidden, vocab, stride;
  bool accumulate;
  float alpha;
  int64_t every; // tile (b, t) counts where 5 b + 3 t is a multiple of `every`; 0: none counts
} Shape;

typedef struct {
  Shape s;
  int64_t down, across;
  double *exps, *row_sum, *target_e, *stats, *tiles; // stats and tiles: as they must become
  LceFilter call;
} Filtering;

static bool tile_counts(Shape s, int64_t n, int64_t j) {
  return s.every && (5 * (n / LCE_FILTER_ROWS) + 3 * (j / LCE_FILTER_COLUMNS)) % s.every == 0;
}

// Every entry is below half of its row's threshold, but for the last one of a tile that counts, in its last row
// and column, where an inattentive eye would miss it.
static Filtering make_filtering(Harness *h, Shape s) {
  const float epsilon = 0.01f;
  Filtering f = {.s = s,
                 .down = (s.rows + LCE_FILTER_ROWS - 1) / LCE_FILTER_ROWS,
                 .across = (s.vocab + LCE_FILTER_COLUMNS - 1) / LCE_FILTER_COLUMNS,
                 .exps = random_values(h, s.rows * s.vocab, 1),
                 .row_sum = random_values(h, s.rows, 1),
                 .target_e = random_values(h, s.rows, 1),
                 .stats = host_values(h, 3)};
  f.tiles = host_values(h, f.down * f.across);
  for (int64_t n = 0; n < s.rows; n++) {
    bool ignored = n % 7 == 2; // as the logits-exp pass leaves such a row: nothing in E
    f.row_sum[n] = ignored ? 0 : 8 + 4 * fabs(f.row_sum[n]);
    f.target_e[n] = ignored ? 1 : 1 / (1 + fabs(f.target_e[n]));
    bool last_row = (n + 1) % LCE_FILTER_ROWS == 0 || n + 1 == s.rows;
    for (int64_t j = 0; j < s.vocab; j++) {
      double *e = &f.exps[n * s.vocab + j], threshold = (double)epsilon * (f.row_sum[n] + f.target_e[n]);
      bool last = last_row && ((j + 1) % LCE_FILTER_COLUMNS == 0 || j + 1 == s.vocab);
      *e = last && tile_counts(s, n, j) ? 2 * threshold : ignored ? 0 : threshold / 2 / (1 + fabs(*e));
    }
  }
  f.call = (LceFilter){.tiles = poisoned(h, DTYPE_F32, f.down, f.across),
                       .stats = vector_from(h, DTYPE_F32, (double[]){3, 5, 0.25}, 3),
                       .exps = strided_from(h, h->dtype, f.exps, s.rows, s.vocab, s.stride),
                       .rows = {.row_sum = vector_from(h, DTYPE_F32, f.row_sum, s.rows),
                                .target_e = vector_from(h, DTYPE_F32, f.target_e, s.rows)},
                       .epsilon = epsilon};
  f.stats[0] = 3, f.stats[1] = 5 + (double)(f.down * f.across), f.stats[2] = 0.25;
  for (int64_t n = 0; n < s.rows; n++)
    for (int64_t j = 0; j < s.vocab; j++) {
      double p = f.exps[n * s.vocab + j] / (f.row_sum[n] + f.target_e[n]);
      int64_t tile = n / LCE_FILTER_ROWS * f.across + j / LCE_FILTER_COLUMNS;
      bool first = n % LCE_FILTER_ROWS == 0 && j % LCE_FILTER_COLUMNS == 0;
      if (tile_counts(s, n, j)) {
        f.tiles[tile] = -1;
        continue;
      }
      f.tiles[tile] += p;
      f.stats[0] += first, f.stats[2] += p;
    }
  return f;
}

static void check_filtered_gemms(Harness *h, const Filtering *f, Dtype dx_dtype) {
  Shape s = f->s;
  double *weight = random_values(h, s.vocab * s.hidden, 1), *x = random_values(h, s.rows * s.hidden, 1);
  double *dx = host_values(h, s.rows * s.hidden), alpha = s.alpha == 0.0f ? 1 : (double)s.alpha;
  double *dweight =
      s.accumulate ? random_values(h, s.vocab * s.hidden, 1) : host_values(h, s.vocab * s.hidden);
  LceFilteredGemms a = {.dx_raw = poisoned(h, dx_dtype, s.rows, s.hidden),
                        .dweight = s.accumulate ? tensor_from(h, DTYPE_F32, dweight, s.vocab, s.hidden)
                                                : poisoned(h, DTYPE_F32, s.vocab, s.hidden),
                        .tiles = f->call.tiles,
                        .exps = f->call.exps,
                        .weight = tensor_from(h, h->dtype, weight, s.vocab, s.hidden),
                        .scaled_x = tensor_from(h, h->dtype, x, s.rows, s.hidden),
                        .alpha = s.alpha,
                        .accumulate = s.accumulate};
  for (int64_t n = 0; n < s.rows; n++)
    for (int64_t j = 0; j < s.vocab; j++) {
      double e = f->exps[n * s.vocab + j];
      if (!tile_counts(s, n, j)) continue;
      for (int64_t i = 0; i < s.hidden; i++) {
        dx[n * s.hidden + i] += e * weight[j * s.hidden + i];
        dweight[j * s.hidden + i] += alpha * e * x[n * s.hidden + i];
      }
    }
  lce_filtered_gemms(h->backend, a);
  // In bf16 a GPU may add the last V mod 8 terms to what it has rounded before.
  bool twice = dx_dtype != DTYPE_F32 && s.vocab % 8;
  check_values(h, "dx_raw", a.dx_raw, dx,
               twice ? within_stored(h, 0.5, 1) : of_size(within(8, (double)s.vocab), 0.1));
  check_values(h, "dweight", a.dweight, dweight, of_size(within(8, (double)s.rows), 0.1));
}

// All tiles count, some, the first alone, or none.
static void test_operations(void **state) {
  Harness *h = *state;
  static const Shape shapes[] = {
      {1, 1, 1, 1, .alpha = 0.5f},          {5, 24, 8, 64, .accumulate = true},
      {128, 8, 256, 256, .alpha = 0.5f},    {129, 9, 257, 263, .alpha = 2, .accumulate = true},
      {257, 64, 640, 640, .alpha = 1},      {300, 33, 1001, 1003, .accumulate = true},
      {385, 72, 1283, 1344, .alpha = 0.25f}};
  static const int64_t every[] = {1, 2, 3, 1009, 0};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (size_t k = 0; k < sizeof every / sizeof *every; k++) {
      Shape s = shapes[i];
      s.every = every[k];
      Filtering f = make_filtering(h, s);
      lce_filter(h->backend, f.call);
      check_values(h, "tiles", f.call.tiles, f.tiles, within(8, (double)(s.rows + s.vocab)));
      check_values(h, "stats", f.call.stats, f.stats, within(8, (double)(s.rows + s.vocab)));
      check_gaps(h, "exps", in_pieces(f.call.exps));
      check_filtered_gemms(h, &f, DTYPE_F32);
      if (h->dtype != DTYPE_F32) check_filtered_gemms(h, &f, h->dtype);
      harness_pop(state);
    }
}

static void test_refusals(void **state) {
  Harness *h = *state;
  Problem p = make_problem(h, (Case){.rows = 3, .hidden = 4, .vocab = 5, .chunk = 3, .size = 3});
  p.call.terms.filter = 0.001f;
  LinearCrossEntropy b = p.call;
  b.terms.filter = 1;
  assert_fails(h, "filter is 1, which is not in [0, 1)", linear_cross_entropy(h->backend, b));
  b.terms.filter = NAN;
  assert_fails(h, "filter is nan", linear_cross_entropy(h->backend, b));
  b = p.call, b.mode = LCE_MATERIALIZED;
  assert_fails(h, "a filter of 0.001 needs the fused mode", linear_cross_entropy(h->backend, b));
  b = p.call, b.terms.softcap = 5;
  assert_fails(h, "a filter of 0.001 acts on exponentials", linear_cross_entropy(h->backend, b));
  b = p.call, b.outputs.entropy = poisoned_vector(h, DTYPE_F32, 3);
  assert_fails(h, "a filter of 0.001 acts on exponentials", linear_cross_entropy(h->backend, b));
  b = p.call, b.terms.filter = 0;
  assert_fails(h, "filtered is fp32 [3] with a filter of 0", linear_cross_entropy(h->backend, b));
  b = p.call, b.filtered = poisoned_vector(h, DTYPE_F32, 2);
  assert_fails(h, "filtered is fp32 [2]", linear_cross_entropy(h->backend, b));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_cases, harness_pop),
      cmocka_unit_test_teardown(test_border, harness_pop),
      cmocka_unit_test_teardown(test_nan, harness_pop),
      cmocka_unit_test_teardown(test_off, harness_pop),
      cmocka_unit_test_teardown(test_repeats, harness_pop),
      cmocka_unit_test_teardown(test_operations, harness_pop),
      cmocka_unit_test_teardown(test_refusals, harness_pop),
  };
  return run_on_backends(tests, sizeof tests / sizeof *tests);
}
