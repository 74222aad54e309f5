// The epilogues of the GEMMs on Hopper (hopper_kernel.cuh) that turn logits into the loss's exponentials and sum their rows, or
// into their gradients where the rows' sums are known.
#pragma once

#include <math.h>

#include "kernels/cuda/hopper_store.cuh"

static constexpr float LN_2 = 0.6931471805599453f;

// Logits into E, in place: 2^t with t = z scale - a scale, one FMA and one ex2. row_sums: E over the thread's entries of
// its two rows, in fp32; distances, for an entropy: E t ln 2, likewise. The product anchor * scale is rounded once per row, which shifts all of the row's E by one
// factor; the sum is corrected by the rounding error. Only warps whose rows have a target in the tile, or columns beyond V,
// mask entries.
template <bool ENTROPY>
static __device__ __forceinline__ void
epilogue_exp(float (&z)[TILE_N / 2], float (&row_sums)[2], float (&distances)[2], const TileScheduler &s,
             const EpilogueParams &params, int row, int first_column, int column) {
  constexpr float NOTHING =
      -1e30f; // its exponential is 0 and, unlike minus infinity's, may be multiplied by it
  float shift[2], correction[2];
  int target[2];
  bool edge = first_column + TILE_N > s.n;
  EACH (i, 2) {
    bool inside = row + 8 * i < s.m;
    int32_t of_row = inside ? params.targets[row + 8 * i] : ELSEWHERE;
    float a = of_row == IGNORE_INDEX ? -NOTHING : inside ? params.anchor[row + 8 * i] : 0.0f;
    target[i] = of_row - first_column;
    edge |= (unsigned)target[i] < TILE_N;
    shift[i] = -a * params.scale;
    // -a scale = shift + error; 2^error = 1 + error ln 2.
    correction[i] = fmaf(fmaf(-a, params.scale, -shift[i]), LN_2, 1.0f);
    row_sums[i] = distances[i] = 0;
  }
  if (__any_sync(~0u, edge)) {
    EACH (j, TILE_N / 2) {
      int at = j / 4 * 8 + column + j % 2;
      if (at == target[j / 2 % 2] || first_column + at >= s.n) z[j] = NOTHING;
    }
  }
  EACH (j, TILE_N / 2) {
    float t = fmaf(z[j], params.scale, shift[j / 2 % 2]);
    z[j] = exp2_approx(t);
    row_sums[j / 2 % 2] += z[j];
    if (ENTROPY) distances[j / 2 % 2] += z[j] * t;
  }
  EACH (i, 2) {
    // t lacks the error, too, which is (correction - 1) / ln 2.
    if (ENTROPY) distances[i] = correction[i] * (LN_2 * distances[i] + (correction[i] - 1) * row_sums[i]);
    row_sums[i] *= correction[i];
  }
}

struct OfLogits : Epilogue {
  static constexpr bool B_K_MAJOR = true, KEEPS_A = true;
  enum { STAGES = 5 };
};

template <bool ENTROPY> struct LogitsExp : OfLogits {
  template <typename K>
  __device__ __forceinline__ void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      float row_sums[2], distances[2];
      int row = work.row + me.row(h);
      epilogue_exp<ENTROPY>(acc[h], row_sums, distances, c.s, c.params, row, work.column, me.column);
      if (c.params.store)
        epilogue_store_bf16(c.out, c.buffer, acc[h], work.column, work.row + me.first_row(h), me.lane);
      auto add_up = [&](const float(&sums)[2], float *parts) { // four lanes share a row
        EACH (i, 2) {
          float sum = sums[i] + __shfl_xor_sync(~0u, sums[i], 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (me.lane % 4 == 0 && row + 8 * i < c.s.m)
            parts[(int64_t)(row + 8 * i) * c.s.n_tiles + work.column / TILE_N] = sum;
        }
      };
      add_up(row_sums, c.params.tile_sums);
      if (ENTROPY) add_up(distances, c.params.tile_distances);
    }
  }
};

// Logits into their gradient (LceLogitsGradient), in place: with t = (v - lse) / ln 2, 2^t (per_p + per_distance ln 2 t).
static __device__ __forceinline__ void epilogue_gradient(float (&z)[TILE_N / 2], const TileScheduler &s,
                                                         const EpilogueParams &params, int row,
                                                         int first_column, int column) {
  float shift[2], per_p[2], per_t[2], at_target[2];
  int target[2];
  bool counts[2];
  EACH (i, 2) {
    int n = min(row + 8 * i, s.m - 1); // what lies beyond is not stored
    int32_t of_row = params.targets[n];
    target[i] = of_row - first_column;
    counts[i] = of_row != IGNORE_INDEX;
    shift[i] = -params.rows.lse[n] * LOG2_E;
    per_p[i] = params.rows.per_p[n];
    per_t[i] = params.rows.per_distance[n] * LN_2;
    at_target[i] = params.rows.at_target[n];
  }
  EACH (j, TILE_N / 2) {
    int at = j / 4 * 8 + column + j % 2, i = j / 2 % 2;
    float t = fmaf(z[j], params.scale, shift[i]);
    z[j] = exp2_approx(t) * fmaf(t, per_t[i], per_p[i]);
    if (at == target[i]) z[j] = at_target[i];
    if (!counts[i] || first_column + at >= s.n) z[j] = 0;
  }
}

struct LogitsGradient : OfLogits {
  template <typename K>
  __device__ __forceinline__ void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      epilogue_gradient(acc[h], c.s, c.params, work.row + me.row(h), work.column, me.column);
      epilogue_store_bf16(c.out, c.buffer, acc[h], work.column, work.row + me.first_row(h), me.lane);
    }
  }
};
