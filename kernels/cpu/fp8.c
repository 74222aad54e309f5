// FP8 by its definition: every element is rounded to its code, and linear.c multiplies the values of codes.
#include <float.h>
#include <math.h>

#include "kernels/cpu/cpu.h"

static void write_codes(Quantized out, Tensor x) {
  int64_t rows = x.shape[0], columns = x.shape[1];
  float factor = fminf(E4M3_MAX / *(float *)out.amax.data, FLT_MAX);
  uint8_t *codes = out.codes.data, *transposed = out.transposed.data;
  EACH_PARALLEL (n, rows)
    for (int64_t i = 0; i < columns; i++) {
      uint8_t code = e4m3_from_f32(cpu_row(x, n)[i] * factor);
      if (codes) codes[n * columns + i] = code;
      if (transposed) transposed[i * rows + n] = code;
    }
}

void cpu_quantize(Backend *backend, const Quantize *a) {
  if (!a->out.amax_known) cpu_amax(a->out.amax, a->x);
  write_codes(a->out, a->x);
}

void cpu_quantize_made(Quantized out, Tensor x) {
  if (!tensor_exists(out.amax)) return;
  int64_t apart = fp8_rows_apart(x.shape[0]);
  Tensor sample = x;
  sample.shape[0] = ceil_div(x.shape[0], apart), sample.stride *= apart;
  float limit = 0, *amax = out.amax.data;
  cpu_amax(tensor_1d(&limit, DTYPE_F32, 1), sample);
  if (apart > 1 && isfinite(limit * FP8_MARGIN)) limit *= FP8_MARGIN;
  cpu_amax(out.amax, x);
  if (*amax <= limit) *amax = limit; // a NaN stays
  write_codes(out, x);
}

void cpu_quantize_rows(Backend *backend, const QuantizeRows *a) {
  int64_t rows = a->x.shape[0], columns = a->x.shape[1], scales = tensor_count(a->out.scale);
  int64_t rows_each = rows / scales, step = ceil_div(rows_each, FP8_SUMMED_ROWS);
  EACH_PARALLEL (k, scales) {
    Tensor x = tensor_rows(a->x, k * rows_each, rows_each);
    uint8_t *codes = (uint8_t *)a->out.codes.data + k * rows_each * columns;
    float amax;
    cpu_amax(tensor_1d(&amax, DTYPE_F32, 1), x);
    float factor = fminf(E4M3_MAX / amax, FLT_MAX);
    double squares = 0, products = 0;
    for (int64_t n = 0; n < rows_each; n++)
      for (int64_t i = 0; i < columns; i++) {
        float scaled = cpu_row(x, n)[i] * factor;
        uint8_t code = codes[n * columns + i] = e4m3_from_f32(scaled);
        if (n % step) continue;
        squares += (double)scaled * (double)scaled;
        products += (double)scaled * (double)e4m3_to_f32(code);
      }
    if (products == 0) squares = products = 1; // the values, if any, are in other rows
    cpu_store(a->out.scale, k, amax == 0 ? 1 : squares / products / (double)factor);
  }
}

Tensor cpu_dequantize_rows(QuantizedRows x, float *to) {
  int64_t columns = x.codes.shape[1];
  const uint8_t *from = x.codes.data;
  const float *scales = x.scale.data;
  bool by_row = tensor_count(x.scale) > 1;
  float values[256];
  for (int i = 0; i < 256; i++) values[i] = e4m3_to_f32((uint8_t)i);
  EACH_PARALLEL (n, x.codes.shape[0])
    for (int64_t i = n * columns; i < (n + 1) * columns; i++)
      to[i] = values[from[i]] * scales[by_row ? n : 0];
  return tensor_2d(to, DTYPE_F32, x.codes.shape[0], columns);
}

Tensor cpu_dequantize(Quantized x, float *to) {
  float scale = *(const float *)x.amax.data / E4M3_MAX;
  return cpu_dequantize_rows((QuantizedRows){.codes = x.codes, .scale = tensor_1d(&scale, DTYPE_F32, 1)}, to);
}
