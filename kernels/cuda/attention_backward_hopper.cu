// Attention, backward, for Hopper: attention_backward.cu's two passes with wgmma and TMA, warp-specialised.
//
// The two passes are one kernel. Each consumer warpgroup owns 64 rows of two resident operands, and 64-row tiles of
// two others are streamed past the two or three consumers of a CTA:
//              resident      streamed      S and dP          accumulators
//   key pass   k, v          q, dout       S^T, dP^T         dv += P^T dout, dk += dS^T q
//   query pass q, dout       k, v          S, dP             dq += dS k
// In both, S = resident0 streamed0^T and dP = resident1 streamed1^T, and P and dS, rounded to bf16 in registers, are
// A operands of the GEMMs that follow. Only TMA writes to shared memory.
//
// One thread of a producer warpgroup takes work tiles from a counter, waits for empty stages and keeps up to STAGES
// tiles in flight. Which CTA does which work tile varies from run to run; what a tile computes does not. While one
// consumer exponentiates, the others' MMAs keep the tensor cores busy, and where registers allow a consumer's MMAs of
// one step run under its exponentials of the next.
//
// On an H200 the tensor cores are busy 54% (key pass) and 72% (query pass) of the time for heads of 64 at T 4096, 79%
// and 94% for heads of 128 at T 8192.
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/hopper_ptx.cuh"

