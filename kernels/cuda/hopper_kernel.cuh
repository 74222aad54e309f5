// GEMMs on Hopper (sm_90a) for the LM head and the MLP: persistent, warp-specialised, with the loss or SwiGLU
// in the epilogue. lce/REFERENCE.md ("On Hopper") has the terms, the reasons and what was measured.
//
// D = A B, A [M, K] and B [K, N] in bf16, fp32 accumulators. An epilogue derives from Epilogue
// (hopper_tiles.cuh) and has a file of its own:
//  hopper_exp.cuh: LogitsExp. A = X [C, H], B = W^T [H, V]. Each logit z becomes E = exp((z - anchor) / T), 0
//      at the target; rows are summed in fp32 and E is stored in bf16. No logit leaves the registers.
//  hopper_store.cuh: Store. A = E [C, V], B = W [V, H]: dX in bf16 or fp32, or as fp32 partials of split-K.
//  hopper_sampled.cuh: AddF32. A = (r X)^T, B = kept tiles of E: sampled dW, written or added to memory.
//  hopper_swiglu.cuh: Swiglu. A = X, B = W^T, a tile of 96 columns of gates and the same 96 of ups: both
//      are stored, and the activation is computed before they leave the SM.
//  hopper_swiglu_gradient.cuh: SwigluGradient. A = dY, B = W of the MLP's down projection: the activation's
//      gradient stays in the accumulators; gate and up are loaded, and their gradients are stored.
//
// A producer warp issues TMA loads of A and B into a ring of shared-memory stages with full and empty
// mbarriers; two consumer warpgroups issue wgmma m64n192k16 and run the epilogue. The two CTAs of a cluster
// have tiles one below the other and multicast the halves of their common B. (Sampled dX: side by side, with
// a common A, so that each 128 rows have a list of k-steps.) All but exact dX are ping-pong (128 x 192):
//  producer     A, B tiles -> stage s, once stage s is empty
//  consumer 0   tile t:    mma mma mma mma | epilogue . . . . . | mma ...
//  consumer 1   tile t+1:  epilogue . . . .| mma mma mma mma .. | epilogue ...
// Exact dX is cooperative: both consumers share a tile of 256 x 192. Its last tile of columns may be
// narrower, by steps of 64. Cluster i takes work tiles i, i + clusters, ...
#pragma once

#include "kernels/cuda/hopper_tiles.cuh"

// The position of a role in the ring. A stage's barriers change phase once a round.
template <typename K> struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  DEVICE void advance(int steps) {
    int to = stage + steps;
    parity ^= to / K::STAGES & 1;
    stage = to % K::STAGES;
  }
  DEVICE void next() {
    if (++stage == K::STAGES) stage = 0, parity ^= 1;
  }
};

// --- the producer ------------------------------------------------------------------------------------------

// Keeps clusters near each other in K. Every INTERVAL steps one producer of each cluster adds 1 to a counter
// in global memory, and waits while it is more than MAX_LEAD intervals ahead of the running clusters'
// average. After MAX_POLLS reads it never waits again: other work may keep clusters from starting.
//
// The counter holds the running clusters' intervals, plus 2^32 for each finished one; the last resets it.
struct ClusterThrottle {
  enum { INTERVAL = 4, MAX_LEAD = 1, MAX_POLLS = 64 };
  unsigned long long *counter, seen = 0; // NULL: no throttle, or left to the cluster's other producer
  unsigned passed = 0;                   // intervals
  int steps_left = INTERVAL;
  bool waits = true;
  __device__ ClusterThrottle(const TileScheduler &s, int rank) : counter(rank == 0 ? s.throttle : nullptr) {}

  DEVICE bool too_far() const {
    unsigned running = work_stride() - (unsigned)(seen >> 32);
    return passed > MAX_LEAD && (unsigned)seen < (passed - MAX_LEAD) * running;
  }

  DEVICE void step(bool elected) {
    if (!counter || --steps_left > 0) return;
    steps_left = INTERVAL;
    for (int polls = 0; waits && too_far(); polls++) {
      seen = load_relaxed(counter);
      waits = polls < MAX_POLLS;
    }
    passed++;
    if (elected) red_add_relaxed(counter, 1);
    seen = load_relaxed(counter);
  }

  DEVICE void finish(bool elected) {
    if (!counter || !elected) return;
    unsigned long long before = atomicAdd(counter, (1ull << 32) - passed);
    if (before >> 32 == work_stride() - 1) *counter = 0;
  }
};

// Loads this CTA's tile of A, or its half for the cluster; k: the first value of K, or of a panel's rows.
template <typename K>
static DEVICE void load_a(uint32_t to, const CUtensorMap *a, uint64_t *full, int row, int k, int rank) {
  constexpr int share = K::ROWS / CLUSTER;
  if (K::SHARE_A)
    tma_load_2d_multicast(to + rank * share * 128, a, full, 0, k + rank * share, ALL_CTAS);
  else if (K::A_K_MAJOR)
    tma_load_2d(to, a, full, k, row);
  else
    for (int i = 0; i < K::ROWS / 64; i++) tma_load_2d(to + i * 8192, a, full, row + i * 64, k);
}

