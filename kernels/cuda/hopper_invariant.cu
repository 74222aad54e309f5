// dX = E W on Hopper with the same bits for a row whatever rows are beside it (Backend.batch_invariant).
//
// hopper_gemm.cu splits the tiles of the last wave along V, into as many parts as fit best, so how a row is
// summed depends on how many rows there are; and every other wave takes V from its end. Here all tiles sum V
// in the same three segments, forward, and add these in their order. A cluster makes the segments of a whole
// tile one after the other, with their sum in a buffer of its own, which costs little beside V's length; in
// the last wave three clusters make one each, as partials of split-K, and the same bits.
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_launch.cuh"
#include "kernels/cuda/hopper_store.cuh"

// Of 16 rows of a tile in fp32, the thread's pairs: visit(pair, index of its accumulator, row, column).
template <typename F>
static DEVICE void each_pair(float *rows, int64_t stride, const ThreadCoord &me, F visit) {
  EACH (below, 2) {
    int row = me.lane / 4 + 8 * below;
    EACH (j, TILE_N / 8) {
      int column = me.column + 8 * j;
      visit(*reinterpret_cast<float2 *>(rows + row * stride + column), 4 * j + 2 * below, row, column);
    }
  }
}

template <bool F32> struct SegmentedStore : Store<F32> {
  static constexpr bool SEGMENTED = true;
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    bool whole = work.split < 0, last = work.segment + 1 == c.s.segments;
    EACH (h, TILE_M / 64) {
      int tile_row = c.row + me.first_row(h), below = c.s.m - work.row - tile_row,
          right = c.s.n - work.column;
      float *sum = c.params.segment_sums + ((int64_t)blockIdx.x * K::ROWS + tile_row) * TILE_N;
      float *out = c.params.out + (work.row + tile_row) * c.params.out_stride + work.column;
      if (whole && work.segment > 0)
        each_pair(sum, TILE_N, me,
                  [&](const float2 &at, int i, int, int) { acc[h][i] += at.x, acc[h][i + 1] += at.y; });
      if (whole && !last)
        each_pair(sum, TILE_N, me,
                  [&](float2 &at, int i, int, int) { at = make_float2(acc[h][i], acc[h][i + 1]); });
      if (F32 && c.params.add)
        each_pair(out, c.params.out_stride, me, [&](const float2 &at, int i, int row, int column) {
          if (row < below && column < right) acc[h][i] += at.x, acc[h][i + 1] += at.y;
        });
    }
    if (!whole || last) Store<F32>::template run<K>(acc, c, work);
  }
};

// The tiles of the last wave are split, if their partials fit.
static void cut_into_segments(TileScheduler *s, int clusters, size_t scratch_bytes) {
  enum { SEGMENTS = 3, MIN_STEPS = 64 };
  if (s->k_steps < SEGMENTS * MIN_STEPS) return;
  s->segments = SEGMENTS;
  int tiles = s->m_tiles * s->n_tiles, rest = tiles % clusters;
  int64_t slots = (int64_t)(scratch_bytes / (s->rows * s->columns * sizeof(float)));
  if (rest == 0 || (int64_t)rest * SEGMENTS > slots) return;
  s->splits = SEGMENTS;
  s->whole = tiles - rest;
  s->work_tiles = tiles * SEGMENTS;
}

bool hopper_invariant_dx(Backend *backend, Tensor out, Tensor exps, Tensor weight, bool accumulate,
                         void *scratch, size_t bytes) {
  if (!dx_runs(backend, out, exps, weight) || (accumulate && (scratch || out.dtype != DTYPE_F32)))
    return false;
  using K = KernelTraits<SegmentedStore<false>>;
  TileScheduler s = schedule<K>(backend, exps.shape[0], weight.shape[1], weight.shape[0]);
  if (scratch) cut_into_segments(&s, hopper(backend).clusters, bytes);
  EpilogueParams params = {.out = data_of<float>(out),
                           .out_stride = out.stride,
                           .partials = static_cast<float *>(scratch),
                           .segment_sums = static_cast<float *>(cuda_state(backend)->gemm_workspace),
                           .add = accumulate};
  CUtensorMap exps_map = tma_map(backend, exps, K::ROWS),
              weight_map = tma_map(backend, weight, TILE_K / CLUSTER);
  if (out.dtype == DTYPE_BF16)
    launch<K>(backend, exps_map, weight_map, tma_map(backend, out, STORE_ROWS), s, params);
  else
    launch<KernelTraits<SegmentedStore<true>>>(backend, exps_map, weight_map, exps_map, s, params);
  add_partials<K>(backend, out, params.partials, s);
  return true;
}

void hopper_require(const Backend *backend, bool runs) {
  if (backend->batch_invariant && !runs)
    fail("batch_invariant needs the kernels for Hopper: bf16 on a GPU of compute capability 9.0, and rows of "
         "x, weight and dx that start on 16 bytes, so a hidden size that is a multiple of 8");
}
