// Sampling the tiles of the softmax gradient on the GPU: the draws, and the two GEMMs over the kept tiles.
//
// The logits-exp pass has left each row's sum for each tile, so a tile's mass takes 128 reads and E stays where it is. A
// block draws for 32 tiles side by side, then multiplies those that are kept with a probability below 1.
// Traffic for a chunk: 4 C V / 192 bytes of row sums, and 4 C V bytes of E times the share of such tiles, a tenth as a rule.
//
// On Hopper both GEMMs walk lists of k-steps (hopper_gemm.cu): dX one for a tile's rows, dW one for a tile's columns, where an
// empty list leaves those rows of dW unread and unwritten. Which steps these are is known on the device alone, and nothing
// about them is reported to the host: the bits of a result do not depend on an earlier call. On other GPUs both GEMMs are
// cuBLASLt's over all of E, with zeros in dropped tiles: no time is saved. So are they on Hopper where most tiles are
// expected to be kept, with the kernels and the bits of the exact gradient.
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

// A tile of E times factor, by a whole block; 0 times anything is 0.
template <typename T, int W>
static __device__ __forceinline__ void scale_tile(const Tensor &exps, int64_t b, int64_t t, float factor) {
  constexpr int GROUPS = LCE_TILE_COLUMNS / W;
  for (int i = threadIdx.x; i < LCE_TILE_ROWS * GROUPS; i += blockDim.x) {
    int64_t row = b * LCE_TILE_ROWS + i / GROUPS, column = t * LCE_TILE_COLUMNS + i % GROUPS * W;
    if (row >= exps.shape[0] || column >= exps.shape[1]) continue;
    T *at = data_of<T>(exps) + row * exps.stride + column;
    float e[W] = {};
    if (factor > 0) load(e, at);
#pragma unroll
    for (int k = 0; k < W; k++) e[k] *= factor;
    store(at, e);
  }
}

// min(1, mass / full_mass), rounded to the nearest power of two; 1 for a NaN.
static __device__ __forceinline__ float keep_probability(float mass, float full_mass) {
  if (!(mass < full_mass)) return 1;
  if (mass <= 0) return 0;
  int exponent;
  float mantissa = frexpf(fmaxf(mass / full_mass, 0x1p-126f), &exponent); // the quotient may underflow
  return ldexpf(mantissa < 0.70710678f ? 0.5f : 1.0f, exponent);
}

template <typename T, int W>
static __global__ void __launch_bounds__(THREADS)
    sample_tiles_kernel(const __grid_constant__ LceSampleTiles a, uint64_t key) {
  __shared__ float part[WARPS][32], factor[32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t across = a.tiles.shape[1], t = (int64_t)blockIdx.x * 32 + lane, b = blockIdx.y;
  int64_t first = b * LCE_TILE_ROWS, end = min(a.exps.shape[0], first + LCE_TILE_ROWS);
  const float *row_sum = data_of<float>(a.rows.row_sum), *target_e = data_of<float>(a.rows.target_e);
  const float *tile_sums = data_of<float>(a.tile_sums);
  float mass = 0;
#pragma unroll 8
  for (int64_t n = first + warp; n < end; n += WARPS)
    if (t < across)
      mass += tile_sums[n * across + t] * (read(a.rows.rescale, n, 1) / (row_sum[n] + target_e[n]));
  part[warp][lane] = mass;
  __syncthreads();
  if (warp == 0) {
    mass = 0;
    for (int i = 0; i < WARPS; i++) mass += part[i][lane];
    float q = keep_probability(mass, a.full_mass);
    bool kept = counter_uniform(key, (uint64_t)(b * across + t)) < (double)q;
    factor[lane] = t < across && kept ? 1 / q : 0;
    if (t < across) data_of<float>(a.tiles)[b * across + t] = kept ? 1 / q : -mass;
  }
  __syncthreads();
  for (int i = 0; i < 32; i++)
    if (factor[i] > 1) scale_tile<T, W>(a.exps, b, (int64_t)blockIdx.x * 32 + i, factor[i]);
}

// One block: adds what the tiles say, in a fixed order.
static __global__ void __launch_bounds__(1024) stats_kernel(float *stats, const float *tiles, int64_t count) {
  float2 sums = make_float2(0, 0);
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    float tile = tiles[i];
    if (!(tile > 0)) sums.x += 1, sums.y -= tile;
  }
  sums = block_sum(sums);
  if (threadIdx.x) return;
  stats[0] += sums.x;
  stats[1] += (float)count;
  stats[2] += sums.y;
}

