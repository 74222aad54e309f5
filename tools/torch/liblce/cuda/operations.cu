// The package's operations on a GPU; on Hopper with the GEMM of logits_gradient.cu.
#include "tools/torch/liblce/operations.h"

#include "kernels/cuda/cuda_common.cuh"
#include "tools/torch/liblce/cuda/hopper.h"
#include "tools/torch/liblce/given_ids.h"
#include "tools/torch/liblce/log_prob_factors.h"

static __global__ void gradient_factors_kernel(const __grid_constant__ LceGradientFactors a,
                                               float inv_temperature) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= a.targets.shape[0]) return;
  int target = data_of<int32_t>(a.targets)[n];
  bool counts = target != IGNORE_INDEX;
  float scale = counts ? inv_temperature * a.alpha * read(a.factor, 0, 1) : 0;
  TokenFactors r = {};
  if (counts)
    r = token_factors(a.terms, read(a.terms.class_weights, target, 1),
                      inv_temperature * data_of<float>(a.target_z)[n], -data_of<float>(a.log_prob)[n],
                      read(a.entropy, n, 0), scale * read(a.token_weights, n, 1),
                      scale * read(a.entropy_weights, n, 0));
  float cap = a.terms.softcap, u = data_of<float>(a.target_z)[n];
  if (cap > 0) r.at_target *= capped_slope(u, cap);
  if (counts && a.row_sum.data)
    r.log_total = log_total(data_of<float>(a.row_sum)[n], -data_of<float>(a.log_prob)[n]);
  write(a.factors.log_total, n, r.log_total);
  write(a.factors.per_p, n, r.per_p);
  write(a.factors.per_distance, n, r.per_distance);
  write(a.factors.at_target, n, r.at_target);
}

void cuda_lce_gradient_factors(Backend *backend, const LceGradientFactors *a) {
  launch_kernel(per_element(backend, "lce_gradient_factors", a->targets.shape[0]), gradient_factors_kernel,
                *a, inverse_temperature(a->terms.temperature));
}

// fp32 logits of columns from `first` on (no tile: exponentials) into their gradient. One block a row. W > 1:
// to the end of a strided row's last group.
template <typename T, int W>
static __global__ void __launch_bounds__(256)
    logits_gradient_kernel(const __grid_constant__ LceLogitsGradient a, const float *tile, int64_t first,
                           int columns, Capped<T> capped, float inv_temperature) {
  int64_t row = blockIdx.x;
  int row_target = data_of<int32_t>(a.targets)[row], target = (int)(row_target - first);
  float log_total = data_of<float>(a.factors.log_total)[row], per_p = data_of<float>(a.factors.per_p)[row];
  float per_distance = data_of<float>(a.factors.per_distance)[row], scale = __expf(-log_total);
  float at_target = data_of<float>(a.factors.at_target)[row], anchor = read(a.anchor, row, 0);
  bool kept = W > 1 || !tile;
  T *out = data_of<T>(a.dlogits) + row * a.dlogits.stride + first;
  for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
    float d[W];
    if (kept)
      load(d, out + i);
    else
      load(d, tile + row * columns + i);
    EACH (k, W) {
      float slope = 1, p, distance;
      if (kept) {
        p = d[k] * scale, distance = d[k] > 0 ? __logf(d[k]) - log_total : 0;
      } else {
        distance = (capped(d[k], first + i + k, slope) - anchor) * inv_temperature - log_total;
        if (distance < -1e4f) distance = -1e4f; // a bias of minus infinity: p is 0, times a number
        p = __expf(fminf(distance, 0));         // a NaN stays in the distance
      }
      d[k] = p * (per_p + per_distance * distance) * slope;
      if (i + k == target) d[k] = at_target;
      if (row_target == IGNORE_INDEX || i + k >= columns) d[k] = 0;
    }
    store(out + i, d);
  }
}

