// The last layer's products on Hopper: tensor cores, copy engine and exponentials at work at the same time.
//
// WHAT. One kernel makes tiles of D = A B, A [M, K] and B [K, N] in bf16, sums in fp32. It ends in one of
// two ways:
//
//   logits  A = X [C, H], B = W^T: turns each logit into E = exp(z - anchor), leaves out the target, adds
//           up the rows in fp32 and writes E in bf16. No logit ever leaves the registers.
//   dX      A = E [C, V], B = W: writes the sums as they are, or in parts where V is cut into slices.
//
// The third product, dW += E^T (r X), is cuBLASLt's: see TRIED.
//
// COST, for a chunk of C rows: 2 C V H flops each. The logits read X and W, and write 2 C V bytes of E and
// 4 C V / 192 of row sums; dX reads E and W. At C = 4096, H = 4096, V = 128,256 that is 2.1 GB each for 4.3
// Tflop: memory would be busy a twelfth of the time, the tensor cores all of it.
//
// HOW. Threads do not load and multiply by turns; they have roles, and engines do the work. A block, alone
// on its multiprocessor, is a loading group and two multiplying groups of 128 threads. For the logits, which
// leave much to do with the sums, the multipliers take turns:
//
//   loader        one warp: box of A (128 x 64) and box of B (192 x 64) -> stage s, once stage s is empty
//   multiplier 0  tile t:    multiply multiply multiply | finish . . . . . . . | multiply ...
//   multiplier 1  tile t+1:  finish . . . . . . . . . . | multiply multiply .. | finish ...
//
// Each multiplier owns a whole tile of 128 x 192: while one has the tensor cores, the other turns its sums
// into exponentials and stores them. A tile's exponentials keep the special units busy for 1,536 cycles,
// its products the tensor cores for 24,576 at H = 2048; with the conversions, sums and stores around them
// the exponentials still vanish behind the products, and cost 1% against storing bare logits. dX has next
// to nothing to do with sums that took all of V: there the multipliers work together, on the upper and the
// lower half of a tile of 256 x 192, which brings 30% fewer bytes into shared memory for the same flops.
//
// What the tensor cores still wait for is the loader: from the moment a stage is empty to its next boxes'
// arrival only three steps' time goes by without their noticing. So that way is short. A whole warp walks
// it though one lane acts, for then addresses are the warp's own and need no detour (the multipliers do
// likewise: 65 instructions a step instead of 152), and the next tile's place is worked out long before it is
// needed.
//
// 128 x 192 is what fits: 192 registers a thread hold its sums, of 232 that the multipliers get when the
// loaders give theirs up. Five stages of 40 KiB, or three of 56, bridge the memory's latency. The last tile
// of dX's row may be narrower, by steps of 64 columns: H = 4096 is 21 tiles and a third.
//
// Two blocks on neighbouring multiprocessors form a cluster and work on two tiles one below the other. They
// need the same box of B: each loads half of it, and the copy engine delivers each half to both. Without
// that, the logits take 2 to 14% longer.
//
// IN STEP. The grid is as many clusters as fit on the device. Cluster i makes tiles i, i + clusters, ...;
// the clusters of a round share rows of A and columns of B, and each box comes from memory once if all that
// need it ask while it is in the L2 cache. Nothing in the hardware sees to that: left alone, clusters drift
// apart, and at H = 4096 up to twice as much is read. So their loaders keep pace, by a counter in memory
// (Pacer): none runs more than some ten steps of K ahead of the others' average. Rounds walk through K forth
// and back by turns, so that each begins with what the one before it has left in the cache. The logits do
// without both where all of X stays in the cache: there they gain nothing, and cost up to 2% of the layer at
// C = 1024. GB read from memory at C = 4096 (ncu; cuBLASLt's first choices):
//
//              H = 2048: here   cuBLASLt     H = 4096: left alone   here   cuBLASLt
//   logits                1.3        1.4                  7.0-9.5    3.6        6.4
//   dX                    2.8        2.4                  7.2-9.1    4.3        8.2
//
// SLICES. dX at C = 4096, H = 4096 has 176 cluster tiles, for 66 clusters: in the last of three rounds, a
// third of the device would be idle. So tiles of the last round are cut along K into slices; each slice
// leaves its fp32 sums in scratch, and a second kernel adds them in order. Where cuBLASLt is faster, dX is
// its work (hopper_gemm.cu).
//
// FILTERED (LceFilter), dX leaves out steps of K where E is 0. A kernel lists, for each row of cluster
// tiles, the steps in which either of the cluster's two tiles of E counts. Loader and multipliers walk
// along the list where they otherwise walk along K, and slices are parts of the list. Every slice needs a
// step, since its first product is what sets its sums: a list shorter than the most slices there can be
// takes in steps of zeros, so that rows of which nothing counts come out 0. The loader asks for a step's
// number before it waits for the stage, so the list's latency does not show. Here the multipliers take
// turns, for of a tile half as tall more steps can be left out; and nobody keeps pace, since lists differ
// in length.
//
// THE EXPONENT is taken as 2^(z log2(e) - a log2(e)) (log2(e) / T with a temperature): one fused multiply-add
// and one instruction of the special unit. a log2(e) is rounded once for a row, which would shift all of the
// row's E alike; the rounding error is known (a second fused multiply-add gives it), and the row's sum is
// corrected by it. The target's entry and columns beyond V become 2^-infinity beforehand, in the few tiles
// that have any.
//
// MEASURED on H200s, always at the power limit of 700 W, where the clock sinks to where the work fits in: it
// is energy that costs time, and a card and its heat make 2 to 3% of it. TFLOP/s inside of the layer, by
// events, in chunks of 4096; in brackets the bare product over all N tokens by cuBLASLt, in turn with it:
//
//   N x H x V                    logits           dX   dW (cuBLASLt)
//   16384 x 2048 x 131072     677 (680)    662 (661)       669 (681)   dX is cuBLASLt's, too
//   8192 x 2304 x 256000      691 (701)    673 (682)       689 (699)
//   16384 x 4096 x 128256     681 (695)    663 (704)       675 (653)
//
// On other cards the last row was 690 (684), 672 (667), 683 (651), and the logits made 715 (712). The bare
// products are one launch for all tokens. Beside them stand the kernels that move rows: at H = 2048 the
// targets' logits take 0.13% of the layer, row sums 0.15, scales 0.17, dX's second term 0.18, the targets'
// rows of dW 0.41; together 1.0%, and 1.6% in chunks of 1024; at H = 4096 0.9 and 1.1%. The whole layer over
// its three bare products, in turn, on one card (tools/bench_lce --repeat 9; another run comes out up to
// 0.015 apart):
//
//   N x H x V                 chunk 4096   2048   1024
//   4096 x 4096 x 128256           1.016  1.022  1.064
//   16384 x 2048 x 131072          1.019  1.025  1.083
//   8192 x 2304 x 256000           1.024  1.012  1.086
//   32768 x 4096 x 128256          1.015  1.025  1.070
//
// At 1024 the difference is dW's: 8 V H bytes are read and written for 2 C V H flops, whoever does it. At H =
// 2048 cuBLASLt's best takes 0.73 ms to write dW and 0.87 to add to it (ncu, alone), with memory then moving
// 2.8 TB/s; inside of the layer it makes 580 TFLOP/s instead of 670. The rest is products of less than a
// millisecond that begin and end.
//
// TRIED, and left out. Of the logits: multipliers together, 2 to 7% slower (tiles of 128 x 256: 0 to 5%); a
// band of 32 MiB instead of 16, 2% slower; of 8 or 12, W is read more often than X less; tiles of 128, 144,
// 160 or 176 columns instead of 192, 15, 6, 5 and 0% slower; other orders of a step's wgmmas and hints to
// keep X in the cache and drop W and E, no difference; asking W into the L2 cache ahead, no faster and 10 to
// 20% more bytes through it; four stages, up to 2% slower; 24 and 240 registers instead of 40 and 232, no
// faster. Of dX: asking ahead for E and W, 2% slower; multipliers by turns, 3 to 6% slower. Clusters of four,
// of which 30 run at a time instead of 66 of two: 5 to 6% slower.
//
// dW by this kernel. Its sums added in memory by the copy engine, multipliers by turns: 640 to 700 TFLOP/s in
// the layer at C = 4096, 630 to 660 at 2048, 500 to 530 at 1024, for the L2 cache adds little more than 1
// TB/s of fp32. Added from the registers, which read and write 32 bytes of a row: 530 to 665, 475 to 545, 340
// to 415. Loaded by the copy engine into four boxes a warp, added to there and stored again: 664, 639 and
// 534; with E or dW asked for ahead, 10 to 30% less. cuBLASLt's algorithm with tiles of 128 x 160 in clusters
// of two makes 670 to 690, 670 to 700 and 580 to 620; to find it, algorithms must be measured as a step runs
// them (linear.cu).
//
// dX and dW side by side, each on half of the multiprocessors, so that dW's bytes have twice the time: by
// cuBLASLt the layer is 3% faster at C = 1024 where all blocks of both run at once, and takes 1.6 times as
// long where one has to wait, which is the card's and the algorithm's doing; in one launch of this kernel, dW
// added by boxes, it is 3 to 10% slower than dX and cuBLASLt's dW one after the other.
#ifndef LCE_KERNELS_CUDA_HOPPER_KERNEL_CUH
#define LCE_KERNELS_CUDA_HOPPER_KERNEL_CUH

