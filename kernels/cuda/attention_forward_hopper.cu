// Attention, forward, for Hopper: attention_forward.cu's order of work with wgmma and TMA, warp-specialised
// (FlashAttention-3; Shah et al. 2024).
//
// A CTA owns ROWS queries of one head, 64 for each consumer warpgroup, and walks over the keys in tiles of
// KEYS from the diagonal back to the start (attention_hopper.cuh has the producer and the order of work). S =
// Q K^T by wgmma from shared memory; softmax in registers with a running maximum m and sum l of each row; P =
// exp(S - m), rounded to bf16, is the A operand of O += P V. Two overlaps:
//   within a consumer    S of the next tile is issued before P V of this one, and its softmax runs under it;
//   between consumers    ping-pong: they issue GEMMs in turn, and one's softmax runs under the others'.
// K and V tiles lie in rings of their own, so that S starts when K has arrived.
//
// Why there is no deadlock: number a cluster's steps by its key tiles, in the order of loading; its CTAs have
// the same. Each consumer takes part in every step, if only to skip it, and turns follow the order of (step,
// consumer). In step j a consumer waits for its turn, K_j and V_{j-1} (where it skips, K_j and V_j), and at
// its end it holds only V_j. The producer loads K_0, K_1, V_0, K_2, V_1, ...: for V_j, K_{j+1-KEY_STAGES} and
// V_{j-VALUE_STAGES} must have been released by both CTAs, which happens in steps up to j + 1 - KEY_STAGES
// and j + 1 - VALUE_STAGES: with two stages or more, before step j.
//
// Memory traffic: q and out once, k and v once per ROWS queries of a cluster's heads, mostly from L2. For
// heads of 128 L2 is a limit: without clusters and in tiles of 128 queries it gives 4.5 TB/s. Arithmetic:
// 4 B Q T^2 D / 2.
#include "kernels/cuda/attention_hopper.cuh"

