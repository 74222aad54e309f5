#include "tests/harness.h"

#include <float.h>

#include "kernels/base/alloc.h"
#include "kernels/base/random.h"
#include "kernels/ranks/ranks.h"

enum { STACK_BYTES = 256 << 20, SEED = 20240520, SAMPLES = 48 };

static void *test_alloc(size_t bytes) {
  return host_alloc((int64_t)bytes, 1, "a test");
}

static Backend *open_backend(const char *name) {
  const char *reason = NULL;
  if (!strcmp(name, "cpu")) return cpu_backend_create(false);
  if (!strcmp(name, "cpu-plain")) return cpu_backend_create(true);
  if (!strcmp(name, "cuda")) return cuda_backend_create(ranks_self()->local_rank, DTYPE_BF16, &reason);
  if (!strcmp(name, "cuda-fp32")) return cuda_backend_create(ranks_self()->local_rank, DTYPE_F32, &reason);
  fail("there is no backend named %s for tests", name);
}

Harness *harness_open(const char *name) {
  Backend *backend = open_backend(name);
  if (!backend) return NULL;
  Harness *h = test_alloc(sizeof *h);
  h->backend = backend;
  h->dtype = backend->dtype;
  backend->memory.poison = true;
  memory_set_stack(&backend->memory, STACK_BYTES);
  return h;
}

void harness_close(Harness *h) {
  if (h->mirror) harness_close(h->mirror);
  backend_destroy(h->backend);
  for (int64_t i = 0; i < h->block_count; i++) free(h->blocks[i]);
  free(h->blocks);
  free(h->records);
  free(h);
}

bool small_shapes(void) {
  return getenv("LCE_SMALL_SHAPES") != NULL;
}

static const char *group_backend;

static int open_group(void **state) {
  Harness *h = *state = harness_open(group_backend);
  if (h && !strcmp(group_backend, "cpu")) refusals_watch(h->backend);
  return h == NULL;
}

static int close_group(void **state) {
  harness_close(*state);
  return 0;
}

// Scratch lies on top of the stack. Beyond its highest end memory is zero unless an operation wrote further.
static void check_beyond_stack(Memory *m) {
  enum { BEYOND = 1 << 20 };
  size_t peak = m->ledger.stack_peak;
  char *base = m->stack_base;
  for (size_t i = peak; i < peak + BEYOND && i < m->stack_capacity; i++)
    if (base[i]) fail_msg("byte %zu beyond a stack of %zu is written", i - peak, peak);
  memset(base, 0, peak);
  ledger_reset_peak(&m->ledger);
}

void harness_clear(Harness *h) {
  Memory *m = &h->backend->memory;
  memory_pop_to(m, 0);
  if (h->backend->device == ON_CPU) check_beyond_stack(m);
}

static int after_each(void **state) {
  harness_clear(*state);
  return 0;
}

const char *harness_backend(void) {
  return group_backend;
}

int run_on_backend(const char *backend) {
  Harness *probe = harness_open(backend);
  if (!probe) return 0;
  harness_close(probe);
  group_backend = backend;
  int failures = tests_run_each(backend, open_group, close_group, after_each);
  return failures + (strcmp(backend, "cpu") ? 0 : refusals_missed_by_the_core());
}

int run_on_backends(void) {
  static const char *const backends[] = {"cpu", "cpu-plain", "cuda-fp32", "cuda"};
  int failures = 0;
  for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) failures += run_on_backend(backends[i]);
  return failures;
}

// --- values and tensors ------------------------------------------------------------------------------------

static void *host_block(Harness *h, size_t bytes) {
  h->blocks = host_grow(h->blocks, h->block_count, &h->block_capacity, sizeof *h->blocks, "a test");
  return h->blocks[h->block_count++] = test_alloc(bytes);
}

double *host_values(Harness *h, int64_t count) {
  return host_block(h, (size_t)count * sizeof(double));
}

double *copied_values(Harness *h, const double *values, int64_t count) {
  double *copy = host_values(h, count);
  memcpy(copy, values, (size_t)count * sizeof *copy);
  return copy;
}

double *random_values(Harness *h, int64_t count, double scale) {
  double *values = host_values(h, count);
  uint64_t stream = h->draws++;
  for (int64_t i = 0; i < count; i++) values[i] = scale * random_normal(SEED, stream, (uint64_t)i);
  return values;
}

