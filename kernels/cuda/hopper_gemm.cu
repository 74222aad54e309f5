// The host side of hopper_kernel.cuh: split-K, sampling's lists of k-steps, and where cuBLASLt is faster.
#include <math.h>

#include "kernels/cuda/hopper_exp_codes.cuh"
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_launch.cuh"
#include "kernels/cuda/hopper_sampled.cuh"
#include "kernels/cuda/hopper_store.cuh"
#include "kernels/cuda/hopper_swiglu.cuh"
#include "kernels/cuda/hopper_swiglu_gradient.cuh"

// --- kernels before and after the GEMM ---------------------------------------------------------------------

// Writes sampled dX's lists of k-steps, one per LCE_TILE_ROWS rows: the panels of their kept tiles, as
// `slots` places them. Every split gets a step, if only one of zeros, beyond A and B. One warp per list.
struct DxLists {
  KList *lists;
  KStep *steps; // [lists, k_steps]
  const int32_t *slots;
  int count, across, k_steps, min_length, end_panels;
};

static __global__ void __launch_bounds__(32) dx_lists_kernel(const __grid_constant__ DxLists a) {
  pdl_begin();
  constexpr int AT_ONCE = 8; // loads
  int list = blockIdx.x, lane = threadIdx.x, length = 0, slot[AT_ONCE];
  const int32_t *slots = a.slots + (int64_t)list * a.across;
  KStep *to = a.steps + (int64_t)list * a.k_steps;
  for (int first = lane; first - lane < a.across; first += 32 * AT_ONCE) {
    EACH (i, AT_ONCE) slot[i] = first + i * 32 < a.across ? slots[first + i * 32] : -1;
    EACH (i, AT_ONCE) {
      int panel = (first + i * 32) * CUDA_TILE_PANELS; // counted over all of E
      unsigned marked = __ballot_sync(~0u, slot[i] >= 0);
      KStep *at = to + length + CUDA_TILE_PANELS * __popc(marked & ((1u << lane) - 1));
      for (int p = 0; p < CUDA_TILE_PANELS && slot[i] >= 0 && panel + p < a.k_steps; p++)
        at[p] = {(slot[i] * CUDA_TILE_PANELS + p) * LCE_TILE_ROWS, (panel + p) * TILE_K};
      length += CUDA_TILE_PANELS * __popc(marked);
    }
  }
  if (lane) return;
  if (slots[a.across - 1] >= 0) length -= a.across * CUDA_TILE_PANELS - a.k_steps; // a narrower last tile
  for (; length < a.min_length; length++) to[length] = {a.end_panels, a.k_steps * TILE_K};
  a.lists[list] = {list * a.k_steps, length};
}

// --- the device --------------------------------------------------------------------------------------------

Hopper *hopper_create(Backend *backend) {
  using Any = KernelTraits<LogitsExp<false>>; // the others run as many clusters: a CTA takes an SM
  Hopper *h = new Hopper();
  if (hopper_has_code((const void *)gemm_kernel<Any>)) h->encode = tma_encoder();
  if (!h->encode) return h;
  cuda_check(cudaMalloc(reinterpret_cast<void **>(&h->throttle), sizeof *h->throttle),
             "allocating a counter");
  cuda_check(cudaMemsetAsync(h->throttle, 0, sizeof *h->throttle, cuda_stream(backend)),
             "clearing a counter");
  KernelLaunch launch = launch_of<Any>(backend, cuda_state(backend)->multiprocessors / CLUSTER);
  LaunchConfig config(launch, gemm_kernel<Any>);
  cuda_check(cudaOccupancyMaxActiveClusters(&h->clusters, gemm_kernel<Any>, &config), "counting clusters");
  return h;
}

void hopper_destroy(Hopper *hopper) {
  if (hopper) cudaFree(hopper->throttle);
  delete hopper;
}

bool hopper_runs(Backend *backend) {
  return hopper(backend).clusters > 0;
}

// --- the loss ----------------------------------------------------------------------------------------------

RowParts row_parts(const LceLogitsExp *a, void *base, int64_t rows) {
  int64_t parts = rows * ceil_div(a->weight.shape[0], LCE_TILE_COLUMNS);
  RowParts p = {};
  if (tensor_exists(a->softmax.max)) p.best = static_cast<Ranked *>(base), base = p.best + parts;
  float *last = p.sums = static_cast<float *>(base);
  if (tensor_exists(a->softmax.e_distance)) p.distances = last += parts;
  if (tensor_exists(a->softmax.e_squared)) p.squares = last + parts;
  return p;
}

