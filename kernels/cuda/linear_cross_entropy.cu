// The operations of the LM head and loss, on sm_90 with the GEMMs of hopper_gemm.cu. Why the arithmetic is
// anchored at the target: kernels/lce/linear_cross_entropy.c. This file is about data flow.
//
// Logits-exp pass, portable path: cuBLASLt computes fp32 logits, a tile of vocabulary entries at a time. A
// second kernel reads the tile from L2, turns each logit into E = exp(z - a), adds up the rows and stores E
// in bf16. So a logit crosses L2 twice in fp32, E crosses device memory once, and no logit is rounded. One
// block adds to a row's sum per tile, in double, in the tiles' order. Then one GEMM, E W.
//
// Rows whose sum exceeds LCE_LARGEST_SUM are computed again. The kernel that finalizes the sums looks for
// them, finds none as a rule, and returns. On sm_90 PDL hides launches in small chunks.
//
// Cost for a chunk of C rows, besides the GEMMs: 8 C V bytes through L2, 2 C V bytes to memory.
#include <cooperative_groups.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/lce/loss_row.h"

static constexpr int EXPS_GROUPS = 4; // accesses of a thread to its row of a tile

// The scratch, in this order (scratch.c adds up the same sizes).
struct TileScratch {
  float *tile;                     // [rows, columns], dense; the first of CUDA_LCE_TILES
  double *sum, *distance, *square; // [rows]; all but the first where asked for, or NULL
  Ranked *best;                    // [rows], or NULL
  int64_t columns;
};

static TileScratch tile_scratch(const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0], vocab_size = a->weight.shape[0];
  TileScratch s;
  s.columns = cuda_lce_tile_columns(rows, vocab_size);
  s.tile = data_of<float>(a->workspace);
  s.sum = reinterpret_cast<double *>(data_of<char>(a->workspace) + cuda_lce_tiles_bytes(rows, vocab_size));
  double *last = s.sum;
  auto given = [&](Tensor t) { return tensor_exists(t) ? last += rows : nullptr; };
  s.distance = given(a->softmax.e_distance), s.square = given(a->softmax.e_squared);
  s.best = reinterpret_cast<Ranked *>(given(a->softmax.max));
  return s;
}

// One warp per row.
template <typename T, int W>
static __global__ void __launch_bounds__(256)
    target_logits_kernel(const __grid_constant__ LceTargetLogits a) {
  pdl_begin();
  int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= a.x.shape[0]) return;
  int target = data_of<int32_t>(a.targets)[row];
  float z = 0;
  if (target >= 0)
    z = warp_dot<T, W>(data_of<T>(a.x) + row * a.x.stride, data_of<T>(a.weight) + target * a.weight.stride,
                       (int)a.x.shape[1]);
  if (target >= 0 && a.bias.data) z += to_float(data_of<T>(a.bias)[target]);
  if (a.softcap > 0) z = a.softcap * tanhf(z / a.softcap);
  if (threadIdx.x % 32 == 0) data_of<float>(a.target_z)[row] = z;
}

void cuda_lce_target_logits(Backend *backend, const LceTargetLogits *a) {
  with_access(a->x.dtype, {a->x, a->weight}, [&](auto type, auto width) {
    KernelLaunch launch = {"lce_target_logits", cuda_stream(backend), ceil_div(a->x.shape[0], 8), 256,
                           hopper_runs(backend)};
    launch_kernel(launch, target_logits_kernel<decltype(type), width>, *a);
  });
}

// Every exponential of a row that does not count is 0.
static __device__ float anchor_of(float target_z, int target) {
  return target != IGNORE_INDEX ? finite_anchor(target_z) : INFINITY;
}

