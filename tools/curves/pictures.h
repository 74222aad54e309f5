// Curves and timelines as pictures.
#ifndef LCE_TOOLS_CURVES_PICTURES_H
#define LCE_TOOLS_CURVES_PICTURES_H

#include "tools/curves/curve.h"
#include "tools/curves/recipes.h"
#include "tools/curves/timeline.h"
#include "tools/plot/chart.h"

typedef struct {
  double width, height;
} Size;

// One picture of a curve, of the kind that suits it: memory (and time) over what was swept; time against memory
// for measured chunks; small multiples when several sizes were swept. `recipe` gives title and marks, or NULL.
// `scale` is pixels per point.
void picture_curve(const Curve *curve, const Recipe *recipe, double scale, const char *path);
// Its size in points, and the panel that holds the main lines: where a value is found in the picture.
Size picture_curve_size(const Curve *curve);
Panel picture_curve_panel(const Curve *curve, const Recipe *recipe);

// Time against memory over the chunks, where a curve has them measured.
bool picture_has_trade(const Curve *curve);
void picture_trade(const Curve *curve, const Recipe *recipe, double scale, const char *path);

// The two modes' timelines, one above the other on the same scales.
void picture_timeline(const Timeline timelines[2], const char *title, const char *subtitle, double scale,
                      const char *path);

// "llama-1b, V 128,256, T 4,096, bf16, recompute none; NVIDIA H200": what a curve's settings come to.
typedef struct {
  char text[640];
} Caption;
Caption curve_caption(const Curve *curve);

extern const Color COLOR_MODE[2]; // by LceMode

#endif
