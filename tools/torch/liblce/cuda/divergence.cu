// A divergence on a GPU: a block computes its row's two softmaxes, and from them the loss and the gradient,
// for which it reads the row once more, or twice where the gradient needs the loss.
//
// On Hopper the GEMM that makes the logits leaves each tile's part of a softmax (logit_tiles.cu), and
// clusters of 8 blocks hold a row in shared memory until its sums are known: 6 bytes an entry in bf16, two
// logits and a gradient, are the floor. A thread goes through its entries once a row: it adds up this row's,
// writes the gradient of one added up a row or two ago, whose sums are there by now, and asks for the next
// row in its place.
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_ptx.cuh"

// log2 x, to within 2^-22 for x in [0.5, 2], else to 2^-22 of itself.
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

// Sums over a row's entries, in units of ENTRY_UNIT; of the distance and the excess under p.
struct RowTotals {
  float loss = 0, distance = 0, excess = 0;
  DEVICE void add(DivergenceTerms terms, DivergenceEntry e, float entry_distance, float entry_excess) {
    loss = plus_divergence(loss, terms, e);
    distance += e.p * entry_distance;
    if (terms.kind != FORWARD_KL) excess += e.p * entry_excess;
  }
  // log_sum: the student's.
  DEVICE void store(const LinearDivergence &a, int64_t row, DivergenceTerms terms, float log_sum) const {
    float entropy = log_sum + terms.log_share - distance / terms.share;
    write(a.loss, row, counts(a, row) ? ENTRY_UNIT * loss : 0);
    write(a.entropy, row, counts(a, row) ? ENTRY_UNIT * entropy : 0);
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
        float excess = e.lead - r.lead_at_max;
        if (add) totals.add(terms, e, distance, excess);
        d[k] = divergence_slope(terms, e.p, e.q, excess, mean_excess) * slope[k] * r.scale;
        if (r.scale == 0) d[k] = 0;
      }
      if (store_gradient) store(student.logits + row * student.stride + i, d);
    }
  };
  pass(true, KIND == FORWARD_KL && backward(a), 0);
  totals.loss = block_sum(totals.loss), totals.distance = block_sum(totals.distance);
  if (threadIdx.x == 0) totals.store(a, row, terms, r.student.log_sum);
  if (KIND != FORWARD_KL && backward(a)) pass(false, true, block_sum(totals.excess) / terms.share);
}

// --- the same in a cluster, for bf16 -----------------------------------------------------------------------

// Each block of a cluster takes a part of the columns, a thread the entries that it copies itself. `stages`
// rows are held, 3 or 2. A row's gradient is written `lag` = stages - 1 rows later, when its sums have had
// time to arrive, and the next row takes its place.
enum {
  CLUSTER_BLOCKS = 8,
  HELD_THREADS = 512,
  ALL_WARPS = CLUSTER_BLOCKS * HELD_THREADS / 32,
  SUMS_HELD = 4, // at least 2 lag: a block may read a row's sums while another sends the third row's after
  LINE = 8       // accesses in a line of the cache: parts start on whole ones
};

static __host__ DEVICE int part_of_row(int64_t columns) {
  constexpr int64_t lines = CLUSTER_BLOCKS * LINE * WIDTH<bf16>;
  return (int)((columns + lines - 1) / lines) * LINE;
}

// An entry from log p and log q, which may lack the same constant: p and q then lack its factor. A template,
// as before Hopper nothing calls it.
template <DivergenceKind KIND>
static DEVICE DivergenceEntry entry_of_logs(DivergenceTerms terms, float log_p, float log_q) {
  float p = ENTRY_EXP(log_p), q = ENTRY_EXP(log_q);
  if (KIND != JSD) return divergence_entry(terms, p, q, log_p - log_q);
  float log_sum = log2_approx(p + (q + 1e-36f)); // finite where both underflow
  return {p, q, log_p - log_sum, log_q - log_sum};
}

