// Shared by attention's passes on Hopper: a persistent kernel of a producer warpgroup and two or three
// consumer warpgroups, the order of its work, rings of tiles in shared memory, and the GEMMs on them.
//
// A work tile is ROWS rows of one head: 64 for each consumer, whose operands stay in shared memory (they are
// resident) while tiles of other rows are streamed past all consumers. One thread of the producer takes work
// tiles from a counter and keeps TMA loads in flight. Which CTA takes which tile varies; results do not.
//
// A pass is a class F with D, WARPGROUPS (of consumers), ROWS, CLUSTER (CTAs), KEY_PASS (rows are keys, not
// queries), PACKED (sequences of several documents), Arguments, SharedStorage, PRODUCER_REGISTERS, produce
// (by one thread) and consume.
//
// The CTAs of a cluster have work tiles that stream the same rows: queries of heads that share keys and
// values, or neighbouring blocks of keys. Each CTA loads a part of every streamed tile into all of them, once
// the consumers of all have released the stage, and its own barrier expects the bytes of all parts.
#pragma once

#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_ptx.cuh"

namespace attention {

constexpr int TILE = 64;          // rows of a consumer, and of a TMA tile
enum { TILE_BYTES = TILE * 128 }; // 64 columns; a head of 128 is two tiles side by side

struct HopperArguments {
  CUtensorMap qkv;
  int *counter; // work taken beyond each CTA's first work tile
  int batch, seq_len, num_heads, num_key_value_heads;
  int blocks;              // per sequence, of ROWS rows each; key pass: of a cluster's
  int heads, work;         // heads of the pass over all batches, query heads by clusters; blocks * heads
  int heads_at_a_time;     // heads whose operands fit in the L2 cache together
  float scale, scale_log2; // 1 / sqrt(D), and times log2(e)
  Documents documents;
};

// ROWS rows of one head.
struct WorkTile {
  int block, head, batch; // the head of the pass: a key/value head or a query head
};

template <class F> DEVICE int rank_of_cta() {
  return blockIdx.x % F::CLUSTER;
}

// Takes heads in groups that fit in the L2 cache; within a group the longest tiles come first.
template <class F> DEVICE WorkTile work_tile(const HopperArguments &a, int index) {
  int group = index / (a.heads_at_a_time * a.blocks), place = index % (a.heads_at_a_time * a.blocks);
  int first_head = group * a.heads_at_a_time, heads = min(a.heads_at_a_time, a.heads - first_head);
  int head = first_head + place % heads, block = place / heads;
  int per_batch = F::KEY_PASS ? a.num_key_value_heads : a.num_heads / F::CLUSTER;
  if (F::KEY_PASS) return {block * F::CLUSTER + rank_of_cta<F>(), head % per_batch, head / per_batch};
  return {a.blocks - 1 - block, head % per_batch * F::CLUSTER + rank_of_cta<F>(), head / per_batch};
}

// Query t sees keys from this bound on; queries up to it see key t. Rows past the last count as the last.
template <class F> DEVICE int bound_of(const HopperArguments &a, WorkTile w, int t) {
  const int64_t first = w.batch * (int64_t)a.seq_len;
  t = min(t, a.seq_len - 1);
  return F::KEY_PASS ? a.documents.end(first, t, a.seq_len) : a.documents.start(first, t);
}

// --- rings of tiles ----------------------------------------------------------------------------------------

template <int STAGES, int CLUSTER> struct Barriers {
  uint64_t full[STAGES], free[STAGES];
  DEVICE void init(int warps) { // warps of each CTA that release a stage
    for (int i = 0; i < STAGES; i++) mbarrier_init(&full[i], 1), mbarrier_init(&free[i], warps * CLUSTER);
  }
  // Tells the producers of all CTAs that this warp has read a stage.
  DEVICE void release(int which) {
    const int lane = threadIdx.x % 32;
    if constexpr (CLUSTER == 1) {
      if (lane == 0) mbarrier_arrive(&free[which]);
    } else {
      if (lane < CLUSTER) mbarrier_arrive_remote(&free[which], lane);
    }
  }
};

// The position of the producer, or of a consumer's warp, in a ring.
template <int STAGES, int CLUSTER> struct PipelineState {
  Barriers<STAGES, CLUSTER> &barriers;
  int stage = 0, phase = 0;

  DEVICE explicit PipelineState(Barriers<STAGES, CLUSTER> &b) : barriers(b) {}
  DEVICE int advance() {
    int now = stage;
    if (++stage == STAGES) stage = 0, phase ^= 1;
    return now;
  }
  // Returns the producer's next stage once it is free.
  DEVICE int acquire() {
    mbarrier_wait(&barriers.free[stage], phase ^ 1);
    return advance();
  }
  // Waits until a consumer's next tile has arrived.
  DEVICE void wait() { mbarrier_wait(&barriers.full[stage], phase); }
  // Returns a consumer's next stage once its tile has arrived; it may be released at once. The warp meets
  // in uniform(): a lane that lags behind a release would miss its phase.
  DEVICE int take() {
    wait();
    return uniform(advance());
  }
  DEVICE void release(int which) { barriers.release(which); }
};

// Loads rows [token, token + ROWS) of a head of D elements as tiles of BOX by 64, one below the other. The
// CTAs of a cluster take them in turn, each for all.
template <int D, int ROWS, int CLUSTER = 1, int BOX = TILE>
DEVICE void load_rows(const bf16 *to, const CUtensorMap *map, uint64_t *barrier, int head, int token,
                      int batch) {
  constexpr int PARTS = ROWS / BOX;
  static_assert(ROWS % BOX == 0 && D / 64 * PARTS % CLUSTER == 0, "whole tiles, as many for each CTA");
  const int rank = blockIdx.x % CLUSTER;
  for (int box = rank; box < D / 64 * PARTS; box += CLUSTER) {
    const uint32_t place = shared_address(to) + box * (BOX * 128);
    const int column = box / PARTS * 64, row = token + box % PARTS * BOX;
    if constexpr (CLUSTER == 1)
      tma_load_4d(place, map, barrier, column, head, row, batch);
    else
      tma_load_4d_multicast(place, map, barrier, column, head, row, batch, (1 << CLUSTER) - 1);
  }
}

// Tells the producer of a cluster's second CTA which work the first's took. There is a place more than buffers
// of resident operands: when work n is sent, the sender has acquired a buffer for n - 1, so all
// consumers have finished n - 1 - RESIDENT, whose place it takes.
template <int RESIDENT> struct Mailbox {
  Barriers<RESIDENT + 1, 1> ring; // full ones only
  int work[RESIDENT + 1];
  DEVICE void init() { ring.init(1); }
};

// Runs the producer: load(slot, barrier, work tile) starts a work tile's loads, its resident operands into
// `slot`. The index of a work tile past the last ends the consumers.
template <class F, class Load>
DEVICE void produce_work(typename F::SharedStorage &shared, const HopperArguments &a, uint32_t resident_bytes,
                         Load load) {
  PipelineState resident(shared.resident_ring);
  PipelineState mail(shared.mailbox.ring);
  auto next_index = [&]() {
    const bool takes = rank_of_cta<F>() == 0;
    int index = takes ? (int)gridDim.x / F::CLUSTER + atomicAdd(a.counter, 1) : 0;
    if constexpr (F::CLUSTER > 1) {
      static_assert(F::CLUSTER == 2, "one CTA to send to");
      uint64_t *there = &shared.mailbox.ring.full[mail.stage];
      if (takes) {
        store_async_remote(&shared.mailbox.work[mail.stage], index, there, 1);
      } else {
        mbarrier_arrive_expect_tx(there, sizeof index);
        mail.wait();
        index = shared.mailbox.work[mail.stage];
      }
      mail.advance();
    }
    return index;
  };
  for (int index = blockIdx.x / F::CLUSTER;; index = next_index()) {
    const bool end = index >= a.work;
    const int slot = resident.acquire();
    shared.work[slot] = index;
    mbarrier_arrive_expect_tx(&shared.resident_ring.full[slot], end ? 0 : resident_bytes);
    if (end) return;
    load(slot, &shared.resident_ring.full[slot], work_tile<F>(a, index));
  }
}

// --- GEMMs -------------------------------------------------------------------------------------------------

// d (+)= x y^T over D columns: x the warpgroup's 64 of ROWS resident rows, y a tile of COLUMNS rows.
template <int D, int ROWS, int COLUMNS>
DEVICE void scores(float (&d)[COLUMNS / 2], uint32_t x, uint32_t y, bool add) {
  EACH (i, D / 16)
    wgmma<COLUMNS>(d, x + i / 4 * (ROWS * 128 / 16) + i % 4 * 2, y + i / 4 * (COLUMNS * 128 / 16) + i % 4 * 2,
                   add || i > 0);
}

// d += p y, p [64, 16 N] in registers, y a tile of 16 N rows.
template <int D, int N> DEVICE void accumulate(float (&d)[D / 2], const uint32_t (&p)[N][4], uint32_t y) {
  EACH (i, N) wgmma<D>(d, p[i], y + i * (16 * 128 / 16), true);
}

template <int N> DEVICE void to_operands(uint32_t (&r)[N][4], const float (&x)[N * 8]) {
  EACH (i, N)
    EACH (j, 4) r[i][j] = pack_bf16(x[i * 8 + 2 * j], x[i * 8 + 2 * j + 1]);
  wgmma_fence_operand(r);
}

// Waits until a warpgroup's four warps have read its rows of a resident operand, which then take results.
DEVICE void warpgroup_sync(int group) {
  named_barrier_sync<128>(group + 1);
}

// Stores a warp's 16 rows of results from `row` on; x: the warpgroup's rows of a resident operand.
template <int D, int ROWS, class Sum>
DEVICE void store_results(Sum sum, uint32_t x, bf16 *matrix, int64_t stride, int row, int limit) {
  const uint32_t buffer = x + threadIdx.x % 128 / 32 * 16 * 128;
  store_rows<1, D>(
      [&](int, int n, int i) { return sum(n, i); }, 1,
      [=](int r, int c) { return buffer + c / 8 * (ROWS * 128) + r * 128 + ((c % 8) ^ (r & 7)) * 16; },
      matrix, stride, row, limit);
}

// --- the kernel --------------------------------------------------------------------------------------------

template <class F>
__global__ void __launch_bounds__((F::WARPGROUPS + 1) * 128, 1)
    hopper_kernel(const __grid_constant__ typename F::Arguments a) {
#if defined(HOPPER_CODE)
  using Shared = typename F::SharedStorage;
  extern __shared__ unsigned char shared_bytes[];
  Shared &shared = *reinterpret_cast<Shared *>(((uintptr_t)shared_bytes + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    shared.init_barriers(F::WARPGROUPS * 4);
    if constexpr (F::CLUSTER > 1) shared.mailbox.init();
    mbarrier_init_fence();
  }
  if constexpr (F::CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  if (threadIdx.x / 128 == F::WARPGROUPS) {
    // Registers per thread; more in all than at the start, and the consumers would wait for ever.
    setmaxnreg_dec<F::PRODUCER_REGISTERS>();
    if (threadIdx.x == F::WARPGROUPS * 128) produce(shared, a);
  } else {
    setmaxnreg_inc<F::WARPGROUPS == 3 ? 160 : (504 - F::PRODUCER_REGISTERS) / 2>();
    consume(shared, a);
  }
  if constexpr (F::CLUSTER > 1) { // no CTA leaves while the other may still arrive at its barriers
    __syncwarp();
    cluster_sync();
  }
#endif
}

// --- host --------------------------------------------------------------------------------------------------

// Describes [batch, token, head, element] to TMA in tiles of `rows` tokens and 64 elements of one head.
static bool describe(CUtensorMap *map, Tensor t, AttentionShape s, int64_t heads, int rows = TILE) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = tma_encoder(); // found where hopper_runs()
  cuuint64_t dims[4] = {(cuuint64_t)s.head_dim, (cuuint64_t)heads, (cuuint64_t)s.seq_len,
                        (cuuint64_t)s.batch};
  cuuint64_t strides[3] = {(cuuint64_t)s.head_dim * 2, (cuuint64_t)t.stride * 2,
                           (cuuint64_t)s.seq_len * (cuuint64_t)t.stride * 2};
  cuuint32_t tile[4] = {64, 1, (cuuint32_t)rows, 1}, steps[4] = {1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, t.data, dims, strides, tile, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Fills in what does not depend on the pass; false if TMA cannot describe the tensor.
static bool set_arguments(HopperArguments *a, Tensor qkv, Tensor documents, AttentionShape s, int *counter) {
  a->counter = counter;
  a->batch = (int)s.batch, a->seq_len = (int)s.seq_len;
  a->num_heads = (int)s.num_heads, a->num_key_value_heads = (int)s.num_key_value_heads;
  a->scale = 1 / sqrtf((float)s.head_dim), a->scale_log2 = a->scale * LOG2_E;
  a->documents = documents_of(documents);
  return describe(&a->qkv, qkv, s, s.num_heads + 2 * s.num_key_value_heads);
}

// True for sequences so long that clusters are faster for heads of 128: their CTAs wait for each other. Tests
// have short ones, and LCE_CLUSTER_TOKENS=1 in the environment.
static bool clusters_pay(AttentionShape s) {
  const char *least = getenv("LCE_CLUSTER_TOKENS");
  return s.seq_len >= (least ? atoi(least) : 4096);
}

// True if two query heads that share keys and values make a cluster.
static bool heads_pair(AttentionShape s) {
  return clusters_pay(s) && s.num_heads / s.num_key_value_heads % 2 == 0;
}

template <class F> static void launch(Backend *backend, typename F::Arguments a) {
  const int64_t group = a.num_heads / a.num_key_value_heads;
  a.blocks = (int)ceil_div(a.seq_len, F::ROWS * (F::KEY_PASS ? F::CLUSTER : 1));
  a.heads = a.batch * (F::KEY_PASS ? a.num_key_value_heads : a.num_heads / F::CLUSTER);
  a.work = a.heads * a.blocks;
  // A head streams the q and dout of a group of query heads, or k and v, which a cluster's group shares.
  int64_t streams = F::KEY_PASS ? group : 1, fit = max_i64(1, (24 << 20) / (streams * a.seq_len * F::D * 4));
  a.heads_at_a_time = (int)min_i64(a.heads, F::KEY_PASS || F::CLUSTER == 1 ? fit : fit * group / F::CLUSTER);
  int64_t clusters = min_i64(cuda_state(backend)->multiprocessors / F::CLUSTER, a.work);
  launch_kernel({"attention", cuda_stream(backend), clusters * F::CLUSTER, (F::WARPGROUPS + 1) * 128, false,
                 sizeof(typename F::SharedStorage) + 1024, F::CLUSTER > 1 ? F::CLUSTER : 0},
                hopper_kernel<F>, a);
}

} // namespace attention
