// Small multiples: every size that was swept in a column, memory, speed and errors in rows.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/curves/drawing.h"

static double teraflops(const Reading *r) {
  double flops =
      6.0 * (double)point_tokens(&r->point) * (double)r->point.vocab_size * (double)r->point.hidden_size;
  return r->layer_seconds > 0 ? 1e-12 * flops / r->layer_seconds : NAN;
}
static double dx_error(const Reading *r) {
  return r->dx_error;
}
static double dweight_error(const Reading *r) {
  return r->dweight_error;
}

enum { GRID_ROWS = 3 };

typedef struct {
  const char *title;
  Figure figure, second; // the second line of a mode, dashed
  Unit unit;
} GridRow;

static const GridRow GRID[GRID_ROWS] = {
    {"memory held", layer_bytes, NULL, UNIT_BYTES},
    {"TFLOP/s", teraflops, NULL, UNIT_PLAIN},
    {"relative error of dX (whole), dW (dashed)", dx_error, dweight_error, UNIT_PLAIN}};

static bool has_row(const Curve *c, const GridRow *row) {
  for (int s = 0; s < SWEEP_COUNT; s++)
    for (int m = 0; m < 2; m++)
      if (line_of(c, (Sweep)s, (LceMode)m, row->figure).count) return true;
  return false;
}

static int grid_rows(const Curve *c, const GridRow *rows[GRID_ROWS]) {
  int count = 0;
  for (int i = 0; i < GRID_ROWS; i++)
    if (has_row(c, &GRID[i])) rows[count++] = &GRID[i];
  return count;
}

// All panels of a row share their y axis.
static Axis row_axis(const Curve *c, const GridRow *row) {
  double y[LINE_MOST];
  int count = 0;
  for (int i = 0; i < c->count && count + 2 < LINE_MOST; i++) {
    y[count++] = row->figure(&c->readings[i]);
    if (row->second) y[count++] = row->second(&c->readings[i]);
  }
  return axis_around(y, count, row->unit, row->unit == UNIT_BYTES || row->second, true);
}

Size grid_size(const Curve *c) {
  const GridRow *rows[GRID_ROWS];
  return (Size){1180, 180 + 190.0 * grid_rows(c, rows)};
}

void draw_grid(Canvas *canvas, const Curve *c, const Recipe *recipe) {
  const GridRow *rows[GRID_ROWS];
  int row_count = grid_rows(c, rows), column = 0;
  heading(canvas, recipe ? recipe->title : "The last layer over every size", curve_caption(c).text);
  mode_legend(canvas, c, (Spot){36, 92}, false);
  for (int s = 0; s < SWEEP_COUNT; s++) {
    // Chunk first: it is what a user turns.
    Sweep sweep = (Sweep)((s + SWEEP_CHUNK) % SWEEP_COUNT);
    if (!line_of(c, sweep, LCE_FUSED, layer_bytes).count) continue;
    for (int r = 0; r < row_count; r++) {
      Line lines[2], second[2];
      for (int m = 0; m < 2; m++) {
        lines[m] = line_of(c, sweep, (LceMode)m, rows[r]->figure);
        second[m] = (Line){.count = 0};
        if (rows[r]->second) second[m] = line_of(c, sweep, (LceMode)m, rows[r]->second);
      }
      double left = 96 + 268.0 * column, top = 160 + 190.0 * r;
      Line shape[2] = {line_of(c, sweep, (LceMode)0, layer_bytes),
                       line_of(c, sweep, (LceMode)1, layer_bytes)};
      Panel p =
          panel_for(canvas, (Box){left, top, left + 212, top + 130}, sweep, shape, rows[r]->unit, NULL, 0);
      const Line *own = shape[0].count >= shape[1].count ? &shape[0] : &shape[1];
      p.x = axis_around(own->x, own->count, UNIT_COUNT, doubling(own->x, own->count, 7), true);
      p.y = row_axis(c, rows[r]);
      p.y_ticks = 5;
      p.x_ticks = 5;
      p.no_y_labels = column > 0;
      p.y_title = column == 0 ? rows[r]->title : NULL;
      p.title = r == 0 ? size_title(sweep) : NULL;
      p.x_title = NULL;
      panel_draw(&p);
      draw_modes(&p, lines);
      for (int m = 0; m < 2; m++) {
        SeriesStyle style = mode_style((LceMode)m);
        style.marker = MARKER_NONE;
        style.width = 1.6;
        style.dash = 4, style.gap = 3;
        panel_series(&p, style, second[m].x, second[m].y, NULL, second[m].count);
      }
    }
    column++;
  }
  note(canvas, c, NULL, grid_size(c).height - 18);
}
