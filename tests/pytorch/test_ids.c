// tools/torch/liblce/ids.h against float64: log-probabilities of given ids, lse, entropies, and their gradients.

#include "tests/harness.h"
#include "tools/torch/liblce/ids.h"

typedef struct {
  int64_t rows, hidden, vocab, per_row; // per_row 0: by offsets
  int64_t chunk;
  double softcap, temperature;
  bool bias, narrow;
  double offset; // of all logits of a row
} Shape;

enum { MAX_ROWS = 150 };
typedef struct {
  const Shape *s;
  int32_t *ids;
  int64_t offsets[MAX_ROWS + 1], count;
  double largest; // logit / T
  double *x, *weight, *bias, *log_probs, *lse, *entropy, *dlog_probs, *dlse, *dentropy, *dx, *dweight, *dbias;
} Problem;

// A third of the ids do not count; every row of more has some twice; rows 3, 13, ... have none.
static Problem problem_of(Harness *h, const Shape *s, IdLogProbs *a) {
  static const int64_t sizes[] = {1, 128, 3, 0, 17, 2};
  Problem p = {.s = s};
  for (int64_t n = 0; n <= s->rows; n++) {
    p.offsets[n] = p.count;
    if (n < s->rows) p.count += s->per_row ? s->per_row : sizes[n % 6];
  }
  p.ids = random_ids(h, p.count, s->vocab);
  p.x = random_values(h, s->rows * s->hidden, 1);
  p.weight = random_values(h, s->vocab * s->hidden, 1 / sqrt((double)s->hidden));
  for (int64_t n = 0; n < s->rows; n++)
    for (int64_t m = p.offsets[n], i = 0; m < p.offsets[n + 1]; m++, i++)
      p.ids[m] = n % 10 == 3 || i % 3 == 2 ? IGNORE_INDEX : i % 5 == 4 ? p.ids[m - 1] : p.ids[m];
  if (s->rows > 1 && s->per_row &&
      s->offset == 0) { // row 1's second or only id is nearly certain: its logit is 25
    for (int64_t i = 0; i < s->hidden; i++) p.x[s->hidden + i] = i == 0;
    p.weight[p.ids[p.offsets[1] + (s->per_row > 1)] * s->hidden] = 25;
  }
  for (int64_t n = 0; n < s->rows && s->offset != 0; n++) p.x[n * s->hidden] = 8;
  for (int64_t j = 0; j < s->vocab && s->offset != 0; j++) p.weight[j * s->hidden] = s->offset / 8;
  a->call =
      (LinearCrossEntropy){.chunk = s->chunk,
                           .x = tensor_from(h, h->dtype, p.x, s->rows, s->hidden),
                           .weight = tensor_from(h, h->dtype, p.weight, s->vocab, s->hidden),
                           .terms = {.softcap = (float)s->softcap, .temperature = (float)s->temperature},
                           .dx = poisoned(h, h->dtype, s->rows, s->hidden),
                           .dweight = poisoned(h, s->narrow ? h->dtype : DTYPE_F32, s->vocab, s->hidden),
                           .scale = 1};
  if (s->bias) a->call.bias = random_vector(h, &p.bias, s->vocab, 1);
  if (s->bias) a->call.dbias = poisoned_vector(h, DTYPE_F32, s->vocab);
  a->ids = ids_from(h, p.ids, p.count);
  if (!s->per_row) {
    a->offsets = memory_push_1d(&h->backend->memory, "offsets", MEMORY_TABLES, DTYPE_I64, s->rows + 1);
    p.offsets[0] -= 9, p.offsets[s->rows] += 4096; // they are cut to the ids
    backend_to_device(h->backend, a->offsets, p.offsets);
    p.offsets[0] += 9, p.offsets[s->rows] -= 4096;
  }
  a->log_probs = poisoned_vector(h, DTYPE_F32, p.count), a->lse = poisoned_vector(h, DTYPE_F32, s->rows);
  p.dlog_probs = random_values(h, p.count, 1), p.dlse = random_values(h, s->rows, 1);
  p.dlse[s->rows > 3 ? 3 : 0] = 0;
  if (s->per_row == 1) p.dlse[s->rows > 1] = 0;
  a->dlog_probs = vector_from(h, DTYPE_F32, p.dlog_probs, p.count);
  if (s->rows > 1) a->dlse = vector_from(h, DTYPE_F32, p.dlse, s->rows);
  if (s->bias || s->rows == 37) { // entropies, too
    p.dentropy = random_values(h, s->rows, 1);
    a->entropy = poisoned_vector(h, DTYPE_F32, s->rows);
    a->dentropy = vector_from(h, DTYPE_F32, p.dentropy, s->rows);
  }
  p.log_probs = host_values(h, p.count), p.lse = host_values(h, s->rows), p.entropy = host_values(h, s->rows);
  p.dx = host_values(h, s->rows * s->hidden), p.dweight = host_values(h, s->vocab * s->hidden);
  p.dbias = host_values(h, s->vocab);
  return p;
}

