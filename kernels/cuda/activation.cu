// GELU and SwiGLU: one block a row, 16 bytes at a time, each operand once. So they cost their bytes over the memory's
// bandwidth (on an H200: SwiGLU 4.2 TB/s, GELU 3.5). As a rule they run in a GEMM's epilogue (linear.cu); here they
// recompute what was not kept, or find the maximum that FP8 needs.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/cuda_common.cuh"

// dout: out receives the gradient, which may take dout's place.
template <typename T, int W>
static __global__ void gelu_kernel(T *out, const T *x, const T *dout, int columns) {
  out += (int64_t)blockIdx.x * columns;
  if (dout) dout += (int64_t)blockIdx.x * columns;
  x += (int64_t)blockIdx.x * columns;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float values[W];
    load(values, x + i);
    EACH (k, W) values[k] = dout ? gelu_derivative(values[k]) : gelu(values[k]);
    if (dout) {
      float factors[W];
      load(factors, dout + i);
      EACH (k, W) values[k] *= factors[k];
    }
    store(out + i, values);
  }
}

static void launch_gelu(Backend *backend, const char *op, Tensor out, Tensor x, Tensor dout) {
  int64_t rows = x.shape[0], columns = x.shape[1];
  with_access(x.dtype, {x, out, dout}, [&](auto type, auto width) {
    using T = decltype(type);
    launch_kernel(per_row(backend, op, rows, ceil_div(columns, width)), gelu_kernel<T, width>,
                  data_of<T>(out), data_of<T>(x), data_of<T>(dout), (int)columns);
  });
}

void cuda_gelu_forward(Backend *backend, const GeluForward *a) {
  launch_gelu(backend, "gelu_forward", a->out, a->x, {});
}

void cuda_gelu_backward(Backend *backend, const GeluBackward *a) {
  launch_gelu(backend, "gelu_backward", a->dx, a->x, a->dout);
}

template <typename T, int W, bool AMAX>
static __global__ void swiglu_forward_kernel(T *out, const T *gate_up, unsigned *amax, int columns) {
  unsigned largest = 0;
  out += (int64_t)blockIdx.x * columns;
  gate_up += (int64_t)blockIdx.x * 2 * columns;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float gate[W], up[W];
    load(gate, gate_up + i);
    load(up, gate_up + columns + i);
    EACH (k, W) {
      up[k] *= gate[k] * logistic(gate[k]);
      largest = max(largest, magnitude(up[k]));
    }
    store(out + i, up);
  }
  if constexpr (AMAX) reduce_amax<T>(amax, largest);
}

void cuda_swiglu_forward(Backend *backend, const SwigluForward *a) {
  int64_t rows = a->out.shape[0], columns = a->out.shape[1];
  if (tensor_exists(a->amax)) cuda_fill_zero(backend, &a->amax);
  with_access(a->out.dtype, {a->out, a->gate_up}, [&](auto type, auto width) {
    using T = decltype(type);
    with_bool(tensor_exists(a->amax), [&](auto amax) {
      launch_kernel(per_row(backend, "swiglu_forward", rows, ceil_div(columns, width)),
                    swiglu_forward_kernel<T, width, decltype(amax)::value>, data_of<T>(a->out),
                    data_of<T>(a->gate_up), data_of<unsigned>(a->amax), (int)columns);
    });
  });
}

// A thread reads its gate and up before it writes their gradients, which may take their place.
template <typename T, int W, bool AMAX>
static __global__ void swiglu_backward_kernel(T *dgate_up, const T *dout, const T *gate_up, unsigned *amax,
                                              int columns) {
  unsigned largest = 0;
  dout += (int64_t)blockIdx.x * columns;
  gate_up += (int64_t)blockIdx.x * 2 * columns;
  dgate_up += (int64_t)blockIdx.x * 2 * columns;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float d[W], gate[W], up[W];
    load(d, dout + i);
    load(gate, gate_up + i);
    load(up, gate_up + columns + i);
    EACH (k, W) {
      swiglu_gradient(gate[k], up[k], d[k]);
      largest = max(largest, max(magnitude(gate[k]), magnitude(up[k])));
    }
    store(dgate_up + i, gate);
    store(dgate_up + columns + i, up);
  }
  if constexpr (AMAX) reduce_amax<T>(amax, largest);
}

void cuda_swiglu_backward(Backend *backend, const SwigluBackward *a) {
  int64_t rows = a->dout.shape[0], columns = a->dout.shape[1];
  if (tensor_exists(a->amax)) cuda_fill_zero(backend, &a->amax);
  with_access(a->dout.dtype, {a->dout, a->gate_up, a->dgate_up}, [&](auto type, auto width) {
    using T = decltype(type);
    with_bool(tensor_exists(a->amax), [&](auto amax) {
      launch_kernel(per_row(backend, "swiglu_backward", rows, ceil_div(columns, width)),
                    swiglu_backward_kernel<T, width, decltype(amax)::value>, data_of<T>(a->dgate_up),
                    data_of<T>(a->dout), data_of<T>(a->gate_up), data_of<unsigned>(a->amax), (int)columns);
    });
  });
}
