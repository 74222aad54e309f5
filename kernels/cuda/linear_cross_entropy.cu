// The last layer's pieces, on any GPU from sm_80 on (on sm_90 with the products of hopper_gemm.cu). Why
// the arithmetic is anchored at the target is told in kernels/linear_cross_entropy.c; this file is about
// where the bytes go.
//
// The sweep makes the logits in fp32, a tile of vocabulary entries at a time, through cuBLASLt. A second
// kernel finds the tile in the L2 cache, turns each logit into E = exp(z - a), adds up the rows, and writes
// E, rounded once, to where it stays. So a logit crosses the L2 twice in fp32, E crosses device memory once
// in bf16, and no logit is ever rounded. A row's sum over the tiles is kept in double; one block adds to it
// per tile, in the tiles' order. Then one product over the whole vocabulary, E W.
//
// Several tiles take turns, so that nothing waits: the products alternate between two streams, one beginning
// on the multiprocessors that the one before it leaves, and the second kernel runs on a third stream that
// goes before both.
//
// Rows whose sum exceeds 2^100 are redone with their maximum as anchor. Short of the overflow at 2^128
// already, because r = 1/(1+R) and r x must stay normal numbers. The host does not know whether there are
// any: the kernel that settles the sums looks at them and, as a rule, leaves.
//
// On sm_90 the kernels here are launched early (pdl_attribute), so that in small chunks launches do not add
// up.
//
// Traffic for a chunk of C rows, besides the products' own: 8 C V bytes through L2, 2 C V bytes to memory.
// Measured on an H200 without hopper_gemm.cu (LCE_HOPPER=0 in the environment), whole layer over its three
// bare products in the same run, at N 16384, H 2048, V 131072: 1.21 in chunks of 4096, 1.18 in chunks of
// 2048.
#include <cooperative_groups.h>

#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/hopper_gemm.h"

static constexpr float LARGEST_SUM = 0x1p100f;
static constexpr int EXPS_GROUPS = 4; // accesses of a thread to its row of a tile

// What the sweep keeps in its scratch, in this order (scratch.c adds up the same sizes).
struct Sweep {
  float *tile[CUDA_LCE_TILES]; // [rows, columns], dense
  double *sum;                 // [rows]
  int64_t columns;
};

static float sharpness_of(float temperature) {
  return temperature > 0 ? 1 / temperature : 1;
}

// LossRows on the device; absent is NULL.
struct RowPointers {
  float *target_z, *anchor, *row_sum, *target_e, *rescale, *scale_non_target, *scale_target, *scale_uniform;
};

static RowPointers pointers_of(const LossRows &rows) {
  return {.target_z = data_of<float>(rows.target_z),
          .anchor = data_of<float>(rows.anchor),
          .row_sum = data_of<float>(rows.row_sum),
          .target_e = data_of<float>(rows.target_e),
          .rescale = data_of<float>(rows.rescale),
          .scale_non_target = data_of<float>(rows.scale_non_target),
          .scale_target = data_of<float>(rows.scale_target),
          .scale_uniform = data_of<float>(rows.scale_uniform)};
}

static Sweep sweep_scratch(const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0], columns = cuda_lce_tile_columns(rows, a->weight.shape[0]);
  char *at = data_of<char>(a->workspace);
  Sweep s;
  s.columns = columns;
  for (float *&tile : s.tile) {
    tile = reinterpret_cast<float *>(at);
    at += memory_padded((size_t)(rows * columns) * sizeof(float));
  }
  s.sum = reinterpret_cast<double *>(at);
  return s;
}

