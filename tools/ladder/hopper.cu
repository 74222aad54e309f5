// What the ladder does to rows, as kernels: one block a row, one idea at a time. And the matmul with the exponential
// in its epilogue, twice:
//   rung 5  on tensor cores through WMMA, the interface of CUDA C++ itself, with two stages of shared memory. It shows
//           where the exponential belongs and nothing else, at a fraction of cuBLASLt's speed.
//   rung 6  with what Hopper has for it: TMA, mbarriers, wgmma, a warp that loads and a warpgroup that multiplies.
// kernels/cuda/hopper_kernel.cuh adds to rung 6 a second consumer, clusters and an order of tiles that spares memory.
#include <cuda_pipeline.h>
#include <mma.h>

#include "kernels/cuda/hopper_ptx.cuh"
#include "tools/ladder/ladder.h"

enum { THREADS = 512 };

// One block a row.
template <typename... Params, typename... Args>
static void launch_rows(Backend *backend, const char *op, int64_t rows, int threads,
                        void (*kernel)(Params...), const Args &...args) {
  launch_kernel({op, cuda_stream(backend), dim3((unsigned)rows), threads}, kernel, args...);
}

template <typename T> static __device__ T *row_of(const Tensor &t, int64_t n) {
  return data_of<T>(t) + n * t.stride;
}

static __device__ float &at(const Tensor &t, int64_t n) {
  return data_of<float>(t)[n];
}

static __device__ float block_max(float x) {
  __shared__ float of_warp[THREADS / 32];
  for (int offset = 16; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  __syncthreads(); // the previous call's results have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  for (int w = 0; w < THREADS / 32; w++) x = fmaxf(x, of_warp[w]);
  return x;
}

// --- rungs 1 to 3: softmax as it is usually written --------------------------------------------------------

static __global__ void losses_kernel(const __grid_constant__ Tensor loss, const __grid_constant__ Tensor lse,
                                     const __grid_constant__ Tensor logits, const int32_t *targets) {
  int64_t n = blockIdx.x, vocab = logits.shape[1];
  const float *z = row_of<float>(logits, n);
  float maximum = -INFINITY, sum = 0;
  for (int64_t j = threadIdx.x; j < vocab; j += THREADS) maximum = fmaxf(maximum, z[j]);
  maximum = block_max(maximum);
  for (int64_t j = threadIdx.x; j < vocab; j += THREADS) sum += __expf(z[j] - maximum);
  sum = block_sum(sum);
  if (threadIdx.x) return;
  at(lse, n) = maximum + logf(sum);
  at(loss, n) = targets[n] == IGNORE_INDEX ? 0 : at(lse, n) - z[targets[n]];
}

// dlogits may lie in the logits' memory: what a step writes (half as many bytes) has been read by all threads.
static __global__ void gradients_kernel(const __grid_constant__ Tensor dlogits,
                                        const __grid_constant__ Tensor logits,
                                        const __grid_constant__ Tensor lse, const int32_t *targets,
                                        float scale) {
  int64_t n = blockIdx.x, vocab = logits.shape[1], target = targets[n];
  const float *z = row_of<float>(logits, n);
  bf16 *dz = row_of<bf16>(dlogits, n);
  for (int64_t first = 0; first < vocab; first += THREADS) {
    int64_t j = first + threadIdx.x;
    float p = j < vocab ? __expf(z[j] - at(lse, n)) : 0;
    __syncthreads();
    if (j < vocab) dz[j] = target == IGNORE_INDEX ? bf16(0) : bf16(scale * (p - (j == target)));
  }
}

static void losses(Backend *backend, Tensor loss, Tensor lse, Tensor logits, Tensor targets) {
  launch_rows(backend, "losses", logits.shape[0], THREADS, losses_kernel, loss, lse, logits,
              data_of<int32_t>(targets));
}

static void gradients(Backend *backend, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets,
                      float scale) {
  launch_rows(backend, "gradients", logits.shape[0], THREADS, gradients_kernel, dlogits, logits, lse,
              data_of<int32_t>(targets), scale);
}

// --- rungs 4 and 5: anchored at the target -----------------------------------------------------------------

static __device__ int target_of(const Anchored &a, int64_t n) {
  return data_of<int32_t>(a.targets)[n];
}

// x[n] . W[j], by one warp.
static __device__ float logit(const Anchored &a, int64_t n, int64_t j) {
  const bf16 *x = row_of<bf16>(a.x, n), *w = row_of<bf16>(a.weight, j);
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < a.x.shape[1]; i += 32) sum += to_float(x[i]) * to_float(w[i]);
  return warp_sum(sum);
}