namespace attention {

struct HopperForwardArguments : HopperArguments {
  CUtensorMap keys; // qkv in tiles of BOX rows, where that is not TILE
  bf16 *out;
  float *lse;
  int64_t out_stride, lse_stride; // elements per row
};

template <class F> struct ForwardStorage;

// CLUSTER: query heads that share keys and values, 1 or 2. For heads of 128 three consumers and shorter tiles
// read a third less from L2; where bounds of documents take registers, two consumers have more of them.
template <int D_, bool PACKED_, int CLUSTER_ = 1> struct ForwardTraits {
  static constexpr bool TALL = D_ == 128 && CLUSTER_ > 1 && !PACKED_;
  static constexpr int D = D_, WARPGROUPS = D == 64 || TALL ? 3 : 2, ROWS = WARPGROUPS * TILE,
                       CLUSTER = CLUSTER_, KEYS = TALL ? 80 : 128, BOX = TALL ? KEYS / 2 : TILE; // TMA's rows
  static constexpr int PRODUCER_REGISTERS = WARPGROUPS == 3 ? 32 : CLUSTER > 1 ? 40 : 24;
  static constexpr bool KEY_PASS = false, PACKED = PACKED_;
  // A row's maximum is raised, and its sums rescaled, once a score exceeds it by 2 to this power (as in
  // FlashAttention-4): until then P is at most 2^8.
  static constexpr float MAX_RISE = 8;
  using Arguments = HopperForwardArguments;
  using SharedStorage = ForwardStorage<ForwardTraits>;
};

template <class F> struct ForwardStorage {
  static constexpr int RESIDENT = 2; // buffers of queries
  static constexpr int CLUSTER = F::CLUSTER, KEYS = F::KEYS;
  static constexpr int KEY_STAGES = F::D == 64 ? 5 : 3, VALUE_STAGES = F::D == 64 ? 5 : KEYS < 128 ? 3 : 2;
  static_assert(KEY_STAGES >= 2 && VALUE_STAGES >= 2, "a consumer would wait for a tile that waits for it");
  alignas(1024) bf16 queries[RESIDENT][F::ROWS * F::D];
  bf16 keys[KEY_STAGES][KEYS * F::D], values[VALUE_STAGES][KEYS * F::D];
  Barriers<RESIDENT, CLUSTER> resident_ring;
  Barriers<KEY_STAGES, CLUSTER> key_ring;
  Barriers<VALUE_STAGES, CLUSTER> value_ring;
  Mailbox<RESIDENT> mailbox;
  int work[RESIDENT];

  DEVICE void init_barriers(int warps) {
    resident_ring.init(warps), key_ring.init(warps), value_ring.init(warps);
  }
};

// The key tiles that any of a work tile's queries sees: [first, end).
struct KeyTiles {
  int first, end;
};

template <class F> DEVICE KeyTiles key_tiles(const HopperForwardArguments &a, WorkTile w) {
  const int first_row = w.block * F::ROWS;
  return {F::PACKED ? bound_of<F>(a, w, first_row) / F::KEYS : 0,
          (min(first_row + F::ROWS, a.seq_len) + F::KEYS - 1) / F::KEYS};
}

template <class F> DEVICE void produce(ForwardStorage<F> &shared, const HopperForwardArguments &a) {
  constexpr int D = F::D, KEYS = F::KEYS;
  constexpr uint32_t TILE_OF_KEYS = sizeof shared.keys[0];
  const CUtensorMap *key_map = F::BOX == TILE ? &a.qkv : &a.keys;
  PipelineState keys(shared.key_ring);
  PipelineState values(shared.value_ring);
  produce_work<F>(shared, a, sizeof shared.queries[0], [&](int slot, uint64_t *full, WorkTile w) {
    const int key_head = a.num_heads + w.head / (a.num_heads / a.num_key_value_heads);
    auto load_values = [&](int tile) {
      const int stage = values.acquire();
      mbarrier_arrive_expect_tx(&shared.value_ring.full[stage], TILE_OF_KEYS);
      load_rows<D, KEYS, F::CLUSTER, F::BOX>(shared.values[stage], key_map, &shared.value_ring.full[stage],
                                             key_head + a.num_key_value_heads, tile * KEYS, w.batch);
    };
    load_rows<D, F::ROWS>(shared.queries[slot], &a.qkv, full, w.head, w.block * F::ROWS, w.batch);
    const KeyTiles tiles = key_tiles<F>(a, w);
#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.first; tile--) {
      const int stage = keys.acquire();
      mbarrier_arrive_expect_tx(&shared.key_ring.full[stage], TILE_OF_KEYS);
      load_rows<D, KEYS, F::CLUSTER, F::BOX>(shared.keys[stage], key_map, &shared.key_ring.full[stage],
                                             key_head, tile * KEYS, w.batch);
      if (tile < tiles.end - 1) load_values(tile + 1);
    }
    load_values(tiles.first);
  });
}

// Consumers issue their GEMMs in turn: each waits at its named barrier (4 to 6) until the one before arrives.
template <class F> DEVICE void take_turn(int group) {
  named_barrier_sync<256>(4 + group);
}
template <class F> DEVICE void pass_turn(int group) {
  named_barrier_arrive<256>(4 + (group + 1 == F::WARPGROUPS ? 0 : group + 1));
}

