// Random numbers that are a function of (seed, stream, index) alone: no state, so any thread, rank or resumed
// run draws the same number for the same place.
#ifndef LCE_BASE_RANDOM_H
#define LCE_BASE_RANDOM_H

#include <stdint.h>

// 64 well-mixed bits for a counter (splitmix64's finaliser over a keyed counter; Steele, Lea and Flood 2014).
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index);

// Uniform in [0, 1), 53 bits.
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index);

// Standard normal (Box-Muller on two uniforms of the same index).
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);

// A pseudo-random permutation of [0, count): where `index` goes under the permutation named by (seed,
// stream). Needs no memory (a four-round Feistel network, walked until it lands inside the range). 0 <= index
// < count.
uint64_t random_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count);

#endif
