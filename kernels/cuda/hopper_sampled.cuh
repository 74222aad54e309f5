// The epilogue of the GEMMs on Hopper (hopper_kernel.cuh) for sampled dW, which is added to memory.
#pragma once

#include "kernels/cuda/hopper_tiles.cuh"

// Each pair of a consumer's warps has a buffer of TILE_N rows by 128 bytes.
enum { SUM_BUFFERS = 2, SUM_COLUMNS = 32, SUM_BYTES = TILE_N * 128 };
// The barriers for full buffers, by consumer, come before those for empty ones.
enum { SUM_FULL = CONSUMERS * SUM_BUFFERS };

// The first column of buffer `pair` in a tile's part of dW, for half h of the warps' rows.
static DEVICE int sum_column(int h, int pair) {
  return h * 64 + pair * SUM_COLUMNS;
}

struct AddF32 : Epilogue {
  static constexpr bool A_K_MAJOR = false, SAMPLED = true, COLUMN_LISTS = true, LOADS = true;
  enum { WARP_BYTES = 0, CTA_BYTES = SUM_BUFFERS * SUM_BYTES, CTA_BARRIERS = SUM_FULL + SUM_BUFFERS };
  // Brings the addend into the buffers, half a tile at a time, and the next tile into L2; run by a warp of
  // its own. Without `accumulate` it only says when a buffer may be written. Each consumer has full barriers.
  template <typename K>
  static DEVICE void load_addend(const TileScheduler &s, const EpilogueParams &params,
                                 const Pipeline &pipeline, const CUtensorMap *out, int rank) {
    const bool elected = elect_one(), accumulate = *params.accumulate;
    int count = work_count<K>(s, params), turn = 0;
    if (first_work() >= count) return;
    WorkTile work = work_tile<K>(s, params, first_work(), rank), next = work;
    for (int w = first_work(); w < count; w += work_stride(), turn ^= 1, work = next) {
      if (w + work_stride() < count) next = work_tile<K>(s, params, w + work_stride(), rank);
      for (int i = 0; i < 2 * SUM_BUFFERS; i++) {
        int h = i / SUM_BUFFERS, buffer = i % SUM_BUFFERS, column = sum_column(h, buffer);
        uint64_t *full = &pipeline.barriers[turn * SUM_BUFFERS + buffer];
        mbarrier_wait(&pipeline.barriers[SUM_FULL + buffer], h ^ 1);
        if (!elected) continue;
        mbarrier_arrive_expect_tx(full, accumulate ? SUM_BYTES : 0);
        if (!accumulate) continue;
        tma_load_2d(shared_address(pipeline.buffers + buffer * (SUM_BYTES / 4)), out, full, work.row + column,
                    work.column);
        if (w + work_stride() < count) tma_prefetch_2d(out, next.row + column, next.column);
      }
    }
  }

  // out (+)= alpha times the tile's transpose. A pair of warps adds 32 columns of `out`, half of its rows, at
  // a time to load_addend's buffer. Swizzled, so that a warp's accesses meet no bank twice.
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    constexpr int GROUP = 8; // accesses on their way together
    const bool accumulate = *c.params.accumulate;
    const ThreadCoord me;
    const int pair = me.warp / 2;
    const bool stores = me.warp % 2 == 0 && me.lane == 0;
    float *buffer = c.pipeline.buffers + pair * (SUM_BYTES / 4);
    EACH (h, TILE_M / 64) {
      mbarrier_wait(&c.pipeline.barriers[c.consumer * SUM_BUFFERS + pair], h);
      EACH (below, 2) {
        int column = me.warp % 2 * 16 + me.lane / 4 + 8 * below; // in the buffer
        float *to[2];
        EACH (i, 2)
          to[i] = buffer + (me.column + i) * SUM_COLUMNS + (column / 4 ^ (me.column + i)) * 4 + column % 4;
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j += GROUP / 2) {
          float sum[GROUP] = {};
          EACH (i, GROUP)
            if (accumulate) sum[i] = to[i % 2][(j + i / 2) * 8 * SUM_COLUMNS];
          EACH (i, GROUP)
            to[i % 2][(j + i / 2) * 8 * SUM_COLUMNS] =
                fmaf(c.params.scale, acc[h][4 * (j + i / 2) + 2 * below + i % 2], sum[i]);
        }
      }
      fence_proxy_async();
      named_barrier_sync<64>(3 + 2 * c.consumer + pair);
      if (!stores) continue;
      tma_store_2d(c.out, shared_address(buffer), work.row + sum_column(h, pair), work.column);
      tma_store_commit();
      tma_store_wait_read<0>();
      mbarrier_arrive(&c.pipeline.barriers[SUM_FULL + pair]);
    }
  }
};
