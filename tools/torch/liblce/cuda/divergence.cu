// lce_divergence on a GPU. A row of both heads has its two softmaxes, whose maxima and sums of exponentials are kept
// together; then it is read for the loss, and again for the gradient where that needs the loss.
//
// On Hopper the GEMM that makes the logits leaves each tile's part of a softmax (logit_tiles.cu), so forward KL reads
// both rows once and writes one: 6 bytes an entry in bf16, the floor. For the other kinds a cluster of eight blocks keeps
// a row in shared memory, 64 KiB each for 128,256 entries of both heads, and reads it again from there; what the blocks
// have summed goes through device memory, in a fixed order. Elsewhere one block owns a row and reads it each time.
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_ptx.cuh"
#include "tools/torch/liblce/divergence_row.h"

// Threads of all blocks that share an SM, where a cluster of DIVERGENCE_BLOCKS holds a row.
enum { SM_THREADS = 768 };

template <typename T> struct Head {
  T *logits;
  int64_t stride;
  Capped<T> capped;
  float distance;     // of a logit, in units of ENTRY_UNIT: 1 / temperature
  const Ranked *best; // of each tile, or NULL: of LogitTiles
  const float *sums;
};

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

// Reads W entries in one access, which the compiler would take apart.
template <typename T, int W> static DEVICE Group<T, W> load_group(const T *from) {
  using Word = std::conditional_t<sizeof(Group<T, W>) == 16, uint4, T>;
  Word word = *reinterpret_cast<const Word *>(from);
  return reinterpret_cast<Group<T, W> &>(word);
}
template <typename T, int W> static DEVICE void store_group(T *to, Group<T, W> group) {
  using Word = std::conditional_t<sizeof(Group<T, W>) == 16, uint4, T>;
  *reinterpret_cast<Word *>(to) = reinterpret_cast<const Word &>(group);
}

// u of W entries from column i on, with du/dz; minus infinity beyond the row's end. PLAIN: without bias, soft-cap or
// such an end.
template <bool PLAIN, int W, typename T>
static DEVICE void entries_of(float (&u)[W], float (&slope)[W], const Group<T, W> &z, const Head<T> &head,
                              int i, int columns) {
  EACH (k, W) u[k] = to_float(z.at[k]), slope[k] = 1;
  if (!PLAIN) {
    EACH (k, W)
      if (i + k < columns) u[k] = head.capped(u[k], i + k, slope[k]);
  }
  if (!PLAIN && i + W > columns) {
    EACH (k, W)
      if (i + k >= columns) u[k] = -INFINITY;
  }
}

template <int W> static DEVICE void add_entries(PartialSoftmax &s, const float (&u)[W], int i, float unit) {
  float before = s.max;
  EACH (k, W)
    if (u[k] > s.max) s.max = u[k], s.column = i + k;
  s.sum *= ENTRY_EXP((before - s.max) * unit);
  EACH (k, W) s.sum += ENTRY_EXP((u[k] - s.max) * unit);
}

// The block's softmax, of its threads' parts.
static DEVICE RowSoftmax row_softmax(const PartialSoftmax &s, float unit, int &column) {
  Ranked best = block_max(ranked(s.max, s.column));
  float max = ranked_value(best), sum = block_sum(s.below(max, unit));
  column = ranked_column(best);
  return {max, 1 / sum, logf(sum)};
}

// Sums over the blocks of a cluster, in their order; every thread gets them. parts: [DIVERGENCE_BLOCKS].
static DEVICE float4 cluster_sum(float4 *parts, float4 sums) {
#if defined(HOPPER_CODE)
  if (threadIdx.x == 0) parts[blockIdx.x % DIVERGENCE_BLOCKS] = sums;
  __syncwarp();
  cluster_sync();
  const unsigned long long *from =
      reinterpret_cast<const unsigned long long *>(parts + threadIdx.x % DIVERGENCE_BLOCKS);
  unsigned long long pairs[2] = {load_relaxed(from), load_relaxed(from + 1)};
  sums = reinterpret_cast<const float4 &>(pairs);
  EACH (step, 3) {
    sums.x += __shfl_xor_sync(~0u, sums.x, 1 << step);
    sums.y += __shfl_xor_sync(~0u, sums.y, 1 << step);
    sums.z += __shfl_xor_sync(~0u, sums.z, 1 << step);
  }
#endif
  return sums;
}

