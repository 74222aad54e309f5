// The foundations: named memory and its ledger, tensors as views, bf16, random numbers, text, failing.
#include "kernels/base/random.h"
#include "kernels/base/system.h"
#include "kernels/base/text.h"
#include "kernels/kernels.h"
#include "tests/harness.h"

#include <unistd.h>

// The call fails with exactly this sentence.
#define ASSERT_SAYS(call, expected)                                                                          \
  do {                                                                                                       \
    CATCH(call);                                                                                             \
    assert_string_equal(caught_sentence, expected);                                                          \
  } while (0)

typedef struct {
  size_t limit, given, poisoned, blocks;
} Counter;

static void *counted_allocate(void *context, size_t bytes) {
  Counter *c = context;
  if (c->given + bytes > c->limit) return NULL;
  c->given += bytes;
  c->blocks++;
  void *data = aligned_alloc(MEMORY_ALIGNMENT, memory_padded(bytes + 1));
  assert_non_null(data);
  return memset(data, 0, bytes);
}

static void counted_release(void *context, void *data, size_t bytes) {
  Counter *c = context;
  assert_true(c->given >= bytes && c->blocks > 0);
  c->given -= bytes;
  c->blocks--;
  free(data);
}

static void counted_poison(void *context, void *data, size_t bytes) {
  Counter *c = context;
  c->poisoned += bytes;
  memset(data, 0xFF, bytes);
}

static Memory counted_memory(Counter *counter) {
  MemorySource source = {
      .allocate = counted_allocate, .release = counted_release, .poison = counted_poison, .context = counter};
  return memory_create(&source);
}

// The bytes by category that are not 0, as text.
static const char *said(const size_t *bytes) {
  static char texts[4][512];
  static int turn;
  char *text = texts[turn++ % 4];
  text[0] = 0;
  for (int i = 0; i < MEMORY_CATEGORY_COUNT; i++)
    if (bytes[i])
      sprintf(text + strlen(text), "%s%s %zu", text[0] ? ", " : "", memory_category_name((MemoryCategory)i),
              bytes[i]);
  return text;
}

// In use and at most; of that on the stack; by category, at the peak, and each one's most.
static void check_ledger(const Memory *m, const char *want) {
  const Ledger *l = &m->ledger;
  char got[2048];
  snprintf(got, sizeof got, "%zu of %zu, stack %zu of %zu | %s | %s | %s", l->total, l->peak, l->stack,
           l->stack_peak, said(l->now), said(l->at_peak), said(l->highest));
  assert_string_equal(got, want);
}

static void check_events(const Memory *m, const char *want) {
  char got[1024] = "";
  for (int64_t i = 0; i < m->ledger.event_count; i++) {
    const LedgerEvent *e = &m->ledger.events[i];
    sprintf(got + strlen(got), "%s %d: %s\n", e->name, e->step, said(e->bytes));
  }
  assert_string_equal(got, want);
}