static void solve_row(Problem *p, int64_t n, double *v, double *slope) {
  const Shape *s = p->s;
  const double *x = p->x + n * s->hidden, cap = s->softcap, t = s->temperature;
  double total = 0, max = -INFINITY, sum = 0;
  for (int64_t j = 0; j < s->vocab; j++) {
    double z = p->bias ? p->bias[j] : 0;
    for (int64_t i = 0; i < s->hidden; i++) z += x[i] * p->weight[j * s->hidden + i];
    v[j] = (cap > 0 ? cap * tanh(z / cap) : z) / t;
    slope[j] = (cap > 0 ? 1 - tanh(z / cap) * tanh(z / cap) : 1) / t;
    max = fmax(max, v[j]), p->largest = fmax(p->largest, fabs(v[j]));
  }
  for (int64_t j = 0; j < s->vocab; j++) total += v[j] == max ? 0 : exp(v[j] - max);
  p->lse[n] = max + log1p(total);
  for (int64_t m = p->offsets[n]; m < p->offsets[n + 1]; m++) {
    if (p->ids[m] < 0) continue;
    double lead = v[p->ids[m]] - max;
    p->log_probs[m] = lead - log1p(total), sum += p->dlog_probs[m];
  }
  for (int64_t j = 0; j < s->vocab; j++) p->entropy[n] -= exp(v[j] - p->lse[n]) * (v[j] - p->lse[n]);
  for (int64_t j = 0; j < s->vocab; j++) {
    double log_p = v[j] - p->lse[n], d = (p->dlse[n] - sum) * exp(log_p);
    if (p->dentropy) d -= p->dentropy[n] * exp(log_p) * (log_p + p->entropy[n]);
    for (int64_t m = p->offsets[n]; m < p->offsets[n + 1]; m++) d += p->ids[m] == j ? p->dlog_probs[m] : 0;
    d *= slope[j], p->dbias[j] += d;
    for (int64_t i = 0; i < s->hidden; i++) {
      p->dx[n * s->hidden + i] += d * p->weight[j * s->hidden + i];
      p->dweight[j * s->hidden + i] += d * x[i];
    }
  }
}

static void check_case(Harness *h, const void *shape) {
  const Shape *s = shape;
  IdLogProbs a = {0};
  Problem p = problem_of(h, s, &a);
  double *v = host_values(h, s->vocab), *slope = host_values(h, s->vocab);
  for (int64_t n = 0; n < s->rows; n++) solve_row(&p, n, v, slope);
  id_log_probs(h->backend, a);
  Tolerance outputs = with_size(within(16, (double)(s->hidden + s->vocab)), 8 / s->temperature);
  check_values(h, "log_probs", a.log_probs, p.log_probs, outputs);
  check_values(h, "lse", a.lse, p.lse, outputs);
  if (p.dentropy) check_values(h, "entropy", a.entropy, p.entropy, outputs);
  if (s->per_row > 1 && s->softcap == 0 && !s->bias) {
    int64_t m = p.offsets[1] + 1;
    double off = fabs(values_of(h, a.log_probs)[m] / p.log_probs[m] - 1);
    if (!(off < 1e-3))
      fail_msg("log p = %g of an id that is nearly certain is off by %g", p.log_probs[m], off);
  }
  id_log_prob_gradients(h->backend, a);
  double size = 2 * sqrt((double)p.count / (double)s->rows + 1) / s->temperature;
  size *= 1 + p.largest / 32; // p is as exact as its logit, which fp32 rounds
  Tolerance gradients = with_size(within_stored(h, 8, (double)(s->rows + s->vocab)), size / 8);
  check_values(h, "dx", a.call.dx, p.dx, gradients);
  int64_t certain = (s->rows > 1) * s->hidden; // of an id that is certain alone: tiny, and as exact
  if (s->per_row == 1)
    assert_true(relative_distance(values_of(h, a.call.dx) + certain, p.dx + certain, s->hidden) < 0.02);
  check_values(h, "dweight", a.call.dweight, p.dweight, gradients);
  if (s->bias) check_values(h, "dbias", a.call.dbias, p.dbias, gradients);
}