// sum of x[i] * w[i], by one warp; every lane gets it. Loads of several steps are on their way together.
template <typename T, int W> static __device__ float warp_dot(const T *x, const T *w, int hidden_size) {
  constexpr int STEPS = 4, STEP = 32 * W;
  float sum = 0;
  for (int first = threadIdx.x % 32 * W; first < hidden_size; first += STEPS * STEP) {
    float a[STEPS][W] = {}, b[STEPS][W] = {};
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      if (first + j * STEP >= hidden_size) break;
      load(a[j], x + first + j * STEP);
      load(b[j], w + first + j * STEP);
    }
#pragma unroll
    for (int j = 0; j < STEPS; j++)
#pragma unroll
      for (int k = 0; k < W; k++) sum += a[j][k] * b[j][k];
  }
  return warp_sum(sum);
}

// One warp a row.
template <typename T, int W>
static __global__ void __launch_bounds__(256)
    target_logits_kernel(float *target_z, const T *x, int64_t x_stride, const T *weight,
                         const int32_t *targets, int64_t rows, int hidden_size) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  int target = targets[row];
  float z = 0;
  if (target >= 0)
    z = warp_dot<T, W>(x + row * x_stride, weight + (int64_t)target * hidden_size, hidden_size);
  if (threadIdx.x % 32 == 0) target_z[row] = z;
}

void cuda_lce_target_logits(Backend *backend, const LceTargetLogits *a) {
  int64_t rows = a->x.shape[0];
  if (rows == 0) return;
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    with_bool(rows_align(a->x, WIDTH<T>) && rows_align(a->weight, WIDTH<T>), [&](auto wide) {
      constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
      launch_kernel(hopper_runs(backend), cuda_stream(backend), dim3((unsigned)ceil_div(rows, 8)), 256,
                    target_logits_kernel<T, W>, data_of<float>(a->target_z), data_of<T>(a->x), a->x.stride,
                    data_of<T>(a->weight), data_of<int32_t>(a->targets), rows, (int)a->x.shape[1]);
    });
  });
}

// Every exponential of a row that does not count is 0.
static __device__ float anchor_of(float target_z, int target) {
  return target != IGNORE_INDEX ? target_z : INFINITY;
}

// One block a row of the tile, whose first column is vocabulary entry `first`. exps is NULL when nothing is
// kept.
template <typename T, int W>
static __global__ void __launch_bounds__(1024)
    exponential_kernel(T *exps, int64_t exps_stride, Sweep s, const float *tile, const float *target_z,
                       const int32_t *targets, int64_t first, int columns, float sharpness) {
  int64_t row = blockIdx.x;
  tile += row * s.columns;
  float a = anchor_of(target_z[row], targets[row]), sum = 0;
  int target = (int)(targets[row] - first); // may lie outside of the tile
  if (exps) exps += row * exps_stride + first;
  int body = columns / W * W, tail = body + threadIdx.x;
#pragma unroll 4
  for (int i = threadIdx.x * W; i < body; i += blockDim.x * W) {
    float z[W];
    load(z, tile + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
      z[k] = i + k == target ? 0.0f : __expf((z[k] - a) * sharpness);
      sum += z[k];
    }
    if (exps) store(exps + i, z);
  }
  if (tail < columns) {
    float e = tail == target ? 0.0f : __expf((tile[tail] - a) * sharpness);
    sum += e;
    if (exps) exps[tail] = from_float<T>(e);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) s.sum[row] = (first ? s.sum[row] : 0) + sum;
}

// Floats are ordered as their bits are, read as integers, and the other way around below zero.
static __device__ void raise_to(float *max, float x) {
  x += 0.0f; // -0 becomes 0
  if (x >= 0)
    atomicMax(reinterpret_cast<int *>(max), __float_as_int(x));
  else
    atomicMin(reinterpret_cast<unsigned *>(max), __float_as_uint(x));
}

// What settling the rows' sums needs of a call.
template <typename T> struct Settling {
  T *exps; // NULL: not kept
  int64_t exps_stride, x_stride;
  RowPointers row;
  const T *x, *weight;
  const int32_t *targets;
  int64_t rows, vocab_size;
  int hidden_size;
  float sharpness;
  const double *sum;  // [rows], or
  const float *parts; // [rows, across]: what is still to be added
  int across;
  float *shares; // [rows, blocks]; may lie where parts do
};

