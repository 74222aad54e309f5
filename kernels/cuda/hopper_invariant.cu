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

// Sums are made in a copy: accumulators that are changed here would hold up the next tile's wgmma.
template <bool F32> struct SegmentedStore : Store<F32> {
  static constexpr bool SEGMENTED = true;
  template <typename K> DEVICE void run(Accumulators &acc, const Consumer &c, const WorkTile &work) {
    const ThreadCoord me;
    bool whole = work.split < 0, last = work.segment + 1 == c.s.segments;
    EACH (h, TILE_M / 64) {
      int row = c.row + me.first_row(h), below = c.s.m - work.row - row, right = c.s.n - work.column;
      float *sum = c.params.segment_sums + ((int64_t)blockIdx.x * K::ROWS + row) * TILE_N;
      float *out = c.params.out + (work.row + row) * c.params.out_stride + work.column;
      float v[TILE_N / 2];
      EACH (i, TILE_N / 2) v[i] = acc[h][i];
      if (whole && work.segment > 0)
        each_pair(sum, TILE_N, me,
                  [&](const float2 &at, int i, int, int) { v[i] += at.x, v[i + 1] += at.y; });
      if (F32 && c.params.add)
        each_pair(out, c.params.out_stride, me, [&](const float2 &at, int i, int line, int column) {
          if (line < below && column < right) v[i] += at.x, v[i + 1] += at.y;
        });
      if (!whole) {
        float *part = c.params.partials + (((int64_t)work.split * CLUSTER + c.rank) * K::ROWS + row) * TILE_N;
        epilogue_store_f32(part, TILE_N, 16, TILE_N, v, me);
      } else if (!last) {
        epilogue_store_f32(sum, TILE_N, 16, TILE_N, v, me);
      } else if (F32) {
        epilogue_store_f32(out, c.params.out_stride, below, right, v, me);
      } else {
        epilogue_store_bf16(c.out, c.buffer, v, work.column, work.row + row, me.lane);
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