template <DivergenceKind KIND>
static __global__ void __launch_bounds__(HELD_THREADS, 1)
    held_kernel(const __grid_constant__ LinearDivergence a, const __grid_constant__ Head<bf16> student,
                const __grid_constant__ Head<bf16> teacher, DivergenceTerms terms, int stages) {
#if defined(HOPPER_CODE)
  // [stages][2][part]: logits of both heads, which become p and its excess
  extern __shared__ __align__(128) uint4 held[];
  __shared__ float sums[SUMS_HELD][3][ALL_WARPS];      // RowTotals of the cluster's warps
  __shared__ float log_sums[SUMS_HELD];                // the students'
  __shared__ __align__(8) uint64_t arrived[SUMS_HELD]; // ends when the sums are there
  constexpr int W = WIDTH<bf16>, TURNS = 2;            // copies are waited for by halves of a row
  const int rank = (int)cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32, lag = stages - 1;
  const int64_t columns = a.student.logits.shape[1];
  const int part = part_of_row(columns), end = min((int)columns / W - rank * part, part),
            turn = (part + TURNS * HELD_THREADS - 1) / (TURNS * HELD_THREADS) * HELD_THREADS;
  const int rows = (int)a.student.logits.shape[0], stride = gridDim.x / CLUSTER_BLOCKS;
  const RowTerms *row_terms = data_of<RowTerms>(a.row_terms);
  terms.kind = KIND;
  if (threadIdx.x < SUMS_HELD) mbarrier_init(&arrived[threadIdx.x], 1);
  mbarrier_init_fence();
  cluster_sync();

  auto part_of = [&](const Head<bf16> &head, int64_t row) {
    int64_t first = row * head.stride + rank * part * W;
    asm volatile("" : "+l"(first)); // else it is computed again for each access
    return reinterpret_cast<uint4 *>(head.logits + first);
  };
  // A thread copies what it reads, so no barrier is needed; but copies do not say that they touch memory.
  auto fence = [] { asm volatile("" ::: "memory"); };
  auto copy = [&](uint4 *to, const uint4 *own, const uint4 *other, int i, bool valid) {
    fence();
    attention::copy_16(shared_address(to + i), own + i, valid);
    attention::copy_16(shared_address(to + part + i), other + i, valid);
  };
  // Calls body(i) for each of the thread's accesses, once the copies that it began a row ago are there.
  auto each_access = [&](auto body) {
    int i = threadIdx.x;
#pragma unroll 1
    for (int last = turn; last <= TURNS * turn; last += turn) {
      attention::copies_wait<TURNS - 1>();
      fence();
#pragma unroll 1
      for (; i < min(end, last); i += HELD_THREADS) body(i);
      attention::copies_commit();
    }
  };

  int row = blockIdx.x / CLUSTER_BLOCKS;
  uint4 *own = held, *kept = held + 2 * part; // kept: of row `before`, whose place row `after` takes
  RowTerms next = row_terms[row];
  each_access([&](int i) { copy(own, part_of(student, row), part_of(teacher, row), i, true); });
  for (unsigned n = 0; row - lag * stride < rows; n++, row += stride) {
    const int before = row - lag * stride, after = row + stride;
    const RowTerms r = next;
    if (after < rows) next = row_terms[after];
    float mean_excess = 0; // of row `before`
    if (before >= 0) {
      const unsigned slot = (n - lag) % SUMS_HELD;
      mbarrier_wait(&arrived[slot], (n - lag) / SUMS_HELD & 1);
      auto sum_of = [&](int which) {
        float sum = 0;
        EACH (k, ALL_WARPS / 32) sum += sums[slot][which][lane + 32 * k];
        return warp_sum(sum);
      };
      mean_excess = sum_of(2) / terms.share;
      if (rank == 0 && warp == 0) {
        RowTotals totals = {sum_of(0), sum_of(1)};
        if (lane == 0) totals.store(a, before, terms, log_sums[slot]);
      }
    }
    // A logit times its head's distance, plus a shift, is log p + the student's log_sum, near 0 where p is
    // large; for the teacher log q + the same. So p and the sums lack a factor of inv_sum.
    const float shift = -r.student.max * student.distance,
                teacher_shift = fmaf(-r.teacher.max, teacher.distance, r.student.log_sum - r.teacher.log_sum),
                scale = r.scale * r.student.inv_sum, excess_shift = -r.lead_at_max * scale;
    const bool none = r.scale == 0; // whatever its logits are
    const uint4 *own_after = part_of(student, after), *other_after = part_of(teacher, after);
    uint4 *out = part_of(student, KIND == FORWARD_KL ? row : before);
    RowTotals totals;
    each_access([&](int i) {
      float u[W], t[W], p[W], excess[W], d[W];
      unpack(u, own[i]);
      unpack(t, own[part + i]);
      EACH (k, W) {
        float log_p = fmaf(u[k], student.distance, shift),
              log_q = fmaf(t[k], teacher.distance, teacher_shift);
        DivergenceEntry e = entry_of_logs<KIND>(terms, log_p, log_q);
        p[k] = e.p, excess[k] = fmaf(e.lead, scale, excess_shift);
        totals.add(terms, e, log_p, excess[k]);
        d[k] = divergence_slope(terms, e.p, e.q, 0, 0) * scale;
      }
      if (KIND == FORWARD_KL) {
        if (row < rows && backward(a)) out[i] = none ? uint4{} : packed(d);
      } else {
        own[i] = none ? uint4{} : packed(p), own[part + i] = none ? uint4{} : packed(excess);
        unpack(p, kept[i]);
        unpack(excess, kept[part + i]);
        EACH (k, W) d[k] = divergence_slope(terms, p[k], 0, excess[k], mean_excess);
        if (before >= 0 && backward(a)) out[i] = packed(d);
      }
      copy(kept, own_after, other_after, i, after < rows);
    });
    own = kept, kept = kept + 2 * part < held + stages * 2 * part ? kept + 2 * part : held;
    if (row >= rows) continue;
    const unsigned slot = n % SUMS_HELD;
    float loss = warp_sum(totals.loss), distance = warp_sum(totals.distance),
          excess = warp_sum(totals.excess);
    int which = lane / CLUSTER_BLOCKS;
    float sum = which == 0 ? loss : which == 1 ? distance : excess;
    sum = none && which == 2 ? 0 : sum * r.student.inv_sum;
    if (threadIdx.x == 0) {
      log_sums[slot] = r.student.log_sum;
      mbarrier_arrive_expect_tx(&arrived[slot], sizeof sums[0]);
    }
    if (which < 3)
      store_async_remote(reinterpret_cast<int *>(&sums[slot][which][rank * HELD_THREADS / 32 + warp]),
                         __float_as_int(sum), &arrived[slot], lane % CLUSTER_BLOCKS);
  }
#endif
}

// False, with nothing touched, without tiles or where rows are too long to hold two.
template <DivergenceKind KIND>
static bool held_divergence(KernelLaunch launch, const LinearDivergence *a, const Head<bf16> &student,
                            const Head<bf16> &teacher, const DivergenceTerms &terms) {
  int64_t rows = a->student.logits.shape[0], columns = a->student.logits.shape[1];
  int64_t bytes = 2 * 16 * part_of_row(columns);                     // of a part
  int stages = (int)min_i64(3, ((227 - 8) << 10) / bytes), clusters; // 8 KiB for the sums
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