#include <math.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_ptx.cuh"

enum { TILE_M = 128, TILE_N = 192, TILE_K = 64, CLUSTER = 2 };
enum { GROUP = 128, MULTIPLIERS = 2, THREADS = GROUP * (1 + MULTIPLIERS) };
// A warp stores 16 rows of 128 bytes at a time, from a place of its own.
enum { BOX_ROWS = 16, BOX_BYTES = BOX_ROWS * 128 };
enum { MOST_SLICES = 16 };

enum Output { EXPONENTIALS, SUMS_BF16, SUMS_F32 };

// One of the kernel's products.
template <Output OUTPUT_, bool FILTERED_ = false> struct Kind {
  static constexpr Output OUTPUT = OUTPUT_;
  static constexpr bool FILTERED = FILTERED_;
  // Whether the multipliers work on one tile, its upper and its lower half, or by turns on tiles of their
  // own.
  static constexpr bool TOGETHER = OUTPUT != EXPONENTIALS && !FILTERED;
  // Whether B's rows run along k, as A's do.
  static constexpr bool B_K_INNERMOST = OUTPUT == EXPONENTIALS;
  enum { ROWS = TOGETHER ? MULTIPLIERS * TILE_M : TILE_M, CLUSTER_ROWS = CLUSTER * ROWS };
  enum { A_BYTES = ROWS * TILE_K * 2, STAGE_BYTES = A_BYTES + TILE_N * TILE_K * 2 };
  enum { STAGES = TOGETHER ? 3 : 5 };
  enum { SHARED_BYTES = STAGES * STAGE_BYTES + 4 * MULTIPLIERS * BOX_BYTES + 1024 };
};