namespace attention {

constexpr int TILE = 64;
enum { TILE_BYTES = TILE * 128 }; // of 64 rows; a head of 128 is two tiles, 64 columns each
static_assert(TILE == STATISTICS_TILE, "a streamed tile of queries comes with one piece of statistics");

// A pass: heads of D elements, WARPGROUPS consumers of 64 rows each; PACKED: sequences of several documents.
template <int D_, bool KEY_PASS_, int WARPGROUPS_, bool OVERLAP_, bool PACKED_> struct PassTraits {
  static constexpr int D = D_, WARPGROUPS = WARPGROUPS_, ROWS = WARPGROUPS * TILE;
  static constexpr bool KEY_PASS = KEY_PASS_, PACKED = PACKED_;
  // Whether the MMAs of one step run under the exponentials of the next. That takes more registers.
  static constexpr bool OVERLAP = OVERLAP_;
  // Of a consumer's thread; the producer's have 24, and an SM has 65,536.
  static constexpr int REGISTERS = WARPGROUPS == 2 ? 240 : 160;
};

struct HopperArguments {
  bf16 *dqkv;
  const float *statistics;
  int *counter; // work taken beyond each block's first piece
  int64_t dqkv_stride;
  int batch, seq_len, num_heads, num_key_value_heads;
  int blocks;          // of ROWS rows in a sequence
  int heads, work;     // heads of the pass over all batches; blocks * heads
  int heads_at_a_time; // so many heads' operands fit in the L2 cache
  float scale, scale_log2;
  Documents documents;
};

// ROWS rows of one head.
struct WorkTile {
  int block, head, batch; // the head of the pass: a key/value head or a query head
};

// Heads by groups that fit in the L2 cache; within a group the longest tiles first.
template <class F> __device__ __forceinline__ WorkTile work_tile(const HopperArguments &a, int index) {
  int group = index / (a.heads_at_a_time * a.blocks), place = index % (a.heads_at_a_time * a.blocks);
  int first_head = group * a.heads_at_a_time, heads = min(a.heads_at_a_time, a.heads - first_head);
  int head = first_head + place % heads, block = place / heads;
  int per_batch = F::KEY_PASS ? a.num_key_value_heads : a.num_heads;
  return {F::KEY_PASS ? block : a.blocks - 1 - block, head % per_batch, head / per_batch};
}

// The streamed tiles of a work tile: [first, end) of each of `heads` query heads.
struct Tiles {
  int first, end, heads;
};

// Where row t sees the streamed rows from (query pass), or to (key pass); rows past the last see what that sees.
template <class F> __device__ __forceinline__ int bound_of(const HopperArguments &a, WorkTile w, int t) {
  const int64_t first = w.batch * (int64_t)a.seq_len;
  t = min(t, a.seq_len - 1);
  return F::KEY_PASS ? a.documents.end(first, t, a.seq_len) : a.documents.start(first, t);
}

template <class F> __device__ __forceinline__ Tiles tiles_of(const HopperArguments &a, WorkTile w) {
  const int first_row = w.block * F::ROWS, all = (a.seq_len + TILE - 1) / TILE;
  if (F::KEY_PASS) {
    int end = F::PACKED ? (bound_of<F>(a, w, first_row + F::ROWS - 1) + TILE - 1) / TILE : all;
    return {w.block * F::WARPGROUPS, end, a.num_heads / a.num_key_value_heads};
  }
  return {F::PACKED ? bound_of<F>(a, w, first_row) / TILE : 0, min(all, (w.block + 1) * F::WARPGROUPS), 1};
}

template <class F> struct SharedStorage {
  static constexpr int D = F::D, ROWS = F::ROWS, HALVES = D / 64; // tiles of 64 columns per row
  static constexpr int RESIDENT = D == 64 ? 2 : 1;                // buffers of resident operands
  static constexpr int STAGES = D == 64 ? 4 : 3;                  // buffers of streamed tiles
  alignas(1024) bf16 resident[RESIDENT][2][HALVES][ROWS * 64];
  bf16 streamed[STAGES][2][HALVES][TILE * 64];
  float statistics[STAGES][2][TILE]; // of streamed queries
  uint64_t resident_full[RESIDENT], resident_free[RESIDENT], full[STAGES], free[STAGES];
  int work[RESIDENT];
};

template <class F>
__device__ __forceinline__ void produce(SharedStorage<F> &shared, const CUtensorMap *qkv,
                                        const CUtensorMap *dout, const HopperArguments &a) {
  using Shared = SharedStorage<F>;
  constexpr int HALVES = Shared::HALVES, ROWS = F::ROWS;
  constexpr bool KEY_PASS = F::KEY_PASS;
  const int first_key = a.num_heads, first_value = first_key + a.num_key_value_heads,
            group = a.num_heads / a.num_key_value_heads;
  int stage = 0, phase = 0;
  for (int n = 0, index = blockIdx.x;; n++) {
    const int slot = n % Shared::RESIDENT;
    mbarrier_wait(&shared.resident_free[slot], (n / Shared::RESIDENT & 1) ^ 1);
    shared.work[slot] = index;
    if (index >= a.work) {
      mbarrier_arrive(&shared.resident_full[slot]);
      return;
    }
    const WorkTile w = work_tile<F>(a, index);
    const Tiles tiles = tiles_of<F>(a, w);
    mbarrier_arrive_expect_tx(&shared.resident_full[slot], sizeof shared.resident[slot]);
    for (int half = 0; half < HALVES; half++)
      for (int part = 0; part < ROWS / TILE; part++) {
        uint32_t x0 = shared_address(shared.resident[slot][0][half]) + part * TILE_BYTES;
        uint32_t x1 = shared_address(shared.resident[slot][1][half]) + part * TILE_BYTES;
        int token = w.block * ROWS + part * TILE;
        tma_load_4d(x0, qkv, &shared.resident_full[slot], half * 64, w.head + (KEY_PASS ? first_key : 0),
                    token, w.batch);
        tma_load_4d(x1, KEY_PASS ? qkv : dout, &shared.resident_full[slot], half * 64,
                    w.head + (KEY_PASS ? first_value : 0), token, w.batch);
      }
    for (int h = 0; h < tiles.heads; h++)
      for (int tile = tiles.first; tile < tiles.end; tile++) {
        const int head = KEY_PASS ? w.head * group + h : w.head / group; // whose rows are streamed
        mbarrier_wait(&shared.free[stage], phase ^ 1);
        mbarrier_arrive_expect_tx(&shared.full[stage], sizeof shared.streamed[stage] +
                                                           (KEY_PASS ? sizeof shared.statistics[stage] : 0));
        for (int half = 0; half < HALVES; half++) {
          uint32_t y0 = shared_address(shared.streamed[stage][0][half]);
          uint32_t y1 = shared_address(shared.streamed[stage][1][half]);
          tma_load_4d(y0, qkv, &shared.full[stage], half * 64, head + (KEY_PASS ? 0 : first_key), tile * TILE,
                      w.batch);
          tma_load_4d(y1, KEY_PASS ? dout : qkv, &shared.full[stage], half * 64,
                      head + (KEY_PASS ? 0 : first_value), tile * TILE, w.batch);
        }
        if (KEY_PASS)
          bulk_load(shared.statistics[stage],
                    statistics_of(a.statistics, w.batch * a.num_heads + head, a.seq_len) + tile * (2 * TILE),
                    sizeof shared.statistics[stage], &shared.full[stage]);
        if (++stage == Shared::STAGES) stage = 0, phase ^= 1;
      }
    index = gridDim.x + atomicAdd(a.counter, 1);
  }
}

// d (+)= x y^T over D columns, x the warpgroup's 64 rows of a resident operand, y a streamed tile.
template <int D, int ROWS>
__device__ __forceinline__ void scores(float (&d)[TILE / 2], uint32_t x, uint32_t y, bool add) {
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    wgmma(d, x + i / 4 * (ROWS * 128 / 16) + i % 4 * 2, y + i / 4 * (TILE_BYTES / 16) + i % 4 * 2,
          add || i > 0);
}

// d += p y, p [64, 64] in registers, y a streamed tile.
template <int D>
__device__ __forceinline__ void accumulate(float (&d)[D / 2], const uint32_t (&p)[TILE / 16][4], uint32_t y) {
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) wgmma<D>(d, p[i], y + i * (16 * 128 / 16), true);
}

