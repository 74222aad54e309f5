// Attention, backward, for Hopper: attention_backward.cu's two passes with wgmma and TMA, warp-specialised.
//
// The two passes are one kernel. Each consumer warpgroup owns 64 rows of two resident operands, and 64-row
// tiles of two others are streamed past the two or three consumers of a CTA:
//             resident      streamed      S and dP          accumulators
//  key pass   k, v          q, dout       S^T, dP^T         dv += P^T dout, dk += dS^T q
//  query pass q, dout       k, v          S, dP             dq += dS k
// In both, S = resident0 streamed0^T and dP = resident1 streamed1^T, and P and dS, rounded to bf16 in
// registers, are A operands of the GEMMs that follow. Only TMA writes to shared memory. The bias gradient of
// q, k and v starts here too: column sums of these accumulators, before they are rounded.
//
// While one consumer exponentiates, the others' MMAs keep the tensor cores busy, and where registers allow a
// consumer's MMAs of one step run under its exponentials of the next. On an H200 the tensor cores are busy
// 54% (key) and 72% (query) of the time for heads of 64 at T 4096, 79% and 94% for heads of 128 at T 8192,
// there without clusters.
#include "kernels/cuda/attention_hopper.cuh"

namespace attention {

static_assert(TILE == STATISTICS_TILE, "a streamed tile of queries comes with one piece of statistics");

struct HopperBackwardArguments : HopperArguments {
  CUtensorMap dout;
  bf16 *dqkv;
  int64_t dqkv_stride;
  const float *statistics;
  float *partials; // [slices, (Q + 2K) D], dqkv's sums over each 64 rows; NULL: not wanted
};

template <class F> struct BackwardStorage;

// A pass: heads of D elements, WARPGROUPS consumers of 64 rows each; PACKED: sequences of several documents.
// CLUSTER: neighbouring blocks of keys, or query heads that share keys and values.
template <int D_, bool KEY_PASS_, int WARPGROUPS_, bool OVERLAP_, bool PACKED_, int CLUSTER_ = 1>
struct PassTraits {
  static constexpr int D = D_, WARPGROUPS = WARPGROUPS_, ROWS = WARPGROUPS * TILE, CLUSTER = CLUSTER_;
  static constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : 24;
  static constexpr bool KEY_PASS = KEY_PASS_, PACKED = PACKED_;
  // True: one step's MMAs run under the next step's exponentials, which takes more registers.
  static constexpr bool OVERLAP = OVERLAP_;
  using Arguments = HopperBackwardArguments;
  using SharedStorage = BackwardStorage<PassTraits>;
};

// A work tile's streamed tiles: [first, end) for each of `heads` query heads.
struct Tiles {
  int first, end, heads;
};

template <class F> DEVICE Tiles tiles_of(const HopperBackwardArguments &a, WorkTile w) {
  const int first_row = w.block * F::ROWS, all = (a.seq_len + TILE - 1) / TILE;
  if (F::KEY_PASS) { // the tiles of a cluster's blocks
    const int block = w.block / F::CLUSTER * F::CLUSTER, last_row = (block + F::CLUSTER) * F::ROWS - 1;
    int end = F::PACKED ? (bound_of<F>(a, w, last_row) + TILE - 1) / TILE : all;
    return {block * F::WARPGROUPS, end, a.num_heads / a.num_key_value_heads};
  }
  return {F::PACKED ? bound_of<F>(a, w, first_row) / TILE : 0, min(all, (w.block + 1) * F::WARPGROUPS), 1};
}

template <class F> struct BackwardStorage {
  static constexpr int HALVES = F::D / 64;            // tiles of 64 columns per row
  static constexpr int RESIDENT = F::D == 64 ? 2 : 1; // buffers of resident operands
  static constexpr int STAGES = F::D == 64 ? 4 : 3;   // buffers of streamed tiles
  // With OVERLAP a consumer holds a tile while it waits; a key pass's next head may begin with tiles to skip.
  static_assert(STAGES > F::OVERLAP * (F::KEY_PASS ? F::WARPGROUPS : 1), "a tile would never come");
  alignas(1024) bf16 resident[RESIDENT][2][HALVES][F::ROWS * 64];
  bf16 streamed[STAGES][2][HALVES][TILE * 64];
  float statistics[STAGES][2][TILE]; // of streamed queries
  Barriers<RESIDENT, F::CLUSTER> resident_ring;
  Barriers<STAGES, F::CLUSTER> streamed_ring;
  Mailbox<RESIDENT> mailbox;
  int work[RESIDENT];
  float sums[2][F::WARPGROUPS][F::KEY_PASS ? 2 : 1][4][F::D]; // results', by warp; two work tiles alternate

  DEVICE void init_barriers(int warps) { resident_ring.init(warps), streamed_ring.init(warps); }
};

template <class F> DEVICE void produce(BackwardStorage<F> &shared, const HopperBackwardArguments &a) {
  constexpr int D = F::D;
  constexpr bool KEY_PASS = F::KEY_PASS;
  const int first_key = a.num_heads, first_value = first_key + a.num_key_value_heads,
            group = a.num_heads / a.num_key_value_heads;
  PipelineState pipeline(shared.streamed_ring);
  produce_work<F>(shared, a, sizeof shared.resident[0], [&](int slot, uint64_t *full, WorkTile w) {
    load_rows<D, F::ROWS>(shared.resident[slot][0][0], &a.qkv, full, w.head + (KEY_PASS ? first_key : 0),
                          w.block * F::ROWS, w.batch);
    load_rows<D, F::ROWS>(shared.resident[slot][1][0], KEY_PASS ? &a.qkv : &a.dout, full,
                          w.head + (KEY_PASS ? first_value : 0), w.block * F::ROWS, w.batch);
    const Tiles tiles = tiles_of<F>(a, w);
    for (int h = 0; h < tiles.heads; h++)
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.end; tile++) {
        const int head = KEY_PASS ? w.head * group + h : w.head / group; // whose rows are streamed
        const int stage = pipeline.acquire();
        uint64_t *there = &shared.streamed_ring.full[stage];
        mbarrier_arrive_expect_tx(there, sizeof shared.streamed[stage] +
                                             (KEY_PASS ? sizeof shared.statistics[stage] : 0));
        load_rows<D, TILE, F::CLUSTER>(shared.streamed[stage][0][0], &a.qkv, there,
                                       head + (KEY_PASS ? 0 : first_key), tile * TILE, w.batch);
        load_rows<D, TILE, F::CLUSTER>(shared.streamed[stage][1][0], KEY_PASS ? &a.dout : &a.qkv, there,
                                       head + (KEY_PASS ? 0 : first_value), tile * TILE, w.batch);
        if (KEY_PASS)
          bulk_load(shared.statistics[stage],
                    statistics_of(a.statistics, w.batch * a.num_heads + head, a.seq_len) + tile * (2 * TILE),
                    sizeof shared.statistics[stage], there);
      }
  });
}