// Tiles of `rows` by TILE_N, a cluster's. They are made in bands of `band` rows of tiles, and column after
// column within a band. The first `whole` tiles are made over all of k; the others in `slices` parts each.
struct Work {
  int m, n;
  int rows, m_tiles, n_tiles, k_steps, band;
  int whole, slices, units;
  unsigned long long *pace; // Pacer's; NULL: nobody keeps pace
};

struct Ends {
  const float *anchor;    // logits: [m]; read as infinite where the target is IGNORE_INDEX
  const int32_t *targets; // logits: [m]
  float scale;            // logits: log2(e), times the sharpness
  float *tile_sums;       // logits: [m, n_tiles]
  bool store;             // logits: whether E is kept
  float *out;             // gradient in fp32: [m, n]
  int64_t out_stride;
  float *slices;        // gradient: [units - whole, rows, TILE_N]
  const int32_t *lists; // filtered: [m_tiles, 1 + k_steps], how many steps count and which
};

// One piece of work for a cluster, as one of its blocks sees it.
struct Unit {
  int row, column;    // of the tile's first entry
  int k_begin, k_end; // in steps of TILE_K, or places in the list of them
  int slice;          // where its sums go in Ends.slices, or -1
  bool back;          // from its last step to its first
  __device__ __forceinline__ int steps() const { return k_end - k_begin; }
  __device__ __forceinline__ int step(int place) const { return back ? k_end - 1 - place : k_begin + place; }
};

