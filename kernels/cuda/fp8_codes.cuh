// The kernel that writes a matrix's FP8 codes, as they lie and transposed, if requested. Its values come from
// a source: memory (fp8.cu), or an activation function, which computes them on the way (activation.cu).
//
// A block takes a tile of 128 x 128. A thread reads 8 columns of 4 rows, writes their codes, and puts them
// into shared memory as words of 4 rows of one column. The transposed rows are written from there, 16 bytes
// at a time. Shared memory holds 32 words of a column in 8 chunks of 16 bytes; chunk c lies at c ^ (column /
// 8 mod 8), so neither the words' writes nor the chunks' reads meet in a bank.
#pragma once

#include <cfloat>
#include <cuda_fp8.h>

#include "kernels/cuda/cuda_common.cuh"

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

// A source computes PARTS matrices of `columns` columns each, side by side in the output.
template <typename Type> struct Stored {
  using T = Type;
  static constexpr int PARTS = 1;
  const T *x;
  int64_t columns;
  DEVICE void load(Group<T, GROUP> (&out)[1], int64_t row, int64_t column) const {
    out[0] = *reinterpret_cast<const Group<T, GROUP> *>(x + row * columns + column);
  }
};

// Estimates amax from the largest element of the sampled rows.
static DEVICE unsigned margin_over(const unsigned *sampled, float margin) {
  float largest = __uint_as_float(*sampled), limit = largest * margin;
  return magnitude(isfinite(limit) ? limit : largest);
}

// The amax that scales codes: the one given; a sample's, while the true maximum is found beside it; or this
// maximum, if it exceeds the sample's.
enum Scale { GIVEN, SAMPLED, TRUE_MAXIMUM };

// values: also receives the elements, unless NULL.
template <Scale SCALE, typename Source>
static __global__ void __launch_bounds__(256)
    codes_kernel(Quantized out, typename Source::T *values, Source source, const unsigned *sampled,
                 float margin, int64_t rows) {
  constexpr int PARTS = Source::PARTS;
  __shared__ uint4 column_codes[PARTS][TILE][TILE / 16];
  int64_t columns = source.columns, stride = PARTS * columns;
  int64_t first_row = blockIdx.y * (int64_t)TILE, first_column = blockIdx.x * (int64_t)TILE;
  unsigned *amax = data_of<unsigned>(out.amax), largest = SCALE == GIVEN ? 0 : margin_over(sampled, margin);
  if (SCALE == TRUE_MAXIMUM && *amax == largest) return;
  float factor = fminf(E4M3_MAX / __uint_as_float(SCALE == SAMPLED ? largest : *amax), FLT_MAX);
  uint8_t *codes = data_of<uint8_t>(out.codes), *transposed = data_of<uint8_t>(out.transposed);
  int lane = threadIdx.x % 32;
  EACH (step, 2) { // a warp takes 16 rows of 64 columns
    int place = threadIdx.x / 32 + 8 * step, chunk = place / 2, group = place % 2 * 8 + lane % 8;
    int row_group = 4 * chunk + lane / 8; // 4 rows each
    int64_t row = first_row + 4 * row_group, column = first_column + GROUP * group;
    if (row >= rows || column >= columns) continue;
    Group<typename Source::T, GROUP> made[4][PARTS];
    EACH (r, 4) source.load(made[r], row + r, column);
    EACH (part, PARTS) {
      unsigned half[2][4]; // 4 columns of each row
      EACH (r, 4) {
        const auto &group_values = made[r][part];
        int64_t at = (row + r) * stride + part * columns + column;
        half[0][r] = codes_of(group_values.at, factor), half[1][r] = codes_of(group_values.at + 4, factor);
        if (codes) *reinterpret_cast<uint2 *>(codes + at) = make_uint2(half[0][r], half[1][r]);
        if (SCALE == SAMPLED)
          EACH (k, GROUP) largest = max(largest, magnitude(to_float(group_values.at[k])));
        if (SCALE == SAMPLED && values)
          *reinterpret_cast<Group<typename Source::T, GROUP> *>(values + at) = group_values;
      }
      EACH (h, 2) {
        unsigned words[4];
        transpose_bytes(words, half[h]);
        EACH (c, 4)
          reinterpret_cast<unsigned *>(
              &column_codes[part][GROUP * group + 4 * h + c][chunk ^ (group % 8)])[lane / 8] = words[c];
      }
    }
  }
  if (SCALE == SAMPLED) raise_amax<typename Source::T>(amax, largest);
  if (!transposed) return;
  __syncthreads();
  for (int i = threadIdx.x; i < PARTS * TILE * TILE / 16; i += 256) {
    int part = i / (TILE * TILE / 16), column = i / (TILE / 16) % TILE, chunk = i % (TILE / 16);
    int64_t row = first_row + 16 * chunk;
    if (row < rows && first_column + column < columns)
      *reinterpret_cast<uint4 *>(transposed + (part * columns + first_column + column) * rows + row) =
          column_codes[part][column][chunk ^ (column / GROUP % 8)];
  }
}

template <Scale SCALE, typename Source>
static void launch_codes(Backend *backend, const char *op, const Quantized &out, typename Source::T *values,
                         Source source, const unsigned *sampled, float margin, int64_t rows) {
  Grid grid(ceil_div(source.columns, TILE), ceil_div(rows, TILE));
  launch_kernel({op, cuda_stream(backend), grid, 256}, codes_kernel<SCALE, Source>, out, values, source,
                sampled, margin, rows);
}
