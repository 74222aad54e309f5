#include "curves/pictures.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"

// Navy and orange differ in lightness as much as in hue, and circles from squares: the lines can be told apart
// on grey paper.
const Color COLOR_MODE[2] = {[LCE_FUSED] = {0x14, 0x3d, 0x73}, [LCE_MATERIALIZED] = {0xe8, 0x7d, 0x1e}};
static const Color SAVED = {0xfb, 0xe6, 0xd0};
static const char *const MODE_TEXT[2] = {[LCE_FUSED] = "fused", [LCE_MATERIALIZED] = "materialized"};

static SeriesStyle mode_style(LceMode mode) {
  return (SeriesStyle){.color = COLOR_MODE[mode],
                       .marker = mode == LCE_FUSED ? MARKER_CIRCLE : MARKER_SQUARE,
                       .width = mode == LCE_FUSED ? 2.6 : 2};
}

// --- lines from readings -----------------------------------------------------------------------------------

enum { LINE_MOST = 256 };

typedef struct {
  double x[LINE_MOST], y[LINE_MOST];
  bool firm[LINE_MOST]; // measured
  int count;
} Line;

typedef double (*Figure)(const Reading *);

static double whole_bytes(const Reading *r) {
  return (double)reading_bytes(r);
}
static double layer_bytes(const Reading *r) {
  return (double)reading_layer_bytes(r);
}
// The device's figure on the ledger's terms: without what the device held before.
static double device_bytes(const Reading *r) {
  return r->device_bytes > r->device_base_bytes ? (double)(r->device_bytes - r->device_base_bytes) : NAN;
}
// The same for the last layer: without its tensors either.
static double device_layer_bytes(const Reading *r) {
  return device_bytes(r) - ((double)r->ledger_bytes - (double)r->layer_bytes);
}
static double step_seconds(const Reading *r) {
  return r->step_seconds > 0 ? r->step_seconds : NAN;
}
static double over_floor(const Reading *r) {
  return r->floor_seconds > 0 ? r->layer_seconds / r->floor_seconds : NAN;
}
static double teraflops(const Reading *r) {
  double flops = 6.0 * (double)point_tokens(&r->point) * (double)r->point.vocab_size * (double)r->point.hidden_size;
  return r->layer_seconds > 0 ? 1e-12 * flops / r->layer_seconds : NAN;
}
static double dx_error(const Reading *r) {
  return r->dx_error;
}
static double dweight_error(const Reading *r) {
  return r->dweight_error;
}

static Line line_of(const Curve *c, Sweep sweep, LceMode mode, Figure figure) {
  Line line = {.count = 0};
  for (int i = 0; i < c->count && line.count < LINE_MOST; i++) {
    const Reading *r = &c->readings[i];
    double y = figure(r);
    if (r->point.sweep != sweep || r->point.mode != mode || !isfinite(y)) continue;
    line.x[line.count] = point_value(&r->point);
    line.y[line.count] = y;
    line.firm[line.count++] = r->status == POINT_MEASURED;
  }
  // Without chunks, the materialized mode is the same at every chunk: a level line.
  if (sweep == SWEEP_CHUNK && mode == LCE_MATERIALIZED && line.count == 1)
    for (int i = 0; i < c->count && line.count == 1; i++) {
      double first = point_value(&c->readings[i].point);
      if (c->readings[i].point.sweep != sweep || first >= line.x[0]) continue;
      line.x[1] = line.x[0], line.y[1] = line.y[0], line.firm[1] = line.firm[0];
      line.x[0] = first;
      line.count = 2;
    }
  return line;
}

static bool any_measured(const Curve *c) {
  for (int i = 0; i < c->count; i++)
    if (c->readings[i].status == POINT_MEASURED) return true;
  return false;
}

static bool any_planned(const Curve *c) {
  for (int i = 0; i < c->count; i++)
    if (c->readings[i].status != POINT_MEASURED) return true;
  return false;
}

// The marks of a recipe that belong into a sweep's picture.
typedef struct {
  const Mark *items[32];
  int count;
} Marks;

