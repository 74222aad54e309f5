// FP8 by its definition: every element is rounded to its code, and matmuls multiply their values in fp32.
#include <float.h>
#include <math.h>

#include "kernels/cpu/cpu.h"

void cpu_quantize(Backend *backend, const Quantize *a) {
  int64_t rows = a->x.shape[0], columns = a->x.shape[1];
  if (!a->out.amax_known) cpu_amax(a->out.amax, a->x);
  float factor = fminf(E4M3_MAX / *(float *)a->out.amax.data, FLT_MAX);
  uint8_t *codes = a->out.codes.data, *transposed = a->out.transposed.data;
  EACH_PARALLEL (n, rows)
    for (int64_t i = 0; i < columns; i++) {
      uint8_t code = e4m3_from_f32(cpu_row(a->x, n)[i] * factor);
      if (codes) codes[n * columns + i] = code;
      if (transposed) transposed[i * rows + n] = code;
    }
}

size_t cpu_matmul_fp8_scratch(const MatmulFp8 *a) {
  return (size_t)(tensor_count(a->a.codes) + tensor_count(a->b.codes)) * sizeof(float);
}

static Tensor decode(Fp8 x, float *to) {
  float values[256], scale = *(const float *)x.amax.data / E4M3_MAX;
  for (int i = 0; i < 256; i++) values[i] = e4m3_to_f32((uint8_t)i) * scale;
  const uint8_t *from = x.codes.data;
  EACH_PARALLEL (i, tensor_count(x.codes)) to[i] = values[from[i]];
  return tensor_2d(to, DTYPE_F32, x.codes.shape[0], x.codes.shape[1]);
}

void cpu_matmul_fp8(Backend *backend, const MatmulFp8 *a) {
  float *values = a->workspace.data;
  LinearForward decoded = {.out = a->out,
                           .x = decode(a->a, values),
                           .weight = decode(a->b, values + tensor_count(a->a.codes)),
                           .bias = a->bias,
                           .residual = a->residual};
  cpu_linear_forward(backend, &decoded);
}
