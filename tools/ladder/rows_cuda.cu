// What the ladder does to rows, as kernels: one block a row, one idea at a time. And rung 5's matmul, on
// tensor cores through WMMA, the interface of CUDA C++ itself. It shows where the exponential belongs and
// nothing else: two stages of shared memory, no TMA, no warp roles, no wgmma. It reaches a fraction of the
// speed of the kernel in kernels/cuda/hopper_kernel.cuh, or of cuBLASLt.
#include <cuda_pipeline.h>
#include <mma.h>

#include "kernels/cuda/cuda_common.cuh"
#include "tools/ladder/ladder.h"

enum { THREADS = 512 };

static __device__ float block_max(float x) {
  __shared__ float of_warp[THREADS / 32];
  for (int offset = 16; offset; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  __syncthreads(); // the previous call's results have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  for (int w = 0; w < THREADS / 32; w++) x = fmaxf(x, of_warp[w]);
  return x;
}

// --- rungs 1 to 3: softmax as it is usually written --------------------------------------------------------

static __global__ void losses_kernel(float *loss, float *lse, const float *logits, int64_t stride,
                                     const int32_t *targets, int vocab) {
  int64_t n = blockIdx.x;
  const float *z = logits + n * stride;
  float maximum = -INFINITY, sum = 0;
  for (int j = threadIdx.x; j < vocab; j += THREADS) maximum = fmaxf(maximum, z[j]);
  maximum = block_max(maximum);
  for (int j = threadIdx.x; j < vocab; j += THREADS) sum += __expf(z[j] - maximum);
  sum = block_sum(sum);
  if (threadIdx.x) return;
  lse[n] = maximum + logf(sum);
  loss[n] = targets[n] == IGNORE_INDEX ? 0 : lse[n] - z[targets[n]];
}

// dlogits may lie in the logits' memory: what a step writes (half as many bytes) has been read by all threads.
static __global__ void gradients_kernel(bf16 *dlogits, int64_t dstride, const float *logits, int64_t stride,
                                        const float *lse, const int32_t *targets, int vocab, float scale) {
  int64_t n = blockIdx.x;
  int target = targets[n];
  for (int first = 0; first < vocab; first += THREADS) {
    int j = first + threadIdx.x;
    float p = j < vocab ? __expf(logits[n * stride + j] - lse[n]) : 0;
    __syncthreads();
    if (j < vocab) dlogits[n * dstride + j] = target < 0 ? bf16(0) : bf16(scale * (p - (j == target)));
  }
}

static void losses(Backend *backend, Tensor loss, Tensor lse, Tensor logits, Tensor targets) {
  losses_kernel<<<(unsigned)logits.shape[0], THREADS, 0, cuda_stream(backend)>>>(
      data_of<float>(loss), data_of<float>(lse), data_of<float>(logits), logits.stride,
      data_of<int32_t>(targets), (int)logits.shape[1]);
  cuda_check_launch("losses_kernel");
}

static void gradients(Backend *backend, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets,
                      float scale) {
  gradients_kernel<<<(unsigned)logits.shape[0], THREADS, 0, cuda_stream(backend)>>>(
      data_of<bf16>(dlogits), dlogits.stride, data_of<float>(logits), logits.stride, data_of<float>(lse),
      data_of<int32_t>(targets), (int)logits.shape[1], scale);
  cuda_check_launch("gradients_kernel");
}

// --- rungs 4 and 5: anchored at the target -----------------------------------------------------------------

// An Anchored as a kernel takes it.
struct Rows {
  const bf16 *x, *weight;
  const int32_t *targets;
  float *loss, *target_z, *anchor, *target_e, *row_sum, *r, *c, *dweight;
  bf16 *dx, *scaled_x, *exps;
  int64_t exps_stride;
  int rows, hidden, vocab;
  float scale;
};

static Rows rows_of(const Anchored *a) {
  return {data_of<bf16>(a->x),
          data_of<bf16>(a->weight),
          data_of<int32_t>(a->targets),
          data_of<float>(a->loss),
          data_of<float>(a->target_z),
          data_of<float>(a->anchor),
          data_of<float>(a->target_e),
          data_of<float>(a->row_sum),
          data_of<float>(a->r),
          data_of<float>(a->c),
          data_of<float>(a->dweight),
          data_of<bf16>(a->dx),
          data_of<bf16>(a->scaled_x),
          data_of<bf16>(a->exps),
          a->exps.stride,
          (int)a->x.shape[0],
          (int)a->x.shape[1],
          (int)a->weight.shape[0],
          a->scale};
}

static __device__ float warp_dot(const bf16 *x, const bf16 *w, int count) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) sum += to_float(x[i]) * to_float(w[i]);
  return warp_sum(sum);
}

