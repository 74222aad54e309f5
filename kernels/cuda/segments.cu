// A scatter-add without atomics: out[ids[n]] += alpha * c[n] * x[n], where many n may name the same row, and
// IGNORE_INDEX and ELSEWHERE name none.
//
// A stable radix sort of the positions n by id makes the rows of one id follow one another: a segment. The
// blocks of its first row sum all of it, each over the columns of 32 accesses; the others return. Warp w adds
// rows w, w + WARPS, ..., AT_ONCE loads at a time, and the warps' sums are added in order. One id with many
// rows is bound by latency: 25 ns per row (H100, H 2048).
//
// Traffic: x once, the named rows of out once or twice.
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/cuda_common.cuh"

static __global__ void count_up(int32_t *positions, int64_t count) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) positions[i] = (int32_t)i;
}

static constexpr int WARPS = 4;

template <typename TO, typename T, int W>
static __global__ void __launch_bounds__(32 * WARPS, 8)
    sum_segment(TO *out, const int32_t *ids, const int32_t *positions, int64_t count, const T *x,
                int64_t x_stride, const float *coefficients, float alpha, int hidden_size, bool accumulate) {
  constexpr int AT_ONCE = 8;
  __shared__ float warp_sums[WARPS][W][32];
  int64_t begin = blockIdx.x;
  int32_t id = ids[begin];
  if (id < 0 || (begin > 0 && ids[begin - 1] == id)) return;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = (blockIdx.y * 32 + lane) * W;
  bool inside = column < hidden_size;
  out += (int64_t)id * hidden_size + column;
  x += inside ? column : 0;
  float sum[W] = {}, total[W] = {};
  if (accumulate && warp == 0 && inside) load(total, out);
  int found = 32;
  for (int64_t first = begin + warp; found == 32; first += 32 * WARPS) {
    int64_t i = first + lane * WARPS; // each lane finds one of the warp's next rows
    bool inside_segment = i < count && ids[i] == id;
    int32_t from = inside_segment ? positions[i] : 0;
    float factor = inside_segment && coefficients ? alpha * coefficients[from] : alpha;
    found = __popc(__ballot_sync(~0u, inside_segment));
    for (int next = 0; next < found; next += AT_ONCE) {
      float values[AT_ONCE][W];
      // In place of missing rows the last one is loaded again, so that no load waits for a condition.
      EACH (j, AT_ONCE) load(values[j], x + __shfl_sync(~0u, from, min(next + j, found - 1)) * x_stride);
      EACH (j, AT_ONCE) {
        float row_factor = __shfl_sync(~0u, factor, next + j);
        EACH (k, W)
          if (next + j < found) sum[k] += row_factor * values[j][k];
      }
    }
  }
  EACH (k, W) warp_sums[warp][k][lane] = sum[k];
  __syncthreads();
  if (warp > 0 || !inside) return;
  EACH (w, WARPS)
    EACH (k, W) total[k] += warp_sums[w][k][lane];
  store(out, total);
}

void segment_add(Backend *backend, Tensor out, const int32_t *ids, Tensor x, const float *coefficients,
                 float alpha, bool accumulate, void *workspace) {
  int64_t count = x.shape[0], hidden_size = x.shape[1];
  if (!accumulate) cuda_fill_zero(backend, &out);
  if (count == 0 || hidden_size == 0) return;
  size_t id_bytes = cuda_segment_id_bytes(count), sort_bytes = cuda_segment_sort_bytes(count);
  char *at = static_cast<char *>(workspace);
  int32_t *unsorted = reinterpret_cast<int32_t *>(at);
  int32_t *sorted_ids = reinterpret_cast<int32_t *>(at + id_bytes);
  int32_t *positions = reinterpret_cast<int32_t *>(at + 2 * id_bytes);
  launch_kernel(per_element(backend, "a sum over equal ids", count), count_up, unsorted, count);
  // IGNORE_INDEX is the lowest id; as many low bits as this distinguish it and the ids above it from any row.
  int bits = 64 - __builtin_clzll((uint64_t)(out.shape[0] - IGNORE_INDEX - 1));
  cuda_check(cub::DeviceRadixSort::SortPairs(at + 3 * id_bytes, sort_bytes, ids, sorted_ids, unsorted,
                                             positions, count, 0, bits, cuda_stream(backend)),
             "sorting, for which cuda_segment_sort_bytes must be enough");
  with_float(out.dtype, [&](auto out_type) {
    with_access(x.dtype, {x, out}, [&](auto type, auto width) {
      using T = decltype(type);
      using TO = decltype(out_type);
      Grid grid(count, ceil_div(hidden_size, 32 * width));
      launch_kernel({"a sum over equal ids", cuda_stream(backend), grid, 32 * WARPS},
                    sum_segment<TO, T, width>, data_of<TO>(out), sorted_ids, positions, count, data_of<T>(x),
                    x.stride, coefficients, alpha, (int)hidden_size, accumulate);
    });
  });
}
