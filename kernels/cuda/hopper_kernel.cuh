// The LM head's GEMMs on Hopper (sm_90a): persistent, warp-specialised, with the loss in the epilogue.
//
// D = A B, A [M, K] and B [K, N] in bf16, fp32 accumulators. KernelTraits picks the epilogue:
//   LOGITS_EXP  A = X [C, H], B = W^T [H, V]. Each logit z becomes E = exp((z - anchor) / T), 0 at the target;
//               rows are summed in fp32 and E is stored in bf16. No logit leaves the registers.
//   STORE_*     A = E [C, V], B = W [V, H]: dX, stored in bf16 or fp32, or as fp32 partials of split-K.
//   ADD_F32     A = (r X)^T, B = kept tiles of E: sampled dW, whose transpose is written or added to memory.
// dW += E^T (r X) without sampling is cuBLASLt's (linear.cu).
//
// Data flow. A CTA is alone on its SM: a producer warp issues TMA loads of A and B (64 wide in K) into a ring
// of shared-memory stages with full and empty mbarriers; two consumer warpgroups issue wgmma m64n192k16 and run
// the epilogue, which leaves through swizzled shared memory and TMA stores. setmaxnreg gives the producer 40
// registers and the consumers 232, 192 of them accumulators. A cluster is two CTAs on two tiles one below the
// other: they need the same tile of B, and each loads one half and multicasts it to both. (Sampled dX: two tiles side by side,
// which share A, so that each 128 rows have a list of k-steps of their own.)
//
// Pipeline. LOGITS_EXP and the sampled GEMMs are ping-pong, 5 stages of 40 KiB: each consumer owns whole tiles of 128
// x 192, so that one's epilogue runs under the other's MMAs:
//   producer     A, B tiles -> stage s, once stage s is empty
//   consumer 0   tile t:    mma mma mma mma | epilogue . . . . . | mma ...
//   consumer 1   tile t+1:  epilogue . . . .| mma mma mma mma .. | epilogue ...
// dX has a short epilogue and is cooperative, 3 stages of 56 KiB: both consumers share a tile of 256 x 192, which
// loads 30% fewer bytes for the same flops. Its last tile of columns may be narrower, by steps of 64.
//
// Schedule. As many clusters as fit on the device; cluster i makes work tiles i, i + clusters, ... Tiles are
// rasterised in groups of rows whose tiles of A stay in L2. Clusters of a wave share tiles of A and B, which are
// read from memory once if all request them at about the same time: a cluster throttle keeps producers in step,
// and every other wave traverses K backwards, to begin with what the wave before left in L2. The tiles of dX's last, partly
// empty wave are split along K; a second kernel adds the partials in order. With sampling E's kept tiles lie in
// panels (KeptTiles), and producer and consumers walk a list of them in place of all of K.
//
// Cost for a chunk of C rows: 2 C V H flops a GEMM. The logits read X and W and write 2 C V bytes of E and
// 4 C V / 192 of row sums; dX reads E and W. At C = H = 4096, V = 128,256 each moves at least 2.1 GB for 4.3 Tflop
// (measured 3.6 GB read, 1.05 written): memory is busy a sixth of the time. What was measured and tried is in kernels/LCE.md.
#ifndef LCE_KERNELS_CUDA_HOPPER_KERNEL_CUH
#define LCE_KERNELS_CUDA_HOPPER_KERNEL_CUH

#include <math.h>

#include "kernels/cuda/hopper_ptx.cuh"

enum { TILE_M = 128, TILE_N = 192, TILE_K = 64, CLUSTER = 2, ALL_CTAS = (1 << CLUSTER) - 1 };
enum { WARPGROUP = 128, CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS) };
// A warp stores 16 rows of 128 bytes at a time, through a buffer of its own.
enum { STORE_ROWS = 16, STORE_BYTES = STORE_ROWS * 128 };
enum { MAX_SPLITS = 16 };
// Sums of dW: for each pair of a consumer's warps a buffer of TILE_N rows by 128 bytes.
enum { SUM_BUFFERS = 2, SUM_COLUMNS = 32, SUM_BYTES = TILE_N * 128 };