// The rows' sums and anchors, and rows redone whose sum is too large: as a rule there are none, which every
// block sees for itself. Else each block makes the entries of its share of the vocabulary. A cooperative
// launch.
template <typename T, int W>
static __global__ void __launch_bounds__(1024) settle_kernel(const __grid_constant__ Settling<T> a) {
  cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (int64_t row = (int64_t)warp * gridDim.x + blockIdx.x; row < a.rows;
       row += (int64_t)gridDim.x * warps) {
    double sum = lane == 0 && a.sum ? a.sum[row] : 0;
#pragma unroll 8
    for (int i = lane; i < a.across; i += 32) sum += (double)a.parts[row * a.across + i];
    sum = warp_sum(sum);
    if (lane) continue;
    a.row.row_sum[row] = (float)sum;
    a.row.target_e[row] = 1;
    a.row.anchor[row] = anchor_of(a.row.target_z[row], a.targets[row]);
  }
  grid.sync();
  auto redone = [&](int64_t row) { return a.row.row_sum[row] > LARGEST_SUM; };
  bool any = false;
  for (int64_t row = threadIdx.x; row < a.rows; row += blockDim.x) any |= redone(row);
  if (!__syncthreads_or(any)) return;

  int64_t share = (a.vocab_size + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
  int64_t end = min(a.vocab_size, begin + share);
  auto logit = [&](int64_t row, int64_t v) {
    return warp_dot<T, W>(a.x + row * a.x_stride, a.weight + v * a.hidden_size, a.hidden_size);
  };
  for (int64_t row = grid.thread_rank(); row < a.rows; row += grid.size())
    if (redone(row)) a.row.anchor[row] = -INFINITY;
  grid.sync();
  for (int64_t row = 0; row < a.rows; row++) {
    if (!redone(row)) continue;
    float most = -INFINITY;
    for (int64_t v = begin + warp; v < end; v += warps) most = fmaxf(most, logit(row, v));
    if (lane == 0) raise_to(&a.row.anchor[row], most);
  }
  grid.sync();
  for (int64_t row = 0; row < a.rows; row++) {
    if (!redone(row)) continue;
    float sum = 0;
    for (int64_t v = begin + warp; v < end; v += warps) {
      float z = logit(row, v), e = v == a.targets[row] ? 0.0f : __expf((z - a.row.anchor[row]) * a.sharpness);
      if (lane) continue;
      sum += e;
      if (a.exps) a.exps[row * a.exps_stride + v] = from_float<T>(e);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) a.shares[row * gridDim.x + blockIdx.x] = sum;
  }
  grid.sync();
  for (int64_t row = (int64_t)blockIdx.x * warps + warp; row < a.rows; row += (int64_t)gridDim.x * warps) {
    if (!redone(row)) continue;
    float sum = 0;
    for (unsigned i = lane; i < gridDim.x; i += 32) sum += a.shares[row * gridDim.x + i];
    sum = warp_sum(sum);
    if (lane) continue;
    a.row.row_sum[row] = sum;
    a.row.target_e[row] = __expf((a.row.target_z[row] - a.row.anchor[row]) * a.sharpness);
  }
}

template <typename T>
static void settle(Backend *backend, const Settling<T> &a, int64_t most_blocks, bool dots_align) {
  with_bool(dots_align, [&](auto wide) {
    constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    attributes[1] = pdl_attribute();
    cudaLaunchConfig_t config = {};
    // As many as surely run at the same time, and whose sums there is room for.
    config.gridDim = dim3((unsigned)min_i64(cuda_state(backend)->multiprocessors, most_blocks));
    config.blockDim = dim3(1024);
    config.stream = cuda_stream(backend);
    config.attrs = attributes;
    config.numAttrs = hopper_runs(backend) ? 2 : 1;
    cuda_check(cudaLaunchKernelEx(&config, settle_kernel<T, W>, a), "settling the rows' sums");
  });
}

// Logits of vocabulary entries [first, first + columns) into a tile.
static void logits_product(Backend *backend, cudaStream_t stream, const LceLogitsExp *a, float *tile,
                           int64_t stride, int64_t first, int64_t columns) {
  Product product = {.m = a->x.shape[0],
                     .n = columns,
                     .k = a->x.shape[1],
                     .left = {a->x.data, a->x.stride, false},
                     .right = {tensor_rows(a->weight, first, columns).data, a->weight.stride, true},
                     .operand_dtype = a->x.dtype,
                     .out_dtype = DTYPE_F32,
                     .out = tile,
                     .out_stride = stride,
                     .stream = stream};
  cuda_gemm(backend, &product);
}

static void record(cudaEvent_t event, cudaStream_t stream) {
  cuda_check(cudaEventRecord(event, stream), "forking and joining streams");
}

static void wait_for(cudaEvent_t event, cudaStream_t stream) {
  cuda_check(cudaStreamWaitEvent(stream, event, 0), "forking and joining streams");
}

// All tiles: E, and the rows' sums.
template <typename T> static void sweep_tiles(Backend *backend, const LceLogitsExp *a, const Sweep &s) {
  CudaState *state = cuda_state(backend);
  int64_t rows = a->x.shape[0], vocab_size = a->weight.shape[0];
  T *exps = data_of<T>(a->exps);
  record(state->joined[0], state->stream);
  wait_for(state->joined[0], state->side);
  int turn = 0;
  for (int64_t first = 0; first < vocab_size; first += s.columns, turn++) {
    int64_t columns = min_i64(s.columns, vocab_size - first);
    int i = turn % CUDA_LCE_TILES;
    cudaStream_t stream = turn % 2 ? state->side : state->stream;
    if (turn >= CUDA_LCE_TILES) wait_for(state->joined[i], stream);
    logits_product(backend, stream, a, s.tile[i], s.columns, first, columns);
    record(state->forked[i], stream);
    wait_for(state->forked[i], state->urgent);
    with_bool(!exps || rows_start_aligned(a->exps, WIDTH<T>), [&](auto wide) {
      constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
      int threads = row_threads(ceil_div(columns, EXPS_GROUPS * W), 1024);
      exponential_kernel<T, W><<<(unsigned)rows, threads, 0, state->urgent>>>(
          exps, a->exps.stride, s, s.tile[i], data_of<float>(a->rows.target_z), data_of<int32_t>(a->targets),
          first, (int)columns, sharpness_of(a->temperature));
    });
    record(state->joined[i], state->urgent);
    if (first + columns == vocab_size) wait_for(state->joined[i], state->stream); // it ends after all others
  }
}

// The rows from `first` on, as a sweep of their own.
static LceLogitsExp rows_from(const LceLogitsExp *a, int64_t first) {
  LceLogitsExp rest = *a;
  int64_t count = a->x.shape[0] - first;
  rest.rows = loss_rows_range(&a->rows, first, count);
  for (Tensor *t : {&rest.exps, &rest.x, &rest.targets})
    if (tensor_exists(*t)) *t = tensor_rows(*t, first, count);
  return rest;
}

void cuda_lce_logits_exp(Backend *backend, const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0], hidden_size = a->x.shape[1], vocab_size = a->weight.shape[0];
  if (rows == 0) return;
  Sweep s = sweep_scratch(a);
  size_t tile_bytes = (size_t)(reinterpret_cast<char *>(s.sum) - reinterpret_cast<char *>(s.tile[0]));
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    int64_t done = 0;
    for (int64_t first = 0; first < rows; first += done) {
      LceLogitsExp rest = rows_from(a, first);
      done =
          hopper_logits_exp(backend, rest.exps, s.tile[0], tile_bytes, data_of<float>(rest.rows.target_z),
                            sharpness_of(a->temperature), rest.x, a->weight, data_of<int32_t>(rest.targets));
      bool on_hopper = done > 0;
      if (!on_hopper) {
        sweep_tiles<T>(backend, a, s);
        done = rows;
      }
      Settling<T> settling = {.exps = data_of<T>(rest.exps),
                              .exps_stride = rest.exps.stride,
                              .x_stride = rest.x.stride,
                              .row = pointers_of(rest.rows),
                              .x = data_of<T>(rest.x),
                              .weight = data_of<T>(a->weight),
                              .targets = data_of<int32_t>(rest.targets),
                              .rows = done,
                              .vocab_size = vocab_size,
                              .hidden_size = (int)hidden_size,
                              .sharpness = sharpness_of(a->temperature),
                              .sum = on_hopper ? nullptr : s.sum,
                              .parts = s.tile[0],
                              .across = on_hopper ? (int)hopper_sum_parts(vocab_size) : 0,
                              .shares = s.tile[0]};
      settle(backend, settling, s.columns, rows_align(a->x, WIDTH<T>) && rows_align(a->weight, WIDTH<T>));
    }
  });
  cuda_check_launch("lce_logits_exp");
  if (!tensor_exists(a->dx_raw)) return;
  if (hopper_dx(backend, a->dx_raw, a->exps, a->weight, s.tile[0], tile_bytes, false)) return;
  Product product = {.m = rows,
                     .n = hidden_size,
                     .k = vocab_size,
                     .left = {a->exps.data, a->exps.stride, false},
                     .right = {a->weight.data, a->weight.stride, false},
                     .operand_dtype = a->x.dtype,
                     .out_dtype = a->dx_raw.dtype,
                     .out = a->dx_raw.data,
                     .out_stride = a->dx_raw.stride};
  cuda_gemm(backend, &product);
}