static Marks marks_of(const Recipe *recipe, Sweep sweep) {
  Marks found = {.count = 0};
  for (int i = 0; recipe && i < recipe->mark_count && found.count < 32; i++)
    if (recipe->marks[i].sweep == sweep) found.items[found.count++] = &recipe->marks[i];
  return found;
}

// --- axes --------------------------------------------------------------------------------------------------

// Sizes that double from point to point over a wide range stand on a log axis, and then so does what grows with
// them: a line stays a line. All else is linear, where a difference is seen as what it is.
static bool doubling(const double *x, int count, double range) {
  return count > 2 && x[count - 1] / x[count - 2] > 1.6 && x[1] / x[0] > 1.6 && x[count - 1] / x[0] >= range;
}

static double spread(const double *y, int count) {
  double low = INFINITY, high = 0;
  for (int i = 0; i < count; i++)
    if (y[i] > 0) low = fmin(low, y[i]), high = fmax(high, y[i]);
  return high / low;
}

static const char *size_title(Sweep sweep) {
  static const char *const titles[SWEEP_COUNT] = {"tokens", "vocabulary", "hidden size", "tokens per chunk"};
  return titles[sweep];
}

// A panel whose axes hold the lines of both modes (and what else is drawn in it).
static Panel panel_for(Canvas *canvas, Box box, Sweep sweep, const Line lines[2], Unit unit, const double *more,
                       int more_count) {
  double y[3 * LINE_MOST];
  const Line *longer = lines[0].count >= lines[1].count ? &lines[0] : &lines[1];
  int count = 0;
  for (int m = 0; m < 2; m++)
    for (int i = 0; i < lines[m].count; i++) y[count++] = lines[m].y[i];
  for (int i = 0; i < more_count && count < 3 * LINE_MOST; i++) y[count++] = more[i];
  bool log = doubling(longer->x, longer->count, 32) && spread(y, count) >= 8;
  return (Panel){.canvas = canvas,
                 .box = box,
                 .x = axis_around(longer->x, longer->count, UNIT_COUNT, log, true),
                 .y = axis_around(y, count, unit, log, true),
                 .x_title = size_title(sweep)};
}

