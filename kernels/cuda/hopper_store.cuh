// Epilogues of the GEMMs on Hopper that store a tile as it is: dX in bf16, fp32, or as split-K's partials.
#pragma once

#include "kernels/cuda/hopper_tiles.cuh"

// A thread's accumulators for 16 rows, stored as they are: pair(i) returns values i and i + 1.
static DEVICE auto pairs_of(const float *acc) {
  return [acc](int i) { return make_float2(acc[i], acc[i + 1]); };
}

static DEVICE uint32_t pack_bf16(float2 pair) {
  return pack_bf16(pair.x, pair.y);
}

// Stores a warp's 16 rows by TILE_N columns through its buffers, in tiles of 64 columns.
template <int BUFFERS = 1, typename Pair>
static DEVICE void epilogue_store_bf16(const CUtensorMap *out, uint32_t buffer, Pair pair, int x, int y,
                                       int lane) {
  EACH (part, TILE_N / 64) {
    uint32_t to = buffer + part % BUFFERS * STORE_BYTES;
    if (lane == 0) tma_store_wait_read<BUFFERS - 1>(); // its previous contents have been read
    __syncwarp();
    int row = lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) { // lanes 0 to 15 address columns [8 j, 8 j + 8), others the next 8
      int chunk = (j + lane / 16) ^ (row & 7);
      int i = part * 32 + j * 4;
      stmatrix_x4(to + row * 128 + chunk * 16, pack_bf16(pair(i)), pack_bf16(pair(i + 2)),
                  pack_bf16(pair(i + 4)), pack_bf16(pair(i + 6)));
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      tma_store_2d(out, to, x + part * 64, y);
      tma_store_commit();
    }
  }
}

// Stores fp32 straight from the registers: four lanes write 32 bytes of a row.
template <typename Pair>
static DEVICE void epilogue_store_f32(float *out, int64_t stride, int rows, int columns, Pair pair,
                                      const ThreadCoord &me) {
  EACH (below, 2) {
    if (me.lane / 4 + 8 * below >= rows) continue;
    float *to = out + (int64_t)(me.lane / 4 + 8 * below) * stride + me.column;
    EACH (j, TILE_N / 8)
      if (me.column + 8 * j < columns) *reinterpret_cast<float2 *>(to + 8 * j) = pair(4 * j + 2 * below);
  }
}

// Sampled dX is ping-pong, since a tile of fewer rows has more steps to skip.
template <bool F32, bool SAMPLED_ = false> struct Store : Epilogue {
  static constexpr bool SAMPLED = SAMPLED_, COOPERATIVE = !SAMPLED, SHARE_A = SAMPLED;
  enum { STAGES = COOPERATIVE ? 3 : 5 };
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      int row = c.row + me.first_row(h), below = c.s.m - work.row - row, right = c.s.n - work.column;
      if (work.split >= 0)
        epilogue_store_f32(c.params.partials +
                               (((int64_t)work.split * CLUSTER + c.rank) * K::ROWS + row) * TILE_N,
                           TILE_N, 16, TILE_N, pairs_of(acc[h]), me);
      else if (F32)
        epilogue_store_f32(c.params.out + (work.row + row) * c.params.out_stride + work.column,
                           c.params.out_stride, below, right, pairs_of(acc[h]), me);
      else
        epilogue_store_bf16(c.out, c.buffer, pairs_of(acc[h]), work.column, work.row + row, me.lane);
    }
  }
};
