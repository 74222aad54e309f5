#include "tools/curves/layer.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/random.h"

// --- random data -------------------------------------------------------------------------------------------

enum { STREAM_X = 100, STREAM_WEIGHT, STREAM_TARGETS };

void layer_random_row(uint64_t seed, bool weight, Dtype dtype, int64_t row, int64_t columns, float *out) {
  uint64_t stream = weight ? STREAM_WEIGHT : STREAM_X, first = (uint64_t)row * (uint64_t)columns;
  double scale = weight ? 0.02 : 1;
  for (int64_t i = 0; i < columns; i++) {
    float value = (float)(scale * random_normal(seed, stream, first + (uint64_t)i));
    out[i] = dtype == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32(value)) : value;
  }
}

int32_t layer_random_target(uint64_t seed, int64_t token, int64_t vocab_size) {
  return (int32_t)(random_bits(seed, STREAM_TARGETS, (uint64_t)token) % (uint64_t)vocab_size);
}

// Uploads the matrix in blocks of rows, so that the host never holds it whole.
static void fill_normal(Backend *backend, Tensor t, uint64_t seed, bool weight) {
  int64_t columns = t.shape[1], block = ((int64_t)16 << 20) / columns + 1;
  float *values = host_alloc(block * columns, sizeof *values, "random values");
  uint16_t *rounded =
      t.dtype == DTYPE_BF16 ? host_alloc(block * columns, sizeof *rounded, "random values") : NULL;
  for (int64_t first = 0; first < t.shape[0]; first += block) {
    int64_t rows = t.shape[0] - first < block ? t.shape[0] - first : block;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      float *row = values + r * columns;
      layer_random_row(seed, weight, t.dtype, first + r, columns, row);
      for (int64_t i = 0; rounded && i < columns; i++) rounded[r * columns + i] = bf16_from_f32(row[i]);
    }
    backend_to_device(backend, tensor_rows(t, first, rows), rounded ? (const void *)rounded : values);
    backend_synchronize(backend);
  }
  free(values);
  free(rounded);
}

// --- where the tensors lie ---------------------------------------------------------------------------------

Backend *layer_backend(const char *device, int ordinal) {
  const char *reason = NULL;
  Backend *backend = strcmp(device, "cuda") == 0 ? cuda_backend_create(ordinal, DTYPE_BF16, &reason)
                                                 : cpu_backend_create(false);
  if (!backend) fail("--device cuda: %s", reason);
  return backend;
}

static Tensor reserve(Backend *backend, const char *name, MemoryCategory category, Dtype dtype, int64_t rows,
                      int64_t columns) {
  size_t bytes = (size_t)rows * (size_t)columns * dtype_bytes(dtype);
  return tensor_2d(memory_reserve(&backend->memory, name, category, bytes), dtype, rows, columns);
}

LceTensors layer_reserve(Backend *backend, LceShape s, uint64_t seed) {
  LceTensors layer = {.backend = backend};
  layer.x = reserve(backend, "x", MEMORY_ACTIVATIONS, s.dtype, s.tokens, s.hidden_size);
  layer.weight = reserve(backend, "weight", MEMORY_WEIGHTS, s.dtype, s.vocab_size, s.hidden_size);
  layer.dx = reserve(backend, "dx", MEMORY_ACTIVATION_GRADIENTS, s.dtype, s.tokens, s.hidden_size);
  layer.dweight = reserve(backend, "dweight", MEMORY_GRADIENTS, DTYPE_F32, s.vocab_size, s.hidden_size);
  layer.loss = tensor_flat(reserve(backend, "losses", MEMORY_TABLES, DTYPE_F32, 1, s.tokens));
  layer.targets = tensor_flat(reserve(backend, "targets", MEMORY_TABLES, DTYPE_I32, 1, s.tokens));
  if (backend->memory.planning) return layer;

  fill_normal(backend, layer.x, seed, false);
  fill_normal(backend, layer.weight, seed, true);
  int32_t *targets = host_alloc(s.tokens, sizeof *targets, "the targets");
  for (int64_t n = 0; n < s.tokens; n++) targets[n] = layer_random_target(seed, n, s.vocab_size);
  backend_to_device(backend, layer.targets, targets);
  backend_synchronize(backend);
  free(targets);
  return layer;
}