int32_t *random_ids(Harness *h, int64_t count, int64_t below) {
  int32_t *ids = host_block(h, (size_t)count * sizeof *ids);
  uint64_t stream = h->draws++;
  for (int64_t i = 0; i < count; i++)
    ids[i] = (int32_t)(random_bits(SEED, stream, (uint64_t)i) % (uint64_t)below);
  return ids;
}

// A strided tensor as the dense block that it lies in.
static Tensor whole_block(Tensor t) {
  return tensor_2d(t.data, t.dtype, t.shape[0], t.stride);
}

// The CPU, which mirrors a GPU in bf16, holds the rounded values in fp32.
static Dtype stored_as(const Harness *h, Dtype dtype) {
  return dtype == DTYPE_BF16 && h->recording && h->backend->device == ON_CPU ? DTYPE_F32 : dtype;
}

Tensor poisoned_strided(Harness *h, Dtype dtype, int64_t rows, int64_t columns, int64_t stride) {
  dtype = stored_as(h, dtype);
  Tensor block = memory_push_2d(&h->backend->memory, "test tensor", MEMORY_ACTIVATIONS, dtype, rows, stride);
  return tensor_columns(block, 0, columns);
}

Tensor poisoned(Harness *h, Dtype dtype, int64_t rows, int64_t columns) {
  return poisoned_strided(h, dtype, rows, columns, columns);
}

Tensor poisoned_vector(Harness *h, Dtype dtype, int64_t count) {
  return tensor_flat(poisoned(h, dtype, 1, count));
}

float bf16_to_f32(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static double rounded(Dtype dtype, double value) {
  float f = (float)value;
  return dtype == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32(f)) : f;
}

Tensor strided_from(Harness *h, Dtype dtype, double *values, int64_t rows, int64_t columns, int64_t stride) {
  Tensor t = poisoned_strided(h, dtype, rows, columns, stride);
  size_t bytes = (size_t)(rows * stride) * dtype_bytes(t.dtype);
  void *host = test_alloc(bytes);
  memset(host, 0xFF, bytes);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) {
      double *value = &values[i * columns + j];
      *value = rounded(dtype, *value);
      if (t.dtype == DTYPE_BF16)
        ((uint16_t *)host)[i * stride + j] = bf16_from_f32((float)*value);
      else
        ((float *)host)[i * stride + j] = (float)*value;
    }
  backend_to_device(h->backend, whole_block(t), host);
  backend_synchronize(h->backend);
  free(host);
  return t;
}

Tensor tensor_from(Harness *h, Dtype dtype, double *values, int64_t rows, int64_t columns) {
  return strided_from(h, dtype, values, rows, columns, columns);
}

Tensor vector_from(Harness *h, Dtype dtype, double *values, int64_t count) {
  return tensor_flat(tensor_from(h, dtype, values, 1, count));
}

Tensor random_strided(Harness *h, double **values, int64_t rows, int64_t columns, int64_t stride,
                      double scale) {
  *values = random_values(h, rows * columns, scale);
  return strided_from(h, h->dtype, *values, rows, columns, stride);
}

Tensor random_tensor(Harness *h, double **values, int64_t rows, int64_t columns, double scale) {
  return random_strided(h, values, rows, columns, columns, scale);
}

Tensor random_vector(Harness *h, double **values, int64_t count, double scale) {
  return tensor_flat(random_tensor(h, values, 1, count, scale));
}

Tensor ids_from(Harness *h, const int32_t *ids, int64_t count) {
  Tensor t = memory_push_1d(&h->backend->memory, "test ids", MEMORY_ACTIVATIONS, DTYPE_I32, count);
  backend_to_device(h->backend, t, ids);
  backend_synchronize(h->backend);
  return t;
}

static double *block_values(Harness *h, Tensor t) {
  Tensor block = t.rank == 1 ? tensor_2d(t.data, t.dtype, 1, t.shape[0]) : whole_block(t);
  int64_t count = tensor_count(block);
  void *host = test_alloc(tensor_bytes(block));
  backend_to_host(h->backend, host, block);
  double *values = host_values(h, count);
  for (int64_t i = 0; i < count; i++)
    values[i] = t.dtype == DTYPE_I32    ? ((int32_t *)host)[i]
                : t.dtype == DTYPE_BF16 ? (double)bf16_to_f32(((uint16_t *)host)[i])
                                        : (double)((float *)host)[i];
  free(host);
  return values;
}