__device__ __forceinline__ void to_operands(uint32_t (&r)[TILE / 16][4], const float (&x)[TILE / 2]) {
#pragma unroll
  for (int i = 0; i < TILE / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) r[i][j] = pack_bf16(x[i * 8 + 2 * j], x[i * 8 + 2 * j + 1]);
}

// A consumer warp's position in the ring of streamed tiles.
template <class F> struct PipelineState {
  SharedStorage<F> &shared;
  int stage, phase;

  // The next tile's stage, once the tile is there.
  __device__ __forceinline__ int take() {
    int now = stage;
    mbarrier_wait(&shared.full[now], phase);
    if (++stage == SharedStorage<F>::STAGES) stage = 0, phase ^= 1;
    return now;
  }
  __device__ __forceinline__ void release(int which) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.free[which]);
  }
};

template <class F>
__device__ __forceinline__ void consume(SharedStorage<F> &shared, const HopperArguments &a) {
  using Shared = SharedStorage<F>;
  constexpr int D = F::D, ROWS = F::ROWS;
  constexpr bool KEY_PASS = F::KEY_PASS;
  const int group = uniform(threadIdx.x / 128), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32,
            g = lane / 4, q = lane % 4;
  PipelineState<F> pipeline = {shared, 0, 0};
  float s[TILE / 2] = {}, dp[TILE / 2] = {};
  float first[D / 2], second[KEY_PASS ? D / 2 : 2]; // dk and dv, or dq
  uint32_t p[KEY_PASS ? TILE / 16 : 1][4], ds[TILE / 16][4];

  for (int n = 0;; n++) {
    const int slot = n % Shared::RESIDENT;
    mbarrier_wait(&shared.resident_full[slot], n / Shared::RESIDENT & 1);
    const int index = uniform(shared.work[slot]);
    if (index >= a.work) return;
    const WorkTile w = work_tile<F>(a, index);
    const Tiles tiles = tiles_of<F>(a, w);
    const int first_row = w.block * ROWS + group * TILE; // the warpgroup's first
    const uint32_t x0 = uniform(shared_address(shared.resident[slot][0]) + group * TILE_BYTES);
    const uint32_t x1 = x0 + sizeof shared.resident[0][0];
    // Of each query head's tiles the warpgroup works on all but `before` at the start and `after` at the end.
    const int first_tile = first_row / TILE;
    const int before = KEY_PASS ? min(first_tile, tiles.end) - tiles.first : 0;
    const int after = KEY_PASS ? 0 : tiles.end - (first_row < a.seq_len ? first_tile + 1 : tiles.first);
    const int visible = tiles.end - tiles.first - before - after, steps = tiles.heads * visible;
    // The warpgroup's rows see different documents in tiles that end after this, or begin before it.
    const int edge = !F::PACKED ? 0 : bound_of<F>(a, w, KEY_PASS ? first_row : first_row + TILE - 1);

    float row_shift[2] = {}, row_minus_delta[2] = {};
    if constexpr (!KEY_PASS) {
      const float *statistics = statistics_of(a.statistics, w.batch * a.num_heads + w.head, a.seq_len);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int t = first_row + warp * 16 + half * 8 + g;
        row_shift[half] = t < a.seq_len ? statistics[statistics_place(t)] : 0;
        row_minus_delta[half] = t < a.seq_len ? statistics[statistics_place(t) + TILE] : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < D / 2; i++) first[i] = 0;
    if constexpr (KEY_PASS) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) second[i] = 0;
    }

    auto streamed = [&](int stage) {
      return uniform(shared_address(shared.streamed) + stage * (uint32_t)sizeof shared.streamed[0]);
    };
    // Waits for the step's tile and starts S and dP, in two wgmma groups.
    auto begin = [&](int step) {
      if (KEY_PASS && step % visible == 0)
        for (int i = 0; i < before; i++) pipeline.release(pipeline.take());
      const int stage = pipeline.take();
#pragma unroll
      for (int j = 0; j < TILE / 8; j++) {
        float2 start = make_float2(row_minus_delta[0], row_minus_delta[1]);
        if constexpr (KEY_PASS)
          start = *reinterpret_cast<const float2 *>(&shared.statistics[stage][1][j * 8 + 2 * q]);
        dp[j * 4] = start.x;
        dp[j * 4 + 1] = KEY_PASS ? start.y : start.x;
        dp[j * 4 + 2] = KEY_PASS ? start.x : start.y;
        dp[j * 4 + 3] = start.y;
      }
      wgmma_fence_operand(dp);
      const uint32_t y = streamed(stage);
      wgmma_fence();
      scores<D, ROWS>(s, descriptor_k_major(x0), descriptor_k_major(y), false);
      wgmma_commit();
      scores<D, ROWS>(dp, descriptor_k_major(x1), descriptor_k_major(y + sizeof shared.streamed[0][0]), true);
      wgmma_commit();
      return stage;
    };
    // s = S becomes P.
    auto exponentiate = [&](int step, int stage) {
      wgmma_fence_operand(s);
      const int tile = tiles.first + before + (KEY_PASS ? step % visible : step);
      if (F::PACKED && (KEY_PASS ? (tile + 1) * TILE > edge : tile * TILE < edge)) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int bound = bound_of<F>(a, w, first_row + warp * 16 + half * 8 + g) - tile * TILE;
#pragma unroll
          for (int i = 0; i < TILE / 4; i++) {
            const int c = i / 2 * 8 + 2 * q + (i & 1);
            if (KEY_PASS ? c >= bound : c < bound) s[i / 2 * 4 + half * 2 + (i & 1)] = -INFINITY;
          }
        }
      }
      if (tile == first_tile) { // the diagonal
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
          int r = warp * 16 + (i >> 1 & 1) * 8 + g, c = i / 4 * 8 + 2 * q + (i & 1);
          if (KEY_PASS ? r > c : c > r) s[i] = -INFINITY;
        }
      }
