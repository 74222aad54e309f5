// A chart: axes with round ticks and units, lines with markers, labels at their ends, a legend.
#ifndef LCE_TOOLS_PLOT_CHART_H
#define LCE_TOOLS_PLOT_CHART_H

#include "tools/plot/canvas.h"

typedef enum {
  UNIT_PLAIN,   // 1.0, 1.2, 1e-3
  UNIT_COUNT,   // tokens and sizes, ticks at multiples of powers of two: 16,384
  UNIT_BYTES,   // KiB, MiB, GiB
  UNIT_SECONDS, // us, ms, s
} Unit;

typedef struct {
  double low, high; // the ends of the axis
  bool log;
  Unit unit;
} Axis;

// An axis that holds all values, its ends round. `from_zero` starts a linear one at 0.
Axis axis_around(const double *values, int count, Unit unit, bool log, bool from_zero);
// "GiB", "ms", "" where numbers say it all: the unit of a linear axis's tick labels.
const char *axis_unit(const Axis *axis);
// A value as the axis's unit has it, for labels: "16.4 GiB", "12 ms", "16,384", "1.08".
typedef struct {
  char text[32];
} Label;
Label axis_value(Unit unit, double value);

// Up to `most` ticks; returns how many were written to `ticks`.
enum { TICKS_MOST = 24 };
int axis_ticks(const Axis *axis, int most, double ticks[TICKS_MOST]);

typedef struct {
  Canvas *canvas;
  Box box; // of the plotted area itself; labels and titles stand outside it
  Axis x, y;
  const char *title, *x_title, *y_title; // y_title stands level above the axis, after it the unit
  int x_ticks, y_ticks;                  // at most
  bool no_x_labels, no_y_labels;         // the panel below or beside has them
} Panel;

// The frame: title, grid, ticks, axis titles.
void panel_draw(const Panel *panel);
Spot panel_spot(const Panel *panel, double x, double y);

typedef struct {
  Color color;
  Marker marker;
  double width;
  double dash, gap;
} SeriesStyle;

// A line through (x[i], y[i]) with a marker at each. Where firm[i] is false the marker is hollow, and the line
// that leads there is dashed. firm NULL: all are. Points outside the panel are the caller's mistake.
void panel_series(const Panel *panel, SeriesStyle style, const double *x, const double *y, const bool *firm,
                  int count);

// Labels beside the right ends of lines, pushed apart where they would overlap.
typedef struct {
  double y; // of the line's end, in points
  Color color;
  char text[96];  // bold
  char below[96]; // a second line in grey, or empty
} EndLabel;
void panel_end_labels(const Panel *panel, EndLabel *labels, int count, double x);

// Boxes of a picture that are taken, by marks and by text.
enum { TAKEN_MOST = 512 };
typedef struct {
  Box boxes[TAKEN_MOST];
  int count;
} Taken;
void taken_add(Taken *taken, Box box);

// Text beside a spot, on the first of the sides where it is inside the frame and nothing is taken (else on the
// first side); its own box is taken afterwards.
typedef enum { SIDE_RIGHT, SIDE_LEFT, SIDE_ABOVE, SIDE_BELOW } Side;
void text_beside(Canvas *canvas, Taken *taken, Box frame, Spot at, double distance, TextStyle style,
                 const char *text, const Side *sides, int count);

// Entries from left to right, each a sample of its line; returns the width.
typedef struct {
  const char *text;
  SeriesStyle style;
  bool hollow;
} LegendEntry;
double legend_draw(Canvas *canvas, Spot at, const LegendEntry *entries, int count);
// The same for areas: coloured squares.
double legend_areas(Canvas *canvas, Spot at, const char *const *texts, const Color *colors, int count);

extern const Color COLOR_INK, COLOR_MUTED, COLOR_GRID, COLOR_FAINT;
TextStyle text_title(void);    // of a picture
TextStyle text_subtitle(void); // below it
TextStyle text_small(void);    // ticks and notes

#endif