// The stack returns the same bytes, last in, first out. A plan counts and lays out as the real memory does.
static void check_memory(Memory *m) {
  memory_set_stack(m, 4096);
  char *weights = memory_reserve(m, "weights", MEMORY_WEIGHTS, 1000);
  assert_int_equal((uintptr_t)weights % MEMORY_ALIGNMENT, 0);
  for (int i = 0; i < 1000 && !m->planning; i++) assert_int_equal(weights[i], 0);
  Tensor kept = memory_push_1d(m, "kept", MEMORY_ACTIVATIONS, DTYPE_F32, 64);
  assert_true(tensor_exists(kept) && (m->planning || kept.data == m->stack_base));
  MemoryMark mark = memory_mark(m);
  m->ledger.recording = true;
  m->ledger.step = 7;
  Tensor more = memory_push_2d(m, "more", MEMORY_ACTIVATIONS, DTYPE_BF16, 7, 55); // 770 bytes: 1024
  Tensor empty = memory_push_1d(m, "empty", MEMORY_HEAD, DTYPE_F32, 0);
  Tensor head = memory_push_1d(m, "head", MEMORY_HEAD, DTYPE_F32, 128);
  assert_string_equal(tensor_text(more).text, "bf16 [7, 55]");
  assert_ptr_equal(more.data, (char *)kept.data + 256);
  assert_ptr_equal(empty.data, (char *)more.data + 1024);
  assert_ptr_equal(head.data, empty.data);
  check_ledger(m, "2816 of 2816, stack 1792 of 1792 | weights 1024, activations 1280, lm_head, loss 512 | "
                  "weights 1024, activations 1280, lm_head, loss 512 | "
                  "weights 1024, activations 1280, lm_head, loss 512");
  m->ledger.step = 8;
  memory_pop_to(m, mark);
  memory_reserve(m, "table", MEMORY_TABLES, 1);
  m->ledger.recording = false;
  check_events(m, "more 7: weights 1024, activations 1280\n"
                  "empty 7: weights 1024, activations 1280\n"
                  "head 7: weights 1024, activations 1280, lm_head, loss 512\n"
                  "head 8: weights 1024, activations 1280\n"
                  "empty 8: weights 1024, activations 1280\n"
                  "more 8: weights 1024, activations 256\n"
                  "table 8: weights 1024, tables and batch 256, activations 256\n");
  // The head's own peak comes later than the peak of all.
  Tensor larger = memory_push_1d(m, "larger head", MEMORY_HEAD, DTYPE_F32, 256);
  assert_ptr_equal(larger.data, more.data);
  check_ledger(m, "2560 of 2816, stack 1280 of 1792 | "
                  "weights 1024, tables and batch 256, activations 256, lm_head, loss 1024 | "
                  "weights 1024, activations 1280, lm_head, loss 512 | "
                  "weights 1024, tables and batch 256, activations 1280, lm_head, loss 1024");
  memory_pop_to(m, mark);
  ledger_reset_peak(&m->ledger);
#define LEFT "weights 1024, tables and batch 256, activations 256"
  check_ledger(m, "1536 of 1536, stack 256 of 256 | " LEFT " | " LEFT " | " LEFT);
  // As high as before is no new peak: who held it first stays.
  memory_push_1d(m, "head", MEMORY_HEAD, DTYPE_F32, 64);
  memory_pop_to(m, mark);
  memory_push_1d(m, "scratch", MEMORY_WORKSPACE, DTYPE_F32, 64);
  check_ledger(m, "1792 of 1792, stack 512 of 512 | " LEFT ", workspace 256 | " LEFT
                  ", lm_head, loss 256 | " LEFT ", lm_head, loss 256, workspace 256");
  ASSERT_SAYS(memory_set_stack(m, 8192), "internal: the memory stack is remade while kept lies on it");
  memory_pop_to(m, 0);
  assert_int_equal(m->ledger.total, 1280);
  m->ledger.recording = true;
  for (int i = 0; i < 1000; i++) { // more events than the first array holds
    memory_push_1d(m, "x", MEMORY_HEAD, DTYPE_F32, 1);
    memory_pop_to(m, 0);
  }
  assert_int_equal(m->ledger.event_count, 7 + 2000);
}

TEST(test_ledger) {
  Counter counter = {.limit = 1 << 20};
  Memory plan = memory_create(NULL), m = counted_memory(&counter);
  check_memory(&plan);
  memory_push_2d(&plan, "logits", MEMORY_HEAD, DTYPE_F32, 10000000, 128256); // terabytes cost nothing
  assert_int_equal(plan.ledger.now[MEMORY_HEAD] >> 40, 4);
  memory_destroy(&plan);
  check_memory(&m);
  assert_int_equal(counter.given, 1280 + 4096);
  memory_set_stack(&m, 2048); // the old one goes back
  assert_int_equal(counter.given, 1280 + 2048);
  memory_set_stack(&m, 0);
  assert_int_equal(counter.blocks, 2);
  memory_destroy(&m);
  assert_int_equal(counter.given + counter.blocks, 0);
}

#define ASSERT_FULL(call, text) ASSERT_SAYS((call, 0), "out of memory: " text "; take less")

