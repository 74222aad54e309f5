// lce_divergence on a GPU. A row of both heads is read for the two softmaxes, whose maxima and sums of exponentials are
// kept together, again for the loss, and again for the gradient where that needs the loss.
//
// On Hopper a cluster of eight blocks owns a row and keeps it in shared memory: 64 KiB each for 128,256 logits of bf16,
// so that three rows share an SM and one's loads run under another's arithmetic. Device memory is then read once and
// written once, which is the pass's floor: 6 bytes an entry in bf16, and 4 exponentials. The blocks' maxima and sums go
// through device memory, in a fixed order. Elsewhere one block owns a row and reads it from memory each time.
#include "kernels/cuda/hopper_gemm.h"
#include "kernels/cuda/hopper_ptx.cuh"
#include "tools/torch/liblce/divergence_row.h"

// Blocks of a row on Hopper, threads of all blocks that share an SM there, and accesses of a row that is worth it.
enum { ROW_BLOCKS = DIVERGENCE_BLOCKS, SM_THREADS = 768, LEAST_GROUPS = 2048 };

template <typename T> struct Head {
  T *logits;
  int64_t stride;
  Capped<T> capped;
  float distance; // of a logit, in units of ENTRY_UNIT: 1 / temperature
};

// A thread's part of a softmax, of logits before the temperature; max starts finite, so that minus infinity counts as 0.
struct PartialSoftmax {
  float max = LEAST_DISTANCE, sum = 0;
  int column = 0; // the maximum's
};

// The sum, relative to another maximum.
static DEVICE float sum_below(const PartialSoftmax &s, float max, float unit) {
  return s.sum * ENTRY_EXP((s.max - max) * unit);
}

// In one access, which the compiler would take apart.
template <typename T, int W> static DEVICE Group<T, W> load_group(const T *from) {
  using Word = std::conditional_t<sizeof(Group<T, W>) == 16, uint4, T>;
  Word word = *reinterpret_cast<const Word *>(from);
  return reinterpret_cast<Group<T, W> &>(word);
}
template <typename T, int W> static DEVICE void store_group(T *to, Group<T, W> group) {
  using Word = std::conditional_t<sizeof(Group<T, W>) == 16, uint4, T>;
  *reinterpret_cast<Word *>(to) = reinterpret_cast<const Word &>(group);
}

// u of W entries from column i on, with du/dz; minus infinity beyond the row's end. PLAIN: without bias, soft-cap or such an end.
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

template <bool COLUMN, int W>
static DEVICE void add_entries(PartialSoftmax &s, const float (&u)[W], int i, float unit) {
  float before = s.max;
  EACH (k, W) {
    if (COLUMN && u[k] > s.max) s.column = i + k;
    s.max = fmaxf(s.max, u[k]);
  }
  s.sum *= ENTRY_EXP((before - s.max) * unit);
  EACH (k, W) s.sum += ENTRY_EXP((u[k] - s.max) * unit);
}

// Gives a block's values to its cluster: every warp gets in its lane i those of block i, or 0. parts: [ROW_BLOCKS, 3].
static DEVICE void exchange(unsigned long long *parts, unsigned long long (&values)[3]) {
#if defined(HOPPER_CODE)
  int lane = threadIdx.x % 32;
  EACH (k, 3)
    if (threadIdx.x == 0) parts[blockIdx.x % ROW_BLOCKS * 3 + k] = values[k];
  cluster_sync();
  EACH (k, 3) values[k] = lane < ROW_BLOCKS ? load_relaxed(parts + lane * 3 + k) : 0;
#endif
}

static DEVICE unsigned long long packed(float x, float y) {
  return (unsigned long long)__float_as_uint(y) << 32 | __float_as_uint(x);
}
static DEVICE float2 unpacked(unsigned long long pair) {
  return make_float2(__uint_as_float((unsigned)pair), __uint_as_float((unsigned)(pair >> 32)));
}

