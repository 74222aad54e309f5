// A divergence on a GPU: a block computes its row's two softmaxes, and from them the loss and the gradient, for
// which it reads the row once more, or twice where the gradient needs the loss.
//
// On Hopper the GEMM that makes the logits leaves each tile's part of a softmax (logit_tiles.cu), and
// clusters of 8 blocks hold a row in shared memory until its sums are known: 6 bytes an entry in bf16, two
// logits and a gradient, are the floor. Each block asks for its part of the row after the next, sums the next
// one, writes the gradient of the last, and only then waits for the other blocks' sums.
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_ptx.cuh"

// log2 x of x in [1, 2], to within 2^-22.
static DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#include "tools/torch/liblce/divergence_row.h"

template <typename T> struct Head {
  T *logits;
  int64_t stride;
  Capped<T> capped;
  float distance;     // of a logit, in units of ENTRY_UNIT: 1 / temperature
  const Ranked *best; // of each tile, or NULL: of DivergenceHead
  const float *sums;
  explicit Head(const DivergenceHead &h)
      : logits(data_of<T>(h.logits)), stride(h.logits.stride), capped{data_of<T>(h.bias), h.softcap},
        distance(inverse_temperature(h.temperature) / ENTRY_UNIT), best(data_of<Ranked>(h.best)),
        sums(data_of<float>(h.sums)) {}
};

static DEVICE bool backward(const LinearDivergence &a) {
  return a.dx.data || a.dweight.data;
}
static DEVICE bool counts(const LinearDivergence &a, int64_t row) {
  return !a.mask.data || data_of<int32_t>(a.mask)[row];
}

// A row of LinearDivergence's row_terms.
struct RowTerms {
  RowSoftmax student, teacher;
  float lead_at_max;
  float scale; // of the gradient; 0 if the row does not count
};
static_assert(sizeof(RowTerms) == DIVERGENCE_ROW_FLOATS * sizeof(float), "as many as there is room for");

// Part of a softmax, of logits before the temperature; max starts finite, so that minus infinity counts as 0.
struct PartialSoftmax {
  float max = LEAST_DISTANCE, sum = 0;
  int column = 0; // the maximum's

  // The sum, relative to another maximum.
  DEVICE float below(float other, float unit) const { return sum * ENTRY_EXP((max - other) * unit); }
  DEVICE void add(const PartialSoftmax &o, float unit) {
    float most = fmaxf(max, o.max);
    if (o.max > max) column = o.column;
    sum = below(most, unit) + o.below(most, unit);
    max = most;
  }
};

// The eight entries of an access, by words: the compiler would take one of a Group apart.
template <int W> static DEVICE void unpack(float (&out)[W], uint4 z) {
  const uint32_t words[W / 2] = {z.x, z.y, z.z, z.w};
  EACH (k, W / 2) {
    out[2 * k] = __uint_as_float(words[k] << 16);
    out[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000);
  }
}
template <int W> static DEVICE uint4 packed(const float (&x)[W]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                    pack_bf16(x[6], x[7]));
}

// u of W entries from column i on, with du/dz; minus infinity beyond the row's end.
template <int W, typename T>
static DEVICE void entries_of(float (&u)[W], float (&slope)[W], const Head<T> &head, int64_t row, int i,
                              int columns) {
  load(u, head.logits + row * head.stride + i);
  EACH (k, W) {
    u[k] = head.capped(u[k], min(i + k, columns - 1), slope[k]);
    if (i + k >= columns) u[k] = -INFINITY;
  }
}

// --- a row's softmaxes -------------------------------------------------------------------------------------

// Computes the softmax of a row of a head, and its largest logit's column. TILES: by its tiles' parts.
template <bool TILES, typename T>
static DEVICE RowSoftmax row_softmax(const Head<T> &head, float share, int64_t row, int columns,
                                     int &column) {
  constexpr int W = WIDTH<T>;
  PartialSoftmax s;
  if (TILES) {
    int tiles = (columns + LCE_TILE_COLUMNS - 1) / LCE_TILE_COLUMNS;
    for (int64_t i = row * tiles + threadIdx.x; i < (row + 1) * tiles; i += blockDim.x)
      s.add({ranked_value(head.best[i]), head.sums[i], ranked_column(head.best[i])}, head.distance);
  } else {
    for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
      float u[W], unused[W], before = s.max;
      entries_of(u, unused, head, row, i, columns);
      EACH (k, W)
        if (u[k] > s.max) s.max = u[k], s.column = i + k;
      s.sum *= ENTRY_EXP((before - s.max) * head.distance);
      EACH (k, W) s.sum += ENTRY_EXP((u[k] - s.max) * head.distance);
    }
  }
  Ranked best = block_max(ranked(s.max, s.column));
  column = ranked_column(best);
  return row_softmax(ranked_value(best), block_sum(s.below(ranked_value(best), head.distance)), share);
}