enum Epilogue { LOGITS_EXP, STORE_BF16, STORE_F32, ADD_F32 };

template <Epilogue EPILOGUE_, bool SAMPLED_ = false> struct KernelTraits {
  static constexpr Epilogue EPILOGUE = EPILOGUE_;
  static constexpr bool SAMPLED = SAMPLED_;
  // Whether the consumers share a tile, its upper and its lower half, or have tiles of their own (ping-pong).
  // Sampled dX is ping-pong, since a tile of fewer rows has more steps to skip; sampled dW for its long epilogue.
  static constexpr bool COOPERATIVE = EPILOGUE != LOGITS_EXP && !SAMPLED;
  static constexpr bool A_K_MAJOR = EPILOGUE != ADD_F32, B_K_MAJOR = EPILOGUE == LOGITS_EXP;
  // Whether a cluster's tiles lie side by side and share A, or one below the other and share B.
  static constexpr bool SHARE_A = SAMPLED && EPILOGUE != ADD_F32;
  enum { ROWS = COOPERATIVE ? CONSUMERS * TILE_M : TILE_M, CLUSTER_ROWS = SHARE_A ? ROWS : CLUSTER * ROWS };
  enum { CLUSTER_COLUMNS = SHARE_A ? CLUSTER * TILE_N : TILE_N };
  enum { A_BYTES = ROWS * TILE_K * 2, STAGE_BYTES = A_BYTES + TILE_N * TILE_K * 2 };
  enum { STAGES = COOPERATIVE ? 3 : EPILOGUE == ADD_F32 ? 4 : 5 };
  enum { EPILOGUE_BYTES = EPILOGUE == ADD_F32 ? SUM_BUFFERS * SUM_BYTES : 4 * CONSUMERS * STORE_BYTES };
  enum { SHARED_BYTES = STAGES * STAGE_BYTES + EPILOGUE_BYTES + 1024 };
};

// Tiles of a cluster, `rows` by `columns`, in rasterisation groups of `group` rows of tiles, column after column
// within a group. The first `whole` tiles are made over all of K, the others in `splits` parts each.
struct TileScheduler {
  int m, n;
  int rows, columns, m_tiles, n_tiles, k_steps, group;
  int whole, splits, work_tiles;
  unsigned long long *throttle; // ClusterThrottle's counter; NULL: no throttle, and K always forward
};

struct EpilogueParams {
  const float *anchor;    // logits: [m]; read as infinite where the target is IGNORE_INDEX
  const int32_t *targets; // logits: [m]
  float scale;            // logits: log2(e) / T; dW: alpha
  float *tile_sums;       // logits: [m, n_tiles]
  bool store;             // logits: whether E is kept
  float *out;             // dX in fp32: [m, n]
  int64_t out_stride;
  float *partials;           // dX: [work_tiles - whole, rows, TILE_N]
  const KList *lists;        // sampled: of a cluster tile's rows; dW: of a column of tiles
  const KStep *steps;        // sampled: that the lists name
  const int32_t *columns;    // dW: [1 + n_tiles], how many columns of tiles have lists and which
  const int32_t *accumulate; // dW
};

// A piece of work for a cluster, as one of its CTAs sees it.
struct WorkTile {
  int row, column;    // of the tile's first entry
  int k_begin, k_end; // in steps of TILE_K, or indices into EpilogueParams.steps
  int split;          // index of its partials in EpilogueParams, or -1
  bool reverse;       // from the last k-step to the first
  __device__ __forceinline__ int steps() const { return k_end - k_begin; }
  __device__ __forceinline__ int step(int i) const { return reverse ? k_end - 1 - i : k_begin + i; }
};

