// GELU in its tanh form, SwiGLU, and their derivatives, for activation.cu and the GEMMs' epilogues.
#pragma once

#include "kernels/cuda/cuda_common.cuh"

static constexpr float GELU_SCALE = 0.7978845608f; // sqrt(2 / pi)
static constexpr float GELU_CUBIC = 0.044715f;

// Accurate to a few units in the last place; 0 for x below -87.
static DEVICE float logistic(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// Each acts on one element, or on a gate and its up; gradient() replaces them by their gradients.
struct Gelu {
  static constexpr bool GATED = false;
  // 0.5 (1 + tanh(u)) is the logistic function of 2 u, which neither overflows nor cancels.
  static DEVICE float value(float x, float) {
    return x * logistic(2 * GELU_SCALE * (x + GELU_CUBIC * x * x * x));
  }
  static DEVICE float derivative(float x) {
    float p = logistic(2 * GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    return p + x * p * (1 - p) * 2 * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x);
  }
  static DEVICE void gradient(float &x, float &, float dout) { x = dout * derivative(x); }
};

struct SwiGlu {
  static constexpr bool GATED = true;
  static DEVICE float value(float gate, float up) { return up * (gate * logistic(gate)); }
  static DEVICE void gradient(float &gate, float &up, float dout) {
    float p = logistic(gate), silu = gate * p;
    gate = dout * up * p * (1 + gate * (1 - p));
    up = dout * silu;
  }
};
