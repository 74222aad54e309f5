// Attention, backward, on the tensor cores, for sm_80 and later, without atomics.
//
// P = exp(S - lse) is recomputed from q, k and the saved lse; with delta = rowsum(dout * out), made first,
//   dS = P * (dout v^T - delta);   dv = P^T dout;   dk = dS^T q / sqrt(D);   dq = dS k / sqrt(D).
// dk and dv sum over queries, dq sums over keys. One kernel for all three must add dq up across blocks: with
// atomics, whose order changes the last bits from run to run, or with blocks that wait for one another. Here
// two kernels do it, each the sole owner of what it writes: seven GEMMs instead of five, and every bit the
// same in every run.
//
//   key kernel:   a block owns keys of one key/value head and walks over the queries that see them, of every
//                 query head of the group. It computes the transposes S^T and dP^T, whose accumulators are
//                 the A operands of dv += P^T dout and dk += dS^T q as they stand.
//   query kernel: a block owns 128 queries of one head and walks over their keys; dS is the A operand of
//                 dq += dS k.
// So P and dS never touch shared memory. dP starts at -delta rather than 0, which saves the subtraction.
//
// Arithmetic: 14 B Q T^2 D / 2, a kernel with atomics 10; on an H200 190 to 230 TFLOP/s of those 10.
// Hopper has a faster form of the same plan in attention_backward_hopper.cu.
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"

namespace attention {

struct BackwardArguments {
  const bf16 *qkv, *dout;
  bf16 *dqkv;
  const float *statistics;
  int64_t qkv_stride, dqkv_stride, dout_stride; // elements per row
  int seq_len, num_heads, num_key_value_heads;
  float scale, scale_log2; // 1 / sqrt(D), and times log2(e)
  Documents documents;
};

// --- one step of P and dS ----------------------------------------------------------------------------------

// s and dp, 16 M rows by N columns of S (or S^T) and dP - delta, become P and dS as A operands, 16 columns
// each. The statistics belong to S's rows, or to its columns when TRANSPOSED. `offset` is the index of the
// warp's first row minus that of its first column; with `masked`, keys after the query count nothing.
template <int M, int N, bool TRANSPOSED>
__device__ __forceinline__ void probabilities(float (&s)[M][N / 8][4], float (&dp)[M][N / 8][4],
                                              const float *shift, float scale_log2, bool masked, int offset) {
  if (masked) mask_columns<TRANSPOSED>(s, [=](int row) { return offset + row + !TRANSPOSED; });
  EACH (m, M)
    EACH (n, N / 8)
      EACH (i, 4) {
        float add = TRANSPOSED ? shift[n * 2 + (i & 1)] : shift[m * 2 + (i >> 1)];
        s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, add));
        dp[m][n][i] *= s[m][n][i];
      }
}

__device__ __forceinline__ void to_operand(uint32_t r[4], const float (&left)[4], const float (&right)[4]) {
  r[0] = pack_bf16(left[0], left[1]);
  r[1] = pack_bf16(left[2], left[3]);
  r[2] = pack_bf16(right[0], right[1]);
  r[3] = pack_bf16(right[2], right[3]);
}

// --- dk and dv ---------------------------------------------------------------------------------------------

template <int D, int KEYS, int QUERIES> struct KeyShared {
  bf16 k[KEYS * D], v[KEYS * D];
  bf16 q[2][QUERIES * D], dout[2][QUERIES * D];
  float shift[2][QUERIES], minus_delta[2][QUERIES];
};

