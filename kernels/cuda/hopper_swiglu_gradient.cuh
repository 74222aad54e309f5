// The epilogue of the GEMMs on Hopper (hopper_kernel.cuh) for SwiGLU's gradient.
#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/hopper_tiles.cuh"

// Gate and up arrive 16 rows by 64 columns at a time.
enum { GATE_UP_BYTES = 2 * STORE_BYTES, GATE_UP_BUFFERS = 2 };
static_assert((int)GATE_UP_BUFFERS <= TILE_M / 64, "each tile has at least so many pieces");

// Gates and ups come in pieces of 16 rows by 64 columns, the first during a tile's main loop; a piece's
// gradients leave from its buffer.
struct SwigluGradient : Epilogue {
  static constexpr bool KEEPS_A = true;
  enum { WARP_BYTES = GATE_UP_BUFFERS * GATE_UP_BYTES, WARP_BARRIERS = GATE_UP_BUFFERS };
  int taken = 0;           // pieces of all tiles so far
  int row, column, across; // row and column: the tile's; across: pieces side by side

  DEVICE uint32_t buffer(const Consumer &c, int i) const {
    return c.buffer + (taken + i) % GATE_UP_BUFFERS * GATE_UP_BYTES;
  }
  // One lane loads piece i of the tile.
  DEVICE void load(const Consumer &c, int i) const {
    uint64_t *barrier = &full(c)[(taken + i) % GATE_UP_BUFFERS];
    mbarrier_arrive_expect_tx(barrier, GATE_UP_BYTES);
    tma_load_3d(buffer(c, i), c.gate_up, barrier, column + i % across * 64, row + i / across * 64, 0);
  }
  DEVICE void begin(const Consumer &c, const WorkTile &work, int columns) {
    const ThreadCoord me;
    row = work.row + me.first_row(0), column = work.column, across = columns / 64;
    if (me.lane == 0) {
      tma_store_wait_read<0>();
      for (int i = 0; i < GATE_UP_BUFFERS; i++) load(c, i);
    }
    __syncwarp();
  }
  DEVICE void wait(const Consumer &c, int i) const {
    mbarrier_wait(&full(c)[(taken + i) % GATE_UP_BUFFERS], (taken + i) / GATE_UP_BUFFERS & 1);
    __syncwarp();
  }
  static DEVICE uint64_t *full(const Consumer &c) { return c.pipeline.barriers + c.warp * GATE_UP_BUFFERS; }
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &) {
    const ThreadCoord me;
    const int line = me.lane % 16;
    EACH (h, TILE_M / 64)
      EACH (part, TILE_N / 64) {
        if (part >= across) continue;
        int piece = h * across + part;
        wait(c, piece);
#pragma unroll
        for (int j = 0; j < 8; j += 2) { // 8 columns each
          uint32_t at = buffer(c, piece) + line * 128 + ((j + me.lane / 16) ^ (line & 7)) * 16;
          const float *d = acc[h] + part * 32 + j * 4;
          uint32_t gate[4], up[4];
          ldmatrix_x4(gate, at);
          ldmatrix_x4(up, at + STORE_BYTES);
          EACH (i, 4) {
            float2 g = unpack_bf16(gate[i]), u = unpack_bf16(up[i]);
            SwiGlu::gradient(g.x, u.x, d[2 * i]);
            SwiGlu::gradient(g.y, u.y, d[2 * i + 1]);
            gate[i] = pack_bf16(g.x, g.y), up[i] = pack_bf16(u.x, u.y);
          }
          stmatrix_x4(at, gate[0], gate[1], gate[2], gate[3]);
          stmatrix_x4(at + STORE_BYTES, up[0], up[1], up[2], up[3]);
        }
        fence_proxy_async();
        __syncwarp();
        int next = piece - 1 + GATE_UP_BUFFERS; // takes the buffer of the piece before
        if (me.lane == 0) {
          tma_store_3d(c.out, buffer(c, piece), column + part * 64, row + h * 64, 0);
          tma_store_commit();
          if (piece >= 1 && next < 2 * across) {
            tma_store_wait_read<1>();
            load(c, next);
          }
        }
        __syncwarp();
      }
    taken += 2 * across;
  }
};
