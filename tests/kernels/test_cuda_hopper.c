// The Hopper GEMMs (kernels/cuda/hopper_gemm.h) against float64 on ragged tiles and hard rows; bits repeat.

#include "tests/loss_problem.h"

#ifdef HAVE_CUDA
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/hopper_gemm.h"

enum { SCRATCH_BYTES = 48 << 20 };

// One call of hopper_logits_exp, and what it must give.
typedef struct {
  int64_t rows, hidden, vocab;
  Tensor x, weight, targets, anchor, exps;
  double *z, *exps_want, *sum_want, *sums;
} Logits;

static void logits_expect(Harness *h, Logits *l, double *anchor, const int32_t *targets) {
  l->targets = ids_from(h, targets, l->rows);
  l->anchor = vector_from(h, DTYPE_F32, anchor, l->rows);
  for (int64_t n = 0; n < l->rows; n++) {
    l->sum_want[n] = 0;
    for (int64_t j = 0; j < l->vocab; j++) {
      bool counts = targets[n] != IGNORE_INDEX && j != targets[n];
      l->sum_want[n] += l->exps_want[n * l->vocab + j] = counts ? exp(l->z[n * l->vocab + j] - anchor[n]) : 0;
    }
  }
}

static Logits logits_make(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, double scale) {
  Logits l = {.rows = rows, .hidden = hidden, .vocab = vocab};
  double *x = random_values(h, rows * hidden, 1), *weight = random_values(h, vocab * hidden, scale);
  double *anchor = host_values(h, rows);
  int32_t *targets = random_ids(h, rows, vocab);
  targets[0] = (int32_t)vocab - 1; // the last tile's last column
  l.x = tensor_from(h, DTYPE_BF16, x, rows, hidden);
  l.weight = tensor_from(h, DTYPE_BF16, weight, vocab, hidden);
  l.z = host_values(h, rows * vocab);
  reference_linear(l.z, x, weight, false, NULL, NULL, rows, hidden, vocab);
  for (int64_t n = 0; n < rows; n++) anchor[n] = l.z[n * vocab + targets[n]];
  l.exps_want = host_values(h, rows * vocab);
  l.sum_want = host_values(h, rows);
  logits_expect(h, &l, anchor, targets);
  l.exps = poisoned_strided(h, DTYPE_BF16, rows, vocab, (vocab + 63) / 64 * 64);
  l.sums = host_values(h, rows);
  return l;
}

static LceLogitsExp call_of(const Logits *l, bool keep) {
  return (LceLogitsExp){.exps = keep ? l->exps : (Tensor){0},
                        .softmax = {.target_z = l->anchor},
                        .x = l->x,
                        .weight = l->weight,
                        .targets = l->targets};
}

static void logits_run(Harness *h, Logits *l, bool keep) {
  Backend *b = h->backend;
  MemoryMark mark = memory_mark(&b->memory);
  int64_t across = ceil_div(l->vocab, LCE_TILE_COLUMNS);
  Tensor scratch = poisoned_vector(h, DTYPE_F32, l->rows * across);
  LceLogitsExp call = call_of(l, keep);
  assert_true(hopper_logits_exp(b, &call, scratch.data));
  double *parts = values_of(h, scratch);
  for (int64_t n = 0; n < l->rows; n++) {
    l->sums[n] = 0;
    for (int64_t i = 0; i < across; i++) l->sums[n] += parts[n * across + i];
  }
  memory_pop_to(&b->memory, mark);
}

// A logit is a sum of `hidden` products in fp32, wrong by about epsilon sqrt(hidden) |z|; so is E,
// relatively, and rounding to bf16 adds half a unit, 2^-8 of a number at most.
static void row_check(Harness *h, const Logits *l, int64_t n, const double *exps, double largest_logit) {
  double error = 4 * dtype_epsilon(DTYPE_F32) * sqrt((double)l->hidden) * (1 + largest_logit) + 1e-6;
  for (int64_t i = n * l->vocab; i < (n + 1) * l->vocab; i++)
    if (!(fabs(exps[i] - l->exps_want[i]) <= (error + 0x1.02p-8) * l->exps_want[i] + 0x1p-126))
      fail_msg("E[%lld] is %.9g, not %.9g (%lld x %lld x %lld)", (long long)i, exps[i], l->exps_want[i],
               (long long)l->rows, (long long)l->hidden, (long long)l->vocab);
  if (!(fabs(l->sums[n] - l->sum_want[n]) <= error * l->sum_want[n]))
    fail_msg("row sum %lld is %.9g, not %.9g", (long long)n, l->sums[n], l->sum_want[n]);
}