// True if a row is read twice.
constexpr bool reads_twice(DivergenceKind kind) {
  return kind != FORWARD_KL;
}

// The most threads of a block.
constexpr int most_threads(DivergenceKind kind, bool given) {
  return !given ? 1024 : reads_twice(kind) ? SM_THREADS : 512;
}

// GIVEN: the heads are plain, in whole accesses, and have tiles. If the row is read twice, a cluster then owns it, and
// each block holds a part; else two blocks share an SM.
template <typename T, int W, DivergenceKind KIND, bool GIVEN>
static __global__ void __launch_bounds__(most_threads(KIND, GIVEN), GIVEN && !reads_twice(KIND) ? 2 : 1)
    divergence_kernel(const __grid_constant__ LceDivergence a, const __grid_constant__ Head<T> student,
                      const __grid_constant__ Head<T> teacher, DivergenceTerms terms) {
  extern __shared__ __align__(16) uint8_t held_bytes[];
  constexpr bool HELD = GIVEN && reads_twice(KIND);
  constexpr int BLOCKS = HELD ? DIVERGENCE_BLOCKS : 1;
  int64_t row = blockIdx.x / BLOCKS;
  int columns = (int)a.student.logits.shape[1], step = blockDim.x * W, best, teacher_best;
  int part = HELD ? (columns + BLOCKS * W - 1) / (BLOCKS * W) * W : columns;
  int begin = (int)(blockIdx.x % BLOCKS) * part, end = min(columns, begin + part);
  T *out = student.logits + row * student.stride;
  const T *others = teacher.logits + row * teacher.stride;
  T *held = reinterpret_cast<T *>(held_bytes) - begin, *held_others = held + part;
  terms.kind = KIND;
  if (a.mask.data && !data_of<int32_t>(a.mask)[row]) {
    const float zeros[W] = {};
    for (int i = begin + threadIdx.x * W; i < end && a.backward; i += step) store(out + i, zeros);
    if (threadIdx.x == 0 && begin == 0) write(a.loss, row, 0), write(a.entropy, row, 0);
    return;
  }

  struct Both {
    Group<T, W> own, other;
  };
  float u[W], t[W], slope[W], unused[W];
  auto load_both = [&](const T *own, const T *other, int i) {
    Both z;
    if (i < end) z = {load_group<T, W>(own + i), load_group<T, W>(other + i)};
    return z;
  };
  auto unpack = [&](const Both &z, int i) {
    entries_of<GIVEN>(u, slope, z.own, student, i, columns);
    entries_of<GIVEN>(t, unused, z.other, teacher, i, columns);
  };
  PartialSoftmax own, theirs;
  if (GIVEN) {
    int tiles = (columns + LCE_TILE_COLUMNS - 1) / LCE_TILE_COLUMNS;
    auto part_of = [=](const Head<T> &head, int i) {
      Ranked largest = head.best[row * tiles + i];
      return PartialSoftmax{ranked_value(largest), head.sums[row * tiles + i], ranked_column(largest)};
    };
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
      own.add(part_of(student, i), student.distance);
      theirs.add(part_of(teacher, i), teacher.distance);
    }
  } else {
    for (int i = threadIdx.x * W; i < columns; i += step) {
      unpack(load_both(out, others, i), i);
      add_entries(own, u, i, student.distance);
      add_entries(theirs, t, i, teacher.distance);
    }
  }
  RowSoftmax p = row_softmax(own, student.distance, best),
             q = row_softmax(theirs, teacher.distance, teacher_best);
  auto distance_of = [](float v, const RowSoftmax &s, const Head<T> &head) {
    return fmaxf((v - s.max) * head.distance, LEAST_DISTANCE);
  };
  auto entry_of = [&](float student_u, float teacher_u) {
    return divergence_entry(terms, p, q, distance_of(student_u, p, student),
                            distance_of(teacher_u, q, teacher));
  };
  float at_best[1], none[1], lead_at_max = 0;
  if (reads_twice(KIND)) {
    entries_of<GIVEN>(at_best, none, Group<T, 1>{others[best]}, teacher, best, columns);
    lead_at_max = entry_of(p.max, at_best[0]).lead;
  }
  float scale = read(a.weights, row, 1) * student.distance * ENTRY_UNIT;
  auto store_gradient = [&](int i, float mean_excess) {
    float d[W];
    EACH (k, W)
      d[k] = divergence_slope(terms, entry_of(u[k], t[k]), lead_at_max, mean_excess) * slope[k] * scale;
    store(out + i, d);
  };
  float4 sums = {}; // of the loss, the student's distances and the excesses over the lead at its maximum
  Both next = load_both(out, others, begin + threadIdx.x * W);