static __global__ void anchors_kernel(Rows a) { // one warp a row
  int64_t n = blockIdx.x;
  int target = a.targets[n];
  float z = target < 0 ? 0 : warp_dot(a.x + n * a.hidden, a.weight + (int64_t)target * a.hidden, a.hidden);
  if (threadIdx.x) return;
  a.target_z[n] = z;
  a.anchor[n] = target < 0 ? INFINITY : z; // makes every exponential of the row 0
  a.target_e[n] = 1;
}

// E in the logits' place, as gradients_kernel does it.
static __global__ void exponentials_kernel(Rows a, const float *logits, int64_t stride) {
  int64_t n = blockIdx.x;
  float sum = 0, anchor = a.anchor[n];
  for (int first = 0; first < a.vocab; first += THREADS) {
    int j = first + threadIdx.x;
    float e = j < a.vocab && j != a.targets[n] ? __expf(logits[n * stride + j] - anchor) : 0;
    __syncthreads();
    if (j < a.vocab) a.exps[n * a.exps_stride + j] = bf16(e);
    sum += e;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.row_sum[n] = sum;
}

// Rows whose sum is out of range, once more; as a rule every block leaves at once.
static __global__ void repair_kernel(Rows a) {
  int64_t n = blockIdx.x;
  if (!(a.row_sum[n] > LADDER_SUM_LIMIT)) return;
  int warp = threadIdx.x / 32, warps = THREADS / 32;
  const bf16 *x = a.x + n * a.hidden;
  float maximum = -INFINITY, sum = 0;
  for (int j = warp; j < a.vocab; j += warps)
    maximum = fmaxf(maximum, warp_dot(x, a.weight + (int64_t)j * a.hidden, a.hidden));
  maximum = block_max(maximum);
  for (int j = warp; j < a.vocab; j += warps) {
    float z = warp_dot(x, a.weight + (int64_t)j * a.hidden, a.hidden);
    float e = j == a.targets[n] ? 0 : __expf(z - maximum);
    if (threadIdx.x % 32 == 0) a.exps[n * a.exps_stride + j] = bf16(e), sum += e;
  }
  sum = block_sum(sum);
  if (threadIdx.x) return;
  a.row_sum[n] = sum;
  a.anchor[n] = maximum;
  a.target_e[n] = __expf(a.target_z[n] - maximum);
}

static __global__ void finish_kernel(Rows a) {
  int64_t n = blockIdx.x;
  bool counts = a.targets[n] != IGNORE_INDEX;
  float row_sum = a.row_sum[n], target_e = a.target_e[n], total = row_sum + target_e; // 1 + R
  float r = counts ? 1 / total : 0;
  for (int i = threadIdx.x; i < a.hidden; i += THREADS)
    a.scaled_x[n * a.hidden + i] = bf16(r * to_float(a.x[n * a.hidden + i]));
  if (threadIdx.x) return;
  float nll = target_e == 1 ? log1pf(row_sum) : a.anchor[n] - a.target_z[n] + logf(total);
  a.loss[n] = counts ? nll : 0;
  a.r[n] = r;
  a.c[n] = counts ? -row_sum / total : 0;
}

// Several tokens may have one target: atomics, in whatever order. The real one sorts by target instead, so that
// bits repeat.
static __global__ void add_targets_kernel(Rows a) {
  int64_t n = blockIdx.x, target = a.targets[n];
  for (int64_t i = threadIdx.x; i < a.hidden; i += THREADS) {
    bf16 *dx = a.dx + n * a.hidden + i;
    float w = target < 0 ? 0 : to_float(a.weight[target * a.hidden + i]);
    *dx = target < 0 ? bf16(0) : bf16(a.scale * (a.r[n] * to_float(*dx) + a.c[n] * w));
    if (target >= 0)
      atomicAdd(a.dweight + target * a.hidden + i, a.scale * a.c[n] * to_float(a.x[n * a.hidden + i]));
  }
}

static void anchors(Backend *backend, const Anchored *a) {
  anchors_kernel<<<(unsigned)a->x.shape[0], 32, 0, cuda_stream(backend)>>>(rows_of(a));
  cuda_check_launch("anchors_kernel");
}

static void exponentials(Backend *backend, const Anchored *a, Tensor logits) {
  exponentials_kernel<<<(unsigned)a->x.shape[0], THREADS, 0, cuda_stream(backend)>>>(
      rows_of(a), data_of<float>(logits), logits.stride);
  cuda_check_launch("exponentials_kernel");
}

static void repair(Backend *backend, const Anchored *a) {
  repair_kernel<<<(unsigned)a->x.shape[0], THREADS, 0, cuda_stream(backend)>>>(rows_of(a));
  cuda_check_launch("repair_kernel");
}

static void finish(Backend *backend, const Anchored *a) {
  finish_kernel<<<(unsigned)a->x.shape[0], THREADS, 0, cuda_stream(backend)>>>(rows_of(a));
  cuda_check_launch("finish_kernel");
}

static void add_targets(Backend *backend, const Anchored *a) {
  add_targets_kernel<<<(unsigned)a->x.shape[0], THREADS, 0, cuda_stream(backend)>>>(rows_of(a));
  cuda_check_launch("add_targets_kernel");
}

// --- rung 5: X W^T on tensor cores, with the exponential in the epilogue ------------------------------------

namespace wmma = nvcuda::wmma;

// A block of eight warps, four down by two across, makes a tile of 128 x 128, a warp 32 x 64 of it.
enum { TILE = 128, TILE_K = 32, PAD = 8, WARPS_M = 4, WARPS_N = 2, BLOCK = 32 * WARPS_M * WARPS_N };

struct Stage {
  bf16 x[TILE][TILE_K + PAD], w[TILE][TILE_K + PAD]; // padded so that rows start in different banks
};

// Rows [first, first + TILE) of a [count, hidden] matrix, columns [k, k + TILE_K), zeros outside; 16 bytes at a
// time, asynchronously.
static __device__ void copy_tile(bf16 (*to)[TILE_K + PAD], const bf16 *from, int first, int count, int k,
                                 int hidden) {
  constexpr int PIECES = TILE_K / 8;
  for (int i = threadIdx.x; i < TILE * PIECES; i += BLOCK) {
    int row = i / PIECES, column = i % PIECES * 8;
    bool inside = first + row < count && k + column < hidden;
    const bf16 *source = inside ? from + (int64_t)(first + row) * hidden + k + column : from;
    __pipeline_memcpy_async(&to[row][column], source, 16, inside ? 0 : 16);
  }
}

// parts[row, tile]: the row's sum of exponentials over a tile of columns, so that the order of summation is
// fixed.
static __global__ void __launch_bounds__(BLOCK) matmul_exponentials_kernel(Rows a, float *parts) {
  __shared__ __align__(128) Stage stages[2];
  __shared__ float sums[WARPS_N][TILE];
  int m0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int warp_m = warp / WARPS_N * (TILE / WARPS_M), warp_n = warp % WARPS_N * (TILE / WARPS_N);
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][4];
  for (auto &row : sum)
    for (auto &fragment : row) wmma::fill_fragment(fragment, 0);

  // Mainloop: while one stage is multiplied, the next is on its way.
  auto copy = [&](int stage, int k) {
    copy_tile(stages[stage].x, a.x, m0, a.rows, k, a.hidden);
    copy_tile(stages[stage].w, a.weight, n0, a.vocab, k, a.hidden);
  };
  copy(0, 0);
  __pipeline_commit();
  for (int k = 0, stage = 0; k < a.hidden; k += TILE_K, stage ^= 1) {
    if (k + TILE_K < a.hidden) copy(stage ^ 1, k + TILE_K);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    for (int kk = 0; kk < TILE_K; kk += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major> x[2];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::col_major> w[4]; // W^T
      for (int i = 0; i < 2; i++)
        wmma::load_matrix_sync(x[i], &stages[stage].x[warp_m + 16 * i][kk], TILE_K + PAD);
      for (int j = 0; j < 4; j++)
        wmma::load_matrix_sync(w[j], &stages[stage].w[warp_n + 16 * j][kk], TILE_K + PAD);
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) wmma::mma_sync(sum[i][j], x[i], w[j], sum[i][j]);
    }
    __syncthreads();
  }

  // Epilogue: a fragment's 16 x 16 logits through the warp's own piece of shared memory, two lanes a row.
  float(*patch)[16] = reinterpret_cast<float(*)[16]>(stages) + 16 * warp;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = warp_m + 16 * i + lane / 2, m = m0 + row;
    float anchor = m < a.rows ? a.anchor[m] : INFINITY, row_sum = 0;
    int target = m < a.rows ? a.targets[m] : 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      wmma::store_matrix_sync(&patch[0][0], sum[i][j], 16, wmma::mem_row_major);
      __syncwarp();
      int column = lane % 2 * 8, n = n0 + warp_n + 16 * j + column;
      float e[8];
      for (int q = 0; q < 8; q++) {
        e[q] = n + q < a.vocab && n + q != target ? __expf(patch[lane / 2][column + q] - anchor) : 0;
        row_sum += e[q];
      }
      if (m < a.rows && n < a.vocab) store(a.exps + m * a.exps_stride + n, e); // rows end on 128 bytes
      __syncwarp();
    }
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    if (lane % 2 == 0) sums[warp % WARPS_N][row] = row_sum;
  }
  __syncthreads();
  int row = threadIdx.x;
  if (row < TILE && m0 + row < a.rows)
    parts[(int64_t)(m0 + row) * gridDim.y + blockIdx.y] = sums[0][row] + sums[1][row];
}

