#include "kernels/base/random.h"

#include <math.h>

double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return (double)(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const double two_pi = 6.283185307179586476925;
  double u = 1.0 - random_uniform(seed, stream, 2 * index); // (0, 1]: the logarithm stays finite
  double v = random_uniform(seed, stream, 2 * index + 1);
  return sqrt(-2.0 * log(u)) * cos(two_pi * v);
}

uint64_t random_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count) {
  int half = 1;
  while (half < 32 && ((uint64_t)1 << (2 * half)) < count) half++;
  uint64_t mask = ((uint64_t)1 << half) - 1;
  do {
    uint64_t left = index >> half, right = index & mask;
    for (uint64_t round = 0; round < 4; round++) {
      uint64_t next = left ^ (random_bits(seed, stream * 4 + round, right) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= count);
  return index;
}
