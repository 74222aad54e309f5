// Attention, forward, on the tensor cores: FlashAttention-2's order of work (Dao 2023), for sm_80 and later.
//
// A block of four warps owns 128 queries of one head, 32 per warp, and walks over the keys in tiles of 64
// from the diagonal back to the start. S = Q K^T stays in registers; the running maximum m and sum l of each
// row rescale what was summed before; P = exp(S - m), rounded to bf16, lies as the next GEMM, O += P V, needs
// it. K and V tiles are double-buffered, so one barrier per tile suffices. Two m16 MMAs share every K and V
// fragment, which halves the shared-memory traffic.
//
// Memory traffic: q and out once, k and v once per 128 queries, mostly from L2. Arithmetic: 4 B Q T^2 D / 2.
// On an H200: 240 TFLOP/s at T 1024 and 295 at T 4096 for heads of 64, 335 at T 32768 for heads of 128.
// attention_forward_hopper.cu does the same faster.
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"

namespace attention {

constexpr int WARPS = 4, THREADS = 32 * WARPS, M = 2, ROWS = WARPS * M * 16, KEYS = 64;

// The running softmax of one warp's rows: this lane's rows are 16 m + 8 half + lane / 4.
struct RowStatistics {
  float max[M][2], sum[M][2];
};

// s becomes exp(s - max); earlier sums (o, sum) are rescaled to the new maximum.
template <int D>
DEVICE void softmax_step(float (&s)[M][KEYS / 8][4], float (&o)[M][D / 8][4], RowStatistics &row,
                         float scale_log2) {
  EACH (m, M)
    EACH (half, 2) {
      float largest = row.max[m][half];
      EACH (n, KEYS / 8) largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      float rescale = exp2_approx((row.max[m][half] - largest) * scale_log2);
      float shift = largest * scale_log2, total = 0;
      EACH (n, KEYS / 8)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
          s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, -shift));
          total += s[m][n][i];
        }
      row.max[m][half] = largest;
      row.sum[m][half] = row.sum[m][half] * rescale + total;
      EACH (n, D / 8) {
        o[m][n][2 * half] *= rescale;
        o[m][n][2 * half + 1] *= rescale;
      }
    }
}

template <int D> struct ForwardShared {
  bf16 q[ROWS * D];
  bf16 k[2][KEYS * D], v[2][KEYS * D];
};

