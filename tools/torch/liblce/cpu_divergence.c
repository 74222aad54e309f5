// A divergence on the CPU: a thread takes a row.
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "tools/torch/liblce/divergence_row.h"

typedef struct {
  float *u, inv_temperature;
  RowSoftmax softmax;
} Row;

// Adds the bias, caps, and computes the row's softmax.
static Row row_of(const DivergenceHead *head, float share, int64_t n) {
  int64_t count = head->logits.shape[1];
  Row row = {.u = cpu_row(head->logits, n), .inv_temperature = inverse_temperature(head->temperature)};
  bias_and_cap(row.u, head->bias.data, head->softcap, count, NULL);
  float max = maximum_of(row.u, count);
  row.softmax = row_softmax(max, exp_and_sum(row.u, max, row.inv_temperature, count, NULL), share);
  return row;
}

ENTRY float distance_of(Row row, int64_t j) {
  float distance = (row.u[j] - row.softmax.max) * row.inv_temperature;
  return distance < LEAST_DISTANCE ? LEAST_DISTANCE : distance;
}

// `kind` is a constant, so that each loop becomes vector instructions.
ENTRY void divergence_of_row(const LinearDivergence *a, DivergenceKind kind, int64_t n) {
  enum { BLOCK = 1024 }; // summed in fp32 lanes, the blocks in double
  int64_t count = a->student.logits.shape[1];
  float *u = cpu_row(a->student.logits, n), cap = a->student.softcap;
  const DivergenceTerms terms = divergence_terms(kind, (double)a->beta);
  bool backward = tensor_exists(a->dx) || tensor_exists(a->dweight);
  if (tensor_exists(a->mask) && !((const int32_t *)a->mask.data)[n]) {
    if (backward) memset(u, 0, (size_t)count * sizeof *u);
    cpu_store(a->loss, n, 0);
    cpu_store(a->entropy, n, 0);
    return;
  }
  Row student = row_of(&a->student, terms.share, n), teacher = row_of(&a->teacher, terms.teacher_share, n);
#define ENTRY_AT(j)                                                                                          \
  entry_of_distances(terms, student.softmax, teacher.softmax, distance_of(student, j),                       \
                     distance_of(teacher, j))
  int64_t best = index_of(u, count, student.softmax.max);
  float lead_at_max = ENTRY_AT(best).lead;
  double loss = 0, mean_excess = 0, mean_distance = 0;
  for (int64_t first = 0; first < count; first += BLOCK) {
    float parts = 0, excess = 0, distances = 0;
    int64_t last = min_i64(count, first + BLOCK);
#pragma omp simd reduction(+ : parts, excess, distances)
    for (int64_t j = first; j < last; j++) {
      DivergenceEntry e = ENTRY_AT(j);
      parts = plus_divergence(parts, terms, e);
      excess += e.p * (e.lead - lead_at_max);
      distances += e.p * distance_of(student, j);
    }
    loss += parts, mean_excess += excess, mean_distance += distances;
  }
  cpu_store(a->loss, n, loss);
  mean_excess /= (double)terms.share, mean_distance /= (double)terms.share;
  cpu_store(a->entropy, n, student.softmax.log_sum + (double)terms.log_share - mean_distance);
  if (!backward) return;
  float scale = (float)cpu_read(a->token_weights, n, 1) * student.inv_temperature;
  EACH_SIMD (j, count) {
    DivergenceEntry e = ENTRY_AT(j);
    float slope = cap > 0 ? 1 - u[j] / cap * (u[j] / cap) : 1;
    u[j] = divergence_slope(terms, e.p, e.q, e.lead - lead_at_max, (float)mean_excess) * slope * scale;
  }
}

void cpu_divergence(Backend *backend, const LinearDivergence *a) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t n = 0; n < a->student.logits.shape[0]; n++) {
    if (a->kind == FORWARD_KL) divergence_of_row(a, FORWARD_KL, n);
    if (a->kind == REVERSE_KL) divergence_of_row(a, REVERSE_KL, n);
    if (a->kind == JSD) divergence_of_row(a, JSD, n);
  }
}
