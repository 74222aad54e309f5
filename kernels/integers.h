#pragma once

#include <stdbool.h>
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

typedef bool (*Fits)(const void *budget, int64_t count);

// The largest count from 1 to `max` that fits, where all below one that fits do; 0: none. Searches in halves.
static inline int64_t largest_that_fits(Fits fits, const void *budget, int64_t max) {
  int64_t known = 0, above = 1;
  for (; above <= max && fits(budget, above); above *= 2) known = above;
  above = min_i64(above, max + 1);
  while (above - known > 1) {
    int64_t middle = known + (above - known) / 2;
    *(fits(budget, middle) ? &known : &above) = middle;
  }
  return known;
}