static void logits_check(Harness *h, const Logits *l, double largest_logit) {
  double *exps = values_of(h, l->exps);
  for (int64_t n = 0; n < l->rows; n++) row_check(h, l, n, exps, largest_logit);
  check_gaps(h, "E", in_pieces(l->exps));
}

static void logits_case(Harness *h, const void *shape) {
  const int64_t *sizes = shape;
  if (small_shapes() && sizes[0] * sizes[2] > 1000000) return;
  Logits l = logits_make(h, sizes[0], sizes[1], sizes[2], 2 / sqrt((double)sizes[1]));
  logits_run(h, &l, true);
  logits_check(h, &l, 12);
}

HARNESS_TEST(test_logits) {
  // The last: X in two rasterisation groups, of clusters that keep pace over more than a round.
  static const int64_t shapes[][3] = {{1, 8, 8},        {5, 64, 100},     {128, 72, 193},  {129, 136, 192},
                                      {257, 64, 1000},  {256, 256, 384},  {700, 24, 3001}, {33, 1000, 517},
                                      {1030, 16, 6007}, {8448, 1000, 400}};
  RUN_CASES(h, logits_case, shapes);
}

HARNESS_TEST(test_sums_without_exps) {
  Logits l = logits_make(h, 1000, 64, 1000, 0.2);
  logits_run(h, &l, true);
  double *sums = copied_values(h, l.sums, l.rows);
  logits_run(h, &l, false);
  assert_memory_equal(sums, l.sums, (size_t)l.rows * sizeof *sums);
  logits_check(h, &l, 8);
}

// Anchors of 25 to 73 and sums down to 1e-29. The anchor's product with log2(e) is rounded to 2^-18 there,
// which must not show; what log2(e) itself lacks in fp32 does, 1.4e-8 for each unit of the exponent.
HARNESS_TEST(test_nearly_certain) {
  Logits l = logits_make(h, 130, 64, 500, 0.01);
  double *anchor = host_values(h, l.rows);
  for (int64_t n = 0; n < l.rows; n++) anchor[n] = 25 + 0.37 * (double)n; // need not be the target's logit
  logits_expect(h, &l, anchor, random_ids(h, l.rows, l.vocab));
  logits_run(h, &l, true);
  for (int64_t n = 0; n < l.rows; n++)
    if (!(fabs(l.sums[n] - l.sum_want[n]) <= (5e-7 + 1.4e-8 * anchor[n]) * l.sum_want[n]))
      fail_msg("row %lld with anchor %.2f sums to %.9g, not %.9g", (long long)n, anchor[n], l.sums[n],
               l.sum_want[n]);
}

// A row whose sum overflows says so, whatever its anchor's correction is; one whose target is IGNORE_INDEX is
// zeros, whatever its anchor holds; a NaN stays in its row; and the others are as before.
HARNESS_TEST(test_special_rows) {
  enum { OVERFLOWS = 3, IGNORED = 7, NAN_ROW = 17 }; // every third, every seventh, this one
  Logits l = logits_make(h, 200, 64, 700, 0.2);
  double *anchor = values_of(h, l.anchor);
  int32_t *targets = random_ids(h, l.rows, l.vocab);
  backend_to_host(h->backend, targets, l.targets);
  for (int64_t n = 0; n < l.rows; n++) {
    if (n % OVERFLOWS == 0) anchor[n] = -200 - 0.7 * (double)n;
    if (n % IGNORED == 0) targets[n] = IGNORE_INDEX;
  }
  logits_expect(h, &l, anchor, targets);
  const uint16_t nan_bits = 0x7FC0;
  backend_to_device(h->backend, tensor_1d((char *)l.x.data + (NAN_ROW * 64 + 5) * 2, DTYPE_BF16, 1),
                    &nan_bits);
  logits_run(h, &l, true);
  double *exps = values_of(h, l.exps);
  for (int64_t n = 0; n < l.rows; n++)
    if (n == NAN_ROW)
      assert_true(isnan(l.sums[n]) && isnan(exps[n * l.vocab + 3]));
    else if (n % OVERFLOWS == 0 && n % IGNORED)
      assert_true(isinf(l.sums[n]));
    else
      row_check(h, &l, n, exps, 8);
  check_gaps(h, "E", in_pieces(l.exps));
}