// Loads two floats from shared memory; for a plain load the compiler would use generic addresses.
DEVICE float2 load_shared(const float *from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(shared_address(from))
               : "memory");
  return x;
}

// Sums the columns of a warp's 16 rows, times scale, into shared memory. Each step halves a lane's columns.
template <int D> DEVICE void sum_columns(float *to, const float (&x)[D / 2], float scale) {
  const int lane = threadIdx.x % 32;
  float sums[D / 4];
  EACH (i, D / 4) sums[i] = x[i / 2 * 4 + i % 2] + x[i / 2 * 4 + i % 2 + 2];
  EACH (step, 3) add_halves(sums, D / 8 >> step, 16 >> step);
  EACH (i, D / 32) {
    const int place = lane / 4 * (D / 32) + i;
    to[place / 2 * 8 + lane % 4 * 2 + place % 2] = sums[i] * scale;
  }
}

template <class F> DEVICE void consume(BackwardStorage<F> &shared, const HopperBackwardArguments &a) {
  constexpr int D = F::D, ROWS = F::ROWS;
  constexpr bool KEY_PASS = F::KEY_PASS;
  const int group = uniform(threadIdx.x / 128), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32,
            g = lane / 4, q = lane % 4;
  PipelineState pipeline(shared.streamed_ring);
  float s[TILE / 2] = {}, dp[TILE / 2] = {};
  float2 shift[TILE / 8];                           // per column of the tile, in a key pass
  float first[D / 2], second[KEY_PASS ? D / 2 : 2]; // dk and dv, or dq
  uint32_t p[KEY_PASS ? TILE / 16 : 1][4], ds[TILE / 16][4];

  auto skip = [&](int count) {
#pragma unroll 1
    for (int i = 0; i < count; i++) pipeline.release(pipeline.take());
  };
  for (int n = 0;; n++) {
    // Counts instead of using a PipelineState, whose phase hides from ptxas that a warp's lanes agree.
    const int slot = n % BackwardStorage<F>::RESIDENT;
    mbarrier_wait(&shared.resident_ring.full[slot], n / BackwardStorage<F>::RESIDENT & 1);
    const int index = uniform(shared.work[slot]);
    if (index >= a.work) return;
    const WorkTile w = work_tile<F>(a, index);
    const Tiles tiles = tiles_of<F>(a, w);
    const int first_row = w.block * ROWS + group * TILE; // the warpgroup's first
    const uint32_t x0 = uniform(shared_address(shared.resident[slot][0]) + group * TILE_BYTES);
    const uint32_t x1 = x0 + sizeof shared.resident[0][0];
    // The warpgroup skips the first `before` and the last `after` of each query head's tiles.
    const int first_tile = first_row / TILE;
    const int before = KEY_PASS ? min(first_tile, tiles.end) - tiles.first : 0;
    const int after = KEY_PASS ? 0 : tiles.end - (first_row < a.seq_len ? first_tile + 1 : tiles.first);
    const int steps = tiles.heads * (tiles.end - tiles.first - before - after);
    // The warpgroup's rows see different documents in tiles that end after this, or begin before it.
    const int edge = !F::PACKED ? 0 : bound_of<F>(a, w, KEY_PASS ? first_row : first_row + TILE - 1);

    float row_shift[2] = {}, row_minus_delta[2] = {};
    if constexpr (!KEY_PASS) {
      const float *statistics = statistics_of(a.statistics, w.batch * a.num_heads + w.head, a.seq_len);
      EACH (half, 2) {
        int t = first_row + warp * 16 + half * 8 + g;
        row_shift[half] = t < a.seq_len ? statistics[statistics_place(t)] : 0;
        row_minus_delta[half] = t < a.seq_len ? statistics[statistics_place(t) + TILE] : 0;
      }
    }
    EACH (i, D / 2) first[i] = 0;
    if constexpr (KEY_PASS) {
      EACH (i, D / 2) second[i] = 0;
    }

    auto streamed = [&](int stage) {
      return shared_address(shared.streamed) + stage * (uint32_t)sizeof shared.streamed[0];
    };
    const int first_visible = tiles.first + before, last_visible = tiles.end - after - 1;
    // The latest step's tile. If it were set where tiles are skipped, ptxas would assume that lanes diverge.
    int tile = KEY_PASS ? last_visible : first_visible - 1;
    // Waits for the next step's tile and starts S and dP, in two wgmma groups.
    auto begin = [&]() {
      const bool next_head = KEY_PASS && tile == last_visible;
      tile = next_head ? first_visible : tile + 1;
      if (next_head) skip(before);
      pipeline.wait();
      const int stage = uniform(pipeline.advance());
      EACH (j, TILE / 8) {
        float2 start = make_float2(row_minus_delta[0], row_minus_delta[1]);
        if constexpr (KEY_PASS) start = load_shared(&shared.statistics[stage][1][j * 8 + 2 * q]);
        dp[j * 4] = start.x;
        dp[j * 4 + 1] = KEY_PASS ? start.y : start.x;
        dp[j * 4 + 2] = KEY_PASS ? start.x : start.y;
        dp[j * 4 + 3] = start.y;
      }
      wgmma_fence_operand(dp);
      const uint32_t y = streamed(stage);
      wgmma_fence();
      scores<D, ROWS, TILE>(s, descriptor_k_major(x0), descriptor_k_major(y), false);
      wgmma_commit();
      scores<D, ROWS, TILE>(dp, descriptor_k_major(x1), descriptor_k_major(y + sizeof shared.streamed[0][0]),
                            true);
      wgmma_commit();
      if constexpr (KEY_PASS) { // under the MMAs
        EACH (j, TILE / 8) shift[j] = load_shared(&shared.statistics[stage][0][j * 8 + 2 * q]);
      }
      return stage;
    };
    // s = S becomes P.
    auto exponentiate = [&]() {
      wgmma_fence_operand(s);
      if (F::PACKED && (KEY_PASS ? (tile + 1) * TILE > edge : tile * TILE < edge)) {
        EACH (half, 2) {
          const int bound = bound_of<F>(a, w, first_row + warp * 16 + half * 8 + g) - tile * TILE;
          EACH (i, TILE / 4) {
            const int c = i / 2 * 8 + 2 * q + (i & 1);
            if (KEY_PASS ? c >= bound : c < bound) s[i / 2 * 4 + half * 2 + (i & 1)] = -INFINITY;
          }
        }
      }
      if (tile == first_tile) { // the diagonal
        EACH (i, TILE / 2) {
          int r = warp * 16 + (i >> 1 & 1) * 8 + g, c = i / 4 * 8 + 2 * q + (i & 1);
          if (KEY_PASS ? r > c : c > r) s[i] = -INFINITY;
        }
      }
      EACH (j, TILE / 8) {
        EACH (i, 4)
          s[j * 4 + i] = exp2_approx(fmaf(s[j * 4 + i], a.scale_log2,
                                          KEY_PASS ? (i & 1 ? shift[j].y : shift[j].x) : row_shift[i >> 1]));
      }
    };
    auto round_p = [&]() {
      if constexpr (KEY_PASS) to_operands(p, s);
    };
    auto round_ds = [&]() {
      wgmma_fence_operand(dp);
      EACH (i, TILE / 2) dp[i] *= s[i];
      to_operands(ds, dp);
    };
    auto add_dv = [&](int stage) {
      if constexpr (KEY_PASS) {
        wgmma_fence();
        accumulate<D>(second, p,
                      descriptor_mn_major(streamed(stage) + sizeof shared.streamed[0][0], TILE_BYTES));
        wgmma_commit();
      }
    };
    auto add_dk_or_dq = [&](int stage) {
      wgmma_fence();
      accumulate<D>(first, ds, descriptor_mn_major(streamed(stage), TILE_BYTES));
      wgmma_commit();
    };
    auto finish = [&](int stage) {
      wgmma_wait<0>();
      wgmma_fence_operand(first);
      if constexpr (KEY_PASS) wgmma_fence_operand(second);
      pipeline.release(stage);
    };

    if (steps == 0) {
      skip(tiles.heads * before);
    } else if constexpr (F::OVERLAP) {
      int stage = begin();
      wgmma_wait<1>(); // s
      exponentiate();
      wgmma_wait<0>();
      round_p();
      round_ds();
      for (int step = 1; step < steps; step++) {
        const int next = begin();
        add_dv(stage);
        add_dk_or_dq(stage);
        wgmma_wait<KEY_PASS ? 3 : 2>(); // s
        exponentiate();
        finish(stage);
        round_p();
        round_ds();
        stage = next;
      }
      add_dv(stage);
      add_dk_or_dq(stage);
      finish(stage);
    } else {
      for (int step = 0; step < steps; step++) {
        const int stage = begin();
        wgmma_wait<1>(); // s
        exponentiate();
        round_p();
        add_dv(stage);
        wgmma_wait<KEY_PASS ? 1 : 0>(); // dp
        round_ds();
        add_dk_or_dq(stage);
        finish(stage);
      }
    }
    skip(after);

    if (a.partials) {
      sum_columns<D>(shared.sums[n % 2][group][0][warp], first, a.scale);
      if constexpr (KEY_PASS) sum_columns<D>(shared.sums[n % 2][group][1][warp], second, 1);
    }
    warpgroup_sync(group);
    if (a.partials && first_row < a.seq_len) {
      const int width = (a.num_heads + 2 * a.num_key_value_heads) * D;
      float *to = a.partials + (w.batch * (int64_t)((a.seq_len + TILE - 1) / TILE) + first_tile) * width +
                  ((KEY_PASS ? a.num_heads : 0) + w.head) * D;
      for (int c = threadIdx.x % 128; c < (KEY_PASS ? 2 : 1) * D; c += 128) {
        const float *sums = &shared.sums[n % 2][group][c / D][0][c % D];
        to[c / D * (a.num_key_value_heads * D) + c % D] = sums[0] + sums[D] + sums[2 * D] + sums[3 * D];
      }
    }
    bf16 *rows = a.dqkv + (int64_t)w.batch * a.seq_len * a.dqkv_stride + w.head * D;
    auto store = [&](const float(&sums)[D / 2], float scale, uint32_t x, bf16 *matrix) {
      store_results<D, ROWS>([&](int n, int i) { return sums[n * 4 + i] * scale; }, x, matrix, a.dqkv_stride,
                             first_row + warp * 16, a.seq_len);
    };
    if constexpr (KEY_PASS) {
      rows += a.num_heads * D;
      store(second, 1, x1, rows + a.num_key_value_heads * D);
    }
    store(first, a.scale, x0, rows);
    fence_proxy_async(); // TMA writes there next
    __syncwarp();
    shared.resident_ring.release(slot);
  }
}

} // namespace attention

