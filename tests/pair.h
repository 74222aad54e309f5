// One tensor on the CUDA backend and on the CPU backend, and a test program that compares the two: for the
// CUDA backend's tests, in fp32 and in bf16. Both get the same values, rounded to the CUDA operands' dtype.
#pragma once

#include "tests/harness.h"

// The backend under test and the one it is compared with.
typedef struct {
  Harness *cuda, *cpu;
} Pair;

// The same tensor on both.
typedef struct {
  Tensor cuda, cpu;
} Both;

// A test program's main: the tests, whose state is a Pair, once with fp32 operands and once with bf16. Skips
// them where there is no CUDA device. With an argument, a pattern: only the tests whose names match.
int pair_main(int count, char **arguments);
void pop_pair(Pair *p);
// What harness_open calls the CUDA backend that is under test.
const char *pair_backend(void);

// Values known to both; the first upload rounds them to the dtype.
Both both_of(Pair *p, Dtype dtype, double *values, int64_t rows, int64_t columns, int64_t stride);
Both both_random(Pair *p, Dtype dtype, int64_t rows, int64_t columns, double scale);
Both both_strided(Pair *p, Dtype dtype, int64_t rows, int64_t columns, int64_t stride, double scale);
Both both_poisoned(Pair *p, Dtype dtype, int64_t rows, int64_t columns, int64_t stride);
// What is written (NaN before) or, when accumulating, added to.
Both both_result(Pair *p, Dtype dtype, int64_t rows, int64_t columns, bool accumulate);
Both both_ids(Pair *p, const int32_t *ids, int64_t count);
Both flat(Both b);
void check_both(Pair *p, const char *what, Both b, Tolerance tolerance);

// Every case runs the same calls on one side after the other.
typedef struct {
  Backend *backend;
  bool cuda;
} Side;

Tensor on(Side side, Both b);
Side side_of(Pair *p, int i); // 0: CUDA, 1: the CPU