struct TileAt {
  int row, column; // of a cluster's tile
};

static __device__ __forceinline__ TileAt tile_at(const Work &w, int tile) {
  int of_band = w.band * w.n_tiles, band = tile / of_band, within = tile % of_band;
  int height = min(w.band, w.m_tiles - band * w.band);
  return {(band * w.band + within % height) * w.rows, within / height * TILE_N};
}

#if defined(HOPPER_CODE)

// Filtered: the list for the cluster tiles with this row, its length first.
static __device__ __forceinline__ const int32_t *list_of(const Work &w, const Ends &ends, int row) {
  return ends.lists + (int64_t)(row / w.rows) * (1 + w.k_steps);
}

static __device__ __forceinline__ int first_unit() {
  return blockIdx.x / CLUSTER;
}
static __device__ __forceinline__ int unit_step() {
  return gridDim.x / CLUSTER;
}

// Unit u. Within the slices, the same slice of all tiles comes first.
template <typename K>
static __device__ __forceinline__ Unit unit_at(const Work &w, const Ends &ends, int u, int rank) {
  int tile = u, slice = 0, slices = 1, of_slices = u - w.whole;
  if (of_slices >= 0) {
    int rest = w.m_tiles * w.n_tiles - w.whole;
    tile = w.whole + of_slices % rest;
    slice = of_slices / rest;
    slices = w.slices;
  }
  TileAt at = tile_at(w, tile);
  Unit unit;
  unit.row = at.row + rank * K::ROWS;
  unit.column = at.column;
  int steps = K::FILTERED ? list_of(w, ends, at.row)[0] : w.k_steps;
  unit.k_begin = (int)((int64_t)steps * slice / slices);
  unit.k_end = (int)((int64_t)steps * (slice + 1) / slices);
  unit.slice = of_slices >= 0 ? of_slices : -1;
  unit.back = w.pace && u / unit_step() % 2;
  return unit;
}

// How many of the tile's columns are worked on.
template <typename K> static __device__ __forceinline__ int columns_of(const Work &w, const Unit &unit) {
  return K::B_K_INNERMOST ? TILE_N : min(TILE_N, (w.n - unit.column + 63) / 64 * 64);
}

// The ring of stages. Loader and multipliers walk around it on their own; a stage's barriers change phase
// once a round, so whoever waits needs the parity of its own round.
struct Ring {
  uint32_t first; // shared memory
  uint64_t *full, *empty;
};

