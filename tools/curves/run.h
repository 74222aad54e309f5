// Visiting the points: reading what is missing, writing it down, saying so.
#ifndef LCE_TOOLS_CURVES_RUN_H
#define LCE_TOOLS_CURVES_RUN_H

#include <stdio.h>

#include "tools/curves/curve.h"

// Reads every point of `curve` (from points_add_sweep) that `path` does not have yet, appends it there at once, and
// prints a row of a table with the time left. What was too slow before is tried again: the patience may have grown.
// `fresh` starts over. Fails when the file holds a sweep of other settings.
void run_points(FILE *out, const Experiment *experiment, const char *path, bool fresh, Curve *curve);

// The sentences after the table: whether plan, ledger and device agree, and what the fused mode saves.
void run_summary(FILE *out, const Experiment *experiment, const Curve *curve);

#endif
