#include "tools/curves/layer.h"

#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/integers.h"
#include "base/random.h"
#include "model/parameters.h"

// --- random data -------------------------------------------------------------------------------------------

enum { SEED = 1, STREAM_X = 100, STREAM_WEIGHT, STREAM_TARGETS };

static void random_row(bool weight, Dtype dtype, int64_t row, int64_t columns, float *out) {
  uint64_t stream = weight ? STREAM_WEIGHT : STREAM_X, first = (uint64_t)row * (uint64_t)columns;
  double scale = weight ? 0.02 : 1;
  for (int64_t i = 0; i < columns; i++) {
    float value = (float)(scale * random_normal(SEED, stream, first + (uint64_t)i));
    out[i] = dtype == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32(value)) : value;
  }
}

static int32_t random_target(int64_t token, int64_t vocab_size) {
  return (int32_t)(random_bits(SEED, STREAM_TARGETS, (uint64_t)token) % (uint64_t)vocab_size);
}

// Uploads the matrix in blocks of rows, so that the host never holds it whole.
static void fill_normal(Backend *backend, Tensor t, bool weight) {
  int64_t columns = t.shape[1], block = ((int64_t)16 << 20) / columns + 1;
  float *values = host_alloc(block * columns, sizeof *values, "random values");
  uint16_t *rounded = host_alloc(block * columns, sizeof *rounded, "random values");
  for (int64_t first = 0; first < t.shape[0]; first += block) {
    int64_t rows = min_i64(block, t.shape[0] - first);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) random_row(weight, t.dtype, first + r, columns, values + r * columns);
    parameters_upload(backend, tensor_rows(t, first, rows), values, DTYPE_F32, rounded);
    backend_synchronize(backend);
  }
  free(values);
  free(rounded);
}

// --- where the tensors lie ---------------------------------------------------------------------------------

Backend *layer_backend(DeviceKind device, int ordinal) {
  const char *reason = NULL;
  Backend *backend =
      device == ON_CUDA ? cuda_backend_create(ordinal, DTYPE_BF16, &reason) : cpu_backend_create(false);
  if (!backend) fail("--device cuda: %s", reason);
  return backend;
}

static Tensor reserve(Backend *backend, const char *name, MemoryCategory category, Dtype dtype, int64_t rows,
                      int64_t columns) {
  size_t bytes = (size_t)rows * (size_t)columns * dtype_bytes(dtype);
  return tensor_2d(memory_reserve(&backend->memory, name, category, bytes), dtype, rows, columns);
}

LceTensors layer_reserve(Backend *backend, LceShape s) {
  LceTensors layer = {.backend = backend};
  layer.x = reserve(backend, "x", MEMORY_ACTIVATIONS, s.dtype, s.tokens, s.hidden_size);
  layer.weight = reserve(backend, "weight", MEMORY_WEIGHTS, s.dtype, s.vocab_size, s.hidden_size);
  layer.dx = reserve(backend, "dx", MEMORY_ACTIVATION_GRADIENTS, s.dtype, s.tokens, s.hidden_size);
  layer.dweight = reserve(backend, "dweight", MEMORY_GRADIENTS, DTYPE_F32, s.vocab_size, s.hidden_size);
  layer.loss = tensor_flat(reserve(backend, "losses", MEMORY_TABLES, DTYPE_F32, 1, s.tokens));
  layer.targets = tensor_flat(reserve(backend, "targets", MEMORY_TABLES, DTYPE_I32, 1, s.tokens));
  if (backend->memory.planning) return layer;

  fill_normal(backend, layer.x, false);
  fill_normal(backend, layer.weight, true);
  int32_t *targets = host_alloc(s.tokens, sizeof *targets, "the targets");
  for (int64_t n = 0; n < s.tokens; n++) targets[n] = random_target(n, s.vocab_size);
  backend_to_device(backend, layer.targets, targets);
  backend_synchronize(backend);
  free(targets);
  return layer;
}