template <typename K> struct Place {
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

// --- the loader --------------------------------------------------------------------------------------------

// Keeps all clusters near each other in k. Every EVERY steps one of a cluster's loaders says so in memory,
// and goes on once it is no more than LEAD such stretches before those at work, on average. It asks a
// stretch before it needs the answer. Whoever has looked PATIENCE times in vain, a fraction of a
// millisecond, never waits again: clusters may not be running yet where others use the device, too.
//
// One number in memory holds all that is to know: the stretches of the clusters that are still at work, and
// 2^32 for each that is through. The last to leave makes it 0 again.
struct Pacer {
  enum { EVERY = 4, LEAD = 1, PATIENCE = 64 };
  unsigned long long *pace, seen = 0; // NULL: nobody keeps pace, or the cluster's other loader does
  unsigned passed = 0;                // stretches
  int steps_left = EVERY;
  bool patient = true;
  __device__ Pacer(const Work &w, int rank) : pace(rank == 0 ? w.pace : nullptr) {}

  __device__ __forceinline__ bool too_far() const {
    unsigned at_work = unit_step() - (unsigned)(seen >> 32);
    return passed > LEAD && (unsigned)seen < (passed - LEAD) * at_work;
  }

  __device__ __forceinline__ void step(bool acts) {
    if (!pace || --steps_left > 0) return;
    steps_left = EVERY;
    for (int looks = 0; patient && too_far(); looks++) {
      seen = memory_look(pace);
      patient = looks < PATIENCE;
    }
    passed++;
    if (acts) memory_add(pace, 1);
    seen = memory_look(pace);
  }

  __device__ __forceinline__ void leave(bool acts) {
    if (!pace || !acts) return;
    unsigned long long before = atomicAdd(pace, (1ull << 32) - passed);
    if (before >> 32 == unit_step() - 1) *pace = 0;
  }
};

// This block's share of a stage's boxes of B, for the whole cluster.
template <typename K>
static __device__ __forceinline__ void load_b(uint32_t stage, const CUtensorMap *b, uint64_t *full,
                                              int column, int columns, int k, int rank) {
  constexpr uint16_t everyone = (1 << CLUSTER) - 1;
  if (K::B_K_INNERMOST) { // some of the columns
    constexpr int share = TILE_N / CLUSTER;
    box_load_multicast(stage + rank * share * 128, b, full, k * TILE_K, column + rank * share, everyone);
  } else { // some of the k, of each block of 64 columns
    constexpr int share = TILE_K / CLUSTER;
    for (int i = 0; i < columns / 64; i++)
      box_load_multicast(stage + i * 8192 + rank * share * 128, b, full, column + i * 64,
                         k * TILE_K + rank * share, everyone);
  }
}

// The work of a whole warp, of which one lane acts: so addresses are the warp's and not a thread's, and the
// way from an empty stage to its loads, on which everything waits, is a few instructions.
template <typename K>
static __device__ __forceinline__ void load_stages(const Work &w, const Ends &ends, const Ring &ring,
                                                   const CUtensorMap *a, const CUtensorMap *b, int rank) {
  const bool acts = one_lane();
  Pacer pacer(w, rank);
  Place<K> at;
  at.parity = 1; // a fresh barrier counts as past its odd phase: all stages are empty
  Unit unit = unit_at<K>(w, ends, first_unit(), rank), next = unit;
  for (int u = first_unit(); u < w.units; u += unit_step(), unit = next) {
    int columns = columns_of<K>(w, unit), bytes = K::A_BYTES + columns * TILE_K * 2;
    for (int place = 0; place < unit.steps(); place++, at.next()) {
      int k = unit.step(place);
      if (K::FILTERED) k = list_of(w, ends, unit.row)[1 + k];
      uint64_t *full = &ring.full[at.stage];
      uint32_t stage = ring.first + at.stage * K::STAGE_BYTES;
      pacer.step(acts);
      barrier_wait(&ring.empty[at.stage], at.parity);
      if (acts) {
        barrier_arrive_expecting(full, bytes); // both halves of B count, whoever sends them
        box_load(stage, a, full, k * TILE_K, unit.row);
        load_b<K>(stage + K::A_BYTES, b, full, unit.column, columns, k, rank);
      }
      // Now, not when it is needed: its divisions would hold up a stage.
      if (place == 0 && u + unit_step() < w.units) next = unit_at<K>(w, ends, u + unit_step(), rank);
    }
  }
  pacer.leave(acts);
}

// --- the multipliers ---------------------------------------------------------------------------------------

// A thread's sums: of rows [64 h, 64 h + 64) of the tile in sums[h], as wgmma_64_by leaves them.
typedef float Sums[TILE_M / 64][TILE_N / 2];

// The stage may be filled again once each block that it was sent to has said so, to each block that sends
// to it.
static __device__ __forceinline__ void release(const Ring &ring, int stage) {
  if (threadIdx.x % GROUP < CLUSTER) barrier_arrive_at(&ring.empty[stage], threadIdx.x % GROUP);
}

// All products of a unit, of rows from byte `a_first` of A's part of a stage on. `last_stage_is_here` is
// called once nothing remains to be waited for.
template <typename K, int COLUMNS, typename F>
static __device__ __forceinline__ void multiply(Sums &sums, const Ring &ring, Place<K> &at, int steps,
                                                uint32_t a_first, F last_stage_is_here) {
  // Bytes from 16 values of k to the next 16.
  constexpr int a_step = 32, b_step = K::B_K_INNERMOST ? 32 : 2048;
  int before = -1;
  for (int k = 0; k < steps; k++, at.next()) {
    barrier_wait(&ring.full[at.stage], at.parity);
    if (k + 1 == steps) last_stage_is_here();
    uint32_t stage = ring.first + at.stage * K::STAGE_BYTES;
    uint64_t a = tile_descriptor(stage + a_first, true),
             b = tile_descriptor(stage + K::A_BYTES, K::B_K_INNERMOST);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < TILE_K / 16; i++)
#pragma unroll
      for (int h = 0; h < TILE_M / 64; h++)
        wgmma_64_by<COLUMNS, K::B_K_INNERMOST>(sums[h], tile_further(a, h * 8192 + i * a_step),
                                               tile_further(b, i * b_step), k > 0 || i > 0);
    wgmma_commit();
    if (before >= 0) {
      wgmma_wait<1>(); // the step before this one has read its stage
      release(ring, before);
    }
    before = at.stage;
  }
  wgmma_wait<0>();
  release(ring, before);
}