static __global__ void anchors_kernel(const __grid_constant__ Anchored a) { // one warp
  int64_t n = blockIdx.x;
  bool counts = target_of(a, n) != IGNORE_INDEX;
  float z = counts ? logit(a, n, target_of(a, n)) : 0;
  if (threadIdx.x) return;
  at(a.target_z, n) = z;
  at(a.anchor, n) = counts ? z : INFINITY; // makes every exponential of the row 0
  at(a.target_e, n) = 1;
}

// E in the logits' place, as gradients_kernel does it.
static __global__ void exponentials_kernel(const __grid_constant__ Anchored a) {
  int64_t n = blockIdx.x, vocab = a.weight.shape[0], target = target_of(a, n);
  bf16 *exps = row_of<bf16>(a.exps, n);
  const float *z = reinterpret_cast<const float *>(exps);
  float sum = 0, anchor = at(a.anchor, n);
  for (int64_t first = 0; first < vocab; first += THREADS) {
    int64_t j = first + threadIdx.x;
    float e = j < vocab && j != target ? __expf(z[j] - anchor) : 0;
    __syncthreads();
    if (j < vocab) exps[j] = bf16(e);
    sum += e;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) at(a.row_sum, n) = sum;
}

// Rows whose sum is out of range, once more; as a rule every block leaves at once.
static __global__ void repair_kernel(const __grid_constant__ Anchored a) {
  int64_t n = blockIdx.x, vocab = a.weight.shape[0];
  if (!(at(a.row_sum, n) > LADDER_SUM_LIMIT)) return;
  int warp = threadIdx.x / 32, warps = THREADS / 32;
  float maximum = -INFINITY, sum = 0;
  for (int64_t j = warp; j < vocab; j += warps) maximum = fmaxf(maximum, logit(a, n, j));
  maximum = block_max(maximum);
  for (int64_t j = warp; j < vocab; j += warps) {
    float z = logit(a, n, j), e = j == target_of(a, n) ? 0 : __expf(z - maximum);
    if (threadIdx.x % 32 == 0) row_of<bf16>(a.exps, n)[j] = bf16(e), sum += e;
  }
  sum = block_sum(sum);
  if (threadIdx.x) return;
  at(a.row_sum, n) = sum;
  at(a.anchor, n) = maximum;
  at(a.target_e, n) = __expf(at(a.target_z, n) - maximum);
}

static __global__ void finish_kernel(const __grid_constant__ Anchored a) {
  int64_t n = blockIdx.x;
  bool counts = target_of(a, n) != IGNORE_INDEX;
  float row_sum = at(a.row_sum, n), target_e = at(a.target_e, n), total = row_sum + target_e; // 1 + R
  float r = counts ? 1 / total : 0;
  for (int64_t i = threadIdx.x; i < a.x.shape[1]; i += THREADS)
    row_of<bf16>(a.scaled_x, n)[i] = bf16(r * to_float(row_of<bf16>(a.x, n)[i]));
  if (threadIdx.x) return;
  float nll = target_e == 1 ? log1pf(row_sum) : at(a.anchor, n) - at(a.target_z, n) + logf(total);
  at(a.loss, n) = counts ? nll : 0;
  at(a.r, n) = r;
  at(a.c, n) = counts ? -row_sum / total : 0;
}

// Several tokens may have one target: atomics, in any order. linear_cross_entropy sorts by target instead, so that
// bits repeat.
static __global__ void add_targets_kernel(const __grid_constant__ Anchored a) {
  int64_t n = blockIdx.x, target = target_of(a, n);
  bf16 *dx = row_of<bf16>(a.dx, n);
  for (int64_t i = threadIdx.x; i < a.x.shape[1]; i += THREADS) {
    if (target == IGNORE_INDEX) {
      dx[i] = bf16(0);
      continue;
    }
    float x = to_float(row_of<bf16>(a.x, n)[i]), w = to_float(row_of<bf16>(a.weight, target)[i]);
    dx[i] = bf16(a.scale * (at(a.r, n) * to_float(dx[i]) + at(a.c, n) * w));
    atomicAdd(row_of<float>(a.dweight, target) + i, a.scale * at(a.c, n) * x);
  }
}

// The rows of a chunk.
template <auto kernel, int threads> static void each_row(Backend *backend, const Anchored *a) {
  launch_rows(backend, "the ladder's rows", a->x.shape[0], threads, kernel, *a);
}