// A limit below what the source has counts reservations and the stack, however much of that is pushed.
static void check_full(size_t source, size_t limit) {
  Counter counter = {.limit = source};
  Memory m = counted_memory(&counter);
  m.limit = limit;
  ASSERT_FULL(memory_reserve(&m, "weights", MEMORY_WEIGHTS, 10000),
              "weights needs 10.0 KiB more, and 0 B are in use (nothing yet)");
  memory_reserve(&m, "weights", MEMORY_WEIGHTS, 1024);
  ASSERT_FULL(memory_set_stack(&m, 3073),
              "the step's stack needs 3.0 KiB more, and 1.0 KiB are in use (weights 1.0 KiB)");
  memory_set_stack(&m, 2048);
  memory_push_1d(&m, "residual", MEMORY_ACTIVATIONS, DTYPE_F32, 128);
  ASSERT_FULL(memory_reserve(&m, "gradients", MEMORY_GRADIENTS, 1025),
              "gradients needs 1.2 KiB more, and 1.5 KiB are in use (weights 1.0 KiB, activations 512 B)");
  memory_reserve(&m, "gradients", MEMORY_GRADIENTS, 1024);
  assert_int_equal(counter.given, 4096);
  memory_push_1d(&m, "rest", MEMORY_HEAD, DTYPE_F32, 384); // to the last byte
  ASSERT_FULL(memory_push_1d(&m, "one more", MEMORY_HEAD, DTYPE_F32, 1),
              "one more needs 256 B more, and 4.0 KiB are in use (weights 1.0 KiB, gradients 1.0 KiB, "
              "activations 512 B, lm_head, loss 1.5 KiB)");
  memory_pop_to(&m, 0);
  ASSERT_FULL(memory_set_stack(&m, 8192), "the step's stack needs 8.0 KiB more, and 2.0 KiB are in use "
                                          "(weights 1.0 KiB, gradients 1.0 KiB)");
  memory_push_1d(&m, "residual", MEMORY_ACTIVATIONS, DTYPE_F32, 512); // the stack of before still holds it
  memory_destroy(&m);
  assert_int_equal(counter.blocks, 0);
}

TEST(test_out_of_memory) {
  memory_set_advice("take less");
  check_full(4096, 0);
  check_full(1 << 20, 4096);
  // Sizes whose product no 64 bits hold must not wrap around to small ones, nor must their sum.
  Memory plan = memory_create(NULL);
#define HUGE "huge needs 4194304.00 TiB more, and 0 B are in use (nothing yet)"
  ASSERT_FULL(memory_push_2d(&plan, "huge", MEMORY_HEAD, DTYPE_F32, INT64_MAX / 2, 8), HUGE);
  ASSERT_FULL(memory_push_2d(&plan, "huge", MEMORY_HEAD, DTYPE_F32, 1LL << 32, 1LL << 32), HUGE);
  ASSERT_FULL(memory_push_1d(&plan, "huge", MEMORY_HEAD, DTYPE_F32, INT64_MAX / 2), HUGE);
  memory_push_1d(&plan, "half", MEMORY_HEAD, DTYPE_F32, 1LL << 59);
  ASSERT_FULL(memory_push_1d(&plan, "half", MEMORY_HEAD, DTYPE_F32, 1LL << 59),
              "half needs 2097152.00 TiB more, and 2097152.00 TiB are in use (lm_head, loss 2097152.00 TiB)");
  memory_destroy(&plan);
}

// Whole pages, which all go back; large blocks begin on a boundary of huge pages.
TEST(test_pages) {
  static const int64_t sizes[] = {1, 5000, 2 << 20, (5 << 20) + 1};
  for (int i = 0; i < 4; i++) {
    size_t before = system_bytes("/proc/self/status", "VmSize");
    char *data = memory_pages.allocate(NULL, (size_t)sizes[i]);
    data[0] = data[sizes[i] - 1] = 1;
    assert_true(sizes[i] < 2 << 20 || (uintptr_t)data % (2 << 20) == 0);
    size_t held = system_bytes("/proc/self/status", "VmSize") - before;
    assert_int_equal(held, round_up(sizes[i], sysconf(_SC_PAGESIZE)));
    memory_pages.release(NULL, data, (size_t)sizes[i]);
    assert_int_equal(system_bytes("/proc/self/status", "VmSize"), before);
  }
}

