// Gradient filtering on the GPU: which tiles of E count, and the two GEMMs over those.
//
// A block looks at one tile of 128 x 256. Where every entry is below its row's threshold it leaves the tile's mass and
// makes the tile 0; else it leaves -1 and stops, as a rule after a quarter of the tile. Traffic: at most 2 C V bytes
// read, and 2 C V bytes of zeros written where all is filtered, against 4 C V H flops in the two GEMMs.
//
// With those tiles at 0 any dense GEMM gives the filtered gradient, which GPUs other than Hopper do: they save no time.
// On Hopper dX skips steps of V (hopper_gemm.cu), by a list for each 256 rows: a step is skipped when both tiles of E,
// one below the other, are filtered. How many are skipped is known on the device alone, and the bits of a result must not depend
// on what an earlier call reported to the host. So this dX is never left to cuBLASLt, as the unfiltered one may be. dW is
// cuBLASLt's on every GPU, zeros and all.
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

enum { WARPS = 8, ROWS_AT_ONCE = 4 }; // of a warp, between looks at the other warps

// One block a tile, blockIdx.x counting along the rows of tiles.
template <typename T, int W>
static __global__ void __launch_bounds__(WARPS * 32)
    filter_kernel(float *tiles, T *exps, int64_t stride, const float *row_sum, const float *target_e,
                  int rows, int columns, unsigned across, float epsilon) {
  constexpr int PIECES = LCE_FILTER_COLUMNS / (32 * W);
  int first_row = blockIdx.x / across * LCE_FILTER_ROWS, end_row = min(rows, first_row + LCE_FILTER_ROWS);
  int first_column = blockIdx.x % across * LCE_FILTER_COLUMNS + threadIdx.x % 32 * W;
  int warp = threadIdx.x / 32;
  float mass = 0;
  for (int row = first_row; row < end_row; row += WARPS * ROWS_AT_ONCE) {
    bool counts = false;
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
      int n = row + i * WARPS + warp;
      if (n >= end_row) continue;
      float total = row_sum[n] + target_e[n], threshold = epsilon * total, sum = 0;
#pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        int column = first_column + piece * 32 * W;
        if (column >= columns) continue;
        float e[W];
        load(e, exps + (int64_t)n * stride + column);
#pragma unroll
        for (int k = 0; k < W; k++) {
          bool inside = column + k < columns;
          counts |= inside && !(e[k] < threshold); // so that a NaN counts
          sum += inside ? e[k] : 0.0f;
        }
      }
      mass += sum / total;
    }
    if (!__syncthreads_or(counts)) continue;
    if (threadIdx.x == 0) tiles[blockIdx.x] = -1;
    return;
  }
  mass = block_sum(mass);
  if (threadIdx.x == 0) tiles[blockIdx.x] = mass;
  const float zeros[W] = {};
  for (int n = first_row + warp; n < end_row; n += WARPS)
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      int column = first_column + piece * 32 * W;
      if (column < columns) store(exps + (int64_t)n * stride + column, zeros);
    }
}

// One block: adds what the tiles say, in a fixed order.
static __global__ void __launch_bounds__(1024) stats_kernel(float *stats, const float *tiles, int count) {
  float2 sums = make_float2(0, 0);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    float mass = tiles[i];
    if (mass >= 0) sums.x += 1, sums.y += mass;
  }
  sums = block_sum(sums);
  if (threadIdx.x) return;
  stats[0] += sums.x;
  stats[1] += (float)count;
  stats[2] += sums.y;
}

void cuda_lce_filter(Backend *backend, const LceFilter *a) {
  int64_t across = a->tiles.shape[1], count = a->tiles.shape[0] * across;
  if (count == 0) return;
  float *tiles = data_of<float>(a->tiles);
  with_float(a->exps.dtype, [&](auto type) {
    using T = decltype(type);
    with_bool(rows_start_aligned(a->exps, WIDTH<T>), [&](auto wide) {
      constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
      filter_kernel<T, W><<<(unsigned)count, WARPS * 32, 0, cuda_stream(backend)>>>(
          tiles, data_of<T>(a->exps), a->exps.stride, data_of<float>(a->rows.row_sum),
          data_of<float>(a->rows.target_e), (int)a->exps.shape[0], (int)a->exps.shape[1], (unsigned)across,
          a->epsilon);
    });
  });
  stats_kernel<<<1, 1024, 0, cuda_stream(backend)>>>(data_of<float>(a->stats), tiles, (int)count);
  cuda_check_launch("lce_filter");
}

void cuda_lce_filtered_gemms(Backend *backend, const LceFilteredGemms *a) {
  int64_t rows = a->exps.shape[0], vocab_size = a->exps.shape[1];
  if (rows == 0) return;
  size_t list_bytes = cuda_lce_list_bytes(rows, vocab_size);
  char *scratch = data_of<char>(a->workspace);
  size_t bytes = (size_t)a->workspace.shape[0] * sizeof(int32_t) - list_bytes;
  if (!hopper_dx_filtered(backend, a->dx_raw, a->exps, a->weight, data_of<float>(a->tiles),
                          reinterpret_cast<int32_t *>(scratch), scratch + list_bytes, bytes)) {
    Gemm g = gemm_of(a->dx_raw, a->exps, false, a->weight, false);
    cuda_gemm(backend, &g);
  }
  Gemm g = gemm_of(a->dweight, a->exps, true, a->scaled_x, false, a->accumulate);
  g.alpha = a->alpha;
  cuda_gemm(backend, &g);
}