struct TileCoord {
  int row, column; // of a cluster's tile
};

static __device__ __forceinline__ TileCoord tile_coord(const TileScheduler &s, int tile) {
  int of_group = s.group * s.n_tiles, group = tile / of_group, within = tile % of_group;
  int height = min(s.group, s.m_tiles - group * s.group);
  return {(group * s.group + within % height) * s.rows, within / height * s.columns};
}

#if defined(HOPPER_CODE)

template <typename K>
static __device__ __forceinline__ int work_count(const TileScheduler &s, const EpilogueParams &params) {
  return K::EPILOGUE == ADD_F32 ? params.columns[0] * s.m_tiles : s.work_tiles;
}

static __device__ __forceinline__ int first_work() {
  return blockIdx.x / CLUSTER;
}
static __device__ __forceinline__ int work_stride() {
  return gridDim.x / CLUSTER;
}

// Work tile w. Split tiles are ordered by part: part 0 of every tile, then part 1, ...
template <typename K>
static __device__ __forceinline__ WorkTile work_tile(const TileScheduler &s, const EpilogueParams &params,
                                                     int w, int rank) {
  int tile = w, part = 0, parts = 1, of_splits = w - s.whole;
  if (of_splits >= 0) {
    int rest = s.m_tiles * s.n_tiles - s.whole;
    tile = s.whole + of_splits % rest;
    part = of_splits / rest;
    parts = s.splits;
  }
  TileCoord at;
  KList list = {0, s.k_steps};
  if (K::EPILOGUE == ADD_F32) {
    at = {w % s.m_tiles * s.rows, params.columns[1 + w / s.m_tiles] * TILE_N};
    list = params.lists[w / s.m_tiles];
  } else {
    at = tile_coord(s, tile);
    if (K::SAMPLED) list = params.lists[at.row / s.rows];
  }
  WorkTile work;
  work.row = at.row + (K::SHARE_A ? 0 : rank * K::ROWS);
  work.column = at.column + (K::SHARE_A ? rank * TILE_N : 0);
  work.k_begin = list.first + (int)((int64_t)list.count * part / parts);
  work.k_end = list.first + (int)((int64_t)list.count * (part + 1) / parts);
  work.split = of_splits >= 0 ? of_splits : -1;
  work.reverse = s.throttle && w / work_stride() % 2;
  return work;
}

// How many of the tile's columns are computed.
template <typename K>
static __device__ __forceinline__ int tile_columns(const TileScheduler &s, const WorkTile &w) {
  int columns = K::B_K_MAJOR ? TILE_N : min(TILE_N, (s.n - w.column + 63) / 64 * 64);
  return K::SHARE_A ? max(64, columns) : columns; // of two tiles side by side the second may lie beyond N
}

struct Pipeline {
  uint32_t stages; // in shared memory
  uint64_t *full, *empty;
  float *sums;                    // dW: the buffers
  uint64_t *sum_full, *sum_empty; // [CONSUMERS, SUM_BUFFERS], [SUM_BUFFERS]
};

// Which column of a tile's part of dW buffer `pair` starts with, for half h of the warps' rows.
static __device__ __forceinline__ int sum_column(int h, int pair) {
  return h * 64 + pair * SUM_COLUMNS;
}

// The position of a role in the ring. A stage's barriers change phase once a round.
template <typename K> struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int steps) {
    int to = stage + steps;
    parity ^= to / K::STAGES & 1;
    stage = to % K::STAGES;
  }
  __device__ __forceinline__ void next() {
    if (++stage == K::STAGES) stage = 0, parity ^= 1;
  }
};

// --- the producer ------------------------------------------------------------------------------------------