// HELD: a cluster owns the row of two heads that are plain, and `held` takes this block's part of their logits.
template <typename T, int W, DivergenceKind KIND, bool HELD>
static __global__ void __launch_bounds__(HELD ? SM_THREADS : 1024)
    divergence_kernel(const __grid_constant__ LceDivergence a, const __grid_constant__ Head<T> student,
                      const __grid_constant__ Head<T> teacher, DivergenceTerms terms) {
  extern __shared__ uint8_t held_bytes[];
  constexpr int BLOCKS = HELD ? ROW_BLOCKS : 1;
  using Entries = Group<T, W>;
  int64_t row = blockIdx.x / BLOCKS;
  int columns = (int)a.student.logits.shape[1], step = blockDim.x * W;
  int part = HELD ? (columns / W + BLOCKS - 1) / BLOCKS * W : columns;
  int begin = HELD ? (int)(blockIdx.x % BLOCKS) * part : 0, end = min(columns, begin + part);
  T *out = student.logits + row * student.stride;
  const T *others = teacher.logits + row * teacher.stride;
  terms.kind = KIND;
  if (a.mask.data && !data_of<int32_t>(a.mask)[row]) {
    const float zeros[W] = {};
    for (int i = begin + threadIdx.x * W; i < end && a.backward; i += step) store(out + i, zeros);
    if (threadIdx.x == 0 && begin == 0) write(a.loss, row, 0), write(a.entropy, row, 0);
    return;
  }

  // The softmaxes. Loads of several steps are on their way together.
  constexpr int STEPS = HELD ? 2 : 1;
  T *held = reinterpret_cast<T *>(held_bytes), *held_others = held + part;
  PartialSoftmax own, theirs;
  float u[W], t[W], slope[W], unused[W];
#pragma unroll 1
  for (int first = begin + threadIdx.x * W; first < end; first += STEPS * step) {
    Entries z[STEPS], other_z[STEPS];
    EACH (j, STEPS) {
      int i = first + j * step;
      if (i >= end) break;
      z[j] = load_group<T, W>(out + i);
      other_z[j] = load_group<T, W>(others + i);
    }
    EACH (j, STEPS) {
      int i = first + j * step;
      if (i >= end) break;
      if (HELD) {
        store_group(held + i - begin, z[j]);
        store_group(held_others + i - begin, other_z[j]);
      }
      entries_of<HELD>(u, unused, z[j], student, i, columns);
      entries_of<HELD>(t, unused, other_z[j], teacher, i, columns);
      add_entries<KIND != FORWARD_KL>(own, u, i, student.distance);
      add_entries<false>(theirs, t, i, teacher.distance);
    }
  }
  unsigned long long *parts = data_of<unsigned long long>(a.parts) + row * (2 * ROW_BLOCKS * 3);
  Ranked best = block_max(ranked(own.max, own.column)), teacher_best = block_max(ranked(theirs.max, 0));
  float max = ranked_value(best), teacher_max = ranked_value(teacher_best);
  float2 sums = block_sum(
      make_float2(sum_below(own, max, student.distance), sum_below(theirs, teacher_max, teacher.distance)));
  if (HELD) {
    unsigned long long found[3] = {best, teacher_best, packed(sums.x, sums.y)};
    exchange(parts, found);
    best = warp_max(found[0]), teacher_best = warp_max(found[1]), sums = unpacked(found[2]);
    own = {ranked_value(found[0]), sums.x}, theirs = {ranked_value(found[1]), sums.y};
    max = ranked_value(best), teacher_max = ranked_value(teacher_best);
    bool some = threadIdx.x % 32 < ROW_BLOCKS;
    sums.x = some ? sum_below(own, max, student.distance) : 0;
    sums.y = some ? sum_below(theirs, teacher_max, teacher.distance) : 0;
    sums = warp_sum(sums);
  }
  RowSoftmax p = {max, 1 / sums.x, logf(sums.x)}, q = {teacher_max, 1 / sums.y, logf(sums.y)};

  auto student_distance = [&](float v) { return fmaxf((v - p.max) * student.distance, LEAST_DISTANCE); };
  auto entry_of = [&](float student_u, float teacher_u) {
    return divergence_entry(terms, p, q, student_distance(student_u),
                            fmaxf((teacher_u - q.max) * teacher.distance, LEAST_DISTANCE));
  };
  auto load_both = [&](int i) {
    Entries z = load_group<T, W>(HELD ? held + i - begin : out + i);
    Entries other_z = load_group<T, W>(HELD ? held_others + i - begin : others + i);
    entries_of<HELD>(u, slope, z, student, i, columns);
    entries_of<HELD>(t, unused, other_z, teacher, i, columns);
  };
  float lead_at_max = 0;
  if (KIND != FORWARD_KL) {
    float at_best[1], none[1];
    int column = ranked_column(best);
    entries_of<HELD>(at_best, none, Group<T, 1>{others[column]}, teacher, column, columns);
    lead_at_max = entry_of(p.max, at_best[0]).lead;
  }
  float scale = read(a.weights, row, 1) * student.distance * ENTRY_UNIT;
  auto store_gradient = [&](int i, float mean_excess) {
    float d[W];
    EACH (k, W)
      d[k] = divergence_slope(terms, entry_of(u[k], t[k]), lead_at_max, mean_excess) * slope[k] * scale;
    store(out + i, d);
  };
  float loss = 0, excess = 0, distance = 0;
#pragma unroll 1
  for (int i = begin + threadIdx.x * W; i < end; i += step) {
    load_both(i);
    EACH (k, W) {
      DivergenceEntry e = entry_of(u[k], t[k]);
      loss += divergence_part(terms, e);
      excess += e.p * (e.lead - lead_at_max);
      distance += e.p * student_distance(u[k]);
    }
    if (KIND == FORWARD_KL && a.backward) store_gradient(i, 0);
  }
  sums = block_sum(make_float2(loss, distance));
  if (KIND != FORWARD_KL) excess = block_sum(excess);
  if (HELD) {
    unsigned long long found[3] = {packed(sums.x, sums.y), packed(excess, 0)};
    exchange(parts + ROW_BLOCKS * 3, found);
    sums = warp_sum(unpacked(found[0])), excess = warp_sum(unpacked(found[1]).x);
  }
  if (threadIdx.x == 0 && begin == 0)
    write(a.loss, row, sums.x), write(a.entropy, row, p.log_sum - ENTRY_UNIT * sums.y);
  for (int i = begin + threadIdx.x * W; KIND != FORWARD_KL && a.backward && i < end; i += step) {
    load_both(i);
    store_gradient(i, excess);
  }
}

