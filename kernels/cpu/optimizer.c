// AdamW, Nesterov momentum and SGD over a slab, the sum under the global norm, and the factor that clips it.
//
// AdamW moves 28 bytes for a weight (reads weight, gradient, m, v; writes weight, m, v), its limit. Sums are
// cut into blocks of fixed length, so that the order of summation depends on the size alone.
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

static void run_adamw(Backend *backend, const Deferred *d) {
  Update now = d->update;
  now.after_copies = false;
  cpu_adamw(backend, &now);
}

void cpu_adamw(Backend *backend, const Update *a) {
  if (a->after_copies) {
    cpu_defer(backend, (Deferred){"adamw", STREAM_COPY_OUT, run_adamw, .update = *a});
    return;
  }
  float *weight = a->weight.data, *master = a->master.data ? a->master.data : a->weight.data;
  float *m = a->m.data, *v = a->v.data;
  const float *grad = a->grad.data;
  float grad_scale = *(const float *)a->grad_scale.data;
  float beta1 = (float)a->beta1, beta2 = (float)a->beta2, epsilon = (float)a->epsilon;
  float decay = a->lr * (float)a->weight_decay;
  // lr (m / c1) / (sqrt(v / c2) + epsilon), with the corrections for the first steps folded into factors.
  float rate = (float)(a->lr / (1.0 - pow(beta1, (double)a->step)));
  float v_correction = (float)(1.0 / (1.0 - pow(beta2, (double)a->step)));
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < a->weight.shape[0]; i++) {
    float g = grad[i] * grad_scale;
    m[i] = beta1 * m[i] + (1.0f - beta1) * g;
    v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
    float w = master[i];
    w -= rate * m[i] / (sqrtf(v[i] * v_correction) + epsilon) + decay * w;
    master[i] = w;
    weight[i] = w;
  }
}

void cpu_nesterov(Backend *backend, const Update *a) {
  float *out = a->weight.data, *m = a->m.data, mu = (float)a->momentum;
  const float *grad = a->grad.data, grad_scale = *(const float *)a->grad_scale.data;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < a->m.shape[0]; i++) {
    float g = (1.0f - mu) * grad[i] * grad_scale;
    m[i] = mu * m[i] + g;
    out[i] = g + mu * m[i];
  }
}

void cpu_sgd(Backend *backend, const Update *a) {
  float *weight = a->weight.data, *master = a->master.data ? a->master.data : a->weight.data;
  const float *direction = a->grad.data;
  float lr = a->lr, decay = a->lr * (float)a->weight_decay;
#pragma omp parallel for simd schedule(static)
  for (int64_t i = 0; i < a->weight.shape[0]; i++)
    weight[i] = master[i] = master[i] - (lr * direction[i] + decay * master[i]);
}

void cpu_sum_elements(Backend *backend, const SumElements *a) {
  int64_t count = tensor_count(a->x), blocks = ceil_div(count, CPU_REDUCE_BLOCK);
  const float *x = a->x.data;
  double *partial = a->workspace.data;
  EACH_PARALLEL (b, blocks) {
    const float *block = x + b * CPU_REDUCE_BLOCK;
    int64_t elements = min_i64(CPU_REDUCE_BLOCK, count - b * CPU_REDUCE_BLOCK);
    // A choice between the weights, in one call, would stay in its loop and keep it from vectors.
    partial[b] = a->squares ? weighted_sum(block, block, elements) : weighted_sum(block, NULL, elements);
  }
  double total = 0.0;
  for (int64_t b = 0; b < blocks; b++) total += partial[b];
  float *out = a->sum.data;
  *out = (float)(a->accumulate ? *out + total : total);
}

void cpu_clip_scale(Backend *backend, const ClipScale *a) {
  float norm = sqrtf(*(const float *)a->sum_of_squares.data), scale = 1.0f;
  if (a->max_norm > 0.0f && norm > a->max_norm) scale = a->max_norm / norm;
  *(float *)a->norm.data = norm;
  *(float *)a->scale.data = isfinite(norm) ? scale : NAN;
}