// In fp32 logits of repaired rows become those of their sum (finalize_rows_kernel): the GEMM rounds in another
// order, and p would not add up to 1. One block a row.
template <int W>
static __global__ void __launch_bounds__(256)
    repaired_logits_kernel(const __grid_constant__ LceLogitsGradient a, float *tile, int64_t first,
                           int columns) {
  int64_t row = blockIdx.x;
  if (data_of<float>(a.factors.log_total)[row] <= LCE_LOG_LARGEST_SUM) return;
  const float *x = data_of<float>(a.x) + row * a.x.stride;
  for (int i = threadIdx.x / 32; i < columns; i += blockDim.x / 32) {
    const float *w = data_of<float>(a.weight) + (first + i) * a.weight.stride;
    float z = warp_dot<float, W>(x, w, (int)a.x.shape[1]);
    if (threadIdx.x % 32 == 0) tile[row * columns + i] = z;
  }
}

// The portable path, where cuBLASLt makes fp32 logits, a tile at a time, and any GPU's with exponentials.
void cuda_lce_logits_gradient(Backend *backend, const LceLogitsGradient *a) {
  int64_t rows = a->dlogits.shape[0], vocab_size = a->dlogits.shape[1];
  float inv_temperature = inverse_temperature(a->temperature);
  auto run = [&](const float *tile, int64_t first, int64_t columns) {
    with_float(a->dlogits.dtype, [&](auto type) {
      using T = decltype(type);
      with_width<T>(!tile && rows_start_aligned(a->dlogits, WIDTH<T>), [&](auto W) {
        launch_kernel(per_row(backend, "lce_logits_gradient", rows, ceil_div(columns, W)),
                      logits_gradient_kernel<T, W>, *a, tile, first, (int)columns,
                      Capped<T>{data_of<T>(a->bias), a->softcap}, inv_temperature);
      });
    });
  };
  if (!tensor_exists(a->x)) return run(nullptr, 0, vocab_size);
  if (hopper_logits_gradient(backend, a, inv_temperature)) return;
  require_hopper(backend, false);
  int64_t columns = cuda_lce_tile_columns(rows, vocab_size);
  for (int64_t first = 0; first < vocab_size; first += columns) {
    columns = min_i64(columns, vocab_size - first);
    float *tile = data_of<float>(a->workspace);
    Tensor logits = tensor_2d(tile, DTYPE_F32, rows, columns);
    Gemm g = gemm_of(logits, a->x, false, tensor_rows(a->weight, first, columns), true);
    cuda_gemm(backend, &g);
    if (a->x.dtype == DTYPE_F32)
      with_width<float>(rows_align({a->x, a->weight}, WIDTH<float>), [&](auto W) {
        launch_kernel(per_row(backend, "lce_logits_gradient", rows, 32 * columns), repaired_logits_kernel<W>,
                      *a, tile, first, (int)columns);
      });
    run(tile, first, columns);
  }
}

// --- given ids ---------------------------------------------------------------------------------------------

// One block a row, and one warp an id.
template <typename T, int W>
static __global__ void __launch_bounds__(256) id_logits_kernel(const __grid_constant__ LceIdLogProbs a) {
  int64_t n = blockIdx.x;
  RowIds r = ids_of_row(a.ids, a.offsets, a.x.shape[0], n);
  Ranked best = 0;
  for (int64_t m = r.first + threadIdx.x / 32; m < r.end; m += blockDim.x / 32) {
    int id = r.ids[m];
    float z = 0;
    if (id >= 0) {
      z = warp_dot<T, W>(data_of<T>(a.x) + n * a.x.stride, data_of<T>(a.weight) + id * a.weight.stride,
                         (int)a.x.shape[1]);
      if (a.bias.data) z += to_float(data_of<T>(a.bias)[id]);
      if (a.softcap > 0) z = a.softcap * tanhf(z / a.softcap);
      best = max(best, ranked(z, (int)(m - r.first)));
    }
    if (threadIdx.x % 32 == 0) data_of<float>(a.log_probs)[m] = z;
  }
  best = block_max(best);
  if (threadIdx.x == 0) data_of<int32_t>(a.anchors)[n] = best ? r.ids[r.first + ranked_column(best)] : 0;
}

void cuda_lce_id_logits(Backend *backend, const LceIdLogProbs *a) {
  int64_t rows = a->x.shape[0], warps = ceil_div(a->ids.shape[0], rows);
  with_access(a->x.dtype, {a->x, a->weight}, [&](auto type, auto width) {
    launch_kernel(per_row(backend, "lce_id_logits", rows, 32 * warps),
                  id_logits_kernel<decltype(type), width>, *a);
  });
}

