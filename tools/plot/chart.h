// A picture is data: panels with axes, series and labels. picture_write draws it. tools/plot_run.c is an example.
// What is planned, not measured, has dashed lines and hollow markers.
#pragma once

#include <stdint.h>

#include "tools/plot/canvas.h"

typedef struct {
  char text[160]; // cut off where it is longer
} Label;
Label label(const char *format, ...) __attribute__((format(printf, 1, 2)));

// --- axes --------------------------------------------------------------------------------------------------

typedef enum {
  UNIT_PLAIN,   // 1.0, 1.2, 1e-3
  UNIT_COUNT,   // tokens and sizes, ticks at multiples of powers of two: 16,384
  UNIT_BYTES,   // KiB, MiB, GiB
  UNIT_SECONDS, // us, ms, s
} Unit;

typedef struct {
  Unit unit;
  bool log, from_zero;
  Label title;              // the unit follows it
  int ticks;                // at most about this many; 0: 6
  int shared;               // axes of a picture with the same number, if not 0, span the same range
  bool tight;               // ends at the ends given, with a tick there
  bool hidden;              // no tick labels: the panel next to this one has them
  const char *const *names; // of a y axis: labels for 0, 1, 2, ... from the top down; give its ends
  double low, high;         // its ends; equal: fitted to the series, outwards to round values
} Axis;

// A value in its unit: "16.4 GiB", "12.0 ms", "16,384", "1.08".
Label axis_value(Unit unit, double value);

// --- series ------------------------------------------------------------------------------------------------

// An infinite x or y stands at that end of its axis, so two samples make a rule across the panel.
typedef struct {
  double x, y;
  double base;  // lower edge of an area
  bool planned; // not measured
  Label label;  // near the sample, where there is space
} Sample;

// Markers, and lines between them where width > 0; or an area.
typedef struct {
  bool area;        // between base and y; two samples with the same x make a step
  const char *name; // in the legend; NULL: not there
  Color color;
  Marker marker;
  double width, dash, gap;
  double opacity;    // of an area; 0: 1
  bool clamped;      // the y axis is not fitted to it; samples above it stand at its top, with their y
  bool bold;         // labels of samples
  const char *sides; // where those labels may stand, in order of preference, as on a number pad: 8 is above,
                     // 6 to the right; NULL: "6482"
  Label end, below;  // to the right of the panel, at the last sample: in bold, and a grey second line
  Sample *samples;
  int count;
  int64_t capacity;
} Series;

void series_add(Series *series, Sample sample);

// --- panels ------------------------------------------------------------------------------------------------

enum { SERIES_MAX = 24, PANELS_MAX = 16 };

typedef struct {
  Box box; // of the plotted area, in points; labels and titles stand outside it
  Axis x, y;
  Label title;
  Series series[SERIES_MAX]; // later ones are drawn over earlier ones, lines over areas
  int count;
} Panel;

Series *panel_series(Panel *panel, Series series); // adds one; the panel owns its samples
// A bar from 0 to `value` between two places of the y axis, with a label at its end; `style`: color, opacity, name.
void panel_bar(Panel *panel, Series style, double value, double low, double high, Label end);
Spot panel_spot(const Panel *panel, double x, double y);
// What its series span along an axis; low > high: nothing.
typedef struct {
  double low, high;
} Range;
Range panel_range(const Panel *panel, bool vertical, bool positive);

typedef struct {
  double width, height; // in points
  Label title, subtitle;
  char note[600]; // at the foot
  Panel panels[PANELS_MAX];
  int count;
} Picture;

Picture *picture_create(double width, double height, Label title, Label subtitle); // freed by picture_free
void picture_free(Picture *picture);
Panel *picture_panel(Picture *picture, Box box, Label title);
// The box of one of rows x columns equal panels in a frame, `gap_x` and `gap_y` apart.
Box picture_cell(Box frame, double gap_x, double gap_y, int rows, int columns, int row, int column);

// Fits the axes, draws, writes a PNG with `scale` pixels a point. Fails where canvas_missing says why.
void picture_write(Picture *picture, double scale, const char *path);

extern const Color COLOR_INK, COLOR_MUTED;
