// A scatter-add without atomics: out[ids[n]] += alpha * c[n] * x[n], where many n may name the same row, and
// IGNORE_INDEX and ELSEWHERE name none.
//
// The positions n are sorted by id (a stable radix sort), so that the rows of one id follow one another: a
// segment. The sorted sequence is cut into pieces (cuda_segment_piece), and a block sums within a piece, in
// order. A segment that lies inside one piece is finished there. One that crosses pieces leaves a partial sum
// in each, and a second kernel adds them in the order of the pieces: the commonest token of a batch, with a
// tenth of all rows, then costs many short concurrent sums and one of a few hundred terms.
//
// Traffic: x once, the named rows of out once or twice, 8 H bytes of partial sums for each piece.
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/cuda_common.cuh"

static __global__ void count_up(int32_t *positions, int64_t count) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) positions[i] = (int32_t)i;
}

// A segment's part in a piece that it entered from the piece before lies in row 0; one that starts in the
// piece and continues after it, in row 1.
static __device__ float *partial_of(float *partials, int64_t piece, int which, int hidden_size) {
  return partials + (piece * 2 + which) * hidden_size;
}

template <typename TO, typename T, int W>
static __global__ void __launch_bounds__(128)
    sum_pieces(TO *out, float *partials, const int32_t *ids, const int32_t *positions, int64_t count,
               int64_t piece_rows, const T *x, int64_t x_stride, const float *coefficients, float alpha,
               int hidden_size, bool accumulate) {
  constexpr int AT_ONCE = 4;
  int64_t piece = blockIdx.x, begin = piece * piece_rows, end = min(count, begin + piece_rows);
  int column = (blockIdx.y * blockDim.x + threadIdx.x) * W;
  if (column >= hidden_size) return;
  bool entered = begin > 0 && ids[begin - 1] == ids[begin];
  float sum[W] = {};
  for (int64_t first = begin; first < end; first += AT_ONCE) {
    // Few ids come twice, so every row that is added to is loaded before any is needed.
    int32_t id[AT_ONCE];
    bool ends[AT_ONCE];
    float values[AT_ONCE][W], old[AT_ONCE][W] = {};
    EACH (j, AT_ONCE) {
      int64_t i = first + j;
      if (i >= end) break;
      int32_t from = positions[i];
      float factor = coefficients ? alpha * coefficients[from] : alpha;
      id[j] = ids[i];
      ends[j] = i + 1 == count || ids[i + 1] != id[j];
      load(values[j], x + from * x_stride + column);
      EACH (k, W) values[j][k] *= factor;
      if (accumulate && ends[j] && id[j] >= 0) load(old[j], out + (int64_t)id[j] * hidden_size + column);
    }
    EACH (j, AT_ONCE) {
      int64_t i = first + j;
      if (i >= end) break;
      EACH (k, W) sum[k] += values[j][k];
      if (!ends[j] && i + 1 < end) continue;
      if (entered)
        store(partial_of(partials, piece, 0, hidden_size) + column, sum);
      else if (!ends[j])
        store(partial_of(partials, piece, 1, hidden_size) + column, sum);
      else if (id[j] >= 0) {
        EACH (k, W) sum[k] += old[j][k];
        store(out + (int64_t)id[j] * hidden_size + column, sum);
      }
      entered = false;
      EACH (k, W) sum[k] = 0;
    }
  }
}

// One past the last position whose id is `id`, from `begin` on. Ids that name no row come last, as unsigned numbers.
static __device__ int64_t segment_end(const int32_t *ids, int64_t begin, int64_t count, int32_t id) {
  while (begin < count) {
    int64_t middle = (begin + count) / 2;
    if ((uint32_t)ids[middle] <= (uint32_t)id)
      begin = middle + 1;
    else
      count = middle;
  }
  return begin;
}

// One block for each segment that starts in piece blockIdx.x and crosses into the next.
template <typename TO, int W>
static __global__ void __launch_bounds__(128)
    join_pieces(TO *out, float *partials, const int32_t *ids, int64_t count, int64_t piece_rows,
                int hidden_size, bool accumulate) {
  int64_t piece = blockIdx.x, begin = piece * piece_rows, next = begin + piece_rows;
  int column = (blockIdx.y * blockDim.x + threadIdx.x) * W;
  if (column >= hidden_size || next >= count || ids[next - 1] != ids[next]) return;
  int32_t id = ids[next];
  if (id < 0) return;
  if (begin > 0 && ids[begin - 1] == id) return; // it started earlier
  int64_t last_piece = (segment_end(ids, next, count, id) - 1) / piece_rows;
  float sum[W];
  load(sum, partial_of(partials, piece, 1, hidden_size) + column);
#pragma unroll 8
  for (int64_t p = piece + 1; p <= last_piece; p++) {
    float values[W];
    load(values, partial_of(partials, p, 0, hidden_size) + column);
    EACH (k, W) sum[k] += values[k];
  }
  store_or_add(out + (int64_t)id * hidden_size + column, sum, accumulate);
}

static int bits_of(int64_t count) {
  int bits = 1;
  while (bits < 31 && ((int64_t)1 << bits) < count) bits++;
  return bits;
}

void segment_add(Backend *backend, Tensor out, const int32_t *ids, Tensor x, const float *coefficients,
                 float alpha, bool accumulate, void *workspace) {
  int64_t count = x.shape[0], hidden_size = x.shape[1], piece_rows = cuda_segment_piece(count);
  int64_t pieces = ceil_div(count, piece_rows);
  if (count == 0 || hidden_size == 0) return;
  cudaStream_t stream = cuda_stream(backend);
  size_t id_bytes = memory_padded((size_t)count * sizeof(int32_t));
  char *at = static_cast<char *>(workspace);
  int32_t *unsorted = reinterpret_cast<int32_t *>(at);
  int32_t *sorted_ids = reinterpret_cast<int32_t *>(at + id_bytes);
  int32_t *positions = reinterpret_cast<int32_t *>(at + 2 * id_bytes);
  float *partials = reinterpret_cast<float *>(at + 3 * id_bytes);
  size_t sort_bytes = cuda_segment_sort_bytes(count);
  void *sort_space = at + cuda_segment_bytes(count, hidden_size) - sort_bytes;

  launch_kernel(per_element(backend, "a sum over equal ids", count), count_up, unsorted, count);
  // IGNORE_INDEX is the lowest id of all; as many low bits as this distinguish it and the ids above it from any row.
  int bits = bits_of(out.shape[0] - IGNORE_INDEX);
  cuda_check(cub::DeviceRadixSort::SortPairs(sort_space, sort_bytes, ids, sorted_ids, unsorted, positions,
                                             count, 0, bits, stream),
             "sorting, for which cuda_segment_sort_bytes must be enough");
  with_float(out.dtype, [&](auto out_type) {
    with_access(x.dtype, {x, out}, [&](auto type, auto width) {
      using T = decltype(type);
      using TO = decltype(out_type);
      int threads = row_threads(ceil_div(hidden_size, width), 128);
      dim3 grid((unsigned)pieces, (unsigned)ceil_div(hidden_size, (int64_t)threads * width));
      KernelLaunch launch = {"a sum over equal ids", stream, grid, threads};
      launch_kernel(launch, sum_pieces<TO, T, width>, data_of<TO>(out), partials, sorted_ids, positions,
                    count, piece_rows, data_of<T>(x), x.stride, coefficients, alpha, (int)hidden_size,
                    accumulate);
      launch_kernel(launch, join_pieces<TO, width>, data_of<TO>(out), partials, sorted_ids, count, piece_rows,
                    (int)hidden_size, accumulate);
    });
  });
}
