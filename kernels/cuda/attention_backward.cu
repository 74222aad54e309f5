// Attention, backward, on the tensor cores, for sm_80 and later, without atomics.
//
// P = exp(S - lse) is recomputed from q, k and the saved lse. With delta = rowsum(dout * out), known before,
//  dS = P * (dout v^T - delta);   dv = P^T dout;   dk = dS^T q / sqrt(D);   dq = dS k / sqrt(D).
// dk and dv sum over queries, dq over keys. One pass for all three must add dq up across blocks, by atomics
// (whose order changes bits) or by waiting. Two passes, each the sole owner of what it writes, take seven
// GEMMs instead of five and repeat bit for bit. A block owns rows of two tensors and streams two:
//
//              resident    streamed                               S and dP     sums
//  key pass    k, v        q, dout of every head of the group     S^T, dP^T    dk += dS^T q, dv += P^T dout
//  query pass  q, dout     k, v                                   S, dP        dq += dS k
//
// Accumulators are A operands as they stand, so P and dS never touch shared memory; dP starts at -delta.
//
// Arithmetic: 14 B Q T^2 D / 2, a kernel with atomics 10; on an H200 190 to 230 TFLOP/s of those 10.
// attention_backward_hopper.cu does the same faster.
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"

namespace attention {

// A block of WARPS warps owns 16 M rows for each; TILE rows are streamed and worked on STEP at a time.
template <bool IS_KEY_PASS, int HEAD_DIM, int M_, int WARPS_, int TILE_, bool IS_PACKED> struct Pass {
  static constexpr bool KEY_PASS = IS_KEY_PASS, PACKED = IS_PACKED;
  static constexpr int D = HEAD_DIM, M = M_, WARPS = WARPS_, TILE = TILE_, STEP = 32;
  static constexpr int THREADS = WARPS * 32, ROWS = WARPS * M * 16;
};

template <class F> struct BackwardShared {
  bf16 resident[2][F::ROWS * F::D], streamed[2][2][F::TILE * F::D]; // per stage: q or k, then dout or v
  float statistics[2][2][F::TILE]; // of streamed queries, laid out as in attention_mma.cuh
};

template <class F>
__global__ void __launch_bounds__(F::THREADS, 8 / F::WARPS)
    backward_kernel(const __grid_constant__ AttentionBackward a) {
  constexpr int D = F::D, M = F::M, TILE = F::TILE, STEP = F::STEP, THREADS = F::THREADS, ROWS = F::ROWS;
  constexpr bool KEY_PASS = F::KEY_PASS, PACKED = F::PACKED;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  BackwardShared<F> &shared = *reinterpret_cast<BackwardShared<F> *>(shared_bytes);

  const int T = (int)a.shape.seq_len, num_heads = (int)a.shape.num_heads;
  const int key_value_heads = (int)a.shape.num_key_value_heads, group = num_heads / key_value_heads;
  const float scale = 1 / sqrtf((float)D), scale_log2 = scale * LOG2_E;
  const Place at = place<ROWS>(T, KEY_PASS ? key_value_heads : num_heads, !KEY_PASS);
  const int head = KEY_PASS ? at.head * group : at.head, key_head = KEY_PASS ? at.head : at.head / group;
  const int64_t stride = a.qkv.stride;
  const bf16 *qkv = data_of<const bf16>(a.qkv) + at.first_token * stride;
  const bf16 *q = qkv + head * D, *k = qkv + (num_heads + key_head) * D, *v = k + key_value_heads * D;
  const bf16 *dout = data_of<const bf16>(a.dout) + at.first_token * a.dout.stride + head * D;
  const float *statistics = statistics_of(data_of<const float>(a.workspace), at.batch * num_heads + head, T);

  const int warp_row = threadIdx.x / 32 * M * 16, first_row = at.first_row + warp_row; // the warp's first
  const Documents documents = documents_of(a.documents);
  // Query t sees keys from bound_of(t) on; queries up to bound_of(t) see key t.
  auto bound_of = [&](int t) {
    t = min(t, T - 1);
    return KEY_PASS ? documents.end(at.first_token, t, T) : documents.start(at.first_token, t);
  };
  const int everything = KEY_PASS ? T : 0;
  const int block_bound = PACKED ? bound_of(at.first_row + (KEY_PASS ? ROWS - 1 : 0)) : everything;
  const int first_bound = PACKED ? bound_of(first_row) : everything;
  const int last_bound = PACKED ? bound_of(first_row + M * 16 - 1) : everything;
  const int first_tile = (KEY_PASS ? at.first_row : block_bound) / TILE;
  const int tiles = ((KEY_PASS ? block_bound : min(at.first_row + ROWS, T)) + TILE - 1) / TILE - first_tile;
  const int steps = KEY_PASS ? tiles * group : tiles;
  auto tile_row = [&](int step) { return (first_tile + (KEY_PASS ? step % tiles : step)) * TILE; };

  auto load_step = [&](int step, int stage) {
    const int t = tile_row(step), h = KEY_PASS ? step / tiles : 0;
    load_tile<TILE, D, THREADS>(shared_address(shared.streamed[stage][0]), KEY_PASS ? q + h * D : k, stride,
                                t, T);
    load_tile<TILE, D, THREADS>(shared_address(shared.streamed[stage][1]), KEY_PASS ? dout + h * D : v,
                                KEY_PASS ? a.dout.stride : stride, t, T);
    if (KEY_PASS && threadIdx.x < TILE / 2) {
      const int which = threadIdx.x / (TILE / 4), i = threadIdx.x % (TILE / 4) * 4;
      copy_16(shared_address(&shared.statistics[stage][which][i]),
              statistics_of(statistics, h, T) + statistics_place(t) + which * STATISTICS_TILE + i, true);
    }
    copies_commit();
  };
  load_tile<ROWS, D, THREADS>(shared_address(shared.resident[0]), KEY_PASS ? k : q, stride, at.first_row, T);
  load_tile<ROWS, D, THREADS>(shared_address(shared.resident[1]), KEY_PASS ? v : dout,
                              KEY_PASS ? stride : a.dout.stride, at.first_row, T);
  load_step(0, 0);

  const Lane<D> lane;
  const uint32_t x0 = shared_address(shared.resident[0]) + warp_row * D * 2; // the warp's
  const uint32_t x1 = shared_address(shared.resident[1]) + warp_row * D * 2;
  auto operand0 = [&](uint32_t(&r)[4], int m, int d) { lane.a(r, x0, m * 16, d); };
  auto operand1 = [&](uint32_t(&r)[4], int m, int d) { lane.a(r, x1, m * 16, d); };
  float shift[KEY_PASS ? STEP / 4 : M * 2], minus_delta[M * 2]; // per column of the step, or per row
  if constexpr (!KEY_PASS) {
    EACH (i, M * 2) {
      const int t = first_row + i * 8 + threadIdx.x % 32 / 4;
      shift[i] = t < T ? statistics[statistics_place(t)] : 0;
      minus_delta[i] = t < T ? statistics[statistics_place(t) + STATISTICS_TILE] : 0;
    }
  }

  float first[M][D / 8][4] = {}, second[KEY_PASS ? M : 1][D / 8][4] = {}; // dk and dv, or dq
  for (int step = 0; step < steps; step++) {
    const int stage = step & 1;
    copies_wait<0>();
    __syncthreads();
    if (step + 1 < steps) load_step(step + 1, stage ^ 1);
    const uint32_t y0 = shared_address(shared.streamed[stage][0]);
    const uint32_t y1 = shared_address(shared.streamed[stage][1]);

#pragma unroll 1
    for (int part = 0; part < TILE; part += STEP) {
      const int row = tile_row(step) + part; // the first of these streamed rows
      // None of the warp's rows sees them, or is seen by them.
      if (KEY_PASS ? row + STEP <= first_row || (PACKED && row >= last_bound)
                   : row >= first_row + M * 16 || (PACKED && row + STEP <= first_bound))
        continue;
      float s[M][STEP / 8][4] = {}, dp[M][STEP / 8][4];
      EACH (n, STEP / 8) {
        float2 d = {};
        if constexpr (KEY_PASS) {
          const int column = part + n * 8 + 2 * (threadIdx.x % 4);
          const float2 l = *reinterpret_cast<const float2 *>(&shared.statistics[stage][0][column]);
          d = *reinterpret_cast<const float2 *>(&shared.statistics[stage][1][column]);
          shift[2 * n] = l.x, shift[2 * n + 1] = l.y;
        }
        EACH (m, M)
          EACH (i, 4) dp[m][n][i] = KEY_PASS ? (i & 1 ? d.y : d.x) : minus_delta[m * 2 + (i >> 1)];
      }
      scores<D>(s, lane, operand0, y0, part);
      scores<D>(dp, lane, operand1, y1, part);
      if (PACKED && (KEY_PASS ? row + STEP > first_bound : row < last_bound))
        mask_columns<!KEY_PASS>(s, [=](int r) { return bound_of(first_row + r) - row; });
      if (KEY_PASS ? first_row + M * 16 > row + 1 : row + STEP > first_row + 1) // keys after the query
        mask_columns<KEY_PASS>(s, [=](int r) { return first_row + r - row + !KEY_PASS; });
      EACH (m, M)
        EACH (n, STEP / 8)
          EACH (i, 4) {
            s[m][n][i] = exp2_approx(
                fmaf(s[m][n][i], scale_log2, KEY_PASS ? shift[n * 2 + (i & 1)] : shift[m * 2 + (i >> 1)]));
            dp[m][n][i] *= s[m][n][i];
          }
      if constexpr (KEY_PASS) accumulate<D>(second, lane, s, y1, part);
      accumulate<D>(first, lane, dp, y0, part);
    }
  }

  // The warp's parts of the resident tiles are free: it alone reads them.
  __syncwarp();
  bf16 *rows =
      data_of<bf16>(a.dqkv) + at.first_token * a.dqkv.stride + (KEY_PASS ? num_heads + key_head : head) * D;
  store_tile_rows<M, D>(first, scale, x0, rows, a.dqkv.stride, first_row, T);
  if constexpr (KEY_PASS)
    store_tile_rows<M, D>(second, 1.0f, x1, rows + key_value_heads * D, a.dqkv.stride, first_row, T);
}

template <class F> static void run(const AttentionBackward &a, cudaStream_t stream) {
  launch<F::THREADS, F::ROWS, sizeof(BackwardShared<F>)>(
      backward_kernel<F>, a, F::KEY_PASS ? a.shape.num_key_value_heads : a.shape.num_heads, stream);
}

} // namespace attention

void attention_tensor_core_backward(const AttentionBackward *a, cudaStream_t stream) {
  using namespace attention;
  with_bool(tensor_exists(a->documents), [=](auto packed) {
    if (a->shape.head_dim == 64) {
      run<Pass<true, 64, 2, 4, 64, packed>>(*a, stream);
      run<Pass<false, 64, 2, 4, 64, packed>>(*a, stream);
    } else {
      run<Pass<true, 128, 1, 8, 32, packed>>(*a, stream);
      run<Pass<false, 128, 2, 4, 32, packed>>(*a, stream);
    }
  });
}