// Keeps clusters near each other in K. Every INTERVAL steps one producer of each cluster adds 1 to a counter in
// global memory, and waits while it is more than MAX_LEAD intervals ahead of the average of the running
// clusters; it reads the counter an interval before it needs it. After MAX_POLLS reads without a change, a fraction of a
// millisecond, a producer never waits again: if other work occupies the GPU, some clusters may not have started.
//
// The counter holds the intervals of the running clusters, plus 2^32 for each that has finished; the last one
// resets it.
struct ClusterThrottle {
  enum { INTERVAL = 4, MAX_LEAD = 1, MAX_POLLS = 64 };
  unsigned long long *counter, seen = 0; // NULL: no throttle, or left to the cluster's other producer
  unsigned passed = 0;                   // intervals
  int steps_left = INTERVAL;
  bool waits = true;
  __device__ ClusterThrottle(const TileScheduler &s, int rank) : counter(rank == 0 ? s.throttle : nullptr) {}

  __device__ __forceinline__ bool too_far() const {
    unsigned running = work_stride() - (unsigned)(seen >> 32);
    return passed > MAX_LEAD && (unsigned)seen < (passed - MAX_LEAD) * running;
  }

  __device__ __forceinline__ void step(bool elected) {
    if (!counter || --steps_left > 0) return;
    steps_left = INTERVAL;
    for (int polls = 0; waits && too_far(); polls++) {
      seen = load_relaxed(counter);
      waits = polls < MAX_POLLS;
    }
    passed++;
    if (elected) red_add_relaxed(counter, 1);
    seen = load_relaxed(counter);
  }

  __device__ __forceinline__ void finish(bool elected) {
    if (!counter || !elected) return;
    unsigned long long before = atomicAdd(counter, (1ull << 32) - passed);
    if (before >> 32 == work_stride() - 1) *counter = 0;
  }
};

// This CTA's tile of a stage's A, or its half for the whole cluster; k: the first value of K, or the first row of a panel.
template <typename K>
static __device__ __forceinline__ void load_a(uint32_t to, const CUtensorMap *a, uint64_t *full, int row,
                                              int k, int rank) {
  constexpr int share = K::ROWS / CLUSTER;
  if (K::SHARE_A)
    tma_load_2d_multicast(to + rank * share * 128, a, full, 0, k + rank * share, ALL_CTAS);
  else if (K::A_K_MAJOR)
    tma_load_2d(to, a, full, k, row);
  else
    for (int i = 0; i < K::ROWS / 64; i++) tma_load_2d(to + i * 8192, a, full, row + i * 64, k);
}

// This CTA's half of a stage's tile of B for the whole cluster, or its own.
template <typename K>
static __device__ __forceinline__ void load_b(uint32_t to, const CUtensorMap *b, uint64_t *full, int column,
                                              int columns, int k, int rank) {
  if (K::SHARE_A) {
    for (int i = 0; i < columns / 64; i++) tma_load_2d(to + i * 8192, b, full, column + i * 64, k);
  } else if (K::B_K_MAJOR) { // half of the columns
    constexpr int share = TILE_N / CLUSTER;
    tma_load_2d_multicast(to + rank * share * 128, b, full, k, column + rank * share, ALL_CTAS);
  } else { // half of the k, of each 64 columns; dW: of each panel
    constexpr int share = TILE_K / CLUSTER;
    constexpr bool panels = K::EPILOGUE == ADD_F32;
    for (int i = 0; i < columns / 64; i++)
      tma_load_2d_multicast(to + i * 8192 + rank * share * 128, b, full, panels ? 0 : column + i * 64,
                            k + (panels ? i * LCE_TILE_ROWS : 0) + rank * share, ALL_CTAS);
  }
}

template <typename K> static __device__ __forceinline__ KStep k_step(const EpilogueParams &params, int step) {
  if (K::SAMPLED) return params.steps[step];
  return {step * TILE_K, step * TILE_K};
}

