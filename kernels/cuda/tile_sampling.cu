// Sampling the tiles of the softmax gradient on the GPU: the draws, and the two GEMMs over the kept tiles.
//
// The logits-exp pass has left each row's sum for each tile, so a tile's mass takes 128 reads. The kept tiles
// leave E for a buffer, scaled and one after the other, where both GEMMs read them (hopper_gemm.cu):
//  E [C, V]  --gather-->  panels of kept tiles, of up to CUDA_KEPT_CHUNKS chunks  --dW when full-->  dweight
//                                   \--dX, in each chunk-->  dx_raw
// A GEMM walks lists of k-steps: dX has one for a tile's rows, dW one for a tile's columns. Only the device
// knows which tiles are kept: the host launches dW in every chunk, and a kernel of one block says whether
// there is work. Slots go to columns of tiles in their order, which fixes the order of sums.
// lce/REFERENCE.md ("Sampling the gradient's tiles") says why tiles are copied. Other GPUs do not sample.
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

enum { THREADS = 256, WARPS = THREADS / 32, ONE_BLOCK = 1024 };

// --- draws -------------------------------------------------------------------------------------------------

// A block sums the masses of 32 tiles side by side.
static __global__ void __launch_bounds__(THREADS)
    tile_masses_kernel(const __grid_constant__ LceSampledGradients a) {
  pdl_begin();
  __shared__ float part[WARPS][32], row_scale[LCE_TILE_ROWS]; // the factor of a row's sums
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t across = a.tiles.shape[1], t = (int64_t)blockIdx.x * 32 + lane, b = blockIdx.y;
  int64_t first = b * LCE_TILE_ROWS, end = min(a.exps.shape[0], first + LCE_TILE_ROWS);
  const float *row_sum = data_of<float>(a.softmax.row_sum), *target_e = data_of<float>(a.softmax.target_e);
  const float *tile_sums = data_of<float>(a.tile_sums);
  for (int64_t n = first + threadIdx.x; n < end; n += THREADS)
    row_scale[n - first] = read(a.softmax.rescale, n, 1) / (row_sum[n] + target_e[n]);
  __syncthreads();
  float mass = 0;
#pragma unroll 16
  for (int64_t n = first + warp; n < end; n += WARPS)
    if (t < across) mass += tile_sums[n * across + t] * row_scale[n - first];
  part[warp][lane] = mass;
  __syncthreads();
  if (warp || t >= across) return;
  mass = 0;
  for (int i = 0; i < WARPS; i++) mass += part[i][lane];
  data_of<float>(a.tiles)[b * across + t] = mass;
}

// min(1, mass / full_mass), rounded to a power of two, by at most sqrt(2), from 2^-32 on; 1 for a NaN.
static DEVICE float keep_probability(float mass, float full_mass) {
  if (!(mass < full_mass)) return 1;
  if (mass <= 0) return 0;
  int exponent;
  float mantissa = frexpf(fmaxf(mass / full_mass, 0x1p-126f), &exponent); // the quotient may underflow
  return fmaxf(0x1p-32f, ldexpf(mantissa < 0.70710678f ? 0.5f : 1.0f, exponent));
}

