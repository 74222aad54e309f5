// How fast is the last layer, and what does it hold? Times, in turn within one run, the three bare products
// that no implementation can do without (logits = X W^T, dX = L W, dW = L^T X over all tokens at once), the
// fused layer and the materialized one, and prints medians, the ratios to the products, and the bytes that
// the ledger saw held. Only ratios from one run mean anything: the machine is shared, and a GPU heats up.
//
//   tools/bench_lce --tokens 1024 --hidden-size 256 --vocab 128256
#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/random.h"
#include "base/text.h"
#include "kernels/linear_cross_entropy.h"
#include "trainer/speed.h"

typedef struct {
  int64_t tokens, hidden_size, vocab_size, chunk, repeat;
  const char *device;
  bool materialized;
} Options;

enum { KEY_TOKENS = 256, KEY_HIDDEN, KEY_VOCAB, KEY_CHUNK, KEY_DEVICE, KEY_REPEAT, KEY_MATERIALIZED };

static const struct argp_option option_table[] = {
    {"tokens", KEY_TOKENS, "N", 0, "Tokens (default 1024)", 0},
    {"hidden-size", KEY_HIDDEN, "H", 0, "Hidden size (default 256)", 0},
    {"vocab", KEY_VOCAB, "V", 0, "Vocabulary (default 128256)", 0},
    {"chunk", KEY_CHUNK, "C", 0,
     "Tokens per chunk (default: the most that holds an eighth of what the materialized mode holds)", 0},
    {"device", KEY_DEVICE, "cpu|cuda", 0, "Where to run (default cpu)", 0},
    {"repeat", KEY_REPEAT, "R", 0, "Rounds, of which the median counts (default 7)", 0},
    {"materialized", KEY_MATERIALIZED, NULL, 0, "Time the materialized mode, too", 0},
    {0}};

static int64_t positive(const char *name, const char *text) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (errno || end == text || *end || value < 1 || value > INT32_MAX)
    fail("--%s %s: give a whole number from 1 to %d", name, text, INT32_MAX);
  return value;
}

