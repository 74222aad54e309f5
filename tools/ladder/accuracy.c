// A rung's results against float64, on the CPU in fp32: LCE.md's table.
#include <math.h>
#include <stdlib.h>

#include "kernels/base/alloc.h"
#include "kernels/base/integers.h"
#include "kernels/cpu/cpu.h"
#include "tools/ladder/ladder.h"

enum { SAMPLES = 16 }; // tokens, and rows of dW

typedef struct {
  double off, size; // sums of squares
} Distance;

static void add_distance(Distance *d, const float *got, const double *right, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    d->off += pow((double)got[i] - right[i], 2), d->size += pow(right[i], 2);
}

static int32_t target_of(const LinearCrossEntropy *l, int64_t n) {
  return ((const int32_t *)l->targets.data)[n];
}

// z[n, j] - z[n, y].
static double lead_of(const LinearCrossEntropy *l, int64_t n, int64_t j) {
  const float *x = cpu_row(l->x, n), *w = cpu_row(l->weight, j),
              *of_target = cpu_row(l->weight, target_of(l, n));
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < l->x.shape[1]; i++) sum += (double)x[i] * ((double)w[i] - (double)of_target[i]);
  return sum;
}

// With e = exp(z - z[y]) the loss is log(sum e), and dX = scale (sum e (W - W[y])) / sum e. Returns the loss.
static double exact_token(const LinearCrossEntropy *l, int64_t n, double *dx) {
  const float *of_target = cpu_row(l->weight, target_of(l, n));
  double sum = 0;
  for (int64_t j = 0; j < l->weight.shape[0]; j++) {
    double e = exp(lead_of(l, n, j));
    const float *w = cpu_row(l->weight, j);
    for (int64_t i = 0; dx && i < l->x.shape[1]; i++) dx[i] += e * ((double)w[i] - (double)of_target[i]);
    sum += e;
  }
  for (int64_t i = 0; dx && i < l->x.shape[1]; i++) dx[i] *= (double)l->scale / sum;
  return log(sum);
}

// dW[j] = scale sum over n of (p[n, j] - (j is n's target)) x[n].
static void exact_row(const LinearCrossEntropy *l, const double *losses, int64_t j, double *dweight) {
  for (int64_t n = 0; n < l->x.shape[0]; n++) {
    double g = exp(lead_of(l, n, j) - losses[n]) - (j == target_of(l, n));
    for (int64_t i = 0; i < l->x.shape[1]; i++)
      dweight[i] += (double)l->scale * g * (double)cpu_row(l->x, n)[i];
  }
}

double *ladder_exact_losses(const LinearCrossEntropy *l) {
  double *losses = host_alloc(l->x.shape[0], sizeof *losses, "exact losses");
  EACH_PARALLEL (n, l->x.shape[0]) losses[n] = exact_token(l, n, NULL);
  return losses;
}

LadderErrors ladder_errors(const LinearCrossEntropy *l, const double *losses) {
  int64_t tokens = l->x.shape[0], vocab = l->weight.shape[0], hidden = l->x.shape[1];
  Distance loss = {0}, dx = {0}, dweight = {0}, certain = {0};
  for (int64_t k = 0; k < SAMPLES; k++) {
    int64_t n = k * tokens / SAMPLES, j = k % 2 ? target_of(l, n) : k * vocab / SAMPLES;
    double *right = host_alloc(2 * hidden, sizeof *right, "an exact gradient");
    exact_token(l, n, right);
    exact_row(l, losses, j, right + hidden);
    add_distance(&loss, (const float *)l->loss.data + n, losses + n, 1);
    add_distance(n ? &dx : &certain, cpu_row(l->dx, n), right, hidden);
    add_distance(&dweight, cpu_row(l->dweight, j), right + hidden, hidden);
    free(right);
  }
  certain.size = 0; // that of c W[y], the target's part: c = p[y] - 1
  for (int64_t i = 0; i < hidden; i++)
    certain.size +=
        pow((double)l->scale * expm1(-losses[0]) * (double)cpu_row(l->weight, target_of(l, 0))[i], 2);
  return (LadderErrors){sqrt(loss.off / loss.size), sqrt(dx.off / dx.size), sqrt(dweight.off / dweight.size),
                        sqrt(certain.off / certain.size)};
}