// Which of the tile's entries a thread holds in its half h: columns `column` + 8 j and the next in
// sums[h][4 j] and [4 j + 1] for row(h), and in [4 j + 2], [4 j + 3] for the row 8 below.
struct Lane {
  int warp, lane, column;
  __device__ Lane() : warp(threadIdx.x % GROUP / 32), lane(threadIdx.x % 32), column(threadIdx.x % 4 * 2) {}
  __device__ __forceinline__ int first_row(int h) const { return h * 64 + warp * 16; }
  __device__ __forceinline__ int row(int h) const { return first_row(h) + lane / 4; }
};

static __device__ __forceinline__ uint32_t pack(float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t &>(both);
}

// A warp's 16 rows by 64 columns, sums[0 .. 32) of each thread, into a box.
static __device__ __forceinline__ void fill_bf16(uint32_t box, const float *sums, int lane) {
  int row = lane % 16;
#pragma unroll
  for (int j = 0; j < 8;
       j += 2) { // lanes 0 to 15 give the rows of columns [8 j, 8 j + 8), the others of the next 8
    int piece = (j + lane / 16) ^ (row & 7);
    const float *s = sums + j * 4;
    store_blocks(box + row * 128 + piece * 16, pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]),
                 pack(s[6], s[7]));
  }
}

static __device__ __forceinline__ void store_half_bf16(const CUtensorMap *out, uint32_t box,
                                                       const float *sums, int x, int y, int lane) {
#pragma unroll
  for (int part = 0; part < TILE_N / 64; part++) {
    if (lane == 0) stores_wait_read<0>(); // what was in the box before has been read
    __syncwarp();
    fill_bf16(box, sums + part * 32, lane);
    copy_engine_fence();
    __syncwarp();
    if (lane == 0) {
      box_store(out, box, x + part * 64, y);
      stores_commit();
    }
  }
}