TEST(test_poison) {
  Counter counter = {.limit = 4096};
  Memory m = counted_memory(&counter);
  memory_set_stack(&m, 1024);
  assert_true(*(float *)memory_push_1d(&m, "plain", MEMORY_HEAD, DTYPE_F32, 64).data == 0);
  m.poison = true;
  Tensor t = memory_push_1d(&m, "poisoned", MEMORY_HEAD, DTYPE_F32, 65);
  for (int i = 0; i < 128; i++) assert_true(isnan(((float *)t.data)[i])); // the padding too
  assert_int_equal(counter.poisoned, 512);
  assert_true(isnan(bf16_to_f32(*(uint16_t *)t.data)));
  memory_destroy(&m);
}

// A plan has no operations, and the memory of what it plans for.
TEST(test_plan_backend) {
  static const DeviceKind devices[] = {ON_CPU, ON_CUDA};
  for (int i = 0; i < 2; i++) {
    Backend *plan = plan_backend_create(devices[i], DTYPE_BF16);
    const BackendScratch *scratch = i ? &cuda_scratch : &cpu_scratch;
    assert_int_equal(plan->device, devices[i]);
    assert_ptr_equal(plan->scratch, scratch);
    assert_true(plan->memory.planning);
    assert_int_equal(plan->ranks, 1);
    assert_int_equal(plan->memory.ledger.total, memory_padded(scratch->resident_bytes));
    Tensor t = memory_push_1d(&plan->memory, "t", MEMORY_HEAD, DTYPE_F32, 1 << 30);
    fill_zero(plan, t); // nothing happens
    backend_to_device(plan, t, NULL);
    backend_synchronize(plan);
    for (int ranks = 1; ranks < 3; ranks++) { // GPUs receive shares of gradients
      size_t before = plan->memory.ledger.total, more = ranks > 1 && i ? BUCKET_BYTES : 0;
      plan_join_ranks(plan, ranks);
      assert_int_equal(plan->ranks, ranks);
      assert_int_equal(plan->memory.ledger.total, before + more);
      assert_int_equal(plan->memory.ledger.now[MEMORY_GRADIENTS], more);
    }
    backend_destroy(plan);
  }
}

TEST(test_category_names) {
  for (int a = 0; a < MEMORY_CATEGORY_COUNT; a++)
    for (int b = 0; b < a; b++)
      assert_string_not_equal(memory_category_name((MemoryCategory)a),
                              memory_category_name((MemoryCategory)b));
  assert_string_equal(memory_category_name(MEMORY_HEAD), "lm_head, loss");
}

