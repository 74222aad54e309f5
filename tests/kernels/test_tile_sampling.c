// Tile sampling against float64 that draws by the same rule, its ends, its mean; and the operation by itself.

#include <omp.h>

#include "kernels/base/random.h"
#include "tests/loss_problem.h"

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  int64_t size; // of the chunks that result, all but the last
  bool ignored; // some targets
  bool terms;   // those that sampling may be combined with
  bool mean, accumulate;
} Case;

typedef struct {
  ReferenceLoss r;
  LossBefore before;
  LinearCrossEntropy call;
} Problem;

static Problem make_problem(Harness *h, Case c) {
  Problem made = {.r = loss_problem_tiles(h, c.rows, c.hidden, c.vocab, c.size)};
  ReferenceLoss *p = &made.r;
  for (int64_t n = 1; n < c.rows && c.ignored; n += 3) p->targets[n] = IGNORE_INDEX;
  if (c.terms) loss_problem_add(h, p, TERM_SMOOTHING | TERM_Z_LOSS | TERM_CLASS_WEIGHTS | TERM_TOKEN_WEIGHTS);
  p->temperature = c.terms ? 1.25 : 1, p->mean = c.mean;
  made.call = sampled_loss_call(h, p, c.chunk);
  if (c.accumulate) loss_call_adds(h, &made.call, &made.before);
  return made;
}

// The call again, with outputs of its own.
static LinearCrossEntropy with_outputs(Harness *h, LinearCrossEntropy a) {
  a.loss = poisoned_vector(h, DTYPE_F32, a.x.shape[0]);
  a.dx = poisoned(h, h->dtype, a.x.shape[0], a.x.shape[1]);
  a.dweight = poisoned(h, DTYPE_F32, a.weight.shape[0], a.weight.shape[1]);
  if (tensor_exists(a.sampling.stats)) a.sampling.stats = poisoned_vector(h, DTYPE_F32, 3);
  return a;
}

static LinearCrossEntropy without_sampling(Harness *h, LinearCrossEntropy a) {
  a.sampling = (TileSampling){0};
  return with_outputs(h, a);
}

// The call as in float64, where some tiles are dropped (or none, or all).
static void check_problem(Harness *h, Problem *p) {
  linear_cross_entropy(h->backend, p->call);
  check_sampled(h, &p->call, &p->r, p->before);
}

static void sampled_case(Harness *h, const void *shape) {
  Problem p = make_problem(h, *(const Case *)shape);
  check_problem(h, &p);
  if (p.r.full_mass == 0.0) return;
  assert_some_dropped(&p.r);
  // And not what it would be without sampling.
  ReferenceLoss whole = p.r;
  whole.full_mass = 0;
  reference_gradients(h, &whole);
  reference_loss(&whole);
  int64_t dx = p.r.rows * p.r.hidden, dweight = p.r.vocab * p.r.hidden;
  double *got = values_of(h, p.call.dweight);
  for (int64_t i = 0; i < dweight && p.before.dweight; i++) got[i] -= p.before.dweight[i];
  assert_true(euclidean_distance(values_of(h, p.call.dx), p.r.dx, dx) <
              0.1 * euclidean_distance(whole.dx, p.r.dx, dx));
  assert_true(euclidean_distance(got, p.r.dweight, dweight) <
              0.1 * euclidean_distance(whole.dweight, p.r.dweight, dweight));
}

HARNESS_TEST(test_cases) {
  static const Case cases[] = {
      {150, 24, 768, 150, 150, .terms = false},
      {150, 24, 768, 40, 38, .terms = false},
      {301, 40, 1401, 1000, 301, .terms = false},
      {600, 17, 777, 256, 256, .accumulate = true},
      {450, 72, 2003, 150, 150, .terms = true, .mean = true},
      {450, 16, 1030, 225, 225, .ignored = true},
      // Many chunks, whose kept tiles a backend may keep to make dW of several.
      {1500, 72, 900, 128, 128, .accumulate = true},
      {700, 40, 1283, 100, 100, .ignored = true},
      {900, 40, 900, 500, 450, .ignored = true, .terms = true, .mean = true, .accumulate = true}};
  RUN_CASES(h, sampled_case, cases);
}