// Loads this CTA's half of a stage's tile of B for the whole cluster, or its own tile.
template <typename K>
static DEVICE void load_b(uint32_t to, const CUtensorMap *b, uint64_t *full, int column, int columns, int n,
                          int k, int rank) {
  if (K::SHARE_A) {
    for (int i = 0; i < columns / 64; i++) tma_load_2d(to + i * 8192, b, full, column + i * 64, k);
  } else if (K::B_K_MAJOR) { // half of the columns; SwiGLU: the gates or the ups
    constexpr int share = TILE_N / CLUSTER;
    int next = K::GATE_UP ? n : share;
    tma_load_2d_multicast(to + rank * share * 128, b, full, k, column + rank * next, ALL_CTAS);
  } else { // half of the k, of each 64 columns; dW: of each panel
    constexpr int share = TILE_K / CLUSTER;
    constexpr bool panels = K::COLUMN_LISTS;
    for (int i = 0; i < columns / 64; i++)
      tma_load_2d_multicast(to + i * 8192 + rank * share * 128, b, full, panels ? 0 : column + i * 64,
                            k + (panels ? i * LCE_TILE_ROWS : 0) + rank * share, ALL_CTAS);
  }
}

template <typename K> static DEVICE KStep k_step(const EpilogueParams &params, int step) {
  if (K::SAMPLED) return params.steps[step];
  return {step * K::STEP, step * K::STEP};
}

// A whole warp runs this, though one lane issues: uniform addresses keep the path to a load short.
template <typename K>
static DEVICE void produce(const TileScheduler &s, const EpilogueParams &params, const Pipeline &pipeline,
                           const CUtensorMap *a, const CUtensorMap *b, int rank) {
  const bool elected = elect_one();
  ClusterThrottle throttle(s, rank);
  PipelineState<K> at;
  at.parity = 1; // a fresh barrier counts as past its odd phase: all stages are empty
  int count = work_count<K>(s, params);
  if (K::COLUMN_LISTS && first_work() >= count) return;
  WorkTile work = work_tile<K>(s, params, first_work(), rank), next = work;
  for (int w = first_work(); w < count; w += work_stride(), work = next) {
    int columns = tile_columns<K>(s, work), bytes = K::A_BYTES + columns * TILE_K * 2;
    KStep k = k_step<K>(params, work.step(0)), k_next = k;
    for (int i = 0; i < work.steps(); i++, at.next(), k = k_next) {
      if (i + 1 < work.steps()) k_next = k_step<K>(params, work.step(i + 1));
      uint64_t *full = &pipeline.full[at.stage];
      uint32_t stage = pipeline.stages + at.stage * K::STAGE_BYTES;
      throttle.step(elected);
      mbarrier_wait(&pipeline.empty[at.stage], at.parity);
      if (elected) {
        mbarrier_arrive_expect_tx(full, bytes); // both halves count, whichever CTA sends them
        load_a<K>(stage, a, full, work.row, k.a_row, rank);
        load_b<K>(stage + K::A_BYTES, b, full, work.column, columns, s.n, k.b_row, rank);
      }
      // Early, since its divisions would hold up a stage.
      if (i == 0 && w + work_stride() < count) next = work_tile<K>(s, params, w + work_stride(), rank);
    }
  }
  throttle.finish(elected);
}

// --- the consumers -----------------------------------------------------------------------------------------

// Arrives at the stage's empty barrier in each CTA that sends to it.
static DEVICE void release_stage(const Pipeline &pipeline, int stage) {
  if (threadIdx.x % WARPGROUP < CLUSTER)
    mbarrier_arrive_remote(&pipeline.empty[stage], threadIdx.x % WARPGROUP);
}

// Runs all k-steps of a work tile, for the rows from byte `a_first` of a stage's A on.
template <typename K, int COLUMNS, typename F>
static DEVICE void mainloop(Accumulators &acc, const Pipeline &pipeline, PipelineState<K> &at, int steps,
                            uint32_t a_first, F last_stage_is_full) {
  // Bytes from 16 values of k to the next 16.
  constexpr int a_step = K::A_K_MAJOR ? 32 : 2048, b_step = K::B_K_MAJOR ? 32 : 2048;
  int previous = -1;
  for (int k = 0; k < steps; k++, at.next()) {
    mbarrier_wait(&pipeline.full[at.stage], at.parity);
    if (k + 1 == steps) last_stage_is_full();
    uint32_t stage = pipeline.stages + at.stage * K::STAGE_BYTES;
    uint64_t a = descriptor(stage + a_first, K::A_K_MAJOR), b = descriptor(stage + K::A_BYTES, K::B_K_MAJOR);
    wgmma_fence();
    EACH (i, TILE_K / 16)
      EACH (h, TILE_M / 64)
        if constexpr (K::CODES)
          wgmma_codes(acc[h], descriptor_advance(a, h * 8192 + i * a_step),
                      descriptor_advance(b, i * b_step));
        else
          wgmma<COLUMNS, !K::A_K_MAJOR, !K::B_K_MAJOR>(acc[h], descriptor_advance(a, h * 8192 + i * a_step),
                                                       descriptor_advance(b, i * b_step), k > 0 || i > 0);
    wgmma_commit();
    if (previous >= 0) {
      wgmma_wait<1>(); // the previous step has read its stage
      release_stage(pipeline, previous);
    }
    previous = at.stage;
  }
  wgmma_wait<0>();
  release_stage(pipeline, previous);
}

