// A picture made of antialiased lines, areas, markers and text, written as PNG.
// Everything is given in points from the upper left corner, `scale` pixels each: a drawing is crisp at any resolution.
// Letters come from a packaged font (DejaVu Sans), their outlines and the PNG through stb.
#pragma once

#include <stdbool.h>

typedef struct {
  double x, y;
} Spot;

typedef struct {
  double left, top, right, bottom;
} Box;

typedef struct {
  unsigned char r, g, b;
} Color;

typedef enum { MARKER_NONE, MARKER_CIRCLE, MARKER_SQUARE, MARKER_DIAMOND, MARKER_CROSS } Marker;

typedef struct {
  Color color;
  double width;
  double dash, gap; // lengths; dash 0: no gaps
} Stroke;

typedef struct {
  double size;
  bool bold;
  Color color;
  double before; // the share of its width that stands left of the place: 0.5 centers it
} TextStyle;

typedef struct Canvas Canvas;

// Why this build or machine cannot draw, without stb or a font, and what to install (static text); NULL: it can.
const char *canvas_missing(void);

// A white picture of width x height points. Fails where canvas_missing says why. The caller destroys it.
Canvas *canvas_create(double width, double height, double scale);
void canvas_destroy(Canvas *canvas);

void canvas_line(Canvas *canvas, Spot from, Spot to, Stroke stroke);
// A level or upright hairline, put on whole pixels so that it is sharp.
void canvas_rule(Canvas *canvas, Spot from, Spot to, Color color);
// The area between two lines over the same places x[0] <= x[1] <= ...; equal places make a step.
void canvas_area(Canvas *canvas, const double *x, const double *upper, const double *lower, int count,
                 Color color, double opacity);
void canvas_box(Canvas *canvas, Box box, Color color, double opacity);
// A filled marker has an edge of white, a hollow one is white inside.
void canvas_marker(Canvas *canvas, Marker marker, Spot at, double radius, Color color, bool filled);

// Text (UTF-8) with its baseline at `at.y`. Returns its width; canvas_text_width only measures.
double canvas_text(Canvas *canvas, Spot at, TextStyle style, const char *text);
double canvas_text_width(const Canvas *canvas, TextStyle style, const char *text);

// Fails in one sentence when the file cannot be written.
void canvas_write_png(const Canvas *canvas, const char *path);
