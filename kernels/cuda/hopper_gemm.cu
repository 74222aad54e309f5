// The last layer's products on Hopper, by the kernel of hopper_kernel.cuh: in which order its tiles are made,
// which of them are cut into slices, which steps a filter leaves, and where cuBLASLt is the faster one.
#include <cudaTypedefs.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_kernel.cuh"

// --- before and after the kernel ---------------------------------------------------------------------------

// out = the sum of the slices, in their order: a tile to a row of blocks, four entries a thread.
template <typename T>
static __global__ void __launch_bounds__(256)
    add_slices_kernel(T *out, int64_t stride, const float *slices, const __grid_constant__ Work w) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int size = w.rows * TILE_N;
  int rest = w.m_tiles * w.n_tiles - w.whole, tile = w.whole + blockIdx.y;
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  TileAt at = tile_at(w, tile);
  int row = at.row + i / TILE_N, column = at.column + i % TILE_N;
  if (row >= w.m || column >= w.n) return;
  float sum[4] = {};
  for (int s = 0; s < w.slices; s++) {
    float part[4];
    load(part, slices + ((int64_t)s * rest + blockIdx.y) * size + i);
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] += part[k];
  }
  store(out + row * stride + column, sum);
}

// One warp a row of cluster tiles: the list of its steps.
static __global__ void __launch_bounds__(32)
    list_kernel(int32_t *list, const float *tiles, int rows_of_tiles, int across, int k_steps) {
  constexpr int TALL = Kind<SUMS_BF16, true>::CLUSTER_ROWS / LCE_FILTER_ROWS,
                WIDE = LCE_FILTER_COLUMNS / TILE_K;
  int first_row = blockIdx.x * TALL, lane = threadIdx.x, length = 0;
  list += (int64_t)blockIdx.x * (1 + k_steps);
  auto counts = [&](int t) {
    bool any = false;
    for (int b = first_row; b < min(first_row + TALL, rows_of_tiles); b++) any |= tiles[b * across + t] < 0;
    return any;
  };
  for (int first = 0; first < across; first += 32) {
    int t = first + lane;
    unsigned marked = __ballot_sync(~0u, t < across && counts(t));
    int at = 1 + length + WIDE * __popc(marked & ((1u << lane) - 1));
    if (marked >> lane & 1)
      for (int k = t * WIDE; k < min((t + 1) * WIDE, k_steps); k++) list[at++] = k;
    length += WIDE * __popc(marked);
  }
  if (lane) return;
  if (counts(across - 1)) length -= across * WIDE - k_steps; // the last tile may be narrower
  for (int k = 0; k < k_steps && length < MOST_SLICES; k++)
    if (!counts(k / WIDE)) list[1 + length++] = k;
  list[0] = length;
}

// --- launching ---------------------------------------------------------------------------------------------

template <typename K>
static cudaLaunchConfig_t launch_config(cudaLaunchAttribute (&attributes)[2], int blocks,
                                        cudaStream_t stream) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = CLUSTER;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1] = pdl_attribute();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = K::SHARED_BYTES;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

// What the kernels need to know of the device; clusters is 0 where they do not run.
struct Hopper {
  int clusters; // that run at the same time
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  unsigned long long *pace; // Pacer's
};

// False when it was built without sm_90a.
template <typename K> static bool prepare() {
  const void *kernel = (const void *)product_kernel<K>;
  cudaFuncAttributes attributes;
  cuda_check(cudaFuncGetAttributes(&attributes, kernel), "asking for a kernel's attributes");
  if (attributes.binaryVersion != 90) return false;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED_BYTES),
             "asking for shared memory");
  return true;
}

