// The operations around the layers: rows and targets, the optimizer, copies, and the memory that is counted.

#include "tests/harness.h"

static void rows_case(Harness *h, const void *shape) {
  enum { ROWS = 101, PICKED = 67 };
  int64_t width = *(const int64_t *)shape;
  double *x, *spread, *want = host_values(h, PICKED * width);
  int32_t picks[PICKED], *ids = random_ids(h, ROWS, 1000);
  for (int k = 0; k < PICKED; k++) picks[k] = (k * 29 + 5) % ROWS;
  Tensor positions = ids_from(h, picks, PICKED), source = random_tensor(h, &x, ROWS, width, 1);
  Tensor out = poisoned(h, h->dtype, PICKED, width), target = random_tensor(h, &spread, ROWS, width, 1);
  gather_rows(h->backend, (MoveRows){.out = out, .x = source, .indices = positions});
  scatter_rows(h->backend, (MoveRows){.out = target, .x = out, .indices = positions});
  for (int k = 0; k < PICKED; k++) {
    memcpy(want + k * width, x + picks[k] * width, (size_t)width * sizeof *want);
    memcpy(spread + picks[k] * width, x + picks[k] * width, (size_t)width * sizeof *want);
  }
  check_values(h, "gather", out, want, within(0, 1));
  check_values(h, "scatter", target, spread, within(0, 1));

  Tensor few = poisoned_vector(h, DTYPE_I32, PICKED);
  gather_rows(h->backend, (MoveRows){.out = few, .x = ids_from(h, ids, ROWS), .indices = positions});
  double *got = values_of(h, few);
  for (int k = 0; k < PICKED; k++) assert_true(got[k] == ids[picks[k]]);
}

HARNESS_TEST(test_rows) {
  static const int64_t widths[] = {1, 3, 6, 64, 2056};
  RUN_CASES(h, rows_case, widths);
}

typedef struct {
  int64_t count, offset; // offset: the tensors begin there, so that nothing is aligned
  bool master;
  int narrow; // WEIGHT, ...: in bf16
  int kind;   // ADAMW, ...
} UpdateShape;

enum { WEIGHT = 1, MOMENTS = 2, GRAD = 4 };
enum { ADAMW, NESTEROV, SGD, KINDS };

static void reference_update(int kind, double *weight, double *m, double *v, const double *grad,
                             int64_t count, double scale, int64_t step) {
  if (kind == ADAMW) reference_adamw(weight, m, v, grad, count, scale, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step);
  for (int64_t i = 0; i < count && kind == NESTEROV; i++) {
    m[i] = 0.8f * m[i] + (1 - 0.8f) * grad[i] * scale;
    weight[i] = (1 - 0.8f) * grad[i] * scale + 0.8f * m[i];
  }
  for (int64_t i = 0; i < count && kind == SGD; i++) weight[i] -= 1e-2f * (grad[i] + 0.1f * weight[i]);
}

static Tensor part_from(Harness *h, bool narrow, double *values, UpdateShape s) {
  Tensor whole = vector_from(h, narrow ? DTYPE_BF16 : DTYPE_F32, values, s.offset + s.count);
  return tensor_rows(whole, s.offset, s.count);
}

static void update_case(Harness *h, const void *shape) {
  static void (*const updates[])(Backend *, Update) = {adamw, nesterov, sgd};
  UpdateShape s = *(const UpdateShape *)shape;
  int64_t whole = s.offset + s.count;
  double *weight = random_values(h, whole, 1), *m = random_values(h, whole, 0.1);
  double *v = random_values(h, whole, 0.1), *grad = random_values(h, whole, 1), scale[] = {0.5};
  for (int64_t i = 0; i < whole; i++) v[i] = v[i] * v[i] + (s.narrow ? 1e-4 : 0);
  if (!s.narrow) grad[s.offset] = m[s.offset] = v[s.offset] = 0; // 0 / (sqrt(0) + epsilon)
  Tensor master = s.master ? part_from(h, false, weight, s) : (Tensor){0};
  double *rounded = copied_values(h, weight, whole);
  Update a = {.weight = part_from(h, s.narrow & WEIGHT, rounded, s),
              .master = master,
              .m = part_from(h, s.narrow & MOMENTS, m, s),
              .v = part_from(h, s.narrow & MOMENTS, v, s),
              .grad = part_from(h, s.narrow & GRAD, grad, s),
              .grad_scale = vector_from(h, DTYPE_F32, scale, 1),
              .lr = 1e-2f,
              .beta1 = 0.9f,
              .beta2 = 0.95f,
              .epsilon = 1e-8f,
              .momentum = 0.8f,
              .weight_decay = 0.1f,
              .seed = 1};
  if (s.kind != ADAMW) a.v = (Tensor){0};
  if (s.kind == SGD) a.m = a.grad_scale = (Tensor){0};
  int steps = s.narrow ? 1 : 3;
  for (int step = 1; step <= steps; step++) {
    a.step = step;
    updates[s.kind](h->backend, a);
    reference_update(s.kind, weight, m, v, grad, whole, scale[0], step);
  }
  // Rounded at random, a number is off by up to a whole unit, twice what rounding to nearest allows.
  const Tolerance random = {.units = 0.51, .terms = 1, .operations = dtype_epsilon(DTYPE_BF16)};
  Tolerance fp32 = with_size(within(16, 3), s.narrow ? 0 : 1);
  bool random_moments = s.narrow & MOMENTS,
       random_weight = s.narrow & WEIGHT && !s.master && s.kind != NESTEROV;
  if (s.kind != SGD) check_values(h, "m", a.m, m + s.offset, random_moments ? random : fp32);
  if (s.kind == ADAMW) check_values(h, "v", a.v, v + s.offset, random_moments ? random : fp32);
  check_values(h, "updated weight", a.weight, weight + s.offset, random_weight ? random : fp32);
  if (s.master) check_values(h, "updated master", a.master, weight + s.offset, fp32);
}

