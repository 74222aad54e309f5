// A linear layer: three GEMMs (Y = X W^T, dX = dY W, dW = dY^T X) and what is fused around them. Batches of
// GEMMs.
//
// Bias and residual are one more pass over the rows, and an activation another. A residual in place costs
// nothing: the GEMM starts from it (accumulate).
#include <math.h>

#include "kernels/cpu/cpu.h"

static CpuMatrix matrix(Tensor t, bool transposed) {
  return (CpuMatrix){.data = t.data, .stride = t.stride, .transposed = transposed};
}

static void add_row(float *restrict row, const float *restrict term, int64_t count) {
  EACH_SIMD (i, count) row[i] += term[i];
}

void cpu_linear_forward(Backend *backend, const LinearForward *a) {
  bool bias = tensor_exists(a->bias), residual = tensor_exists(a->residual);
  bool in_place = residual && a->residual.data == a->out.data, adds = residual && !in_place;
  Tensor pre = a->activation ? a->pre_activation : a->out;
  int64_t rows = a->x.shape[0], inputs = a->x.shape[1], outputs = pre.shape[1];
  cpu_gemm(backend, rows, outputs, inputs, 1.0f, matrix(a->x, false), matrix(a->weight, !a->in_out_layout),
           in_place, pre.data, pre.stride);
  if (bias || adds)
    EACH_PARALLEL (n, rows) {
      if (bias) add_row(cpu_row(pre, n), a->bias.data, outputs);
      if (adds) add_row(cpu_row(pre, n), cpu_row(a->residual, n), outputs);
    }
  if (a->activation)
    cpu_activation_forward(backend, &(ActivationForward){a->activation, .out = a->out, .x = pre});
}

void cpu_linear_backward_input(Backend *backend, const LinearBackwardInput *a) {
  Tensor product = is_gated(a->activation) ? a->dactivation : a->dx;
  int64_t rows = product.shape[0], inputs = product.shape[1], outputs = a->dout.shape[1];
  cpu_gemm(backend, rows, inputs, outputs, 1.0f, matrix(a->dout, false), matrix(a->weight, a->in_out_layout),
           a->accumulate, product.data, product.stride);
  if (a->activation)
    cpu_activation_backward(
        backend, &(ActivationBackward){a->activation, .dx = a->dx, .dout = product, .x = a->pre_activation});
}

void cpu_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  Tensor left = a->in_out_layout ? a->x : a->dout, right = a->in_out_layout ? a->dout : a->x;
  cpu_gemm(backend, a->dweight.shape[0], a->dweight.shape[1], a->x.shape[0], a->alpha, matrix(left, true),
           matrix(right, false), a->accumulate, a->dweight.data, a->dweight.stride);
  SumColumns bias = {.sum = a->dbias, .x = a->dout, .alpha = a->alpha, .accumulate = a->accumulate};
  if (tensor_exists(a->dbias)) cpu_sum_columns(backend, &bias);
}

// --- batches of matrices -----------------------------------------------------------------------------------

static Tensor nth(Matrices m, int64_t n) {
  m.first.data = (float *)m.first.data + n * m.apart;
  return m.first;
}

static void scale_rows(Tensor out, Tensor x, float factor) {
  EACH_PARALLEL (i, x.shape[0])
    for (int64_t j = 0; j < x.shape[1]; j++) cpu_row(out, i)[j] = factor * cpu_row(x, i)[j];
}

void cpu_frobenius_normalize(Backend *backend, const FrobeniusNormalize *a) {
  for (int64_t n = 0; n < a->count; n++) {
    Tensor x = nth(a->x, n);
    double squares = 0.0;
    for (int64_t i = 0; i < x.shape[0]; i++)
      for (int64_t j = 0; j < x.shape[1]; j++) squares += (double)cpu_row(x, i)[j] * cpu_row(x, i)[j];
    float norm = (float)sqrt(squares);
    scale_rows(nth(a->out, n), x, 1.0f / (norm < 1e-7f ? 1e-7f : norm));
  }
}

void cpu_batched_gemm(Backend *backend, const BatchedGemm *a) {
  bool adds = tensor_exists(a->addend.first);
  int64_t terms = a->left.first.shape[!a->left_transposed];
  for (int64_t n = 0; n < a->count; n++) {
    Tensor out = nth(a->out, n);
    if (adds) scale_rows(out, nth(a->addend, n), a->beta);
    cpu_gemm(backend, out.shape[0], out.shape[1], terms, a->alpha,
             matrix(nth(a->left, n), a->left_transposed), matrix(nth(a->right, n), a->right_transposed), adds,
             out.data, out.stride);
  }
}
