// Collectives over ranks: of gradients and weights, which copy engines may carry, and of tensors on the
// stack. Each rank draws what all of them have, and checks its results.
#include "kernels/base/alloc.h"
#include "tests/process.h"

typedef struct {
  const char *name;
  int64_t count; // of a slice; a sum is of so many for each rank, and `more`
  int64_t more;
  int64_t first; // where it begins in its reservation
} Case;

enum { REPETITIONS = 50, IN_FLIGHT = 3 };
enum { MOST_COMPARED = 1 << 18 }; // elements, between ranks

static const Case cases[] = {
    {"nothing to cut", 0, 1, 0},    {"one each", 1, 0, 0},  {"a few", 3, 2, 0},
    {"whole accesses", 4096, 0, 0}, {"odd", 10001, 1, 128}, {"between accesses", 1000, 1, 5},
};
static const Case on_gpus[] = {{"a MiB", 1 << 18, 0, 256}, {"a MiB and some", 1 << 18, 3, 1}};

// Memory of the tensors: reservations of gradients and of weights, or the stack.
typedef struct {
  Tensor x, out;
} Slabs;

static Slabs slabs_on_stack(Harness *h, int64_t count) {
  return (Slabs){poisoned_vector(h, h->dtype, count), poisoned_vector(h, h->dtype, count)};
}

// Until the next call.
static const char *described(const Backend *b, const char *operation, const Case *c, const char *where) {
  static char text[96];
  snprintf(text, sizeof text, "%s, %s, %s, rank %d of %d", operation, c->name, where, b->rank, b->ranks);
  return text;
}

static void poison(Harness *h, Tensor t) {
  const MemorySource *source = &h->backend->memory.source;
  source->poison(source->context, t.data, tensor_bytes(t));
}

// values[r]: what rank r has, as the dtype rounds it; this rank's are written to x.
static void draw(Harness *h, Tensor x, double **values) {
  MemoryMark mark = memory_mark(&h->backend->memory);
  int64_t count = tensor_count(x);
  for (int r = 0; r < h->backend->ranks; r++) {
    values[r] = random_values(h, count, 1);
    Tensor rounded = vector_from(h, x.dtype, values[r], count);
    if (r == h->backend->rank) {
      void *host = host_alloc(count, dtype_bytes(x.dtype), "a test");
      backend_to_host(h->backend, host, rounded);
      backend_to_device(h->backend, x, host);
      free(host);
    }
    memory_pop_to(&h->backend->memory, mark);
  }
}

// Checks the sum of elements [first, first + count) of all ranks' values, and of `before` if given. A sum of
// two is rounded once, whoever makes it.
static void check_sum(Harness *h, const char *what, Tensor got, double **values, int64_t first,
                      const double *before) {
  int64_t count = tensor_count(got);
  int ranks = h->backend->ranks;
  double *want = host_values(h, count);
  for (int64_t i = 0; i < count; i++)
    for (int r = 0; r < ranks; r++) want[i] += values[r][first + i];
  const double *sums = values_of(h, got);
  for (int64_t i = 0; i < count && ranks == 2 && !before; i++) {
    float sum = (float)want[i], rounded = got.dtype == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32(sum)) : sum;
    if (sums[i] != (double)rounded)
      fail_msg("%s: element %lld is %.9g and not %.9g", what, (long long)i, sums[i], (double)rounded);
  }
  for (int64_t i = 0; i < count && before; i++) want[i] += before[i];
  check_values(h, what, got, want, within_stored(h, 4, ranks + 1));
}

static void check_all_reduce(Harness *h, const Case *c, Slabs s, const char *where) {
  Backend *b = h->backend;
  double *values[b->ranks];
  int64_t count = c->count * b->ranks + c->more;
  Tensor x = tensor_rows(s.x, c->first, count), out = tensor_rows(s.out, c->first, count);
  const char *what = described(b, "all_reduce", c, where);
  draw(h, x, values);
  poison(h, out);
  all_reduce(b, (Collective){.out = out, .x = x});
  check_sum(h, what, out, values, 0, NULL);
  Tensor end = tensor_rows(out, max_i64(count - MOST_COMPARED, 0), min_i64(count, MOST_COMPARED)),
         all = poisoned(h, h->dtype, b->ranks, tensor_count(end));
  all_gather(b, (Collective){.out = all, .x = end});
  for (int r = 0; r < b->ranks; r++) check_bitwise_equal(h, what, tensor_flat(tensor_rows(all, r, 1)), end);
  all_reduce(b, (Collective){.out = x, .x = x, .async = true});
  collectives_join(b, 0);
  check_bitwise_equal(h, what, x, out);
}

static void check_reduce_scatter(Harness *h, const Case *c, Slabs s, const char *where) {
  Backend *b = h->backend;
  double *values[b->ranks];
  if (!c->count) return;
  Tensor x = tensor_rows(s.x, c->first, c->count * b->ranks), out = tensor_rows(s.out, c->first, c->count),
         slice = tensor_rows(x, b->rank * c->count, c->count);
  const char *what = described(b, "reduce_scatter", c, where);
  draw(h, x, values);
  poison(h, out);
  reduce_scatter(b, (Collective){.out = out, .x = x});
  check_sum(h, what, out, values, b->rank * c->count, NULL);
  const double *before = copied_values(h, values_of(h, out), c->count);
  reduce_scatter(b, (Collective){.out = out, .x = x, .accumulate = true});
  check_sum(h, what, out, values, b->rank * c->count, before);
  draw(h, x, values);
  reduce_scatter(b, (Collective){.out = slice, .x = x, .async = true});
  collectives_join(b, 0);
  check_sum(h, what, slice, values, b->rank * c->count, NULL);
}

