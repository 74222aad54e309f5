// Quantisation to FP8 (e4m3): one factor for a whole matrix, from its largest element.
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
  if (!out.amax_known) cuda_fill_zero(backend, &out.amax);
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    int64_t groups = rows * columns / WIDTH<T>;
    int64_t blocks = min_i64(ceil_div(groups, 4 * 256), 8 * cuda_state(backend)->multiprocessors);
    if (out.amax_known) blocks = 0; // then it is not launched
    launch_kernel({"quantize", cuda_stream(backend), blocks, 256}, amax_kernel<T>,
                  data_of<unsigned>(out.amax), data_of<T>(a->x), groups);
    Grid grid(ceil_div(columns, TILE), ceil_div(rows, TILE));
    launch_kernel({"quantize", cuda_stream(backend), grid, 256}, cast_kernel<T>, data_of<uint8_t>(out.codes),
                  data_of<uint8_t>(out.transposed), data_of<float>(out.amax), data_of<T>(a->x), rows,
                  columns);
  });
}
