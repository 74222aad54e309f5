// Column sums: the gradient of a bias, the second half of a norm's dweight, label smoothing's rank-one terms.
//
// A block sums 32 vectors of columns over a slice of rows, its eight warps every eighth row; a second kernel
// adds the slices' sums. The order of terms is fixed. Traffic: x once, and 1/32 of it or less (on an H200 4.1
// TB/s).
#include "kernels/cuda/cuda_common.cuh"

static constexpr int ROW_WARPS = 8;

template <typename T, int W>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    column_partials(float *partials, const T *x, int64_t rows, int64_t columns, int64_t stride,
                    int64_t slice_rows, const float *coefficients) {
  __shared__ float warp_sums[ROW_WARPS][W][33];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t column = ((int64_t)blockIdx.x * 32 + lane) * W;
  int64_t begin = blockIdx.y * slice_rows, end = min(rows, begin + slice_rows);
  float sum[W] = {};
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = begin + warp; row < end; row += ROW_WARPS) {
      float values[W];
      load(values, x + row * stride + column);
      float factor = coefficients ? coefficients[row] : 1;
      EACH (i, W) sum[i] += factor * values[i];
    }
  }
  EACH (i, W) warp_sums[warp][i][lane] = sum[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * W; i += blockDim.x) {
    float total = 0;
    EACH (w, ROW_WARPS) total += warp_sums[w][i % W][i / W];
    int64_t to = (int64_t)blockIdx.x * 32 * W + i;
    if (to < columns) partials[blockIdx.y * columns + to] = total;
  }
}

template <typename T> struct Outputs { T *data[3]; };

// 32 columns per block; warp g sums slices g, g + 32, ... and the warps' sums are added in their order.
template <typename T>
static __global__ void __launch_bounds__(1024)
    column_totals(Outputs<T> outputs, const float *partials, int64_t slices, int64_t columns, int64_t stride,
                  float alpha, bool accumulate) {
  __shared__ float warp_sums[32][33];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t column = (int64_t)blockIdx.x * 32 + lane;
  float sum = 0;
  T *out = outputs.data[blockIdx.y];
  partials += blockIdx.y * columns;
  if (column < columns) {
#pragma unroll 8
    for (int64_t slice = warp; slice < slices; slice += 32) sum += partials[slice * stride + column];
  }
  warp_sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  float total = 0;
  for (int w = 0; w < 32; w++) total += warp_sums[w][lane];
  total *= alpha;
  if (accumulate) total += to_float(out[column]);
  out[column] = from_float<T>(total);
}

void add_partials(Backend *backend, std::initializer_list<Tensor> outs, const float *partials, int64_t slices,
                  int64_t stride, float alpha, bool accumulate) {
  int64_t columns = tensor_count(*outs.begin());
  with_float(outs.begin()->dtype, [&](auto type) {
    using T = decltype(type);
    Outputs<T> outputs;
    unsigned count = 0;
    for (Tensor out : outs)
      if (tensor_exists(out)) outputs.data[count++] = data_of<T>(out);
    Grid grid(ceil_div(columns, 32), count);
    launch_kernel({"a column sum", cuda_stream(backend), grid, 1024}, column_totals<T>, outputs, partials,
                  slices, columns, stride, alpha, accumulate);
  });
}

void column_sums(Backend *backend, Tensor out, Tensor x, const float *coefficients, float alpha,
                 bool accumulate, float *partials) {
  int64_t rows = x.shape[0], columns = x.shape[1], slices = cuda_column_slices(rows);
  with_access(x.dtype, {x}, [&](auto type, auto width) {
    using T = decltype(type);
    Grid grid(ceil_div(columns, 32 * width), slices);
    launch_kernel({"a column sum", cuda_stream(backend), grid, 32 * ROW_WARPS}, column_partials<T, width>,
                  partials, data_of<T>(x), rows, columns, x.stride, ceil_div(rows, slices), coefficients);
  });
  add_partials(backend, {out}, partials, slices, columns, alpha, accumulate);
}

void cuda_sum_columns(Backend *backend, const SumColumns *a) {
  column_sums(backend, a->sum, a->x, data_of<float>(a->coefficients), a->alpha, a->accumulate,
              data_of<float>(a->workspace));
}

// One block per row.
template <int W>
static __global__ void __launch_bounds__(256) add_outer_kernel(const __grid_constant__ AddOuter a) {
  int width = (int)a.out.shape[1];
  float factor = a.alpha * read(a.rows, blockIdx.x, 1);
  float *out = data_of<float>(a.out) + (int64_t)blockIdx.x * width;
  for (int i = threadIdx.x * W; i < width; i += blockDim.x * W) {
    float values[W], add[W];
    load(values, out + i);
    load(add, data_of<float>(a.columns) + i);
    EACH (k, W) values[k] += factor * add[k];
    store(out + i, values);
  }
}

void cuda_add_outer(Backend *backend, const AddOuter *a) {
  with_width<float>(rows_align({a->out, a->columns}, WIDTH<float>), [&](auto W) {
    launch_kernel(per_row(backend, "add_outer", a->out.shape[0], ceil_div(a->out.shape[1], W)),
                  add_outer_kernel<W>, *a);
  });
}