// One block per row of the tile, whose first column is vocabulary entry `first`. exps: NULL to keep nothing.
template <typename T, int W>
static __global__ void __launch_bounds__(1024)
    exponential_kernel(T *exps, int64_t exps_stride, TileScratch s, const float *target_z,
                       const int32_t *targets, int64_t first, int columns, Capped<T> capped,
                       float inv_temperature) {
  int64_t row = blockIdx.x;
  const float *tile = s.tile + row * s.columns;
  float a = anchor_of(target_z[row], targets[row]), sum = 0, distance = 0, square = 0, max = -INFINITY;
  int target = (int)(targets[row] - first), best = 0; // target: may lie outside of the tile
  auto exponential = [&](float z, int i) {
    float slope, u = capped(z, first + i, slope);
    if (s.best && u > max) max = u, best = i;
    float d = (u - a) * inv_temperature, e = i == target ? 0.0f : __expf(d);
    sum += e;
    if (s.distance && e > 0) distance += e * d;
    if (s.square) square += (LCE_SQUARED * e) * (LCE_SQUARED * e);
    return e * slope;
  };
  if (exps) exps += row * exps_stride + first;
  int body = columns / W * W, tail = body + threadIdx.x;
#pragma unroll 4
  for (int i = threadIdx.x * W; i < body; i += blockDim.x * W) {
    float z[W];
    load(z, tile + i);
    EACH (k, W) z[k] = exponential(z[k], i + k);
    if (exps) store(exps + i, z);
  }
  if (tail < columns) {
    float e = exponential(tile[tail], tail);
    if (exps) exps[tail] = from_float<T>(e);
  }
  sum = block_sum(sum);
  if (s.distance) distance = block_sum(distance);
  if (s.square) square = block_sum(square);
  Ranked largest = s.best ? block_max(ranked(max, (int)first + best)) : 0;
  if (threadIdx.x) return;
  s.sum[row] = (first ? s.sum[row] : 0) + sum;
  if (s.distance) s.distance[row] = (first ? s.distance[row] : 0) + distance;
  if (s.square) s.square[row] = (first ? s.square[row] : 0) + square;
  if (s.best) s.best[row] = first && s.best[row] > largest ? s.best[row] : largest;
}

// Floats are ordered as their bits are, read as integers, and the other way around below zero.
static __device__ void raise_to(float *max, float x) {
  x += 0.0f; // -0 becomes 0
  if (x >= 0)
    atomicMax(reinterpret_cast<int *>(max), __float_as_int(x));
  else
    atomicMin(reinterpret_cast<unsigned *>(max), __float_as_uint(x));
}

struct FinalizeParams {
  LceLogitsExp op; // for these rows; repairing a row rewrites its tile_sums
  float inv_temperature;
  const double *sum, *distance, *square; // [rows], or
  RowParts parts; // [rows, across]: parts still to be added; best: [rows, max(1, across)]
  int across;
  float *shares, *distance_shares, *square_shares; // [rows, blocks]; may overlap parts
};

// Sums one tile's part of a row of E; run by a warp.
template <typename T> static __device__ float tile_sum(const T *exps, int64_t tile, int64_t vocab_size) {
  float sum = 0;
  int64_t end = min(vocab_size, (tile + 1) * LCE_TILE_COLUMNS);
  for (int64_t v = tile * LCE_TILE_COLUMNS + threadIdx.x % 32; v < end; v += 32) sum += to_float(exps[v]);
  return warp_sum(sum);
}

// Sums every tile of every row of E, one warp per tile.
template <typename T>
static __global__ void __launch_bounds__(256) tile_sums_kernel(const __grid_constant__ LceLogitsExp a) {
  int64_t tiles = a.tile_sums.shape[1], warp = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  int64_t row = warp / tiles, tile = warp % tiles;
  if (row >= a.exps.shape[0]) return;
  float sum = tile_sum(data_of<T>(a.exps) + row * a.exps.stride, tile, a.exps.shape[1]);
  if (threadIdx.x % 32 == 0) data_of<float>(a.tile_sums)[row * a.tile_sums.stride + tile] = sum;
}