static void check_all_gather(Harness *h, const Case *c, Slabs s, const char *where) {
  Backend *b = h->backend;
  double *values[b->ranks];
  if (!c->count) return;
  Tensor out = tensor_rows(s.out, c->first, c->count * b->ranks), x = tensor_rows(s.x, c->first, c->count),
         slice = tensor_rows(out, b->rank * c->count, c->count);
  for (int in_place = 0; in_place < 2; in_place++) {
    poison(h, out);
    draw(h, in_place ? slice : x, values);
    all_gather(b, (Collective){.out = out, .x = in_place ? slice : x, .async = true});
    collectives_join(b, 0);
    const double *got = values_of(h, out);
    for (int64_t i = 0; i < c->count * b->ranks; i++)
      if (got[i] != values[i / c->count][i % c->count])
        fail_msg("%s: element %lld is %g", described(b, "all_gather", c, where), (long long)i, got[i]);
  }
}

static void check_case(Harness *h, const Case *c, Slabs s, const char *where) {
  MemoryMark mark = memory_mark(&h->backend->memory);
  check_all_reduce(h, c, s, where);
  check_reduce_scatter(h, c, s, where);
  check_all_gather(h, c, s, where);
  memory_pop_to(&h->backend->memory, mark);
}

static void *bytes_of(Harness *h, Tensor t) {
  void *bytes = host_alloc((int64_t)tensor_bytes(t), 1, "a test");
  backend_to_host(h->backend, bytes, t);
  return bytes;
}

static void require_bytes(Harness *h, Tensor t, const void *want, int turn) {
  void *got = bytes_of(h, t);
  if (memcmp(got, want, tensor_bytes(t)) != 0)
    fail_msg("rank %d of %d: sum %d of the same tensors has other bits", h->backend->rank, h->backend->ranks,
             turn);
  free(got);
}

// Several at a time, again and again.
static void check_repeats(Harness *h, const Case *c, Slabs s) {
  Backend *b = h->backend;
  double *values[b->ranks];
  int64_t count = c->count * b->ranks + c->more;
  Tensor x = tensor_rows(s.x, c->first, count), out[IN_FLIGHT];
  void *want = NULL;
  draw(h, x, values);
  for (int i = 0; i < IN_FLIGHT; i++) out[i] = tensor_rows(s.out, c->first + i * (count + 1), count);
  for (int n = 0; n < REPETITIONS; n++) {
    for (int i = 0; i < IN_FLIGHT; i++) {
      poison(h, out[i]);
      all_reduce(b, (Collective){.out = out[i], .x = x, .async = true});
    }
    collectives_join(b, 0);
    if (!want) want = bytes_of(h, out[0]);
    for (int i = 0; i < IN_FLIGHT; i++) require_bytes(h, out[i], want, IN_FLIGHT * n + i);
  }
  free(want);
  check_sum(h, "a repeated sum", out[0], values, 0, NULL);
}

// Reports whether sums have the bits of an addition in the order of the ranks, which copied sums promise.
static void report_order(Harness *h, Slabs s) {
  Backend *b = h->backend;
  double *values[b->ranks];
  Tensor x = tensor_rows(s.x, 0, 4096);
  draw(h, x, values);
  all_reduce(b, (Collective){.out = x, .x = x});
  const double *got = values_of(h, x);
  int64_t others = 0;
  for (int64_t i = 0; i < 4096; i++) {
    float sum = (float)values[0][i];
    for (int r = 1; r < b->ranks; r++) sum += (float)values[r][i];
    others += got[i] != (double)(x.dtype == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32(sum)) : sum);
  }
  printf("%s, %d ranks: %lld of 4096 sums differ from those in the order of the ranks\n", b->description,
         b->ranks, (long long)others);
}

static void check_cases(Harness *h, const Case *c, size_t count, Slabs s) {
  for (; count; c++, count--) {
    check_case(h, c, s, "reserved");
    MemoryMark mark = memory_mark(&h->backend->memory);
    check_case(h, c, slabs_on_stack(h, 1 << 22), "on the stack");
    memory_pop_to(&h->backend->memory, mark);
  }
}

static void rank_cases(Harness *h) {
  Backend *b = h->backend;
  const int64_t most = (BUCKET_BYTES + (1 << 20)) / (int64_t)dtype_bytes(h->dtype);
  const Case large = {"more than the scratch", most / b->ranks, 5, 3},
             again = {"again", small_shapes() ? 1001 : 65549, 1, 3};
  Slabs s = {memory_reserve_1d(&b->memory, "gradients", MEMORY_GRADIENTS, h->dtype, most + 64),
             memory_reserve_1d(&b->memory, "weights", MEMORY_WEIGHTS, h->dtype, most + 64)};
  report_order(h, s);
  check_cases(h, cases, sizeof cases / sizeof *cases, s);
  if (b->device == ON_CUDA && !small_shapes()) check_cases(h, on_gpus, sizeof on_gpus / sizeof *on_gpus, s);
  check_repeats(h, b->device == ON_CUDA ? &again : &cases[4], s);
  if (b->device == ON_CUDA) check_all_reduce(h, &large, s, "reserved");
}

TEST(collectives_over_ranks) {
  check_on_ranks();
}

int main(int argc, char **argv) {
  return ran_as_rank(argc, argv, rank_cases) ? 0 : tests_run("collectives", NULL, NULL);
}