// fp32, straight from the registers: four lanes write 32 bytes of a row.
static __device__ __forceinline__ void store_half_f32(float *out, int64_t stride, int rows, int columns,
                                                      const float *sums, const Lane &me) {
#pragma unroll
  for (int below = 0; below < 2; below++) {
    if (me.lane / 4 + 8 * below >= rows) continue;
    float *to = out + (int64_t)(me.lane / 4 + 8 * below) * stride + me.column;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++)
      if (me.column + 8 * j < columns)
        *reinterpret_cast<float2 *>(to + 8 * j) =
            make_float2(sums[4 * j + 2 * below], sums[4 * j + 2 * below + 1]);
  }
}

// Logits into exponentials, in place; their sums over the thread's entries of the two rows in `row_sums`.
static __device__ __forceinline__ void exponentials(float (&z)[TILE_N / 2], float (&row_sums)[2],
                                                    const Work &w, const Ends &ends, int row,
                                                    int first_column, int column) {
  constexpr float LN_2 = 0.6931471805599453f;
  float shift[2], correction[2];
  int target[2];
  bool masked = first_column + TILE_N > w.n;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool inside = row + 8 * i < w.m;
    int32_t of_row = inside ? ends.targets[row + 8 * i] : ELSEWHERE;
    float a = of_row == IGNORE_INDEX ? INFINITY : inside ? ends.anchor[row + 8 * i] : 0.0f;
    target[i] = of_row - first_column;
    masked |= (unsigned)target[i] < TILE_N;
    shift[i] = -a * ends.scale;
    // -a log2(e) = shift + error; 2^error = 1 + error ln 2. An infinite anchor has no error.
    correction[i] = isfinite(shift[i]) ? fmaf(fmaf(-a, ends.scale, -shift[i]), LN_2, 1.0f) : 1.0f;
    row_sums[i] = 0;
  }
  if (__any_sync(~0u, masked)) {
#pragma unroll
    for (int j = 0; j < TILE_N / 2; j++) {
      int at = j / 4 * 8 + column + j % 2;
      if (at == target[j / 2 % 2] || first_column + at >= w.n) z[j] = -INFINITY;
    }
  }
#pragma unroll
  for (int j = 0; j < TILE_N / 2; j++) {
    z[j] = exp2_fast(fmaf(z[j], ends.scale, shift[j / 2 % 2]));
    row_sums[j / 2 % 2] += z[j];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) row_sums[i] *= correction[i];
}

static __device__ __forceinline__ void finish_logits(Sums &sums, const Work &w, const Ends &ends,
                                                     const Unit &unit, const CUtensorMap *out, uint32_t box) {
  const Lane me;
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++) {
    float row_sums[2];
    int row = unit.row + me.row(h);
    exponentials(sums[h], row_sums, w, ends, row, unit.column, me.column);
    if (ends.store) store_half_bf16(out, box, sums[h], unit.column, unit.row + me.first_row(h), me.lane);
#pragma unroll
    for (int i = 0; i < 2; i++) { // four lanes share a row
      row_sums[i] += __shfl_xor_sync(~0u, row_sums[i], 1);
      row_sums[i] += __shfl_xor_sync(~0u, row_sums[i], 2);
      if (me.lane % 4 == 0 && row + 8 * i < w.m)
        ends.tile_sums[(int64_t)(row + 8 * i) * w.n_tiles + unit.column / TILE_N] = row_sums[i];
    }
  }
}

template <typename K>
static __device__ __forceinline__ void finish_gradient(Sums &sums, const Work &w, const Ends &ends,
                                                       const Unit &unit, const CUtensorMap *out, uint32_t box,
                                                       int rank, int group_row) {
  const Lane me;
#pragma unroll
  for (int h = 0; h < TILE_M / 64; h++) {
    int row = group_row + me.first_row(h), below = w.m - unit.row - row, right = w.n - unit.column;
    if (unit.slice >= 0)
      store_half_f32(ends.slices + (((int64_t)unit.slice * CLUSTER + rank) * K::ROWS + row) * TILE_N, TILE_N,
                     16, TILE_N, sums[h], me);
    else if (K::OUTPUT == SUMS_F32)
      store_half_f32(ends.out + (unit.row + row) * ends.out_stride + unit.column, ends.out_stride, below,
                     right, sums[h], me);
    else
      store_half_bf16(out, box, sums[h], unit.column, unit.row + row, me.lane);
  }
}

