// The functions that the kernels apply to many elements, written so that a loop over them becomes vector
// instructions: no branches, no calls, no tables. Use them inside `#pragma omp simd`.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

// a * b + c, rounded once where the machine can.
static inline float multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static inline float float_from_bits(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline int32_t bits_from_float(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// 2^n for n in [-127, 127] (-127 gives 0); some number for any other n, as NaN makes them.
static inline float power_of_two(int32_t n) {
  return float_from_bits((int32_t)((uint32_t)(n + 127) << 23));
}

// e^x to within 1 ulp. With n = round(x / ln 2): e^x = 2^n e^r, |r| <= ln(2)/2, and e^r is a polynomial of
// degree 6. Overflow gives infinity, NaN stays NaN; results below the smallest normal number become 0,
// because subnormal arithmetic costs a hundred times as much and the difference is negligible here.
static inline float exp_f32(float x) {
  const float round_to_integer = 0x1.8p23f; // adding it leaves the nearest integer in the low mantissa bits
  float bounded = x > 89.0f ? 89.0f : x;
  bounded = bounded < -88.0f ? -88.0f : bounded;
  float shifted = multiply_add(bounded, 0x1.715476p0f, round_to_integer);
  int32_t n = bits_from_float(shifted) - bits_from_float(round_to_integer);
  float whole = shifted - round_to_integer;
  float r = multiply_add(whole, -0x1.62e4p-1f, bounded);
  r = multiply_add(whole, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6850e4p-10f;
  p = multiply_add(p, r, 0x1.123bccp-7f);
  p = multiply_add(p, r, 0x1.555b98p-5f);
  p = multiply_add(p, r, 0x1.55548ep-3f);
  p = multiply_add(p, r, 0x1.fffff8p-2f);
  p = multiply_add(p, r, 1.0f);
  p = multiply_add(p, r, 1.0f);
  // 2^n in two factors: n = 128 has none of its own, and the product then overflows only when e^x does.
  int32_t half = n >> 1;
  float result = p * power_of_two(half) * power_of_two(n - half);
  return x < -87.33654f ? 0.0f : result;
}

// 1 / (1 + e^-x)
static inline float sigmoid_f32(float x) {
  return 1.0f / (1.0f + exp_f32(-x));
}

// GELU in its tanh form. 1 + tanh(u) = 2 sigmoid(2u) exactly, which does not cancel for negative u:
// gelu(x) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
static inline float gelu_f32(float x) {
  const float two_k = 1.5957691216f; // 2 sqrt(2/pi)
  return x * sigmoid_f32(two_k * multiply_add(0.044715f * x * x, x, x));
}

// gelu'(x) = s + x s (1 - s) 2u', with s = sigmoid(2u).
static inline float gelu_derivative_f32(float x) {
  const float two_k = 1.5957691216f;
  float s = sigmoid_f32(two_k * multiply_add(0.044715f * x * x, x, x));
  float du = two_k * multiply_add(3 * 0.044715f * x, x, 1.0f);
  return multiply_add(x * s * (1.0f - s), du, s);
}

// tanh(x), to within a few ulp: 1 - 2 / (1 + e^2x) loses digits of a small x; the series up to x^7 does not.
static inline float tanh_f32(float x) {
  float square = x * x;
  float small =
      x * multiply_add(
              square, multiply_add(square, multiply_add(square, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f),
              1.0f);
  float large = 1.0f - 2.0f * sigmoid_f32(-2.0f * x);
  return square < 0.04f ? small : large;
}

// e[j] = exp((z[j] - anchor) * inv_temperature) for j < count, and the sum of them. `e` may be z itself, or
// NULL when only the sum is wanted. Blocks are summed in fp32 lanes, the blocks in double.
static inline double exp_and_sum(const float *z, float anchor, float inv_temperature, int64_t count,
                                 float *e) {
  enum { BLOCK = 1024 };
  double total = 0.0;
  for (int64_t first = 0; first < count; first += BLOCK) {
    int64_t last = count - first < BLOCK ? count : first + BLOCK;
    float sum = 0.0f;
    if (e) {
#pragma omp simd simdlen(16) // also where the compiler would rather take vectors of 8
      for (int64_t j = first; j < last; j++) e[j] = exp_f32((z[j] - anchor) * inv_temperature);
#pragma omp simd reduction(+ : sum)
      for (int64_t j = first; j < last; j++) sum += e[j];
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t j = first; j < last; j++) sum += exp_f32((z[j] - anchor) * inv_temperature);
    }
    total += sum;
  }
  return total;
}

// The sum of exp(d[j]) d[j], d[j] = (z[j] - anchor) * inv_temperature, over the finite ones.
static inline double exp_times_distance(const float *z, float anchor, float inv_temperature, int64_t count) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < count; j++) {
    float d = (z[j] - anchor) * inv_temperature;
    total += d == -INFINITY ? 0.0f : exp_f32(d) * d;
  }
  return total;
}

// u in place of z: z + bias and, with a cap above 0, cap tanh of that / cap; slope = du/dz. Both may be NULL.
static inline void bias_and_cap(float *z, const float *bias, float cap, int64_t count, float *slope) {
#pragma omp simd
  for (int64_t j = 0; j < (bias ? count : 0); j++) z[j] += bias[j];
#pragma omp simd
  for (int64_t j = 0; j < (cap > 0 ? count : 0); j++) {
    float t = tanh_f32(z[j] / cap);
    z[j] = cap * t;
    if (slope) slope[j] = 1.0f - t * t;
  }
}

// sum_j w[j] x[j]; w NULL: all are 1.
static inline double weighted_sum(const float *x, const float *w, int64_t count) {
  double total = 0.0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < count; j++) total += (double)x[j] * (w ? w[j] : 1.0f);
  return total;
}

// The first index of `value`; 0 if none.
static inline int64_t index_of(const float *z, int64_t count, float value) {
  for (int64_t j = 0; j < count; j++)
    if (z[j] == value) return j;
  return 0;
}

// The largest of the elements that are not NaN; -infinity when there are none.
static inline float maximum_of(const float *z, int64_t count) {
  enum { LANES = 16 }; // by hand: not every compiler makes vectors of a maximum that passes NaN over
  float lanes[LANES], maximum = -INFINITY;
  for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;
  int64_t whole = count / LANES * LANES;
  for (int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
    for (int l = 0; l < LANES; l++) lanes[l] = z[j + l] > lanes[l] ? z[j + l] : lanes[l];
  for (int l = 0; l < LANES; l++) maximum = lanes[l] > maximum ? lanes[l] : maximum;
  for (int64_t j = whole; j < count; j++) maximum = z[j] > maximum ? z[j] : maximum;
  return maximum;
}