HARNESS_TEST(test_updates) {
  static const UpdateShape shapes[] = {{.count = 1},
                                       {.count = 1013},
                                       {.count = 1013, .master = true},
                                       {.count = 1013, .kind = NESTEROV},
                                       {.count = 1013, .kind = SGD},
                                       {.count = 1013, .kind = SGD, .master = true}};
  static const int64_t counts[] = {1, 4, 1003, 100000};
  RUN_CASES(h, update_case, shapes);
  for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
    for (int i = 0; i < 32 * KINDS; i++) {
      UpdateShape mirrored[] = {{counts[c], i & 16 ? 3 : 0, i & 8, i & 7, i / 32}};
      if (mirrored->kind != NESTEROV || !mirrored->master) RUN_MIRRORED(h, update_case, mirrored);
    }
}

// An update without momentum: with a gradient g, w -= lr g / |g|, m = g and v = g^2.
static Update plain_update(Harness *h, Dtype dtype, double gradient, float lr, int64_t count) {
  double *values = host_values(h, count), one = 1;
  Tensor m = vector_from(h, dtype, values, count), v = vector_from(h, dtype, values, count);
  for (int64_t i = 0; i < count; i++) values[i] = gradient;
  Tensor grad = vector_from(h, DTYPE_F32, values, count);
  for (int64_t i = 0; i < count; i++) values[i] = 1.5;
  return (Update){.weight = vector_from(h, dtype, values, count),
                  .m = m,
                  .v = v,
                  .grad = grad,
                  .grad_scale = vector_from(h, DTYPE_F32, &one, 1),
                  .lr = lr,
                  .epsilon = 1e-12f,
                  .step = 1,
                  .seed = 3};
}

// 1000 steps of 1/64 ulp of bf16: to nearest nothing moves; at random mean and deviation are right.
HARNESS_TEST(test_drift) {
  enum { COUNT = 4096, STEPS = 1000 };
  const double ulp = 0x1p-7, want = -STEPS * ulp / 64;
  Update a = plain_update(h, h->dtype, 1, (float)ulp / 64, COUNT);
  for (a.step = 1; a.step <= STEPS; a.step++) adamw(h->backend, a);
  double *got = values_of(h, a.weight), mean = 0, square = 0;
  for (int i = 0; i < COUNT; i++) mean += (got[i] - 1.5) / COUNT;
  for (int i = 0; i < COUNT; i++) square += pow(got[i] - 1.5 - mean, 2) / COUNT;
  double deviation = h->dtype == DTYPE_BF16 ? sqrt(STEPS * 63) / 64 * ulp : 0;
  if (fabs(mean - want) > 5 * deviation / sqrt(COUNT) - 1e-4 * want) fail_msg("%g, not %g", mean, want);
  if (fabs(sqrt(square) - deviation) > 0.1 * deviation) fail_msg("%g, not %g", sqrt(square), deviation);
}

enum { DRAWS = 1 << 14 };

// Which weights (state 1: m, 2: v, squared), 1.5 plus half an ulp of bf16, are rounded up: +1, else -1.
static double *draws(Harness *h, uint64_t seed, int64_t step, int64_t first, int state) {
  Update a = plain_update(h, DTYPE_BF16, -1.5 - 0x1p-8, 0x1p-8f, DRAWS);
  a.seed = seed, a.step = step, a.first = first;
  adamw(h->backend, a);
  double *got = values_of(h, (Tensor[]){a.weight, a.m, a.v}[state]);
  for (int i = 0; i < DRAWS; i++) got[i] = fabs(got[i]) > (state == 2 ? 2.26 : 1.5) ? 1 : -1;
  return got;
}