static Hopper find_hopper(Backend *backend) {
  CudaState *state = cuda_state(backend);
  Hopper found = {};
  int major = 0, minor = 0;
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, state->ordinal),
             "asking for the device");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, state->ordinal),
             "asking for the device");
  const char *wanted = getenv("LCE_HOPPER");
  if (major != 9 || minor != 0 || (wanted && strcmp(wanted, "0") == 0)) return found;
  bool built = prepare<Kind<EXPONENTIALS>>() && prepare<Kind<SUMS_BF16>>() && prepare<Kind<SUMS_F32>>() &&
               prepare<Kind<SUMS_BF16, true>>() && prepare<Kind<SUMS_F32, true>>();
  if (!built) return found;
  cudaDriverEntryPointQueryResult result;
  void *encode = nullptr;
  cuda_check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &result),
      "looking for cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess) return found;
  found.encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode);
  cuda_check(cudaMalloc(reinterpret_cast<void **>(&found.pace), sizeof *found.pace), "allocating a counter");
  cuda_check(cudaMemsetAsync(found.pace, 0, sizeof *found.pace, state->stream), "clearing a counter");
  using Any = Kind<EXPONENTIALS>; // as many run of one kind as of another: each block takes a multiprocessor
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config =
      launch_config<Any>(attributes, state->multiprocessors / CLUSTER * CLUSTER, nullptr);
  cuda_check(cudaOccupancyMaxActiveClusters(&found.clusters, product_kernel<Any>, &config),
             "counting clusters");
  return found;
}

static const Hopper &hopper(Backend *backend) {
  CudaState *state = cuda_state(backend);
  if (!state->hopper) {
    Hopper found = find_hopper(backend);
    state->hopper = static_cast<Hopper *>(malloc(sizeof found));
    if (!state->hopper) fail("out of host memory for the CUDA backend");
    *state->hopper = found;
  }
  return *state->hopper;
}

void hopper_destroy(Hopper *hopper) {
  if (hopper) cudaFree(hopper->pace);
  free(hopper);
}

bool hopper_runs(Backend *backend) {
  return hopper(backend).clusters > 0;
}

// Whether the copy engine can read or write the matrix.
static bool copyable(Tensor t) {
  return rows_start_aligned(t, WIDTH<bf16>) && t.shape[0] > 0 && t.shape[1] > 0 && t.shape[0] <= INT32_MAX &&
         t.shape[1] <= INT32_MAX;
}

// bf16, in boxes of `rows` by 128 bytes.
static CUtensorMap boxes_of(Backend *backend, Tensor t, int rows) {
  CUtensorMap map;
  cuuint64_t shape[] = {(cuuint64_t)t.shape[1], (cuuint64_t)t.shape[0]},
             stride[] = {(cuuint64_t)t.stride * sizeof(bf16)};
  cuuint32_t box[] = {128 / sizeof(bf16), (cuuint32_t)rows}, every[] = {1, 1};
  CUresult result =
      hopper(backend).encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, t.data, shape, stride, box, every,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail("CUDA could not describe %s to the copy engine (%d)", tensor_text(t).text, (int)result);
  return map;
}

// A product's tiles, in an order that keeps the boxes needed at the same time few. For the logits that is a
// band of rows, of 16 MiB or less, that stays in the L2 cache while W passes by; for a gradient as many
// rows as make a round over all columns.
template <typename K> static Work work_of(Backend *backend, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t BAND_BYTES = 16 << 20;
  Work w = {};
  w.m = (int)m, w.n = (int)n;
  w.rows = K::CLUSTER_ROWS;
  w.m_tiles = (int)ceil_div(m, K::CLUSTER_ROWS);
  w.n_tiles = (int)ceil_div(n, TILE_N);
  w.k_steps = (int)ceil_div(k, TILE_K);
  int64_t bands = K::OUTPUT == EXPONENTIALS
                      ? ceil_div(m * k * 2, BAND_BYTES)
                      : ceil_div((int64_t)w.m_tiles * w.n_tiles, hopper(backend).clusters);
  w.band = (int)ceil_div(w.m_tiles, max_i64(1, min_i64(w.m_tiles, bands)));
  w.whole = w.units = w.m_tiles * w.n_tiles;
  w.slices = 1;
  bool all_stays = K::OUTPUT == EXPONENTIALS && w.band == w.m_tiles;
  w.pace = all_stays || K::FILTERED ? nullptr : hopper(backend).pace;
  return w;
}