LceTensors layer_push(Trainer *trainer, uint64_t seed) {
  Backend *backend = trainer->backend;
  int64_t tokens = trainer->tokens.shape[0], hidden_size = trainer->model.config.hidden_size;
  LceTensors layer = {.backend = backend,
                      .weight = trainer->model.head.value,
                      .dweight = trainer->model.head.grad,
                      .targets = trainer->targets,
                      .loss = trainer->loss};
  layer.x = memory_push_2d(&backend->memory, "x", MEMORY_ACTIVATIONS, backend->dtype, tokens, hidden_size);
  layer.dx = memory_push_2d(&backend->memory, "dx", MEMORY_ACTIVATION_GRADIENTS, backend->dtype, tokens,
                            hidden_size);
  if (!backend->memory.planning) fill_normal(backend, layer.x, seed, false);
  return layer;
}

// --- what is measured --------------------------------------------------------------------------------------

LinearCrossEntropy layer_call(const LceTensors *l, LceMode mode, int64_t chunk) {
  return (LinearCrossEntropy){.mode = mode,
                              .chunk = chunk,
                              .loss = l->loss,
                              .dx = l->dx,
                              .dweight = l->dweight,
                              .x = l->x,
                              .weight = l->weight,
                              .targets = l->targets,
                              .scale = 1.0f / (float)l->x.shape[0]};
}

void layer_run(const LceTensors *l, LceMode mode, int64_t chunk) {
  linear_cross_entropy(l->backend, layer_call(l, mode, chunk));
}

size_t layer_held(Backend *backend, LinearCrossEntropy call) {
  Ledger *ledger = &backend->memory.ledger;
  size_t before = ledger->stack, highest = ledger->stack_peak;
  ledger->stack_peak = before;
  linear_cross_entropy(backend, call);
  size_t held = ledger->stack_peak - before;
  if (ledger->stack_peak < highest) ledger->stack_peak = highest;
  return held;
}

void layer_gemms(const LceTensors *l, int64_t rows) {
  Backend *backend = l->backend;
  int64_t tokens = l->x.shape[0], vocab_size = l->weight.shape[0];
  MemoryMark mark = memory_mark(&backend->memory);
  int64_t stride = backend->scratch->logits_stride(vocab_size, backend->dtype);
  Tensor padded = memory_push_2d(&backend->memory, "logits", MEMORY_HEAD, backend->dtype, rows, stride);
  for (int64_t first = 0; first < tokens; first += rows) {
    int64_t count = tokens - first < rows ? tokens - first : rows;
    Tensor logits = tensor_columns(tensor_rows(padded, 0, count), 0, vocab_size);
    Tensor x = tensor_rows(l->x, first, count);
    linear_forward(backend, (LinearForward){.out = logits, .x = x, .weight = l->weight});
    linear_backward_input(
        backend,
        (LinearBackwardInput){.dx = tensor_rows(l->dx, first, count), .dout = logits, .weight = l->weight});
    linear_backward_weight(
        backend, (LinearBackwardWeight){
                     .dweight = l->dweight, .dout = logits, .x = x, .alpha = 1, .accumulate = first > 0});
  }
  memory_pop_to(&backend->memory, mark);
}

size_t layer_gemms_stack(const Backend *backend, LceShape shape, int64_t rows) {
  Backend *plan = plan_backend_create(backend->device, shape.dtype);
  LceTensors layer = layer_reserve(plan, shape, 0);
  layer_gemms(&layer, rows);
  size_t bytes = plan->memory.ledger.stack_peak;
  backend_destroy(plan);
  return bytes;
}