HARNESS_TEST(test_values) {
  static const Shape shapes[] = {
      {1, 1, 2, 1, 1, .temperature = 1},
      {13, 40, 500, 1, 5, .temperature = 1, .narrow = true},
      {37, 24, 501, 8, 37, .temperature = 0.7, .bias = true},
      {150, 64, 1500, 3, 40, .temperature = 1, .narrow = true},
      {29, 33, 611, 128, 7, .softcap = 4, .temperature = 1.3, .bias = true, .narrow = true},
      {31, 40, 999, 0, 8, .temperature = 1},
      {50, 16, 400, 0, 50, .softcap = 5, .temperature = 0.5, .bias = true, .narrow = true}};
  RUN_CASES(h, check_case, shapes);
}

// An offset common to a row's logits, and a low temperature: the anchor of p is a given id, so the gradient is as exact
// as differences of logits in fp32.
static void check_hard(Harness *h, const void *shape) {
  const Shape *s = shape;
  IdLogProbs a = {0};
  Problem p = problem_of(h, s, &a);
  double *v = host_values(h, s->vocab), *slope = host_values(h, s->vocab);
  memset(p.dlse, 0,
         (size_t)s->rows * sizeof *p.dlse); // of log-probabilities alone each row's gradient adds up to 0
  a.dlse = (Tensor){0};
  for (int64_t n = 0; n < s->rows; n++) solve_row(&p, n, v, slope);
  id_log_probs(h->backend, a);
  id_log_prob_gradients(h->backend, a);
  double off = relative_distance(values_of(h, a.call.dx), p.dx, s->rows * s->hidden);
  if (!(off < 8 * dtype_epsilon(DTYPE_F32) * s->offset / s->temperature))
    fail_msg("dx is off by %g at an offset of %g and T %g", off, s->offset, s->temperature);
}

HARNESS_TEST(test_common_offset) {
  if (h->dtype != DTYPE_F32) skip(); // in bf16 entries of the gradient are rounded
  static const Shape shapes[] = {{29, 24, 501, 4, 29, .temperature = 1, .offset = 1000},
                                 {29, 24, 501, 4, 29, .temperature = 0.1, .offset = 100}};
  RUN_CASES(h, check_hard, shapes);
}

// A bias of minus infinity masks all of a row's ids: their log-probabilities are minus infinity, and the gradients are
// finite, with p = 0 for them.
HARNESS_TEST(test_masked_ids) {
  const Shape s = {
      .rows = 8, .hidden = 16, .vocab = 211, .per_row = 2, .chunk = 8, .temperature = 1, .bias = true};
  IdLogProbs a = {0};
  Problem p = problem_of(h, &s, &a);
  for (int64_t m = 0; m < p.count; m++) p.ids[m] = (int32_t)(m % 2);
  p.bias[0] = p.bias[1] = -INFINITY;
  a.ids = ids_from(h, p.ids, p.count), a.call.bias = vector_from(h, h->dtype, p.bias, s.vocab);
  id_log_probs(h->backend, a);
  id_log_prob_gradients(h->backend, a);
  const double *log_probs = values_of(h, a.log_probs), *dx = values_of(h, a.call.dx);
  const double *dbias = values_of(h, a.call.dbias);
  for (int64_t m = 0; m < p.count; m++) assert_true(log_probs[m] == -INFINITY);
  for (int64_t i = 0; i < s.rows * s.hidden; i++) assert_true(isfinite(dx[i]));
  for (int64_t j = 2; j < s.vocab; j++) assert_true(isfinite(dbias[j]));
}

TEST_MAIN(run_on_backends())