static error_t parse_option(int key, char *argument, struct argp_state *state) {
  Options *o = state->input;
  switch (key) {
  case KEY_TOKENS:
    o->tokens = positive("tokens", argument);
    return 0;
  case KEY_HIDDEN:
    o->hidden_size = positive("hidden-size", argument);
    return 0;
  case KEY_VOCAB:
    o->vocab_size = positive("vocab", argument);
    return 0;
  case KEY_CHUNK:
    o->chunk = positive("chunk", argument);
    return 0;
  case KEY_REPEAT:
    o->repeat = positive("repeat", argument);
    return 0;
  case KEY_MATERIALIZED:
    o->materialized = true;
    return 0;
  case KEY_DEVICE:
    if (strcmp(argument, "cpu") && strcmp(argument, "cuda")) fail("--device %s: give cpu or cuda", argument);
    o->device = argument;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

// Everything that is timed works on these.
typedef struct {
  Backend *backend;
  Options options;
  Tensor x, weight, targets, loss, dx, dweight;
} Bench;

static Tensor reserve(Bench *bench, const char *name, Dtype dtype, int64_t rows, int64_t columns) {
  size_t bytes = (size_t)rows * (size_t)columns * dtype_bytes(dtype);
  void *data = memory_reserve(&bench->backend->memory, name, MEMORY_ACTIVATIONS, bytes);
  return tensor_2d(data, dtype, rows, columns);
}

static void upload_normal(Bench *bench, Tensor t, uint64_t stream, double scale) {
  size_t count = (size_t)tensor_count(t);
  void *host = malloc(count * dtype_bytes(t.dtype));
  if (!host) fail("out of host memory for %s", tensor_text(t).text);
  for (size_t i = 0; i < count; i++) {
    float value = (float)(scale * random_normal(1, stream, i));
    if (t.dtype == DTYPE_BF16)
      ((uint16_t *)host)[i] = bf16_from_f32(value);
    else
      ((float *)host)[i] = value;
  }
  backend_to_device(bench->backend, t, host);
  backend_synchronize(bench->backend);
  free(host);
}

static Bench prepare(Backend *backend, Options options) {
  Bench bench = {.backend = backend, .options = options};
  int64_t tokens = options.tokens, hidden = options.hidden_size, vocab = options.vocab_size;
  bench.x = reserve(&bench, "x", backend->dtype, tokens, hidden);
  bench.weight = reserve(&bench, "weight", backend->dtype, vocab, hidden);
  bench.dx = reserve(&bench, "dx", backend->dtype, tokens, hidden);
  bench.dweight = reserve(&bench, "dweight", DTYPE_F32, vocab, hidden);
  bench.loss = tensor_flat(reserve(&bench, "loss", DTYPE_F32, 1, tokens));
  bench.targets = tensor_flat(reserve(&bench, "targets", DTYPE_I32, 1, tokens));
  upload_normal(&bench, bench.x, 0, 1.0);
  upload_normal(&bench, bench.weight, 1, 0.02);
  int32_t *targets = malloc((size_t)tokens * sizeof *targets);
  if (!targets) fail("out of host memory for the targets");
  for (int64_t n = 0; n < tokens; n++)
    targets[n] = (int32_t)(random_bits(1, 2, (uint64_t)n) % (uint64_t)vocab);
  backend_to_device(backend, bench.targets, targets);
  free(targets);
  return bench;
}

// --- what is timed -----------------------------------------------------------------------------------------

static void products(const Bench *b) {
  Backend *backend = b->backend;
  MemoryMark mark = memory_mark(&backend->memory);
  int64_t stride = backend->scratch->logits_stride(b->options.vocab_size, backend->dtype);
  Tensor padded =
      memory_push_2d(&backend->memory, "logits", MEMORY_HEAD, backend->dtype, b->options.tokens, stride);
  Tensor logits = tensor_columns(padded, 0, b->options.vocab_size);
  linear_forward(backend, (LinearForward){.out = logits, .x = b->x, .weight = b->weight});
  linear_backward_input(backend, (LinearBackwardInput){.dx = b->dx, .dout = logits, .weight = b->weight});
  linear_backward_weight(backend, (LinearBackwardWeight){.dweight = b->dweight, .dout = logits, .x = b->x});
  memory_pop_to(&backend->memory, mark);
}

static LinearCrossEntropy layer(const Bench *b, LceMode mode) {
  return (LinearCrossEntropy){.mode = mode,
                              .chunk = b->options.chunk,
                              .loss = b->loss,
                              .dx = b->dx,
                              .dweight = b->dweight,
                              .x = b->x,
                              .weight = b->weight,
                              .targets = b->targets,
                              .scale = 1.0f / (float)b->options.tokens};
}

static void fused(const Bench *b) {
  linear_cross_entropy(b->backend, layer(b, LCE_FUSED));
}

static void materialized(const Bench *b) {
  linear_cross_entropy(b->backend, layer(b, LCE_MATERIALIZED));
}

static double seconds(const Bench *b, void (*work)(const Bench *)) {
  backend_synchronize(b->backend);
  double start = now_seconds();
  work(b);
  backend_synchronize(b->backend);
  return now_seconds() - start;
}

static void report(const char *name, double *times, double *ratios, int64_t rounds, size_t bytes) {
  printf("  %-22s %9.2f ms %7.3f", name, 1e3 * median(times, rounds), median(ratios, rounds));
  if (bytes) printf("   %s", text_bytes(bytes).text);
  putchar('\n');
}

static void run(const Bench *b, size_t fused_bytes, size_t materialized_bytes) {
  int64_t rounds = b->options.repeat;
  double *values = malloc((size_t)(6 * rounds) * sizeof *values);
  if (!values) fail("out of host memory for %lld timings", (long long)rounds);
  double *times[3] = {values, values + rounds, values + 2 * rounds};
  double *ratios[3] = {values + 3 * rounds, values + 4 * rounds, values + 5 * rounds};
  void (*const works[3])(const Bench *) = {products, fused, materialized};
  int kinds = b->options.materialized ? 3 : 2;
  for (int64_t round = -1; round < rounds; round++) // the first one warms up
    for (int k = 0; k < kinds; k++) {
      double time = seconds(b, works[k]);
      if (round < 0) continue;
      times[k][round] = time;
      ratios[k][round] = time / times[0][round];
    }
  printf("  %-22s %12s %7s   held\n", "", "median", "ratio");
  report("three bare products", times[0], ratios[0], rounds, 0);
  report("fused", times[1], ratios[1], rounds, fused_bytes);
  if (kinds == 3) report("materialized", times[2], ratios[2], rounds, materialized_bytes);
  printf("  the fused mode holds 1/%.2f of the materialized mode's %s\n",
         (double)materialized_bytes / (double)fused_bytes, text_bytes(materialized_bytes).text);
  free(values);
}

int main(int argc, char **argv) {
  Options options = {.tokens = 1024, .hidden_size = 256, .vocab_size = 128256, .repeat = 7, .device = "cpu"};
  const struct argp parser = {.options = option_table,
                              .parser = parse_option,
                              .doc = "Times the last layer against the three products it is made of."};
  argp_parse(&parser, argc, argv, 0, NULL, &options);

  const char *reason = NULL;
  bool cuda = strcmp(options.device, "cuda") == 0;
  Backend *backend = cuda ? cuda_backend_create(0, DTYPE_BF16, &reason) : cpu_backend_create(false);
  if (!backend) fail("--device cuda: %s", reason);
  LceShape shape = {.tokens = options.tokens,
                    .hidden_size = options.hidden_size,
                    .vocab_size = options.vocab_size,
                    .dtype = backend->dtype};
  size_t materialized_bytes = lce_bytes(backend, LCE_MATERIALIZED, 1, shape);
  if (!options.chunk) options.chunk = lce_chunk_within(backend, materialized_bytes / 8, shape);
  if (!options.chunk) options.chunk = 1;
  size_t fused_bytes = lce_bytes(backend, LCE_FUSED, options.chunk, shape);

  printf("%s: N %s, H %s, V %s, chunk %s\n", backend->description, text_grouped(options.tokens).text,
         text_grouped(options.hidden_size).text, text_grouped(options.vocab_size).text,
         text_grouped(options.chunk).text);
  Bench bench = prepare(backend, options);
  // The bare products hold all logits whatever the layer holds.
  memory_set_stack(&backend->memory, materialized_bytes + fused_bytes);
  run(&bench, fused_bytes, materialized_bytes);
  backend_destroy(backend);
  return 0;
}