static __global__ void add_parts_kernel(float *row_sum, const float *parts, int across) { // one warp a row
  float sum = 0;
  for (int i = threadIdx.x; i < across; i += 32) sum += parts[(int64_t)blockIdx.x * across + i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) row_sum[blockIdx.x] = sum;
}

static void matmul_exponentials(Backend *backend, const Anchored *a) {
  Rows rows = rows_of(a);
  if (rows.hidden % 8)
    fail("rung 5 copies 8 elements at a time; a hidden size of %d is no multiple", rows.hidden);
  MemoryMark mark = memory_mark(&backend->memory);
  unsigned down = (unsigned)ceil_div(rows.rows, TILE), across = (unsigned)ceil_div(rows.vocab, TILE);
  Tensor parts =
      memory_push_2d(&backend->memory, "parts of row sums", MEMORY_HEAD, DTYPE_F32, rows.rows, across);
  matmul_exponentials_kernel<<<dim3(down, across), BLOCK, 0, cuda_stream(backend)>>>(rows,
                                                                                     data_of<float>(parts));
  cuda_check_launch("matmul_exponentials_kernel");
  add_parts_kernel<<<(unsigned)rows.rows, 32, 0, cuda_stream(backend)>>>(rows.row_sum, data_of<float>(parts),
                                                                         (int)across);
  cuda_check_launch("add_parts_kernel");
  memory_pop_to(&backend->memory, mark);
}

const LadderRows ladder_rows_cuda = {losses, gradients, anchors,    exponentials, matmul_exponentials,
                                     repair, finish,    add_targets};