template <typename T> static DEVICE float distance_of(float u, const RowSoftmax &s, const Head<T> &head) {
  return fmaxf((u - s.max) * head.distance, LEAST_DISTANCE);
}

// Sums over a row's entries, in units of ENTRY_UNIT; of log p and of the excess over lead_at_max under p.
struct RowTotals {
  float loss = 0, log_p = 0, excess = 0;
  DEVICE void add(DivergenceTerms terms, DivergenceEntry e, float entry_log_p, float lead_at_max) {
    loss = plus_divergence(loss, terms, e);
    log_p += e.p * entry_log_p;
    if (terms.kind != FORWARD_KL) excess += e.p * (e.lead - lead_at_max);
  }
  DEVICE void store(const LinearDivergence &a, int64_t row, DivergenceTerms terms) const {
    write(a.loss, row, counts(a, row) ? ENTRY_UNIT * loss : 0);
    write(a.entropy, row, counts(a, row) ? ENTRY_UNIT * (terms.log_share - log_p / terms.share) : 0);
  }
};

// A block takes a row. TILES: it computes the row's terms alone, for held_kernel.
template <typename T, DivergenceKind KIND, bool TILES>
static __global__ void __launch_bounds__(512, 2)
    divergence_kernel(const __grid_constant__ LinearDivergence a, const __grid_constant__ Head<T> student,
                      const __grid_constant__ Head<T> teacher, DivergenceTerms terms) {
  int64_t row = blockIdx.x;
  int columns = (int)a.student.logits.shape[1], best, unused_column;
  constexpr int W = WIDTH<T>;
  terms.kind = KIND;
  RowTerms r = {row_softmax<TILES>(student, terms.share, row, columns, best),
                row_softmax<TILES>(teacher, terms.teacher_share, row, columns, unused_column)};
  float at_best[1], slope_at_best[1], unit = KIND == FORWARD_KL ? 1 : ENTRY_UNIT; // of divergence_slope
  entries_of(at_best, slope_at_best, teacher, row, best, columns);
  r.lead_at_max =
      entry_of_distances(terms, r.student, r.teacher, 0, distance_of(at_best[0], r.teacher, teacher)).lead;
  r.scale = counts(a, row) ? read(a.token_weights, row, 1) * student.distance * ENTRY_UNIT * unit : 0;
  if (TILES) {
    if (threadIdx.x == 0) data_of<RowTerms>(a.row_terms)[row] = r;
    return;
  }
  RowTotals totals;
  // Adds W entries to the totals, or stores their gradient; forward KL does both at once.
  auto pass = [&](bool add, bool store_gradient, float mean_excess) {
    for (int i = threadIdx.x * W; i < columns; i += blockDim.x * W) {
      float u[W], t[W], slope[W], unused[W], d[W];
      entries_of(u, slope, student, row, i, columns);
      entries_of(t, unused, teacher, row, i, columns);
      EACH (k, W) {
        float distance = distance_of(u[k], r.student, student);
        DivergenceEntry e =
            entry_of_distances(terms, r.student, r.teacher, distance, distance_of(t[k], r.teacher, teacher));
        if (add) totals.add(terms, e, distance - r.student.log_sum, r.lead_at_max);
        d[k] = divergence_slope(terms, e.p, e.q, e.lead - r.lead_at_max, mean_excess) * slope[k] * r.scale;
        if (r.scale == 0) d[k] = 0;
      }
      if (store_gradient) store(student.logits + row * student.stride + i, d);
    }
  };
  pass(true, KIND == FORWARD_KL && backward(a), 0);
  totals.loss = block_sum(totals.loss), totals.log_p = block_sum(totals.log_p);
  if (threadIdx.x == 0) totals.store(a, row, terms);
  if (KIND != FORWARD_KL && backward(a)) pass(false, true, block_sum(totals.excess) / terms.share);
}

// --- the same in a cluster, for bf16 -----------------------------------------------------------------------

// Each block of a cluster takes a part of the columns, a thread the entries that it copies itself. `stages`
// rows are held, 2 or 3: the one to be summed, the one before, and one that is on its way.
enum { CLUSTER_BLOCKS = 8, HELD_THREADS = 512, ALL_WARPS = CLUSTER_BLOCKS * HELD_THREADS / 32 };