LceTensors layer_push(Trainer *trainer) {
  Backend *backend = trainer->backend;
  const Model *model = trainer_model(trainer);
  int64_t tokens = trainer->tokens.shape[0], hidden_size = model->config.hidden_size;
  LceTensors layer = {.backend = backend,
                      .weight = model->head.value,
                      .dweight = model->head.grad,
                      .targets = trainer->targets,
                      .loss = trainer->loss};
  layer.x = memory_push_2d(&backend->memory, "x", MEMORY_ACTIVATIONS, backend->dtype, tokens, hidden_size);
  layer.dx = memory_push_2d(&backend->memory, "dx", MEMORY_ACTIVATION_GRADIENTS, backend->dtype, tokens,
                            hidden_size);
  if (!backend->memory.planning) fill_normal(backend, layer.x, false);
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
    int64_t count = min_i64(rows, tokens - first);
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
  LceTensors layer = layer_reserve(plan, shape);
  layer_gemms(&layer, rows);
  size_t bytes = plan->memory.ledger.stack_peak;
  backend_destroy(plan);
  return bytes;
}

// --- errors against float64 --------------------------------------------------------------------------------

enum { SAMPLES = 16 };

struct Reference {
  LceShape shape;
  int64_t tokens[SAMPLES], entries[SAMPLES]; // which rows of dx, which rows of dweight
  double loss[SAMPLES];
  double *dx, *dweight; // [SAMPLES, H]
};

static double *doubles(int64_t count) {
  return host_alloc(count, sizeof(double), "the reference of the gradients");
}

static float *floats(int64_t count) {
  return host_alloc(count, sizeof(float), "the reference of the gradients");
}

static double dot(const float *a, const float *b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += (double)a[i] * (double)b[i];
  return sum;
}

// The samples' sums [SAMPLES, H] over all rows of W (dx) or, given the losses, of x (dweight): each row, which is drawn
// rather than kept, times p = exp(logit - lse). Of x the onehot is taken off p, and lse = loss + z[target]; of W lse
// is 0, and `total` is what p adds up to. The logits are of a few units (layer_reserve): float64 needs no maximum to
// take their exponentials.
static void sum_rows(const Reference *r, const float *samples, const float *loss, double *sums,
                     double *total) {
  int64_t hidden = r->shape.hidden_size, vocab = r->shape.vocab_size, rows = loss ? r->shape.tokens : vocab;
#pragma omp parallel
  {
    float *row = floats(hidden), *w_target = floats(hidden);
    double *sum = doubles(SAMPLES * hidden), part[SAMPLES] = {0};
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows; n++) {
      int32_t target = -1;
      double lse = 0;
      random_row(!loss, r->shape.dtype, n, hidden, row);
      if (loss) {
        target = random_target(n, vocab);
        random_row(true, r->shape.dtype, target, hidden, w_target);
        lse = (double)loss[n] + dot(row, w_target, hidden);
      }
      for (int s = 0; s < SAMPLES; s++) {
        double p = exp(dot(samples + s * hidden, row, hidden) - lse);
        part[s] += p;
        if (target == r->entries[s]) p -= 1;
        for (int64_t h = 0; h < hidden; h++) sum[s * hidden + h] += p * (double)row[h];
      }
    }
#pragma omp critical
    {
      for (int s = 0; s < SAMPLES; s++) total[s] += part[s];
      for (int64_t i = 0; i < SAMPLES * hidden; i++) sums[i] += sum[i];
    }
    free(sum);
    free(w_target);
    free(row);
  }
}

// The samples' rows of W or x; the caller frees them.
static float *sampled_rows(const Reference *r, bool weight, const int64_t *rows) {
  int64_t hidden = r->shape.hidden_size;
  float *samples = floats(SAMPLES * hidden);
  for (int s = 0; s < SAMPLES; s++) random_row(weight, r->shape.dtype, rows[s], hidden, samples + s * hidden);
  return samples;
}

