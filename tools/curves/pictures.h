// Curves and timelines as pictures. The caller writes and frees them.
#pragma once

#include "tools/curves/curve.h"
#include "tools/curves/longest.h"
#include "tools/curves/recipes.h"
#include "tools/curves/timeline.h"
#include "tools/plot/chart.h"

// One picture of a curve, of the kind that suits it: memory (and time) over what was swept, its main lines in
// the first panel; time against memory for measured chunks; a grid of panels when several sizes were swept.
// A recipe gives title and marks, here and below.
Picture *picture_curve(const Curve *curve);

// Time against memory over the chunks, where a curve has them measured.
bool picture_has_trade(const Curve *curve);
Picture *picture_trade(const Curve *curve);

// The modes' timelines, one above the other on the same scales. `settings` describes the run.
Picture *picture_timeline(const Timeline *timeline, const Curve *settings);

// Bars: the longest sequences.
Picture *picture_longest(const Longest *all, int count, const Curve *settings);

// "llama-1b, V 128,256, bf16, recompute layer, on NVIDIA H200": a summary of a curve's settings.
Label curve_caption(const Curve *curve);

extern const Color COLOR_MODE[2]; // by LceMode