TEST(test_tensors) {
  float elements[60];
  Tensor t = tensor_2d(elements, DTYPE_F32, 6, 10);
  assert_int_equal(tensor_count(t), 60);
  assert_int_equal(tensor_bytes(t), 240);
  assert_true(tensor_is_dense(t));
  Tensor rows = tensor_rows(t, 2, 3);
  assert_ptr_equal(rows.data, elements + 20);
  assert_string_equal(tensor_text(rows).text, "fp32 [3, 10]");
  Tensor columns = tensor_columns(rows, 4, 5);
  assert_ptr_equal(columns.data, elements + 24);
  assert_int_equal(columns.stride, 10);
  assert_false(tensor_is_dense(columns));
  assert_true(tensor_is_dense((Tensor){0}));
  assert_int_equal(tensor_bytes(columns), 60); // 15 elements, without the gaps
  assert_ptr_equal(tensor_rows(columns, 1, 1).data, elements + 34);
  assert_ptr_equal(tensor_rows(tensor_flat(t), 17, 2).data, elements + 17);
  assert_true(tensor_same_shape(tensor_reshape_2d(t, 15, 4), tensor_2d(elements, DTYPE_BF16, 15, 4)));
  assert_false(tensor_same_shape(t, tensor_flat(t)));
  assert_int_equal(tensor_count(tensor_rows(t, 6, 0)), 0);
  assert_int_equal(tensor_count((Tensor){0}), 0);
  assert_false(tensor_exists(tensor_rows(tensor_2d(NULL, DTYPE_F32, 6, 10), 3, 1))); // absent stays absent
  assert_string_equal(tensor_text((Tensor){0}).text, "absent");
  assert_string_equal(tensor_text(tensor_2d(elements, DTYPE_I32, 1, 2)).text, "int32 [1, 2]");
  const int64_t huge = INT64_MAX; // the longest text
  Tensor largest = {.data = elements, .dtype = DTYPE_I32, .rank = 2, .shape = {huge, huge}};
  assert_int_equal(strlen(tensor_text(largest).text), strlen("int32 []") + 2 * 19 + 2);
  ASSERT_SAYS(tensor_rows(t, 5, 2).data, "rows 5 to 7 lie outside of fp32 [6, 10]");
  ASSERT_SAYS(tensor_rows(t, -1, 2).data, "rows -1 to 1 lie outside of fp32 [6, 10]");
  ASSERT_SAYS(tensor_columns(t, 8, 3).data, "columns 8 to 11 lie outside of fp32 [6, 10]");
  ASSERT_SAYS(tensor_flat(columns).data,
              "fp32 [3, 5] has gaps between its rows and cannot be read as one row");
  ASSERT_SAYS(tensor_reshape_2d(t, 7, 9).data, "fp32 [6, 10] cannot be read as [7, 9]");
  ASSERT_SAYS(tensor_reshape_2d(columns, 5, 3).data, "fp32 [3, 5] cannot be read as [5, 3]");
}

// The upper half of an fp32, rounded to nearest even; NaN stays NaN, also where only low bits say so.
TEST(test_bf16) {
  static const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  for (uint32_t upper = 0; upper < 65536; upper++)
    for (int i = 0; i < 6; i++) {
      uint32_t bits = upper << 16 | lower[i];
      float value, back;
      memcpy(&value, &bits, sizeof value);
      uint16_t got = bf16_from_f32(value);
      back = bf16_to_f32(got);
      if (isnan(value))
        assert_true(isnan(back));
      else
        assert_int_equal(got, upper + (lower[i] + upper % 2 > 0x8000));
      if (lower[i] == 0 && !isnan(value)) assert_memory_equal(&back, &value, sizeof value);
    }
  static const size_t bytes[DTYPE_COUNT] = {4, 2, 4, 8, 1};
  for (int d = 0; d < DTYPE_COUNT; d++) assert_int_equal(dtype_bytes((Dtype)d), bytes[d]);
}

TEST(test_random) {
  enum { COUNT = 100000 };
  assert_true(random_bits(1, 2, 3) == random_bits(1, 2, 3));
  double sums[5] = {0};
  for (uint64_t i = 0; i < COUNT; i++) {
    double u = random_uniform(9, 4, i), centred = u - 0.5, normal = random_normal(9, 5, i);
    assert_true(u >= 0 && u < 1 && isfinite(normal));
    // A neighbour in any of the three is another number.
    assert_true(random_bits(9, 4, i) != random_bits(9, 4, i + 1));
    assert_true(random_bits(9, 4, i) != random_bits(9, 5, i));
    assert_true(random_bits(9, 4, i) != random_bits(10, 4, i));
    const double terms[] = {u, centred * centred, normal, normal * normal,
                            centred * (random_uniform(9, 4, i + 1) - 0.5)};
    for (int k = 0; k < 5; k++) sums[k] += terms[k] / COUNT;
  }
  static const double means[] = {0.5, 1.0 / 12, 0, 1, 0},
                      variances[] = {1.0 / 12, 1.0 / 180, 1, 2, 1.0 / 144};
  for (int k = 0; k < 5; k++)
    assert_true(fabs(sums[k] - means[k]) < 5 * sqrt(variances[k] / COUNT)); // 5 standard errors
}