// Computes E from x and weight, which are codes with scales, or bf16 without.
template <typename Epilogue>
static void logits_exp(Backend *backend, const LceLogitsExp *a, QuantizedRows x, QuantizedRows weight,
                       void *parts) {
  using K = KernelTraits<Epilogue>;
  bool store = tensor_exists(a->exps);
  int64_t rows = a->x.shape[0], vocab_size = a->weight.shape[0];
  CUtensorMap x_map = tma_map(backend, x.codes, K::ROWS),
              weight_map = tma_map(backend, weight.codes, TILE_N / CLUSTER),
              out_map = store ? tma_map(backend, a->exps, STORE_ROWS) : x_map;
  EpilogueParams params = {.anchor = data_of<float>(a->softmax.target_z),
                           .targets = data_of<int32_t>(a->targets),
                           .scale = LOG2_E * inverse_temperature(a->temperature),
                           .parts = row_parts(a, parts, rows),
                           .bias = data_of<bf16>(a->bias),
                           .softcap = a->softcap,
                           .store = store,
                           .x_scale = data_of<float>(x.scale),
                           .weight_scale = data_of<float>(weight.scale)};
  if (params.parts.squares)
    params.unit = a->softcap > 0 ? fmaxf(a->softcap, 0x1p-64f) : 1; // of masked entries, too
  launch<K>(backend, x_map, weight_map, out_map, schedule<K>(backend, rows, vocab_size, a->x.shape[1]),
            params);
}

bool hopper_logits_exp(Backend *backend, const LceLogitsExp *a, void *parts) {
  if (a->x.dtype != DTYPE_BF16 || !hopper_runs(backend)) return false;
  if (!tma_takes(a->x) || !tma_takes(a->weight) || (tensor_exists(a->exps) && !tma_takes(a->exps)))
    return false;
  bool terms = lce_row_parts(&a->softmax) > 2 || tensor_exists(a->bias) || a->softcap > 0;
  bool codes = tensor_exists(a->weight_codes.codes);
  auto run = codes ? (terms ? logits_exp<LogitsExpOfCodes<true>> : logits_exp<LogitsExpOfCodes<false>>)
                   : (terms ? logits_exp<LogitsExp<true>> : logits_exp<LogitsExp<false>>);
  run(backend, a, codes ? a->x_codes : QuantizedRows{a->x},
      codes ? a->weight_codes : QuantizedRows{a->weight}, parts);
  return true;
}

// The time of one split, in tiles: its share, plus about a hundredth of a tile for its partials.
static double split_time(int splits) {
  return 1.0 / splits + (splits > 1 ? 0.01 : 0);
}

// Splits the tiles of the last, partly empty wave along K, into as many parts as take least time.
static void split_last_wave(TileScheduler *s, int clusters, size_t scratch_bytes) {
  int tiles = s->m_tiles * s->n_tiles, rest = tiles % clusters;
  int64_t slots = (int64_t)(scratch_bytes / (s->rows * s->columns * sizeof(float)));
  double best = 1;
  for (int splits = 2;
       rest > 0 && splits <= MAX_SPLITS && splits <= s->k_steps && (int64_t)rest * splits <= slots;
       splits++) {
    double waves = (double)ceil_div((int64_t)rest * splits, clusters);
    double time = waves * split_time(splits);
    if (time >= best) continue;
    best = time;
    s->splits = splits;
  }
  if (s->splits == 1) return;
  s->whole = tiles - rest;
  s->work_tiles = s->whole + rest * s->splits;
}

// True if this takes less time than cuBLASLt, with tiles of 256 x 256 in up to three splits. If both fill the
// device, bytes decide: at C = 4096 it takes 1% less at H = 2048 and 3% more at 4096.
static bool faster_than_cublaslt(const TileScheduler &s, int clusters) {
  double library = 0, rest = s.m_tiles * s.n_tiles - s.whole;
  double library_tiles = (double)(ceil_div(s.m, 256) * ceil_div(s.n, 256));
  for (int splits = 1; splits <= 3; splits++) { // the share of the time in which clusters have work
    double tiles = library_tiles * splits;
    library = fmax(library, tiles / (ceil(tiles / clusters) * clusters));
  }
  double tiles = (double)s.m * s.n / (s.rows * TILE_N);
  double time = ceil((double)s.whole / clusters) + ceil(rest * s.splits / clusters) * split_time(s.splits);
  return (s.n > 3072 ? 1.02 : 0.98) * tiles / (time * clusters) > library;
}