template <typename T> static Head<T> kernels_head(const DivergenceHead &h) {
  return {data_of<T>(h.logits),
          h.logits.stride,
          {data_of<T>(h.bias), h.softcap},
          inverse_temperature(h.temperature) / ENTRY_UNIT};
}

template <typename T, int W, DivergenceKind KIND>
static void divergence(Backend *backend, const LceDivergence *a, const DivergenceTerms &terms) {
  Head<T> student = kernels_head<T>(a->student), teacher = kernels_head<T>(a->teacher);
  int64_t rows = a->student.logits.shape[0], groups = ceil_div(a->student.logits.shape[1], W);
  // What fits in an SM's shared memory beside 1 KiB a block for the system and block_sum.
  const size_t bytes = (size_t)ceil_div(groups, ROW_BLOCKS) * 2 * W * sizeof(T), sm_bytes = 227 << 10;
  bool plain =
      !student.capped.bias && !teacher.capped.bias && student.capped.cap == 0 && teacher.capped.cap == 0;
  if (W > 1 && plain && hopper_runs(backend) && groups >= LEAST_GROUPS && bytes + 2048 <= sm_bytes) {
    int blocks = (int)min_i64(3, (int64_t)(sm_bytes / (bytes + 2048)));
    return launch_kernel({"lce_divergence", cuda_stream(backend), rows * ROW_BLOCKS, SM_THREADS / blocks,
                          false, bytes, ROW_BLOCKS},
                         divergence_kernel<T, W, KIND, (W > 1)>, *a, student, teacher, terms);
  }
  launch_kernel({"lce_divergence", cuda_stream(backend), rows, row_threads(groups, 1024)},
                divergence_kernel<T, W, KIND, false>, *a, student, teacher, terms);
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
