// A linear layer: three GEMMs (Y = X W^T, dX = dY W, dW = dY^T X) and the operations fused into them. Also
// GEMMs of codes, and batches of GEMMs.
//
// Bias and residual are one more pass over the rows, and an activation another. A residual in place costs
// nothing: the GEMM starts from it (accumulate).
#include <math.h>

#include "kernels/cpu/cpu.h"

static void add_row(float *restrict row, const float *restrict term, int64_t count) {
  EACH_SIMD (i, count) row[i] += term[i];
}

void cpu_linear_forward(Backend *backend, const LinearForward *a) {
  bool bias = tensor_exists(a->bias), residual = tensor_exists(a->residual);
  bool in_place = residual && a->residual.data == a->out.data, adds = residual && !in_place;
  Tensor pre = a->activation ? a->pre_activation : a->out;
  cpu_gemm(backend, pre, a->x, false, a->weight, !a->in_out_layout, 1.0f, in_place);
  if (bias || adds)
    EACH_PARALLEL (n, pre.shape[0]) {
      if (bias) add_row(cpu_row(pre, n), a->bias.data, pre.shape[1]);
      if (adds) add_row(cpu_row(pre, n), cpu_row(a->residual, n), pre.shape[1]);
    }
  if (a->activation)
    cpu_activation_forward(backend, &(ActivationForward){a->activation, .out = a->out, .x = pre});
}

void cpu_linear_backward_input(Backend *backend, const LinearBackwardInput *a) {
  Tensor product = is_gated(a->activation) ? a->dactivation : a->dx;
  cpu_gemm(backend, product, a->dout, false, a->weight, a->in_out_layout, 1.0f, a->accumulate);
  if (a->activation)
    cpu_activation_backward(
        backend, &(ActivationBackward){a->activation, .dx = a->dx, .dout = product, .x = a->pre_activation});
}

void cpu_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  Tensor left = a->in_out_layout ? a->x : a->dout, right = a->in_out_layout ? a->dout : a->x;
  // A head's dW sums over a chunk's tokens alone: the threads of a BLAS would wait for each other often. Parts
  // are many, for many cores.
  int64_t rows = a->dweight.shape[0], part = rows < 16 * right.shape[0] ? max_i64(rows, 1) : 384;
#pragma omp parallel for schedule(dynamic) if (part < rows)
  for (int64_t p = 0; p < ceil_div(rows, part); p++)
    cpu_gemm(backend, cpu_part(a->dweight, part, p),
             tensor_columns(left, p * part, min_i64(part, rows - p * part)), true, right, false, a->alpha,
             a->accumulate);
  SumColumns bias = {.sum = a->dbias, .x = a->dout, .alpha = a->alpha, .accumulate = a->accumulate};
  if (tensor_exists(a->dbias)) cpu_sum_columns(backend, &bias);
}

// --- codes -------------------------------------------------------------------------------------------------

void cpu_matmul_quantized(Backend *backend, const MatmulQuantized *a) {
  float *values = a->workspace.data;
  LinearForward decoded = {.out = a->out,
                           .x = cpu_dequantize(a->a, values),
                           .weight = cpu_dequantize(a->b, values + tensor_count(a->a.codes)),
                           .bias = a->bias,
                           .residual = a->residual};
  cpu_linear_forward(backend, &decoded);
}

// --- batches of matrices -----------------------------------------------------------------------------------

static Tensor nth(Matrices m, int64_t n) {
  m.first.data = (float *)m.first.data + n * m.apart;
  return m.first;
}

// out = factor diag(rows) x diag(columns); either diagonal may be absent.
static void scale_matrix(Tensor out, Tensor x, float factor, const float *rows, const float *columns) {
  EACH_PARALLEL (i, x.shape[0])
    for (int64_t j = 0; j < x.shape[1]; j++)
      cpu_row(out, i)[j] = factor * (rows ? rows[i] : 1) * (columns ? columns[j] : 1) * cpu_row(x, i)[j];
}

void cpu_aol_scale(Backend *backend, const AolScale *a) {
  bool tall = a->x.first.shape[0] > a->x.first.shape[1];
  for (int64_t n = 0; n < a->count; n++) {
    Tensor gram = nth(a->gram, n);
    float *s = cpu_row(a->s, n);
    EACH_PARALLEL (i, gram.shape[0]) {
      double sum = 0.0;
      for (int64_t j = 0; j < gram.shape[0]; j++) sum += fabs((double)cpu_row(gram, i)[j]);
      s[i] = (float)(1 / sqrt(sum < 1e-20 ? 1e-20 : sum));
    }
    scale_matrix(nth(a->out, n), nth(a->x, n), 1, tall ? NULL : s, tall ? s : NULL);
    scale_matrix(gram, gram, 1, s, s);
  }
}

void cpu_batched_gemm(Backend *backend, const BatchedGemm *a) {
  bool adds = tensor_exists(a->addend.first);
  for (int64_t n = 0; n < a->count; n++) {
    Tensor out = nth(a->out, n);
    if (adds) scale_matrix(out, nth(a->addend, n), a->beta, NULL, NULL);
    cpu_gemm(backend, out, nth(a->left, n), a->left_transposed, nth(a->right, n), a->right_transposed,
             a->alpha, adds);
    for (int64_t i = 0; i < min_i64(out.shape[0], out.shape[1]); i++) cpu_row(out, i)[i] += a->diagonal;
  }
}
