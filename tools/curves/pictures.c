#include "tools/curves/pictures.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"
#include "tools/curves/drawing.h"

static const Color SAVED = {0xfb, 0xe6, 0xd0};

// The same for the last layer: without its tensors either.
static double device_layer_bytes(const Reading *r) {
  return device_bytes(r) - ((double)r->ledger_bytes - (double)r->layer_bytes);
}
static double step_seconds(const Reading *r) {
  return r->step_seconds > 0 ? r->step_seconds : NAN;
}

// The last values at the ends of the lines; with `marks` the names too, those of the source's lines included.
static void label_ends(const Panel *p, const Line lines[2], Unit unit, const Marks *marks) {
  EndLabel labels[8];
  int count = 0;
  for (int m = 0; m < 2; m++) {
    const Line *l = &lines[m];
    if (!l->count) continue;
    EndLabel *e = &labels[count++];
    *e = (EndLabel){.y = panel_spot(p, l->x[l->count - 1], l->y[l->count - 1]).y, .color = COLOR_MODE[m]};
    Label value = axis_value(unit, l->y[l->count - 1]);
    snprintf(e->text, sizeof e->text, "%s", marks ? MODE_TEXT[m] : value.text);
    if (marks)
      snprintf(e->below, sizeof e->below, "%s%s", value.text, l->firm[l->count - 1] ? "" : ", planned");
  }
  for (int i = 0; marks && i < marks->count && count < 8; i++) {
    const Mark *m = marks->items[i];
    bool last = i + 1 == marks->count || marks->items[i + 1]->line != m->line;
    if (!m->line || !last) continue;
    EndLabel *e = &labels[count++];
    *e = (EndLabel){.y = panel_spot(p, m->value, m->bytes).y, .color = COLOR_MUTED};
    snprintf(e->text, sizeof e->text, "%s", m->label);
    snprintf(e->below, sizeof e->below, "%s", axis_value(unit, m->bytes).text);
  }
  panel_end_labels(p, labels, count, p->box.right + 12);
}

// Lines over the same places: shades what the fused mode saves.
static void shade_saving(const Panel *p, const Line lines[2]) {
  const Line *low = &lines[LCE_FUSED], *high = &lines[LCE_MATERIALIZED];
  if (low->count != high->count || low->count < 2) return;
  double x[LINE_MOST], top[LINE_MOST], bottom[LINE_MOST];
  for (int i = 0; i < low->count; i++) {
    if (low->x[i] != high->x[i]) return;
    x[i] = panel_spot(p, low->x[i], low->y[i]).x;
    top[i] = panel_spot(p, high->x[i], high->y[i]).y;
    bottom[i] = panel_spot(p, low->x[i], low->y[i]).y;
  }
  canvas_between(p->canvas, x, top, bottom, low->count, SAVED, 0.75);
}

static void crosses(const Panel *p, const Curve *c, Sweep sweep, Figure figure) {
  for (int m = 0; m < 2; m++) {
    Line l = line_of(c, sweep, (LceMode)m, figure);
    for (int i = 0; i < l.count; i++) {
      if (l.y[i] < p->y.low || l.y[i] > p->y.high) continue;
      canvas_marker(p->canvas, MARKER_CROSS, panel_spot(p, l.x[i], l.y[i]), 7, COLOR_INK, true);
    }
  }
}

// What the device has to give, where a curve reaches for it.
static double capacity_of(const Curve *c, Sweep sweep) {
  double usable = 0, highest = 0;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->point.sweep != sweep || !r->usable_bytes) continue;
    usable = fmax(usable, (double)r->usable_bytes);
    highest = fmax(highest, whole_bytes(r));
  }
  return highest > 0.6 * usable ? usable : 0;
}

// --- memory over a size ------------------------------------------------------------------------------------

static const Size CURVE_SIZE = {1040, 560};
static const Box MAIN_BOX = {92, 150, 520, 486};

