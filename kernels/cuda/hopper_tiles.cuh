// The work of the GEMMs on Hopper (hopper_kernel.cuh): an epilogue's settings, the order in which clusters
// take a result's tiles, and the place of a thread's accumulators in a tile.
#pragma once

#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_ptx.cuh"

enum { TILE_M = 128, TILE_N = 192, TILE_K = 64, CLUSTER = 2, ALL_CTAS = (1 << CLUSTER) - 1 };
enum { WARPGROUP = 128, CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS) };
// A warp stores 16 rows of 128 bytes at a time, through a buffer of its own.
enum { STORE_ROWS = 16, STORE_BYTES = STORE_ROWS * 128 };
enum { MAX_SPLITS = 16 };

// Tiles of a cluster, `rows` by `columns`, in rasterisation groups of `group` rows of tiles, column after
// column within a group. The first `whole` tiles take all of K, the others `splits` parts of it each.
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
  RowParts parts;         // logits: [m, n_tiles]
  const bf16 *bias;       // logits: [n], or NULL
  float softcap;          // logits: 0 for none
  bool store;             // logits: E is stored
  float *out;             // dX in fp32: [m, n]
  int64_t out_stride;
  float *partials;        // dX: [work_tiles - whole, rows x columns of a cluster's tile]
  const KList *lists;     // sampled: one per cluster tile's rows; dW: one per column of tiles
  const KStep *steps;     // sampled: the lists' k-steps
  const int32_t *columns; // dW: [1 + n_tiles], the number of columns of tiles with lists, then their indices
  const int32_t *accumulate;           // dW
  float unit;                          // logits: z's unit where squares are summed, or 0 without them
  float *own[4];                       // an epilogue's own
  const float *x_scale, *weight_scale; // logits of codes: [m] and [1]
};

// A piece of work for a cluster, as one of its CTAs sees it.
struct WorkTile {
  int row, column;    // the tile's first entry
  int k_begin, k_end; // in steps of TILE_K, or indices into EpilogueParams.steps
  int split;          // index of its partials in EpilogueParams, or -1
  bool reverse;       // from the last k-step to the first
  DEVICE int steps() const { return k_end - k_begin; }
  DEVICE int step(int i) const { return reverse ? k_end - 1 - i : k_begin + i; }
};

struct TileCoord {
  int row, column; // the first entry of a cluster's tile
};

static DEVICE TileCoord tile_coord(const TileScheduler &s, int tile) {
  int group_tiles = s.group * s.n_tiles, group = tile / group_tiles, within = tile % group_tiles;
  int height = min(s.group, s.m_tiles - group * s.group);
  return {(group * s.group + within % height) * s.rows, within / height * s.columns};
}

static DEVICE int first_work() {
  return blockIdx.x / CLUSTER;
}
static DEVICE int work_stride() {
  return gridDim.x / CLUSTER;
}

template <typename K> static DEVICE int work_count(const TileScheduler &s, const EpilogueParams &params) {
  if constexpr (K::OWN_WORK) return K::work_count(s, params);
  return K::COLUMN_LISTS ? params.columns[0] * s.m_tiles : s.work_tiles;
}