template <typename T, int W>
static __global__ void __launch_bounds__(THREADS)
    zero_dropped_kernel(const __grid_constant__ Tensor exps, const float *tiles) {
  if (!(tiles[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] > 0))
    scale_tile<T, W>(exps, blockIdx.y, blockIdx.x, 0);
}

template <typename F> static void with_exps(Tensor exps, F f) {
  with_float(exps.dtype, [&](auto type) {
    using T = decltype(type);
    with_bool(rows_start_aligned(exps, WIDTH<T>), [&](auto wide) {
      f(type, std::integral_constant < int, decltype(wide)::value ? WIDTH<T> : 1 > ());
    });
  });
}

void cuda_lce_sample_tiles(Backend *backend, const LceSampleTiles *a) {
  int64_t blocks = a->tiles.shape[0], across = a->tiles.shape[1];
  if (blocks == 0) return;
  dim3 grid((unsigned)ceil_div(across, 32), (unsigned)blocks);
  with_exps(a->exps, [&](auto type, auto width) {
    launch_kernel({"lce_sample_tiles", cuda_stream(backend), grid, THREADS},
                  sample_tiles_kernel<decltype(type), width>, *a, counter_key(a->seed, a->stream));
  });
  launch_kernel({"lce_sample_tiles", cuda_stream(backend), dim3(1), 1024}, stats_kernel,
                data_of<float>(a->stats), data_of<float>(a->tiles), blocks * across);
}

// What a dense GEMM needs.
static void zero_dropped(Backend *backend, Tensor exps, Tensor tiles) {
  dim3 grid((unsigned)tiles.shape[1], (unsigned)tiles.shape[0]);
  with_exps(exps, [&](auto type, auto width) {
    launch_kernel({"zeros in dropped tiles", cuda_stream(backend), grid, THREADS},
                  zero_dropped_kernel<decltype(type), width>, exps, data_of<float>(tiles));
  });
}

void cuda_lce_sampled_dx(Backend *backend, const LceSampledDx *a) {
  if (a->exps.shape[0] == 0) return;
  void *scratch = a->workspace.data;
  size_t bytes = (size_t)a->workspace.shape[0] * sizeof(int32_t);
  if (!a->dense && hopper_sampled_dx(backend, a->dx_raw, a->exps, a->weight, a->tiles, scratch, bytes))
    return;
  zero_dropped(backend, a->exps, a->tiles);
  bytes = cuda_lce_tiles_bytes(a->exps.shape[0], a->exps.shape[1]); // as without sampling
  if (hopper_dx(backend, a->dx_raw, a->exps, a->weight, scratch, bytes, false)) return;
  Gemm g = gemm_of(a->dx_raw, a->exps, false, a->weight, false);
  cuda_gemm(backend, &g);
}

void cuda_lce_dweight(Backend *backend, const LceDweight *a) {
  if (tensor_exists(a->tiles) && a->exps.shape[0]) {
    if (!a->dense && hopper_sampled_dweight(backend, a)) return;
    zero_dropped(backend, a->exps, a->tiles);
  }
  LinearBackwardWeight dense = {.dweight = a->dweight,
                                .dout = a->exps,
                                .x = a->scaled_x,
                                .alpha = a->alpha,
                                .accumulate = a->accumulate};
  cuda_linear_backward_weight(backend, &dense);
}
