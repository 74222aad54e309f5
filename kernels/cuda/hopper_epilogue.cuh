// What a consumer of the GEMMs on Hopper (hopper_kernel.cuh) does with a tile's accumulators: it stores them, adds them,
// or makes the loss's exponentials, SwiGLU or its gradient of them.
#ifndef LCE_KERNELS_CUDA_HOPPER_EPILOGUE_CUH
#define LCE_KERNELS_CUDA_HOPPER_EPILOGUE_CUH

#include <math.h>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/hopper_tiles.cuh"

#if defined(HOPPER_CODE)

// --- LM head and loss --------------------------------------------------------------------------------------

// A warp's 16 rows by TILE_N columns, through its buffer, in tiles of 64 columns.
static __device__ __forceinline__ void epilogue_store_bf16(const CUtensorMap *out, uint32_t buffer,
                                                           const float *acc, int x, int y, int lane) {
#pragma unroll
  for (int part = 0; part < TILE_N / 64; part++) {
    if (lane == 0) tma_store_wait_read<0>(); // the buffer's previous contents have been read
    __syncwarp();
    int row = lane % 16;
#pragma unroll
    for (int j = 0; j < 8;
         j += 2) { // lanes 0 to 15 address rows of columns [8 j, 8 j + 8), others the next 8
      int chunk = (j + lane / 16) ^ (row & 7);
      const float *v = acc + part * 32 + j * 4;
      stmatrix_x4(buffer + row * 128 + chunk * 16, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                  pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      tma_store_2d(out, buffer, x + part * 64, y);
      tma_store_commit();
    }
  }
}

// fp32, straight from the registers: four lanes write 32 bytes of a row.
static __device__ __forceinline__ void epilogue_store_f32(float *out, int64_t stride, int rows, int columns,
                                                          const float *acc, const ThreadCoord &me) {
#pragma unroll
  for (int below = 0; below < 2; below++) {
    if (me.lane / 4 + 8 * below >= rows) continue;
    float *to = out + (int64_t)(me.lane / 4 + 8 * below) * stride + me.column;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++)
      if (me.column + 8 * j < columns)
        *reinterpret_cast<float2 *>(to + 8 * j) =
            make_float2(acc[4 * j + 2 * below], acc[4 * j + 2 * below + 1]);
  }
}

// Logits into E, in place: 2^(z scale - a scale), one FMA and one ex2. row_sums: E over the thread's entries of
// its two rows, in fp32. The product anchor * scale is rounded once per row, which shifts all of the row's E by one
// factor; the sum is corrected by the rounding error. Only tiles with a target or with columns beyond V mask entries.
static __device__ __forceinline__ void epilogue_exp(float (&z)[TILE_N / 2], float (&row_sums)[2],
                                                    const TileScheduler &s, const EpilogueParams &params,
                                                    int row, int first_column, int column) {
  constexpr float LN_2 = 0.6931471805599453f;
  float shift[2], correction[2];
  int target[2];
  bool masked = first_column + TILE_N > s.n;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool inside = row + 8 * i < s.m;
    int32_t of_row = inside ? params.targets[row + 8 * i] : ELSEWHERE;
    float a = of_row == IGNORE_INDEX ? INFINITY : inside ? params.anchor[row + 8 * i] : 0.0f;
    target[i] = of_row - first_column;
    masked |= (unsigned)target[i] < TILE_N;
    shift[i] = -a * params.scale;
    // -a scale = shift + error; 2^error = 1 + error ln 2. An infinite anchor has no error.
    correction[i] = isfinite(shift[i]) ? fmaf(fmaf(-a, params.scale, -shift[i]), LN_2, 1.0f) : 1.0f;
    row_sums[i] = 0;
  }
  if (__any_sync(~0u, masked)) {
#pragma unroll
    for (int j = 0; j < TILE_N / 2; j++) {
      int at = j / 4 * 8 + column + j % 2;
      if (at == target[j / 2 % 2] || first_column + at >= s.n) z[j] = -INFINITY;
    }
  }
#pragma unroll
  for (int j = 0; j < TILE_N / 2; j++) {
    z[j] = exp2_approx(fmaf(z[j], params.scale, shift[j / 2 % 2]));
    row_sums[j / 2 % 2] += z[j];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) row_sums[i] *= correction[i];
}

