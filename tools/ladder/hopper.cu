// Rung 6 of the ladder: the matmul with the exponential in its epilogue on Hopper: TMA, mbarriers, wgmma, a
// warp that loads and a warpgroup that multiplies. kernels/cuda/hopper_kernel.cuh adds a second consumer,
// clusters and an order of tiles that spares memory.
#include "kernels/cuda/hopper_ptx.cuh"
#include "kernels/lce/loss_row.h"
#include "tools/ladder/ladder.h"

enum { THREADS = 512 };

struct Chunk {
  Tensor x, weight, targets, exps;
  SoftmaxStatistics softmax;
};

template <typename T> static __device__ T *row_of(const Tensor &t, int64_t n) {
  return data_of<T>(t) + n * t.stride;
}

static __device__ float &at(const Tensor &t, int64_t n) {
  return data_of<float>(t)[n];
}

static __device__ int target_of(const Chunk &a, int64_t n) {
  return data_of<int32_t>(a.targets)[n];
}

static __device__ float anchor_of(const Chunk &a, int64_t n) {
  return target_of(a, n) == IGNORE_INDEX ? INFINITY : at(a.softmax.target_z, n); // infinity: exponentials 0
}

// x[n] . W[j], by one warp.
static __device__ float logit(const Chunk &a, int64_t n, int64_t j) {
  const bf16 *x = row_of<bf16>(a.x, n), *w = row_of<bf16>(a.weight, j);
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < a.x.shape[1]; i += 32) sum += to_float(x[i]) * to_float(w[i]);
  return warp_sum(sum);
}

// A ring of stages in shared memory lies between two roles. The producer, one thread, has TMA copy tiles of X
// and W into a stage that is empty. The consumer, a warpgroup, multiplies a stage that is full by wgmma,
// which reads shared memory itself and adds up in registers. So either waits only at a full or an empty ring,
// and the producer fills the stages of the next tile while the consumer is in its epilogue.

// A block computes tiles of 128 x 192, as many sums as a warpgroup's registers hold, and a stage is 64 of the
// hidden size. There is a block per multiprocessor; block b computes tiles b, b + blocks, ...
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
// Logits z of one tile become E and parts of row sums. Thread t has rows t / 32 * 16 + t % 32 / 4 and the one
// 8 below of each 64, and two columns of each 8 (wgmma in hopper_ptx.cuh).
static __device__ void store_exponentials(const Chunk &a, const Tensor &parts, float (&z)[2][COLUMNS / 2],
                                          int m0, int n0) {
  int rows = (int)a.x.shape[0], vocab = (int)a.weight.shape[0], lane = threadIdx.x % 32;
  EACH (half, 2)
    EACH (below, 2) {
      int m = m0 + 64 * half + threadIdx.x / 32 * 16 + lane / 4 + 8 * below, n = n0 + lane % 4 * 2;
      float anchor = m < rows ? anchor_of(a, m) : INFINITY, row_sum = 0;
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
    exponentials_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                        const __grid_constant__ Chunk a, const __grid_constant__ Tensor parts) {
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

// Adds up a row's sum; if out of range, computes the row again, anchored at its maximum. One block per row.
static __global__ void __launch_bounds__(THREADS)
    row_sums_kernel(const __grid_constant__ Chunk a, const __grid_constant__ Tensor parts) {
  int64_t n = blockIdx.x, vocab = a.weight.shape[0];
  float sum = 0, anchor = anchor_of(a, n), target_z = at(a.softmax.target_z, n);
  for (int64_t i = threadIdx.x; i < parts.shape[1]; i += THREADS) sum += row_of<float>(parts, n)[i];
  sum = block_sum(sum);
  if (sum > LCE_LARGEST_SUM) {
    int warp = threadIdx.x / 32, warps = THREADS / 32;
    Ranked largest = 0;
    for (int64_t j = warp; j < vocab; j += warps) largest = max(largest, ranked(logit(a, n, j), 0));
    anchor = ranked_value(block_max(largest));
    sum = 0;
    for (int64_t j = warp; j < vocab; j += warps) {
      float z = logit(a, n, j), e = j == target_of(a, n) ? 0 : __expf(z - anchor);
      if (threadIdx.x % 32 == 0) row_of<bf16>(a.exps, n)[j] = bf16(e), sum += e;
    }
    sum = block_sum(sum);
  }
  if (threadIdx.x) return;
  at(a.softmax.row_sum, n) = sum;
  at(a.softmax.anchor, n) = anchor;
  at(a.softmax.target_e, n) = anchor == target_z || anchor == INFINITY ? 1 : __expf(target_z - anchor);
}

bool ladder_hopper(void) {
  return hopper_has_code((const void *)exponentials_kernel) && tma_encoder();
}

// Describes tiles of `rows` rows and DEPTH columns of t to TMA, zeros outside.
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

void ladder_hopper_exponentials(Backend *backend, Tensor exps, const SoftmaxStatistics *softmax, Tensor x,
                                Tensor weight, Tensor targets) {
  Chunk a = {x, weight, targets, exps, *softmax};
  int64_t count = x.shape[0], across = ceil_div(weight.shape[0], COLUMNS);
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor parts = memory_push_2d(&backend->memory, "parts of row sums", MEMORY_HEAD, DTYPE_F32, count, across);
  int64_t blocks = min_i64(ceil_div(count, ROWS) * across, cuda_state(backend)->multiprocessors);
  launch_kernel({"exponentials", cuda_stream(backend), blocks, CONSUMER + 32, false, HOPPER_SHARED},
                exponentials_kernel, tiles_of(x, ROWS), tiles_of(weight, COLUMNS), a, parts);
  launch_kernel({"row sums", cuda_stream(backend), count, THREADS}, row_sums_kernel, a, parts);
  memory_pop_to(&backend->memory, mark);
}
