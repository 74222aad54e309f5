// Newton-Schulz: the nearest matrix whose singular values are all equal, nearly, by GEMMs alone (Jordan et al. 2024). Five steps
// of an odd polynomial, a s + b s^3 + c s^5, bring singular values from anywhere in (0, 1] to between 0.7 and 1.2; with
// A = y y^T it is (a + b A + c A A) y. Where x has more rows than columns the same is done to its transpose: A = y^T y.
#include "kernels/kernels.h"

static Matrices push_matrices(Backend *backend, Dtype dtype, int64_t count, int64_t rows, int64_t columns) {
  int64_t apart = round_up(rows * columns, 128);
  Tensor all = memory_push_1d(&backend->memory, "Newton-Schulz", MEMORY_WORKSPACE, dtype, count * apart);
  return (Matrices){tensor_2d(all.data, dtype, rows, columns), apart};
}

void orthogonalize(Backend *backend, Matrices x, int64_t count, float scale) {
  enum { STEPS = 5 };
  const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
  int64_t rows = x.first.shape[0], columns = x.first.shape[1], side = min_i64(rows, columns);
  bool tall = rows > columns;
  MemoryMark mark = memory_mark(&backend->memory);
  Matrices y = push_matrices(backend, x.first.dtype, count, rows, columns);
  Matrices gram = push_matrices(backend, x.first.dtype, count, side, side);
  Matrices polynomial = push_matrices(backend, x.first.dtype, count, side, side);
  normalize(backend, (Normalize){.out = y, .x = x, .count = count});
  for (int step = 1; step <= STEPS; step++) {
    float factor = step == STEPS ? scale : 1;
    Matrices none = {0}, left = tall ? y : polynomial, right = tall ? polynomial : y, next = x;
    multiply(backend, (Multiply){gram, y, y, none, count, tall, !tall, .alpha = 1});
    multiply(backend, (Multiply){polynomial, gram, gram, gram, count, .alpha = c, .beta = b});
    multiply(backend, (Multiply){x, left, right, y, count, .alpha = factor, .beta = factor * a});
    x = y; // the first step reads y, so the last of five writes x
    y = next;
  }
  memory_pop_to(&backend->memory, mark);
}