template <class F> DEVICE void consume(ForwardStorage<F> &shared, const HopperForwardArguments &a) {
  constexpr int D = F::D, ROWS = F::ROWS, KEYS = F::KEYS;
  const int group = uniform(threadIdx.x / 128), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32,
            g = lane / 4, q = lane % 4;
  PipelineState keys(shared.key_ring);
  PipelineState values(shared.value_ring);
  float s[KEYS / 2], o[D / 2];
  uint32_t p[KEYS / 16][4];

  if (group == F::WARPGROUPS - 1) pass_turn<F>(group); // the first consumer's first
  for (int n = 0;; n++) {
    // Counts instead of using a PipelineState, whose phase hides from ptxas that a warp's lanes agree.
    const int slot = n % ForwardStorage<F>::RESIDENT;
    mbarrier_wait(&shared.resident_ring.full[slot], n / ForwardStorage<F>::RESIDENT & 1);
    const int index = uniform(shared.work[slot]);
    if (index >= a.work) return;
    const WorkTile w = work_tile<F>(a, index);
    const KeyTiles tiles = key_tiles<F>(a, w);
    const int first_row = w.block * ROWS + group * TILE; // the warpgroup's first
    const bool any = first_row < a.seq_len;
    // It works on tiles [first, last], of which `last` holds the diagonal of all its rows; where KEYS is no
    // multiple of 64, perhaps of its later rows only.
    const int last_row = KEYS % TILE ? min(first_row + TILE, a.seq_len) - 1 : first_row;
    const int last = any ? last_row / KEYS : tiles.first - 1;
    const int first = F::PACKED && any ? bound_of<F>(a, w, first_row) / KEYS : tiles.first;
    // Its rows begin in different documents in tiles that begin before this.
    const int edge = F::PACKED ? bound_of<F>(a, w, first_row + TILE - 1) : 0;
    const uint32_t x = uniform(shared_address(shared.queries[slot]) + group * TILE_BYTES);
    const int row = first_row + warp * 16 + g;                 // the thread's first; the other is 8 further
    constexpr float LOWEST = KEYS % TILE ? -1e30f : -INFINITY; // a row may see no key of the first tile
    float max[2] = {LOWEST, LOWEST}, sum[2] = {0, 0}, rescale[2];
    bool rises;
    EACH (i, D / 2) o[i] = 0;

    auto skip = [&](int count) {
#pragma unroll 1
      for (int i = 0; i < count; i++) {
        take_turn<F>(group);
        pass_turn<F>(group);
        keys.release(keys.take());
        values.release(values.take());
      }
    };
    // Addresses of a stage's tiles, known before the turn: the tensor cores wait from one turn to the next.
    auto keys_at = [&](int stage) {
      return uniform(shared_address(shared.keys) + stage * (uint32_t)sizeof shared.keys[0]);
    };
    auto values_at = [&](int stage) {
      return uniform(shared_address(shared.values) + stage * (uint32_t)sizeof shared.values[0]);
    };
    // s = Q K^T
    auto issue_scores = [&](uint32_t y) {
      wgmma_fence();
      scores<D, ROWS, KEYS>(s, descriptor_k_major(x), descriptor_k_major(y), false);
      wgmma_commit();
    };
    // o += P V
    auto issue_values = [&](uint32_t y) {
      wgmma_fence();
      accumulate<D>(o, p, descriptor_mn_major(y, KEYS * 128));
      wgmma_commit();
    };
    auto mask = [&](int tile) { // the diagonal
      EACH (i, KEYS / 2)
        if (tile * KEYS + i / 4 * 8 + 2 * q + (i & 1) > row + (i >> 1 & 1) * 8) s[i] = -INFINITY;
    };
    // s becomes P, and sum follows; where a row of the warp `rises`, max follows too, and `rescale` brings
    // earlier sums to the new maxima. The first tile has a key for every row, so no maximum stays -infinity.
    auto softmax = [&](int tile) {
      if (F::PACKED && tile * KEYS < edge) {
        EACH (half, 2) {
          const int start = bound_of<F>(a, w, row + half * 8) - tile * KEYS;
          EACH (i, KEYS / 4)
            if (i / 2 * 8 + 2 * q + (i & 1) < start) s[i / 2 * 4 + half * 2 + (i & 1)] = -INFINITY;
        }
      }
      float largest[2];
      EACH (half, 2) {
        largest[half] = s[half * 2];
        EACH (j, KEYS / 8)
          largest[half] = fmaxf(largest[half], fmaxf(s[j * 4 + half * 2], s[j * 4 + half * 2 + 1]));
      }
      rises = __any_sync(~0u, (largest[0] - max[0]) * a.scale_log2 > F::MAX_RISE ||
                                  (largest[1] - max[1]) * a.scale_log2 > F::MAX_RISE);
      if (rises) {
        EACH (half, 2) {
          float row = fmaxf(max[half], largest[half]);
          row = fmaxf(row, __shfl_xor_sync(~0u, row, 1));
          row = fmaxf(row, __shfl_xor_sync(~0u, row, 2));
          rescale[half] = exp2_approx((max[half] - row) * a.scale_log2);
          sum[half] *= rescale[half];
          max[half] = row;
        }
      }
      EACH (half, 2) {
        const float shift = max[half] * a.scale_log2;
        EACH (i, KEYS / 4) {
          float &e = s[i / 2 * 4 + half * 2 + (i & 1)];
          e = exp2_approx(fmaf(e, a.scale_log2, -shift));
          sum[half] += e; // the thread's columns
        }
      }
    };

    skip(tiles.end - 1 - last);
    if (any) {
      int key = keys.take();
      const uint32_t k = keys_at(key);
      take_turn<F>(group);
      issue_scores(k);
      pass_turn<F>(group);
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      keys.release(key);
      mask(last);
      softmax(last);
      to_operands(p, s);
      for (int tile = last - 1; tile >= first; tile--) {
        key = keys.take();
        const int value = values.take();
        const uint32_t k = keys_at(key), v = values_at(value);
        take_turn<F>(group);
        issue_scores(k);
        issue_values(v);
        pass_turn<F>(group);
        wgmma_wait<1>(); // s
        wgmma_fence_operand(s);
        keys.release(key);
        if (KEYS % TILE && (tile + 1) * KEYS > first_row) mask(tile);
        softmax(tile);
        wgmma_wait_after(sum[0] + sum[1]);
        wgmma_fence_operand(o);
        values.release(value);
        if (rises) {
          EACH (i, D / 2) o[i] *= rescale[i >> 1 & 1];
        }
        to_operands(p, s);
      }
      const int value = values.take();
      issue_values(values_at(value));
      wgmma_wait<0>();
      wgmma_fence_operand(o);
      values.release(value);
      skip(first - tiles.first);
    }

    EACH (half, 2) {
      float total = sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (q == 0 && row + half * 8 < a.seq_len)
        a.lse[w.batch * a.lse_stride + (int64_t)w.head * a.seq_len + row + half * 8] =
            max[half] * a.scale + logf(total);
      sum[half] = 1 / total;
    }
    warpgroup_sync(group); // all four warps have read the queries, whose rows take the results
    store_results<D, ROWS>([&](int n, int i) { return o[n * 4 + i] * sum[i >> 1]; }, x,
                           a.out + (int64_t)w.batch * a.seq_len * a.out_stride + w.head * D, a.out_stride,
                           first_row + warp * 16, a.seq_len);
    fence_proxy_async(); // TMA writes there next
    __syncwarp();
    shared.resident_ring.release(slot);
  }
}

} // namespace attention