// --- a vocabulary split over ranks -------------------------------------------------------------------------

static __global__ void shard_indices_kernel(int32_t *out, const int32_t *indices, int64_t rows, int64_t first,
                                            int64_t count) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= rows) return;
  int32_t index = indices[n];
  int64_t local = index - first;
  out[n] = index == IGNORE_INDEX ? IGNORE_INDEX : local >= 0 && local < count ? (int32_t)local : ELSEWHERE;
}

void cuda_shard_indices(Backend *backend, const ShardIndices *a) {
  int64_t rows = a->indices.shape[0];
  if (rows == 0) return;
  shard_indices_kernel<<<(unsigned)ceil_div(rows, 256), 256, 0, cuda_stream(backend)>>>(
      data_of<int32_t>(a->out), data_of<int32_t>(a->indices), rows, a->first, a->count);
  cuda_check_launch("shard_indices");
}

static __global__ void combine_kernel(const __grid_constant__ RowPointers row, const float *parts,
                                      const int32_t *targets, int64_t rows, int ranks, int rank,
                                      float sharpness) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= rows) return;
  if (targets[n] == IGNORE_INDEX) {
    row.row_sum[n] = 0;
    row.target_e[n] = row.rescale[n] = 1;
    row.anchor[n] = INFINITY;
    return;
  }
  float most = -INFINITY;
  for (int r = 0; r < ranks; r++) most = fmaxf(most, parts[r * 2 * rows + n]);
  double sum = 0;
  for (int r = 0; r < ranks; r++) {
    float factor = expf((parts[r * 2 * rows + n] - most) * sharpness);
    sum += (double)(parts[(r * 2 + 1) * rows + n] * factor);
    if (r == rank) row.rescale[n] = factor;
  }
  row.row_sum[n] = (float)sum;
  row.anchor[n] = most;
  row.target_e[n] = expf((row.target_z[n] - most) * sharpness);
}