// The multipliers' turns: barrier 1 + g opens when the other group has all its stages. Without turns, group 1
// might look for a stage two rounds ahead of the ring, and a parity cannot tell two rounds apart.
static __device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(2 * GROUP) : "memory");
}
static __device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + group), "n"(2 * GROUP) : "memory");
}

template <typename K>
static __device__ __forceinline__ void multiply_and_finish(const Work &w, const Ends &ends, const Ring &ring,
                                                           const CUtensorMap *out, uint32_t boxes, int group,
                                                           int rank) {
  uint32_t box = boxes + (group * 4 + threadIdx.x % GROUP / 32) * BOX_BYTES;
  int group_row = K::TOGETHER ? group * TILE_M : 0, turn = 0;
  Sums sums;
  Place<K> at;
  for (int u = first_unit(); u < w.units; u += unit_step(), turn ^= 1) {
    Unit unit = unit_at<K>(w, ends, u, rank);
    if (!K::TOGETHER && turn != group) {
      at.advance(unit.steps());
      continue;
    }
    if (!K::TOGETHER && u >= unit_step()) wait_for_turn(group);
    bool more = !K::TOGETHER && u + unit_step() < w.units;
    auto last_stage_is_here = [&] {
      if (more) give_turn(group ^ 1);
    };
    int columns = columns_of<K>(w, unit), a_first = group_row * 128;
    if (columns > 128)
      multiply<K, 192>(sums, ring, at, unit.steps(), a_first, last_stage_is_here);
    else if (columns > 64)
      multiply<K, 128>(sums, ring, at, unit.steps(), a_first, last_stage_is_here);
    else
      multiply<K, 64>(sums, ring, at, unit.steps(), a_first, last_stage_is_here);
    if (K::OUTPUT == EXPONENTIALS)
      finish_logits(sums, w, ends, unit, out, box);
    else
      finish_gradient<K>(sums, w, ends, unit, out, box, rank, group_row);
  }
  if (threadIdx.x % 32 == 0) stores_wait_all();
}

#endif

// --- the kernel --------------------------------------------------------------------------------------------

template <typename K>
static __global__ void __launch_bounds__(THREADS, 1)
    product_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                   const __grid_constant__ CUtensorMap out, const __grid_constant__ Work w,
                   const __grid_constant__ Ends ends) {
#if defined(HOPPER_CODE)
  extern __shared__ uint8_t shared[];
  __shared__ __align__(8) uint64_t full[K::STAGES], empty[K::STAGES];
  Ring ring = {(shared_address(shared) + 1023) / 1024 * 1024, full, empty};
  uint32_t boxes = ring.first + K::STAGES * K::STAGE_BYTES;
  // From lane 0, so that the compiler knows: a warp has one role.
  int rank = (int)cluster_rank(), warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0),
      group = warp / (GROUP / 32) - 1;
  if (threadIdx.x == 0) {
    for (int s = 0; s < K::STAGES; s++) {
      barrier_init(&full[s], 1); // the loader, and the bytes it announces
      barrier_init(&empty[s], CLUSTER * (K::TOGETHER ? MULTIPLIERS : 1)); // who multiplies, in each block
    }
    barrier_init_fence();
  }
  cluster_synchronize();
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (group < 0) {
    registers_shrink_to<40>();
    if (warp == 0) load_stages<K>(w, ends, ring, &a, &b, rank);
  } else {
    registers_grow_to<232>();
    multiply_and_finish<K>(w, ends, ring, &out, boxes, group, rank);
  }
  cluster_synchronize(); // nobody leaves while others may still arrive at its barriers
#else
  __trap(); // never launched there: see prepare() in hopper_gemm.cu
#endif
}

#endif