// Run by a whole warp, of which one lane issues: addresses are then uniform, and the path from an empty stage to
// its loads, which bounds the pipeline, is a few instructions.
template <typename K>
static __device__ __forceinline__ void produce(const TileScheduler &s, const EpilogueParams &params,
                                               const Pipeline &pipeline, const CUtensorMap *a,
                                               const CUtensorMap *b, int rank) {
  const bool elected = elect_one();
  ClusterThrottle throttle(s, rank);
  PipelineState<K> at;
  at.parity = 1; // a fresh barrier counts as past its odd phase: all stages are empty
  int count = work_count<K>(s, params);
  if (K::EPILOGUE == ADD_F32 && first_work() >= count) return;
  WorkTile work = work_tile<K>(s, params, first_work(), rank), next = work;
  for (int w = first_work(); w < count; w += work_stride(), work = next) {
    int columns = tile_columns<K>(s, work), bytes = K::A_BYTES + columns * TILE_K * 2;
    KStep k = k_step<K>(params, work.step(0)), k_next = k;
    for (int i = 0; i < work.steps(); i++, at.next(), k = k_next) {
      if (i + 1 < work.steps()) k_next = k_step<K>(params, work.step(i + 1));
      uint64_t *full = &pipeline.full[at.stage];
      uint32_t stage = pipeline.stages + at.stage * K::STAGE_BYTES;
      throttle.step(elected);
      mbarrier_wait(&pipeline.empty[at.stage], at.parity);
      if (elected) {
        mbarrier_arrive_expect_tx(full, bytes); // both halves count, whichever CTA sends them
        load_a<K>(stage, a, full, work.row, k.a_row, rank);
        load_b<K>(stage + K::A_BYTES, b, full, work.column, columns, k.b_row, rank);
      }
      // Early, since its divisions would hold up a stage.
      if (i == 0 && w + work_stride() < count) next = work_tile<K>(s, params, w + work_stride(), rank);
    }
  }
  throttle.finish(elected);
}

// dW: brings what is added to into the buffers, half a tile at a time, and the next tile into L2; run by a warp of its own.
// Without `accumulate` it only says when a buffer may be written. The consumers have full barriers of their own: one may reach
// its next tile before the other one's half has arrived, and a parity does not distinguish two rounds.
template <typename K>
static __device__ __forceinline__ void load_sums(const TileScheduler &s, const EpilogueParams &params,
                                                 const Pipeline &pipeline, const CUtensorMap *out, int rank) {
  const bool elected = elect_one(), accumulate = *params.accumulate;
  int count = work_count<K>(s, params), turn = 0;
  if (first_work() >= count) return;
  WorkTile work = work_tile<K>(s, params, first_work(), rank), next = work;
  for (int w = first_work(); w < count; w += work_stride(), turn ^= 1, work = next) {
    if (w + work_stride() < count) next = work_tile<K>(s, params, w + work_stride(), rank);
    for (int i = 0; i < 2 * SUM_BUFFERS; i++) {
      int h = i / SUM_BUFFERS, buffer = i % SUM_BUFFERS, column = sum_column(h, buffer);
      uint64_t *full = &pipeline.sum_full[turn * SUM_BUFFERS + buffer];
      mbarrier_wait(&pipeline.sum_empty[buffer], h ^ 1);
      if (!elected) continue;
      mbarrier_arrive_expect_tx(full, accumulate ? SUM_BYTES : 0);
      if (!accumulate) continue;
      tma_load_2d(shared_address(pipeline.sums + buffer * (SUM_BYTES / 4)), out, full, work.row + column,
                  work.column);
      if (w + work_stride() < count) tma_prefetch_2d(out, next.row + column, next.column);
    }
  }
}

// --- the consumers -----------------------------------------------------------------------------------------

// A thread's accumulators: of rows [64 h, 64 h + 64) of the tile in acc[h], as wgmma leaves them.
typedef float Accumulators[TILE_M / 64][TILE_N / 2];