void cuda_lce_combine(Backend *backend, const LceCombine *a) {
  int64_t rows = a->targets.shape[0];
  if (rows == 0) return;
  combine_kernel<<<(unsigned)ceil_div(rows, 256), 256, 0, cuda_stream(backend)>>>(
      pointers_of(a->rows), data_of<float>(a->parts), data_of<int32_t>(a->targets), rows, backend->ranks,
      backend->rank, sharpness_of(a->temperature));
  cuda_check_launch("lce_combine");
}

// --- what follows from a row's sums ------------------------------------------------------------------------

// What the kernel reads and writes of each row; absent is NULL.
struct RowTerms {
  RowPointers row;
  float *loss, *z_loss, *log_prob, *logsumexp;
  const float *token_weights, *factor, *class_weights, *class_weight_sum, *smoothing_row;
  const int32_t *targets;
  float epsilon, lambda, sharpness;
  float share; // eps / V
  int64_t vocab_size;
};

static __device__ __forceinline__ float read(const float *values, int64_t n, float otherwise) {
  return values ? values[n] : otherwise;
}

static __device__ __forceinline__ void tell(float *output, int64_t n, float value) {
  if (output) output[n] = value;
}

// One block a row.
template <typename T, int W>
static __global__ void __launch_bounds__(256)
    lce_rows_kernel(const __grid_constant__ RowTerms t, T *scaled_x, const T *x, int hidden_size) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int64_t row = blockIdx.x;
  int target = t.targets[row];
  bool counts = target != IGNORE_INDEX;
  x += row * hidden_size;
  float row_sum = t.row.row_sum[row], target_e = t.row.target_e[row], total = row_sum + target_e;
  float target_z = t.row.target_z[row];
  float nll = target_e == 1 ? log1pf(row_sum) : (t.row.anchor[row] - target_z) * t.sharpness + logf(total);
  float lse = target_z * t.sharpness + nll, w = counts ? read(t.class_weights, target, 1) : 1;
  float weight_sum = read(t.class_weight_sum, 0, (float)t.vocab_size);
  float loss = (1 - t.epsilon) * w * nll;
  if (t.smoothing_row) { // the same for the whole block
    float dot = 0;
    for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) dot += to_float(x[i]) * t.smoothing_row[i];
    loss += t.share * (weight_sum * lse - t.sharpness * block_sum(dot));
  }
  float s = counts ? t.sharpness * read(t.factor, 0, 1) * read(t.token_weights, row, 1) : 0;
  float own = (1 - t.epsilon) * w, spread = t.share * weight_sum + 2 * t.lambda * lse;
  float r = counts ? s * (own + spread) / total * read(t.row.rescale, row, 1) : 0;
  if (threadIdx.x == 0) {
    tell(t.loss, row, counts ? loss : 0);
    tell(t.z_loss, row, counts ? t.lambda * lse * lse : 0);
    tell(t.log_prob, row, counts ? -nll : 0);
    tell(t.logsumexp, row, counts ? lse : 0);
    if (scaled_x) {
      t.row.scale_non_target[row] = r;
      t.row.scale_target[row] = counts ? s * (spread * (target_e / total) - own * (row_sum / total)) : 0;
      tell(t.row.scale_uniform, row, -s * t.share);
    }
  }
  if (!scaled_x) return;
  scaled_x += row * hidden_size;
  for (int i = threadIdx.x * W; i < hidden_size; i += blockDim.x * W) {
    float values[W];
    load(values, x + i);
#pragma unroll
    for (int k = 0; k < W; k++) values[k] *= r;
    store(scaled_x + i, values);
  }
}