// Sums `mine` over the threads before this one, and over all into *all; run by a whole block of ONE_BLOCK.
static __device__ uint2 sum_before(uint2 mine, uint2 *all) {
  __shared__ uint2 warp_sums[ONE_BLOCK / 32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint2 sum = mine;
  for (int i = 1; i < 32; i *= 2) {
    unsigned x = __shfl_up_sync(~0u, sum.x, i), y = __shfl_up_sync(~0u, sum.y, i);
    if (lane >= i) sum.x += x, sum.y += y;
  }
  __syncthreads(); // a call before has read warp_sums
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint2 before = make_uint2(sum.x - mine.x, sum.y - mine.y);
  *all = make_uint2(0, 0);
  for (int i = 0; i < ONE_BLOCK / 32; i++) {
    if (i == warp) before.x += all->x, before.y += all->y;
    all->x += warp_sums[i].x, all->y += warp_sums[i].y;
  }
  return before;
}

// Consecutive columns of tiles for each thread.
struct Columns {
  int begin, end;
  __device__ Columns(int across) {
    int each = (across + ONE_BLOCK - 1) / ONE_BLOCK;
    begin = min(across, (int)threadIdx.x * each), end = min(across, begin + each);
  }
};

// Turns masses into 1 / q (kept) or -m, one block per row of tiles; sums of q in units of 2^-32, modulo 1.
static __global__ void __launch_bounds__(ONE_BLOCK)
    draw_tiles_kernel(float *tiles, int across, float full_mass, uint64_t key) {
  pdl_begin();
  float *row = tiles + (int64_t)blockIdx.x * across;
  Columns mine(across);
  auto step = [&](int t) { return (uint64_t)(keep_probability(row[t], full_mass) * 0x1p32f); };
  uint2 own_sum = make_uint2(0, 0), all;
  for (int t = mine.begin; t < mine.end; t++) own_sum.x += (uint32_t)step(t);
  uint32_t sum = (uint32_t)(random_bits_of(key, blockIdx.x) >> 32) + sum_before(own_sum, &all).x;
  for (int t = mine.begin; t < mine.end; t++) {
    uint64_t q = step(t);
    row[t] = sum + q >= (uint64_t)1 << 32 ? 0x1p32f / (float)q : -row[t];
    sum += (uint32_t)q;
  }
}

// Adds the tiles' counts and lost mass to the statistics, in a fixed order. Run by a block.
static __device__ void add_stats(float *stats, const float *tiles, int64_t count) {
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

// --- the buffer of kept tiles ------------------------------------------------------------------------------

// Writes dW's lists for the buffer's tiles, and marks the buffer empty. Columns without a tile have no list,
// unless dweight is written for the first time: then one step beyond A and B, zeros from TMA. Run by a block.
static __device__ void make_dweight_lists(const KeptTiles &k, KeptState state, int across) {
  int end_x = (int)k.x.shape[0], end_panels = (int)k.panels.shape[0];
  bool begun = state.begun;
  Columns mine(across);
  auto tiles_of = [&](int t) {
    int count = 0;
    for (int c = 0; c < state.chunks; c++)
      count += k.starts[c * (across + 1) + t + 1] - k.starts[c * (across + 1) + t];
    return count;
  };
  auto steps_of = [&](int tiles) { return tiles ? tiles * (LCE_TILE_ROWS / 64) : begun ? 0 : 1; };
  uint2 count = make_uint2(0, 0), all; // columns, steps
  for (int t = mine.begin; t < mine.end; t++) {
    int steps = steps_of(tiles_of(t));
    count.x += steps > 0, count.y += steps;
  }
  uint2 at = sum_before(count, &all);
  for (int t = mine.begin; t < mine.end; t++) {
    int tiles = tiles_of(t), steps = steps_of(tiles);
    if (!steps) continue;
    k.columns[1 + at.x] = t;
    k.lists[at.x++] = {(int)at.y, steps};
    if (!tiles) k.steps[at.y++] = {end_x, end_panels};
    for (int c = 0; c < state.chunks; c++)
      for (int slot = k.starts[c * (across + 1) + t]; slot < k.starts[c * (across + 1) + t + 1]; slot++)
        for (int half = 0; half < LCE_TILE_ROWS; half += 64)
          k.steps[at.y++] = {k.x_begin[slot] + half, slot * CUDA_TILE_PANELS * LCE_TILE_ROWS + half};
  }
  if (threadIdx.x) return;
  k.columns[0] = (int)all.x;
  *k.state = {.kept = 0, .chunks = 0, .begun = 1, .accumulate = begun};
}

static __global__ void __launch_bounds__(ONE_BLOCK)
    flush_kernel(const __grid_constant__ KeptTiles k, int across) {
  pdl_begin();
  KeptState state = *k.state;
  __syncthreads();
  make_dweight_lists(k, state, across);
}

// Gives a chunk's kept tiles slots, column after column; dW's lists first if they do not fit.
static __global__ void __launch_bounds__(ONE_BLOCK)
    place_kernel(const __grid_constant__ KeptTiles k, float *stats, const float *tiles, int blocks,
                 int across, bool first, bool accumulate) {
  pdl_begin();
  add_stats(stats, tiles, (int64_t)blocks * across);
  KeptState state =
      first ? KeptState{.kept = 0, .chunks = 0, .begun = accumulate, .accumulate = 0} : *k.state;
  Columns mine(across);
  uint2 count = make_uint2(0, 0), all;
  for (int t = mine.begin; t < mine.end; t++)
#pragma unroll 8
    for (int b = 0; b < blocks; b++) count.x += tiles[(int64_t)b * across + t] > 0;
  int slot = (int)sum_before(count, &all).x, chunk_tiles = (int)all.x;
  // An empty buffer is not flushed: NaNs may keep more than fits, and dweight waits for a second chunk.
  if (state.chunks && (state.kept + chunk_tiles > k.capacity || state.chunks == CUDA_KEPT_CHUNKS)) {
    make_dweight_lists(k, state, across);
    state = {.kept = 0, .chunks = 0, .begun = 1};
    __syncthreads();
  } else if (threadIdx.x == 0) {
    k.columns[0] = 0;
  }
  slot += state.kept;
  int capacity = (int)k.capacity, *starts = k.starts + state.chunks * (across + 1);
  for (int t = mine.begin; t < mine.end; t++) {
    starts[t] = min(capacity, slot);
    for (int b = 0; b < blocks; b++) {
      bool kept = tiles[(int64_t)b * across + t] > 0 && slot < capacity;
      k.slots[(int64_t)b * across + t] = kept ? slot : -1;
      if (kept) k.x_begin[slot++] = (int)(state.chunks * k.chunk_rows) + b * LCE_TILE_ROWS;
    }
  }
  if (threadIdx.x) return;
  starts[across] = min(capacity, state.kept + chunk_tiles);
  k.state->kept = starts[across], k.state->chunks = state.chunks + 1, k.state->begun = state.begun;
}

// Copies 8 columns of a row of bf16, times factor; zeros beyond the row's end.
static DEVICE void copy_group(bf16 *to, const bf16 *from, int64_t columns, float factor) {
  float v[8] = {};
  if (columns >= 8)
    load(v, from);
  else
    for (int i = 0; i < columns; i++) v[i] = (float)from[i];
  EACH (i, 8) v[i] *= factor;
  store(to, v);
}

// Block (X_BLOCKS + t, b) copies tile (b, t) into its slot; (i, b) an X_BLOCKS-th of scaled_x, zeros beyond.
enum { X_BLOCKS = 16, X_ROWS = LCE_TILE_ROWS / X_BLOCKS };

static __global__ void __launch_bounds__(THREADS)
    gather_kernel(const __grid_constant__ KeptTiles k, const __grid_constant__ Tensor exps,
                  const __grid_constant__ Tensor scaled_x, const float *tiles) {
  pdl_begin();
  constexpr int GROUPS = LCE_TILE_COLUMNS / 8, OF_PANEL = CUDA_PANEL_COLUMNS / 8;
  int b = blockIdx.y, t = (int)blockIdx.x - X_BLOCKS, across = (int)gridDim.x - X_BLOCKS;
  int64_t first_row = (int64_t)b * LCE_TILE_ROWS, rows = exps.shape[0] - first_row;
  if (t < 0) {
    int64_t hidden = scaled_x.shape[1], row = first_row + (int64_t)blockIdx.x * X_ROWS;
    int64_t inside = (scaled_x.shape[0] - row) * hidden; // may be negative
    bf16 *to = data_of<bf16>(k.x) + ((k.state->chunks - 1) * k.chunk_rows + row) * hidden;
    const bf16 *from = data_of<bf16>(scaled_x) + row * hidden;
#pragma unroll 4
    for (int64_t i = threadIdx.x * 8; i < X_ROWS * hidden; i += THREADS * 8)
      copy_group(to + i, from + i, i < inside ? 8 : 0, 1);
    return;
  }
  int slot = k.slots[(int64_t)b * across + t];
  if (slot < 0) return;
  float factor = tiles[(int64_t)b * across + t];
  int64_t column = (int64_t)t * LCE_TILE_COLUMNS;
  const bf16 *from = data_of<bf16>(exps) + first_row * exps.stride + column;
  bf16 *to = data_of<bf16>(k.panels) + (int64_t)slot * LCE_TILE_ROWS * LCE_TILE_COLUMNS;
#pragma unroll 4
  for (int i = threadIdx.x; i < LCE_TILE_ROWS * GROUPS; i += THREADS) {
    int row = i / GROUPS, group = i % GROUPS;
    int at = (group / OF_PANEL * LCE_TILE_ROWS + row) * CUDA_PANEL_COLUMNS + group % OF_PANEL * 8;
    copy_group(to + at, from + row * exps.stride + group * 8,
               row < rows ? exps.shape[1] - column - group * 8 : 0, factor);
  }
}

void cuda_lce_sampled_gradients(Backend *backend, const LceSampledGradients *a) {
  int blocks = (int)a->tiles.shape[0], across = (int)a->tiles.shape[1];
  cudaStream_t stream = cuda_stream(backend);
  float *tiles = data_of<float>(a->tiles);
  Grid by_part(ceil_div(across, 32), blocks), by_tile(X_BLOCKS + across, blocks);
  KeptTiles k =
      cuda_kept_tiles(a->kept.data, a->kept_rows, a->weight.shape[0], a->weight.shape[1], a->full_mass);
  launch_kernel({"lce_sampled_gradients", stream, by_part, THREADS, true}, tile_masses_kernel, *a);
  launch_kernel({"draws of tiles", stream, blocks, ONE_BLOCK, true}, draw_tiles_kernel, tiles, across,
                a->full_mass, random_key(a->seed, a->stream));
  launch_kernel({"slots of tiles", stream, 1, ONE_BLOCK, true}, place_kernel, k, data_of<float>(a->stats),
                tiles, blocks, across, a->first, a->accumulate);
  if (!a->first) hopper_sampled_dweight(backend, a->dweight, &k, a->alpha);
  launch_kernel({"gathering of tiles", stream, by_tile, THREADS, true}, gather_kernel, k, a->exps,
                a->scaled_x, tiles);
  if (a->flush) {
    launch_kernel({"lists of tiles", stream, 1, ONE_BLOCK, true}, flush_kernel, k, across);
    hopper_sampled_dweight(backend, a->dweight, &k, a->alpha);
  }
  hopper_sampled_dx(backend, a->dx_raw, &k, a->exps.shape[0], a->weight, a->workspace.data,
                    (size_t)a->workspace.shape[0] * sizeof(int32_t));
}