static __global__ void id_log_probs_kernel(const __grid_constant__ LceIdLogProbs a, float inv_temperature) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n < a.anchor_nll.shape[0]) id_log_probs_of_row(&a, n, inv_temperature);
}

void cuda_lce_id_log_probs(Backend *backend, const LceIdLogProbs *a) {
  launch_kernel(per_element(backend, "lce_id_log_probs", a->anchor_nll.shape[0]), id_log_probs_kernel, *a,
                inverse_temperature(a->temperature));
}

static __global__ void id_factors_kernel(const __grid_constant__ LceIdGradients a, float inv_temperature) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n < a.targets.shape[0]) id_factors_of_row(&a, n, inv_temperature);
}

void cuda_lce_id_factors(Backend *backend, const LceIdGradients *a) {
  launch_kernel(per_element(backend, "lce_id_factors", a->targets.shape[0]), id_factors_kernel, *a,
                inverse_temperature(a->temperature));
}

// One block a row, and one thread an id: its time grows with the square of their number. Duplicates write the
// same bits to one place.
template <typename T> static __global__ void id_gradients_kernel(const __grid_constant__ LceIdGradients a) {
  RowIds r = ids_of_row(a.ids, a.offsets, a.lse.shape[0], blockIdx.x);
  for (int64_t m = r.first + threadIdx.x; m < r.end; m += blockDim.x) {
    int64_t column = r.ids[m] - a.first;
    if (r.ids[m] >= 0 && column >= 0 && column < a.dlogits.shape[1])
      data_of<T>(a.dlogits)[blockIdx.x * a.dlogits.stride + column] =
          from_float<T>(id_gradient(&a, r, blockIdx.x, m));
  }
}

void cuda_lce_id_gradients(Backend *backend, const LceIdGradients *a) {
  int64_t rows = a->lse.shape[0], ids = ceil_div(a->ids.shape[0], rows);
  with_float(a->dlogits.dtype, [&](auto type) {
    launch_kernel(per_row(backend, "lce_id_gradients", rows, ids), id_gradients_kernel<decltype(type)>, *a);
  });
}

// A thread takes W elements.
template <typename TO, typename T, int W>
static __global__ void __launch_bounds__(256)
    scale_by_kernel(TO *out, const T *x, const float *factor, int64_t count) {
  float by = factor ? *factor : 1, values[W];
  int64_t i = (blockIdx.x * 256ll + threadIdx.x) * W;
  if ((by == 1 && (const void *)out == x) || i >= count) return;
  load(values, x + i);
  EACH (k, W) values[k] *= by;
  store(out + i, values);
}

void cuda_scale_by(Backend *backend, const ScaleBy *a) {
  int64_t count = a->x.shape[0];
  with_float(a->out.dtype, [&](auto out_type) {
    with_float(a->x.dtype, [&](auto type) {
      with_width<bf16>(rows_align({a->x, a->out}, WIDTH<bf16>), [&](auto W) {
        using TO = decltype(out_type);
        using T = decltype(type);
        launch_kernel({"scale_by", cuda_stream(backend), ceil_div(count, 256 * W), 256},
                      scale_by_kernel<TO, T, W>, data_of<TO>(a->out), data_of<T>(a->x),
                      data_of<float>(a->factor), count);
      });
    });
  });
}

template <typename Id>
static __global__ void read_targets_kernel(int32_t *targets, float *loss, const Id *ids, int64_t tokens,
                                           int64_t vocab_size) {
  int64_t n = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (n >= tokens) return;
  int64_t id = ids[n];
  bool counts = id >= 0 && id < vocab_size;
  if (targets) targets[n] = counts ? (int32_t)id : IGNORE_INDEX;
  if (loss && !counts && id != IGNORE_INDEX) loss[n] = NAN;
}

void cuda_read_targets(Backend *backend, const ReadTargets *a) {
  auto launch = [&](auto id) {
    launch_kernel(per_element(backend, "read_targets", a->ids.shape[0]), read_targets_kernel<decltype(id)>,
                  data_of<int32_t>(a->targets), data_of<float>(a->loss), data_of<decltype(id)>(a->ids),
                  a->ids.shape[0], a->vocab_size);
  };
  if (a->ids.dtype == DTYPE_I64)
    launch(int64_t());
  else
    launch(int32_t());
}
