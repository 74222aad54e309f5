#include "tests/pair.h"

static const char *backend_name;

static int open_pair(void **state) {
  Pair *p = calloc(1, sizeof *p);
  p->cuda = harness_open(backend_name);
  p->cpu = harness_open("cpu");
  *state = p;
  return 0;
}

static int close_pair(void **state) {
  Pair *p = *state;
  harness_close(p->cuda);
  harness_close(p->cpu);
  free(p);
  return 0;
}

static int pop_all(void **state) {
  Pair *p = *state;
  memory_pop_to(&p->cuda->backend->memory, 0);
  memory_pop_to(&p->cpu->backend->memory, 0);
  return 0;
}

void pop_pair(Pair *p) {
  pop_all((void **)&p);
}

Both both_of(Pair *p, Dtype dtype, double *values, int64_t rows, int64_t columns, int64_t stride) {
  Both b;
  b.cuda = strided_from(p->cuda, dtype, values, rows, columns, stride);
  b.cpu = strided_from(p->cpu, DTYPE_F32, values, rows, columns, stride);
  return b;
}

Both both_random(Pair *p, Dtype dtype, int64_t rows, int64_t columns, double scale) {
  return both_of(p, dtype, random_values(p->cuda, rows * columns, scale), rows, columns, columns);
}

Both both_strided(Pair *p, Dtype dtype, int64_t rows, int64_t columns, int64_t stride, double scale) {
  return both_of(p, dtype, random_values(p->cuda, rows * columns, scale), rows, columns, stride);
}

Both both_poisoned(Pair *p, Dtype dtype, int64_t rows, int64_t columns, int64_t stride) {
  return (Both){.cuda = poisoned_strided(p->cuda, dtype, rows, columns, stride),
                .cpu = poisoned_strided(p->cpu, DTYPE_F32, rows, columns, stride)};
}

Both both_result(Pair *p, Dtype dtype, int64_t rows, int64_t columns, bool accumulate) {
  return accumulate ? both_random(p, dtype, rows, columns, 1)
                    : both_poisoned(p, dtype, rows, columns, columns);
}

Both both_ids(Pair *p, const int32_t *ids, int64_t count) {
  return (Both){.cuda = ids_from(p->cuda, ids, count), .cpu = ids_from(p->cpu, ids, count)};
}

Both flat(Both b) {
  return (Both){.cuda = tensor_flat(b.cuda), .cpu = tensor_flat(b.cpu)};
}

void check_both(Pair *p, const char *what, Both b, Tolerance tolerance) {
  check_values(p->cuda, what, b.cuda, values_of(p->cpu, b.cpu), tolerance);
}

Tensor on(Side side, Both b) {
  return side.cuda ? b.cuda : b.cpu;
}

Side side_of(Pair *p, int i) {
  return i == 0 ? (Side){p->cuda->backend, true} : (Side){p->cpu->backend, false};
}

const char *pair_backend(void) {
  return backend_name;
}

int pair_main(int count, char **arguments) {
  if (count > 1) cmocka_set_test_filter(arguments[1]);
  const char *reason = NULL;
  Backend *probe = cuda_backend_create(0, DTYPE_BF16, &reason);
  if (!probe) return skip_all("cuda", "the CUDA backend", reason);
  backend_destroy(probe);
  int failures = 0;
  const char *const names[] = {"cuda-fp32", "cuda"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    backend_name = names[i];
    failures += tests_run_each(names[i], open_pair, close_pair, pop_all);
  }
  return failures;
}
