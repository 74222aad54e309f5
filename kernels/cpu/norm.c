// LayerNorm and RMSNorm: one pass for the statistics, one for the result, a row (or a row's head) at a time.
//
// The weights' gradients are sums over all rows. A thread takes 64 columns and walks all rows, so that the
// order of summation does not depend on the number of threads; that reads x and dout a second time.
#include <math.h>

#include "kernels/cpu/cpu.h"

// Returns head n's row; heads have `size` elements.
static float *head_row(Tensor t, int64_t n, int64_t size) {
  int64_t heads = t.shape[1] / size;
  return cpu_row(t, n / heads) + n % heads * size;
}

static float row_mean(const float *x, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) sum += x[i];
  return sum / (float)count;
}

static float row_mean_square(const float *x, float mean, int64_t count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) sum += (x[i] - mean) * (x[i] - mean);
  return sum / (float)count;
}

void cpu_norm_forward(Backend *backend, const NormForward *a) {
  int64_t hidden = a->weight.shape[0];
  const float *weight = a->weight.data, *bias = a->bias.data;
  EACH_PARALLEL (n, a->rstd.shape[0]) {
    const float *x = head_row(a->x, n, hidden);
    float *out = head_row(a->out, n, hidden);
    float mean = a->kind == NORM_LAYER ? row_mean(x, hidden) : 0.0f;
    float rstd = 1.0f / sqrtf(row_mean_square(x, mean, hidden) + a->epsilon);
    ((float *)a->rstd.data)[n] = rstd;
    if (a->kind == NORM_LAYER) {
      ((float *)a->mean.data)[n] = mean;
      EACH_SIMD (i, hidden) out[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
    } else if (tensor_exists(a->residual)) {
      const float *residual = head_row(a->residual, n, hidden);
      EACH_SIMD (i, hidden) out[i] = x[i] * rstd * weight[i] + residual[i];
    } else {
      EACH_SIMD (i, hidden) out[i] = x[i] * rstd * weight[i];
    }
  }
  cpu_amax(a->amax, a->out);
}

static void input_gradient(const NormBackward *a) {
  int64_t hidden = a->weight.shape[0];
  const float *weight = a->weight.data;
  EACH_PARALLEL (n, a->rstd.shape[0]) {
    const float *x = head_row(a->x, n, hidden), *dout = head_row(a->dout, n, hidden);
    float *dx = head_row(a->dx, n, hidden);
    float mean = a->kind == NORM_LAYER ? ((const float *)a->mean.data)[n] : 0.0f;
    float rstd = ((const float *)a->rstd.data)[n];
    float sum_g = 0.0f, sum_g_xhat = 0.0f;
#pragma omp simd reduction(+ : sum_g, sum_g_xhat)
    for (int64_t i = 0; i < hidden; i++) {
      float g = dout[i] * weight[i];
      sum_g += g;
      sum_g_xhat += g * ((x[i] - mean) * rstd);
    }
    float mean_g = a->kind == NORM_LAYER ? sum_g / (float)hidden : 0.0f;
    float mean_g_xhat = sum_g_xhat / (float)hidden;
    EACH_SIMD (i, hidden) {
      float before = a->accumulate_dx ? dx[i] : 0.0f;
      dx[i] = before + rstd * (dout[i] * weight[i] - mean_g - (x[i] - mean) * rstd * mean_g_xhat);
    }
  }
}

static void weight_gradients(const NormBackward *a) {
  enum { COLUMNS = 64 };
  int64_t hidden = a->weight.shape[0];
  float *dweight = a->dweight.data, *dbias = a->dbias.data;
  const float *means = a->mean.data, *rstds = a->rstd.data;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < hidden; first += COLUMNS) {
    int64_t count = min_i64(COLUMNS, hidden - first);
    double weight_sum[COLUMNS] = {0}, bias_sum[COLUMNS] = {0};
    for (int64_t n = 0; n < a->rstd.shape[0]; n++) {
      const float *x = head_row(a->x, n, hidden) + first, *dout = head_row(a->dout, n, hidden) + first;
      float mean = a->kind == NORM_LAYER ? means[n] : 0.0f, rstd = rstds[n];
      EACH_SIMD (i, count) {
        weight_sum[i] += dout[i] * ((x[i] - mean) * rstd);
        bias_sum[i] += dout[i];
      }
    }
    for (int64_t i = 0; i < count; i++) {
      dweight[first + i] = (a->accumulate ? dweight[first + i] : 0.0f) + (float)weight_sum[i];
      if (dbias) dbias[first + i] = (a->accumulate ? dbias[first + i] : 0.0f) + (float)bias_sum[i];
    }
  }
}

void cpu_norm_backward(Backend *backend, const NormBackward *a) {
  weight_gradients(a);
  SumColumns dx_sum = {.sum = a->dx_sum, .x = a->dx, .alpha = 1, .accumulate = a->accumulate};
  if (tensor_exists(a->dx_sum)) cpu_sum_columns(backend, &dx_sum);
  input_gradient(a);
  cpu_amax(a->amax, a->dx);
}
