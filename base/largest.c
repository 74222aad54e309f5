#include "base/largest.h"

int64_t largest_that_fits(Fits fits, const void *budget, int64_t known, int64_t above) {
  while (above - known > 1) {
    int64_t middle = known + (above - known) / 2;
    if (fits(budget, middle))
      known = middle;
    else
      above = middle;
  }
  return known;
}
