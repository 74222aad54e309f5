// Which points a sweep visits.
#ifndef LCE_TOOLS_CURVES_POINTS_H
#define LCE_TOOLS_CURVES_POINTS_H

#include "tools/curves/curve.h"

// Appends the points of a sweep as readings that are not known yet, fused and materialized in turn, from small to
// large. `values` is a list of sizes ("512,1024,4096") and ranges ("256:2048:256" adds 256 each time, "128:16384:x2" doubles); a size
// of tokens may also be written as batch x sequence ("4x20480"). NULL takes eight that suit the model. A chunk
// is a matter of the fused mode: the materialized one is a single point there. The options give what is not
// swept; `device` resolves the chunk where --lce-memory is given. Fails in one sentence on what is no number,
// no range, or no size a model can have.
void points_add_sweep(Curve *points, const Options *options, DeviceKind device, bool layer_only, Sweep sweep,
                      const char *values);

// The sweep called `name`; fails with the names there are.
Sweep sweep_named(const char *name);

#endif