// A block of WARPS warps owns 16 M WARPS keys; QUERIES are loaded at a time and worked on STEP at a time.
template <int D, int M, int WARPS, int QUERIES, int STEP, bool PACKED>
__global__ void __launch_bounds__(WARPS * 32, 8 / WARPS) key_kernel(BackwardArguments a) {
  constexpr int THREADS = WARPS * 32, KEYS = WARPS * M * 16;
  using Shared = KeyShared<D, KEYS, QUERIES>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);

  const int T = a.seq_len, group = a.num_heads / a.num_key_value_heads;
  const int block_key = blockIdx.x * KEYS, warp = threadIdx.x / 32; // the longest blocks start first
  const int first_key = block_key + warp * M * 16;
  const int key_value_head = blockIdx.y, batch = blockIdx.z;
  const int64_t first_row = batch * (int64_t)T;
  const bf16 *q = a.qkv + first_row * a.qkv_stride + (int64_t)key_value_head * group * D;
  const bf16 *k = a.qkv + first_row * a.qkv_stride + (a.num_heads + key_value_head) * D;
  const bf16 *v = k + a.num_key_value_heads * D;
  const bf16 *dout = a.dout + first_row * a.dout_stride + (int64_t)key_value_head * group * D;
  const float *statistics = statistics_of(a.statistics, batch * a.num_heads + key_value_head * group, T);

  const Lane<D> lane;
  const uint32_t k_tile = shared_address(shared.k) + warp * M * 16 * D * 2;
  const uint32_t v_tile = shared_address(shared.v) + warp * M * 16 * D * 2;
  auto end_of = [&](int t) { return a.documents.end(first_row, min(t, T - 1), T); };
  const int end = PACKED ? end_of(block_key + KEYS - 1) : T; // of the queries
  // Where those end that see the warp's first key, and its last.
  const int first_end = PACKED ? end_of(first_key) : T,
            last_end = PACKED ? end_of(first_key + M * 16 - 1) : T;
  const int first_tile = block_key / QUERIES, tiles = (end + QUERIES - 1) / QUERIES - first_tile;
  const int steps = tiles * group;

  auto load_queries = [&](int step, int stage) {
    int head = step / tiles, t = (first_tile + step % tiles) * QUERIES;
    load_tile<QUERIES, D, THREADS>(shared_address(shared.q[stage]), q + head * D, a.qkv_stride, t, T);
    load_tile<QUERIES, D, THREADS>(shared_address(shared.dout[stage]), dout + head * D, a.dout_stride, t, T);
    const float *source = statistics_of(statistics, head, T) + statistics_place(t);
    if (threadIdx.x < QUERIES / 4) {
      copy_16(shared_address(&shared.shift[stage][threadIdx.x * 4]), source + threadIdx.x * 4, true);
      copy_16(shared_address(&shared.minus_delta[stage][threadIdx.x * 4]),
              source + STATISTICS_TILE + threadIdx.x * 4, true);
    }
    copies_commit();
  };

  load_tile<KEYS, D, THREADS>(shared_address(shared.k), k, a.qkv_stride, block_key, T);
  load_tile<KEYS, D, THREADS>(shared_address(shared.v), v, a.qkv_stride, block_key, T);
  load_queries(0, 0);

  float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
  for (int step = 0; step < steps; step++) {
    const int stage = step & 1, first_query = (first_tile + step % tiles) * QUERIES;
    copies_wait<0>();
    __syncthreads();
    if (step + 1 < steps) load_queries(step + 1, stage ^ 1);
    const uint32_t q_tile = shared_address(shared.q[stage]), dout_tile = shared_address(shared.dout[stage]);

#pragma unroll 1
    for (int part = 0; part < QUERIES; part += STEP) {
      const int query = first_query + part;
      // These queries see none of the warp's keys.
      if (query + STEP <= first_key || (PACKED && query >= last_end)) continue;
      float s[M][STEP / 8][4] = {}, dp[M][STEP / 8][4], shift[STEP / 4];
      EACH (n, STEP / 8) {
        int column = part + n * 8 + 2 * (threadIdx.x % 4);
        float2 l = *reinterpret_cast<const float2 *>(&shared.shift[stage][column]);
        float2 d = *reinterpret_cast<const float2 *>(&shared.minus_delta[stage][column]);
        shift[2 * n] = l.x;
        shift[2 * n + 1] = l.y;
        EACH (m, M) {
          dp[m][n][0] = dp[m][n][2] = d.x;
          dp[m][n][1] = dp[m][n][3] = d.y;
        }
      }
      EACH (d, D / 16) {
        uint32_t k_rows[M][4], v_rows[M][4], b[4];
        EACH (m, M) {
          lane.a(k_rows[m], k_tile, m * 16, d * 16);
          lane.a(v_rows[m], v_tile, m * 16, d * 16);
        }
        EACH (n, STEP / 16) {
          lane.b_rows(b, q_tile, part + n * 16, d * 16);
          EACH (m, M) mma(s[m][2 * n], k_rows[m], b), mma(s[m][2 * n + 1], k_rows[m], b + 2);
          lane.b_rows(b, dout_tile, part + n * 16, d * 16);
          EACH (m, M) mma(dp[m][2 * n], v_rows[m], b), mma(dp[m][2 * n + 1], v_rows[m], b + 2);
        }
      }
      if (PACKED && query + STEP > first_end)
        mask_columns<false>(s, [=](int row) { return end_of(first_key + row) - query; });
      probabilities<M, STEP, true>(s, dp, shift, a.scale_log2, first_key + M * 16 > query + 1,
                                   first_key - query);
      EACH (n, STEP / 16) {
        uint32_t p[M][4], ds[M][4], b[4];
        EACH (m, M) {
          to_operand(p[m], s[m][2 * n], s[m][2 * n + 1]);
          to_operand(ds[m], dp[m][2 * n], dp[m][2 * n + 1]);
        }
        EACH (d, D / 16) {
          lane.b_columns(b, dout_tile, part + n * 16, d * 16);
          EACH (m, M) mma(dv[m][2 * d], p[m], b), mma(dv[m][2 * d + 1], p[m], b + 2);
          lane.b_columns(b, q_tile, part + n * 16, d * 16);
          EACH (m, M) mma(dk[m][2 * d], ds[m], b), mma(dk[m][2 * d + 1], ds[m], b + 2);
        }
      }
    }
  }

  // The warp's parts of k's and v's tiles are free: it alone reads them.
  __syncwarp();
  bf16 *dk_rows = a.dqkv + first_row * a.dqkv_stride + (a.num_heads + key_value_head) * D;
  store_tile_rows<M, D>(dk, a.scale, k_tile, dk_rows, a.dqkv_stride, first_key, T);
  store_tile_rows<M, D>(dv, 1.0f, v_tile, dk_rows + a.num_key_value_heads * D, a.dqkv_stride, first_key, T);
}

