// Quantisation to FP8 (e4m3): one factor for a whole matrix, from its largest element, or one for each row.
//
// Two passes: amax_kernel finds max |x|, unless the kernel that wrote x did, and codes_kernel rounds x to
// codes. A bf16 element costs 2, then 4 bytes.
#include "kernels/cuda/fp8_codes.cuh"

#include "kernels/cuda/hopper_gemm.h"

// Reads x backwards: the kernel that wrote x left its end in L2, and codes_kernel begins with its start.
template <typename T>
static __global__ void __launch_bounds__(256) amax_kernel(unsigned *amax, const T *x, int64_t groups) {
  constexpr int W = WIDTH<T>;
  unsigned largest = 0;
#pragma unroll 4
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < groups; i += gridDim.x * 256ll) {
    float values[W];
    load(values, x + (groups - 1 - i) * W);
    EACH (k, W) largest = max(largest, magnitude(values[k]));
  }
  raise_amax<T>(amax, largest);
}

static void find_amax(Backend *backend, Tensor amax, Tensor x) {
  cuda_fill_zero(backend, &amax);
  with_float(x.dtype, [&](auto type) {
    using T = decltype(type);
    int64_t groups = tensor_count(x) / WIDTH<T>;
    int64_t blocks = min_i64(ceil_div(groups, 4 * 256), 8 * cuda_state(backend)->multiprocessors);
    launch_kernel({"quantize", cuda_stream(backend), blocks, 256}, amax_kernel<T>, data_of<unsigned>(amax),
                  data_of<T>(x), groups);
  });
}

void cuda_quantize(Backend *backend, const Quantize *a) {
  if (!a->out.amax_known) find_amax(backend, a->out.amax, a->x);
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    Stored<T> x = {data_of<T>(a->x), a->x.shape[1]};
    launch_codes<GIVEN>(backend, "quantize", a->out, nullptr, x, nullptr, 0, a->x.shape[0]);
  });
}

// --- by rows -----------------------------------------------------------------------------------------------

// One warp writes a row's codes, unless they are NULL. Returns a lane's part of sum y^2 and sum y code, y =
// factor x.
template <typename T>
static DEVICE float2 code_row(uint8_t *codes, const T *x, int64_t columns, float factor) {
  constexpr int W = 16; // columns that a lane takes at a time
  float2 sums = {0, 0};
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32 * W; i < columns; i += 32 * W) {
    Group<T, W> values = *reinterpret_cast<const Group<T, W> *>(x + i);
    unsigned words[W / 4];
    EACH (k, W / 4) words[k] = codes_of(values.at + 4 * k, factor);
    if (codes) *reinterpret_cast<uint4 *>(codes + i) = make_uint4(words[0], words[1], words[2], words[3]);
    EACH (k, W) {
      auto code = (__nv_fp8_storage_t)(words[k / 4] >> 8 * (k % 4));
      float y = to_float(values.at[k]) * factor;
      sums.x += y * y;
      sums.y += y * __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
    }
  }
  return sums;
}

static DEVICE float scale_of(float2 sums, float factor) {
  if (sums.y != 0) return sums.x / sums.y / factor;
  return factor < FLT_MAX ? 1 / factor : 1; // the values, if any, are in other rows
}

// One warp per row. amax: the matrix's; NULL: each row's own, for which a row is read twice.
template <typename T>
static __global__ void __launch_bounds__(256)
    rows_kernel(uint8_t *codes, float *scale, const float *amax, const T *x, int64_t rows, int64_t columns) {
  pdl_begin();
  int64_t row = blockIdx.x * 8ll + threadIdx.x / 32;
  if (row >= rows) return;
  x += row * columns, codes += row * columns;
  if (amax) {
    code_row(codes, x, columns, fminf(E4M3_MAX / *amax, FLT_MAX));
    return;
  }
  unsigned largest = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32 * 8; i < columns; i += 256) {
    Group<T, 8> values = *reinterpret_cast<const Group<T, 8> *>(x + i);
    EACH (k, 8) largest = max(largest, magnitude(to_float(values.at[k])));
  }
  float factor = fminf(E4M3_MAX / __uint_as_float(__reduce_max_sync(~0u, largest)), FLT_MAX);
  float2 sums = warp_sum(code_row(codes, x, columns, factor));
  if (threadIdx.x % 32 == 0) scale[row] = scale_of(sums, factor);
}

// One block replaces amax by the whole matrix's scale.
template <typename T>
static __global__ void __launch_bounds__(1024)
    scale_kernel(float *amax, const T *x, int64_t rows, int64_t columns) {
  float factor = fminf(E4M3_MAX / *amax, FLT_MAX);
  float2 sums = {0, 0};
  int64_t step = (rows + FP8_SUMMED_ROWS - 1) / FP8_SUMMED_ROWS;
  for (int64_t row = threadIdx.x / 32 * step; row < rows; row += 32 * step) {
    float2 part = code_row(nullptr, x + row * columns, columns, factor);
    sums.x += part.x, sums.y += part.y;
  }
  sums = block_sum(sums);
  if (threadIdx.x == 0) *amax = scale_of(sums, factor);
}

void cuda_quantize_rows(Backend *backend, const QuantizeRows *a) {
  int64_t rows = a->x.shape[0], columns = a->x.shape[1];
  bool all = tensor_count(a->out.scale) == 1; // the scale's place has the maximum until codes are written
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    const T *x = data_of<T>(a->x);
    uint8_t *codes = data_of<uint8_t>(a->out.codes);
    float *scale = data_of<float>(a->out.scale), *amax = all ? scale : nullptr;
    if (all) find_amax(backend, a->out.scale, a->x);
    launch_kernel({"quantize_rows", cuda_stream(backend), ceil_div(rows, 8), 256, hopper_runs(backend)},
                  rows_kernel<T>, codes, scale, amax, x, rows, columns);
    if (all)
      launch_kernel({"quantize_rows", cuda_stream(backend), 1, 1024}, scale_kernel<T>, scale, x, rows,
                    columns);
  });
}