// Below a full mass of 2^-5 gradients are exact, as for dx alone; with 2^-5 all tiles here are kept.
HARNESS_TEST(test_all_kept) {
  const Case c = {301, 40, 1401, 128, 128, .terms = false};
  Problem p = make_problem(h, c);
  LinearCrossEntropy plain = without_sampling(h, p.call), exact[3];
  linear_cross_entropy(h->backend, plain);
  for (int i = 0; i < 3; i++) {
    exact[i] = with_outputs(h, p.call);
    exact[i].sampling.full_mass = i == 0 ? 0x1.fffffep-6f : 50;
    if (i == 1) exact[i].sampling = (TileSampling){.seed = 9};
    if (i == 2) exact[i].dweight = (Tensor){0};
    linear_cross_entropy(h->backend, exact[i]);
    check_same_bits(h, &exact[i], &plain);
    if (i != 1) check_values(h, "stats", exact[i].sampling.stats, (double[]){0, 0, 0}, within(0, 1));
  }
  p.r.full_mass = 0x1p-5, p.call.sampling.full_mass = 0x1p-5f;
  check_problem(h, &p);
  assert_true(p.r.sampled[0] == 0);
}

// Only the target's own entry remains.
HARNESS_TEST(test_all_dropped) {
  if (!samples(h, 40, 151)) skip();
  const Case c = {301, 40, 1401, 200, 151, .terms = false};
  Problem p = make_problem(h, c);
  p.r.full_mass = 1e30, p.call.sampling.full_mass = 1e30f;
  check_problem(h, &p);
  assert_true(p.r.sampled[0] == p.r.sampled[1]);
}

// A NaN keeps its tiles, more than a buffer holds, and spoils no other row of dx; dweight is still written.
HARNESS_TEST(test_nan) {
  enum { ROWS = 200, HIDDEN = 16, VOCAB = 1401 };
  if (!samples(h, HIDDEN, ROWS)) skip();
  Problem p = make_problem(h, (Case){ROWS, HIDDEN, VOCAB, ROWS, ROWS, .terms = false});
  double *stale = host_values(h, VOCAB * HIDDEN);
  for (int64_t i = 0; i < VOCAB * HIDDEN; i++) stale[i] = 1e6;
  p.r.x[5 * HIDDEN + 3] = NAN;
  p.call.x = tensor_from(h, h->dtype, p.r.x, ROWS, HIDDEN);
  p.call.dweight = tensor_from(h, DTYPE_F32, stale, VOCAB, HIDDEN);
  p.call.sampling.full_mass = 1e30f;
  linear_cross_entropy(h->backend, p.call);
  double *stats = values_of(h, p.call.sampling.stats), *dx = values_of(h, p.call.dx);
  const double *dweight = values_of(h, p.call.dweight);
  assert_true(stats[0] == 8 && stats[1] == 16);
  for (int64_t i = 0; i < ROWS * HIDDEN; i++) assert_int_equal(isnan(dx[i]) != 0, i / HIDDEN == 5);
  for (int64_t i = 0; i < VOCAB * HIDDEN; i++) assert_false(fabs(dweight[i]) > 1e3);
}

// A target with certainty: the mass underflows, or is 0.
HARNESS_TEST(test_certain) {
  if (!samples(h, 16, 140)) skip();
  ReferenceLoss sure = loss_problem(h, 140, 16, 500, 1);
  for (int64_t n = 0; n < 140; n++) sure.targets[n] = 3;
  for (int64_t i = 0; i < 140 * 16; i++) sure.x[i] = i % 16 == 0 ? 8 : 0;
  for (int64_t j = 0; j < 500; j++) sure.weight[j * 16] = j == 3 ? 20 : 0;
  LinearCrossEntropy call = sampled_loss_call(h, &sure, 140);
  call.sampling.full_mass = 1;
  linear_cross_entropy(h->backend, call);
  assert_true(values_of(h, call.sampling.stats)[0] == 6);
  check_values(h, "dx of certain targets", call.dx, host_values(h, 140 * 16), with_size(within(1, 1), 1e-20));
}

// A row that is redone with its maximum as anchor has the mass of the new exponentials.
HARNESS_TEST(test_redone_row) {
  if (!samples(h, 24, 130)) skip();
  ReferenceLoss p = loss_problem(h, 130, 24, 500, 0x1p-7);
  p.temperature = 0x1p-7;
  loss_problem_lead(&p, 7, 450, 90 * p.temperature);
  p.full_mass = 100, p.seed = 3, p.chunk = 130;
  Problem made = {.r = p};
  made.call = sampled_loss_call(h, &made.r, 130);
  check_problem(h, &made);
  assert_some_dropped(&made.r);
}

