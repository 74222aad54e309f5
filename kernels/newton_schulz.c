// Newton-Schulz: the nearest matrix whose singular values are all equal, nearly, by GEMMs alone (Jordan et
// al. 2024). Five steps of an odd polynomial, a s + b s^3 + c s^5, bring singular values from anywhere in (0,
// 1] to between 0.7 and 1.2; with A = y y^T it is (a + b A + c A A) y. Where x has more rows than columns the
// same is done to its transpose: A = y^T y.
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

void orthogonalize(Backend *backend, const Matrices *x, int kinds, int64_t count, float scale) {
  enum { STEPS = 5 };
  const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
  int64_t rows = x->first.shape[0], columns = x->first.shape[1], side = min_i64(rows, columns);
  int64_t all = kinds * count;
  bool tall = rows > columns;
  Dtype dtype = x->first.dtype;
  MemoryMark mark = memory_mark(&backend->memory);
  Matrices y = push_matrices(backend, dtype, all, rows, columns), none = {0};
  Matrices next = push_matrices(backend, dtype, all, rows, columns);
  Matrices gram = push_matrices(backend, dtype, all, side, side);
  Matrices polynomial = push_matrices(backend, dtype, all, side, side);
  for (int i = 0; i < kinds; i++)
    frobenius_normalize(backend, (FrobeniusNormalize){.out = from(y, i * count), .x = x[i], .count = count});
  for (int step = 1; step <= STEPS; step++) {
    bool last = step == STEPS; // writes x
    float factor = last ? scale : 1;
    batched_gemm(backend, (BatchedGemm){gram, y, y, none, all, tall, !tall, .alpha = 1});
    batched_gemm(backend, (BatchedGemm){polynomial, gram, gram, gram, all, .alpha = c, .beta = b});
    for (int i = 0; i < (last ? kinds : 1); i++) {
      Matrices p = from(polynomial, i * count), z = from(y, i * count);
      batched_gemm(backend, (BatchedGemm){last ? x[i] : next, tall ? z : p, tall ? p : z, z,
                                          last ? count : all, .alpha = factor, .beta = factor * a});
    }
    Matrices kept = y;
    y = next, next = kept;
  }
  memory_pop_to(&backend->memory, mark);
}