TEST(test_permutation) {
  static const uint64_t counts[] = {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4096, 4097};
  for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
    for (uint64_t seed = 0; seed < 3; seed++) {
      uint64_t count = counts[k], stays = 0, same_seed = 0, same_stream = 0;
      bool seen[4097] = {false};
      for (uint64_t i = 0; i < count; i++) {
        uint64_t to = random_permute(seed, 5, i, count);
        assert_true(to < count && !seen[to]);
        seen[to] = true;
        stays += to == i;
        same_seed += to == random_permute(seed + 1, 5, i, count);
        same_stream += to == random_permute(seed, 6, i, count);
      }
      if (count >= 100)
        assert_true(stays < 10 && same_seed < 10 && same_stream < 10); // one of each is expected
    }
  // An index's images are spread evenly over 16 stretches.
  uint64_t stretches[16] = {0}, large = (uint64_t)1 << 40;
  for (uint64_t seed = 0; seed < 3200; seed++) stretches[random_permute(seed, 1, 0, 1600) / 100]++;
  for (int i = 0; i < 16; i++) assert_in_range(stretches[i], 130, 270); // 200, 5 standard errors of 13.7
  // Beyond 32 bits.
  int high = 0;
  for (uint64_t i = 0; i < 100; i++) {
    assert_true(random_permute(1, 1, large - 1 - i, large) < large);
    high += random_permute(1, 1, i, large) >= large / 2;
  }
  assert_in_range(high, 25, 75); // 50, 5 standard errors
}

// The texts, each followed by a bar.
#define TEXTS(want, ...) check_texts(want, (const Text[]){__VA_ARGS__, {""}})
static void check_texts(const char *want, const Text *texts) {
  char all[512] = "";
  for (const Text *t = texts; t->text[0]; t++) strcat(strcat(all, t == texts ? "" : "|"), t->text);
  assert_string_equal(all, want);
}

TEST(test_text) {
  TEXTS("0 B|1023 B|1.0 KiB|12.3 KiB|1.0 MiB|16.42 GiB|1.50 TiB|16777216.00 TiB", text_bytes(0),
        text_bytes(1023), text_bytes(1024), text_bytes(12595), text_bytes((uint64_t)1 << 20),
        text_bytes((uint64_t)16815 << 20), text_bytes((uint64_t)3 << 39), text_bytes(UINT64_MAX));
  TEXTS("0.1|0.30000000000000004|5.629493534564972|-500000|9007199254740992|nan", text_number(0.1),
        text_number(0.1 + 0.2), text_number(5.629493534564972), text_number(-500000), text_number(0x1p53),
        text_number(NAN));
  TEXTS("0|950|1.00K|12.4K|124M|8.03B", text_count(0), text_count(950), text_count(1000), text_count(12400),
        text_count(124439808), text_count(8030261248.0));
  TEXTS("0s|0s|45s|1m 00s|3m 05s|2h 14m|3d 04h", text_duration(0), text_duration(-5), text_duration(45.4),
        text_duration(59.6), text_duration(185), text_duration(2 * 3600 + 14 * 60 + 3),
        text_duration(3 * 86400 + 4 * 3600));
  TEXTS("0|999|1,000|128,256|-128,256|-999|-9,223,372,036,854,775,808", text_grouped(0), text_grouped(999),
        text_grouped(1000), text_grouped(128256), text_grouped(-128256), text_grouped(-999),
        text_grouped(INT64_MIN));
}

static int destroyed;

static void count_destroyed(Backend *backend) {
  assert_int_equal(*(int64_t *)backend->state, 0);
  destroyed++;
}

// A backend whose creation fails half-way is destroyed with its memory; a finished one stays.
TEST(test_abandoned_backend) {
  static const BackendOps ops = {.destroy = count_destroyed};
  backend_abandon(); // nothing has begun
  Backend *finished = backend_finish(backend_begin(&ops, &cpu_scratch, ON_CPU, DTYPE_F32, sizeof(int64_t)));
  backend_abandon();
  assert_int_equal(destroyed, 0);
  backend_begin(&ops, &cpu_scratch, ON_CPU, DTYPE_F32, sizeof(int64_t));
  backend_abandon();
  backend_abandon();
  assert_int_equal(destroyed, 1);
  backend_destroy(finished);
  assert_int_equal(destroyed, 2);
}

TEST_MAIN(tests_run("memory", NULL, NULL))