// Arrives at the stage's empty barrier in each CTA that sends to it.
static __device__ __forceinline__ void release_stage(const Pipeline &pipeline, int stage) {
  if (threadIdx.x % WARPGROUP < CLUSTER)
    mbarrier_arrive_remote(&pipeline.empty[stage], threadIdx.x % WARPGROUP);
}

// All k-steps of a work tile, for the rows from byte `a_first` of a stage's A on. Calls `last_stage_is_full`
// once nothing remains to be waited for.
template <typename K, int COLUMNS, typename F>
static __device__ __forceinline__ void mainloop(Accumulators &acc, const Pipeline &pipeline,
                                                PipelineState<K> &at, int steps, uint32_t a_first,
                                                F last_stage_is_full) {
  // Bytes from 16 values of k to the next 16.
  constexpr int a_step = K::A_K_MAJOR ? 32 : 2048, b_step = K::B_K_MAJOR ? 32 : 2048;
  int previous = -1;
  for (int k = 0; k < steps; k++, at.next()) {
    mbarrier_wait(&pipeline.full[at.stage], at.parity);
    if (k + 1 == steps) last_stage_is_full();
    uint32_t stage = pipeline.stages + at.stage * K::STAGE_BYTES;
    uint64_t a = descriptor(stage + a_first, K::A_K_MAJOR), b = descriptor(stage + K::A_BYTES, K::B_K_MAJOR);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE_K / 16; i++)
#pragma unroll
      for (int h = 0; h < TILE_M / 64; h++)
        wgmma<COLUMNS, !K::A_K_MAJOR, !K::B_K_MAJOR>(acc[h], descriptor_advance(a, h * 8192 + i * a_step),
                                                     descriptor_advance(b, i * b_step), k > 0 || i > 0);
    wgmma_commit();
    if (previous >= 0) {
      wgmma_wait<1>(); // the previous step has read its stage
      release_stage(pipeline, previous);
    }
    previous = at.stage;
  }
  wgmma_wait<0>();
  release_stage(pipeline, previous);
}

// Which of the tile's entries a thread holds in its half h: columns `column` + 8 j and the next in acc[h][4 j]
// and [4 j + 1] for row(h), and in [4 j + 2], [4 j + 3] for the row 8 below.
struct ThreadCoord {
  int warp, lane, column;
  __device__ ThreadCoord()
      : warp(threadIdx.x % WARPGROUP / 32), lane(threadIdx.x % 32), column(threadIdx.x % 4 * 2) {}
  __device__ __forceinline__ int first_row(int h) const { return h * 64 + warp * 16; }
  __device__ __forceinline__ int row(int h) const { return first_row(h) + lane / 4; }
};

// --- the epilogues -----------------------------------------------------------------------------------------

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
    asm volatile("bar.sync %0, 64;" ::"r"(3 + 2 * consumer + pair) : "memory");
    if (!stores) continue;
    tma_store_2d(out, shared_address(buffer), work.row + sum_column(h, pair), work.column);
    tma_store_commit();
    tma_store_wait_read<0>();
    mbarrier_arrive(&pipeline.sum_empty[pair]);
  }
}

// Ping-pong order: named barrier 1 + c opens when the other consumer has all its stages. Without it, consumer 1
// might wait for a stage two rounds ahead of the ring, and a parity does not distinguish two rounds.
static __device__ __forceinline__ void order_wait(int consumer) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(2 * WARPGROUP) : "memory");
}
static __device__ __forceinline__ void order_arrive(int consumer) {
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + consumer), "n"(2 * WARPGROUP) : "memory");
}