static void check_independent(const char *what, const double *a, const double *b, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += a[i] * b[i];
  if (fabs(sum) > 5 * sqrt(count)) fail_msg("draws of %s: a sum of %g over %d", what, sum, count);
}

// Elements, weights and moments, steps and seeds have draws of their own; a slice has those of the whole.
HARNESS_TEST(test_random_rounding) {
  if (h->backend->device == ON_CPU) return; // which is fp32
  double *ones = host_values(h, DRAWS), *weight = draws(h, 3, 1, 0, 0), *slice = draws(h, 3, 1, 1024, 0);
  for (int i = 0; i < DRAWS; i++) ones[i] = 1;
  check_independent("weights", weight, ones, DRAWS);
  for (int state = 1; state <= 2; state++)
    check_independent("weights and moments", weight, draws(h, 3, 1, 0, state), DRAWS);
  check_independent("two steps", weight, draws(h, 3, 2, 0, 0), DRAWS);
  check_independent("two seeds", weight, draws(h, 4, 1, 0, 0), DRAWS);
  check_independent("the seed and the step", weight, draws(h, 1, 3, 0, 0), DRAWS);
  for (int apart = 1; apart <= 256; apart++)
    check_independent("neighbours", weight, weight + apart, DRAWS - apart);
  assert_memory_equal(weight + 1024, slice, (DRAWS - 1024) * sizeof *slice);
}

typedef struct {
  int64_t count, offset;
  bool squares, wide; // wide: x is fp32 on every backend
} ReduceShape;

static void reduce_case(Harness *h, const void *shape) {
  ReduceShape s = *(const ReduceShape *)shape;
  int64_t whole = s.offset + s.count;
  double *x = random_values(h, whole, 1), start[] = {3.5}, want = 0, size = 0;
  Tensor data = tensor_rows(vector_from(h, s.wide ? DTYPE_F32 : h->dtype, x, whole), s.offset, s.count);
  Tensor sum = poisoned_vector(h, DTYPE_F32, 1), added = vector_from(h, DTYPE_F32, start, 1);
  for (int64_t i = s.offset; i < whole; i++) {
    double term = s.squares ? x[i] * x[i] : x[i];
    want += term;
    size += fabs(term);
  }
  sum_elements(h->backend, (SumElements){.sum = sum, .x = data, .squares = s.squares});
  sum_elements(h->backend, (SumElements){.sum = added, .x = data, .squares = s.squares, .accumulate = true});
  Tolerance tolerance = with_size(within(4 / sqrt((double)s.count), 1), size);
  check_values(h, "sum", sum, &want, tolerance);
  want += 3.5;
  check_values(h, "added sum", added, &want, tolerance);
}

HARNESS_TEST(test_sum_elements) {
  static const ReduceShape shapes[] = {
      {1, 0, false, false},   {2, 0, true, false},       {1009, 0, false, false}, {1009, 0, true, false},
      {32768, 0, true, true}, {100003, 0, false, false}, {100003, 0, true, false}};
  static const ReduceShape mirrored[] = {{1, 1, true, true},        {7, 1, true, false},
                                         {2048, 0, true, true},     {2048, 1, true, false},
                                         {1000003, 0, true, false}, {1000003, 1, true, true},
                                         {9000001, 0, true, true},  {9000001, 1, true, false}};
  RUN_CASES(h, reduce_case, shapes);
  RUN_MIRRORED(h, reduce_case, mirrored);
}

HARNESS_TEST(test_clip_scale) {
  // The sum of squares and the greatest norm; the norm and the scale that they give.
  const double cases[][4] = {
      {16, 1, 4, 0.25},  {16, 8, 4, 1}, {16, 0, 4, 1}, {0, 1, 0, 1}, {INFINITY, 1, INFINITY, NAN},
      {NAN, 1, NAN, NAN}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    double square = cases[i][0];
    ClipScale a = {.norm = poisoned_vector(h, DTYPE_F32, 1),
                   .scale = poisoned_vector(h, DTYPE_F32, 1),
                   .sum_of_squares = vector_from(h, DTYPE_F32, &square, 1),
                   .max_norm = (float)cases[i][1]};
    clip_scale(h->backend, a);
    check_values(h, "norm", a.norm, &cases[i][2], within(2, 1));
    check_values(h, "clip scale", a.scale, &cases[i][3], within(2, 1));
  }
}

