// What the pictures share: lines made from readings, panels that hold them, and what stands around.
#ifndef LCE_TOOLS_CURVES_DRAWING_H
#define LCE_TOOLS_CURVES_DRAWING_H

#include "tools/curves/pictures.h"

extern const char *const MODE_TEXT[2]; // by LceMode
SeriesStyle mode_style(LceMode mode);

// --- lines -------------------------------------------------------------------------------------------------

enum { LINE_MOST = 256 };

typedef struct {
  double x[LINE_MOST], y[LINE_MOST];
  bool firm[LINE_MOST]; // measured
  int count;
} Line;

// A figure of a reading; NAN where there is none.
typedef double (*Figure)(const Reading *);
double whole_bytes(const Reading *reading);
double layer_bytes(const Reading *reading);
double device_bytes(const Reading *reading); // on the ledger's terms: without its context and libraries
double over_floor(const Reading *reading);   // time of the layer over that of its bare products

Line line_of(const Curve *curve, Sweep sweep, LceMode mode, Figure figure);

bool any_measured(const Curve *curve);
bool about_layer(const Curve *curve);
Sweep first_sweep(const Curve *curve);
bool several_sweeps(const Curve *curve);

// The marks of a recipe (or of none) that belong into a sweep's picture.
typedef struct {
  const Mark *items[32];
  int count;
} Marks;
Marks marks_of(const Recipe *recipe, Sweep sweep);

// --- panels ------------------------------------------------------------------------------------------------

const char *size_title(Sweep sweep); // "tokens", "vocabulary", ...
// Whether sizes double from point to point over at least this range: they then stand on a log axis.
bool doubling(const double *x, int count, double range);
// A panel whose axes hold the lines of both modes and `more` values that are drawn in it.
Panel panel_for(Canvas *canvas, Box box, Sweep sweep, const Line lines[2], Unit unit, const double *more,
                int more_count);
void draw_modes(const Panel *panel, const Line lines[2]);

// --- around them -------------------------------------------------------------------------------------------

void heading(Canvas *canvas, const char *title, const char *subtitle);
// The legend of both modes; with `device`, of the device's own figures too.
void mode_legend(Canvas *canvas, const Curve *curve, Spot at, bool device);
// The line at the foot: what was measured, and what stands in grey (or NULL).
void note(Canvas *canvas, const Curve *curve, const char *grey, double y);

// The pictures that have a file of their own.
void draw_trade(Canvas *canvas, const Curve *curve, const Recipe *recipe);
bool is_trade(const Curve *curve);
extern const Size TRADE_SIZE;
void draw_grid(Canvas *canvas, const Curve *curve, const Recipe *recipe);
Size grid_size(const Curve *curve);

#endif
