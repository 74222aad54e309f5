// What surrounds the layers, as in test_kernels_layers.c: rows and targets, the optimizer, copies, and the memory that the
// system counts.

#include "tests/harness.h"
#include "tests/reference.h"

// --- rows --------------------------------------------------------------------------------------------------

TEST(test_rows) {
  Harness *h = *state;
  const int32_t picks[] = {10, 0, 7, 3};
  double *x = random_values(h, 11 * 5, 1), *want = host_values(h, 4 * 5),
         *spread = random_values(h, 11 * 5, 1);
  for (int i = 0; i < 4; i++) memcpy(want + i * 5, x + picks[i] * 5, 5 * sizeof *want);
  Tensor rows = ids_from(h, picks, 4), source = tensor_from(h, h->dtype, x, 11, 5);
  Tensor out = poisoned(h, h->dtype, 4, 5), target = tensor_from(h, h->dtype, spread, 11, 5);
  gather_rows(h->backend, (MoveRows){.out = out, .x = source, .rows = rows});
  // x was rounded when it went to the device, want was copied before
  for (int i = 0; i < 4; i++) memcpy(want + i * 5, x + picks[i] * 5, 5 * sizeof *want);
  check_values(h, "gather", out, want, within(0, 1));
  scatter_rows(h->backend, (MoveRows){.out = target, .x = out, .rows = rows});
  for (int i = 0; i < 4; i++) memcpy(spread + picks[i] * 5, x + picks[i] * 5, 5 * sizeof *want);
  check_values(h, "scatter", target, spread, within(0, 1));

  int32_t *ids = random_ids(h, 11, 1000);
  Tensor all = ids_from(h, ids, 11), few = poisoned_vector(h, DTYPE_I32, 4);
  gather_rows(h->backend, (MoveRows){.out = few, .x = all, .rows = rows});
  double *got = values_of(h, few);
  for (int i = 0; i < 4; i++) assert_true(got[i] == ids[picks[i]]);
}

TEST(test_read_targets) {
  Harness *h = *state;
  enum { TOKENS = 300, VOCAB = 7 };
  // Of the wide ones two are wrong only above their lower 32 bits.
  const int64_t few[] = {0, 6, -100, 7, -1, -99, INT32_MAX, INT32_MIN, 1LL << 32, (1LL << 33) + 3};
  enum { FEW = sizeof few / sizeof *few };
  for (int wide = 0; wide < 2; wide++) {
    int64_t ids[TOKENS];
    int32_t narrow[TOKENS];
    for (int n = 0; n < TOKENS; n++) narrow[n] = (int32_t)(ids[n] = few[n % (wide ? FEW : FEW - 2)]);
    Tensor given =
        memory_push_1d(&h->backend->memory, "ids", MEMORY_TABLES, wide ? DTYPE_I64 : DTYPE_I32, TOKENS);
    backend_to_device(h->backend, given, wide ? (void *)ids : narrow);
    double *ones = host_values(h, TOKENS);
    for (int n = 0; n < TOKENS; n++) ones[n] = 1;
    Tensor targets = poisoned_vector(h, DTYPE_I32, TOKENS), loss = vector_from(h, DTYPE_F32, ones, TOKENS);
    read_targets(h->backend, (ReadTargets){.targets = targets, .ids = given, .vocab_size = VOCAB});
    read_targets(h->backend, (ReadTargets){.loss = loss, .ids = given, .vocab_size = VOCAB});
    double *got = values_of(h, targets), *losses = values_of(h, loss);
    for (int n = 0; n < TOKENS; n++) {
      bool counts = ids[n] >= 0 && ids[n] < VOCAB;
      assert_true(got[n] == (counts ? (double)ids[n] : IGNORE_INDEX));
      assert_true(counts || ids[n] == IGNORE_INDEX ? losses[n] == 1 : isnan(losses[n]));
    }
  }
}

// --- the optimizer -----------------------------------------------------------------------------------------

static void adamw_case(Harness *h, int64_t count, bool with_master) {
  double *weight = random_values(h, count, 1), *m = random_values(h, count, 0.1);
  double *v = random_values(h, count, 0.1), *grad = random_values(h, count, 1), scale[] = {0.5};
  for (int64_t i = 0; i < count; i++) v[i] *= v[i];
  grad[0] = m[0] = v[0] = 0; // 0 / (sqrt(0) + epsilon)
  Tensor master = with_master ? vector_from(h, DTYPE_F32, weight, count) : (Tensor){0};
  // Without a master the weight is the only copy: compare in fp32, where nothing is rounded at random.
  Dtype weight_dtype = with_master ? h->dtype : DTYPE_F32;
  double *rounded = copied_values(h, weight, count);
  AdamW a = {.weight = vector_from(h, weight_dtype, rounded, count),
             .master = master,
             .m = vector_from(h, DTYPE_F32, m, count),
             .v = vector_from(h, DTYPE_F32, v, count),
             .grad = vector_from(h, DTYPE_F32, grad, count),
             .grad_scale = vector_from(h, DTYPE_F32, scale, 1),
             .lr = 1e-2f,
             .beta1 = 0.9f,
             .beta2 = 0.95f,
             .epsilon = 1e-8f,
             .weight_decay = 0.1f,
             .seed = 1};
  if (!with_master) weight = rounded;
  for (int step = 1; step <= 3; step++) {
    a.step = step;
    adamw(h->backend, a);
    reference_adamw(weight, m, v, grad, count, scale[0], 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step);
  }
  check_values(h, "adamw m", a.m, m, of_size(within(4, 3), 1));
  check_values(h, "adamw v", a.v, v, of_size(within(4, 3), 1));
  check_values(h, "adamw weight", a.weight, weight, of_size(within(16, 3), 1));
  if (with_master) check_values(h, "adamw master", a.master, weight, of_size(within(16, 3), 1));
}

