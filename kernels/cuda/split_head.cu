// The operations of a head split over ranks (kernels/lce/split_head.c): targets as a rank's shard counts
// them, and the ranks' row sums combined.
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/lce/loss_row.h"

static __global__ void shard_indices_kernel(const __grid_constant__ ShardIndices a) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= a.indices.shape[0]) return;
  int32_t index = data_of<int32_t>(a.indices)[n];
  int64_t local = index - a.first;
  bool here = local >= 0 && local < a.count;
  data_of<int32_t>(a.out)[n] = index == IGNORE_INDEX ? IGNORE_INDEX : here ? (int32_t)local : ELSEWHERE;
}

void cuda_shard_indices(Backend *backend, const ShardIndices *a) {
  launch_kernel(per_element(backend, "shard_indices", a->indices.shape[0]), shard_indices_kernel, *a);
}

static __global__ void combine_kernel(const __grid_constant__ LceCombine a, int ranks, int rank,
                                      float inv_temperature) {
  int64_t rows = a.targets.shape[0], n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  float *anchor = data_of<float>(a.softmax.anchor), *row_sum = data_of<float>(a.softmax.row_sum);
  float *target_e = data_of<float>(a.softmax.target_e), *rescale = data_of<float>(a.softmax.rescale);
  float *e_distance = data_of<float>(a.softmax.e_distance), *e_squared = data_of<float>(a.softmax.e_squared);
  float *largest = data_of<float>(a.softmax.max);
  int64_t rank_stride = a.parts.shape[0] / ranks;
  const float *parts = data_of<float>(a.parts) + n;
  if (n >= rows) return;
  if (data_of<int32_t>(a.targets)[n] == IGNORE_INDEX) {
    row_sum[n] = 0;
    target_e[n] = rescale[n] = 1;
    anchor[n] = INFINITY;
    return;
  }
  float max = -INFINITY;
  for (int r = 0; r < ranks; r++) max = fmaxf(max, parts[r * rank_stride]);
  double sum = 0;
  float distance = 0, square = 0, best = -INFINITY;
  for (int r = 0; r < ranks; r++) {
    const float *part = parts + r * rank_stride;
    float shift = (part[0] - max) * inv_temperature, factor = expf(shift);
    sum += (double)(part[rows] * factor);
    if (r == rank) rescale[n] = factor;
    if (e_distance && factor > 0) distance += factor * (part[2 * rows] + shift * part[rows]);
    if (e_squared)
      square += factor * (factor * part[(2 + !!e_distance) * rows]); // the square could underflow
    part += rank_stride - 2 * rows;
    if (!largest || (r > 0 && !(*part > best))) continue;
    best = *part;
    data_of<int32_t>(a.softmax.best)[n] = __float_as_int(part[rows]);
  }
  write(a.softmax.e_distance, n, distance);
  write(a.softmax.e_squared, n, square);
  write(a.softmax.max, n, best);
  row_sum[n] = (float)sum;
  anchor[n] = max;
  target_e[n] = expf((data_of<float>(a.softmax.target_z)[n] - max) * inv_temperature);
}

void cuda_lce_combine(Backend *backend, const LceCombine *a) {
  launch_kernel(per_element(backend, "lce_combine", a->targets.shape[0]), combine_kernel, *a, backend->ranks,
                backend->rank, inverse_temperature(a->temperature));
}