#pragma unroll
      for (int j = 0; j < TILE / 8; j++) {
        float2 shift = make_float2(0, 0);
        if constexpr (KEY_PASS)
          shift = *reinterpret_cast<const float2 *>(&shared.statistics[stage][0][j * 8 + 2 * q]);
#pragma unroll
        for (int i = 0; i < 4; i++)
          s[j * 4 + i] = exp2_approx(
              fmaf(s[j * 4 + i], a.scale_log2, KEY_PASS ? (i & 1 ? shift.y : shift.x) : row_shift[i >> 1]));
      }
    };
    auto round_p = [&]() {
      if constexpr (KEY_PASS) to_operands(p, s), wgmma_fence_operand(p);
    };
    auto round_ds = [&]() {
      wgmma_fence_operand(dp);
#pragma unroll
      for (int i = 0; i < TILE / 2; i++) dp[i] *= s[i];
      to_operands(ds, dp);
      wgmma_fence_operand(ds);
    };
    auto add_dv = [&](int stage) {
      if constexpr (KEY_PASS) {
        wgmma_fence();
        accumulate<D>(second, p,
                      descriptor_mn_major(streamed(stage) + sizeof shared.streamed[0][0], TILE_BYTES));
        wgmma_commit();
      }
    };
    auto add_dk_or_dq = [&](int stage) {
      wgmma_fence();
      accumulate<D>(first, ds, descriptor_mn_major(streamed(stage), TILE_BYTES));
      wgmma_commit();
    };
    auto finish = [&](int stage) {
      wgmma_wait<0>();
      wgmma_fence_operand(first);
      if constexpr (KEY_PASS) wgmma_fence_operand(second);
      pipeline.release(stage);
    };

    if (steps == 0) {
      for (int i = 0; i < tiles.heads * before; i++) pipeline.release(pipeline.take());
    } else if constexpr (F::OVERLAP) {
      int stage = begin(0);
      wgmma_wait<1>(); // s
      exponentiate(0, stage);
      wgmma_wait<0>();
      round_p();
      round_ds();
      for (int step = 1; step < steps; step++) {
        const int next = begin(step);
        add_dv(stage);
        add_dk_or_dq(stage);
        wgmma_wait<KEY_PASS ? 3 : 2>(); // s
        exponentiate(step, next);
        finish(stage);
        round_p();
        round_ds();
        stage = next;
      }
      add_dv(stage);
      add_dk_or_dq(stage);
      finish(stage);
    } else {
      for (int step = 0; step < steps; step++) {
        const int stage = begin(step);
        wgmma_wait<1>(); // s
        exponentiate(step, stage);
        round_p();
        add_dv(stage);
        wgmma_wait<KEY_PASS ? 1 : 0>(); // dp
        round_ds();
        add_dk_or_dq(stage);
        finish(stage);
      }
    }
    for (int i = 0; i < after; i++) pipeline.release(pipeline.take());

    // All four warps have read the resident operands, and their rows can take the results.
    asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory");
    const int row = first_row + warp * 16;
    bf16 *rows = a.dqkv + (int64_t)w.batch * a.seq_len * a.dqkv_stride + w.head * D;
    auto store = [&](const float(&sums)[D / 2], float scale, uint32_t x, bf16 *matrix) {
      const uint32_t buffer = x + warp * 16 * 128; // the warp's rows of a resident operand
      store_rows<1, D>(
          [&](int, int n, int i) { return sums[n * 4 + i]; }, scale,
          [=](int r, int c) { return buffer + c / 8 * (ROWS * 128) + r * 128 + ((c % 8) ^ (r & 7)) * 16; },
          matrix, a.dqkv_stride, row, a.seq_len);
    };
    if constexpr (KEY_PASS) {
      rows += a.num_heads * D;
      store(second, 1, x1, rows + a.num_key_value_heads * D);
    }
    store(first, a.scale, x0, rows);
    fence_proxy_async(); // TMA writes there next
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.resident_free[slot]);
  }
}

