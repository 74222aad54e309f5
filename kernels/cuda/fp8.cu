// Quantisation to FP8 (e4m3): one factor for a whole matrix, from its largest element, or one for each row.
//
// Two passes: amax_kernel finds max |x|, unless the kernel that made x has, and cast_kernel rounds x to codes
// and writes them as they lie and transposed, if requested. A bf16 element costs 2, then 4 bytes.
//
// A block of cast_kernel takes a tile of 128 x 128. A thread reads 8 columns of 4 rows, writes their codes,
// and puts the codes into shared memory as words of 4 rows of one column, from which the transposed rows are
// written 16 bytes at a time. Shared memory holds 32 words of a column in 8 pieces of 16 bytes, of which
// piece p lies at p ^ (column / 8 mod 8): so neither the words' writes nor the pieces' reads meet in a bank.
#include <cfloat>
#include <cuda_fp8.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

// From x's end to its start: what made x has left the end in L2, and cast_kernel begins with the start.
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
  reduce_amax<T>(amax, largest);
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

static constexpr int TILE = 128, GROUP = 8; // columns of a thread's group

// The codes of 4 values.
template <typename T> static DEVICE unsigned codes_of(const T *values, float factor) {
  auto pair = [&](int i) -> unsigned {
    float2 scaled = make_float2(to_float(values[i]) * factor, to_float(values[i + 1]) * factor);
    return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
  };
  return pair(0) | pair(2) << 16;
}

// Byte j of out[i] is byte i of in[j].
static DEVICE void transpose_bytes(unsigned (&out)[4], const unsigned (&in)[4]) {
  unsigned low01 = __byte_perm(in[0], in[1], 0x5140), high01 = __byte_perm(in[0], in[1], 0x7362);
  unsigned low23 = __byte_perm(in[2], in[3], 0x5140), high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410), out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410), out[3] = __byte_perm(high01, high23, 0x7632);
}

template <typename T>
static __global__ void __launch_bounds__(256)
    cast_kernel(uint8_t *codes, uint8_t *transposed, const float *amax, const T *x, int64_t rows,
                int64_t columns) {
  __shared__ uint4 column_codes[TILE][TILE / 16];
  int64_t first_row = blockIdx.y * (int64_t)TILE, first_column = blockIdx.x * (int64_t)TILE;
  float factor = fminf(E4M3_MAX / *amax, FLT_MAX);
  int lane = threadIdx.x % 32;
  EACH (step, 2) { // a warp takes 16 rows of 64 columns
    int place = threadIdx.x / 32 + 8 * step, piece = place / 2, group = place % 2 * 8 + lane % 8;
    int row_group = 4 * piece + lane / 8; // of 4 rows
    int64_t row = first_row + 4 * row_group, column = first_column + GROUP * group;
    if (row >= rows || column >= columns) continue;
    Group<T, GROUP> values[4];
    EACH (r, 4) values[r] = *reinterpret_cast<const Group<T, GROUP> *>(x + (row + r) * columns + column);
    unsigned half[2][4]; // 4 columns of each row
    EACH (r, 4) {
      half[0][r] = codes_of(values[r].at, factor), half[1][r] = codes_of(values[r].at + 4, factor);
      if (codes)
        *reinterpret_cast<uint2 *>(codes + (row + r) * columns + column) = make_uint2(half[0][r], half[1][r]);
    }
    EACH (h, 2) {
      unsigned words[4];
      transpose_bytes(words, half[h]);
      EACH (c, 4)
        reinterpret_cast<unsigned *>(
            &column_codes[GROUP * group + 4 * h + c][piece ^ (group % 8)])[lane / 8] = words[c];
    }
  }
  if (!transposed) return;
  __syncthreads();
  for (int i = threadIdx.x; i < TILE * TILE / 16; i += 256) {
    int column = i / (TILE / 16), piece = i % (TILE / 16);
    int64_t row = first_row + 16 * piece;
    if (row < rows && first_column + column < columns)
      *reinterpret_cast<uint4 *>(transposed + (first_column + column) * rows + row) =
          column_codes[column][piece ^ (column / GROUP % 8)];
  }
}

void cuda_quantize(Backend *backend, const Quantize *a) {
  int64_t rows = a->x.shape[0], columns = a->x.shape[1];
  const Fp8 &out = a->out;
  if (!out.amax_known) find_amax(backend, out.amax, a->x);
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    Grid grid(ceil_div(columns, TILE), ceil_div(rows, TILE));
    launch_kernel({"quantize", cuda_stream(backend), grid, 256}, cast_kernel<T>, data_of<uint8_t>(out.codes),
                  data_of<uint8_t>(out.transposed), data_of<float>(out.amax), data_of<T>(a->x), rows,
                  columns);
  });
}

// --- by rows -----------------------------------------------------------------------------------------------

// A warp's: the codes of a row, unless they are NULL, and a lane's part of sum y^2 and sum y code, y = factor x.
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
  return sums.y == 0 ? 1 : sums.x / sums.y / factor;
}

// A warp a row. amax: of all; or NULL: the row's own, which a row's first reading finds.
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

// One block: the scale of all takes the place of amax.
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
  bool all = tensor_count(a->out.scale) == 1; // the scale's place has the maximum until the codes are there
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