// Threads change no bit, another seed does; losses are those without sampling; without gradients stats are 0.
HARNESS_TEST(test_repeats) {
  if (!samples(h, 72, 150)) skip();
  const Case c = {450, 72, 2003, 150, 150, .terms = false};
  Problem p = make_problem(h, c);
  LinearCrossEntropy again = with_outputs(h, p.call), other = with_outputs(h, p.call);
  LinearCrossEntropy plain = without_sampling(h, p.call), forward = with_outputs(h, p.call);
  other.sampling.seed = 8;
  int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  linear_cross_entropy(h->backend, p.call);
  omp_set_num_threads(3);
  linear_cross_entropy(h->backend, again);
  omp_set_num_threads(threads);
  check_same_bits(h, &again, &p.call);
  check_bitwise_equal(h, "stats again", again.sampling.stats, p.call.sampling.stats);
  linear_cross_entropy(h->backend, other);
  assert_true(euclidean_distance(values_of(h, other.dx), values_of(h, p.call.dx), c.rows * c.hidden) > 0);
  linear_cross_entropy(h->backend, plain);
  check_bitwise_equal(h, "loss", plain.loss, p.call.loss);
  forward.dweight = forward.dx = (Tensor){0};
  linear_cross_entropy(h->backend, forward);
  check_values(h, "stats of the forward pass", forward.sampling.stats, (double[]){0, 0, 0}, within(0, 1));
}

HARNESS_TEST(test_unbiased) {
  if (small_shapes()) skip(); // 256 seeds
  if (!samples(h, 16, 300)) skip();
  const Case c = {600, 16, 1500, 300, 300, .terms = false};
  Problem p = make_problem(h, c);
  LinearCrossEntropy plain = without_sampling(h, p.call);
  // In fp32: the exact gradient's own rounding to bf16 would not average out.
  plain.dx = poisoned(h, DTYPE_F32, c.rows, c.hidden);
  p.call.dx = poisoned(h, DTYPE_F32, c.rows, c.hidden);
  linear_cross_entropy(h->backend, plain);
  check_unbiased(h, linear_cross_entropy, p.call, &plain, 256);
}

typedef struct {
  int64_t rows, hidden, vocab, stride;
  bool accumulate;
  float alpha;
  uint64_t seed; // 0: 11
} Shape;

// A tile's probability of being kept, and the mass that gives it.
typedef struct {
  double q, mass;
} Chance;

// Tile (b, t) is kept where `every` divides 5 b + 3 t (0: none); every fourth by a probability of 1/4.
static Chance chance_of(int64_t every, int64_t b, int64_t t, int64_t i) {
  bool some = every && (5 * b + 3 * t) % every == 0;
  double q = !some ? 0 : i % 4 == 1 ? 0.25 : 1;
  return (Chance){q, q};
}

// As many tiles of a row as can be kept: 181 masses of 0.7072, which is rounded to 1, make 128.
static Chance chance_of_most(int64_t every, int64_t b, int64_t t, int64_t i) {
  return t < 181 ? (Chance){1, 0.7072} : (Chance){0, 0};
}

// Masses near the least probability, 2^-32.
static Chance chance_of_least(int64_t every, int64_t b, int64_t t, int64_t i) {
  return (Chance){0x1p-31, 0x1p-31};
}

