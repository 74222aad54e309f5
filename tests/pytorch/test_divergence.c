// tools/torch/liblce/divergence.h against float64: losses, entropies and gradients of the three divergences.

#include "kernels/base/integers.h"
#include "tests/harness.h"
#include "tools/torch/liblce/divergence.h"

#ifdef HAVE_CUDA
#include "kernels/cuda/hopper_gemm.h"
#endif

typedef struct {
  int64_t rows, hidden, teacher_hidden, vocab, chunk;
  DivergenceKind kind;
  double beta, softcap, temperature, scale; // scale: of the logits
  bool biases, weights, narrow;             // weights: and a mask
} Shape;

typedef struct {
  int64_t hidden;
  double softcap, temperature, *x, *weight, *bias, *log_p;
} Side;

static DivergenceHead head_of(Harness *h, const Shape *s, Side *side) {
  DivergenceHead head = {.x = random_tensor(h, &side->x, s->rows, side->hidden, 1),
                         .weight = random_tensor(h, &side->weight, s->vocab, side->hidden,
                                                 s->scale / sqrt((double)side->hidden)),
                         .softcap = (float)side->softcap,
                         .temperature = (float)side->temperature};
  if (s->biases) head.bias = random_vector(h, &side->bias, s->vocab, 1);
  side->log_p = host_values(h, s->vocab);
  return head;
}

// log p of row n, and du/dz / T.
static void log_softmax(const Shape *s, Side *side, int64_t n, double *slope) {
  int64_t hidden = side->hidden;
  double max = -INFINITY, total = 0, cap = side->softcap > 0 ? side->softcap : INFINITY, *v = side->log_p;
  for (int64_t j = 0; j < s->vocab; j++) {
    double z = side->bias ? side->bias[j] : 0;
    for (int64_t i = 0; i < hidden; i++) z += side->x[n * hidden + i] * side->weight[j * hidden + i];
    double t = tanh(z / cap);
    v[j] = (cap < INFINITY ? cap * t : z) / side->temperature;
    slope[j] = (1 - t * t) / side->temperature;
    max = fmax(max, v[j]);
  }
  for (int64_t j = 0; j < s->vocab; j++) total += exp(v[j] - max);
  for (int64_t j = 0; j < s->vocab; j++) v[j] -= max + log(total);
}

static void check_case(Harness *h, const void *shape) {
  const Shape *s = shape;
  double others = s->biases ? 2 : 1, *weights = NULL; // times the student's temperature and soft-cap
  Side own = {.hidden = s->hidden, .softcap = s->softcap, .temperature = s->temperature};
  Side teacher = {
      .hidden = s->teacher_hidden, .softcap = others * s->softcap, .temperature = others * s->temperature};
  LinearDivergence a = {.kind = s->kind,
                        .beta = (float)s->beta,
                        .student = head_of(h, s, &own),
                        .teacher = head_of(h, s, &teacher),
                        .loss = poisoned_vector(h, DTYPE_F32, s->rows),
                        .entropy = poisoned_vector(h, DTYPE_F32, s->rows),
                        .chunk = s->chunk,
                        .dx = poisoned(h, h->dtype, s->rows, s->hidden),
                        .dweight = poisoned(h, s->narrow ? h->dtype : DTYPE_F32, s->vocab, s->hidden)};
  int32_t *mask = random_ids(h, s->rows, 2);
  mask[0] = 1;
  if (s->biases) a.dbias = poisoned_vector(h, DTYPE_F32, s->vocab);
  if (s->weights) {
    for (int64_t i = 0; i < s->rows * s->teacher_hidden; i++) // of a masked row nothing counts, not even NaN
      if (!mask[i / s->teacher_hidden]) teacher.x[i] = (double)NAN;
    a.teacher.x = tensor_from(h, h->dtype, teacher.x, s->rows, s->teacher_hidden);
    a.mask = ids_from(h, mask, s->rows);
    weights = random_values(h, s->rows, 1), a.token_weights = vector_from(h, DTYPE_F32, weights, s->rows);
  }
  double *loss = host_values(h, s->rows), *entropy = host_values(h, s->rows);
  double *dx = host_values(h, s->rows * s->hidden), *dweight = host_values(h, s->vocab * s->hidden);
  double *dbias = host_values(h, s->vocab), *slope = host_values(h, s->vocab),
         *lead = host_values(h, s->vocab);
  for (int64_t n = 0; n < s->rows; n++) {
    if (s->weights && !mask[n]) continue;
    const double *p = own.log_p, *q = teacher.log_p, beta = s->beta;
    double mean = 0;
    log_softmax(s, &teacher, n, slope);
    log_softmax(s, &own, n, slope);
    for (int64_t j = 0; j < s->vocab; j++) {
      double m = log((1 - beta) * exp(p[j]) + beta * exp(q[j]));
      lead[j] = p[j] - (s->kind == JSD ? m : q[j]), mean += exp(p[j]) * lead[j];
      entropy[n] -= exp(p[j]) * p[j];
      loss[n] += s->kind == FORWARD_KL   ? exp(q[j]) * (q[j] - p[j])
                 : s->kind == REVERSE_KL ? exp(p[j]) * lead[j]
                                         : beta * exp(q[j]) * (q[j] - m) + (1 - beta) * exp(p[j]) * lead[j];
    }
    for (int64_t j = 0; j < s->vocab; j++) {
      double d = s->kind == FORWARD_KL ? exp(p[j]) - exp(q[j]) : exp(p[j]) * (lead[j] - mean);
      d *= slope[j] * (s->kind == JSD ? 1 - beta : 1) * (weights ? weights[n] : 1), dbias[j] += d;
      for (int64_t i = 0; i < s->hidden; i++) {
        dx[n * s->hidden + i] += d * own.weight[j * s->hidden + i];
        dweight[j * s->hidden + i] += d * own.x[n * s->hidden + i];
      }
    }
  }
  linear_divergence(h->backend, a);
  double size = 4 * s->scale / s->temperature;
  Tolerance values = with_size(within_stored(h, h->dtype == DTYPE_BF16 ? 1 : 8, 1), size),
            gradients = within_stored(h, 8, (double)s->rows + 16 + (double)s->vocab / 1024);
  check_values(h, "loss", a.loss, loss, values);
  check_values(h, "entropy", a.entropy, entropy, values);
  check_values(h, "dx", a.dx, dx, with_size(gradients, size / 8));
  check_values(h, "dweight", a.dweight, dweight, with_size(gradients, size / 8));
  if (s->biases) check_values(h, "dbias", a.dbias, dbias, with_size(gradients, size / 8));
}