#pragma unroll 1
  for (int i = begin + threadIdx.x * W; i < end; i += step) {
    Both z = next;
    next = load_both(out, others, i + step);
    if (HELD) store_group<T, W>(held + i, z.own), store_group<T, W>(held_others + i, z.other);
    unpack(z, i);
    EACH (k, W) {
      DivergenceEntry e = entry_of(u[k], t[k]);
      sums.x += divergence_part(terms, e);
      sums.y += e.p * distance_of(u[k], p, student);
      sums.z += e.p * (e.lead - lead_at_max);
    }
    if (!reads_twice(KIND) && a.backward) store_gradient(i, 0);
  }
  sums.x = block_sum(sums.x), sums.y = block_sum(sums.y);
  if (reads_twice(KIND)) sums.z = block_sum(sums.z);
  if (HELD) sums = cluster_sum(data_of<float4>(a.block_sums) + row * DIVERGENCE_BLOCKS, sums);
  if (threadIdx.x == 0 && begin == 0)
    write(a.loss, row, sums.x), write(a.entropy, row, p.log_sum - ENTRY_UNIT * sums.y);
  for (int i = begin + threadIdx.x * W; reads_twice(KIND) && a.backward && i < end; i += step) {
    unpack(HELD ? load_both(held, held_others, i) : load_both(out, others, i), i);
    store_gradient(i, sums.z);
  }
}

template <typename T> static Head<T> kernels_head(const DivergenceHead &h) {
  return {data_of<T>(h.logits),
          h.logits.stride,
          {data_of<T>(h.bias), h.softcap},
          inverse_temperature(h.temperature) / ENTRY_UNIT,
          data_of<Ranked>(h.best),
          data_of<float>(h.sums)};
}

template <typename T, int W, DivergenceKind KIND>
static void divergence(Backend *backend, const LceDivergence *a, const DivergenceTerms &terms) {
  Head<T> student = kernels_head<T>(a->student), teacher = kernels_head<T>(a->teacher);
  int64_t rows = a->student.logits.shape[0], groups = ceil_div(a->student.logits.shape[1], W);
  KernelLaunch launch = {"lce_divergence", cuda_stream(backend), rows, row_threads(groups, 1024)};
  // Leaves 2 KiB of an SM's shared memory to each block, for the system and the block's sums.
  const size_t bytes = (size_t)ceil_div(groups, DIVERGENCE_BLOCKS) * 2 * W * sizeof(T), sm_bytes = 227 << 10;
  bool held = reads_twice(KIND);
  constexpr bool GIVEN = sizeof(T) == 2 && W > 1;
  if (GIVEN && student.best && teacher.best && a->student.logits.shape[1] % W == 0 &&
      (!held || bytes + 2048 <= sm_bytes)) {
    if (held) {
      int blocks = (int)min_i64(3, (int64_t)(sm_bytes / (bytes + 2048)));
      launch.grid = rows * DIVERGENCE_BLOCKS, launch.block = SM_THREADS / blocks;
      launch.shared_bytes = bytes, launch.cluster = DIVERGENCE_BLOCKS;
    } else {
      launch.block = row_threads(groups, most_threads(KIND, GIVEN));
    }
    return launch_kernel(launch, divergence_kernel<T, W, KIND, GIVEN>, *a, student, teacher, terms);
  }
  launch_kernel(launch, divergence_kernel<T, W, KIND, false>, *a, student, teacher, terms);
}

void cuda_lce_divergence(Backend *backend, const LceDivergence *a) {
  Tensor logits = a->student.logits;
  DivergenceTerms terms = divergence_terms(a->kind, (double)a->beta);
  with_float(logits.dtype, [&](auto type) {
    using T = decltype(type);
    bool wide = rows_start_aligned(logits, WIDTH<T>) && rows_start_aligned(a->teacher.logits, WIDTH<T>);
    with_width<T>(wide, [&](auto W) {
      switch (a->kind) {
      case FORWARD_KL:
        return divergence<T, W, FORWARD_KL>(backend, a, terms);
      case REVERSE_KL:
        return divergence<T, W, REVERSE_KL>(backend, a, terms);
      case JSD:
        return divergence<T, W, JSD>(backend, a, terms);
      }
    });
  });
}
