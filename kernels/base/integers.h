#pragma once

#include <stddef.h>
#include <stdint.h>

static inline int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static inline int64_t max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// a / b rounded up, for a >= 0 and b > 0.
static inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The multiple of b at or above a.
static inline int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

static inline size_t bytes_from_gib(double gib) {
  return (size_t)(gib * 0x1p30);
}
