// A linear layer: three GEMMs (Y = X W^T, dX = dY W, dW = dY^T X) and what is fused around them.
//
// Bias, activation and residual are one more pass over the rows that the GEMM has just written. A residual that
// is added in place costs nothing: the GEMM starts from it (beta = 1).
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

static CpuMatrix matrix(Tensor t, bool transposed) {
  return (CpuMatrix){.data = t.data, .stride = t.stride, .transposed = transposed};
}

static void add_row(float *restrict row, const float *restrict term, int64_t count) {
  EACH_SIMD (i, count) row[i] += term[i];
}

void cpu_linear_forward(Backend *backend, const LinearForward *a) {
  bool swiglu = is_swiglu(a->pre_activation, a->out.shape[1]);
  bool gelu = tensor_exists(a->pre_activation) && !swiglu, bias = tensor_exists(a->bias);
  bool residual = tensor_exists(a->residual), in_place = residual && a->residual.data == a->out.data;
  bool adds = residual && !in_place;
  Tensor pre = tensor_exists(a->pre_activation) ? a->pre_activation : a->out;
  int64_t rows = a->x.shape[0], inputs = a->x.shape[1], outputs = pre.shape[1];
  cpu_gemm(cpu_plain_loops(backend), rows, outputs, inputs, 1.0f, matrix(a->x, false),
           matrix(a->weight, !a->in_out_layout), in_place ? 1.0f : 0.0f, pre.data, pre.stride);
#pragma omp parallel for schedule(static) if (gelu || bias || adds)
  for (int64_t n = 0; n < rows; n++) {
    float *row = cpu_row(pre, n);
    if (bias) add_row(row, a->bias.data, outputs);
    if (adds) add_row(row, cpu_row(a->residual, n), outputs);
    if (gelu) {
      float *activated = cpu_row(a->out, n);
      EACH_SIMD (i, outputs) activated[i] = gelu_f32(row[i]);
    }
  }
  if (swiglu) cpu_swiglu_forward(backend, &(SwigluForward){.out = a->out, .gate_up = pre});
}

void cpu_linear_backward_input(Backend *backend, const LinearBackwardInput *a) {
  bool swiglu = tensor_exists(a->dactivation);
  Tensor product = swiglu ? a->dactivation : a->dx;
  int64_t rows = product.shape[0], inputs = product.shape[1], outputs = a->dout.shape[1];
  cpu_gemm(cpu_plain_loops(backend), rows, inputs, outputs, 1.0f, matrix(a->dout, false),
           matrix(a->weight, a->in_out_layout), a->accumulate ? 1.0f : 0.0f, product.data, product.stride);
  if (swiglu) {
    cpu_swiglu_backward(backend,
                        &(SwigluBackward){.dgate_up = a->dx, .dout = product, .gate_up = a->pre_activation});
    return;
  }
  if (!tensor_exists(a->pre_activation)) return;
  EACH_PARALLEL (n, rows) {
    float *dx = cpu_row(a->dx, n);
    const float *pre = cpu_row(a->pre_activation, n);
    EACH_SIMD (i, inputs) dx[i] *= gelu_derivative_f32(pre[i]);
  }
}

void cpu_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a) {
  Tensor left = a->in_out_layout ? a->x : a->dout, right = a->in_out_layout ? a->dout : a->x;
  if (tensor_exists(a->dweight))
    cpu_gemm(cpu_plain_loops(backend), a->dweight.shape[0], a->dweight.shape[1], a->x.shape[0], a->alpha,
             matrix(left, true), matrix(right, false), a->accumulate ? 1.0f : 0.0f, a->dweight.data,
             a->dweight.stride);
  if (tensor_exists(a->dbias)) cpu_column_sums(a->dbias.data, a->dout, NULL, a->alpha, a->accumulate);
}
