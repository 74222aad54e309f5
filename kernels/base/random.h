// Random numbers as a function of (seed, stream, index) alone: the same in any thread, rank, run and device.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
#define RANDOM_INLINE static __host__ __device__ __forceinline__
#else
#define RANDOM_INLINE static inline
#endif

// splitmix64's finaliser (Steele, Lea and Flood 2014).
RANDOM_INLINE uint64_t random_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

RANDOM_INLINE uint64_t random_key(uint64_t seed, uint64_t stream) {
  return random_mix(seed + 0x9E3779B97F4A7C15u) ^
         random_mix(stream * 0xD1342543DE82EF95u + 0x632BE59BD9B4E019u);
}

// 64 well-mixed bits for a counter and a key.
RANDOM_INLINE uint64_t random_bits_of(uint64_t key, uint64_t index) {
  return random_mix(key + (index + 1) * 0x9E3779B97F4A7C15u);
}
RANDOM_INLINE uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  return random_bits_of(random_key(seed, stream), index);
}

// Uniform in [0, 1), 53 bits.
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index);

// Standard normal (Box-Muller on two uniforms of the same index).
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);

// Permutes `index` in [0, count) by the permutation of (seed, stream): a four-round Feistel network, walked
// until it lands inside the range.
uint64_t random_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count);