HARNESS_TEST(test_copies) {
  double *x = random_values(h, 1009, 1), *zeros = host_values(h, 1009);
  Tensor a = vector_from(h, DTYPE_F32, x, 1009), b = poisoned_vector(h, DTYPE_F32, 1009);
  void (*const collectives[])(Backend *, Collective) = {all_reduce, reduce_scatter, all_gather,
                                                        broadcast_rank_0};
  for (int i = 0; i < 4 && h->backend->ranks == 1; i++) {
    collectives[i](h->backend, (Collective){.out = b, .x = a});
    check_bitwise_equal(h, "collective of one rank", a, b);
    collectives[i](h->backend, (Collective){.out = a, .x = a});
    check_bitwise_equal(h, "collective in place", a, b);
    fill_zero(h->backend, b);
    check_values(h, "fill_zero", b, zeros, within(0, 1));
  }
}

// More bytes and uploads than a GPU's ring of pinned memory holds. The host's buffer is free after each call.
HARNESS_TEST(test_uploads) {
  enum { LARGE = 11 << 20, SMALL = 1003, UPLOADS = 300 };
  int32_t *host = malloc(LARGE * sizeof *host), *back = malloc(LARGE * sizeof *back);
  Tensor large = memory_push_1d(&h->backend->memory, "large", MEMORY_TABLES, DTYPE_I32, LARGE);
  for (int i = 0; i < LARGE; i++) host[i] = i;
  backend_to_device(h->backend, large, host);
  memset(host, 0, LARGE * sizeof *host);
  backend_to_host(h->backend, back, large);
  for (int i = 0; i < LARGE; i++)
    if (back[i] != i) fail_msg("upload: %d is %d", i, back[i]);
  for (int u = 0; u < UPLOADS; u++) {
    for (int i = 0; i < SMALL; i++) host[i] = -u * SMALL - i;
    backend_to_device(h->backend, tensor_rows(large, u * SMALL, SMALL), host);
  }
  memset(host, 0, LARGE * sizeof *host);
  backend_to_host(h->backend, back, large);
  for (int i = 0; i < UPLOADS * SMALL; i++) assert_int_equal(back[i], -i);
  free(host);
  free(back);
}

HARNESS_TEST(test_device_memory) {
  Backend *backend = h->backend;
  enum { BYTES = 64 << 20 };
  bool cpu = backend->device == ON_CPU;
  backend->ops->device_peak_reset(backend);
  size_t before = backend->ops->device_bytes_now(backend), most = cpu ? BYTES / 2 : BYTES;
  const MemorySource *source = &backend->memory.source;
  char *block = source->allocate(source->context, BYTES);
  uint32_t words[4] = {1, 1, 1, 1};
  backend_to_host(backend, words, tensor_1d(block + 4000, DTYPE_I32, 4));
  for (int i = 0; i < 4; i++) assert_int_equal(words[i], 0);
  if (cpu) memset(block, 1, BYTES); // pages are the system's once they are written
  assert_true(backend->ops->device_bytes_now(backend) >= before + most);
  source->release(source->context, block, BYTES);
  assert_true(backend->ops->device_bytes_now(backend) < before + most);
  assert_true(backend->ops->device_bytes_peak(backend) >= before + most);
  assert_true(backend->device_overhead > 0 && backend->device_capacity > backend->device_overhead);
}

// Measuring the algorithms of the loss's dW changes no bit: the library's first choice computes the same.
HARNESS_TEST(test_measuring_keeps_bits) {
  enum { TOKENS = 256, VOCAB = 1 << 14, HIDDEN = 1 << 10 }; // measured from 2^24 elements on
  Harness *measured = h;
  if (measured->backend->device != ON_CUDA || small_shapes()) return;
  setenv("LCE_MATMUL_TUNE", "0", 1);
  Harness *first = harness_open(harness_backend());
  unsetenv("LCE_MATMUL_TUNE");
  double *dout = random_values(measured, TOKENS * VOCAB, 1), *x = random_values(measured, TOKENS * HIDDEN, 1);
  Tensor dweight[2];
  for (int i = 0; i < 2; i++) {
    Harness *h = i ? first : measured;
    dweight[i] = poisoned(h, DTYPE_F32, VOCAB, HIDDEN);
    LinearBackwardWeight a = {.dweight = dweight[i],
                              .dout = tensor_from(h, h->dtype, dout, TOKENS, VOCAB),
                              .x = tensor_from(h, h->dtype, x, TOKENS, HIDDEN)};
    for (int chunk = 0; chunk < 2; chunk++, a.accumulate = true) linear_backward_weight(h->backend, a);
  }
  check_values(measured, "measured GEMM", dweight[0], values_of(first, dweight[1]), within(0, 1));
  harness_close(first);
}

TEST_MAIN(run_on_backends())