// With a full mass of 1: a row of 128 probabilities adds up to 128. Tiles that are dropped hold NaN.
static void check_operation(Harness *h, Shape s, Chance (*chance)(int64_t, int64_t, int64_t, int64_t),
                            int64_t every, Dtype dx_dtype) {
  if (!samples(h, s.hidden, s.rows)) return;
  uint64_t seed = s.seed ? s.seed : 11;
  int64_t down = (s.rows + LCE_TILE_ROWS - 1) / LCE_TILE_ROWS;
  int64_t across = (s.vocab + LCE_TILE_COLUMNS - 1) / LCE_TILE_COLUMNS;
  double *exps = random_values(h, s.rows * s.vocab, 1), *weight = random_values(h, s.vocab * s.hidden, 1);
  double *x = random_values(h, s.rows * s.hidden, 1), *dx = host_values(h, s.rows * s.hidden);
  double *dweight =
      s.accumulate ? random_values(h, s.vocab * s.hidden, 1) : host_values(h, s.vocab * s.hidden);
  double *sums = host_values(h, s.rows * across), *tiles = host_values(h, down * across);
  double *row_sum = random_values(h, s.rows, 1), *target_e = random_values(h, s.rows, 1),
         *rescale = random_values(h, s.rows, 1);
  double stats[3] = {3, 5 + (double)(down * across), 0.25}, alpha = s.alpha == 0.0f ? 1 : (double)s.alpha;
  for (int64_t b = 0; b < down; b++) {
    double sum = (double)(random_bits(seed, 2, (uint64_t)b) >> 32) * 0x1p-32;
    for (int64_t t = 0; t < across; t++) {
      int64_t i = b * across + t;
      Chance c = chance(every, b, t, i);
      bool kept = floor(sum + c.q) > floor(sum);
      sum += c.q;
      tiles[i] = kept ? 1 / c.q : -c.mass;
      if (!kept) stats[0]++, stats[2] += c.mass;
    }
  }
  for (int64_t n = 0; n < s.rows; n++) {
    row_sum[n] = 8 + fabs(row_sum[n]), target_e[n] = 1 / (1 + fabs(target_e[n])),
    rescale[n] = 1 / (1 + fabs(rescale[n]));
    for (int64_t t = 0; t < across; t++) {
      int64_t b = n / LCE_TILE_ROWS, i = b * across + t, height = s.rows - b * LCE_TILE_ROWS;
      if (height > LCE_TILE_ROWS) height = LCE_TILE_ROWS;
      double mass = chance(every, b, t, i).mass;
      sums[n * across + t] = mass / (double)height * (row_sum[n] + target_e[n]) / rescale[n];
      for (int64_t j = t * LCE_TILE_COLUMNS; j < s.vocab && j < (t + 1) * LCE_TILE_COLUMNS; j++)
        if (tiles[i] <= 0) exps[n * s.vocab + j] = NAN;
    }
  }
  LceSampledGradients a = {.dx_raw = poisoned(h, dx_dtype, s.rows, s.hidden),
                           .dweight = s.accumulate ? tensor_from(h, DTYPE_F32, dweight, s.vocab, s.hidden)
                                                   : poisoned(h, DTYPE_F32, s.vocab, s.hidden),
                           .tiles = poisoned(h, DTYPE_F32, down, across),
                           .stats = vector_from(h, DTYPE_F32, (double[]){3, 5, 0.25}, 3),
                           .exps = strided_from(h, h->dtype, exps, s.rows, s.vocab, s.stride),
                           .tile_sums = tensor_from(h, DTYPE_F32, sums, s.rows, across),
                           .softmax = {.row_sum = vector_from(h, DTYPE_F32, row_sum, s.rows),
                                       .target_e = vector_from(h, DTYPE_F32, target_e, s.rows),
                                       .rescale = vector_from(h, DTYPE_F32, rescale, s.rows)},
                           .weight = tensor_from(h, h->dtype, weight, s.vocab, s.hidden),
                           .scaled_x = tensor_from(h, h->dtype, x, s.rows, s.hidden),
                           .full_mass = 1,
                           .seed = seed,
                           .stream = 2,
                           .alpha = s.alpha,
                           .kept_rows = s.rows,
                           .first = true,
                           .flush = true,
                           .accumulate = s.accumulate};
  const BackendScratch *scratch = h->backend->scratch;
  if (scratch->lce_kept_bytes) {
    size_t bytes = scratch->lce_kept_bytes(a.weight, a.dx_raw, a.dweight, s.rows, a.full_mass);
    a.kept = poisoned_vector(h, DTYPE_I32, (int64_t)bytes / 4);
  }
  for (int64_t n = 0; n < s.rows; n++)
    for (int64_t j = 0; j < s.vocab; j++) {
      double factor = tiles[n / LCE_TILE_ROWS * across + j / LCE_TILE_COLUMNS];
      double e = factor * exps[n * s.vocab + j];
      if (factor <= 0) continue; // a tile that is dropped
#pragma omp simd
      for (int64_t k = 0; k < s.hidden; k++) {
        dx[n * s.hidden + k] += e * weight[j * s.hidden + k];
        dweight[j * s.hidden + k] += alpha * e * x[n * s.hidden + k];
      }
    }
  lce_sampled_gradients(h->backend, a);
  // In bf16 a GPU may add the last V mod 8 terms to what it has rounded before.
  bool twice = dx_dtype != DTYPE_F32 && s.vocab % 8;
  check_values(h, "tiles", a.tiles, tiles, within(8, (double)LCE_TILE_ROWS));
  check_values(h, "stats", a.stats, stats, within(8, (double)LCE_TILE_ROWS));
  check_gaps(h, "exps", in_pieces(a.exps));
  check_values(h, "dx_raw", a.dx_raw, dx,
               twice ? within_stored(h, 0.5, 1) : with_size(within(8, (double)s.vocab), 0.1));
  check_values(h, "dweight", a.dweight, dweight, with_size(within(8, (double)s.rows), 0.1));
}