template <typename K>
static DEVICE void consume(const TileScheduler &s, const EpilogueParams &params, const Pipeline &pipeline,
                           const CUtensorMap *out, const CUtensorMap *gate_up, uint32_t buffers, int consumer,
                           int rank) {
  int warp = consumer * 4 + threadIdx.x % WARPGROUP / 32, turn = 0;
  const Consumer me = {s,        params,
                       pipeline, out,
                       gate_up,  buffers + warp * K::WARP_BYTES,
                       consumer, warp,
                       rank,     K::COOPERATIVE ? consumer * TILE_M : 0};
  K epilogue;
  Accumulators acc;
  PipelineState<K> at;
  int count = work_count<K>(s, params);
  for (int w = first_work(); w < count; w += work_stride(), turn ^= 1) {
    WorkTile work = work_tile<K>(s, params, w, rank);
    if (!K::COOPERATIVE && turn != consumer) {
      at.advance(work.steps());
      continue;
    }
    int columns = tile_columns<K>(s, work), a_first = me.row * 128;
    epilogue.begin(me, work, columns);
    if constexpr (K::CODES) epilogue.begin_sums(acc, me, work);
    // Ping-pong order: named barrier 1 + c opens when the other consumer has all its stages. Otherwise
    // consumer 1 could wait two rounds ahead, which a parity cannot tell apart.
    if (!K::COOPERATIVE && w >= work_stride()) named_barrier_sync<2 * WARPGROUP>(1 + consumer);
    bool more = !K::COOPERATIVE && w + work_stride() < count;
    auto last_stage_is_full = [&] {
      if (more) named_barrier_arrive<2 * WARPGROUP>(1 + (consumer ^ 1));
    };
    if (columns > 128)
      mainloop<K, 192>(acc, pipeline, at, work.steps(), a_first, last_stage_is_full);
    else if (columns > 64)
      mainloop<K, 128>(acc, pipeline, at, work.steps(), a_first, last_stage_is_full);
    else
      mainloop<K, 64>(acc, pipeline, at, work.steps(), a_first, last_stage_is_full);
    epilogue.template run<K>(acc, me, work);
  }
  if (threadIdx.x % 32 == 0) tma_store_wait_all();
}

template <typename K>
static __global__ void __launch_bounds__(THREADS, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap gate_up,
                const __grid_constant__ TileScheduler scheduler,
                const __grid_constant__ EpilogueParams params) {
#if defined(HOPPER_CODE)
  extern __shared__ uint8_t shared[];
  __shared__ __align__(8) uint64_t full[K::STAGES], empty[K::STAGES];
  constexpr int BARRIERS = 4 * CONSUMERS * K::WARP_BARRIERS + K::CTA_BARRIERS;
  __shared__ __align__(8) uint64_t barriers[BARRIERS + 1]; // the epilogue's
  Pipeline pipeline = {(shared_address(shared) + 1023) / 1024 * 1024, full, empty};
  uint32_t buffers = pipeline.stages + K::STAGES * K::STAGE_BYTES;
  pipeline.buffers = reinterpret_cast<float *>(shared + (buffers - shared_address(shared)));
  pipeline.barriers = barriers;
  // Uniform, so that the compiler knows: a warp has one role.
  int rank = (int)cluster_rank(), warp = uniform((int)threadIdx.x / 32),
      consumer = warp / (WARPGROUP / 32) - 1;
  if (threadIdx.x == 0) {
    for (int s = 0; s < K::STAGES; s++) {
      mbarrier_init(&full[s], 1); // the producer, and the bytes it expects
      mbarrier_init(&empty[s], CLUSTER * (K::COOPERATIVE ? CONSUMERS : 1)); // the consumers of each CTA
    }
    for (int i = 0; i < BARRIERS; i++) mbarrier_init(&barriers[i], 1); // a thread, and the bytes it expects
    mbarrier_init_fence();
  }
  cluster_sync();
  pdl_begin();
  if (consumer < 0) {
    setmaxnreg_dec<40>();
    if (warp == 0) produce<K>(scheduler, params, pipeline, &a, &b, rank);
    if (K::LOADS && warp == 1) K::template load_addend<K>(scheduler, params, pipeline, &out, rank);
  } else {
    setmaxnreg_inc<232>();
    consume<K>(scheduler, params, pipeline, &out, &gate_up, buffers, consumer, rank);
  }
  cluster_sync(); // no CTA leaves while the other may still arrive at its barriers
#else
  __trap(); // never launched there: see hopper_create() in hopper_gemm.cu
#endif
}
