// The epilogue of the GEMM on Hopper that turns logits into the loss's exponentials and sums their rows.
#pragma once

#include <math.h>

#include "kernels/cuda/hopper_store.cuh"
#include "kernels/lce/loss_row.h"

static constexpr float LN_2 = 0.6931471805599453f;

// A thread's part of two rows of a tile (RowParts).
struct ThreadParts {
  float sums[2], distances[2];
  Ranked best[2];
};

struct Add {
  DEVICE float operator()(float x, float y) const { return x + y; }
};

// Combines the values of a thread's two rows over the four lanes that share them, and writes them.
template <typename T, typename F>
static DEVICE void write_parts(const T (&values)[2], T *out, const TileScheduler &s, int row,
                               int first_column, F combine) {
  EACH (i, 2) {
    T x = combine(values[i], __shfl_xor_sync(~0u, values[i], 1));
    x = combine(x, __shfl_xor_sync(~0u, x, 2));
    if (threadIdx.x % 4 == 0 && row + 8 * i < s.m)
      out[(int64_t)(row + 8 * i) * s.n_tiles + first_column / TILE_N] = x;
  }
}

// Adds the bias, if given, in place.
static DEVICE void epilogue_bias(float (&z)[TILE_N / 2], const TileScheduler &s, const EpilogueParams &params,
                                 int first_column, int column) {
  if (!params.bias) return;
  EACH (i, TILE_N / 4) {
    int at = first_column + i / 2 * 8 + column + i % 2;
    float bias = at < s.n ? to_float(params.bias[at]) : 0;
    if (bias < -0x1p100f) bias = -0x1p101f; // a masked entry's exponential is 0, and may be multiplied by t
    z[i / 2 * 4 + i % 2] += bias;
    z[i / 2 * 4 + 2 + i % 2] += bias;
  }
}

// With a soft-cap z becomes tanh(z / cap). With parts.best it finds the largest of both rows.
static DEVICE void epilogue_cap_and_largest(float (&z)[TILE_N / 2], ThreadParts &parts,
                                            const TileScheduler &s, const EpilogueParams &params,
                                            int first_column, int column) {
  float cap = 1;
  if (params.softcap > 0) {
    cap = params.softcap;
    float inv_softcap = 1 / cap;
    EACH (j, TILE_N / 2) z[j] = fast_tanh(z[j] * inv_softcap);
  }
  if (!params.parts.best) return;
  float max[2] = {-INFINITY, -INFINITY};
  int best[2] = {column, column}, columns = s.n - first_column;
  EACH (j, TILE_N / 2) {
    int at = j / 4 * 8 + column + j % 2, i = j / 2 % 2;
    if (z[j] > max[i] && at < columns) max[i] = z[j], best[i] = at;
  }
  EACH (i, 2) parts.best[i] = ranked(cap * max[i], first_column + best[i]);
}

// Turns logits into E in place: 2^t with t = z scale - a scale, one FMA and one ex2; sums and distances (E t
// ln 2) in fp32. The product a scale is rounded once per row, which shifts all of the row's E by one factor;
// the sum is corrected by it. Only warps with a target in the tile, or columns beyond V, mask entries.
template <bool TERMS>
static DEVICE void epilogue_exp(float (&z)[TILE_N / 2], ThreadParts &parts, const TileScheduler &s,
                                const EpilogueParams &params, int row, int first_column, int column) {
  if (TERMS) {
    epilogue_bias(z, s, params, first_column, column);
    epilogue_cap_and_largest(z, parts, s, params, first_column, column);
  }
  constexpr float NOTHING = -0x1p100f; // its exponential is 0, and may be multiplied by it
  float shift[2], error[2];
  int target[2];
  bool edge = first_column + TILE_N > s.n;
  EACH (i, 2) {
    bool inside = row + 8 * i < s.m;
    int32_t row_target = inside ? params.targets[row + 8 * i] : ELSEWHERE;
    float a = row_target == IGNORE_INDEX ? -NOTHING : inside ? params.anchor[row + 8 * i] : 0.0f;
    a = finite_anchor(a);
    target[i] = row_target - first_column;
    edge |= (unsigned)target[i] < TILE_N;
    shift[i] = -a * params.scale;
    error[i] = LN_2 * fmaf(-a, params.scale, -shift[i]); // -a scale = shift + error / ln 2
    parts.sums[i] = parts.distances[i] = 0;
  }
  if (__any_sync(~0u, edge)) {
    EACH (j, TILE_N / 2) {
      int at = j / 4 * 8 + column + j % 2;
      if (at == target[j / 2 % 2] || first_column + at >= s.n) z[j] = NOTHING;
    }
  }
  if (TERMS && params.unit > 0) { // sums of squares: a pass of their own, which costs other calls nothing
    float squares[2] = {0, 0};
    EACH (j, TILE_N / 2) {
      float e = LCE_SQUARED * exp2_approx(fmaf(params.unit * z[j], params.scale, shift[j / 2 % 2]));
      squares[j / 2 % 2] += e * e;
    }
    EACH (i, 2) squares[i] *= fmaf(2 * error[i], error[i] + 1, 1); // exp(2 error), above 0
    write_parts(squares, params.parts.squares, s, row, first_column, Add());
  }
  auto exponential = [&](int j, float u) {
    int i = j / 2 % 2;
    float t = fmaf(u, params.scale, shift[i]), e = exp2_approx(t);
    parts.sums[i] += e;
    if (TERMS) parts.distances[i] += e * t;
    return e;
  };
  if (TERMS && params.softcap > 0) {
    EACH (j, TILE_N / 2) {
      float t = fmaxf(z[j], -1), e = exponential(j, z[j] != NOTHING ? params.softcap * t : NOTHING);
      z[j] = e * fmaf(-t, t, 1);
    }
  } else {
    EACH (j, TILE_N / 2) z[j] = exponential(j, z[j]);
  }
  EACH (i, 2) {
    // exp(error), above 0 whatever the error; t lacks the error, too.
    float &sum = parts.sums[i], &distance = parts.distances[i];
    float correction = fmaf(error[i], fmaf(error[i], 0.5f, 1), 1);
    if (TERMS) distance = correction * (LN_2 * distance + error[i] * sum);
    sum *= correction;
  }
}

struct OfLogits : Epilogue {
  static constexpr bool B_K_MAJOR = true, KEEPS_A = true;
  enum { STAGES = 4, BUFFERS = 3, WARP_BYTES = BUFFERS * STORE_BYTES };
};

// TERMS: with a bias, a soft-cap, distances, squares or largest logits.
template <bool TERMS> struct LogitsExp : OfLogits {
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      ThreadParts parts;
      int row = work.row + me.row(h);
      if constexpr (K::CODES) K::decode(acc[h], c, row);
      epilogue_exp<TERMS>(acc[h], parts, c.s, c.params, row, work.column, me.column);
      if (c.params.store)
        epilogue_store_bf16<K::BUFFERS>(c.out, c.buffer, pairs_of(acc[h]), work.column,
                                        work.row + me.first_row(h), me.lane);
      auto write = [&](const auto &values, auto *out, auto combine) {
        write_parts(values, out, c.s, row, work.column, combine);
      };
      write(parts.sums, c.params.parts.sums, Add());
      if (TERMS && c.params.parts.distances) write(parts.distances, c.params.parts.distances, Add());
      if (TERMS && c.params.parts.best)
        write(parts.best, c.params.parts.best, [](Ranked x, Ranked y) { return x > y ? x : y; });
    }
  }
};