// Work tile w. Split tiles are ordered by part: part 0 of every tile, then part 1, ...
template <typename K>
static DEVICE WorkTile work_tile(const TileScheduler &s, const EpilogueParams &params, int w, int rank) {
  int tile = w, part = 0, parts = 1, split_index = w - s.whole;
  if constexpr (K::OWN_WORK) K::work_part(s, params, w, tile, part, parts, split_index);
  if (split_index >= 0) {
    int rest = s.m_tiles * s.n_tiles - s.whole;
    tile = s.whole + split_index % rest;
    part = split_index / rest;
    parts = s.splits;
  }
  TileCoord at;
  KList list = {0, s.k_steps};
  if (K::COLUMN_LISTS) {
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
  work.split = split_index >= 0 ? split_index : -1;
  work.reverse = s.throttle && w / work_stride() % 2;
  return work;
}

// Returns the number of the tile's columns that are computed.
template <typename K> static DEVICE int tile_columns(const TileScheduler &s, const WorkTile &w) {
  int columns = K::B_K_MAJOR ? TILE_N : min(TILE_N, (s.n - w.column + 63) / 64 * 64);
  return K::SHARE_A ? max(64, columns) : columns; // the second of two tiles side by side may lie beyond N
}

struct Pipeline {
  uint32_t stages; // in shared memory
  uint64_t *full, *empty;
  float *buffers;     // the epilogue's
  uint64_t *barriers; // likewise
};

// A thread's accumulators: acc[h] has the tile's rows [64 h, 64 h + 64), as wgmma leaves them.
typedef float Accumulators[TILE_M / 64][TILE_N / 2];

// The tile's entries that a thread holds in its half h: columns `column` + 8 j and the next in acc[h][4 j]
// and [4 j + 1] for row(h), and in [4 j + 2], [4 j + 3] for the row 8 below.
struct ThreadCoord {
  int warp, lane, column;
  __device__ ThreadCoord()
      : warp(threadIdx.x % WARPGROUP / 32), lane(threadIdx.x % 32), column(threadIdx.x % 4 * 2) {}
  DEVICE int first_row(int h) const { return h * 64 + warp * 16; }
  DEVICE int row(int h) const { return first_row(h) + lane / 4; }
};

// A consumer warp, as an epilogue sees it.
struct Consumer {
  const TileScheduler &s;
  const EpilogueParams &params;
  const Pipeline &pipeline;
  const CUtensorMap *out, *gate_up;
  uint32_t buffer;               // the warp's
  int consumer, warp, rank, row; // warp: counted over all consumers; row: the consumer's first in a tile
};

// An epilogue's settings, by default; each epilogue derives from this.
struct Epilogue {
  // True: the consumers share a tile, as its upper and lower half; false: each has its own (ping-pong).
  static constexpr bool COOPERATIVE = false;
  static constexpr bool A_K_MAJOR = true, B_K_MAJOR = false;
  // True: A and B are codes, both K-major; a k-step's 128 bytes hold twice as many.
  static constexpr bool CODES = false;
  // True: K is short, so tiles are rasterised to keep their rows of A in L2 while B streams by.
  static constexpr bool KEEPS_A = false;
  // True: each row of tiles has a list of k-steps; or each column of tiles, with B in panels.
  static constexpr bool SAMPLED = false, COLUMN_LISTS = false;
  // True: the epilogue's work_count() and work_part() share out its work, by tile and part of a tile.
  static constexpr bool OWN_WORK = false;
  // True: a cluster's tiles lie side by side and share A; false: one below the other, sharing B.
  static constexpr bool SHARE_A = false;
  // True: B's tile is half gates and half ups, the ups N columns of W further on.
  static constexpr bool GATE_UP = false;
  // Bytes of buffers for each warp and for all besides; barriers for each consumer warp and for all.
  enum { STAGES = 4, WARP_BYTES = STORE_BYTES, CTA_BYTES = 0, WARP_BARRIERS = 0, CTA_BARRIERS = 0 };
  // True: a warp of its own runs load_addend().
  static constexpr bool LOADS = false;
  template <typename K>
  static __device__ void load_addend(const TileScheduler &, const EpilogueParams &, const Pipeline &,
                                     const CUtensorMap *, int) {}
  // Runs before a tile's main loop; run() follows it, with the tile's accumulators.
  __device__ void begin(const Consumer &, const WorkTile &, int) {}
};

// An epilogue and the sizes derived from it.
template <typename Epilogue> struct KernelTraits : Epilogue {
  enum { ROWS = Epilogue::COOPERATIVE ? CONSUMERS * TILE_M : TILE_M };
  enum { STEP = Epilogue::CODES ? 2 * TILE_K : TILE_K }; // values of K
  enum { CLUSTER_ROWS = Epilogue::SHARE_A ? ROWS : CLUSTER * ROWS };
  enum { CLUSTER_COLUMNS = TILE_N * (Epilogue::SHARE_A ? CLUSTER : 1) / (Epilogue::GATE_UP ? 2 : 1) };
  enum { A_BYTES = ROWS * TILE_K * 2, STAGE_BYTES = A_BYTES + TILE_N * TILE_K * 2 };
  enum { EPILOGUE_BYTES = 4 * CONSUMERS * Epilogue::WARP_BYTES + Epilogue::CTA_BYTES };
  enum { SHARED_BYTES = Epilogue::STAGES * STAGE_BYTES + EPILOGUE_BYTES + 1024 };
};
