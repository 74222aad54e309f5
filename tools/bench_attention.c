// How fast attention runs on the GPU:
//
//   tools/bench_attention
//
// TFLOP/s count the causal half: forward 2 B Q T^2 D, backward 2.5 times that, whatever is computed.
// "packed": sequences hold documents of 512 tokens. LCE_HOPPER=0 in the environment times the portable kernels.
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/random.h"
#include "kernels/kernels.h"
#include "trainer/report.h"

typedef struct {
  const char *name;
  AttentionShape shape;
} Case;

static const Case cases[] = {
    {"gpt2-124m   B 64 T 1024  12 heads of 64", {64, 1024, 12, 12, 64}},
    {"gpt2-1558m  B 16 T 1024  25 heads of 64", {16, 1024, 25, 25, 64}},
    {"            B 4  T 4096  32 heads of 64", {4, 4096, 32, 32, 64}},
    {"llama-1b    B 4  T 4096  32/8 of 64", {4, 4096, 32, 8, 64}},
    {"            B 2  T 8192  32 heads of 128", {2, 8192, 32, 32, 128}},
    {"            B 1  T 32768 32 heads of 128", {1, 32768, 32, 32, 128}},
    {"llama-8b    B 1  T 32768 32/8 of 128", {1, 32768, 32, 8, 128}},
};

enum { REPEATS = 7 };

typedef struct {
  Backend *backend;
  AttentionForward forward;
  AttentionBackward backward;
} Bench;

static void run(const Bench *b, bool backward, int times) {
  for (int i = 0; i < times; i++) {
    if (backward)
      attention_backward(b->backend, b->backward);
    else
      attention_forward(b->backend, b->forward);
  }
  backend_synchronize(b->backend);
}

// Seconds of one call: the median over batches of calls that take at least 20 ms each.
static double seconds(const Bench *b, bool backward) {
  run(b, backward, 2);
  double start = now_seconds();
  run(b, backward, 4);
  int times = (int)(0.02 / ((now_seconds() - start) / 4)) + 1;
  double samples[REPEATS];
  for (int i = 0; i < REPEATS; i++) {
    start = now_seconds();
    run(b, backward, times);
    samples[i] = (now_seconds() - start) / times;
  }
  return median(samples, REPEATS);
}

// A normal draw in every place: zeros would run faster than training does.
static Tensor random_tensor(Backend *backend, const char *name, int64_t rows, int64_t columns,
                            uint64_t stream) {
  Tensor t = memory_push_2d(&backend->memory, name, MEMORY_ACTIVATIONS, DTYPE_BF16, rows, columns);
  int64_t count = rows * columns, drawn = 1 << 20;
  uint16_t *values = host_alloc(count, sizeof *values, name);
  for (int64_t i = 0; i < count; i++)
    values[i] = i < drawn ? bf16_from_f32((float)random_normal(1, stream, (uint64_t)i))
                          : values[i - drawn + i / drawn % 7];
  backend_to_device(backend, t, values);
  free(values);
  return t;
}

enum { DOCUMENT = 512 }; // divides every T

static Tensor documents_of(Backend *backend, int64_t rows) {
  Tensor t = memory_push_2d(&backend->memory, "documents", MEMORY_ACTIVATIONS, DTYPE_I32, 2, rows);
  int32_t *values = host_alloc(2 * rows, sizeof *values, "documents");
  for (int64_t n = 0; n < rows; n++) {
    values[n] = (int32_t)(n % DOCUMENT);
    values[rows + n] = DOCUMENT - 1 - values[n];
  }
  backend_to_device(backend, t, values);
  free(values);
  return t;
}

static void bench(Backend *backend, const Case *c) {
  AttentionShape s = c->shape;
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim;
  int64_t qkv_width = width + 2 * s.num_key_value_heads * s.head_dim;
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor qkv = random_tensor(backend, "qkv", rows, qkv_width, 1);
  Tensor dout = random_tensor(backend, "dout", rows, width, 2);
  Tensor out = memory_push_2d(&backend->memory, "out", MEMORY_ACTIVATIONS, DTYPE_BF16, rows, width);
  Tensor dqkv = memory_push_2d(&backend->memory, "dqkv", MEMORY_ACTIVATIONS, DTYPE_BF16, rows, qkv_width);
  Tensor lse = memory_push_2d(&backend->memory, "lse", MEMORY_ACTIVATIONS, DTYPE_F32, s.batch,
                              s.num_heads * s.seq_len);
  Bench b = {.backend = backend,
             .forward = {.out = out, .lse = lse, .qkv = qkv, .shape = s},
             .backward = {.dqkv = dqkv, .dout = dout, .out = out, .lse = lse, .qkv = qkv, .shape = s}};
  double work =
      2e-12 * (double)(s.batch * s.num_heads) * (double)s.seq_len * (double)s.seq_len * (double)s.head_dim;
  for (int packed = 0; packed < 2; packed++) {
    if (packed) b.forward.documents = b.backward.documents = documents_of(backend, rows);
    double forward = seconds(&b, false), backward = seconds(&b, true);
    printf("%-42s %-6s %9.3f ms %5.0f TFLOP/s %9.3f ms %5.0f TFLOP/s\n", packed ? "" : c->name,
           packed ? "packed" : "", 1e3 * forward, work / forward, 1e3 * backward, 2.5 * work / backward);
  }
  memory_pop_to(&backend->memory, mark);
}

int main(void) {
  const char *reason = NULL;
  Backend *backend = cuda_backend_create(0, DTYPE_BF16, &reason);
  if (!backend) {
    printf("bench_attention needs a GPU: %s\n", reason);
    return 0;
  }
  printf("%s\n%-49s %21s %28s\n", backend->description, "", "forward", "backward");
  memory_set_stack(&backend->memory, (size_t)4 << 30);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) bench(backend, &cases[i]);
  backend_destroy(backend);
  return 0;
}