// The rows' sums and anchors; rows whose sum is too large are repaired. As a rule there are none, and every
// block returns; else each block recomputes its share of the vocabulary. A cooperative launch.
template <typename T, int W>
static __global__ void __launch_bounds__(1024)
    finalize_rows_kernel(const __grid_constant__ FinalizeParams a) {
  cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const LceLogitsExp &op = a.op;
  const SoftmaxStatistics &softmax = op.softmax;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  int64_t rows = op.x.shape[0], vocab_size = op.weight.shape[0];
  float *anchor = data_of<float>(softmax.anchor), *row_sum = data_of<float>(softmax.row_sum);
  float *target_e = data_of<float>(softmax.target_e), *e_distance = data_of<float>(softmax.e_distance);
  float *e_squared = data_of<float>(softmax.e_squared);
  const float *target_z = data_of<float>(softmax.target_z);
  const int32_t *targets = data_of<int32_t>(op.targets);
  T *exps = data_of<T>(op.exps);
  pdl_begin();
  for (int64_t row = (int64_t)warp * gridDim.x + blockIdx.x; row < rows; row += (int64_t)gridDim.x * warps) {
    auto total = [&](const double *sums, const float *parts) {
      double sum = lane == 0 && sums ? sums[row] : 0;
#pragma unroll 8
      for (int i = lane; i < a.across; i += 32) sum += (double)parts[row * a.across + i];
      return (float)warp_sum(sum);
    };
    float sum = total(a.sum, a.parts.sums), distance = e_distance ? total(a.distance, a.parts.distances) : 0;
    float square = e_squared ? total(a.square, a.parts.squares) : 0;
    if (softmax.max.data) {
      Ranked largest = 0;
      int tiles = max(1, a.across);
      for (int i = lane; i < tiles; i += 32) largest = max(largest, a.parts.best[row * tiles + i]);
      largest = warp_max(largest);
      data_of<float>(softmax.max)[row] = ranked_value(largest);
      data_of<int32_t>(softmax.best)[row] = (int32_t)(op.first + ranked_column(largest));
    }
    if (lane) continue;
    row_sum[row] = sum;
    if (e_distance) e_distance[row] = distance;
    if (e_squared) e_squared[row] = square;
    target_e[row] = 1;
    anchor[row] = anchor_of(target_z[row], targets[row]);
  }
  grid.sync();
  auto repaired = [&](int64_t row) { return row_sum[row] > LCE_LARGEST_SUM; };
  bool any = false;
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) any |= repaired(row);
  if (!__syncthreads_or(any)) return;

  int64_t share = (vocab_size + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
  int64_t end = min(vocab_size, begin + share);
  auto logit = [&](int64_t row, int64_t v, float &slope) {
    float z = warp_dot<T, W>(data_of<T>(op.x) + row * op.x.stride,
                             data_of<T>(op.weight) + v * op.weight.stride, (int)op.x.shape[1]);
    return Capped<T>{data_of<T>(op.bias), op.softcap}(z, v, slope);
  };
  for (int64_t row = grid.thread_rank(); row < rows; row += grid.size())
    if (repaired(row)) anchor[row] = -INFINITY;
  grid.sync();
  for (int64_t row = 0; row < rows; row++) {
    if (!repaired(row)) continue;
    float max = -INFINITY, slope;
    for (int64_t v = begin + warp; v < end; v += warps) max = fmaxf(max, logit(row, v, slope));
    if (lane == 0) raise_to(&anchor[row], max);
  }
  grid.sync();
  for (int64_t row = 0; row < rows; row++) {
    if (!repaired(row)) continue;
    float sum = 0, distance = 0, square = 0, slope;
    for (int64_t v = begin + warp; v < end; v += warps) {
      float d = (logit(row, v, slope) - anchor[row]) * a.inv_temperature,
            e = v == targets[row] ? 0.0f : __expf(d);
      if (lane) continue;
      sum += e;
      if (e > 0) distance += e * d;
      square += (LCE_SQUARED * e) * (LCE_SQUARED * e);
      if (exps) exps[row * op.exps.stride + v] = from_float<T>(e * slope);
    }
    sum = block_sum(sum), distance = block_sum(distance);
    if (e_squared) square = block_sum(square);
    if (threadIdx.x) continue;
    a.shares[row * gridDim.x + blockIdx.x] = sum;
    a.distance_shares[row * gridDim.x + blockIdx.x] = distance;
    if (e_squared) a.square_shares[row * gridDim.x + blockIdx.x] = square;
  }
  grid.sync();
  for (int64_t row = (int64_t)blockIdx.x * warps + warp; row < rows; row += (int64_t)gridDim.x * warps) {
    if (!repaired(row)) continue;
    float sum = 0, distance = 0, square = 0;
    for (unsigned i = lane; i < gridDim.x; i += 32) {
      sum += a.shares[row * gridDim.x + i];
      distance += a.distance_shares[row * gridDim.x + i];
      if (e_squared) square += a.square_shares[row * gridDim.x + i];
    }
    sum = warp_sum(sum), distance = warp_sum(distance), square = warp_sum(square);
    for (int64_t t = 0; op.tile_sums.data && t < op.tile_sums.shape[1]; t++) {
      float part = tile_sum(exps + row * op.exps.stride, t, vocab_size);
      if (lane == 0) data_of<float>(op.tile_sums)[row * op.tile_sums.stride + t] = part;
    }
    if (lane) continue;
    row_sum[row] = sum;
    if (e_distance) e_distance[row] = distance;
    if (e_squared) e_squared[row] = square;
    target_e[row] = __expf((target_z[row] - anchor[row]) * a.inv_temperature);
  }
}