double *values_of(Harness *h, Tensor t) {
  double *block = block_values(h, t);
  if (t.rank == 1 || tensor_is_dense(t)) return block;
  double *values = host_values(h, tensor_count(t));
  for (int64_t i = 0; i < t.shape[0]; i++)
    memcpy(values + i * t.shape[1], block + i * t.stride, (size_t)t.shape[1] * sizeof *values);
  return values;
}

// --- comparisons -------------------------------------------------------------------------------------------

double dtype_epsilon(Dtype dtype) {
  return dtype == DTYPE_BF16 ? 0x1p-7 : 0x1p-23;
}

Tolerance within(double units, double terms) {
  return (Tolerance){.units = units, .terms = terms, .operations = dtype_epsilon(DTYPE_F32)};
}

Tolerance within_stored(const Harness *h, double units, double terms) {
  return (Tolerance){.units = units, .terms = terms, .operations = dtype_epsilon(h->dtype)};
}

Tolerance with_size(Tolerance tolerance, double size) {
  tolerance.size = size;
  return tolerance;
}

static double root_mean_square(const double *values, int64_t count) {
  return count ? sqrt(reference_dot(values, values, count) / (double)count) : 0;
}

static double allowed(Tolerance t, Dtype stored, double want, double rms) {
  return t.units * t.operations * sqrt(t.terms) * (fabs(want) + rms + t.size) +
         0.5 * dtype_epsilon(stored) * fabs(want) + FLT_MIN;
}

static void check_one(const char *what, int64_t i, double got, double want, double tolerance) {
  bool same = got == want || (isnan(got) && isnan(want)) || fabs(got - want) <= tolerance;
  if (!same)
    fail_msg("%s: element %lld is %.9g, should be %.9g (off by %.3g, allowed %.3g)", what, (long long)i, got,
             want, fabs(got - want), tolerance);
}

typedef struct Record {
  char what[64];
  double *values;
  int64_t count;
  Dtype dtype;
  Tolerance tolerance;
} Record;

static bool record(Harness *h, const char *what, Tensor got, double *values, Tolerance tolerance) {
  if (!h->recording) return false;
  h->records = host_grow(h->records, h->record_count, &h->record_capacity, sizeof *h->records, "a test");
  Record *r = &h->records[h->record_count++];
  *r = (Record){.values = values, .count = tensor_count(got), .dtype = got.dtype, .tolerance = tolerance};
  snprintf(r->what, sizeof r->what, "%s", what);
  return true;
}

void check_values(Harness *h, const char *what, Tensor got, const double *want, Tolerance tolerance) {
  double *values = values_of(h, got);
  int64_t count = tensor_count(got);
  if (record(h, what, got, values, tolerance)) return;
  double rms = root_mean_square(want, count);
  for (int64_t i = 0; i < count; i++)
    check_one(what, i, values[i], want[i], allowed(tolerance, got.dtype, want[i], rms));
}

void check_by_row(Harness *h, const char *what, const char *row, Tensor got, const double *want,
                  Tolerance t) {
  const double *values = values_of(h, got);
  int64_t count = tensor_count(got), columns = count / got.shape[0];
  double rms = root_mean_square(want, count);
  for (int64_t i = 0; i < count; i++) {
    if (fabs(values[i] - want[i]) <= allowed(t, got.dtype, want[i], rms)) continue;
    char column[32] = "";
    if (columns > 1) snprintf(column, sizeof column, ", column %d", (int)(i % columns));
    fail_msg("%s of %s %lld%s is %.9g; %.9g is right", what, row, (long long)(i / columns), column, values[i],
             want[i]);
  }
}

void check_bitwise_equal(Harness *h, const char *what, Tensor a, Tensor b) {
  double *left = values_of(h, a), *right = values_of(h, b);
  assert_true(tensor_same_shape(a, b));
  for (int64_t i = 0; i < tensor_count(a); i++)
    if (memcmp(&left[i], &right[i], sizeof left[i]) != 0)
      fail_msg("%s: element %lld is %.9g here and %.9g there", what, (long long)i, left[i], right[i]);
}

