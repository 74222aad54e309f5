// The measuring loop of the benchmarks.
#pragma once

#include "trainer/report.h"

enum { MEASURE_MAX_ROUNDS = 99 };

// Now, once the device has done what it was given; the argument is a Backend (Ledger.clock).
static inline double device_seconds(void *backend) {
  backend_synchronize(backend);
  return now_seconds();
}

// Medians over the rounds. The ratio is that of neighbours, work over base: a GPU at its power limit is slower
// after harder work, so only neighbours compare.
typedef struct {
  double base, work; // seconds
  double ratio;
} Medians;

// Times `base` and `work` alternately, by seconds(context, which). Before that they alternate untimed for
// `warm_up` seconds: a GPU reaches its power limit only after a while.
static inline Medians measure(double (*seconds)(void *context, int which), void *context, int base, int work,
                              double warm_up, int64_t rounds) {
  double bases[MEASURE_MAX_ROUNDS], works[MEASURE_MAX_ROUNDS], ratios[MEASURE_MAX_ROUNDS];
  for (double spent = 0; spent < warm_up;) spent += seconds(context, base) + seconds(context, work);
  for (int64_t round = 0; round < rounds; round++) {
    bases[round] = seconds(context, base);
    works[round] = seconds(context, work);
    ratios[round] = works[round] / bases[round];
  }
  return (Medians){median(bases, rounds), median(works, rounds), median(ratios, rounds)};
}
