// The largest number that fits: a batch or a chunk, into a budget.
#ifndef LCE_BASE_LARGEST_H
#define LCE_BASE_LARGEST_H

#include <stdbool.h>
#include <stdint.h>

typedef bool (*Fits)(const void *budget, int64_t number);

// The largest number of [known, above) for which fits(budget, number), which must hold for all numbers up to some
// one and for none after it; of `known` it is taken to be true and not asked. Asks log2(above - known) times.
int64_t largest_that_fits(Fits fits, const void *budget, int64_t known, int64_t above);

#endif