template <class F>
__global__ void __launch_bounds__((F::WARPGROUPS + 1) * 128, 1)
    hopper_backward_kernel(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap dout,
                           HopperArguments a) {
#if defined(HOPPER_CODE)
  using Shared = SharedStorage<F>;
  extern __shared__ unsigned char shared_bytes[];
  Shared &shared = *reinterpret_cast<Shared *>(((uintptr_t)shared_bytes + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::RESIDENT; i++) {
      mbarrier_init(&shared.resident_full[i], 1);
      mbarrier_init(&shared.resident_free[i], F::WARPGROUPS * 4); // every warp
    }
    for (int i = 0; i < Shared::STAGES; i++) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.free[i], F::WARPGROUPS * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x / 128 == F::WARPGROUPS) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == F::WARPGROUPS * 128) produce(shared, &qkv, &dout, a);
  } else {
    setmaxnreg_inc<F::REGISTERS>();
    consume(shared, a);
  }
#endif
}

// --- launches ----------------------------------------------------------------------------------------------

// [batch, token, head, element] in tiles of 64 tokens and 64 elements of one head.
static bool describe(CUtensorMap *map, Tensor t, AttentionShape s, int64_t heads) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode;
  if (!encode) encode = tma_encoder();
  if (!encode) return false;
  cuuint64_t dims[4] = {(cuuint64_t)s.head_dim, (cuuint64_t)heads, (cuuint64_t)s.seq_len,
                        (cuuint64_t)s.batch};
  cuuint64_t strides[3] = {(cuuint64_t)s.head_dim * 2, (cuuint64_t)t.stride * 2,
                           (cuuint64_t)s.seq_len * (cuuint64_t)t.stride * 2};
  cuuint32_t tile[4] = {64, 1, TILE, 1}, steps[4] = {1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, t.data, dims, strides, tile, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class F>
static void launch(const CUtensorMap &qkv, const CUtensorMap &dout, HopperArguments a, int sms,
                   cudaStream_t stream) {
  a.blocks = (int)ceil_div(a.seq_len, F::ROWS);
  a.heads = a.batch * (F::KEY_PASS ? a.num_key_value_heads : a.num_heads);
  a.work = a.heads * a.blocks;
  // What a head streams: a group of query heads' q and dout, or k and v.
  int64_t streams = F::KEY_PASS ? a.num_heads / a.num_key_value_heads : 1;
  a.heads_at_a_time = (int)max_i64(1, min_i64(a.heads, (24 << 20) / (streams * a.seq_len * F::D * 4)));
  if (!F::KEY_PASS) a.counter++;
  int bytes = sizeof(SharedStorage<F>) + 1024;
  auto kernel = hopper_backward_kernel<F>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<(unsigned)min_i64(sms, a.work), (F::WARPGROUPS + 1) * 128, bytes, stream>>>(qkv, dout, a);
}

// What was fastest on an H200 of the forms that fit in the registers.
template <bool PACKED> using Key64 = PassTraits<64, true, 2, true, PACKED>;
template <bool PACKED> using Query64 = PassTraits<64, false, 3, true, PACKED>;
template <bool PACKED> using Key128 = PassTraits<128, true, 2, false, PACKED>;
template <bool PACKED> using Query128 = PassTraits<128, false, 3, false, PACKED>;

// 0 when the device is not a Hopper or the program was built without code for it.
static int hopper_sms() {
  int device = 0, count = 0;
  if (!hopper_has_code((const void *)hopper_backward_kernel<Key64<false>>)) return 0;
  cuda_check(cudaGetDevice(&device), "querying the device");
  cuda_check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "querying its size");
  return count;
}

} // namespace attention