template <int D, bool PACKED>
__global__ void __launch_bounds__(THREADS, 2) forward_kernel(const __grid_constant__ AttentionForward a) {
  // For heads of 64 a warp keeps its queries in registers; for 128 they do not fit, and are read again.
  constexpr bool KEEP_Q = D <= 64;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  ForwardShared<D> &shared = *reinterpret_cast<ForwardShared<D> *>(shared_bytes);

  const int T = (int)a.shape.seq_len, num_heads = (int)a.shape.num_heads;
  const int key_value_heads = (int)a.shape.num_key_value_heads;
  const float scale_log2 = LOG2_E / sqrtf((float)D); // exponentials are powers of two
  const int warp = threadIdx.x / 32, lane_index = threadIdx.x % 32;
  const Place at = place<ROWS>(T, num_heads, true);
  const int first_row = at.first_row, head = at.head;
  const int64_t stride = a.qkv.stride;
  const bf16 *q = data_of<const bf16>(a.qkv) + at.first_token * stride + head * D;
  const bf16 *k = q + (num_heads + head / (num_heads / key_value_heads) - head) * D;
  const bf16 *v = k + key_value_heads * D;

  const Lane<D> lane;
  const uint32_t q_tile = shared_address(shared.q) + warp * (M * 16) * D * 2;
  const int first_query = first_row + warp * M * 16;
  const int tiles = (min(first_row + ROWS, T) + KEYS - 1) / KEYS;
  const Documents documents = documents_of(a.documents);
  auto start_of = [&](int t) { return documents.start(at.first_token, min(t, T - 1)); };
  // The block's first tile of keys, and the first key that the warp's first and last row see.
  const int first_tile = PACKED ? start_of(first_row) / KEYS : 0;
  const int first_start = PACKED ? start_of(first_query) : 0;
  const int last_start = PACKED ? start_of(first_query + M * 16 - 1) : 0;

  auto load_keys = [&](int tile, int stage) {
    load_tile<KEYS, D, THREADS>(shared_address(shared.k[stage]), k, stride, tile * KEYS, T);
    load_tile<KEYS, D, THREADS>(shared_address(shared.v[stage]), v, stride, tile * KEYS, T);
    copies_commit();
  };
  load_tile<ROWS, D, THREADS>(shared_address(shared.q), q, stride, first_row, T);
  load_keys(tiles - 1, 0);

  float o[M][D / 8][4] = {};
  RowStatistics row;
  EACH (m, M)
    EACH (half, 2) row.max[m][half] = -INFINITY, row.sum[m][half] = 0;
  uint32_t q_kept[KEEP_Q ? M : 1][KEEP_Q ? D / 16 : 1][4];
  auto query = [&](uint32_t(&r)[4], int m, int d) {
    if constexpr (KEEP_Q)
      EACH (i, 4) r[i] = q_kept[m][d / 16][i];
    else
      lane.a(r, q_tile, m * 16, d);
  };

  for (int tile = tiles - 1, stage = 0; tile >= first_tile; tile--, stage ^= 1) {
    copies_wait<0>();
    __syncthreads();
    if (tile > first_tile) load_keys(tile - 1, stage ^ 1);
    if constexpr (KEEP_Q)
      if (tile == tiles - 1)
        EACH (m, M)
          EACH (d, D / 16) lane.a(q_kept[m][d], q_tile, m * 16, d * 16);
    const int first_key = tile * KEYS;
    // No key of this tile is visible to this warp.
    if (first_key >= first_query + M * 16 || (PACKED && first_key + KEYS <= first_start)) continue;

    float s[M][KEYS / 8][4] = {};
    scores<D>(s, lane, query, shared_address(shared.k[stage]), 0);
    const int offset = first_query - first_key;
    if (offset < KEYS - 1) mask_columns<false>(s, [=](int row) { return offset + row + 1; });
    if (PACKED && first_key < last_start)
      mask_columns<true>(s, [=](int row) { return start_of(first_query + row) - first_key; });
    softmax_step<D>(s, o, row, scale_log2);
    accumulate<D>(o, lane, s, shared_address(shared.v[stage]), 0);
  }

  float *lse = data_of<float>(a.lse) + at.batch * a.lse.stride + (int64_t)head * T;
  EACH (m, M)
    EACH (half, 2) {
      float total = row.sum[m][half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      int t = first_query + m * 16 + half * 8 + lane_index / 4;
      if (lane_index % 4 == 0 && t < T) lse[t] = row.max[m][half] * (scale_log2 / LOG2_E) + logf(total);
      float inverse = 1 / total;
      EACH (n, D / 8) {
        o[m][n][2 * half] *= inverse;
        o[m][n][2 * half + 1] *= inverse;
      }
    }
  // The warp's part of q's tile is free: it alone reads it.
  __syncwarp();
  store_tile_rows<M, D>(o, 1.0f, q_tile, data_of<bf16>(a.out) + at.first_token * a.out.stride + head * D,
                        a.out.stride, first_query, T);
}

} // namespace attention

void attention_tensor_core_forward(const AttentionForward *a, cudaStream_t stream) {
  using namespace attention;
  with_bool(tensor_exists(a->documents), [=](auto packed) {
    with_bool(a->shape.head_dim == 128, [=](auto wide) {
      constexpr int D = decltype(wide)::value ? 128 : 64;
      launch<THREADS, ROWS, sizeof(ForwardShared<D>)>(forward_kernel<D, decltype(packed)::value>, *a,
                                                      a->shape.num_heads, stream);
    });
  });
}