bool hopper_dx(Backend *backend, Tensor out, Tensor exps, Tensor weight, void *scratch, size_t bytes,
               bool always) {
  if (!dx_runs(backend, out, exps, weight)) return false;
  TileScheduler s =
      schedule<KernelTraits<Store<false>>>(backend, exps.shape[0], weight.shape[1], weight.shape[0]);
  split_last_wave(&s, hopper(backend).clusters, bytes);
  if (!always && !faster_than_cublaslt(s, hopper(backend).clusters)) return false;
  launch_dx<Store<false>, Store<true>>(backend, out, exps, weight, s, {}, scratch);
  return true;
}

void hopper_sampled_dx(Backend *backend, Tensor out, const KeptTiles *kept, int64_t rows, Tensor weight,
                       void *scratch, size_t bytes) {
  using K = KernelTraits<Store<false, true>>;
  static_assert((int)K::CLUSTER_ROWS == (int)LCE_TILE_ROWS && (int)TILE_K == (int)CUDA_PANEL_COLUMNS,
                "a list for a tile's rows, and a step for a panel");
  int64_t vocab_size = weight.shape[0];
  size_t list_bytes = cuda_lce_dx_list_bytes(rows, vocab_size);
  TileScheduler s = schedule<K>(backend, rows, weight.shape[1], vocab_size);
  split_last_wave(&s, hopper(backend).clusters, bytes - list_bytes);
  KStep *steps = static_cast<KStep *>(scratch);
  DxLists lists = {.lists = reinterpret_cast<KList *>(steps + (int64_t)s.m_tiles * s.k_steps),
                   .steps = steps,
                   .slots = kept->slots,
                   .count = s.m_tiles,
                   .across = (int)ceil_div(vocab_size, LCE_TILE_COLUMNS),
                   .k_steps = s.k_steps,
                   .min_length = s.splits,
                   .end_panels = (int)kept->panels.shape[0]};
  launch_kernel({"the lists of k-steps", cuda_stream(backend), lists.count, 32, true}, dx_lists_kernel,
                lists);
  launch_dx<Store<false, true>, Store<true, true>>(backend, out, kept->panels, weight, s,
                                                   {.lists = lists.lists, .steps = steps},
                                                   static_cast<char *>(scratch) + list_bytes);
}

void hopper_sampled_dweight(Backend *backend, Tensor dweight, const KeptTiles *kept, float alpha) {
  using K = KernelTraits<AddF32>;
  static_assert((int)TILE_N == (int)LCE_TILE_COLUMNS && (int)LCE_TILE_ROWS % TILE_K == 0,
                "a list for a column of tiles");
  TileScheduler s = schedule<K>(backend, dweight.shape[1], dweight.shape[0], 0); // K is the lists'
  EpilogueParams params = {.scale = alpha,
                           .lists = kept->lists,
                           .steps = kept->steps,
                           .columns = kept->columns,
                           .accumulate = &kept->state->accumulate};
  launch<K>(backend, tma_map(backend, kept->x, TILE_K), tma_map(backend, kept->panels, TILE_K / CLUSTER),
            tma_map(backend, dweight, TILE_N), s, params);
}

// --- SwiGLU ------------------------------------------------------------------------------------------------

// D = a weight; false if tiles are fewer than clusters, where cuBLASLt's smaller tiles fit better.
template <typename K>
static bool swiglu_gemm(Backend *backend, Tensor out, Tensor gate_up, Tensor a, Tensor weight, int64_t n) {
  for (Tensor t : {a, weight, gate_up, out})
    if (t.dtype != DTYPE_BF16 || !tma_takes(t)) return false;
  if (!hopper_runs(backend) || n % WIDTH<bf16>) return false;
  constexpr int LINE = K::GATE_UP ? 64 : 128, SHARE = K::B_K_MAJOR ? TILE_N : TILE_K;
  TileScheduler s = schedule<K>(backend, a.shape[0], n, a.shape[1]);
  if (s.work_tiles < hopper(backend).clusters) return false;
  CUtensorMap gate_up_map = tma_map(backend, gate_up, STORE_ROWS, LINE, 2);
  launch<K>(backend, tma_map(backend, a, K::ROWS), tma_map(backend, weight, SHARE / CLUSTER),
            tma_map(backend, out, STORE_ROWS, LINE, K::GATE_UP ? 1 : 2), s, {}, &gate_up_map);
  return true;
}

bool hopper_swiglu(Backend *backend, Tensor out, Tensor gate_up, Tensor x, Tensor weight) {
  return swiglu_gemm<KernelTraits<Swiglu>>(backend, out, gate_up, x, weight, out.shape[1]);
}

bool hopper_swiglu_gradient(Backend *backend, Tensor dgate_up, Tensor gate_up, Tensor dout, Tensor weight) {
  return swiglu_gemm<KernelTraits<SwigluGradient>>(backend, dgate_up, gate_up, dout, weight, weight.shape[1]);
}
