// lce_divergence on a GPU. One block owns a row of both heads: it reads them for the two softmaxes, whose maxima and
// sums of exponentials are kept together, again for the loss, and again for the gradient where that needs the loss.
#include <float.h>

#include "kernels/cuda/cuda_common.cuh"
#include "tools/torch/liblce/divergence_row.h"

template <typename T> struct Head {
  T *logits;
  int64_t stride;
  Capped<T> capped;
  float inv_temperature;
};

// A thread's part of a softmax; max starts finite, so that minus infinity counts as 0.
struct PartialSoftmax {
  float max = -FLT_MAX, sum = 0;
  int column = 0; // the maximum's
};

// v of W entries from column i on, with du/dz; LEAST_DISTANCE beyond the row's end.
template <int W, typename T>
static DEVICE void load_entries(float (&v)[W], float (&slope)[W], const Head<T> &head, int64_t row, int i,
                                int columns) {
  load(v, head.logits + row * head.stride + i);
  EACH (k, W) {
    slope[k] = 0;
    v[k] = i + k < columns ? fmaxf(head.capped(v[k], i + k, slope[k]) * head.inv_temperature, LEAST_DISTANCE)
                           : LEAST_DISTANCE;
  }
}

template <int W> static DEVICE void add_entries(PartialSoftmax &s, const float (&v)[W], int i) {
  float before = s.max;
  EACH (k, W)
    if (v[k] > s.max) s.max = v[k], s.column = i + k;
  s.sum *= __expf(before - s.max);
  EACH (k, W) s.sum += __expf(v[k] - s.max);
}

// The block's; `column` is the maximum's.
static DEVICE RowSoftmax row_softmax(const PartialSoftmax &s, int &column) {
  Ranked best = block_max(ranked(s.max, s.column));
  float max = ranked_value(best), sum = block_sum(s.sum * __expf(s.max - max));
  column = ranked_column(best);
  return {max, 1 / sum, logf(sum)};
}

template <typename T, int W, DivergenceKind KIND>
static __global__ void __launch_bounds__(1024)
    divergence_kernel(const __grid_constant__ LceDivergence a, const __grid_constant__ Head<T> student,
                      const __grid_constant__ Head<T> teacher, DivergenceTerms terms) {
  int64_t row = blockIdx.x;
  int columns = (int)a.student.logits.shape[1], step = blockDim.x * W, best, teacher_best;
  T *out = student.logits + row * student.stride;
  terms.kind = KIND;
  if (a.mask.data && !data_of<int32_t>(a.mask)[row]) {
    const float zeros[W] = {};
    for (int i = threadIdx.x * W; i < columns && a.backward; i += step) store(out + i, zeros);
    if (threadIdx.x == 0) write(a.loss, row, 0), write(a.entropy, row, 0);
    return;
  }
  float u[W], t[W], slope[W], unused[W];
  auto load_both = [&](int i) {
    load_entries(u, slope, student, row, i, columns);
    load_entries(t, unused, teacher, row, i, columns);
  };
  PartialSoftmax own, others;
  for (int i = threadIdx.x * W; i < columns; i += step) {
    load_both(i);
    add_entries(own, u, i);
    add_entries(others, t, i);
  }
  RowSoftmax p = row_softmax(own, best), q = row_softmax(others, teacher_best);
  auto entry_of = [&](float student_v, float teacher_v) {
    return divergence_entry(terms, p, q, fmaxf(student_v - p.max, LEAST_DISTANCE),
                            fmaxf(teacher_v - q.max, LEAST_DISTANCE));
  };
  float at_best[1], none[1], lead_at_max = 0;
  if (KIND != FORWARD_KL) {
    load_entries(at_best, none, teacher, row, best, columns);
    lead_at_max = entry_of(p.max, at_best[0]).lead;
  }
  float scale = read(a.weights, row, 1) * student.inv_temperature;
  auto store_gradient = [&](int i, float mean_excess) {
    float d[W];
    EACH (k, W) {
      float gradient = divergence_slope(terms, entry_of(u[k], t[k]), lead_at_max, mean_excess);
      d[k] = i + k < columns ? gradient * slope[k] * scale : 0;
    }
    store(out + i, d);
  };
  float loss = 0, excess = 0, distance = 0;
  for (int i = threadIdx.x * W; i < columns; i += step) {
    load_both(i);
    EACH (k, W) {
      DivergenceEntry e = entry_of(u[k], t[k]);
      loss += divergence_part(terms, e);
      excess += e.p * (e.lead - lead_at_max);
      distance += e.p * fmaxf(u[k] - p.max, LEAST_DISTANCE);
    }
    if (KIND == FORWARD_KL && a.backward) store_gradient(i, 0);
  }
  loss = block_sum(loss), distance = block_sum(distance);
  if (threadIdx.x == 0) write(a.loss, row, loss), write(a.entropy, row, p.log_sum - distance);
  if (KIND == FORWARD_KL || !a.backward) return;
  excess = block_sum(excess);
  for (int i = threadIdx.x * W; i < columns; i += step) {
    load_both(i);
    store_gradient(i, excess);
  }
}

template <typename T> static Head<T> kernels_head(const DivergenceHead &h) {
  return {data_of<T>(h.logits),
          h.logits.stride,
          {data_of<T>(h.bias), h.softcap},
          inverse_temperature(h.temperature)};
}

void cuda_lce_divergence(Backend *backend, const LceDivergence *a) {
  Tensor logits = a->student.logits;
  int64_t rows = logits.shape[0], columns = logits.shape[1];
  DivergenceTerms terms = divergence_terms(a->kind, (double)a->beta);
  with_float(logits.dtype, [&](auto type) {
    using T = decltype(type);
    bool wide = rows_start_aligned(logits, WIDTH<T>) && rows_start_aligned(a->teacher.logits, WIDTH<T>);
    with_width<T>(wide, [&](auto W) {
      Head<T> student = kernels_head<T>(a->student), teacher = kernels_head<T>(a->teacher);
      KernelLaunch launch = {"lce_divergence", cuda_stream(backend), rows,
                             row_threads(ceil_div(columns, W), 1024)};
      switch (a->kind) {
      case FORWARD_KL:
        return launch_kernel(launch, divergence_kernel<T, W, FORWARD_KL>, *a, student, teacher, terms);
      case REVERSE_KL:
        return launch_kernel(launch, divergence_kernel<T, W, REVERSE_KL>, *a, student, teacher, terms);
      case JSD:
        return launch_kernel(launch, divergence_kernel<T, W, JSD>, *a, student, teacher, terms);
      }
    });
  });
}