// All tiles are kept, some, the first alone, or none.
HARNESS_TEST(test_operation) {
  static const Shape shapes[] = {
      {1, 1, 1, 1, .alpha = 0.5f},           {5, 25, 8, 65, .accumulate = true},
      {128, 8, 192, 192, .alpha = 0.5f},     {129, 16, 193, 200, .alpha = 2, .accumulate = true},
      {257, 64, 640, 640, .alpha = 1},       {300, 40, 1001, 1008, .accumulate = true},
      {385, 72, 1283, 1344, .alpha = 0.25f}, {600, 384, 3000, 3008, .accumulate = true},
      {256, 264, 19200, 19200, .alpha = 1}}; // on a GPU: many tiles of dW for each SM, few steps in each
  static const int64_t every[] = {1, 2, 3, 1009, 0};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (size_t k = 0; k < sizeof every / sizeof *every; k++)
      for (int dtype = 0; dtype < (h->dtype == DTYPE_F32 ? 1 : 2); dtype++) {
        if (shapes[i].vocab > 2000 && every[k] != 3) continue;
        if (shapes[i].vocab > 10000 && h->backend->device == ON_CPU) continue;
        check_operation(h, shapes[i], chance_of, every[k], dtype ? h->dtype : DTYPE_F32);
        harness_clear(h);
      }
}

HARNESS_TEST(test_most_tiles_of_a_row) {
  check_operation(h, (Shape){128, 8, 188 * LCE_TILE_COLUMNS, 188 * LCE_TILE_COLUMNS, .alpha = 1},
                  chance_of_most, 0, DTYPE_F32);
}

// With a draw so close to the next whole number that any larger probabilities would keep a tile.
HARNESS_TEST(test_least_probability) {
  enum { TILES = 40 };
  uint64_t seed = 1, room;
  do {
    room = ((uint64_t)1 << 32) - (random_bits(++seed, 2, 0) >> 32);
  } while (room <= 2 * TILES || room > 0x1p12 * TILES); // of 2^-32: a mass adds 2
  check_operation(h, (Shape){128, 8, TILES * LCE_TILE_COLUMNS, TILES * LCE_TILE_COLUMNS, .seed = seed},
                  chance_of_least, 0, DTYPE_F32);
}

HARNESS_TEST(test_refusals) {
  Problem p = make_problem(h, (Case){3, 4, 5, 3, 3, .terms = false});
  ASSERT_REFUSED(h, p.call, "sampling.full_mass is -1, which is not 0 or more and finite",
                 a.sampling.full_mass = -1);
  ASSERT_REFUSED(h, p.call, "sampling.full_mass is nan", a.sampling.full_mass = NAN);
  ASSERT_REFUSED(h, p.call, "sampling.full_mass is inf", a.sampling.full_mass = INFINITY);
  ASSERT_REFUSED(h, p.call, "sampling knows only the rows' sums", a.mode = LCE_MATERIALIZED);
  ASSERT_REFUSED(h, p.call, "sampling knows only the rows' sums", a.terms.softcap = 5);
  ASSERT_REFUSED(h, p.call, "sampling knows only the rows' sums", a.outputs.entropy = a.loss);
  ASSERT_REFUSED(h, p.call, "sampling knows only the rows' sums", a.outputs.log_sum_sq_probs = a.loss);
  ASSERT_REFUSED(h, p.call, "sampling.stats is fp32 [3] with a full_mass of 0", a.sampling.full_mass = 0);
  ASSERT_REFUSED(h, p.call, "sampling.stats is fp32 [2]", a.sampling.stats = tensor_rows(a.loss, 0, 2));
}

TEST_MAIN(run_on_backends())
