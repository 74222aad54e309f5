#include "tools/curves/accuracy.h"

#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"

enum { SAMPLES = 16 };

struct Reference {
  LceShape shape;
  uint64_t seed;
  int64_t tokens[SAMPLES], entries[SAMPLES]; // which rows of dx, which rows of dweight
  double loss[SAMPLES];
  double *dx, *dweight; // [SAMPLES, H]
  bool complete;        // dweight is there
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

// loss and dx of the sampled tokens: all logits, then the weighted sum of W's rows, which are drawn twice
// rather than kept.
static void reference_rows(Reference *r) {
  int64_t hidden = r->shape.hidden_size, vocab = r->shape.vocab_size;
  float *x = floats(SAMPLES * hidden);
  double *z = doubles(SAMPLES * vocab);
  for (int s = 0; s < SAMPLES; s++)
    layer_random_row(r->seed, false, r->shape.dtype, r->tokens[s], hidden, x + s * hidden);
#pragma omp parallel
  {
    float *w = floats(hidden);
#pragma omp for schedule(static)
    for (int64_t v = 0; v < vocab; v++) {
      layer_random_row(r->seed, true, r->shape.dtype, v, hidden, w);
      for (int s = 0; s < SAMPLES; s++) z[s * vocab + v] = dot(x + s * hidden, w, hidden);
    }
    free(w);
  }
  for (int s = 0; s < SAMPLES; s++) {
    double *row = z + s * vocab, highest = row[0], sum = 0;
    int32_t target = layer_random_target(r->seed, r->tokens[s], vocab);
    for (int64_t v = 1; v < vocab; v++) highest = fmax(highest, row[v]);
    for (int64_t v = 0; v < vocab; v++) sum += exp(row[v] - highest);
    double lse = highest + log(fmax(sum, 1)); // the highest alone adds 1
    r->loss[s] = lse - row[target];
    for (int64_t v = 0; v < vocab; v++)
      row[v] = (exp(row[v] - lse) - (v == target ? 1 : 0)) / (double)r->shape.tokens;
  }
#pragma omp parallel
  {
    float *w = floats(hidden);
    double *sum = doubles(SAMPLES * hidden);
#pragma omp for schedule(static)
    for (int64_t v = 0; v < vocab; v++) {
      layer_random_row(r->seed, true, r->shape.dtype, v, hidden, w);
      for (int s = 0; s < SAMPLES; s++)
        for (int64_t h = 0; h < hidden; h++) sum[s * hidden + h] += z[s * vocab + v] * (double)w[h];
    }
#pragma omp critical
    for (int64_t i = 0; i < SAMPLES * hidden; i++) r->dx[i] += sum[i];
    free(sum);
    free(w);
  }
  free(z);
  free(x);
}

Reference *reference_create(LceShape shape, uint64_t seed) {
  Reference *r = host_alloc(1, sizeof *r, "the reference of the gradients");
  r->shape = shape;
  r->seed = seed;
  r->dx = doubles(SAMPLES * shape.hidden_size);
  r->dweight = doubles(SAMPLES * shape.hidden_size);
  for (int s = 0; s < SAMPLES; s++) {
    r->tokens[s] = shape.tokens * s / SAMPLES;
    // Half of the entries are some token's target: rows where the gradient is large.
    r->entries[s] =
        s % 2 ? layer_random_target(seed, r->tokens[s], shape.vocab_size) : shape.vocab_size * s / SAMPLES;
  }
  reference_rows(r);
  return r;
}

void reference_destroy(Reference *r) {
  if (!r) return;
  free(r->dx);
  free(r->dweight);
  free(r);
}

// dweight[v] = sum over tokens of (p - onehot) x / N, with p from the losses: lse = loss + z[target].
static void reference_columns(Reference *r, const float *loss) {
  int64_t hidden = r->shape.hidden_size, vocab = r->shape.vocab_size, tokens = r->shape.tokens;
  float *w = floats(SAMPLES * hidden);
  for (int s = 0; s < SAMPLES; s++)
    layer_random_row(r->seed, true, r->shape.dtype, r->entries[s], hidden, w + s * hidden);
#pragma omp parallel
  {
    float *x = floats(hidden), *w_target = floats(hidden);
    double *sum = doubles(SAMPLES * hidden);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < tokens; n++) {
      int32_t target = layer_random_target(r->seed, n, vocab);
      layer_random_row(r->seed, false, r->shape.dtype, n, hidden, x);
      layer_random_row(r->seed, true, r->shape.dtype, target, hidden, w_target);
      double lse = (double)loss[n] + dot(x, w_target, hidden);
      for (int s = 0; s < SAMPLES; s++) {
        double p = exp(dot(x, w + s * hidden, hidden) - lse) - (target == r->entries[s] ? 1 : 0);
        for (int64_t h = 0; h < hidden; h++) sum[s * hidden + h] += p / (double)tokens * (double)x[h];
      }
    }
#pragma omp critical
    for (int64_t i = 0; i < SAMPLES * hidden; i++) r->dweight[i] += sum[i];
    free(sum);
    free(w_target);
    free(x);
  }
  free(w);
  r->complete = true;
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

Errors reference_errors(Reference *r, const LceTensors *l) {
  Errors e = {0};
  float *loss = floats(r->shape.tokens);
  backend_to_host(l->backend, loss, l->loss);
  if (!r->complete) reference_columns(r, loss);
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