static __device__ __forceinline__ void epilogue_logits(Accumulators &acc, const TileScheduler &s,
                                                       const EpilogueParams &params, const WorkTile &work,
                                                       const CUtensorMap *out, uint32_t buffer) {
  const ThreadCoord me;
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++) {
    float row_sums[2];
    int row = work.row + me.row(h);
    epilogue_exp(acc[h], row_sums, s, params, row, work.column, me.column);
    if (params.store)
      epilogue_store_bf16(out, buffer, acc[h], work.column, work.row + me.first_row(h), me.lane);
#pragma unroll
    for (int i = 0; i < 2; i++) { // four lanes share a row
      row_sums[i] += __shfl_xor_sync(~0u, row_sums[i], 1);
      row_sums[i] += __shfl_xor_sync(~0u, row_sums[i], 2);
      if (me.lane % 4 == 0 && row + 8 * i < s.m)
        params.tile_sums[(int64_t)(row + 8 * i) * s.n_tiles + work.column / TILE_N] = row_sums[i];
    }
  }
}

template <typename K>
static __device__ __forceinline__ void
epilogue_gradient(Accumulators &acc, const TileScheduler &s, const EpilogueParams &params,
                  const WorkTile &work, const CUtensorMap *out, uint32_t buffer, int rank, int consumer_row) {
  const ThreadCoord me;
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++) {
    int row = consumer_row + me.first_row(h), below = s.m - work.row - row, right = s.n - work.column;
    if (work.split >= 0)
      epilogue_store_f32(params.partials + (((int64_t)work.split * CLUSTER + rank) * K::ROWS + row) * TILE_N,
                         TILE_N, 16, TILE_N, acc[h], me);
    else if (K::EPILOGUE == STORE_F32)
      epilogue_store_f32(params.out + (work.row + row) * params.out_stride + work.column, params.out_stride,
                         below, right, acc[h], me);
    else
      epilogue_store_bf16(out, buffer, acc[h], work.column, work.row + row, me.lane);
  }
}

// out (+)= alpha times the tile's transpose. A pair of warps adds 32 columns of `out`, half of its rows, at a time in its
// buffer, where load_sums has put what they are added to. Swizzled, so that a warp's accesses meet no bank twice.
static __device__ __forceinline__ void epilogue_add(Accumulators &acc, const EpilogueParams &params,
                                                    const WorkTile &work, const Pipeline &pipeline,
                                                    const CUtensorMap *out, int consumer) {
  constexpr int GROUP = 8; // accesses on their way together
  const bool accumulate = *params.accumulate;
  const ThreadCoord me;
  const int pair = me.warp / 2;
  const bool stores = me.warp % 2 == 0 && me.lane == 0;
  float *buffer = pipeline.sums + pair * (SUM_BYTES / 4);
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++) {
    mbarrier_wait(&pipeline.sum_full[consumer * SUM_BUFFERS + pair], h);
#pragma unroll
    for (int below = 0; below < 2; below++) {
      int column = me.warp % 2 * 16 + me.lane / 4 + 8 * below; // of the buffer
      float *to[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
        to[i] = buffer + (me.column + i) * SUM_COLUMNS + (column / 4 ^ (me.column + i)) * 4 + column % 4;
#pragma unroll
      for (int j = 0; j < TILE_N / 8; j += GROUP / 2) {
        float sum[GROUP] = {};
#pragma unroll
        for (int i = 0; i < GROUP; i++)
          if (accumulate) sum[i] = to[i % 2][(j + i / 2) * 8 * SUM_COLUMNS];
#pragma unroll
        for (int i = 0; i < GROUP; i++)
          to[i % 2][(j + i / 2) * 8 * SUM_COLUMNS] =
              fmaf(params.scale, acc[h][4 * (j + i / 2) + 2 * below + i % 2], sum[i]);
      }
    }
    fence_proxy_async();
    named_barrier_sync<64>(3 + 2 * consumer + pair);
    if (!stores) continue;
    tma_store_2d(out, shared_address(buffer), work.row + sum_column(h, pair), work.column);
    tma_store_commit();
    tma_store_wait_read<0>();
    mbarrier_arrive(&pipeline.sum_empty[pair]);
  }
}

// --- SwiGLU ------------------------------------------------------------------------------------------------

