// Launching a GEMM of hopper_kernel.cuh: the device, tensors' descriptions for TMA, rasterisation.
#pragma once

#include "kernels/cuda/hopper_kernel.cuh"

// Facts about the device that the kernels need.
struct Hopper {
  int clusters; // clusters that run at the same time; 0: the kernels do not run
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  unsigned long long *throttle; // ClusterThrottle's counter
};

template <typename K> static KernelLaunch launch_of(Backend *backend, int64_t clusters) {
  return {"a Hopper GEMM", cuda_stream(backend), clusters * CLUSTER, THREADS, true, K::SHARED_BYTES, CLUSTER};
}

static const Hopper &hopper(Backend *backend) {
  return *cuda_state(backend)->hopper;
}

static bool tma_takes(Tensor t) {
  return rows_start_aligned(t, 16) && t.shape[0] > 0 && t.shape[1] > 0 && t.shape[0] <= INT32_MAX &&
         t.shape[1] <= INT32_MAX;
}

// Describes t to TMA in tiles of `rows` by `line` bytes, 128 or 64. parts = 2: its left and right half of the
// columns, a tile of each at once; the second stride is then below the first, which the driver takes.
static CUtensorMap tma_map(Backend *backend, Tensor t, int rows, int line = 128, int parts = 1) {
  CUtensorMap map;
  cuuint64_t bytes = dtype_bytes(t.dtype), columns = (cuuint64_t)(t.shape[1] / parts),
             shape[] = {columns, (cuuint64_t)t.shape[0], (cuuint64_t)parts},
             stride[] = {(cuuint64_t)t.stride * bytes, columns * bytes};
  cuuint32_t tile[] = {(cuuint32_t)(line / bytes), (cuuint32_t)rows, (cuuint32_t)parts}, every[] = {1, 1, 1};
  CUtensorMapDataType type = bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                             : bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  CUresult result = hopper(backend).encode(
      &map, type, parts > 1 ? 3 : 2, t.data, shape, stride, tile, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
      line == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail("cuTensorMapEncodeTiled failed for %s (%d)", tensor_text(t).text, (int)result);
  return map;
}

// Orders a GEMM's tiles. If K is short, a rasterisation group is at most 16 MiB of A, which stays in L2 while
// B streams by; for dX a wave's rows over all columns. No throttle if all of A stays, or with sampling.
template <typename K> static TileScheduler schedule(Backend *backend, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t GROUP_BYTES = 16 << 20;
  TileScheduler s = {};
  s.m = (int)m, s.n = (int)n;
  s.rows = K::CLUSTER_ROWS, s.columns = K::CLUSTER_COLUMNS;
  s.m_tiles = (int)ceil_div(m, K::CLUSTER_ROWS);
  s.n_tiles = (int)ceil_div(n, K::CLUSTER_COLUMNS);
  s.k_steps = (int)ceil_div(k, K::STEP);
  int64_t groups = K::KEEPS_A ? ceil_div(m * k * 2 * TILE_K / K::STEP, GROUP_BYTES)
                              : ceil_div((int64_t)s.m_tiles * s.n_tiles, hopper(backend).clusters);
  s.group = (int)ceil_div(s.m_tiles, max_i64(1, min_i64(s.m_tiles, groups)));
  s.whole = s.work_tiles = s.m_tiles * s.n_tiles;
  s.splits = 1;
  bool all_stays = K::KEEPS_A && s.group == s.m_tiles;
  s.throttle = all_stays || K::SAMPLED || backend->fixed_order ? nullptr : hopper(backend).throttle;
  return s;
}

template <typename K>
static void launch(Backend *backend, const CUtensorMap &a, const CUtensorMap &b, const CUtensorMap &out,
                   const TileScheduler &s, const EpilogueParams &params,
                   const CUtensorMap *gate_up = nullptr) {
  launch_kernel(launch_of<K>(backend, min_i64(hopper(backend).clusters, s.work_tiles)), gemm_kernel<K>, a, b,
                out, gate_up ? *gate_up : out, s, params);
}

// --- dX ----------------------------------------------------------------------------------------------------

static inline bool dx_runs(Backend *backend, Tensor out, Tensor exps, Tensor weight) {
  return exps.dtype == DTYPE_BF16 && hopper_runs(backend) && tma_takes(exps) && tma_takes(weight) &&
         tma_takes(out) && out.shape[1] % WIDTH<bf16> == 0;
}

// out = the sum of the partials, in order: a row of CTAs takes a cluster's tile, a thread four entries.
template <typename K, typename T>
static __global__ void __launch_bounds__(256)
    add_partials_kernel(T *out, int64_t stride, const float *partials,
                        const __grid_constant__ TileScheduler s) {
  pdl_begin();
  const int size = s.rows * s.columns;
  int rest = s.m_tiles * s.n_tiles - s.whole, tile = s.whole + blockIdx.y;
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4, line = i / TILE_N;
  TileCoord at = tile_coord(s, tile);
  int row = at.row + (K::SHARE_A ? line % K::ROWS : line);
  int column = at.column + i % TILE_N + (K::SHARE_A ? line / K::ROWS * TILE_N : 0);
  if (row >= s.m || column >= s.n) return;
  float sum[4];
  load(sum, partials + (int64_t)blockIdx.y * size + i);
  for (int split = 1; split < s.splits; split++) {
    float part[4];
    load(part, partials + ((int64_t)split * rest + blockIdx.y) * size + i);
    EACH (k, 4) sum[k] += part[k];
  }
  store(out + row * stride + column, sum);
}

// Adds up the partials of split tiles, if any.
template <typename K>
static void add_partials(Backend *backend, Tensor out, const float *partials, const TileScheduler &s) {
  if (s.splits == 1) return;
  Grid grid(s.rows * s.columns / 4 / 256, s.m_tiles * s.n_tiles - s.whole);
  with_float(out.dtype, [&](auto type) {
    using T = decltype(type);
    launch_kernel({"the sum of split-K partials", cuda_stream(backend), grid, 256, true},
                  add_partials_kernel<K, T>, data_of<T>(out), out.stride, partials, s);
  });
}

// out = exps weight, by one of two epilogues, with the split tiles' partials in `scratch`.
template <typename StoreBf16, typename StoreF32>
static void launch_dx(Backend *backend, Tensor out, Tensor exps, Tensor weight, const TileScheduler &s,
                      EpilogueParams params, void *scratch) {
  using K = KernelTraits<StoreBf16>;
  CUtensorMap exps_map = tma_map(backend, exps, K::SHARE_A ? K::ROWS / CLUSTER : K::ROWS),
              weight_map = tma_map(backend, weight, K::SHARE_A ? TILE_K : TILE_K / CLUSTER);
  params.out = data_of<float>(out);
  params.out_stride = out.stride;
  params.partials = static_cast<float *>(scratch);
  if (out.dtype == DTYPE_BF16)
    launch<K>(backend, exps_map, weight_map, tma_map(backend, out, STORE_ROWS), s, params);
  else
    launch<KernelTraits<StoreF32>>(backend, exps_map, weight_map, exps_map, s, params);
  add_partials<K>(backend, out, params.partials, s);
}