Tensor in_pieces(Tensor t) {
  int64_t piece = 16 / (int64_t)dtype_bytes(t.dtype), columns = (t.shape[1] + piece - 1) / piece * piece;
  t.shape[1] = columns < t.stride ? columns : t.stride;
  return t;
}

void check_gaps(Harness *h, const char *what, Tensor t) {
  double *block = block_values(h, t);
  for (int64_t i = 0; i < t.shape[0]; i++)
    for (int64_t j = t.shape[1]; j < t.stride; j++)
      if (!isnan(block[i * t.stride + j]))
        fail_msg("%s: row %lld was written beyond its end, at column %lld", what, (long long)i, (long long)j);
}

void check_gradient(Harness *h, const char *what, Tensor got, const double *before, double *x,
                    Objective objective, void *context, Tolerance tolerance) {
  double *values = values_of(h, got);
  int64_t count = tensor_count(got), samples = count < SAMPLES ? count : SAMPLES;
  double rms = root_mean_square(values, count);
  if (isnan(rms)) fail_msg("%s holds a NaN", what);
  if (record(h, what, got, values, tolerance)) return;
  uint64_t stream = h->draws++;
  for (int64_t s = 0; s < samples; s++) {
    int64_t i = (int64_t)random_permute(SEED, stream, (uint64_t)s, (uint64_t)count);
    double kept = x[i], step = 1e-4 * (1 + fabs(kept));
    // Two central differences, extrapolated: the error is of the fourth order in the step.
    double derivatives[2];
    for (int k = 0; k < 2; k++) {
      double width = step * (k + 1);
      x[i] = kept + width;
      double above = objective(context);
      x[i] = kept - width;
      double below = objective(context);
      derivatives[k] = (above - below) / (2 * width);
    }
    x[i] = kept;
    double want = (before ? before[i] : 0) + (4 * derivatives[0] - derivatives[1]) / 3;
    check_one(what, i, values[i], want, allowed(tolerance, got.dtype, want, rms));
  }
}

// --- cases -------------------------------------------------------------------------------------------------

static void release_blocks(Harness *h, int64_t kept) {
  while (h->block_count > kept) free(h->blocks[--h->block_count]);
}

void run_cases(Harness *h, TestCase run, const void *shapes, size_t size, size_t count) {
  int64_t kept = h->block_count;
  for (size_t i = 0; i < count; i++) {
    run(h, (const char *)shapes + size * i);
    harness_clear(h);
    release_blocks(h, kept);
  }
}

// Runs the case and returns how many records it added.
static int64_t record_case(Harness *h, TestCase run, const void *shape, uint64_t draws) {
  int64_t before = h->record_count;
  h->draws = draws;
  h->recording = true;
  run(h, shape);
  h->recording = false;
  harness_clear(h);
  return h->record_count - before;
}

static void compare_records(const Record *got, const Record *again, const Record *want, size_t shape) {
  double rms = root_mean_square(want->values, want->count);
  for (int64_t i = 0; i < want->count; i++) {
    char what[96];
    snprintf(what, sizeof what, "shape %zu, %s", shape, got->what);
    check_one(what, i, got->values[i], want->values[i],
              allowed(got->tolerance, got->dtype, want->values[i], rms));
    if (memcmp(&got->values[i], &again->values[i], sizeof *got->values))
      fail_msg("%s: element %lld is %.9g, and %.9g in a second run", what, (long long)i, got->values[i],
               again->values[i]);
  }
}

void run_mirrored(Harness *h, TestCase run, const void *shapes, size_t size, size_t count) {
  if (h->backend->device != ON_CUDA) return;
  if (!h->mirror) h->mirror = harness_open("cpu");
  Harness *cpu = h->mirror;
  cpu->dtype = h->dtype;
  int64_t kept = h->block_count;
  for (size_t i = 0; i < count; i++) {
    const void *shape = (const char *)shapes + size * i;
    uint64_t draws = h->draws;
    h->record_count = cpu->record_count = 0;
    int64_t results = record_case(h, run, shape, draws), again = 0;
    if (!small_shapes()) again = record_case(h, run, shape, draws) ? results : 0;
    assert_true(results > 0 && record_case(cpu, run, shape, draws) == results);
    for (int64_t k = 0; k < results; k++)
      compare_records(&h->records[k], &h->records[again + k], &cpu->records[k], i);
    release_blocks(h, kept);
    release_blocks(cpu, 0);
  }
}