// Computes E and the rows' sums, tile after tile: the portable path.
template <typename T>
static void logits_exp_tiles(Backend *backend, const LceLogitsExp *a, const TileScratch &s) {
  int64_t rows = a->x.shape[0], vocab_size = a->weight.shape[0];
  T *exps = data_of<T>(a->exps);
  for (int64_t first = 0; first < vocab_size; first += s.columns) {
    int64_t columns = min_i64(s.columns, vocab_size - first);
    Tensor logits = tensor_columns(tensor_2d(s.tile, DTYPE_F32, rows, s.columns), 0, columns);
    Gemm g = gemm_of(logits, a->x, false, tensor_rows(a->weight, first, columns), true);
    cuda_gemm(backend, &g);
    with_width<T>(!exps || rows_start_aligned(a->exps, WIDTH<T>), [&](auto W) {
      int threads = row_threads(ceil_div(columns, EXPS_GROUPS * W), 1024);
      launch_kernel({"the exponentials of a tile", cuda_stream(backend), rows, threads},
                    exponential_kernel<T, W>, exps, a->exps.stride, s, data_of<float>(a->softmax.target_z),
                    data_of<int32_t>(a->targets), first, (int)columns,
                    Capped<T>{data_of<T>(a->bias), a->softcap}, inverse_temperature(a->temperature));
    });
  }
}