HARNESS_TEST(test_values) {
  static const Shape shapes[] = {
      {1, 1, 2, 2, 1, FORWARD_KL, .temperature = 1, .scale = 1},
      {13, 24, 40, 501, 5, FORWARD_KL, .temperature = 1, .scale = 1, .biases = true, .weights = true},
      {9, 32, 16, 1203, 9, REVERSE_KL, .temperature = 0.7, .scale = 1, .narrow = true},
      {13, 24, 40, 501, 5, REVERSE_KL, .softcap = 4, .temperature = 2, .scale = 2, .biases = true,
       .weights = true},
      {11, 23, 24, 640, 4, JSD, .beta = 0.5, .temperature = 1, .scale = 1}, // tiles of one head alone
      {13, 24, 40, 501, 13, JSD, .beta = 0.1, .softcap = 4, .temperature = 1.3, .scale = 2, .biases = true,
       .weights = true},
      {7, 24, 40, 333, 3, JSD, .beta = 0.9, .temperature = 0.5, .scale = 2},
      // Whole accesses, for Hopper.
      {6, 16, 24, 2056, 3, FORWARD_KL, .temperature = 1, .scale = 1, .weights = true, .narrow = true},
      {101, 16, 24, 2056, 90, REVERSE_KL, .temperature = 0.7, .scale = 2},
      {100, 16, 24, 2000, 100, JSD, .beta = 0.3, .temperature = 1, .scale = 2, .weights = true},
      {2, 16, 24, 136, 2, REVERSE_KL, .temperature = 1, .scale = 2}};
  RUN_CASES(h, check_case, shapes);
  // Rows of which an SM holds a part of two, and not of three.
  static const Shape large[] = {
      {70, 8, 8, 160000, 70, JSD, .beta = 0.5, .temperature = 1, .scale = 2, .weights = true}};
  if (h->dtype == DTYPE_BF16 && !small_shapes()) RUN_CASES(h, check_case, large);
}

// Each tile's largest logit, its column and its sum of exponentials are those of the logits as they are stored.
HARNESS_TEST(test_tiles) {
#ifdef HAVE_CUDA
  if (h->dtype != DTYPE_BF16 || !hopper_runs(h->backend)) skip();
  enum { ROWS = 130, HIDDEN = 24, VOCAB = 456, TILES = (VOCAB + LCE_TILE_COLUMNS - 1) / LCE_TILE_COLUMNS };
  double *values, *sums = host_values(h, ROWS * TILES);
  DivergenceHead a = {.logits = poisoned(h, h->dtype, ROWS, VOCAB),
                      .x = random_tensor(h, &values, ROWS, HIDDEN, 1),
                      .weight = random_tensor(h, &values, VOCAB, HIDDEN, 1),
                      .best = poisoned(h, DTYPE_I64, ROWS, TILES),
                      .sums = poisoned(h, DTYPE_F32, ROWS, TILES),
                      .temperature = 0.5f};
  assert_true(cuda_logit_tiles(h->backend, &a));
  const double *z = values_of(h, a.logits);
  uint64_t best[ROWS * TILES];
  backend_to_host(h->backend, best, a.best);
  for (int64_t i = 0; i < ROWS * TILES; i++) {
    int64_t first = i % TILES * LCE_TILE_COLUMNS, end = min_i64(VOCAB, first + LCE_TILE_COLUMNS),
            largest = first;
    const double *row = z + i / TILES * VOCAB;
    for (int64_t j = first; j < end; j++)
      if (row[j] > row[largest]) largest = j;
    for (int64_t j = first; j < end; j++) sums[i] += exp((row[j] - row[largest]) / 0.5);
    assert_int_equal(~(uint32_t)best[i], largest);
  }
  check_values(h, "sums", a.sums, sums, within(8, LCE_TILE_COLUMNS));
#else
  skip();
#endif
}

TEST_MAIN(run_on_backends())
