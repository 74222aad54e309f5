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
      layer_random_row(r->seed, !loss, r->shape.dtype, n, hidden, row);
      if (loss) {
        target = layer_random_target(r->seed, n, vocab);
        layer_random_row(r->seed, true, r->shape.dtype, target, hidden, w_target);
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
  for (int s = 0; s < SAMPLES; s++)
    layer_random_row(r->seed, weight, r->shape.dtype, rows[s], hidden, samples + s * hidden);
  return samples;
}

// loss = log(sum of exp(z)) - z[target] and dx = (softmax(z) W - W[target]) / N of the sampled tokens.
static void reference_tokens(Reference *r) {
  int64_t hidden = r->shape.hidden_size, targets[SAMPLES];
  double total[SAMPLES] = {0};
  for (int s = 0; s < SAMPLES; s++)
    targets[s] = layer_random_target(r->seed, r->tokens[s], r->shape.vocab_size);
  float *x = sampled_rows(r, false, r->tokens), *w_target = sampled_rows(r, true, targets);
  sum_rows(r, x, NULL, r->dx, total);
  for (int s = 0; s < SAMPLES; s++)
    r->loss[s] = log(total[s]) - dot(x + s * hidden, w_target + s * hidden, hidden);
  for (int64_t i = 0; i < SAMPLES * hidden; i++)
    r->dx[i] = (r->dx[i] / total[i / hidden] - (double)w_target[i]) / (double)r->shape.tokens;
  free(w_target);
  free(x);
}

// dweight[v] = sum over tokens of (p - onehot) x / N of the sampled entries.
static void reference_entries(Reference *r, const float *loss) {
  float *w = sampled_rows(r, true, r->entries);
  double total[SAMPLES] = {0};
  sum_rows(r, w, loss, r->dweight, total);
  for (int64_t i = 0; i < SAMPLES * r->shape.hidden_size; i++) r->dweight[i] /= (double)r->shape.tokens;
  free(w);
}

// The computed losses of all tokens; the caller frees them.
static float *read_losses(const LceTensors *l) {
  float *loss = floats(l->x.shape[0]);
  backend_to_host(l->backend, loss, l->loss);
  return loss;
}

Reference *reference_create(const LceTensors *l, uint64_t seed, int64_t chunk) {
  Reference *r = host_alloc(1, sizeof *r, "the reference of the gradients");
  LceShape shape = r->shape = (LceShape){.tokens = l->x.shape[0],
                                         .hidden_size = l->x.shape[1],
                                         .vocab_size = l->weight.shape[0],
                                         .dtype = l->x.dtype};
  r->seed = seed;
  r->dx = doubles(SAMPLES * shape.hidden_size);
  r->dweight = doubles(SAMPLES * shape.hidden_size);
  for (int s = 0; s < SAMPLES; s++) {
    r->tokens[s] = shape.tokens * s / SAMPLES;
    // Half of the entries are some token's target: rows where the gradient is large.
    r->entries[s] =
        s % 2 ? layer_random_target(seed, r->tokens[s], shape.vocab_size) : shape.vocab_size * s / SAMPLES;
  }
  reference_tokens(r);
  layer_run(l, LCE_FUSED, chunk);
  float *loss = read_losses(l);
  reference_entries(r, loss);
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
