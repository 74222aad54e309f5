// dX = E W on Hopper with the same bits for a row whatever rows are beside it (batch_invariant).
//
// hopper_gemm.cu splits the tiles of the last wave along V, into as many parts as fit best, so how a row is
// summed depends on how many rows there are; and every other wave takes V from its end. Here all tiles sum V
// in the same three segments, forward, and add these in their order. A cluster makes the segments of a whole
// tile one after the other, with their sum in a buffer of its own, which costs little beside V's length; in
// the last wave three clusters make one each, as partials of split-K, and the same bits.
#include "kernels/cuda/hopper_launch.cuh"
#include "kernels/cuda/hopper_store.cuh"
#include "tools/torch/liblce/cuda/hopper.h"

// Indices of EpilogueParams.own: a sum of segments for each cluster, NULL where K is not cut; what is added to, or NULL.
enum { SUMS, ADDED };
enum { SEGMENTS = 3, MIN_STEPS = 64 };

static __host__ DEVICE int segments_of(const TileScheduler &s, const EpilogueParams &params) {
  return params.own[SUMS] && s.k_steps >= SEGMENTS * MIN_STEPS ? SEGMENTS : 1;
}

// Sums are made on the way out: accumulators that are changed would hold up the next tile's wgmma.
template <bool F32> struct SegmentedStore : Store<F32> {
  static constexpr bool OWN_WORK = true;
  static DEVICE int work_count(const TileScheduler &s, const EpilogueParams &params) {
    if (s.splits > 1) return s.work_tiles; // else one cluster may have a tile more than another
    return (s.whole - first_work() + work_stride() - 1) / work_stride() * segments_of(s, params) *
           work_stride();
  }
  // A cluster makes all segments of a tile one after the other.
  static DEVICE void work_part(const TileScheduler &s, const EpilogueParams &params, int w, int &tile,
                               int &part, int &parts, int &split_index) {
    int round = w / work_stride();
    parts = segments_of(s, params);
    tile = round / parts * work_stride() + w % work_stride();
    part = round % parts;
    split_index = s.splits > 1 ? w - s.whole * parts : -1;
  }
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    bool whole = work.split < 0, first = work.k_begin == 0, last = work.k_end == c.s.k_steps;
    EACH (h, TILE_M / 64) {
      int row = c.row + me.first_row(h), below = c.s.m - work.row - row, right = c.s.n - work.column;
      float *sum = c.params.own[SUMS] + ((int64_t)blockIdx.x * K::ROWS + row) * TILE_N;
      float *out = c.params.out + (work.row + row) * c.params.out_stride + work.column;
      auto summed = [&](int i) {
        float2 v = make_float2(acc[h][i], acc[h][i + 1]);
        int line = me.lane / 4 + i % 4 * 4, column = me.column + i / 4 * 8;
        auto add = [&](const float *rows, int64_t stride) {
          float2 more = *reinterpret_cast<const float2 *>(rows + line * stride + column);
          v.x += more.x, v.y += more.y;
        };
        if (whole && !first) add(sum, TILE_N);
        if (F32 && c.params.own[ADDED] && line < below && column < right) add(out, c.params.out_stride);
        return v;
      };
      if (!whole) {
        float *part = c.params.partials + (((int64_t)work.split * CLUSTER + c.rank) * K::ROWS + row) * TILE_N;
        epilogue_store_f32(part, TILE_N, 16, TILE_N, summed, me);
      } else if (!last) {
        epilogue_store_f32(sum, TILE_N, 16, TILE_N, summed, me);
      } else if (F32) {
        epilogue_store_f32(out, c.params.out_stride, below, right, summed, me);
      } else {
        epilogue_store_bf16(c.out, c.buffer, summed, work.column, work.row + row, me.lane);
      }
    }
  }
};

// The tiles of the last wave are split, if their partials fit.
static void split_last_wave(TileScheduler *s, int clusters, size_t scratch_bytes) {
  int tiles = s->m_tiles * s->n_tiles, rest = tiles % clusters;
  int64_t slots = (int64_t)(scratch_bytes / (s->rows * s->columns * sizeof(float)));
  if (rest == 0 || (int64_t)rest * SEGMENTS > slots) return;
  s->splits = SEGMENTS;
  s->whole = tiles - rest;
  s->work_tiles = tiles * SEGMENTS;
}

// As hopper_dx; accumulate: added to `out`, in fp32 alone. Without scratch, V is not cut.
static bool invariant_dx(Backend *backend, Tensor out, Tensor exps, Tensor weight, bool accumulate,
                         void *scratch, size_t bytes) {
  if (!dx_runs(backend, out, exps, weight) || (accumulate && (scratch || out.dtype != DTYPE_F32)))
    return false;
  TileScheduler s =
      schedule<KernelTraits<SegmentedStore<false>>>(backend, exps.shape[0], weight.shape[1], weight.shape[0]);
  float *sums = static_cast<float *>(cuda_state(backend)->gemm_workspace);
  EpilogueParams params = {.own = {scratch ? sums : nullptr, accumulate ? data_of<float>(out) : nullptr}};
  if (segments_of(s, params) > 1) split_last_wave(&s, hopper(backend).clusters, bytes);
  launch_dx<SegmentedStore<false>, SegmentedStore<true>>(backend, out, exps, weight, s, params, scratch);
  return true;
}

// --- the operations of a backend whose batches may not matter ----------------------------------------------

void require_hopper(const Backend *backend, bool runs) {
  if (backend->fixed_order && !runs)
    fail("batch_invariant needs the kernels for Hopper: bf16 on a GPU of compute capability 9.0, and rows of "
         "x, weight and dx that start on 16 bytes, so a hidden size that is a multiple of 8");
}

static void logits_exp(Backend *backend, const LceLogitsExp *a) {
  if (a->x.shape[0] == 0) return;
  require_hopper(backend, a->x.dtype == DTYPE_BF16 && hopper_runs(backend) && tma_takes(a->x) &&
                              tma_takes(a->weight) && (!tensor_exists(a->exps) || tma_takes(a->exps)));
  LceLogitsExp without_dx = *a;
  without_dx.dx_raw = Tensor{};
  cuda_lce_logits_exp(backend, &without_dx);
  if (tensor_exists(a->dx_raw)) // the scratch is free again
    require_hopper(backend, invariant_dx(backend, a->dx_raw, a->exps, a->weight, false, a->workspace.data,
                                         tensor_bytes(a->workspace)));
}

static void backward_input(Backend *backend, const LinearBackwardInput *a) {
  require_hopper(backend, invariant_dx(backend, a->dx, a->dout, a->weight, a->accumulate, nullptr, 0));
}

void cuda_batch_invariant(BackendOps *ops, bool on) {
  ops->lce_logits_exp = on ? logits_exp : cuda_lce_logits_exp;
  ops->linear_backward_input = on ? backward_input : cuda_linear_backward_input;
}
