// GELU and SwiGLU, elementwise. Limited by memory: three elements move for each one computed.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vector_math.h"

void cpu_gelu_forward(Backend *backend, const GeluForward *a) {
  EACH_PARALLEL (n, a->x.shape[0]) {
    const float *x = cpu_row(a->x, n);
    float *out = cpu_row(a->out, n);
    EACH_SIMD (i, a->x.shape[1]) out[i] = gelu_f32(x[i]);
  }
}

void cpu_gelu_backward(Backend *backend, const GeluBackward *a) {
  EACH_PARALLEL (n, a->x.shape[0]) {
    const float *x = cpu_row(a->x, n), *dout = cpu_row(a->dout, n);
    float *dx = cpu_row(a->dx, n);
    EACH_SIMD (i, a->x.shape[1]) dx[i] = dout[i] * gelu_derivative_f32(x[i]);
  }
}

void cpu_swiglu_forward(Backend *backend, const SwigluForward *a) {
  int64_t width = a->out.shape[1];
  EACH_PARALLEL (n, a->out.shape[0]) {
    const float *gate = cpu_row(a->gate_up, n), *up = gate + width;
    float *out = cpu_row(a->out, n);
    EACH_SIMD (i, width) out[i] = gate[i] * sigmoid_f32(gate[i]) * up[i];
  }
  cpu_amax(a->amax, a->out);
}

// dgate_up may be gate_up itself: each element is read before it is written.
void cpu_swiglu_backward(Backend *backend, const SwigluBackward *a) {
  int64_t width = a->dout.shape[1];
  EACH_PARALLEL (n, a->dout.shape[0]) {
    const float *gate = cpu_row(a->gate_up, n), *up = gate + width, *dout = cpu_row(a->dout, n);
    float *dgate = cpu_row(a->dgate_up, n), *dup = dgate + width;
    EACH_SIMD (i, width) {
      float g = gate[i], u = up[i], s = sigmoid_f32(g);
      dgate[i] = dout[i] * u * s * (1.0f + g * (1.0f - s));
      dup[i] = dout[i] * g * s;
    }
  }
  cpu_amax(a->amax, a->dgate_up);
}