void cuda_lce_rows(Backend *backend, const LceRows *a) {
  int64_t rows = a->targets.shape[0];
  if (rows == 0) return;
  RowTerms t;
  t.row = pointers_of(a->rows);
  t.loss = data_of<float>(a->loss);
  t.z_loss = data_of<float>(a->outputs.z_loss);
  t.log_prob = data_of<float>(a->outputs.log_prob);
  t.logsumexp = data_of<float>(a->outputs.logsumexp);
  t.token_weights = data_of<float>(a->token_weights);
  t.factor = data_of<float>(a->factor);
  t.class_weights = data_of<float>(a->terms.class_weights);
  t.class_weight_sum = data_of<float>(a->terms.class_weight_sum);
  t.smoothing_row = a->terms.label_smoothing > 0 ? data_of<float>(a->smoothing_row) : nullptr;
  t.targets = data_of<int32_t>(a->targets);
  t.epsilon = a->terms.label_smoothing;
  t.lambda = a->terms.z_loss;
  t.sharpness = sharpness_of(a->terms.temperature);
  t.share = a->terms.label_smoothing / (float)a->vocab_size;
  t.vocab_size = a->vocab_size;
  int hidden_size = (int)a->x.shape[1];
  bool backward = tensor_exists(a->scaled_x);
  with_float(a->x.dtype, [&](auto type) {
    using T = decltype(type);
    with_bool(backward && rows_align(a->x, WIDTH<T>) && rows_align(a->scaled_x, WIDTH<T>), [&](auto wide) {
      constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
      launch_kernel(hopper_runs(backend), cuda_stream(backend), dim3((unsigned)rows),
                    row_threads(ceil_div(hidden_size, W), 256), lce_rows_kernel<T, W>, t,
                    data_of<T>(a->scaled_x), data_of<T>(a->x), hidden_size);
    });
  });
}