// acc[h][0, 48) holds gates, acc[h][48, 96) the ups of the same columns. Both are stored, and the activation is computed
// from the rounded values, as it is where it is recomputed. 32 columns at a time, through two buffers in turn.
static __device__ __forceinline__ void epilogue_swiglu(const Accumulators &acc, const WorkTile &work,
                                                       const CUtensorMap *out, const CUtensorMap *gate_up,
                                                       uint32_t buffers) {
  constexpr int UP = TILE_N / 4, PARTS = TILE_N / 2 / 32;
  const ThreadCoord me;
  const int row = me.lane % 16;
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++)
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const uint32_t buffer = buffers + (h * PARTS + part) % 2 * SWIGLU_BYTES;
      if (me.lane == 0) tma_store_wait_read<1>(); // its previous contents have been read
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; j += 2) { // 8 columns each
        uint32_t to = buffer + row * 64 + ((j + me.lane / 16) ^ (row / 2 & 3)) * 16;
        const float *v = acc[h] + part * 16 + j * 4;
        uint32_t gate[4], up[4], activation[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          gate[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
          up[i] = pack_bf16(v[UP + 2 * i], v[UP + 2 * i + 1]);
          float2 g = unpack_bf16(gate[i]), u = unpack_bf16(up[i]);
          activation[i] = pack_bf16(g.x * logistic(g.x) * u.x, g.y * logistic(g.y) * u.y);
        }
        stmatrix_x4(to, gate[0], gate[1], gate[2], gate[3]);
        stmatrix_x4(to + SWIGLU_PART, up[0], up[1], up[2], up[3]);
        stmatrix_x4(to + 2 * SWIGLU_PART, activation[0], activation[1], activation[2], activation[3]);
      }
      fence_proxy_async();
      __syncwarp();
      if (me.lane == 0) {
        int x = work.column + part * 32, y = work.row + me.first_row(h);
        tma_store_3d(gate_up, buffer, x, y, 0);
        tma_store_2d(out, buffer + 2 * SWIGLU_PART, x, y);
        tma_store_commit();
      }
    }
}

// The gates and ups that a warp needs for its part of the gradient, in pieces of 16 rows by 64 columns. A tile's first
// pieces arrive during its main loop, and each piece's gradients leave from the same buffer.
struct GateUpQueue {
  const CUtensorMap *map;
  uint32_t buffers;
  uint64_t *full;
  int taken = 0;           // pieces of all tiles so far
  int row, column, across; // of the tile; pieces side by side

  __device__ __forceinline__ uint32_t buffer(int i) const {
    return buffers + (taken + i) % GATE_UP_BUFFERS * GATE_UP_BYTES;
  }
  // Piece i of the tile, by one lane.
  __device__ __forceinline__ void load(int i) const {
    uint64_t *barrier = &full[(taken + i) % GATE_UP_BUFFERS];
    mbarrier_arrive_expect_tx(barrier, GATE_UP_BYTES);
    tma_load_3d(buffer(i), map, barrier, column + i % across * 64, row + i / across * 64, 0);
  }
  __device__ __forceinline__ void begin(const WorkTile &work, int columns) {
    const ThreadCoord me;
    row = work.row + me.first_row(0), column = work.column, across = columns / 64;
    if (me.lane == 0) {
      tma_store_wait_read<0>();
      for (int i = 0; i < GATE_UP_BUFFERS; i++) load(i);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void wait(int i) const {
    mbarrier_wait(&full[(taken + i) % GATE_UP_BUFFERS], (taken + i) / GATE_UP_BUFFERS & 1);
    __syncwarp();
  }
};

static __device__ __forceinline__ void epilogue_swiglu_gradient(const Accumulators &acc,
                                                                const CUtensorMap *out, GateUpQueue &queue) {
  const ThreadCoord me;
  const int row = me.lane % 16;
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++)
#pragma unroll
    for (int part = 0; part < TILE_N / 64; part++) {
      if (part >= queue.across) continue;
      int piece = h * queue.across + part;
      queue.wait(piece);
#pragma unroll
      for (int j = 0; j < 8; j += 2) { // 8 columns each
        uint32_t at = queue.buffer(piece) + row * 128 + ((j + me.lane / 16) ^ (row & 7)) * 16;
        const float *d = acc[h] + part * 32 + j * 4;
        uint32_t gate[4], up[4];
        ldmatrix_x4(gate, at);
        ldmatrix_x4(up, at + STORE_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float2 g = unpack_bf16(gate[i]), u = unpack_bf16(up[i]);
          swiglu_gradient(g.x, u.x, d[2 * i]);
          swiglu_gradient(g.y, u.y, d[2 * i + 1]);
          gate[i] = pack_bf16(g.x, g.y), up[i] = pack_bf16(u.x, u.y);
        }
        stmatrix_x4(at, gate[0], gate[1], gate[2], gate[3]);
        stmatrix_x4(at + STORE_BYTES, up[0], up[1], up[2], up[3]);
      }
      fence_proxy_async();
      __syncwarp();
      int next = piece - 1 + GATE_UP_BUFFERS; // takes the buffer of the piece before
      if (me.lane == 0) {
        tma_store_3d(out, queue.buffer(piece), queue.column + part * 64, queue.row + h * 64, 0);
        tma_store_commit();
        if (piece >= 1 && next < 2 * queue.across) {
          tma_store_wait_read<1>();
          queue.load(next);
        }
      }
      __syncwarp();
    }
  queue.taken += 2 * queue.across;
}

#endif

#endif