// An entry from log p and log q. For JSD the less of p and q is a product: exponentials are the bottleneck. A
// template, as before Hopper nothing calls it.
template <DivergenceKind KIND>
static DEVICE DivergenceEntry entry_of_logs(DivergenceTerms terms, float log_p, float log_q) {
  float lead = log_p - log_q;
  if (KIND != JSD) return divergence_entry(terms, ENTRY_EXP(log_p), ENTRY_EXP(log_q), lead);
  float more = ENTRY_EXP(fmaxf(log_p, log_q)), less = more * ENTRY_EXP(-fabsf(lead));
  return divergence_entry(terms, lead < 0 ? less : more, lead < 0 ? more : less, lead);
}

template <DivergenceKind KIND>
static __global__ void __launch_bounds__(HELD_THREADS, 1)
    held_kernel(const __grid_constant__ LinearDivergence a, const __grid_constant__ Head<bf16> student,
                const __grid_constant__ Head<bf16> teacher, DivergenceTerms terms, int stages) {
#if defined(HOPPER_CODE)
  extern __shared__ uint4 held[]; // [stages][2][part]: logits of both heads, which become p and its excess
  __shared__ float sums[2][3][ALL_WARPS]; // RowTotals of the cluster's warps, of a row and the one before
  __shared__ __align__(8) uint64_t arrived[2]; // ends when they are there
  constexpr int W = WIDTH<bf16>;
  const int rank = (int)cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = (int)a.student.logits.shape[1] / W,
            part = (groups + CLUSTER_BLOCKS - 1) / CLUSTER_BLOCKS, end = min(groups - rank * part, part);
  const int64_t rows = a.student.logits.shape[0], stride = gridDim.x / CLUSTER_BLOCKS;
  const RowTerms *row_terms = data_of<RowTerms>(a.row_terms);
  terms.kind = KIND;
  if (threadIdx.x < 2) mbarrier_init(&arrived[threadIdx.x], 1);
  mbarrier_init_fence();
  cluster_sync();

  auto part_of = [&](const Head<bf16> &head, int64_t row) {
    return reinterpret_cast<uint4 *>(head.logits + row * head.stride) + rank * part;
  };
  auto fetch = [&](int64_t row, int stage) {
    const uint4 *own = part_of(student, row), *other = part_of(teacher, row);
    uint4 *to = held + stage * 2 * part;
    for (int i = threadIdx.x; row < rows && i < end; i += HELD_THREADS) {
      attention::copy_16(shared_address(to + i), own + i, true);
      attention::copy_16(shared_address(to + part + i), other + i, true);
    }
    attention::copies_commit();
  };
  // log p of a logit u, in units of ENTRY_UNIT: u distance + shift
  auto shift_of = [](const RowSoftmax &s, const Head<bf16> &head) {
    return -fmaf(s.max, head.distance, s.log_sum);
  };

  int64_t row = blockIdx.x / CLUSTER_BLOCKS;
  for (int i = 0; i < stages - 1; i++) fetch(row + i * stride, i);
  RowTerms r = {}, next = row_terms[row];
  float mean_excess = 0;
  for (int n = 0, stage = 0, before = stages - 1;; n++, row += stride) {
    float scale = r.scale;
    uint64_t *barrier = &arrived[n % 2];
    if (row < rows) {
      r = next;
      if (row + stride < rows) next = row_terms[row + stride];
      if (stages > 2)
        attention::copies_wait<1>();
      else
        attention::copies_wait<0>();
      float shift = shift_of(r.student, student), teacher_shift = shift_of(r.teacher, teacher);
      RowTotals totals;
      uint4 *own = held + stage * 2 * part, *other = own + part, *out = part_of(student, row);
#pragma unroll 1
      for (int i = threadIdx.x; i < end; i += HELD_THREADS) {
        float u[W], t[W], p[W], excess[W], d[W];
        unpack(u, own[i]);
        unpack(t, other[i]);
        EACH (k, W) {
          float log_p = fmaf(u[k], student.distance, shift),
                log_q = fmaf(t[k], teacher.distance, teacher_shift);
          DivergenceEntry e = entry_of_logs<KIND>(terms, log_p, log_q);
          totals.add(terms, e, log_p, r.lead_at_max);
          p[k] = e.p, excess[k] = e.lead - r.lead_at_max;
          d[k] = divergence_slope(terms, e.p, e.q, 0, 0) * r.scale;
        }
        if (KIND != FORWARD_KL)
          own[i] = packed(p), other[i] = packed(excess);
        else if (backward(a))
          out[i] = r.scale == 0 ? uint4{} : packed(d);
      }
      float loss = warp_sum(totals.loss), log_p = warp_sum(totals.log_p), excess = warp_sum(totals.excess);
      int which = lane / CLUSTER_BLOCKS;
      float sum = which == 0 ? loss : which == 1 ? log_p : excess;
      if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, sizeof sums[0]);
      if (which < 3)
        store_async_remote(reinterpret_cast<int *>(&sums[n % 2][which][rank * HELD_THREADS / 32 + warp]),
                           __float_as_int(sum), barrier, lane % CLUSTER_BLOCKS);
    }
    if (KIND != FORWARD_KL && n > 0 && backward(a)) { // of the row before
      const uint4 *own = held + before * 2 * part, *other = own + part;
      uint4 *out = part_of(student, row - stride);
#pragma unroll 1
      for (int i = threadIdx.x; i < end; i += HELD_THREADS) {
        float p[W], excess[W], d[W];
        unpack(p, own[i]);
        unpack(excess, other[i]);
        EACH (k, W) d[k] = divergence_slope(terms, p[k], 0, scale * excess[k], scale * mean_excess);
        out[i] = scale == 0 ? uint4{} : packed(d);
      }
    }
    if (row >= rows) break;
    fetch(row + (stages - 1) * stride, before);
    before = stage, stage = stage + 1 < stages ? stage + 1 : 0;
    mbarrier_wait(barrier, n / 2 & 1);
    auto sum_of = [&](int which) {
      float sum = 0;
      EACH (k, ALL_WARPS / 32) sum += sums[n % 2][which][lane + 32 * k];
      return warp_sum(sum);
    };
    mean_excess = sum_of(2) / terms.share;
    if (rank == 0 && warp == 0) {
      RowTotals totals = {sum_of(0), sum_of(1)};
      if (lane == 0) totals.store(a, row, terms);
    }
  }