bool attention_hopper_backward(Backend *backend, const AttentionBackward *b, int *counters, float *partials) {
  using namespace attention;
  AttentionShape s = b->shape;
  HopperBackwardArguments key = {};
  if (!hopper_runs(backend) || !set_arguments(&key, b->qkv, b->documents, s, counters) ||
      !describe(&key.dout, b->dout, s, s.num_heads))
    return false;
  key.dqkv = data_of<bf16>(b->dqkv), key.dqkv_stride = b->dqkv.stride,
  key.statistics = data_of<const float>(b->workspace), key.partials = partials;
  HopperBackwardArguments query = key;
  query.counter++;
  // These were the fastest on an H200 among the forms that fit in the registers.
  with_bool(tensor_exists(b->documents), [&](auto packed) {
    if (s.head_dim == 64) {
      launch<PassTraits<64, true, 2, true, packed>>(backend, key);
      launch<PassTraits<64, false, 3, true, packed>>(backend, query);
    } else {
      if (clusters_pay(s))
        launch<PassTraits<128, true, 2, false, packed, 2>>(backend, key);
      else
        launch<PassTraits<128, true, 2, false, packed>>(backend, key);
      if (heads_pair(s))
        launch<PassTraits<128, false, 3, false, packed, 2>>(backend, query);
      else
        launch<PassTraits<128, false, 3, false, packed>>(backend, query);
    }
  });
  return true;
}