bool attention_hopper_backward(const AttentionBackward *b, const float *statistics, int *counters,
                               cudaStream_t stream) {
  using namespace attention;
  static int sms = -1; // 0: not to be used
  if (sms < 0) sms = hopper_sms();
  if (!sms) return false;
  AttentionShape s = b->shape;
  CUtensorMap qkv, dout;
  if (!describe(&qkv, b->qkv, s, s.num_heads + 2 * s.num_key_value_heads) ||
      !describe(&dout, b->dout, s, s.num_heads))
    return false;
  float scale = 1 / sqrtf((float)s.head_dim);
  HopperArguments a = {};
  a.dqkv = data_of<bf16>(b->dqkv), a.dqkv_stride = b->dqkv.stride;
  a.statistics = statistics, a.counter = counters;
  a.batch = (int)s.batch, a.seq_len = (int)s.seq_len;
  a.num_heads = (int)s.num_heads, a.num_key_value_heads = (int)s.num_key_value_heads;
  a.scale = scale, a.scale_log2 = scale * LOG2_E;
  a.documents = documents_of(b->documents, s);
  with_bool(tensor_exists(b->documents), [&](auto packed) {
    if (s.head_dim == 64) {
      launch<Key64<packed>>(qkv, dout, a, sms, stream);
      launch<Query64<packed>>(qkv, dout, a, sms, stream);
    } else {
      launch<Key128<packed>>(qkv, dout, a, sms, stream);
      launch<Query128<packed>>(qkv, dout, a, sms, stream);
    }
  });
  cuda_check_launch("attention_backward");
  return true;
}