// --- dq ----------------------------------------------------------------------------------------------------

template <int D, int QUERIES, int KEYS> struct QueryShared {
  bf16 q[QUERIES * D], dout[QUERIES * D];
  bf16 k[2][KEYS * D], v[2][KEYS * D];
};

template <int D, int KEYS, int STEP, bool PACKED>
__global__ void __launch_bounds__(128, 2) query_kernel(BackwardArguments a) {
  constexpr int WARPS = 4, THREADS = WARPS * 32, M = 2, QUERIES = WARPS * M * 16;
  using Shared = QueryShared<D, QUERIES, KEYS>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);

  const int T = a.seq_len, group = a.num_heads / a.num_key_value_heads;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int block_query = (gridDim.x - 1 - blockIdx.x) * QUERIES; // the longest blocks start first
  const int first_query = block_query + warp * M * 16;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int64_t first_row = batch * (int64_t)T;
  const bf16 *q = a.qkv + first_row * a.qkv_stride + head * D;
  const bf16 *k = a.qkv + first_row * a.qkv_stride + (a.num_heads + head / group) * D;
  const bf16 *v = k + a.num_key_value_heads * D;
  const bf16 *dout = a.dout + first_row * a.dout_stride + head * D;

  const Lane<D> lane;
  const uint32_t q_tile = shared_address(shared.q) + warp * M * 16 * D * 2;
  const uint32_t dout_tile = shared_address(shared.dout) + warp * M * 16 * D * 2;
  const int tiles = (min(block_query + QUERIES, T) + KEYS - 1) / KEYS;
  auto start_of = [&](int t) { return a.documents.start(first_row, min(t, T - 1)); };
  // Of the block, and of the warp's first and last row.
  const int first_tile = PACKED ? start_of(block_query) / KEYS : 0;
  const int first_start = PACKED ? start_of(first_query) : 0;
  const int last_start = PACKED ? start_of(first_query + M * 16 - 1) : 0;

  load_tile<QUERIES, D, THREADS>(shared_address(shared.q), q, a.qkv_stride, block_query, T);
  load_tile<QUERIES, D, THREADS>(shared_address(shared.dout), dout, a.dout_stride, block_query, T);
  load_tile<KEYS, D, THREADS>(shared_address(shared.k[0]), k, a.qkv_stride, first_tile * KEYS, T);
  load_tile<KEYS, D, THREADS>(shared_address(shared.v[0]), v, a.qkv_stride, first_tile * KEYS, T);
  copies_commit();

  const float *statistics = statistics_of(a.statistics, batch * a.num_heads + head, T);
  float shift[M * 2], minus_delta[M * 2];
  EACH (i, M * 2) {
    int t = first_query + i * 8 + g;
    shift[i] = t < T ? statistics[statistics_place(t)] : 0;
    minus_delta[i] = t < T ? statistics[statistics_place(t) + STATISTICS_TILE] : 0;
  }

  float dq[M][D / 8][4] = {};
  for (int tile = first_tile; tile < tiles; tile++) {
    const int stage = (tile - first_tile) & 1;
    copies_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) {
      load_tile<KEYS, D, THREADS>(shared_address(shared.k[stage ^ 1]), k, a.qkv_stride, (tile + 1) * KEYS, T);
      load_tile<KEYS, D, THREADS>(shared_address(shared.v[stage ^ 1]), v, a.qkv_stride, (tile + 1) * KEYS, T);
      copies_commit();
    }
    const uint32_t k_tile = shared_address(shared.k[stage]), v_tile = shared_address(shared.v[stage]);