static Panel main_panel(const Curve *c, const Recipe *recipe, Canvas *canvas, Line lines[2]) {
  Sweep sweep = first_sweep(c);
  bool layer = about_layer(c);
  for (int m = 0; m < 2; m++) lines[m] = line_of(c, sweep, (LceMode)m, layer ? layer_bytes : whole_bytes);
  double more[33] = {0};
  int count = 0;
  Marks marks = marks_of(layer ? recipe : NULL, sweep);
  for (int i = 0; i < marks.count; i++)
    if (marks.items[i]->value > 0 || marks.items[i]->ratio <= 0) more[count++] = marks.items[i]->bytes;
  double capacity = layer ? 0 : capacity_of(c, sweep);
  if (capacity > 0) more[count++] = capacity;
  Panel p = panel_for(canvas, MAIN_BOX, sweep, lines, UNIT_BYTES, more, count);
  p.title = layer ? "Memory the last layer holds" : "Peak memory of a training step";
  p.y_title = layer ? "beyond its inputs and gradients" : "all of it";
  return p;
}

Panel picture_curve_panel(const Curve *c, const Recipe *recipe) {
  Line lines[2];
  return main_panel(c, recipe, NULL, lines);
}

// The source's figures: in grey, with their names above and to the left, where rising lines leave room.
static void draw_marks(const Panel *p, const Recipe *recipe, Sweep sweep) {
  Marks marks = marks_of(recipe, sweep);
  TextStyle small = text_small();
  for (int i = 0; i < marks.count; i++) {
    const Mark *m = marks.items[i], *next = i + 1 < marks.count ? marks.items[i + 1] : NULL;
    if (m->value <= 0) {
      Spot left = panel_spot(p, p->x.low, m->bytes), right = panel_spot(p, p->x.high, m->bytes);
      if (m->ratio > 0) continue;
      canvas_line(p->canvas, left, right, (Stroke){.color = COLOR_MUTED, .width = 1.2, .dash = 2, .gap = 4});
      canvas_text(p->canvas, (Spot){left.x + 6, left.y - 6}, small, m->label);
      continue;
    }
    Spot at = panel_spot(p, m->value, m->bytes);
    bool last = !next || !m->line || next->line != m->line;
    if (!last)
      canvas_line(p->canvas, at, panel_spot(p, next->value, next->bytes),
                  (Stroke){.color = COLOR_FAINT, .width = 1.6, .dash = 2, .gap = 4});
    canvas_marker(p->canvas, MARKER_DIAMOND, at, 5, COLOR_MUTED, true);
    if (!last || m->line) continue; // lines are labelled at their ends
    small.align = ALIGN_LEFT;
    double left = at.x - 8 - canvas_text_width(p->canvas, small, m->label);
    canvas_text(p->canvas, (Spot){fmax(left, p->box.left + 4), at.y - 10}, small, m->label);
  }
}

// Batch and sequence of each point, where both differ from point to point.
static void label_shapes(const Panel *p, const Curve *c, const Line *above) {
  bool differ = false;
  for (int i = 1; i < c->count; i++) differ |= c->readings[i].point.batch != c->readings[0].point.batch;
  for (int i = 1; i < c->count && differ; i++)
    if (c->readings[i].point.seq_len != c->readings[0].point.seq_len)
      break;
    else if (i + 1 == c->count)
      differ = false;
  double free_from = -INFINITY;
  TextStyle small = text_small();
  for (int i = 0, k = 0; differ && i < c->count && k < above->count; i++) {
    const Point *q = &c->readings[i].point;
    if (q->mode != LCE_MATERIALIZED) continue;
    Spot at = panel_spot(p, above->x[k], above->y[k]);
    k++;
    if (k < above->count && panel_spot(p, above->x[k], above->y[k]).x - at.x < 50) continue;
    char text[64];
    snprintf(text, sizeof text, "%lld × %s", (long long)q->batch, text_grouped(q->seq_len).text);
    double width = canvas_text_width(p->canvas, small, text), left = at.x - width + 6;
    if (left < free_from) continue;
    canvas_text(p->canvas, (Spot){fmax(left, p->box.left + 2), at.y - 11}, small, text);
    free_from = at.x + 14;
  }
}

static void draw_capacity(const Panel *p, double capacity) {
  if (capacity <= 0) return;
  Spot left = panel_spot(p, p->x.low, capacity), right = panel_spot(p, p->x.high, capacity);
  canvas_line(p->canvas, left, right, (Stroke){.color = COLOR_INK, .width = 1.2, .dash = 7, .gap = 4});
  char text[64];
  snprintf(text, sizeof text, "the device gives %s", axis_value(UNIT_BYTES, capacity).text);
  canvas_text(p->canvas, (Spot){left.x + 8, left.y - 6}, text_small(), text);
}