typedef struct {
  int64_t rows, hidden, vocab;
  Dtype dtype;
  size_t scratch_bytes;
} Gradient;

static void gradient_case(Harness *h, const void *shape) {
  const Gradient *s = shape;
  int64_t rows = s->rows, hidden = s->hidden, vocab = s->vocab;
  double *exps = random_values(h, rows * vocab, 1), *weight = random_values(h, vocab * hidden, 1);
  int64_t stride = (vocab + 63) / 64 * 64;
  Tensor e = strided_from(h, DTYPE_BF16, exps, rows, vocab, stride); // NaN beyond the end must not enter
  Tensor w = tensor_from(h, DTYPE_BF16, weight, vocab, hidden);
  Tensor scratch = poisoned_vector(h, DTYPE_F32, (int64_t)s->scratch_bytes / 4); // below the results
  Tensor out = poisoned_strided(h, s->dtype, rows, hidden, hidden + 8);
  Tensor again = poisoned(h, s->dtype, rows, hidden);
  double *want = host_values(h, rows * hidden);
  reference_linear(want, exps, weight, true, NULL, NULL, rows, vocab, hidden);
  assert_true(hopper_dx(h->backend, out, e, w, scratch.data, s->scratch_bytes, true));
  check_values(h, "dX", out, want, within(2, (double)vocab));
  check_gaps(h, "dX", out);
  assert_true(hopper_dx(h->backend, again, e, w, scratch.data, s->scratch_bytes, true));
  check_bitwise_equal(h, "dX again", again, out);
}

HARNESS_TEST(test_gradient) {
  static const int64_t shapes[][3] = {{1, 8, 8},       {5, 64, 100},    {128, 72, 193}, {300, 200, 1000},
                                      {257, 192, 777}, {256, 384, 640}, {700, 24, 301}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int k = 0; k < 4; k++) { // split-K, and without scratch for partials
      const Gradient shape[] = {{shapes[i][0], shapes[i][1], shapes[i][2], k % 2 ? DTYPE_F32 : DTYPE_BF16,
                                 k / 2 ? SCRATCH_BYTES : 4096}};
      RUN_CASES(h, gradient_case, shape);
    }
}

// More tiles than run at once, with a remainder: whole tiles and slices in one call.
HARNESS_TEST(test_gradient_of_many_tiles) {
  static const Gradient small[] = {{700, 600, 130, DTYPE_BF16, SCRATCH_BYTES}};
  static const Gradient large[] = {
      {5200, 1600, 130, DTYPE_BF16, SCRATCH_BYTES},
      {5200, 1600, 130, DTYPE_F32, SCRATCH_BYTES},
      {6800, 960, 800, DTYPE_BF16, 4096}}; // long enough to keep pace, over two rounds
  if (small_shapes())
    RUN_CASES(h, gradient_case, small);
  else
    RUN_CASES(h, gradient_case, large);
}

