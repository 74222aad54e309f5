// The activations: one block a row, 16 bytes at a time (on an H200: SwiGLU 4.2 TB/s, GELU 3.5). Most run in a
// GEMM's epilogue (linear.cu); these recompute what was not kept or find FP8's maximum.
#include "kernels/cuda/activation.cuh"

// out = A(x) or, BACKWARD, the gradient of x: a thread reads its elements before it writes what may take
// their place.
template <typename A, typename T, int W, bool AMAX, bool BACKWARD>
static __global__ void activation_kernel(T *out, const T *dout, const T *x, unsigned *amax, int columns) {
  constexpr int PARTS = A::GATED ? 2 : 1;
  unsigned largest = 0;
  out += (int64_t)blockIdx.x * (BACKWARD ? PARTS : 1) * columns;
  dout += (int64_t)blockIdx.x * columns;
  x += (int64_t)blockIdx.x * PARTS * columns;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float d[W], values[W], up[W] = {};
    if (BACKWARD) load(d, dout + i);
    load(values, x + i);
    if (A::GATED) load(up, x + columns + i);
    EACH (k, W) {
      if (BACKWARD)
        A::gradient(values[k], up[k], d[k]);
      else
        values[k] = A::value(values[k], up[k]);
      largest = max(largest, magnitude(values[k]));
      if (BACKWARD) largest = max(largest, magnitude(up[k]));
    }
    store(out + i, values);
    if (BACKWARD && A::GATED) store(out + columns + i, up);
  }
  if constexpr (AMAX) reduce_amax<T>(amax, largest);
}

template <bool BACKWARD>
static void run(Backend *backend, const char *op, Activation activation, Tensor out, Tensor dout, Tensor x,
                Tensor amax) {
  int64_t rows = x.shape[0], columns = x.shape[1] / (is_gated(activation) ? 2 : 1);
  if (tensor_exists(amax)) cuda_fill_zero(backend, &amax);
  with_access(x.dtype, {out, dout, x}, [&](auto type, auto width) {
    with_bool(tensor_exists(amax), [&](auto wanted) {
      auto launch = [&](auto function) {
        using T = decltype(type);
        launch_kernel(per_row(backend, op, rows, ceil_div(columns, width)),
                      activation_kernel<decltype(function), T, width, wanted, BACKWARD>, data_of<T>(out),
                      data_of<T>(dout), data_of<T>(x), data_of<unsigned>(amax), (int)columns);
      };
      switch (activation) {
      case ACTIVATION_NONE:
        break; // refused
      case ACTIVATION_GELU:
        return launch(Gelu());
      case ACTIVATION_SWIGLU:
        return launch(SwiGlu());
      }
    });
  });
}

void cuda_activation_forward(Backend *backend, const ActivationForward *a) {
  run<false>(backend, "activation_forward", a->activation, a->out, {}, a->x, a->amax);
}

void cuda_activation_backward(Backend *backend, const ActivationBackward *a) {
  run<true>(backend, "activation_backward", a->activation, a->dx, a->dout, a->x, a->amax);
}
