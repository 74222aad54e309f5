// The epilogue of the GEMMs on Hopper (hopper_kernel.cuh) for SwiGLU.
#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/hopper_tiles.cuh"

// Gate, up and activation leave 16 rows by 32 columns at a time.
enum { SWIGLU_PART = STORE_BYTES / 2, SWIGLU_BYTES = 3 * SWIGLU_PART };

struct Swiglu : Epilogue {
  static constexpr bool B_K_MAJOR = true, KEEPS_A = true, GATE_UP = true;
  enum { WARP_BYTES = 2 * SWIGLU_BYTES };
  // acc[h][0, 48) holds gates, acc[h][48, 96) the ups of the same columns. The activation is computed from
  // the rounded values, as in recomputation. 32 columns at a time.
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    constexpr int UP = TILE_N / 4, PARTS = TILE_N / 2 / 32;
    const ThreadCoord me;
    const int row = me.lane % 16;
    EACH (h, TILE_M / 64)
      EACH (part, PARTS) {
        const uint32_t buffer = c.buffer + (h * PARTS + part) % 2 * SWIGLU_BYTES;
        if (me.lane == 0) tma_store_wait_read<1>(); // its previous contents have been read
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j += 2) { // 8 columns each
          uint32_t to = buffer + row * 64 + ((j + me.lane / 16) ^ (row / 2 & 3)) * 16;
          const float *v = acc[h] + part * 16 + j * 4;
          uint32_t gate[4], up[4], activation[4];
          EACH (i, 4) {
            gate[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
            up[i] = pack_bf16(v[UP + 2 * i], v[UP + 2 * i + 1]);
            float2 g = unpack_bf16(gate[i]), u = unpack_bf16(up[i]);
            activation[i] = pack_bf16(SwiGlu::value(g.x, u.x), SwiGlu::value(g.y, u.y));
          }
          stmatrix_x4(to, gate[0], gate[1], gate[2], gate[3]);
          stmatrix_x4(to + SWIGLU_PART, up[0], up[1], up[2], up[3]);
          stmatrix_x4(to + 2 * SWIGLU_PART, activation[0], activation[1], activation[2], activation[3]);
        }
        fence_proxy_async();
        __syncwarp();
        if (me.lane == 0) {
          int x = work.column + part * 32, y = work.row + me.first_row(h);
          tma_store_3d(c.gate_up, buffer, x, y, 0);
          tma_store_2d(c.out, buffer + 2 * SWIGLU_PART, x, y);
          tma_store_commit();
        }
      }
  }
};