// The layer into SwiGLU and back through the one after it: gate and up against float64, the rest against what
// was stored of them. The operations give the same bits, so they take these kernels.
static void swiglu_case(Harness *h, const void *shape) {
  const int64_t *sizes = shape, rows = sizes[0], hidden = sizes[1], width = sizes[2], in_place = sizes[3];
  double scale = 1.5 / sqrt((double)hidden);
  double *x = random_values(h, rows * hidden, 1), *up_weight = random_values(h, 2 * width * hidden, scale),
         *dout = random_values(h, rows * hidden, 1), *down_weight = random_values(h, hidden * width, scale);
  Tensor gate_up = poisoned(h, DTYPE_BF16, rows, 2 * width), out = poisoned(h, DTYPE_BF16, rows, width);
  Tensor xs = strided_from(h, DTYPE_BF16, x, rows, hidden, hidden + 8),
         up = tensor_from(h, DTYPE_BF16, up_weight, 2 * width, hidden);
  assert_true(hopper_swiglu(h->backend, out, gate_up, xs, up));
  double *pre = host_values(h, rows * 2 * width), *want = host_values(h, rows * width);
  reference_linear(pre, x, up_weight, false, NULL, NULL, rows, hidden, 2 * width);
  check_values(h, "gate and up", gate_up, pre, within(4, (double)hidden));
  pre = values_of(h, gate_up);
  reference_swiglu(want, pre, rows, width);
  check_values(h, "activation", out, want, within(8, 1));
  Tensor same = poisoned(h, DTYPE_BF16, rows, width);
  linear_forward(h->backend, (LinearForward){.out = same,
                                             .x = xs,
                                             .weight = up,
                                             .activation = ACTIVATION_SWIGLU,
                                             .pre_activation = poisoned(h, DTYPE_BF16, rows, 2 * width)});
  check_bitwise_equal(h, "the layer's activation", same, out);

  Tensor douts = strided_from(h, DTYPE_BF16, dout, rows, hidden, hidden + 8),
         down = tensor_from(h, DTYPE_BF16, down_weight, hidden, width),
         first = poisoned(h, DTYPE_BF16, rows, 2 * width),
         again = in_place ? gate_up : poisoned(h, DTYPE_BF16, rows, 2 * width);
  double *product = host_values(h, rows * width), *dpre = host_values(h, rows * 2 * width);
  reference_linear(product, dout, down_weight, true, NULL, NULL, rows, hidden, width);
  for (int64_t i = 0; i < rows * width; i++) {
    int64_t gate = i / width * 2 * width + i % width;
    double g = pre[gate], u = pre[gate + width], p = 1 / (1 + exp(-g));
    dpre[gate] = product[i] * u * p * (1 + g * (1 - p));
    dpre[gate + width] = product[i] * g * p;
  }
  assert_true(hopper_swiglu_gradient(h->backend, first, gate_up, douts, down));
  check_values(h, "gradients of gate and up", first, dpre, with_size(within(8, (double)hidden), 4));
  linear_backward_input(h->backend, (LinearBackwardInput){.dx = again,
                                                          .dout = douts,
                                                          .weight = down,
                                                          .activation = ACTIVATION_SWIGLU,
                                                          .pre_activation = gate_up,
                                                          .dactivation = same});
  check_bitwise_equal(h, "the layer's gradients", again, first);
}

// Tiles that fill the device, ragged ends, tiles of fewer columns, rounds that keep pace, K of one step.
HARNESS_TEST(test_swiglu) {
  static const int64_t small[][4] = {{300, 72, 328, 0}, {257, 136, 200, 1}}; // enough for a device of few SMs
  static const int64_t medium[][4] = {{1300, 72, 2120, 0}};
  static const int64_t large[][4] = {
      {3000, 72, 1352, 0}, {2049, 136, 1544, 1}, {8500, 1000, 200, 0}, {5000, 64, 2048, 1}};
  bool few = hopper_swiglu(h->backend, poisoned(h, DTYPE_BF16, 300, 328), poisoned(h, DTYPE_BF16, 300, 656),
                           poisoned(h, DTYPE_BF16, 300, 72), poisoned(h, DTYPE_BF16, 656, 72));
  if (small_shapes() && few)
    RUN_CASES(h, swiglu_case, small);
  else if (small_shapes())
    RUN_CASES(h, swiglu_case, medium);
  else
    RUN_CASES(h, swiglu_case, large);
}

HARNESS_TEST(test_refuses) {
  Tensor odd = poisoned(h, DTYPE_BF16, 100, 33), even = poisoned(h, DTYPE_BF16, 100, 32);
  Tensor full = poisoned(h, DTYPE_F32, 100, 32);
  Tensor anchor = poisoned_vector(h, DTYPE_F32, 100), targets = ids_from(h, random_ids(h, 100, 100), 100);
  Tensor unfit[] = {odd, full};
  for (int i = 0; i < 2; i++) {
    LceLogitsExp call = {
        .softmax = {.target_z = anchor}, .x = unfit[i], .weight = unfit[i], .targets = targets};
    assert_false(hopper_logits_exp(h->backend, &call, full.data));
  }
  assert_false(hopper_dx(h->backend, even, odd, even, full.data, 1 << 12, true));
  assert_false(hopper_swiglu(h->backend, even, poisoned(h, DTYPE_BF16, 100, 64), even,
                             poisoned(h, DTYPE_BF16, 64, 32))); // tiles too few
}

int main(void) {
  Harness *h = harness_open("cuda");
  bool runs = h && hopper_runs(h->backend);
  if (h) harness_close(h);
  return runs ? run_on_backend("cuda") : skip_all("hopper", "the GEMMs for Hopper", "there is no such GPU");
}

#else

TEST_MAIN(skip_all("hopper", "the GEMMs for Hopper", "built without CUDA"))

#endif