// --- rung 5: X W^T on tensor cores, with the exponential in the epilogue ------------------------------------

namespace wmma = nvcuda::wmma;

// A block of eight warps, four down by two across, makes a tile of 128 x 128, a warp 32 x 64 within it.
enum { TILE = 128, TILE_K = 32, PAD = 8, WARPS_M = 4, WARPS_N = 2, BLOCK = 32 * WARPS_M * WARPS_N };

struct Stage {
  bf16 x[TILE][TILE_K + PAD], w[TILE][TILE_K + PAD]; // padded so that rows start in different banks
};

// Rows [first, first + TILE) and columns [k, k + TILE_K) of a matrix, zeros outside; 16 bytes at a time,
// asynchronously.
static __device__ void copy_tile(bf16 (*to)[TILE_K + PAD], const Tensor &from, int first, int k) {
  constexpr int PIECES = TILE_K / 8;
  for (int i = threadIdx.x; i < TILE * PIECES; i += BLOCK) {
    int row = i / PIECES, column = i % PIECES * 8;
    bool inside = first + row < from.shape[0] && k + column < from.shape[1];
    const bf16 *source = inside ? row_of<bf16>(from, first + row) + k + column : data_of<bf16>(from);
    __pipeline_memcpy_async(&to[row][column], source, 16, inside ? 0 : 16);
  }
}

// parts[row, tile]: the row's sum of exponentials over a tile of columns, so that the order of summation is
// fixed.
static __global__ void __launch_bounds__(BLOCK)
    matmul_exponentials_kernel(const __grid_constant__ Anchored a, const __grid_constant__ Tensor parts) {
  __shared__ __align__(128) Stage stages[2];
  __shared__ float sums[WARPS_N][TILE];
  int rows = (int)a.x.shape[0], hidden = (int)a.x.shape[1], vocab = (int)a.weight.shape[0];
  int m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int warp_m = warp / WARPS_N * (TILE / WARPS_M), warp_n = warp % WARPS_N * (TILE / WARPS_N);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][4];
  for (auto &row : sum)
    for (auto &fragment : row) wmma::fill_fragment(fragment, 0);

  // Mainloop: while one stage is multiplied, the next is on its way.
  auto copy = [&](int stage, int k) {
    copy_tile(stages[stage].x, a.x, m0, k);
    copy_tile(stages[stage].w, a.weight, n0, k);
  };
  copy(0, 0);
  __pipeline_commit();
  for (int k = 0, stage = 0; k < hidden; k += TILE_K, stage ^= 1) {
    if (k + TILE_K < hidden) copy(stage ^ 1, k + TILE_K);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    for (int kk = 0; kk < TILE_K; kk += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major> x[2];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::col_major> w[4]; // W^T
      for (int i = 0; i < 2; i++)
        wmma::load_matrix_sync(x[i], &stages[stage].x[warp_m + 16 * i][kk], TILE_K + PAD);
      for (int j = 0; j < 4; j++)
        wmma::load_matrix_sync(w[j], &stages[stage].w[warp_n + 16 * j][kk], TILE_K + PAD);
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) wmma::mma_sync(sum[i][j], x[i], w[j], sum[i][j]);
    }
    __syncthreads();
  }

  // Epilogue: a fragment's 16 x 16 logits through the warp's own piece of shared memory, two lanes a row.
  float(*patch)[16] = reinterpret_cast<float(*)[16]>(stages) + 16 * warp;
  EACH (i, 2) {
    int row = warp_m + 16 * i + lane / 2, m = m0 + row;
    float anchor = m < rows ? at(a.anchor, m) : INFINITY, row_sum = 0;
    int target = m < rows ? target_of(a, m) : 0;
    EACH (j, 4) {
      wmma::store_matrix_sync(&patch[0][0], sum[i][j], 16, wmma::mem_row_major);
      __syncwarp();
      int column = lane % 2 * 8, n = n0 + warp_n + 16 * j + column;
      float e[8];
      for (int q = 0; q < 8; q++) {
        e[q] = n + q < vocab && n + q != target ? __expf(patch[lane / 2][column + q] - anchor) : 0;
        row_sum += e[q];
      }
      if (m < rows && n < vocab) store(row_of<bf16>(a.exps, m) + n, e); // rows end on 128 bytes
      __syncwarp();
    }
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    if (lane % 2 == 0) sums[warp % WARPS_N][row] = row_sum;
  }
  __syncthreads();
  int row = threadIdx.x;
  if (row < TILE && m0 + row < rows) row_of<float>(parts, m0 + row)[blockIdx.y] = sums[0][row] + sums[1][row];
}

