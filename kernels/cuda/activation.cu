// The activations: one block a row, 16 bytes at a time (on an H200: SwiGLU 4.2 TB/s, GELU 3.5). Most run in a
// GEMM's epilogue (linear.cu); these recompute what was not kept or find FP8's maximum.
#include "kernels/cuda/activation.cuh"

// Calls f with the activation's functions, the element type, an access's width, and whether amax is given.
template <typename F>
static void with_activation(Backend *backend, Activation activation, Tensor amax,
                            std::initializer_list<Tensor> tensors, F f) {
  if (tensor_exists(amax)) cuda_fill_zero(backend, &amax);
  with_access(tensors.begin()->dtype, tensors, [&](auto type, auto width) {
    with_bool(tensor_exists(amax), [&](auto wanted) {
      if (activation == ACTIVATION_GELU)
        f(Gelu(), type, width, wanted);
      else
        f(SwiGlu(), type, width, wanted);
    });
  });
}

template <typename A, typename T, int W, bool AMAX>
static __global__ void activation_forward_kernel(T *out, const T *x, unsigned *amax, int columns) {
  unsigned largest = 0;
  out += (int64_t)blockIdx.x * columns;
  x += (int64_t)blockIdx.x * (A::GATED ? 2 : 1) * columns;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float values[W], up[W] = {};
    load(values, x + i);
    if (A::GATED) load(up, x + columns + i);
    EACH (k, W) {
      values[k] = A::value(values[k], up[k]);
      largest = max(largest, magnitude(values[k]));
    }
    store(out + i, values);
  }
  if constexpr (AMAX) reduce_amax<T>(amax, largest);
}

void cuda_activation_forward(Backend *backend, const ActivationForward *a) {
  int64_t rows = a->out.shape[0], columns = a->out.shape[1];
  with_activation(backend, a->activation, a->amax, {a->out, a->x},
                  [&](auto activation, auto type, auto width, auto amax) {
                    using T = decltype(type);
                    launch_kernel(per_row(backend, "activation_forward", rows, ceil_div(columns, width)),
                                  activation_forward_kernel<decltype(activation), T, width, amax>,
                                  data_of<T>(a->out), data_of<T>(a->x), data_of<unsigned>(a->amax),
                                  (int)columns);
                  });
}

// A thread reads its elements before it writes their gradients, which may take their place.
template <typename A, typename T, int W, bool AMAX>
static __global__ void activation_backward_kernel(T *dx, const T *dout, const T *x, unsigned *amax,
                                                  int columns) {
  unsigned largest = 0;
  dout += (int64_t)blockIdx.x * columns;
  x += (int64_t)blockIdx.x * (A::GATED ? 2 : 1) * columns;
  dx += (int64_t)blockIdx.x * (A::GATED ? 2 : 1) * columns;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float d[W], values[W], up[W] = {};
    load(d, dout + i);
    load(values, x + i);
    if (A::GATED) load(up, x + columns + i);
    EACH (k, W) {
      A::gradient(values[k], up[k], d[k]);
      largest = max(largest, max(magnitude(values[k]), magnitude(up[k])));
    }
    store(dx + i, values);
    if (A::GATED) store(dx + columns + i, up);
  }
  if constexpr (AMAX) reduce_amax<T>(amax, largest);
}

void cuda_activation_backward(Backend *backend, const ActivationBackward *a) {
  int64_t rows = a->dout.shape[0], columns = a->dout.shape[1];
  with_activation(backend, a->activation, a->amax, {a->dout, a->x, a->dx},
                  [&](auto activation, auto type, auto width, auto amax) {
                    using T = decltype(type);
                    launch_kernel(per_row(backend, "activation_backward", rows, ceil_div(columns, width)),
                                  activation_backward_kernel<decltype(activation), T, width, amax>,
                                  data_of<T>(a->dx), data_of<T>(a->dout), data_of<T>(a->x),
                                  data_of<unsigned>(a->amax), (int)columns);
                  });
}