#endif
}

// False, with nothing touched, without tiles or where rows are too long to hold two.
template <DivergenceKind KIND>
static bool held_divergence(KernelLaunch launch, const LinearDivergence *a, const Head<bf16> &student,
                            const Head<bf16> &teacher, const DivergenceTerms &terms) {
  int64_t rows = a->student.logits.shape[0], columns = a->student.logits.shape[1];
  int64_t bytes = 2 * 16 * ceil_div(columns, CLUSTER_BLOCKS * WIDTH<bf16>); // of a part
  int stages = (int)min_i64(3, ((227 - 4) << 10) / bytes), clusters;        // 4 KiB for the sums
  if (!student.best || !teacher.best || columns % WIDTH<bf16> || stages < 2) return false;
  launch.block = 256;
  launch_kernel(launch, divergence_kernel<bf16, KIND, true>, *a, student, teacher, terms);
  launch.grid = rows * CLUSTER_BLOCKS, launch.block = HELD_THREADS;
  launch.shared_bytes = stages * bytes, launch.cluster = CLUSTER_BLOCKS;
  LaunchConfig config(launch, held_kernel<KIND>);
  cuda_check(cudaOccupancyMaxActiveClusters(&clusters, held_kernel<KIND>, &config), "counting clusters");
  launch.grid = min_i64(clusters, rows) * CLUSTER_BLOCKS;
  launch_kernel(launch, held_kernel<KIND>, *a, student, teacher, terms, stages);
  return true;
}

// Rows start on whole accesses (push_logit_rows).
template <DivergenceKind KIND> static void divergence(Backend *backend, const LinearDivergence *a) {
  const Tensor &logits = a->student.logits;
  DivergenceTerms terms = divergence_terms(KIND, (double)a->beta);
  with_float(logits.dtype, [&](auto type) {
    using T = decltype(type);
    Head<T> student(a->student), teacher(a->teacher);
    int threads = row_threads(ceil_div(logits.shape[1], WIDTH<T>), 512);
    KernelLaunch launch = {"a divergence", cuda_stream(backend), logits.shape[0], threads};
    if constexpr (sizeof(T) == 2)
      if (held_divergence<KIND>(launch, a, student, teacher, terms)) return;
    launch_kernel(launch, divergence_kernel<T, KIND, false>, *a, student, teacher, terms);
  });
}

void cuda_divergence(Backend *backend, const LinearDivergence *a) {
  auto run = a->kind == FORWARD_KL   ? divergence<FORWARD_KL>
             : a->kind == REVERSE_KL ? divergence<REVERSE_KL>
                                     : divergence<JSD>;
  run(backend, a);
}
