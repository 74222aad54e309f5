#include "tools/curves/drawing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"

// on grey paper.
const Color COLOR_MODE[2] = {[LCE_FUSED] = {0x14, 0x3d, 0x73}, [LCE_MATERIALIZED] = {0xe8, 0x7d, 0x1e}};
const char *const MODE_TEXT[2] = {[LCE_FUSED] = "fused", [LCE_MATERIALIZED] = "materialized"};

SeriesStyle mode_style(LceMode mode) {
  return (SeriesStyle){.color = COLOR_MODE[mode],
                       .marker = mode == LCE_FUSED ? MARKER_CIRCLE : MARKER_SQUARE,
                       .width = mode == LCE_FUSED ? 2.6 : 2};
}

// --- lines from readings -----------------------------------------------------------------------------------

double whole_bytes(const Reading *r) {
  return (double)reading_bytes(r);
}
double layer_bytes(const Reading *r) {
  return (double)reading_layer_bytes(r);
}
// The device's figure on the ledger's terms: without its context and its libraries.
double device_bytes(const Reading *r) {
  return r->device_bytes > r->device_base_bytes ? (double)(r->device_bytes - r->device_base_bytes) : NAN;
}
double over_floor(const Reading *r) {
  return r->floor_seconds > 0 ? r->layer_seconds / r->floor_seconds : NAN;
}

Line line_of(const Curve *c, Sweep sweep, LceMode mode, Figure figure) {
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

bool any_measured(const Curve *c) {
  for (int i = 0; i < c->count; i++)
    if (c->readings[i].status == POINT_MEASURED) return true;
  return false;
}

static bool any_planned(const Curve *c) {
  for (int i = 0; i < c->count; i++)
    if (c->readings[i].status != POINT_MEASURED) return true;
  return false;
}

Marks marks_of(const Recipe *recipe, Sweep sweep) {
  Marks found = {.count = 0};
  for (int i = 0; recipe && i < recipe->mark_count && found.count < 32; i++)
    if (recipe->marks[i].sweep == sweep) found.items[found.count++] = &recipe->marks[i];
  return found;
}

// --- axes --------------------------------------------------------------------------------------------------

// Sizes that double from point to point over a wide range stand on a log axis, and then so does what grows with
// them: a line stays a line. All else is linear, where a difference is seen as what it is.
bool doubling(const double *x, int count, double range) {
  return count > 2 && x[count - 1] / x[count - 2] > 1.6 && x[1] / x[0] > 1.6 && x[count - 1] / x[0] >= range;
}

static double spread(const double *y, int count) {
  double low = INFINITY, high = 0;
  for (int i = 0; i < count; i++)
    if (y[i] > 0) low = fmin(low, y[i]), high = fmax(high, y[i]);
  return high / low;
}

const char *size_title(Sweep sweep) {
  static const char *const titles[SWEEP_COUNT] = {"tokens", "vocabulary", "hidden size", "tokens per chunk"};
  return titles[sweep];
}

// A panel whose axes hold the lines of both modes (and what else is drawn in it).
Panel panel_for(Canvas *canvas, Box box, Sweep sweep, const Line lines[2], Unit unit, const double *more,
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

void draw_modes(const Panel *p, const Line lines[2]) {
  panel_series(p, mode_style(LCE_MATERIALIZED), lines[LCE_MATERIALIZED].x, lines[LCE_MATERIALIZED].y,
               lines[LCE_MATERIALIZED].firm, lines[LCE_MATERIALIZED].count);
  panel_series(p, mode_style(LCE_FUSED), lines[LCE_FUSED].x, lines[LCE_FUSED].y, lines[LCE_FUSED].firm,
               lines[LCE_FUSED].count);
}

// --- what stands around ------------------------------------------------------------------------------------

static int64_t setting_number(const Curve *c, const char *name) {
  Setting s = curve_setting(c, name);
  return strtoll(s.text, NULL, 10);
}

static void add_part(Caption *t, const char *before, const char *what, const char *after) {
  size_t length = strlen(t->text);
  snprintf(t->text + length, sizeof t->text - length, "%s%s%.100s%s", length ? ", " : "", before, what,
           after);
}

Caption curve_caption(const Curve *c) {
  Setting what = curve_setting(c, "what"), model = curve_setting(c, "model"),
          dtype = curve_setting(c, "dtype");
  Setting planned = curve_setting(c, "planned"), device = curve_setting(c, "device");
  Setting recompute = curve_setting(c, "recompute"), sweep = curve_setting(c, "sweep");
  bool layer = strcmp(what.text, "layer") == 0;
  Text tokens = text_grouped(setting_number(c, "batch") * setting_number(c, "seq_len"));
  Caption t = {""};
  // What is swept stands on the axis.
  if (!layer) add_part(&t, "", model.text, "");
  if (strcmp(sweep.text, "tokens")) add_part(&t, "N ", tokens.text, "");
  if (layer && strcmp(sweep.text, "hidden"))
    add_part(&t, "H ", text_grouped(setting_number(c, "hidden")).text, "");
  if (strcmp(sweep.text, "vocab")) add_part(&t, "V ", text_grouped(setting_number(c, "vocab")).text, "");
  add_part(&t, "", dtype.text, "");
  if (!layer && strcmp(recompute.text, "none")) add_part(&t, "recompute ", recompute.text, "");
  add_part(&t, strcmp(planned.text, "yes") == 0 ? "planned for " : "on ", device.text, "");
  return t;
}

void heading(Canvas *canvas, const char *title, const char *subtitle) {
  canvas_text(canvas, (Spot){36, 40}, text_title(), title);
  canvas_text(canvas, (Spot){36, 61}, text_subtitle(), subtitle);
}

void mode_legend(Canvas *canvas, const Curve *c, Spot at, bool device) {
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
    entries[count++] = (LegendEntry){.text = "the device's own figure",
                                     .style = {.color = COLOR_INK, .marker = MARKER_CROSS, .width = 0}};
  legend_draw(canvas, at, entries, count);
}

bool about_layer(const Curve *c) {
  Setting what = curve_setting(c, "what");
  return strcmp(what.text, "layer") == 0;
}

Sweep first_sweep(const Curve *c) {
  return c->count ? c->readings[0].point.sweep : SWEEP_TOKENS;
}

bool several_sweeps(const Curve *c) {
  for (int i = 1; i < c->count; i++)
    if (c->readings[i].point.sweep != c->readings[0].point.sweep) return true;
  return false;
}

void note(Canvas *canvas, const Curve *c, const char *source, double y) {
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
    length = snprintf(text, sizeof text,
                      "Measured by the ledger; plan and ledger agree to the byte at %d of %d points.", exact,
                      measured);
  if (no_room)
    length += snprintf(text + length, sizeof text - (size_t)length, " %d point%s would not fit.", no_room,
                       no_room == 1 ? "" : "s");
  if (source) snprintf(text + length, sizeof text - (size_t)length, " Grey: %s.", source);
  canvas_text(canvas, (Spot){36, y}, text_small(), text);
}