// A smaller panel at the side.
static void side_panel(Canvas *canvas, const Curve *c, const Recipe *recipe, Box box, Figure figure,
                       Unit unit, const char *title, const char *y_title, bool last) {
  Sweep sweep = first_sweep(c);
  Line lines[2];
  for (int m = 0; m < 2; m++) lines[m] = line_of(c, sweep, (LceMode)m, figure);
  bool layer_marks = figure == layer_bytes;
  Marks marks = marks_of(layer_marks ? recipe : NULL, sweep);
  double more[33];
  for (int i = 0; i < marks.count; i++) more[i] = marks.items[i]->bytes;
  more[marks.count] = 1; // a ratio's axis shows its floor
  int more_count = marks.count + (figure == over_floor);
  Panel p = panel_for(canvas, box, sweep, lines, unit, more, more_count);
  p.title = title;
  p.y_title = y_title;
  p.y_ticks = box.bottom - box.top > 200 ? 6 : 5;
  p.x_ticks = 4;
  if (!last) p.x_title = NULL;
  panel_draw(&p);
  if (figure == over_floor) {
    Spot left = panel_spot(&p, p.x.low, 1), right = panel_spot(&p, p.x.high, 1);
    canvas_line(canvas, left, right, (Stroke){.color = COLOR_INK, .width = 1.2, .dash = 2, .gap = 3});
  }
  draw_modes(&p, lines);
  if (layer_marks) draw_marks(&p, recipe, sweep);
  label_ends(&p, lines, unit, NULL);
}

static void draw_curve(Canvas *canvas, const Curve *c, const Recipe *recipe) {
  bool layer = about_layer(c), measured = any_measured(c);
  Sweep sweep = first_sweep(c);
  char title[160];
  snprintf(title, sizeof title,
           layer ? "What the last layer holds, over the %s" : "Training memory over the %s",
           sweep == SWEEP_TOKENS ? "tokens of a step" : size_title(sweep));
  heading(canvas, recipe ? recipe->title : title, curve_caption(c).text);
  mode_legend(canvas, c, (Spot){36, 92}, true);
  Line lines[2];
  Panel p = main_panel(c, recipe, canvas, lines);
  shade_saving(&p, lines);
  panel_draw(&p);
  draw_capacity(&p, layer ? 0 : capacity_of(c, sweep));
  draw_modes(&p, lines);
  crosses(&p, c, sweep, layer ? device_layer_bytes : device_bytes);
  if (layer) draw_marks(&p, recipe, sweep);
  if (sweep == SWEEP_TOKENS && !layer) label_shapes(&p, c, &lines[LCE_MATERIALIZED]);
  Marks marks = marks_of(layer ? recipe : NULL, sweep);
  label_ends(&p, lines, UNIT_BYTES, &marks);

  Box upper = {716, 150, 936, measured ? 276 : 486}, lower = {716, 360, 936, 486};
  if (layer)
    side_panel(canvas, c, NULL, upper, whole_bytes, UNIT_BYTES, "With its inputs and gradients", "all of it",
               !measured);
  else
    side_panel(canvas, c, recipe, upper, layer_bytes, UNIT_BYTES, "Last layer alone",
               "beyond its inputs and gradients", !measured);
  if (measured && layer)
    side_panel(canvas, c, NULL, lower, over_floor, UNIT_PLAIN, "Time of the layer",
               "over its three bare products", true);
  else if (measured)
    side_panel(canvas, c, NULL, lower, step_seconds, UNIT_SECONDS, "Time of a step",
               "forward, backward, AdamW", true);
  note(canvas, c, recipe ? recipe->grey : NULL, CURVE_SIZE.height - 18);
}

// --- one picture -------------------------------------------------------------------------------------------

Size picture_curve_size(const Curve *c) {
  return several_sweeps(c) ? grid_size(c) : is_trade(c) ? TRADE_SIZE : CURVE_SIZE;
}

void picture_curve(const Curve *c, const Recipe *recipe, double scale, const char *path) {
  if (!c->count) fail("there is no point to draw");
  Size size = picture_curve_size(c);
  Canvas *canvas = canvas_create(size.width, size.height, scale);
  if (several_sweeps(c))
    draw_grid(canvas, c, recipe);
  else if (is_trade(c))
    draw_trade(canvas, c, recipe);
  else
    draw_curve(canvas, c, recipe);
  canvas_write_png(canvas, path);
  canvas_destroy(canvas);
}