void cuda_lce_logits_exp(Backend *backend, const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0], vocab_size = a->weight.shape[0];
  if (rows == 0) return;
  TileScratch s = tile_scratch(a);
  size_t tile_bytes = cuda_lce_tiles_bytes(rows, vocab_size);
  // As many blocks as run at the same time and whose shares fit in the scratch.
  int64_t shares = 2 + tensor_exists(a->softmax.e_squared);
  int64_t blocks = min_i64(cuda_state(backend)->multiprocessors, s.columns * CUDA_LCE_TILES / shares);
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    bool keep = tensor_exists(a->tile_sums); // on Hopper the row sums' parts are the tiles'
    float *parts = keep ? data_of<float>(a->tile_sums) : s.tile;
    FinalizeParams params = {.op = *a,
                             .inv_temperature = inverse_temperature(a->temperature),
                             .shares = s.tile,
                             .distance_shares = s.tile + rows * blocks,
                             .square_shares = s.tile + 2 * rows * blocks};
    bool on_hopper = hopper_logits_exp(backend, a, parts);
    if (on_hopper) {
      params.parts = row_parts(a, parts, rows), params.across = (int)ceil_div(vocab_size, LCE_TILE_COLUMNS);
    } else {
      logits_exp_tiles<T>(backend, a, s);
      params.sum = s.sum, params.distance = s.distance, params.square = s.square;
      params.parts.best = s.best;
      params.op.tile_sums = Tensor{};
    }
    with_width<T>(rows_align({a->x, a->weight}, WIDTH<T>), [&](auto W) {
      KernelLaunch launch = {"the rows' sums", cuda_stream(backend), blocks, 1024, hopper_runs(backend)};
      launch.cooperative = true;
      launch_kernel(launch, finalize_rows_kernel<T, W>, params);
    });
    if (!on_hopper && keep)
      launch_kernel(
          {"the row sums of tiles", cuda_stream(backend), ceil_div(tensor_count(a->tile_sums), 8), 256},
          tile_sums_kernel<T>, *a);
  });
  if (!tensor_exists(a->dx_raw)) return;
  if (hopper_dx(backend, a->dx_raw, a->exps, a->weight, s.tile, tile_bytes, false)) return;
  Gemm g = gemm_of(a->dx_raw, a->exps, false, a->weight, false);
  cuda_gemm(backend, &g);
}

// --- losses and gradients from the row sums ----------------------------------------------------------------

// One block per row.
template <typename T, int W>
static __global__ void __launch_bounds__(256)
    lce_row_losses_kernel(const __grid_constant__ LceRowLosses a, float inv_temperature) {
  pdl_begin();
  const LossTerms &terms = a.terms;
  int64_t row = blockIdx.x;
  int hidden_size = (int)a.x.shape[1], target = data_of<int32_t>(a.targets)[row];
  bool counts = target != IGNORE_INDEX, backward = a.scaled_x.data;
  const T *x = data_of<T>(a.x) + row * hidden_size;
  float target_z = data_of<float>(a.softmax.target_z)[row], weighted = 0;
  if (terms.label_smoothing > 0) { // the same for the whole block
    const float *smoothing_row = data_of<float>(a.smoothing_row);
    for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) weighted += to_float(x[i]) * smoothing_row[i];
    weighted = inv_temperature * (block_sum(weighted) + read(a.smoothing_bias, 0, 0));
  }
  float anchor = data_of<float>(a.softmax.anchor)[row];
  RowSums sums =
      row_sums_of(terms, (float)a.vocab_size, target, data_of<float>(a.softmax.row_sum)[row],
                  data_of<float>(a.softmax.target_e)[row], (anchor - target_z) * inv_temperature,
                  counts ? anchor * inv_temperature : 0, weighted,
                  counts ? inv_temperature * read(a.factor, 0, 1) * read(a.token_weights, row, 1) : 0);
  RowLoss l = loss_of_row(sums);
  float cap = terms.softcap;
  if (cap > 0) l.target *= capped_slope(target_z, cap);
  if (a.exps.data) l.per_e = scale_with_target(l);
  float r = counts ? l.per_e * read(a.softmax.rescale, row, 1) : 0;
  if (threadIdx.x == 0) {
    write(a.loss, row, counts ? l.loss : 0);
    write(a.outputs.token_z_loss, row, counts ? l.z_loss : 0);
    write(a.outputs.log_prob, row, counts ? -l.nll : 0);
    write(a.outputs.logsumexp, row, counts ? l.lse : 0);
    write(a.outputs.entropy, row, counts ? entropy_of_row(sums, l, read(a.softmax.e_distance, row, 0)) : 0);
    write(a.outputs.log_sum_sq_probs, row,
          counts ? log_sum_sq_probs_of_row(sums, l, read(a.softmax.e_squared, row, 0)) : 0);
    if (a.softmax.max.data) {
      float max = data_of<float>(a.softmax.max)[row];
      int best = counts ? data_of<int32_t>(a.softmax.best)[row] : 0;
      write(a.outputs.max_logit, row, counts ? inv_temperature * max : 0);
      write(a.outputs.correct, row, counts && best == target && l.nll == l.nll);
      if (a.outputs.predicted.data) data_of<int32_t>(a.outputs.predicted)[row] = best;
    }
    if (backward) {
      write(a.softmax.scale_non_target, row, r);
      write(a.softmax.scale_target, row, counts ? l.target : 0);
      write(a.softmax.scale_uniform, row, -l.uniform);
      if (a.exps.data && target >= 0)
        data_of<T>(a.exps)[row * a.exps.stride + target] = from_float<T>(r != 0 ? l.target / r : 0);
    }
  }
  if (!backward) return;
  T *scaled_x = data_of<T>(a.scaled_x) + row * hidden_size;
  for (int i = threadIdx.x * W; i < hidden_size; i += blockDim.x * W) {
    float values[W];
    load(values, x + i);
    EACH (k, W) values[k] *= r;
    store(scaled_x + i, values);
  }
}