bool attention_hopper_forward(Backend *backend, const AttentionForward *f, int *counter) {
  using namespace attention;
  HopperForwardArguments a = {};
  if (!hopper_runs(backend) || !set_arguments(&a, f->qkv, f->documents, f->shape, counter)) return false;
  a.out = data_of<bf16>(f->out), a.out_stride = f->out.stride;
  a.lse = data_of<float>(f->lse), a.lse_stride = f->lse.stride;
  const bool pairs = heads_pair(f->shape), packed = tensor_exists(f->documents);
  const auto run = [&](auto traits) {
    using F = decltype(traits);
    if (F::BOX != TILE &&
        !describe(&a.keys, f->qkv, f->shape, a.num_heads + 2 * a.num_key_value_heads, F::BOX))
      return false;
    cuda_check(cudaMemsetAsync(counter, 0, sizeof *counter, cuda_stream(backend)), "clearing a counter");
    launch<F>(backend, a);
    return true;
  };
  if (f->shape.head_dim == 64)
    return packed ? run(ForwardTraits<64, true>()) : run(ForwardTraits<64, false>());
  if (packed) return pairs ? run(ForwardTraits<128, true, 2>()) : run(ForwardTraits<128, true>());
  return pairs ? run(ForwardTraits<128, false, 2>()) : run(ForwardTraits<128, false>());
}