static void draw_modes(const Panel *p, const Line lines[2]) {
  panel_series(p, mode_style(LCE_MATERIALIZED), lines[LCE_MATERIALIZED].x, lines[LCE_MATERIALIZED].y,
               lines[LCE_MATERIALIZED].firm, lines[LCE_MATERIALIZED].count);
  panel_series(p, mode_style(LCE_FUSED), lines[LCE_FUSED].x, lines[LCE_FUSED].y, lines[LCE_FUSED].firm,
               lines[LCE_FUSED].count);
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
    if (marks) snprintf(e->below, sizeof e->below, "%s%s", value.text, l->firm[l->count - 1] ? "" : ", planned");
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

// --- what stands around ------------------------------------------------------------------------------------

static int64_t setting_number(const Curve *c, const char *name) {
  Setting s = curve_setting(c, name);
  return strtoll(s.text, NULL, 10);
}

static void add_part(Caption *t, const char *before, const char *what, const char *after) {
  size_t length = strlen(t->text);
  snprintf(t->text + length, sizeof t->text - length, "%s%s%.100s%s", length ? ", " : "", before, what, after);
}

Caption curve_caption(const Curve *c) {
  Setting what = curve_setting(c, "what"), model = curve_setting(c, "model"), dtype = curve_setting(c, "dtype");
  Setting planned = curve_setting(c, "planned"), device = curve_setting(c, "device");
  Setting recompute = curve_setting(c, "recompute"), sweep = curve_setting(c, "sweep");
  bool layer = strcmp(what.text, "layer") == 0;
  Text tokens = text_grouped(setting_number(c, "batch") * setting_number(c, "seq_len"));
  Caption t = {""};
  // What is swept stands on the axis.
  if (!layer) add_part(&t, "", model.text, "");
  if (strcmp(sweep.text, "tokens")) add_part(&t, "N ", tokens.text, "");
  if (layer && strcmp(sweep.text, "hidden")) add_part(&t, "H ", text_grouped(setting_number(c, "hidden")).text, "");
  if (strcmp(sweep.text, "vocab")) add_part(&t, "V ", text_grouped(setting_number(c, "vocab")).text, "");
  add_part(&t, "", dtype.text, "");
  if (!layer && strcmp(recompute.text, "none")) add_part(&t, "recompute ", recompute.text, "");
  add_part(&t, strcmp(planned.text, "yes") == 0 ? "planned for " : "on ", device.text, "");
  return t;
}

static void heading(Canvas *canvas, const char *title, const char *subtitle) {
  canvas_text(canvas, (Spot){36, 40}, text_title(), title);
  canvas_text(canvas, (Spot){36, 61}, text_subtitle(), subtitle);
}

static void mode_legend(Canvas *canvas, const Curve *c, Spot at, bool device) {
  LegendEntry entries[4] = {{.text = "materialized logits", .style = mode_style(LCE_MATERIALIZED)},
                            {.text = "fused, in chunks", .style = mode_style(LCE_FUSED)}};
  int count = 2;
  for (int i = 0; i < 2 && !any_measured(c); i++)
    entries[i].hollow = true, entries[i].style.dash = 5, entries[i].style.gap = 4;
  if (any_planned(c) && any_measured(c))
    entries[count++] = (LegendEntry){
        .text = "planned only",
        .style = {.color = COLOR_MUTED, .marker = MARKER_CIRCLE, .width = 1.6, .dash = 5, .gap = 4},
        .hollow = true};
  if (device && any_measured(c))
    entries[count++] =
        (LegendEntry){.text = "the device's own figure", .style = {.color = COLOR_INK, .marker = MARKER_CROSS, .width = 0}};
  legend_draw(canvas, at, entries, count);
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

static bool about_layer(const Curve *c) {
  Setting what = curve_setting(c, "what");
  return strcmp(what.text, "layer") == 0;
}

static Sweep first_sweep(const Curve *c) {
  return c->count ? c->readings[0].point.sweep : SWEEP_TOKENS;
}

static bool several_sweeps(const Curve *c) {
  for (int i = 1; i < c->count; i++)
    if (c->readings[i].point.sweep != c->readings[0].point.sweep) return true;
  return false;
}

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
    if (c->readings[i].point.seq_len != c->readings[0].point.seq_len) break;
    else if (i + 1 == c->count) differ = false;
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
static void side_panel(Canvas *canvas, const Curve *c, const Recipe *recipe, Box box, Figure figure, Unit unit,
                       const char *title, const char *y_title, bool last) {
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

static void note(Canvas *canvas, const Curve *c, const char *source, double y) {
  int measured = 0, exact = 0, no_room = 0;
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    measured += r->status == POINT_MEASURED;
    exact += r->status == POINT_MEASURED && r->planned_bytes == r->ledger_bytes;
    no_room += r->status == POINT_NO_ROOM;
  }
  char text[400];
  int length;
  if (!measured)
    length = snprintf(text, sizeof text, "Every figure is planned: nothing was allocated.");
  else
    length = snprintf(text, sizeof text, "Measured by the ledger; plan and ledger agree to the byte at %d of %d points.",
                      exact, measured);
  if (no_room)
    length += snprintf(text + length, sizeof text - (size_t)length, " %d point%s would not fit.", no_room,
                       no_room == 1 ? "" : "s");
  if (source) snprintf(text + length, sizeof text - (size_t)length, " Grey: %s.", source);
  canvas_text(canvas, (Spot){36, y}, text_small(), text);
}

static void draw_curve(Canvas *canvas, const Curve *c, const Recipe *recipe) {
  bool layer = about_layer(c), measured = any_measured(c);
  Sweep sweep = first_sweep(c);
  char title[160];
  snprintf(title, sizeof title, layer ? "What the last layer holds, over the %s" : "Training memory over the %s",
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
    side_panel(canvas, c, NULL, lower, over_floor, UNIT_PLAIN, "Time of the layer", "over its three bare products",
               true);
  else if (measured)
    side_panel(canvas, c, NULL, lower, step_seconds, UNIT_SECONDS, "Time of a step", "forward, backward, AdamW", true);
  note(canvas, c, recipe ? recipe->grey : NULL, CURVE_SIZE.height - 18);
}

// --- time against memory -----------------------------------------------------------------------------------

static const Size TRADE_SIZE = {1040, 560};

typedef struct {
  Line line; // x: bytes, y: time over floor
  int64_t chunk[LINE_MOST];
} Trade;

static Trade trade_of(const Curve *c, LceMode mode) {
  Trade t = {.line = {.count = 0}};
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (r->point.sweep != SWEEP_CHUNK || r->point.mode != mode || !isfinite(over_floor(r))) continue;
    t.chunk[t.line.count] = r->point.chunk;
    t.line.firm[t.line.count] = true;
    t.line.x[t.line.count] = layer_bytes(r);
    t.line.y[t.line.count++] = over_floor(r);
  }
  return t;
}

static bool is_trade(const Curve *c) {
  return first_sweep(c) == SWEEP_CHUNK && !several_sweeps(c) && picture_has_trade(c);
}

// A round top that shows our own figures well; what the source measured beyond it stands at the upper edge.
static Axis trade_axis(const Trade *fused, const Trade *whole) {
  double y[2 * LINE_MOST + 2];
  int count = 0;
  y[count++] = 0.9, y[count++] = 1.5;
  for (int i = 0; i < fused->line.count; i++) y[count++] = fused->line.y[i];
  for (int i = 0; i < whole->line.count; i++) y[count++] = whole->line.y[i];
  return axis_around(y, count, UNIT_PLAIN, false, false);
}

static void trade_marks(const Panel *p, const Recipe *recipe, Taken *taken) {
  Marks marks = marks_of(recipe, SWEEP_CHUNK);
  Box frame = p->box;
  TextStyle small = text_small();
  frame.right += 60;
  for (int i = 0; i < marks.count; i++) {
    const Mark *m = marks.items[i];
    if (m->ratio > 0) {
      bool beyond = m->ratio > p->y.high;
      Spot at = panel_spot(p, m->bytes, beyond ? p->y.high : m->ratio);
      char text[96];
      snprintf(text, sizeof text, beyond ? "%s, at %.2f" : "%s", m->label, m->ratio);
      canvas_marker(p->canvas, MARKER_DIAMOND, at, 5, COLOR_MUTED, true);
      taken_add(taken, (Box){at.x - 7, at.y - 7, at.x + 7, at.y + 7});
      text_beside(p->canvas, taken, frame, at, 9, small, text,
                  (const Side[]){SIDE_RIGHT, SIDE_LEFT, SIDE_ABOVE, SIDE_BELOW}, 4);
      continue;
    }
    Spot foot = panel_spot(p, m->bytes, p->y.low), top = {foot.x, p->box.top};
    canvas_line(p->canvas, foot, top, (Stroke){.color = COLOR_MUTED, .width = 1.2, .dash = 2, .gap = 4});
    text_beside(p->canvas, taken, frame, (Spot){top.x, top.y + 20}, 6, small, m->label,
                (const Side[]){SIDE_RIGHT, SIDE_LEFT}, 2);
  }
}

static void draw_trade(Canvas *canvas, const Curve *c, const Recipe *recipe) {
  Trade fused = trade_of(c, LCE_FUSED), whole = trade_of(c, LCE_MATERIALIZED);
  Marks marks = marks_of(recipe, SWEEP_CHUNK);
  double x[32 + 2 * LINE_MOST];
  int count = 0;
  for (int i = 0; i < fused.line.count; i++) x[count++] = fused.line.x[i];
  for (int i = 0; i < whole.line.count; i++) x[count++] = whole.line.x[i];
  for (int i = 0; i < marks.count; i++) x[count++] = marks.items[i]->bytes;
  heading(canvas, recipe && recipe->sweep_count == 1 ? recipe->title : "The last layer: time against memory, chunk by chunk",
          curve_caption(c).text);
  mode_legend(canvas, c, (Spot){36, 92}, false);
  Panel p = {.canvas = canvas,
             .box = {92, 150, 960, 486},
             .x = axis_around(x, count, UNIT_BYTES, true, false),
             .y = trade_axis(&fused, &whole),
             .x_title = "memory held beyond inputs and gradients",
             .y_title = "time over that of the layer's three bare products",
             .title = "Forward and backward of the last layer",
             .x_ticks = 10,
             .y_ticks = 7};
  panel_draw(&p);
  Spot left = panel_spot(&p, p.x.low, 1), right = panel_spot(&p, p.x.high, 1);
  canvas_line(canvas, left, right, (Stroke){.color = COLOR_INK, .width = 1.2, .dash = 2, .gap = 3});
  TextStyle small = text_small();
  canvas_text(canvas, (Spot){left.x + 6, left.y + 15}, small, "the three products alone");
  panel_series(&p, mode_style(LCE_MATERIALIZED), whole.line.x, whole.line.y, NULL, whole.line.count);
  panel_series(&p, mode_style(LCE_FUSED), fused.line.x, fused.line.y, NULL, fused.line.count);

  // All marks are taken before the first text looks for room.
  Taken taken = {.count = 0};
  const Trade *ours[2] = {&fused, &whole};
  for (int m = 0; m < 2; m++)
    for (int i = 0; i < ours[m]->line.count; i++) {
      Spot at = panel_spot(&p, ours[m]->line.x[i], ours[m]->line.y[i]);
      taken_add(&taken, (Box){at.x - 6, at.y - 6, at.x + 6, at.y + 6});
      // Near its points the line is taken, too.
      for (int side = -1; side <= 1; side += 2) {
        int k = i + side;
        if (k < 0 || k >= ours[m]->line.count) continue;
        Spot next = panel_spot(&p, ours[m]->line.x[k], ours[m]->line.y[k]);
        double length = hypot(next.x - at.x, next.y - at.y);
        for (double along = 8; along < fmin(30, length); along += 5) {
          double x = at.x + (next.x - at.x) * along / length, y = at.y + (next.y - at.y) * along / length;
          taken_add(&taken, (Box){x - 2, y - 2, x + 2, y + 2});
        }
      }
    }
  small.color = COLOR_MODE[LCE_FUSED];
  for (int i = 0; i < fused.line.count; i++) {
    Spot at = panel_spot(&p, fused.line.x[i], fused.line.y[i]);
    char text[48];
    snprintf(text, sizeof text, i == 0 ? "chunk %s" : "%s", text_grouped(fused.chunk[i]).text);
    text_beside(canvas, &taken, p.box, at, 8, small, text, (const Side[]){SIDE_BELOW, SIDE_LEFT, SIDE_RIGHT, SIDE_ABOVE},
                4);
  }
  TextStyle bold = {.size = 12, .bold = true, .color = COLOR_MODE[LCE_MATERIALIZED]};
  for (int i = 0; i < whole.line.count; i++)
    text_beside(canvas, &taken, p.box, panel_spot(&p, whole.line.x[i], whole.line.y[i]), 9, bold,
                MODE_TEXT[LCE_MATERIALIZED], (const Side[]){SIDE_RIGHT, SIDE_LEFT, SIDE_ABOVE}, 3);
  trade_marks(&p, recipe, &taken);
  note(canvas, c, recipe ? recipe->grey : NULL, TRADE_SIZE.height - 18);
}

bool picture_has_trade(const Curve *c) {
  return trade_of(c, LCE_FUSED).line.count > 1;
}

void picture_trade(const Curve *c, const Recipe *recipe, double scale, const char *path) {
  Canvas *canvas = canvas_create(TRADE_SIZE.width, TRADE_SIZE.height, scale);
  draw_trade(canvas, c, recipe);
  canvas_write_png(canvas, path);
  canvas_destroy(canvas);
}

// --- small multiples ---------------------------------------------------------------------------------------

enum { GRID_ROWS = 3 };

typedef struct {
  const char *title;
  Figure figure, second; // the second line of a mode, dashed
  Unit unit;
} GridRow;

static const GridRow GRID[GRID_ROWS] = {{"memory held", layer_bytes, NULL, UNIT_BYTES},
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

static Size grid_size(const Curve *c) {
  const GridRow *rows[GRID_ROWS];
  return (Size){1180, 180 + 190.0 * grid_rows(c, rows)};
}

static void draw_grid(Canvas *canvas, const Curve *c, const Recipe *recipe) {
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
      Line shape[2] = {line_of(c, sweep, (LceMode)0, layer_bytes), line_of(c, sweep, (LceMode)1, layer_bytes)};
      Panel p = panel_for(canvas, (Box){left, top, left + 212, top + 130}, sweep, shape, rows[r]->unit, NULL, 0);
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

// --- the timeline ------------------------------------------------------------------------------------------

// From the bottom up: what stays, then what comes and goes, the last layer on top where its spike stands free.
// Neighbours differ in lightness.
static const MemoryCategory STACK[] = {MEMORY_WEIGHTS,   MEMORY_MASTER_WEIGHTS, MEMORY_GRADIENTS,
                                       MEMORY_MOMENTS,   MEMORY_TABLES,         MEMORY_ACTIVATIONS,
                                       MEMORY_ACTIVATION_GRADIENTS, MEMORY_WORKSPACE, MEMORY_HEAD};
static const Color STACK_COLOR[MEMORY_CATEGORY_COUNT] = {
    [MEMORY_WEIGHTS] = {0x33, 0x41, 0x4b},    [MEMORY_MASTER_WEIGHTS] = {0x55, 0x6b, 0x78},
    [MEMORY_GRADIENTS] = {0x83, 0x97, 0xa3},  [MEMORY_MOMENTS] = {0xb4, 0xc2, 0xca},
    [MEMORY_TABLES] = {0x6d, 0x6d, 0x6d},     [MEMORY_ACTIVATIONS] = {0x5b, 0xad, 0x9c},
    [MEMORY_ACTIVATION_GRADIENTS] = {0xc6, 0xe9, 0xdf}, [MEMORY_WORKSPACE] = {0xe3, 0xb0, 0x3c},
    [MEMORY_HEAD] = {0xa8, 0x1c, 0x33}};

static double total_of(const Moment *m) {
  double total = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += (double)m->bytes[c];
  return total;
}

static double highest_total(const Timeline *t) {
  double highest = 0;
  for (int i = 0; i < t->count; i++) highest = fmax(highest, total_of(&t->moments[i]));
  return highest;
}

static double moment_end(const Timeline *t, int i) {
  return i + 1 < t->count ? t->moments[i + 1].seconds : t->duration;
}

// What stays from step to step. Where that is most of it, it is told in words and left out of the picture: the
// shape of a step is what comes and goes.
enum { STAYING = 5, LEVELS = sizeof STACK / sizeof *STACK };

static double staying(const Timeline *t) {
  double bytes = 0;
  for (int level = 0; level < STAYING; level++) bytes += (double)t->moments[t->count - 1].bytes[STACK[level]];
  return bytes;
}

// One category's area, on what lies below it, from level `from` up.
static void draw_band(const Panel *p, const Timeline *t, int from, int level) {
  Box *boxes = calloc((size_t)t->count, sizeof *boxes);
  if (!boxes) fail("out of host memory for a picture");
  for (int i = 0; i < t->count; i++) {
    const Moment *m = &t->moments[i];
    double below = 0, own = (double)m->bytes[STACK[level]];
    for (int k = from; k < level; k++) below += (double)m->bytes[STACK[k]];
    Spot low = panel_spot(p, m->seconds, below), high = panel_spot(p, moment_end(t, i), below + own);
    boxes[i] = (Box){low.x, high.y, high.x, low.y};
  }
  canvas_boxes(p->canvas, boxes, t->count, STACK_COLOR[STACK[level]], 1);
  free(boxes);
}

// Names beside the bands that are there at the end, where they are tall enough.
static void label_bands(const Panel *p, const Timeline *t, int from) {
  const Moment *m = &t->moments[t->count - 1];
  double below = 0;
  for (int level = from; level < LEVELS; level++) {
    double own = (double)m->bytes[STACK[level]];
    Spot low = panel_spot(p, 0, below), high = panel_spot(p, 0, below + own);
    below += own;
    if (low.y - high.y < 9) continue;
    char text[96];
    snprintf(text, sizeof text, "%s %s", memory_category_name(STACK[level]), axis_value(UNIT_BYTES, own).text);
    canvas_text(p->canvas, (Spot){p->box.right + 10, 0.5 * (low.y + high.y) + 4}, text_small(), text);
  }
}

// The last layer's bytes, over its first tower and the line at the peak, where nothing else is.
static void label_head(const Panel *p, const Timeline *t, double peak_y) {
  int at = 0;
  for (int i = 0; i < t->count; i++)
    if (t->moments[i].step == 1 && t->moments[i].bytes[MEMORY_HEAD] > t->moments[at].bytes[MEMORY_HEAD]) at = i;
  const Moment *m = &t->moments[at];
  if (!m->bytes[MEMORY_HEAD]) return;
  char text[96];
  snprintf(text, sizeof text, "last layer %s", axis_value(UNIT_BYTES, (double)m->bytes[MEMORY_HEAD]).text);
  double x = panel_spot(p, m->seconds, 0).x;
  TextStyle bold = {.size = 12, .bold = true, .color = STACK_COLOR[MEMORY_HEAD]};
  canvas_text(p->canvas, (Spot){fmax(p->box.left + 4, x - 4), peak_y - 8}, bold, text);
}

void picture_timeline(const Timeline timelines[2], const char *title, const char *subtitle, double scale,
                      const char *path) {
  Canvas *canvas = canvas_create(1080, 710, scale);
  heading(canvas, title, subtitle);
  double highest = fmax(highest_total(&timelines[0]), highest_total(&timelines[1]));
  double stays = staying(&timelines[0]);
  int from = stays > 0.55 * highest ? STAYING : 0;
  double base = from ? stays : 0;
  double x[] = {0, timelines[0].duration, timelines[1].duration}, y = 1.08 * (highest - base);
  const char *names[LEVELS];
  Color colors[LEVELS];
  int count = 0;
  for (int level = LEVELS - 1; level >= from; level--) {
    double most = 0;
    for (int i = 0; i < 2; i++)
      for (int k = 0; k < timelines[i].count; k++)
        most = fmax(most, (double)timelines[i].moments[k].bytes[STACK[level]]);
    if (most < 0.004 * y) continue; // thinner than a pixel
    names[count] = memory_category_name(STACK[level]);
    colors[count++] = STACK_COLOR[STACK[level]];
  }
  legend_areas(canvas, (Spot){36, 88}, names, colors, count);
  char y_title[160] = "bytes in use";
  if (from)
    snprintf(y_title, sizeof y_title, "bytes in use beyond the %s of weights, gradients and optimizer state",
             axis_value(UNIT_BYTES, base).text);
  for (int i = 0; i < 2; i++) {
    const Timeline *t = &timelines[i];
    double top = i == 0 ? 152 : 432;
    Panel p = {.canvas = canvas,
               .box = {92, top, 880, top + 210},
               .x = axis_around(x, 3, UNIT_SECONDS, false, true),
               .y = axis_around(&y, 1, UNIT_BYTES, false, true),
               .title = t->mode == LCE_FUSED ? "fused, in chunks" : "materialized logits",
               .y_title = y_title,
               .x_title = i == 0 ? NULL
                          : t->planned ? "time of three steps, guessed from flops and bytes"
                                       : "time of three steps, every operation waited for",
               .x_ticks = 8,
               .y_ticks = 5};
    p.x.high = fmax(timelines[0].duration, timelines[1].duration);
    panel_draw(&p);
    for (int level = from; level < LEVELS; level++) draw_band(&p, t, from, level);
    double peak = highest_total(t);
    Spot left = panel_spot(&p, 0, peak - base), right = panel_spot(&p, p.x.high, peak - base);
    canvas_line(canvas, left, right, (Stroke){.color = COLOR_INK, .width = 1, .dash = 5, .gap = 4});
    char text[64];
    snprintf(text, sizeof text, "peak %s%s", axis_value(UNIT_BYTES, peak).text, from ? " in all" : "");
    canvas_text(canvas, (Spot){right.x + 10, right.y + 4}, (TextStyle){.size = 12, .bold = true, .color = COLOR_INK},
                text);
    label_bands(&p, t, from);
    label_head(&p, t, right.y);
  }
  canvas_write_png(canvas, path);
  canvas_destroy(canvas);
}