static __global__ void add_parts_kernel(float *row_sum, const __grid_constant__ Tensor parts) { // one warp
  float sum = 0;
  for (int64_t i = threadIdx.x; i < parts.shape[1]; i += 32) sum += row_of<float>(parts, blockIdx.x)[i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) row_sum[blockIdx.x] = sum;
}

// Runs a kernel that leaves parts of row sums, one for `columns` columns of E, and adds these.
template <typename Launch>
static void with_parts(Backend *backend, const Anchored *a, int64_t columns, Launch launch) {
  int64_t rows = a->x.shape[0], hidden = a->x.shape[1], across = ceil_div(a->weight.shape[0], columns);
  if (hidden % 8)
    fail("rungs 5 and 6 copy 8 elements at a time; a hidden size of %d is no multiple", (int)hidden);
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor parts = memory_push_2d(&backend->memory, "parts of row sums", MEMORY_HEAD, DTYPE_F32, rows, across);
  launch(parts);
  launch_rows(backend, "add_parts", rows, 32, add_parts_kernel, data_of<float>(a->row_sum), parts);
  memory_pop_to(&backend->memory, mark);
}

static void matmul_exponentials(Backend *backend, const Anchored *a) {
  with_parts(backend, a, TILE, [&](Tensor parts) {
    dim3 grid((unsigned)ceil_div(a->x.shape[0], TILE), (unsigned)parts.shape[1]);
    launch_kernel({"matmul_exponentials", cuda_stream(backend), grid, BLOCK}, matmul_exponentials_kernel, *a,
                  parts);
  });
}

// --- rung 6: the same on Hopper ----------------------------------------------------------------------------
// A ring of stages in shared memory lies between two roles. The producer, one thread, has TMA copy tiles of X and W into a
// stage that is empty. The consumer, a warpgroup, multiplies a stage that is full by wgmma, which reads shared
// memory itself and adds up in registers. So neither waits for the other but at a full or an empty ring, and the
// producer fills the stages of the next tile while the consumer is in its epilogue.

// A block makes tiles of 128 x 192, as many sums as the registers of a warpgroup hold, and a stage is 64 of the hidden
// size. Blocks are as many as multiprocessors; block b makes tiles b, b + blocks, ...
enum { ROWS = 128, COLUMNS = 192, DEPTH = 64, STAGES = 5, CONSUMER = 128 };
enum { X_BYTES = ROWS * DEPTH * 2, STAGE_BYTES = X_BYTES + COLUMNS * DEPTH * 2 };
enum { HOPPER_SHARED = STAGES * STAGE_BYTES + 1024 }; // stages start on multiples of 1024 bytes

// A place in the ring. Both roles go round it in step; the parity says in which round.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

#if defined(HOPPER_CODE)
// Logits z of one tile become E and parts of row sums. Thread t has rows t / 32 * 16 + t % 32 / 4 and the one 8 below of
// each 64, and two columns of each 8 (wgmma in hopper_ptx.cuh).
static __device__ void store_exponentials(const Anchored &a, const Tensor &parts, float (&z)[2][COLUMNS / 2],
                                          int m0, int n0) {
  int rows = (int)a.x.shape[0], vocab = (int)a.weight.shape[0], lane = threadIdx.x % 32;
  EACH (half, 2)
    EACH (below, 2) {
      int m = m0 + 64 * half + threadIdx.x / 32 * 16 + lane / 4 + 8 * below, n = n0 + lane % 4 * 2;
      float anchor = m < rows ? at(a.anchor, m) : INFINITY, row_sum = 0;
      // Relative to the thread's first column.
      int target = m < rows ? target_of(a, m) - n : 0, end = m < rows ? vocab - n : 0;
      bf16 *exps = row_of<bf16>(a.exps, m) + n;
      EACH (j, COLUMNS / 8) {
        float e[2];
        EACH (q, 2) {
          float logit = z[half][4 * j + 2 * below + q];
          e[q] = 8 * j + q < end && 8 * j + q != target ? __expf(logit - anchor) : 0;
          row_sum += e[q];
        }
        if (8 * j < end) store(exps + 8 * j, e);
      }
      row_sum += __shfl_xor_sync(~0u, row_sum, 1); // four lanes share a row
      row_sum += __shfl_xor_sync(~0u, row_sum, 2);
      if (m < rows && lane % 4 == 0) row_of<float>(parts, m)[n0 / COLUMNS] = row_sum;
    }
}
#endif