template <typename K>
static __device__ __forceinline__ void consume(const TileScheduler &s, const EpilogueParams &params,
                                               const Pipeline &pipeline, const CUtensorMap *out,
                                               uint32_t buffers, int consumer, int rank) {
  uint32_t buffer = buffers + (consumer * 4 + threadIdx.x % WARPGROUP / 32) * STORE_BYTES;
  int consumer_row = K::COOPERATIVE ? consumer * TILE_M : 0, turn = 0;
  Accumulators acc;
  PipelineState<K> at;
  int count = work_count<K>(s, params);
  for (int w = first_work(); w < count; w += work_stride(), turn ^= 1) {
    WorkTile work = work_tile<K>(s, params, w, rank);
    if (!K::COOPERATIVE && turn != consumer) {
      at.advance(work.steps());
      continue;
    }
    if (!K::COOPERATIVE && w >= work_stride()) order_wait(consumer);
    bool more = !K::COOPERATIVE && w + work_stride() < count;
    auto last_stage_is_full = [&] {
      if (more) order_arrive(consumer ^ 1);
    };
    int columns = tile_columns<K>(s, work), a_first = consumer_row * 128;
    if (columns > 128)
      mainloop<K, 192>(acc, pipeline, at, work.steps(), a_first, last_stage_is_full);
    else if (columns > 64)
      mainloop<K, 128>(acc, pipeline, at, work.steps(), a_first, last_stage_is_full);
    else
      mainloop<K, 64>(acc, pipeline, at, work.steps(), a_first, last_stage_is_full);
    if (K::EPILOGUE == LOGITS_EXP)
      epilogue_logits(acc, s, params, work, out, buffer);
    else if (K::EPILOGUE == ADD_F32)
      epilogue_add(acc, params, work, pipeline, out, consumer);
    else
      epilogue_gradient<K>(acc, s, params, work, out, buffer, rank, consumer_row);
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_all();
}

#endif

template <typename K>
static __global__ void __launch_bounds__(THREADS, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                const __grid_constant__ CUtensorMap out, const __grid_constant__ TileScheduler scheduler,
                const __grid_constant__ EpilogueParams params) {
#if defined(HOPPER_CODE)
  extern __shared__ uint8_t shared[];
  __shared__ __align__(8) uint64_t full[K::STAGES], empty[K::STAGES];
  __shared__ __align__(8) uint64_t sum_full[CONSUMERS * SUM_BUFFERS], sum_empty[SUM_BUFFERS];
  Pipeline pipeline = {(shared_address(shared) + 1023) / 1024 * 1024, full, empty};
  uint32_t buffers = pipeline.stages + K::STAGES * K::STAGE_BYTES;
  pipeline.sums = reinterpret_cast<float *>(shared + (buffers - shared_address(shared)));
  pipeline.sum_full = sum_full, pipeline.sum_empty = sum_empty;
  // Uniform, so that the compiler knows: a warp has one role.
  int rank = (int)cluster_rank(), warp = uniform((int)threadIdx.x / 32),
      consumer = warp / (WARPGROUP / 32) - 1;
  if (threadIdx.x == 0) {
    for (int s = 0; s < K::STAGES; s++) {
      mbarrier_init(&full[s], 1); // the producer, and the bytes it expects
      mbarrier_init(&empty[s], CLUSTER * (K::COOPERATIVE ? CONSUMERS : 1)); // the consumers of each CTA
    }
    for (int i = 0; K::EPILOGUE == ADD_F32 && i < CONSUMERS * SUM_BUFFERS; i++) {
      mbarrier_init(&sum_full[i], 1);
      if (i < SUM_BUFFERS) mbarrier_init(&sum_empty[i], 1);
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (consumer < 0) {
    setmaxnreg_dec<40>();
    if (warp == 0) produce<K>(scheduler, params, pipeline, &a, &b, rank);
    if (K::EPILOGUE == ADD_F32 && warp == 1) load_sums<K>(scheduler, params, pipeline, &out, rank);
  } else {
    setmaxnreg_inc<232>();
    consume<K>(scheduler, params, pipeline, &out, buffers, consumer, rank);
  }
  cluster_sync(); // no CTA leaves while the other may still arrive at its barriers
#else
  __trap(); // never launched there: see prepare() in hopper_gemm.cu
#endif
}

#endif