void cuda_lce_row_losses(Backend *backend, const LceRowLosses *a) {
  with_access(a->x.dtype, {a->x, a->scaled_x}, [&](auto type, auto width) {
    KernelLaunch launch = per_row(backend, "lce_row_losses", a->targets.shape[0],
                                  ceil_div(a->x.shape[1], width), hopper_runs(backend));
    launch_kernel(launch, lce_row_losses_kernel<decltype(type), width>, *a,
                  inverse_temperature(a->terms.temperature));
  });
}

// One block per row.
template <typename TD, typename T, int W>
static __global__ void lce_input_gradient_kernel(const __grid_constant__ LceInputGradient a) {
  pdl_begin();
  int64_t row = blockIdx.x;
  int hidden_size = (int)a.dx.shape[1], target = data_of<int32_t>(a.targets)[row];
  bool counts = target != IGNORE_INDEX, here = target >= 0;
  const float *smoothing_row = data_of<float>(a.smoothing_row);
  float r = a.alpha * data_of<float>(a.softmax.scale_non_target)[row];
  float c = a.alpha * data_of<float>(a.softmax.scale_target)[row];
  float u = smoothing_row ? a.alpha * data_of<float>(a.softmax.scale_uniform)[row] : 0;
  TD *dx = data_of<TD>(a.dx) + row * hidden_size;
  const T *weight = data_of<T>(a.weight) + (here ? (int64_t)target * hidden_size : 0);
  for (int i = threadIdx.x * W; i < hidden_size; i += blockDim.x * W) {
    float d[W] = {}, w[W] = {}, shared[W] = {};
    if (counts) {
      load(d, dx + i);
      if (here) load(w, weight + i);
      if (smoothing_row) load(shared, smoothing_row + i);
      EACH (k, W) d[k] = r * d[k] + c * w[k] + u * shared[k];
    }
    store(dx + i, d);
  }
}

void cuda_lce_input_gradient(Backend *backend, const LceInputGradient *a) {
  with_float(a->dx.dtype, [&](auto dx_type) {
    with_access(a->weight.dtype, {a->dx, a->weight}, [&](auto type, auto width) {
      KernelLaunch launch = per_row(backend, "lce_input_gradient", a->dx.shape[0],
                                    ceil_div(a->dx.shape[1], width), hopper_runs(backend));
      launch_kernel(launch, lce_input_gradient_kernel<decltype(dx_type), decltype(type), width>, *a);
    });
  });
}

void cuda_lce_target_gradient(Backend *backend, const LceTargetGradient *a) {
  segment_add(backend, a->dweight, data_of<int32_t>(a->targets), a->x, data_of<float>(a->scale_target),
              a->alpha, true, a->workspace.data);
}