template <typename K>
static void launch(Backend *backend, const CUtensorMap &a, const CUtensorMap &b, const CUtensorMap &out,
                   const Work &w, const Ends &ends) {
  int clusters = (int)min_i64(hopper(backend).clusters, w.units);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = launch_config<K>(attributes, clusters * CLUSTER, cuda_stream(backend));
  cuda_check(cudaLaunchKernelEx(&config, product_kernel<K>, a, b, out, w, ends),
             "launching a Hopper product");
}

static constexpr float LOG2_E = 1.4426950408889634f;

int64_t hopper_sums_across(int64_t vocab_size) {
  return ceil_div(vocab_size, TILE_N);
}

int64_t hopper_exponentials(Backend *backend, Tensor exps, float *sums, size_t bytes, const float *anchor,
                            float sharpness, Tensor x, Tensor weight, const int32_t *targets) {
  using E = Kind<EXPONENTIALS>;
  if (x.dtype != DTYPE_BF16 || !hopper_runs(backend)) return 0;
  bool store = tensor_exists(exps);
  if (!copyable(x) || !copyable(weight) || (store && !copyable(exps))) return 0;
  int64_t rows = x.shape[0], vocab_size = weight.shape[0];
  int64_t room = (int64_t)(bytes / sizeof *sums) / hopper_sums_across(vocab_size);
  if (room < rows) rows = room / E::CLUSTER_ROWS * E::CLUSTER_ROWS;
  if (rows == 0) return 0;
  CUtensorMap x_map = boxes_of(backend, tensor_rows(x, 0, rows), E::ROWS),
              weight_map = boxes_of(backend, weight, TILE_N / CLUSTER),
              out_map = store ? boxes_of(backend, tensor_rows(exps, 0, rows), BOX_ROWS) : x_map;
  Ends ends = {
      .anchor = anchor, .targets = targets, .scale = LOG2_E * sharpness, .tile_sums = sums, .store = store};
  launch<E>(backend, x_map, weight_map, out_map, work_of<E>(backend, rows, vocab_size, x.shape[1]), ends);
  return rows;
}

// In units of a tile's. A slice costs a little more than its share: about a hundredth of a tile for its sums.
static double slice_time(int slices) {
  return 1.0 / slices + (slices > 1 ? 0.01 : 0);
}

// Cuts the tiles of the last, partly empty round into slices so that they take least time.
static void cut_last_round(Work *w, int clusters, size_t scratch_bytes) {
  int tiles = w->m_tiles * w->n_tiles, rest = tiles % clusters;
  int64_t slots = (int64_t)(scratch_bytes / (w->rows * TILE_N * sizeof(float)));
  double best = 1;
  for (int slices = 2;
       rest > 0 && slices <= MOST_SLICES && slices <= w->k_steps && (int64_t)rest * slices <= slots;
       slices++) {
    double rounds = (double)ceil_div((int64_t)rest * slices, clusters);
    double time = rounds * slice_time(slices);
    if (time >= best) continue;
    best = time;
    w->slices = slices;
  }
  if (w->slices == 1) return;
  w->whole = tiles - rest;
  w->units = w->whole + rest * w->slices;
}

// The part of the time in which clusters have work, were all tiles alike.
static double busy(double units, double clusters) {
  return units / (ceil(units / clusters) * clusters);
}

