// lce_divergence on the CPU: a thread takes a row.
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "tools/torch/liblce/divergence_row.h"

#define INLINED static inline __attribute__((always_inline)) // so that `kind` is a constant in each loop

// Adds the bias, caps, and returns the row's softmax.
static RowSoftmax softmax_of(float *u, Tensor bias, float cap, float inv_temperature, int64_t count) {
  bias_and_cap(u, bias.data, cap, count, NULL);
  float max = maximum_of(u, count);
  double sum = exp_and_sum(u, max, inv_temperature, count, NULL);
  return (RowSoftmax){max, (float)log(sum), (float)(1 / sum)};
}

INLINED float distance_of(float u, RowSoftmax row, float inv_temperature) {
  float distance = (u - row.max) * inv_temperature;
  return distance < LEAST_DISTANCE ? LEAST_DISTANCE : distance;
}

INLINED void divergence_of_row(const LceDivergence *a, DivergenceTerms terms, int64_t n) {
  enum { BLOCK = 1024 }; // summed in fp32 lanes, the blocks in double
  int64_t count = a->logits.shape[1];
  float *u = cpu_row(a->logits, n), *t = cpu_row(a->teacher_logits, n), cap = a->softcap;
  if (tensor_exists(a->mask) && !((const int32_t *)a->mask.data)[n]) {
    if (a->backward) memset(u, 0, (size_t)count * sizeof *u);
    cpu_store(a->loss, n, 0);
    cpu_store(a->entropy, n, 0);
    return;
  }
  float inv_t = inverse_temperature(a->temperature), teacher_t = inverse_temperature(a->teacher_temperature);
  RowSoftmax student = softmax_of(u, a->bias, cap, inv_t, count);
  RowSoftmax teacher = softmax_of(t, a->teacher_bias, a->teacher_softcap, teacher_t, count);
#define ENTRY_AT(j)                                                                                          \
  divergence_entry(terms, student, teacher, distance_of(u[j], student, inv_t),                               \
                   distance_of(t[j], teacher, teacher_t))
  int64_t best = index_of(u, count, student.max);
  float lead_at_max = ENTRY_AT(best).lead;
  double loss = 0, mean_excess = 0, mean_distance = 0;
  for (int64_t first = 0; first < count; first += BLOCK) {
    float parts = 0, excess = 0, distances = 0;
    int64_t last = min_i64(count, first + BLOCK);
#pragma omp simd reduction(+ : parts, excess, distances)
    for (int64_t j = first; j < last; j++) {
      DivergenceEntry e = ENTRY_AT(j);
      parts += divergence_part(terms, e);
      excess += e.p * (e.lead - lead_at_max);
      distances += e.p * distance_of(u[j], student, inv_t);
    }
    loss += parts, mean_excess += excess, mean_distance += distances;
  }
  cpu_store(a->loss, n, loss);
  cpu_store(a->entropy, n, student.log_sum - mean_distance);
  if (!a->backward) return;
  float scale = (float)cpu_read(a->weights, n, 1) * inv_t;
  EACH_SIMD (j, count) {
    float slope = cap > 0 ? 1 - u[j] / cap * (u[j] / cap) : 1;
    u[j] = divergence_slope(terms, ENTRY_AT(j), lead_at_max, (float)mean_excess) * slope * scale;
  }
}

void cpu_lce_divergence(Backend *backend, const LceDivergence *a) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t n = 0; n < a->logits.shape[0]; n++) {
    DivergenceTerms terms = divergence_terms(a->kind, (double)a->beta);
    switch (a->kind) {
    case FORWARD_KL:
      terms.kind = FORWARD_KL;
      divergence_of_row(a, terms, n);
      break;
    case REVERSE_KL:
      terms.kind = REVERSE_KL;
      divergence_of_row(a, terms, n);
      break;
    case JSD:
      terms.kind = JSD;
      divergence_of_row(a, terms, n);
      break;
    }
  }
}