// loss = log(sum of exp(z)) - z[target] and dx = (softmax(z) W - W[target]) / N of the sampled tokens.
static void reference_tokens(Reference *r) {
  int64_t hidden = r->shape.hidden_size, targets[SAMPLES];
  double total[SAMPLES] = {0};
  for (int s = 0; s < SAMPLES; s++) targets[s] = random_target(r->tokens[s], r->shape.vocab_size);
  float *x = sampled_rows(r, false, r->tokens), *w_target = sampled_rows(r, true, targets);
  sum_rows(r, x, NULL, r->dx, total);
  for (int s = 0; s < SAMPLES; s++)
    r->loss[s] = log(total[s]) - dot(x + s * hidden, w_target + s * hidden, hidden);
  for (int64_t i = 0; i < SAMPLES * hidden; i++)
    r->dx[i] = (r->dx[i] / total[i / hidden] - (double)w_target[i]) / (double)r->shape.tokens;
  free(w_target);
  free(x);
}

// The computed losses of all tokens; the caller frees them.
static float *read_losses(const LceTensors *l) {
  float *loss = floats(l->x.shape[0]);
  backend_to_host(l->backend, loss, l->loss);
  return loss;
}

Reference *reference_create(const LceTensors *l, int64_t chunk) {
  Reference *r = host_alloc(1, sizeof *r, "the reference of the gradients");
  LceShape shape = r->shape = (LceShape){.tokens = l->x.shape[0],
                                         .hidden_size = l->x.shape[1],
                                         .vocab_size = l->weight.shape[0],
                                         .dtype = l->x.dtype};
  r->dx = doubles(SAMPLES * shape.hidden_size);
  r->dweight = doubles(SAMPLES * shape.hidden_size);
  for (int s = 0; s < SAMPLES; s++) {
    r->tokens[s] = shape.tokens * s / SAMPLES;
    // Half of the entries are some token's target: rows where the gradient is large.
    r->entries[s] = s % 2 ? random_target(r->tokens[s], shape.vocab_size) : shape.vocab_size * s / SAMPLES;
  }
  reference_tokens(r);
  linear_cross_entropy(l->backend, layer_call(l, LCE_FUSED, chunk));
  // dweight[v] = sum over tokens of (p - onehot) x / N of the sampled entries.
  float *loss = read_losses(l), *w = sampled_rows(r, true, r->entries);
  double total[SAMPLES] = {0};
  sum_rows(r, w, loss, r->dweight, total);
  for (int64_t i = 0; i < SAMPLES * shape.hidden_size; i++) r->dweight[i] /= (double)shape.tokens;
  free(w);
  free(loss);
  return r;
}

void reference_destroy(Reference *r) {
  if (!r) return;
  free(r->dx);
  free(r->dweight);
  free(r);
}

// Relative error of sampled rows of a device tensor.
static double rows_error(Backend *backend, Tensor t, const int64_t *rows, const double *want) {
  int64_t hidden = t.shape[1];
  void *row = floats(hidden); // or half as many bytes of bf16
  const float *fp32 = row;
  const uint16_t *bf16 = row;
  double error = 0, size = 0;
  for (int s = 0; s < SAMPLES; s++) {
    backend_to_host(backend, row, tensor_rows(t, rows[s], 1));
    for (int64_t h = 0; h < hidden; h++) {
      double value = t.dtype == DTYPE_BF16 ? (double)bf16_to_f32(bf16[h]) : (double)fp32[h];
      double truth = want[s * hidden + h];
      error += (value - truth) * (value - truth);
      size += truth * truth;
    }
  }
  free(row);
  return sqrt(error / size);
}

Errors reference_errors(const Reference *r, const LceTensors *l) {
  Errors e = {0};
  float *loss = read_losses(l);
  double size = 0;
  for (int s = 0; s < SAMPLES; s++) {
    double difference = (double)loss[r->tokens[s]] - r->loss[s];
    e.loss += difference * difference;
    size += r->loss[s] * r->loss[s];
  }
  e.loss = sqrt(e.loss / size);
  e.dx = rows_error(l->backend, l->dx, r->tokens, r->dx);
  e.dweight = rows_error(l->backend, l->dweight, r->entries, r->dweight);
  free(loss);
  return e;
}