static __global__ void __launch_bounds__(CONSUMER + 32, 1)
    hopper_exponentials_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                               const __grid_constant__ Anchored a, const __grid_constant__ Tensor parts) {
#if defined(HOPPER_CODE)
  extern __shared__ uint8_t shared[];
  __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
  uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024;
  int down = ((int)a.x.shape[0] + ROWS - 1) / ROWS, tiles = down * (int)parts.shape[1];
  int steps = ((int)a.x.shape[1] + DEPTH - 1) / DEPTH;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(&full[s], 1);  // the producer arrives, and the bytes it expects
      mbarrier_init(&empty[s], 1); // one thread of the consumer arrives
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  RingPlace place;
  if (threadIdx.x >= CONSUMER) { // the producer
    if (threadIdx.x > CONSUMER) return;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
      for (int k = 0; k < steps; k++, place.next()) {
        uint64_t *filled = &full[place.stage];
        uint32_t stage = stages + place.stage * STAGE_BYTES;
        mbarrier_wait(&empty[place.stage], place.parity ^ 1); // passes in the first round
        mbarrier_arrive_expect_tx(filled, STAGE_BYTES);
        tma_load_2d(stage, &x, filled, k * DEPTH, tile % down * ROWS);
        tma_load_2d(stage + X_BYTES, &w, filled, k * DEPTH, tile / down * COLUMNS);
      }
    return;
  }
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) { // the consumer
    float z[2][COLUMNS / 2];                                     // of 64 rows each
    int previous = 0;
    for (int k = 0; k < steps; k++, place.next()) {
      uint32_t stage = stages + place.stage * STAGE_BYTES;
      uint64_t x_rows = descriptor(stage, true), w_rows = descriptor(stage + X_BYTES, true);
      mbarrier_wait(&full[place.stage], place.parity);
      wgmma_fence();
      EACH (i, DEPTH / 16) // 16 columns are 32 bytes, 64 rows 8192
        EACH (half, 2)
          wgmma<COLUMNS, false, false>(z[half], descriptor_advance(x_rows, half * 8192 + i * 32),
                                       descriptor_advance(w_rows, i * 32), k > 0 || i > 0);
      wgmma_commit();
      wgmma_wait<1>(); // all but this step's: the stage before has been read
      if (k > 0 && threadIdx.x == 0) mbarrier_arrive(&empty[previous]);
      previous = place.stage;
    }
    wgmma_wait<0>();
    if (threadIdx.x == 0) mbarrier_arrive(&empty[previous]);
    store_exponentials(a, parts, z, tile % down * ROWS, tile / down * COLUMNS);
  }
#else
  __trap(); // never launched there: ladder_hopper()
#endif
}

bool ladder_hopper(void) {
  return hopper_has_code((const void *)hopper_exponentials_kernel) && tma_encoder();
}

// How TMA finds tiles of `rows` rows and DEPTH columns of t, zeros outside.
static CUtensorMap tiles_of(Tensor t, int rows) {
  CUtensorMap map;
  cuuint64_t shape[] = {(cuuint64_t)t.shape[1], (cuuint64_t)t.shape[0]},
             stride[] = {(cuuint64_t)t.stride * 2};
  cuuint32_t tile[] = {DEPTH, (cuuint32_t)rows}, every[] = {1, 1};
  CUresult result = tma_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, t.data, shape, stride, tile,
                                  every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail("TMA cannot describe %s (error %d)", tensor_text(t).text, (int)result);
  return map;
}

static void hopper_exponentials(Backend *backend, const Anchored *a) {
  with_parts(backend, a, COLUMNS, [&](Tensor parts) {
    int64_t tiles = ceil_div(a->x.shape[0], ROWS) * parts.shape[1];
    int64_t blocks = min_i64(tiles, cuda_state(backend)->multiprocessors);
    launch_kernel({"hopper_exponentials", cuda_stream(backend), dim3((unsigned)blocks), CONSUMER + 32, false,
                   HOPPER_SHARED},
                  hopper_exponentials_kernel, tiles_of(a->x, ROWS), tiles_of(a->weight, COLUMNS), *a, parts);
  });
}

const LadderRows ladder_rows_cuda = {losses,
                                     gradients,
                                     each_row<anchors_kernel, 32>,
                                     each_row<exponentials_kernel, THREADS>,
                                     matmul_exponentials,
                                     hopper_exponentials,
                                     each_row<repair_kernel, THREADS>,
                                     each_row<finish_kernel, THREADS>,
                                     each_row<add_targets_kernel, THREADS>};