#pragma unroll 1
    for (int part = 0; part < KEYS; part += STEP) {
      const int key = tile * KEYS + part;
      // None of the warp's queries sees these keys.
      if (key >= first_query + M * 16 || (PACKED && key + STEP <= first_start)) continue;
      float s[M][STEP / 8][4] = {}, dp[M][STEP / 8][4];
      EACH (m, M)
        EACH (n, STEP / 8)
          EACH (i, 4) dp[m][n][i] = minus_delta[m * 2 + (i >> 1)];
      EACH (d, D / 16) {
        uint32_t q_rows[M][4], dout_rows[M][4], b[4];
        EACH (m, M) {
          lane.a(q_rows[m], q_tile, m * 16, d * 16);
          lane.a(dout_rows[m], dout_tile, m * 16, d * 16);
        }
        EACH (n, STEP / 16) {
          lane.b_rows(b, k_tile, part + n * 16, d * 16);
          EACH (m, M) mma(s[m][2 * n], q_rows[m], b), mma(s[m][2 * n + 1], q_rows[m], b + 2);
          lane.b_rows(b, v_tile, part + n * 16, d * 16);
          EACH (m, M) mma(dp[m][2 * n], dout_rows[m], b), mma(dp[m][2 * n + 1], dout_rows[m], b + 2);
        }
      }
      if (PACKED && key < last_start)
        mask_columns<true>(s, [=](int row) { return start_of(first_query + row) - key; });
      probabilities<M, STEP, false>(s, dp, shift, a.scale_log2, key + STEP > first_query + 1,
                                    first_query - key);
      EACH (n, STEP / 16) {
        uint32_t ds[M][4], b[4];
        EACH (m, M) to_operand(ds[m], dp[m][2 * n], dp[m][2 * n + 1]);
        EACH (d, D / 16) {
          lane.b_columns(b, k_tile, part + n * 16, d * 16);
          EACH (m, M) mma(dq[m][2 * d], ds[m], b), mma(dq[m][2 * d + 1], ds[m], b + 2);
        }
      }
    }
  }

  // The warp's part of q's tile is free: it alone reads it.
  __syncwarp();
  store_tile_rows<M, D>(dq, a.scale, q_tile, a.dqkv + first_row * a.dqkv_stride + head * D, a.dqkv_stride,
                        first_query, T);
}

// --- launches ----------------------------------------------------------------------------------------------

static void launch(void (*kernel)(BackwardArguments), dim3 grid, int threads, size_t shared_bytes,
                   const BackwardArguments &a, cudaStream_t stream) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
  kernel<<<grid, threads, shared_bytes, stream>>>(a);
}

template <int D, int M, int WARPS, int QUERIES, int STEP, bool PACKED>
static void launch_keys(const BackwardArguments &a, int batch, cudaStream_t stream) {
  constexpr int KEYS = WARPS * M * 16;
  dim3 grid((a.seq_len + KEYS - 1) / KEYS, a.num_key_value_heads, batch);
  launch(key_kernel<D, M, WARPS, QUERIES, STEP, PACKED>, grid, WARPS * 32,
         sizeof(KeyShared<D, KEYS, QUERIES>), a, stream);
}

template <int D, int KEYS, int STEP, bool PACKED>
static void launch_queries(const BackwardArguments &a, int batch, cudaStream_t stream) {
  dim3 grid((a.seq_len + 127) / 128, a.num_heads, batch);
  launch(query_kernel<D, KEYS, STEP, PACKED>, grid, 128, sizeof(QueryShared<D, 128, KEYS>), a, stream);
}

} // namespace attention

void attention_tensor_core_backward(const AttentionBackward *b, float *statistics, cudaStream_t stream) {
  using namespace attention;
  AttentionShape s = b->shape;
  float scale = 1 / sqrtf((float)s.head_dim);
  BackwardArguments a = {.qkv = data_of<const bf16>(b->qkv),
                         .dout = data_of<const bf16>(b->dout),
                         .dqkv = data_of<bf16>(b->dqkv),
                         .statistics = statistics,
                         .qkv_stride = b->qkv.stride,
                         .dqkv_stride = b->dqkv.stride,
                         .dout_stride = b->dout.stride,
                         .seq_len = (int)s.seq_len,
                         .num_heads = (int)s.num_heads,
                         .num_key_value_heads = (int)s.num_key_value_heads,
                         .scale = scale,
                         .scale_log2 = scale * LOG2_E,
                         .documents = documents_of(b->documents, s)};
  with_bool(tensor_exists(b->documents), [=](auto packed) {
    if (s.head_dim == 64) {
      launch_keys<64, 2, 4, 64, 32, packed>(a, (int)s.batch, stream);
      launch_queries<64, 64, 32, packed>(a, (int)s.batch, stream);
    } else {
      launch_keys<128, 1, 8, 32, 32, packed>(a, (int)s.batch, stream);
      launch_queries<128, 32, 32, packed>(a, (int)s.batch, stream);
    }
  });
  cuda_check_launch("attention_backward");
}
