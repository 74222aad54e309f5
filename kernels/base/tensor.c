#include "kernels/base/tensor.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/base/fail.h"

size_t dtype_bytes(Dtype dtype) {
  static const size_t bytes[DTYPE_COUNT] = {4, 2, 4, 8, 1};
  return bytes[dtype];
}

const char *dtype_name(Dtype dtype) {
  static const char *const names[DTYPE_COUNT] = {"fp32", "bf16", "int32", "int64", "e4m3"};
  return names[dtype];
}

// Planned tensors have addresses that nothing lies behind, so addresses are moved as integers.
static void *address_plus(void *data, int64_t elements, Dtype dtype) {
  return data ? (void *)((uintptr_t)data + (uintptr_t)elements * dtype_bytes(dtype)) : NULL;
}

Tensor tensor_1d(void *data, Dtype dtype, int64_t d0) {
  return (Tensor){.data = data, .dtype = dtype, .rank = 1, .shape = {d0}, .stride = d0};
}

Tensor tensor_2d(void *data, Dtype dtype, int64_t d0, int64_t d1) {
  return (Tensor){.data = data, .dtype = dtype, .rank = 2, .shape = {d0, d1}, .stride = d1};
}

int64_t tensor_count(Tensor t) {
  int64_t count = t.rank > 0;
  for (int i = 0; i < t.rank; i++) count *= t.shape[i];
  return count;
}

size_t tensor_bytes(Tensor t) {
  return (size_t)tensor_count(t) * dtype_bytes(t.dtype);
}

bool tensor_is_dense(Tensor t) {
  return t.rank == 0 || t.stride == t.shape[t.rank - 1];
}

bool tensor_same_shape(Tensor a, Tensor b) {
  return a.rank == b.rank && a.shape[0] == b.shape[0] && (a.rank == 1 || a.shape[1] == b.shape[1]);
}

Tensor tensor_rows(Tensor t, int64_t first, int64_t count) {
  if (!tensor_exists(t)) return t;
  if (first < 0 || count < 0 || first + count > t.shape[0])
    fail("rows %lld to %lld lie outside of %s", (long long)first, (long long)(first + count),
         tensor_text(t).text);
  t.data = address_plus(t.data, first * (t.rank == 1 ? 1 : t.stride), t.dtype);
  t.shape[0] = count;
  if (t.rank == 1) t.stride = count;
  return t;
}

Tensor tensor_columns(Tensor t, int64_t first, int64_t count) {
  int64_t length = t.shape[t.rank - 1];
  if (first < 0 || count < 0 || first + count > length)
    fail("columns %lld to %lld lie outside of %s", (long long)first, (long long)(first + count),
         tensor_text(t).text);
  t.data = address_plus(t.data, first, t.dtype);
  t.shape[t.rank - 1] = count;
  return t;
}

Tensor tensor_flat(Tensor t) {
  if (!tensor_is_dense(t))
    fail("%s has gaps between its rows and cannot be read as one row", tensor_text(t).text);
  return tensor_1d(t.data, t.dtype, tensor_count(t));
}

Tensor tensor_reshape_2d(Tensor t, int64_t rows, int64_t columns) {
  if (!tensor_is_dense(t) || tensor_count(t) != rows * columns)
    fail("%s cannot be read as [%lld, %lld]", tensor_text(t).text, (long long)rows, (long long)columns);
  return tensor_2d(t.data, t.dtype, rows, columns);
}

TensorText tensor_text(Tensor t) {
  TensorText out = {"absent"};
  const char *format = t.rank == 1 ? "%s [%lld]" : "%s [%lld, %lld]";
  if (tensor_exists(t))
    snprintf(out.text, sizeof out.text, format, dtype_name(t.dtype), (long long)t.shape[0],
             (long long)t.shape[1]);
  return out;
}

uint16_t bf16_from_f32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

uint8_t e4m3_from_f32(float value) {
  if (isnan(value)) return 0x7F;
  uint8_t sign = signbit(value) ? 0x80 : 0;
  float size = fabsf(value);
  if (size >= E4M3_MAX) return sign | 0x7E;
  // Below 2^-6 in steps of 2^-9, the eighth of these is the first normal code.
  if (size < 0x1p-6f) return sign | (uint8_t)lrintf(size * 0x1p9f);
  uint32_t bits;
  memcpy(&bits, &size, sizeof bits);
  bits += 0x7FFFFu + (bits >> 20 & 1u);
  return sign | (uint8_t)((bits >> 20) - (127 - 7) * 8);
}

float e4m3_to_f32(uint8_t code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return NAN;
  float size = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
  return code & 0x80 ? -size : size;
}
