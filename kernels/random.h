// Random numbers as a function of (seed, stream, index) alone, the same in any thread, rank or resumed run.
#pragma once

#include <stdint.h>

// 64 well-mixed bits for a counter (splitmix64's finaliser over a keyed counter; Steele, Lea and Flood 2014).
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index);

// Uniform in [0, 1), 53 bits.
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index);

// Standard normal (Box-Muller on two uniforms of the same index).
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);

// Where `index` in [0, count) goes under the pseudo-random permutation of (seed, stream): a four-round Feistel network,
// walked until it lands inside the range.
uint64_t random_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t count);
