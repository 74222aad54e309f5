// The gradient of logits in the epilogue of their GEMM on Hopper (hopper_kernel.cuh), for LceLogitsGradient.
#include "tools/torch/liblce/cuda/hopper.h"

#include "kernels/cuda/hopper_exp.cuh"
#include "kernels/cuda/hopper_launch.cuh"
#include "kernels/cuda/hopper_store.cuh"

enum { LOG_TOTAL, PER_P, PER_DISTANCE, AT_TARGET }; // of EpilogueParams.own: GradientFactors [m]

// In place: with t = (v - lse) / ln 2, 2^min(t, 0) (per_p + per_distance ln 2 t) du/dz. Two rows a thread.
template <bool TERMS>
static DEVICE void epilogue_gradient(float (&z)[TILE_N / 2], const TileScheduler &s,
                                     const EpilogueParams &params, int row, int first_column, int column) {
  float anchor[2], shift[2], per_p[2], per_t[2], at_target[2];
  int target[2];
  bool counts[2];
  if (TERMS) epilogue_bias(z, s, params, first_column, column);
  float inv_softcap = TERMS && params.softcap > 0 ? 1 / params.softcap : 0;
  EACH (i, 2) {
    int n = min(row + 8 * i, s.m - 1); // what lies beyond is not stored
    int32_t row_target = params.targets[n];
    target[i] = row_target - first_column;
    counts[i] = row_target != IGNORE_INDEX;
    anchor[i] = params.anchor[n];
    shift[i] = -params.own[LOG_TOTAL][n] * LOG2_E;
    per_p[i] = params.own[PER_P][n];
    per_t[i] = params.own[PER_DISTANCE][n] * LN_2;
    at_target[i] = params.own[AT_TARGET][n];
  }
  EACH (j, TILE_N / 2) {
    int at = j / 4 * 8 + column + j % 2, i = j / 2 % 2;
    float u = z[j], slope = 1;
    if (TERMS && inv_softcap > 0) {
      float tanh_z = fast_tanh(u * inv_softcap);
      u = params.softcap * tanh_z;
      slope = fmaf(-tanh_z, tanh_z, 1);
    }
    float t = fmaf(u - anchor[i], params.scale, shift[i]);
    if (TERMS && t < -1e4f) t = -1e4f; // a masked entry: 0 times a number
    z[j] = exp2_approx(fminf(t, 0)) * fmaf(t, per_t[i], per_p[i]);
    if (TERMS) z[j] *= slope;
    if (at == target[i]) z[j] = at_target[i];
    if (!counts[i] || first_column + at >= s.n) z[j] = 0;
  }
}

// TERMS: with a bias or a soft-cap.
template <bool TERMS> struct LogitsGradient : OfLogits {
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    EACH (h, TILE_M / 64) {
      epilogue_gradient<TERMS>(acc[h], c.s, c.params, work.row + me.row(h), work.column, me.column);
      epilogue_store_bf16(c.out, c.buffer, pairs_of(acc[h]), work.column, work.row + me.first_row(h),
                          me.lane);
    }
  }
};

template <bool TERMS>
static void logits_gradient(Backend *backend, const LceLogitsGradient *a, float inv_temperature) {
  using K = KernelTraits<LogitsGradient<TERMS>>;
  EpilogueParams params = {.anchor = data_of<float>(a->anchor),
                           .targets = data_of<int32_t>(a->targets),
                           .scale = LOG2_E * inv_temperature,
                           .bias = data_of<bf16>(a->bias),
                           .softcap = a->softcap,
                           .own = {data_of<float>(a->factors.log_total), data_of<float>(a->factors.per_p),
                                   data_of<float>(a->factors.per_distance),
                                   data_of<float>(a->factors.at_target)}};
  launch<K>(backend, tma_map(backend, a->x, K::ROWS), tma_map(backend, a->weight, TILE_N / CLUSTER),
            tma_map(backend, a->dlogits, STORE_ROWS),
            schedule<K>(backend, a->x.shape[0], a->weight.shape[0], a->x.shape[1]), params);
}

bool hopper_logits_gradient(Backend *backend, const LceLogitsGradient *a, float inv_temperature) {
  if (a->x.dtype != DTYPE_BF16 || !hopper_runs(backend) || !tma_takes(a->x) || !tma_takes(a->weight) ||
      !tma_takes(a->dlogits))
    return false;
  bool terms = tensor_exists(a->bias) || a->softcap > 0;
  (terms ? logits_gradient<true> : logits_gradient<false>)(backend, a, inv_temperature);
  return true;
}
