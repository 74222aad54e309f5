// Muon against torch.optim.Muon with our polynomials (tests/golden/make_muon_golden.py), Newton-Schulz of
// batches against float64.

#include "tests/harness.h"

static double *read_values(Harness *h, FILE *file, int64_t count) {
  double *values = host_values(h, count);
  for (int64_t i = 0; i < count; i++) assert_int_equal(fscanf(file, "%lf", &values[i]), 1);
  return values;
}

// The distance of what the tensor holds from `want`, by the largest element of `want`.
static double distance(Harness *h, Tensor got, const double *want) {
  double *values = values_of(h, got), largest = 0, worst = 0;
  for (int64_t i = 0; i < tensor_count(got); i++) {
    largest = fmax(largest, fabs(want[i]));
    worst = fmax(worst, isfinite(values[i]) ? fabs(values[i] - want[i]) : INFINITY);
  }
  return worst / largest;
}

HARNESS_TEST(test_muon_is_as_in_torch) {
  FILE *file = fopen("tests/golden/muon.txt", "r");
  assert_non_null(file);
  double *header = read_values(h, file, 5), lr = header[0], decay = header[1], momentum = header[2], one = 1;
  double tolerance = h->dtype == DTYPE_BF16 ? 0.03 : 1e-5;
  assert_in_range((int)header[4], 4, 100);
  for (int c = 0; c < (int)header[4]; c++) {
    double *shape = read_values(h, file, 2);
    int64_t rows = (int64_t)shape[0], columns = (int64_t)shape[1], count = rows * columns;
    double *weights = read_values(h, file, count),
           *gradients = read_values(h, file, (int64_t)header[3] * count);
    double *last_m = read_values(h, file, count), *last = read_values(h, file, count),
           *m = host_values(h, count);
    float scale = 0.2f * sqrtf((float)max_i64(rows, columns));
    Tensor update = poisoned(h, h->dtype, rows, columns);
    Update u = {.m = vector_from(h, DTYPE_F32, m, count),
                .grad_scale = vector_from(h, DTYPE_F32, &one, 1),
                .lr = (float)lr,
                .momentum = (float)momentum,
                .weight_decay = (float)decay};
    Update down = u;
    down.weight = vector_from(h, DTYPE_F32, copied_values(h, weights, count), count);
    down.grad = tensor_flat(update);
    down.m = down.grad_scale = (Tensor){0};
    u.weight = down.grad;
    for (down.step = u.step = 1; u.step <= (int64_t)header[3]; down.step = ++u.step) {
      double *gradient = gradients + (u.step - 1) * count;
      u.grad = vector_from(h, h->dtype, gradient, count);
      nesterov(h->backend, u);
      orthogonalize(h->backend, &(Matrices){update, count}, 1, 1, scale);
      sgd(h->backend, down);
      reference_muon(weights, m, gradient, rows, columns, columns, 1, lr, momentum, decay);
    }
    for (int64_t i = 0; i < count; i++)
      if (fabs(m[i] - last_m[i]) > 1e-12 || fabs(weights[i] - last[i]) > 1e-10)
        fail_msg("the reference has %.17g in place of %.17g", weights[i], last[i]);
    assert_true(distance(h, u.m, last_m) <= 1e-5);
    double apart = distance(h, down.weight, last);
    if (!(apart <= tolerance)) fail_msg("%d by %d: the weights differ by %g", (int)rows, (int)columns, apart);
  }
  fclose(file);
}

typedef struct {
  int64_t rows, columns, blocks, count; // blocks: such matrices side by side
} Batch;

