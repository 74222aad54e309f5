// Logits whose GEMM on Hopper (hopper_kernel.cuh) leaves each tile's part of the rows' softmaxes in its
// epilogue: of the logits as they are stored, in bf16, each with an anchor of its own, its largest one.
#include "tools/torch/liblce/divergence.h"

#include "kernels/cuda/hopper_exp.cuh"
#include "kernels/cuda/hopper_launch.cuh"
#include "kernels/cuda/hopper_store.cuh"

struct LogitsWithParts : OfLogits {
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      float(&z)[TILE_N / 2] = acc[h];
      int row = work.row + me.row(h);
      EACH (j, TILE_N / 4) {
        float2 stored = unpack_bf16(pack_bf16(z[2 * j], z[2 * j + 1]));
        z[2 * j] = stored.x, z[2 * j + 1] = stored.y;
      }
      epilogue_store_bf16<K::BUFFERS>(c.out, c.buffer, pairs_of(z), work.column, work.row + me.first_row(h),
                                      me.lane);
      if (work.column + TILE_N > c.s.n) {
        EACH (j, TILE_N / 2)
          if (work.column + me.column + j / 4 * 8 + j % 2 >= c.s.n) z[j] = -INFINITY;
      }
      Ranked best[2];
      float sums[2] = {0, 0};
      EACH (i, 2) { // the two rows
        float largest = -INFINITY;
        int column = me.column;
        auto entry = [&](int j) { return z[j / 2 * 4 + 2 * i + j % 2]; };
        EACH (j, TILE_N / 4)
          if (entry(j) > largest) largest = entry(j), column = me.column + j / 2 * 8 + j % 2;
        best[i] = ranked(largest, work.column + column);
        best[i] = max(best[i], __shfl_xor_sync(~0u, best[i], 1));
        best[i] = max(best[i], __shfl_xor_sync(~0u, best[i], 2));
        largest = fmaxf(ranked_value(best[i]), -1e30f); // minus infinity less itself is no number
        EACH (j, TILE_N / 4) sums[i] += exp2_approx((entry(j) - largest) * c.params.scale);
      }
      write_parts(sums, c.params.parts.sums, c.s, row, work.column, Add());
      write_parts(best, c.params.parts.best, c.s, row, work.column,
                  [](Ranked x, Ranked y) { return x > y ? x : y; });
    }
  }
};

bool cuda_logit_tiles(Backend *backend, const DivergenceHead *a) {
  using K = KernelTraits<LogitsWithParts>;
  if (!hopper_runs(backend) || !tma_takes(a->x) || !tma_takes(a->weight) || !tma_takes(a->logits))
    return false;
  EpilogueParams params = {.scale = LOG2_E * inverse_temperature(a->temperature),
                           .parts = {.sums = data_of<float>(a->sums), .best = data_of<Ranked>(a->best)}};
  launch<K>(backend, tma_map(backend, a->x, K::ROWS), tma_map(backend, a->weight, TILE_N / CLUSTER),
            tma_map(backend, a->logits, STORE_ROWS),
            schedule<K>(backend, a->x.shape[0], a->weight.shape[0], a->x.shape[1]), params);
  return true;
}