// Whether the work is done sooner here than by cuBLASLt, whose clusters make tiles of 256 x 256, in up to
// three parts over k. Where both come out even it depends on the bytes: of 4096 rows, cuBLASLt reads as few
// as this kernel at H = 2048 and takes 1% less time, but three quarters more at H = 4096, and takes as long
// or, at a higher clock, 3% longer.
static bool beats_library(const Work &w, int clusters) {
  double library = 0, rest = w.m_tiles * w.n_tiles - w.whole;
  for (int parts = 1; parts <= 3; parts++)
    library = fmax(library, busy((double)(ceil_div(w.m, 256) * ceil_div(w.n, 256)) * parts, clusters));
  double tiles = (double)w.m * w.n / (w.rows * TILE_N);
  double time = ceil((double)w.whole / clusters) + ceil(rest * w.slices / clusters) * slice_time(w.slices);
  return (w.n > 3072 ? 1.02 : 0.98) * tiles / (time * clusters) > library;
}

static bool multipliable(Backend *backend, Tensor out, Tensor exps, Tensor weight) {
  return exps.dtype == DTYPE_BF16 && hopper_runs(backend) && copyable(exps) && copyable(weight) &&
         copyable(out) && out.shape[1] % WIDTH<bf16> == 0;
}

template <bool FILTERED>
static void exps_times_weight(Backend *backend, Tensor out, Tensor exps, Tensor weight, const Work &w,
                              const int32_t *lists, void *scratch) {
  CUtensorMap exps_map = boxes_of(backend, exps, Kind<SUMS_BF16, FILTERED>::ROWS),
              weight_map = boxes_of(backend, weight, TILE_K / CLUSTER);
  Ends ends = {.out = data_of<float>(out),
               .out_stride = out.stride,
               .slices = static_cast<float *>(scratch),
               .lists = lists};
  if (out.dtype == DTYPE_BF16)
    launch<Kind<SUMS_BF16, FILTERED>>(backend, exps_map, weight_map, boxes_of(backend, out, BOX_ROWS), w,
                                      ends);
  else
    launch<Kind<SUMS_F32, FILTERED>>(backend, exps_map, weight_map, exps_map, w, ends);
  if (w.slices == 1) return;
  dim3 grid(w.rows * TILE_N / 4 / 256, (unsigned)(w.m_tiles * w.n_tiles - w.whole));
  with_float(out.dtype, [&](auto type) {
    using T = decltype(type);
    launch_kernel(true, cuda_stream(backend), grid, 256, add_slices_kernel<T>, data_of<T>(out), out.stride,
                  ends.slices, w);
  });
}

bool hopper_exps_times_weight(Backend *backend, Tensor out, Tensor exps, Tensor weight, void *scratch,
                              size_t bytes, bool always) {
  if (!multipliable(backend, out, exps, weight)) return false;
  Work w = work_of<Kind<SUMS_BF16>>(backend, exps.shape[0], weight.shape[1], weight.shape[0]);
  cut_last_round(&w, hopper(backend).clusters, bytes);
  if (!always && !beats_library(w, hopper(backend).clusters)) return false;
  exps_times_weight<false>(backend, out, exps, weight, w, nullptr, scratch);
  return true;
}

bool hopper_filtered_exps_times_weight(Backend *backend, Tensor out, Tensor exps, Tensor weight,
                                       const float *tiles, int32_t *list, void *scratch, size_t bytes) {
  using Filtered = Kind<SUMS_BF16, true>;
  static_assert(Filtered::CLUSTER_ROWS == 256 && TILE_K == 64, "as cuda_lce_list_bytes counts");
  if (!multipliable(backend, out, exps, weight)) return false;
  Work w = work_of<Filtered>(backend, exps.shape[0], weight.shape[1], weight.shape[0]);
  cut_last_round(&w, hopper(backend).clusters, bytes);
  int rows_of_tiles = (int)ceil_div(w.m, LCE_FILTER_ROWS);
  int across = (int)ceil_div(weight.shape[0], LCE_FILTER_COLUMNS);
  list_kernel<<<(unsigned)w.m_tiles, 32, 0, cuda_stream(backend)>>>(list, tiles, rows_of_tiles, across,
                                                                    w.k_steps);
  cuda_check_launch("the list of steps");
  exps_times_weight<true>(backend, out, exps, weight, w, list, scratch);
  return true;
}