// Every matrix of every block against float64. What lies between them stays.
static void orthogonalize_case(Harness *h, const void *shape) {
  Batch s = *(const Batch *)shape;
  int64_t stride = s.blocks * s.columns, apart = round_up(s.rows * stride + 1, 128);
  double *values, bound = h->dtype == DTYPE_BF16 ? 0.15 : 1e-4;
  Tensor all = random_vector(h, &values, s.count * apart, 3);
  Matrices blocks[3];
  for (int64_t b = 0; b < s.blocks; b++) {
    Tensor x = tensor_2d(all.data, all.dtype, s.rows, stride);
    blocks[b] = (Matrices){tensor_columns(x, b * s.columns, s.columns), apart};
  }
  orthogonalize(h->backend, blocks, (int)s.blocks, s.count, 0.5f);
  double *got = values_of(h, all), *want = host_values(h, s.rows * s.columns);
  for (int64_t c = 0; c < s.count * s.blocks; c++) {
    int64_t first = c / s.blocks * apart + c % s.blocks * s.columns;
    double worst = 0;
    for (int64_t i = 0; i < s.rows * s.columns; i++)
      want[i] = values[first + i / s.columns * stride + i % s.columns];
    reference_orthogonalize(want, s.rows, s.columns, 0.5);
    double size = sqrt(reference_dot(want, want, s.rows * s.columns) / (double)(s.rows * s.columns));
    for (int64_t i = 0; i < s.rows * s.columns; i++)
      worst = fmax(worst, fabs(got[first + i / s.columns * stride + i % s.columns] - want[i]));
    if (!(worst <= 4 * bound * size)) fail_msg("matrix %d is off by %g of %g", (int)c, worst, size);
  }
  for (int64_t c = 0; c < s.count; c++)
    for (int64_t i = s.rows * stride; i < apart; i++)
      assert_true(got[c * apart + i] == values[c * apart + i]);
}

// In bf16, rounding moves singular values near 1, as those of 8 by 200, to elsewhere between 0.8 and 1.2: its
// bound is wide, and fp32's is the one that guards the formula.
HARNESS_TEST(test_orthogonalize) {
  static const Batch shapes[] = {{1, 1, 1, 1},   {5, 3, 1, 2},    {3, 5, 3, 2},   {16, 16, 1, 3},
                                 {24, 48, 3, 2}, {48, 24, 1, 1},  {8, 200, 2, 1}, {64, 64, 3, 5},
                                 {72, 40, 2, 3}, {33, 130, 1, 2}, {530, 36, 1, 1}};
  RUN_CASES(h, orthogonalize_case, shapes);
}

// No direction at all is one: zeros stay zeros, and a NaN reaches every element.
HARNESS_TEST(test_orthogonalize_of_nothing) {
  double *values = host_values(h, 48);
  Tensor x = tensor_from(h, h->dtype, values, 8, 6);
  orthogonalize(h->backend, &(Matrices){x, 48}, 1, 1, 1);
  check_values(h, "zeros", x, values, within(0, 1));
  values[17] = NAN;
  x = tensor_from(h, h->dtype, values, 8, 6);
  orthogonalize(h->backend, &(Matrices){x, 48}, 1, 1, 1);
  for (int i = 0; i < 48; i++) assert_true(isnan(values_of(h, x)[i]));
}

// The same bits whatever the scale, a power of two; a row without direction stays zeros and harms no other.
HARNESS_TEST(test_orthogonalize_at_any_scale) {
  static const Batch shapes[] = {{6, 11, 1, 1}, {11, 6, 1, 1}};
  for (const Batch *s = shapes; s < shapes + 2; s++) {
    double *values, *first = NULL;
    random_vector(h, &values, s->rows * s->columns, 3);
    for (int64_t j = 0; j < s->columns; j++) values[2 * s->columns + j] = 0;
    for (int power = -24; power <= 40; power += 32) {
      double *scaled = copied_values(h, values, s->rows * s->columns);
      for (int64_t i = 0; i < s->rows * s->columns; i++) scaled[i] = ldexp(values[i], power);
      Tensor x = tensor_from(h, h->dtype, scaled, s->rows, s->columns);
      orthogonalize(h->backend, &(Matrices){x, 128}, 1, 1, 1);
      double *got = values_of(h, x);
      if (!first) first = got;
      for (int64_t i = 0; i < s->rows * s->columns; i++)
        assert_true(got[i] == first[i] && (i / s->columns == 2) == (got[i] == 0));
    }
  }
}

TEST_MAIN(run_on_backends())
