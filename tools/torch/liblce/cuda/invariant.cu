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

// Sums are made on the way out: accumulators that are changed would hold up the next tile's wgmma.
template <bool F32> struct SegmentedStore : Store<F32> {
  static constexpr bool SEGMENTED = true;
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    bool whole = work.split < 0, first = work.segment == 0, last = work.segment + 1 == c.s.segments;
    EACH (h, TILE_M / 64) {
      int row = c.row + me.first_row(h), below = c.s.m - work.row - row, right = c.s.n - work.column;
      float *sum = c.params.segment_sums + ((int64_t)blockIdx.x * K::ROWS + row) * TILE_N;
      float *out = c.params.out + (work.row + row) * c.params.out_stride + work.column;
      auto summed = [&](int i) {
        float2 v = make_float2(acc[h][i], acc[h][i + 1]);
        int line = me.lane / 4 + i % 4 * 4, column = me.column + i / 4 * 8;
        auto add = [&](const float *rows, int64_t stride) {
          float2 more = *reinterpret_cast<const float2 *>(rows + line * stride + column);
          v.x += more.x, v.y += more.y;
        };
        if (whole && !first) add(sum, TILE_N);
        if (F32 && c.params.add && line < below && column < right) add(out, c.params.out_stride);
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
  TileScheduler s =
      schedule<KernelTraits<SegmentedStore<false>>>(backend, exps.shape[0], weight.shape[1], weight.shape[0]);
  if (scratch) cut_into_segments(&s, hopper(backend).clusters, bytes);
  float *sums = static_cast<float *>(cuda_state(backend)->gemm_workspace);
  launch_dx<SegmentedStore<false>, SegmentedStore<true>>(backend, out, exps, weight, s,
                                                         {.segment_sums = sums, .add = accumulate}, scratch);
  return true;
}

void hopper_require(const Backend *backend, bool runs) {
  if (backend->batch_invariant && !runs)
    fail("batch_invariant needs the kernels for Hopper: bf16 on a GPU of compute capability 9.0, and rows of "
         "x, weight and dx that start on 16 bytes, so a hidden size that is a multiple of 8");
}