TEST(test_adamw) {
  adamw_case(*state, 1, false);
  adamw_case(*state, 1013, false);
  adamw_case(*state, 1013, true);
}

static double scalar(Harness *h, Tensor t) {
  return values_of(h, t)[0];
}

static void reduce_case(Harness *h, int64_t count, bool squares) {
  double *x = random_values(h, count, 1), start[] = {3.5}, want = 0, size = 0;
  Tensor data = vector_from(h, h->dtype, x, count), sum = poisoned_vector(h, DTYPE_F32, 1);
  for (int64_t i = 0; i < count; i++) {
    double term = squares ? x[i] * x[i] : x[i];
    want += term;
    size += fabs(term);
  }
  reduce(h->backend, (Reduce){.sum = sum, .x = data, .squares = squares});
  double tolerance =
      4 * dtype_epsilon(DTYPE_F32) * sqrt((double)count) / (double)count * size + 1e-7 * fabs(want);
  assert_true(fabs(scalar(h, sum) - want) <= tolerance);
  Tensor added = vector_from(h, DTYPE_F32, start, 1);
  reduce(h->backend, (Reduce){.sum = added, .x = data, .squares = squares, .accumulate = true});
  assert_true(fabs(scalar(h, added) - (want + 3.5)) <= tolerance + 1e-6);
}

TEST(test_reduce) {
  const int64_t counts[] = {1, 2, 1009, 32768, 100003};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (int squares = 0; squares < 2; squares++) reduce_case(*state, counts[i], squares);
}

static void clip_case(Harness *h, double square, float max_norm, double norm, double scale) {
  ClipScale a = {.norm = poisoned_vector(h, DTYPE_F32, 1),
                 .scale = poisoned_vector(h, DTYPE_F32, 1),
                 .sum_of_squares = vector_from(h, DTYPE_F32, &square, 1),
                 .max_norm = max_norm};
  clip_scale(h->backend, a);
  check_values(h, "norm", a.norm, &norm, within(2, 1));
  check_values(h, "clip scale", a.scale, &scale, within(2, 1));
}

// From every dtype to every other, in place too, in pieces of 8 elements and one by one.
TEST(test_scale_by) {
  Harness *h = *state;
  const Dtype dtypes[] = {DTYPE_F32, h->dtype};
  for (int i = 0; i < 32; i++) {
    int64_t count = i & 1 ? 1013 : 1024;
    Dtype from = dtypes[i >> 1 & 1], to = dtypes[i >> 2 & 1];
    bool in_place = i & 8;
    double factor = i & 16 ? -0.75 : 1, *values = random_values(h, count, 1);
    if (in_place && from != to) continue;
    Tensor x = vector_from(h, from, values, count), out = in_place ? x : poisoned_vector(h, to, count);
    Tensor by = vector_from(h, DTYPE_F32, &factor, 1);
    scale_by(h->backend, (ScaleBy){.out = out, .x = x, .factor = by});
    for (int64_t n = 0; n < count; n++) values[n] *= factor;
    check_values(h, "scale_by", out, values, within(1, 1));
  }
}

TEST(test_clip_scale) {
  clip_case(*state, 16, 1, 4, 0.25);
  clip_case(*state, 16, 8, 4, 1);
  clip_case(*state, 16, 0, 4, 1);
  clip_case(*state, 0, 1, 0, 1);
  clip_case(*state, (double)INFINITY, 1, (double)INFINITY, (double)NAN);
  clip_case(*state, (double)NAN, 1, (double)NAN, (double)NAN);
}

// --- copies, collectives of one rank, what the system says -------------------------------------------------

TEST(test_copies) {
  Harness *h = *state;
  double *x = random_values(h, 1009, 1), *zeros = host_values(h, 1009);
  Tensor a = vector_from(h, DTYPE_F32, x, 1009), b = poisoned_vector(h, DTYPE_F32, 1009);
  void (*const collectives[])(Backend *, Collective) = {all_reduce, reduce_scatter, all_gather, broadcast};
  for (int i = 0; i < 4 && h->backend->ranks == 1; i++) {
    collectives[i](h->backend, (Collective){.out = b, .x = a});
    check_bitwise_equal(h, "collective of one rank", a, b);
    collectives[i](h->backend, (Collective){.out = a, .x = a});
    check_bitwise_equal(h, "collective in place", a, b);
    fill_zero(h->backend, b);
    check_values(h, "fill_zero", b, zeros, within(0, 1));
  }
}

TEST(test_system_memory) {
  Harness *h = *state;
  Backend *backend = h->backend;
  if (strcmp(backend->name, "cpu")) return;
  enum { BYTES = 64 << 20 };
  backend->ops->device_peak_reset(backend);
  size_t before = backend->ops->device_bytes_now(backend);
  const MemorySource *source = &backend->memory.source;
  char *block = source->allocate(source->context, BYTES);
  for (size_t i = 0; i < BYTES; i++) assert_true(block[i] == 0);
  memset(block, 1, BYTES);
  assert_true(backend->ops->device_bytes_now(backend) >= before + BYTES / 2);
  source->release(source->context, block, BYTES);
  assert_true(backend->ops->device_bytes_now(backend) < before + BYTES / 2);
  assert_true(backend->ops->device_bytes_peak(backend) >= before + BYTES / 2);
  assert_true(backend->device_overhead > 0 && backend->device_capacity > backend->device_overhead);
}

int main(void) {
  return run_on_backends();
}
