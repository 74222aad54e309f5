// The activations, elementwise. Limited by memory: three elements move for each one computed.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

void cpu_activation_forward(Backend *backend, const ActivationForward *a) {
  int64_t rows = a->x.shape[0], width = a->x.shape[1] / (is_gated(a->activation) ? 2 : 1);
  Tensor all = tensor_exists(a->out) ? a->out : tensor_2d(a->workspace.data, DTYPE_F32, rows, width);
  EACH_PARALLEL (n, rows) {
    const float *x = cpu_row(a->x, n), *up = x + width;
    float *out = cpu_row(all, n);
    switch (a->activation) {
    case ACTIVATION_NONE:
      break; // refused
    case ACTIVATION_GELU:
      EACH_SIMD (i, width) out[i] = gelu_f32(x[i]);
      break;
    case ACTIVATION_SWIGLU:
      EACH_SIMD (i, width) out[i] = x[i] * sigmoid_f32(x[i]) * up[i];
      break;
    }
  }
  cpu_quantize_made(a->quantized, all);
}

// dx may be x or dout itself: each element is read before it is written.
void cpu_activation_backward(Backend *backend, const ActivationBackward *a) {
  int64_t width = a->dout.shape[1];
  Tensor all = a->dx;
  if (!tensor_exists(all)) all = tensor_2d(a->workspace.data, DTYPE_F32, a->x.shape[0], a->x.shape[1]);
  EACH_PARALLEL (n, a->dout.shape[0]) {
    const float *x = cpu_row(a->x, n), *up = x + width, *dout = cpu_row(a->dout, n);
    float *dx = cpu_row(all, n), *dup = dx + width;
    switch (a->activation) {
    case ACTIVATION_NONE:
      break; // refused
    case ACTIVATION_GELU:
      EACH_SIMD (i, width) dx[i] = dout[i] * gelu_derivative_f32(x[i]);
      break;
    case ACTIVATION_SWIGLU:
      EACH_SIMD (i, width) {
        float g = x[i], u = up[i], s = sigmoid_f32(g);
        dx[i] = dout[i] * u * s * (1.0f + g * (1.0f - s));
        dup[i] = dout[i] * g * s;
      }
      break;
    }
  }
  cpu_quantize_made(a->quantized, all);
}