// One block a row.
template <typename TD, typename T, int W>
static __global__ void lce_input_gradient_kernel(TD *dx, const __grid_constant__ RowPointers rows,
                                                 const float *smoothing_row, const T *weight,
                                                 const int32_t *targets, int hidden_size, float alpha) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int64_t row = blockIdx.x;
  int target = targets[row];
  bool counts = target != IGNORE_INDEX, here = target >= 0;
  float r = alpha * rows.scale_non_target[row], c = alpha * rows.scale_target[row];
  float u = smoothing_row ? alpha * rows.scale_uniform[row] : 0;
  dx += row * hidden_size;
  if (here) weight += (int64_t)target * hidden_size;
  for (int i = threadIdx.x * W; i < hidden_size; i += blockDim.x * W) {
    float d[W] = {}, w[W] = {}, shared[W] = {};
    if (counts) {
      load(d, dx + i);
      if (here) load(w, weight + i);
      if (smoothing_row) load(shared, smoothing_row + i);
#pragma unroll
      for (int k = 0; k < W; k++) d[k] = r * d[k] + c * w[k] + u * shared[k];
    }
    store(dx + i, d);
  }
}

void cuda_lce_input_gradient(Backend *backend, const LceInputGradient *a) {
  int64_t rows = a->dx.shape[0], hidden_size = a->dx.shape[1];
  if (rows == 0) return;
  with_float(a->dx.dtype, [&](auto dx_type) {
    with_float(a->weight.dtype, [&](auto type) {
      using TD = decltype(dx_type);
      using T = decltype(type);
      with_bool(rows_align(a->dx, WIDTH<T>) && rows_align(a->weight, WIDTH<T>), [&](auto wide) {
        constexpr int W = decltype(wide)::value ? WIDTH<T> : 1;
        launch_kernel(hopper_runs(backend), cuda_stream(backend), dim3((unsigned)rows),
                      row_threads(ceil_div(hidden_size, W), 256), lce_input_gradient_kernel<TD, T, W>,
                      data_of<TD>(a->dx), pointers_of(a->rows), data_of<float>(a->smoothing_row),
                      data_of<T>(a->weight), data_of<int32_t>(a->targets), (int)hidden_size, a->alpha);
      });
    });
  });
}

void cuda_lce_target_gradient(Backend *backend, const LceTargetGradient *a) {
  segment_add(backend, a->dweight, data_of<int32_t>(a->targets), a->x, data_of<float>(a->scale_target),
              a->alpha, true, a->workspace.data);
}
