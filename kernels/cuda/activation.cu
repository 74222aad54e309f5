// The activations: one block per row, 16 bytes at a time (on an H200: SwiGLU 4.2 TB/s, GELU 3.5). Most run in
// a GEMM's epilogue (linear.cu); these recompute what was not kept, or write FP8 codes: SwiGLU moves 6 bytes
// per element, its gradient 10.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/fp8_codes.cuh"

// Computes W elements of A(x) or, if BACKWARD, of x's gradient, in two parts if gated, and rounds them to T.
template <typename A, typename Type, bool BACKWARD> struct Activated {
  using T = Type;
  static constexpr int PARTS = BACKWARD && A::GATED ? 2 : 1;
  const T *dout, *x;
  int64_t columns;
  template <int W> DEVICE void load(Group<T, W> (&out)[PARTS], int64_t row, int64_t column) const {
    const T *from = x + row * (A::GATED ? 2 : 1) * columns + column;
    float d[W], values[W], up[W] = {};
    if (BACKWARD) ::load(d, dout + row * columns + column);
    ::load(values, from);
    if (A::GATED) ::load(up, from + columns);
    EACH (k, W) {
      if (BACKWARD)
        A::gradient(values[k], up[k], d[k]);
      else
        values[k] = A::value(values[k], up[k]);
      out[0].at[k] = from_float<T>(values[k]);
      if (PARTS == 2) out[PARTS - 1].at[k] = from_float<T>(up[k]);
    }
  }
};

// out may be x: each thread reads its elements before it writes.
template <int W, typename Source>
static __global__ void activation_kernel(typename Source::T *out, Source source) {
  using Values = Group<typename Source::T, W>;
  for (int64_t i = threadIdx.x * W; i < source.columns; i += blockDim.x * W) {
    Values values[Source::PARTS];
    source.load(values, blockIdx.x, i);
    EACH (part, Source::PARTS)
      *reinterpret_cast<Values *>(out + (blockIdx.x * (int64_t)Source::PARTS + part) * source.columns + i) =
          values[part];
  }
}

// Finds the largest magnitude in every `apart`-th row.
template <typename Source>
static __global__ void __launch_bounds__(256) sample_kernel(unsigned *sampled, Source source, int64_t apart) {
  int64_t column = GROUP * (blockIdx.x * 256ll + threadIdx.x);
  unsigned largest = 0;
  if (column < source.columns) {
    Group<typename Source::T, GROUP> values[Source::PARTS];
    source.load(values, blockIdx.y * apart, column);
    EACH (part, Source::PARTS)
      EACH (k, GROUP) largest = max(largest, magnitude(to_float(values[part].at[k])));
  }
  raise_amax<typename Source::T>(sampled, largest);
}

// The last kernel ends at once if no element exceeded the sample's limit. If the values were stored, perhaps
// over their inputs, it reads them back.
template <typename Source>
static void run_to_codes(Backend *backend, const char *op, const Quantized &quantized, Tensor out,
                         Source source, int64_t rows, Tensor workspace) {
  using T = typename Source::T;
  int64_t apart = fp8_rows_apart(rows);
  float margin = apart > 1 ? FP8_MARGIN : 1;
  unsigned *sampled = data_of<unsigned>(workspace); // one element
  cuda_fill_zero(backend, &quantized.amax);
  cuda_fill_zero(backend, &workspace);
  Grid grid(ceil_div(source.columns, GROUP * 256), ceil_div(rows, apart));
  launch_kernel({op, cuda_stream(backend), grid, 256}, sample_kernel<Source>, sampled, source, apart);
  launch_codes<SAMPLED>(backend, op, quantized, data_of<T>(out), source, sampled, margin, rows);
  if (tensor_exists(out)) {
    Stored<T> stored = {data_of<T>(out), Source::PARTS * source.columns};
    launch_codes<TRUE_MAXIMUM>(backend, op, quantized, nullptr, stored, sampled, margin, rows);
  } else {
    launch_codes<TRUE_MAXIMUM>(backend, op, quantized, nullptr, source, sampled, margin, rows);
  }
}

template <bool BACKWARD>
static void run(Backend *backend, const char *op, Activation activation, Tensor out, Tensor dout, Tensor x,
                const Quantized &quantized, Tensor workspace) {
  int64_t rows = x.shape[0], columns = x.shape[1] / (is_gated(activation) ? 2 : 1);
  with_access(x.dtype, {out, dout, x}, [&](auto type, auto width) {
    auto launch = [&](auto function) {
      using T = decltype(type);
      Activated<decltype(function), T, BACKWARD> source = {data_of<T>(dout), data_of<T>(x), columns};
      if (tensor_exists(quantized.amax))
        run_to_codes(backend, op, quantized, out, source, rows, workspace);
      else
        launch_kernel(per_row(backend, op, rows, ceil_div(columns, width)),
                      activation_kernel<width, decltype(source)>, data_of<T>(out), source);
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
}

void cuda_activation_forward(Backend *backend, const ActivationForward *a) {
  run<false>(backend, "activation_forward", a->activation, a->out, {}, a->x, a->quantized, a->workspace);
}

void cuda_activation_backward(Backend *backend, const ActivationBackward *a) {
  run<true>(backend, "activation_backward", a->activation, a->dx, a->dout, a->x, a->quantized, a->workspace);
}
