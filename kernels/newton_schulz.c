// Newton-Schulz, by GEMMs alone (Jordan et al. 2024): about U V^T of y = U S V^T, y's polar factor. Four steps
// of odd polynomials, a s + b s^3 + c s^5, bring singular values from between 0.003 and 1 to between 0.78 and
// 1.2; with A = y y^T a step is (a + b A + c A A) y. If x has more rows than columns, its transpose is treated
// so: A = y^T y.
//
// If one side of x is more than 1.5 times the other, the last two steps are one product Q y. The first has P
// = a + b A + c A A, the second A' = P A P, and Q = (a' + b' A' + c' A' A') P: all as small as A.
//
// aol_scale makes y of x: it scales each row (of the shorter side) by the first step's own A, which brings
// singular values into (0, 1] (Boissin et al. 2025, "Turbo-Muon"). So the result is the polar factor of D x, not
// of x. Most are twice what x / |x| has, so that four steps reach as far as Jordan's five. The polynomials have
// the least error on [0.003, 1] (Amsel et al. 2025, "The Polar Express"), but that the first leaves room for
// values 5% too large by rounding, and the next two for 2%.
#include "kernels/kernels.h"

static Matrices push_matrices(Backend *backend, Dtype dtype, int64_t count, int64_t rows, int64_t columns) {
  int64_t apart = round_up(rows * columns, 128);
  Tensor all = memory_push_1d(&backend->memory, "Newton-Schulz", MEMORY_WORKSPACE, dtype, count * apart);
  return (Matrices){tensor_2d(all.data, dtype, rows, columns), apart};
}

static Matrices from(Matrices m, int64_t first) {
  m.first.data = (char *)m.first.data + first * m.apart * (int64_t)dtype_bytes(m.first.dtype);
  return m;
}

// Turns A in `gram` into Q: the step with P, then one with a, b, c.
static void append_step(Backend *backend, Matrices gram, Matrices p, Matrices scratch, int64_t all, float a,
                        float b, float c) {
  Matrices none = {0};
  batched_gemm(backend, (BatchedGemm){scratch, p, gram, none, all, .alpha = 1});
  batched_gemm(backend, (BatchedGemm){gram, scratch, p, none, all, .alpha = 1});
  batched_gemm(backend, (BatchedGemm){scratch, gram, gram, gram, all, .alpha = c, .beta = b});
  batched_gemm(backend, (BatchedGemm){gram, scratch, p, p, all, .alpha = 1, .beta = a});
}

void orthogonalize(Backend *backend, const Matrices *x, int kinds, int64_t count, float scale) {
  enum { STEPS = 4 };
  static const float a[STEPS] = {7.9845f, 3.9641f, 3.4368f, 2.4901f},
                     b[STEPS] = {-21.3937f, -2.8377f, -2.4752f, -1.8343f},
                     c[STEPS] = {14.3833f, 0.5158f, 0.4762f, 0.4368f};
  int64_t rows = x->first.shape[0], columns = x->first.shape[1], side = min_i64(rows, columns);
  int64_t all = kinds * count;
  bool tall = rows > columns;
  Dtype dtype = x->first.dtype;
  MemoryMark mark = memory_mark(&backend->memory);
  Matrices y = push_matrices(backend, dtype, all, rows, columns), none = {0};
  Matrices next = push_matrices(backend, dtype, all, rows, columns);
  Matrices gram = push_matrices(backend, dtype, all, side, side);
  Matrices polynomial = push_matrices(backend, dtype, all, side, side);
  Tensor s = memory_push_2d(&backend->memory, "Newton-Schulz", MEMORY_WORKSPACE, DTYPE_F32, count, side);
  for (int i = 0; i < kinds; i++) {
    Matrices g = from(gram, i * count);
    batched_gemm(backend, (BatchedGemm){g, x[i], x[i], none, count, tall, !tall, .alpha = 1});
    aol_scale(backend, (AolScale){.out = from(y, i * count), .x = x[i], .gram = g, .s = s, .count = count});
  }
  bool combines = 2 * max_i64(rows, columns) > 3 * side; // the last two steps
  int last_step = combines ? STEPS - 2 : STEPS - 1;
  for (int step = 0; step <= last_step; step++) {
    bool last = step == last_step; // writes x
    float factor = last ? scale : 1;
    if (step > 0) batched_gemm(backend, (BatchedGemm){gram, y, y, none, all, tall, !tall, .alpha = 1});
    batched_gemm(backend, (BatchedGemm){polynomial, gram, gram, gram, all, .alpha = c[step], .beta = b[step],
                                        .diagonal = last && combines ? a[step] : 0});
    if (last && combines) {
      Matrices scratch = {tensor_2d(next.first.data, dtype, side, side), next.apart};
      append_step(backend, gram, polynomial, scratch, all, a[step + 1], b[step + 1], c[step + 1]);
      polynomial = gram;
    }
    for (int i = 0; i < (last ? kinds : 1); i++) {
      Matrices p = from(polynomial, i * count), z = from(y, i * count);
      batched_gemm(backend,
                   (BatchedGemm){last ? x[i] : next, tall ? z : p, tall ? p : z, last && combines ? none : z,
                                 last ? count : all, .alpha = factor, .beta = factor * a[step]});
    }
    Matrices kept = y;
    y = next, next = kept;
  }
  memory_pop_to(&backend->memory, mark);
}
