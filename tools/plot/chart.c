#include "tools/plot/chart.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"

const Color COLOR_INK = {0x1c, 0x23, 0x30}, COLOR_MUTED = {0x5c, 0x66, 0x73}, COLOR_GRID = {0xe4, 0xe7, 0xec},
            COLOR_FAINT = {0x9a, 0xa3, 0xaf};

TextStyle text_title(void) {
  return (TextStyle){.size = 17, .bold = true, .color = COLOR_INK};
}
TextStyle text_subtitle(void) {
  return (TextStyle){.size = 12, .color = COLOR_MUTED};
}
TextStyle text_small(void) {
  return (TextStyle){.size = 11, .color = COLOR_MUTED};
}

// --- axes --------------------------------------------------------------------------------------------------

typedef struct {
  double size;
  const char *name;
} UnitStep;

static const UnitStep BYTES[] = {
    {1, "B"}, {0x1p10, "KiB"}, {0x1p20, "MiB"}, {0x1p30, "GiB"}, {0x1p40, "TiB"}};
static const UnitStep SECONDS[] = {{1e-6, "µs"}, {1e-3, "ms"}, {1, "s"}};

// The unit in which `value` is about 1 or more.
static UnitStep unit_step(Unit unit, double value) {
  const UnitStep *steps = unit == UNIT_BYTES ? BYTES : SECONDS;
  int count = unit == UNIT_BYTES ? 5 : 3, i = 0;
  if (unit != UNIT_BYTES && unit != UNIT_SECONDS) return (UnitStep){1, ""};
  while (i + 1 < count && value >= 0.95 * steps[i + 1].size) i++;
  return steps[i];
}

const char *axis_unit(const Axis *axis) {
  return axis->log ? "" : unit_step(axis->unit, axis->high).name;
}

static Label plain(double value) {
  Label l;
  double size = fabs(value);
  if (size > 0 && (size < 1e-3 || size >= 1e6)) {
    int power = (int)floor(log10(size) + 1e-9);
    double digits = value / pow(10, power);
    if (fabs(digits - 1) < 1e-9)
      snprintf(l.text, sizeof l.text, "1e%d", power);
    else
      snprintf(l.text, sizeof l.text, "%.3ge%d", digits, power);
  } else {
    snprintf(l.text, sizeof l.text, "%.6g", value);
  }
  return l;
}

Label axis_value(Unit unit, double value) {
  Label l;
  UnitStep step = unit_step(unit, value);
  double number = value / step.size;
  if (unit == UNIT_COUNT)
    snprintf(l.text, sizeof l.text, "%s", text_grouped((int64_t)llround(value)).text);
  else if (unit == UNIT_PLAIN)
    snprintf(l.text, sizeof l.text, fabs(value) >= 0.1 && fabs(value) < 100 ? "%.2f" : "%.3g", value);
  else
    snprintf(l.text, sizeof l.text, "%.*f %s", number >= 100 ? 0 : number >= 10 ? 1 : 2, number, step.name);
  return l;
}

// The smallest round step that is at least `rough`: 1, 2, 5 times a power of ten, or a power of two.
static double round_step(double rough, Unit unit, double unit_size) {
  if (rough <= 0) return 1;
  if (unit == UNIT_COUNT) return fmax(1, exp2(ceil(log2(rough) - 1e-9)));
  double ten = pow(10, floor(log10(rough / unit_size) + 1e-9)), part = rough / unit_size / ten;
  return unit_size * ten * (part <= 1 + 1e-9 ? 1 : part <= 2 + 1e-9 ? 2 : part <= 5 + 1e-9 ? 5 : 10);
}

// Powers of two for what is counted in them, of ten for the rest.
static double log_base(Unit unit) {
  return unit == UNIT_BYTES || unit == UNIT_COUNT ? 2 : 10;
}

Axis axis_around(const double *values, int count, Unit unit, bool log, bool from_zero) {
  double low = INFINITY, high = -INFINITY;
  for (int i = 0; i < count; i++) {
    if (!isfinite(values[i]) || (log && values[i] <= 0)) continue;
    low = fmin(low, values[i]);
    high = fmax(high, values[i]);
  }
  if (!isfinite(low)) low = log ? 1 : 0, high = 1;
  Axis axis = {.log = log, .unit = unit};
  if (log) {
    double per = log_base(unit) == 2 ? 1 : 1 / log2(10);
    axis.low = low, axis.high = high;
    if (high / low < 4) axis.low = low / 2, axis.high = high * 2;
    // A little air, then out to the next power; counted things end where they end.
    if (unit != UNIT_COUNT) axis.low *= 0.9, axis.high *= 1.15;
    axis.low = pow(log_base(unit), floor(log2(axis.low) * per + 1e-9));
    axis.high = pow(log_base(unit), ceil(log2(axis.high) * per - 1e-9));
    return axis;
  }
  if (from_zero) low = fmin(low, 0);
  if (high <= low) high = low + (low != 0 ? fabs(low) : 1);
  double step = round_step((high - low) / 6, unit, unit_step(unit, high).size);
  axis.low = from_zero && low >= 0 ? 0 : floor(low / step + 1e-9) * step;
  axis.high = ceil(high / step - 1e-9) * step;
  // Where the last value would touch the frame, one step more; counted things end where they end.
  if (unit != UNIT_COUNT && axis.high - high < 0.02 * (axis.high - axis.low)) axis.high += step / 2;
  return axis;
}

int axis_ticks(const Axis *axis, int most, double ticks[TICKS_MOST]) {
  int count = 0;
  if (most > TICKS_MOST) most = TICKS_MOST;
  if (axis->log) {
    double base = log_base(axis->unit), decades = log2(axis->high / axis->low) / log2(base);
    double power = fmax(1, ceil(decades / (most - 1) - 1e-9));
    // Ticks stand on whole powers of the stride, so that 1 GiB is one of them.
    double first = ceil(log2(axis->low) / log2(base) / power - 1e-9) * power;
    for (double p = first; count < most; p += power) {
      double tick = pow(base, p);
      if (tick > axis->high * (1 + 1e-9)) break;
      ticks[count++] = tick;
    }
    return count;
  }
  double step =
      round_step((axis->high - axis->low) / most, axis->unit, unit_step(axis->unit, axis->high).size);
  for (double k = ceil(axis->low / step - 1e-9); count < most + 1 && count < TICKS_MOST; k++) {
    if (k * step > axis->high + 1e-9 * step) break;
    ticks[count++] = k * step + 0.0; // no -0
  }
  return count;
}

static Label tick_label(const Axis *axis, double tick) {
  Label l;
  if (axis->unit == UNIT_COUNT) return axis_value(UNIT_COUNT, tick);
  if (axis->unit == UNIT_PLAIN) return plain(tick);
  UnitStep step = unit_step(axis->unit, axis->log ? tick * (1 + 1e-9) : axis->high);
  snprintf(l.text, sizeof l.text, axis->log ? "%.6g %s" : "%.6g", tick / step.size, step.name);
  return l;
}

// --- the panel ---------------------------------------------------------------------------------------------

static double share_of(const Axis *axis, double value) {
  if (axis->log) return log(value / axis->low) / log(axis->high / axis->low);
  return (value - axis->low) / (axis->high - axis->low);
}

Spot panel_spot(const Panel *p, double x, double y) {
  return (Spot){p->box.left + share_of(&p->x, x) * (p->box.right - p->box.left),
                p->box.bottom - share_of(&p->y, y) * (p->box.bottom - p->box.top)};
}

void panel_draw(const Panel *p) {
  double ticks[TICKS_MOST];
  Box b = p->box;
  TextStyle small = text_small();
  int count = axis_ticks(&p->y, p->y_ticks ? p->y_ticks : 6, ticks);
  small.align = ALIGN_RIGHT;
  for (int i = 0; i < count; i++) {
    double y = panel_spot(p, p->x.low, ticks[i]).y;
    canvas_rule(p->canvas, (Spot){b.left, y}, (Spot){b.right, y}, 1, COLOR_GRID);
    if (!p->no_y_labels)
      canvas_text(p->canvas, (Spot){b.left - 8, y + 4}, small, tick_label(&p->y, ticks[i]).text);
  }
  count = axis_ticks(&p->x, p->x_ticks ? p->x_ticks : 6, ticks);
  small.align = ALIGN_CENTER;
  canvas_rule(p->canvas, (Spot){b.left, b.bottom}, (Spot){b.right, b.bottom}, 1, COLOR_MUTED);
  for (int i = 0; i < count; i++) {
    double x = panel_spot(p, ticks[i], p->y.low).x;
    canvas_rule(p->canvas, (Spot){x, b.bottom}, (Spot){x, b.bottom + 4}, 1, COLOR_MUTED);
    if (!p->no_x_labels)
      canvas_text(p->canvas, (Spot){x, b.bottom + 18}, small, tick_label(&p->x, ticks[i]).text);
  }
  if (p->x_title) {
    char text[128];
    const char *unit = axis_unit(&p->x);
    snprintf(text, sizeof text, *unit ? "%s, %s" : "%s", p->x_title, unit);
    canvas_text(p->canvas, (Spot){(b.left + b.right) / 2, b.bottom + 37}, small, text);
  }
  small.align = ALIGN_LEFT;
  if (p->title)
    canvas_text(p->canvas, (Spot){b.left, b.top - 28},
                (TextStyle){.size = 13, .bold = true, .color = COLOR_INK}, p->title);
  if (p->y_title) {
    char text[128];
    const char *unit = axis_unit(&p->y);
    snprintf(text, sizeof text, *unit ? "%s, %s" : "%s", p->y_title, unit);
    canvas_text(p->canvas, (Spot){b.left, b.top - 11}, small, text);
  }
}

void panel_series(const Panel *p, SeriesStyle style, const double *x, const double *y, const bool *firm,
                  int count) {
  for (int i = 0; i + 1 < count; i++) {
    bool whole = !firm || (firm[i] && firm[i + 1]);
    Stroke stroke = {.color = style.color,
                     .width = style.width,
                     .dash = whole ? style.dash : 5,
                     .gap = whole ? style.gap : 4};
    canvas_line(p->canvas, panel_spot(p, x[i], y[i]), panel_spot(p, x[i + 1], y[i + 1]), stroke);
  }
  for (int i = 0; i < count; i++)
    canvas_marker(p->canvas, style.marker, panel_spot(p, x[i], y[i]), 4.2, style.color, !firm || firm[i]);
}

void panel_end_labels(const Panel *p, EndLabel *labels, int count, double x) {
  // From top to bottom, each far enough below the one before; then back up if the last one fell off.
  for (int i = 1; i < count; i++)
    for (int k = i; k > 0 && labels[k].y < labels[k - 1].y; k--) {
      EndLabel t = labels[k];
      labels[k] = labels[k - 1];
      labels[k - 1] = t;
    }
  for (int i = 1; i < count; i++) {
    double room = labels[i - 1].below[0] ? 34 : 18;
    if (labels[i].y < labels[i - 1].y + room) labels[i].y = labels[i - 1].y + room;
  }
  double limit = p->box.bottom;
  for (int i = count - 1; i >= 0; i--) {
    double tall = labels[i].below[0] ? 16 : 0;
    if (labels[i].y + tall > limit) labels[i].y = limit - tall;
    limit = labels[i].y - (i > 0 && labels[i - 1].below[0] ? 18 : 18);
  }
  TextStyle bold = {.size = 12, .bold = true}, small = text_small();
  for (int i = 0; i < count; i++) {
    bold.color = labels[i].color;
    canvas_text(p->canvas, (Spot){x, labels[i].y + 4}, bold, labels[i].text);
    if (labels[i].below[0]) canvas_text(p->canvas, (Spot){x, labels[i].y + 19}, small, labels[i].below);
  }
}

// --- text where there is room -------------------------------------------------------------------------------

void taken_add(Taken *t, Box box) {
  if (t->count < TAKEN_MOST) t->boxes[t->count++] = box;
}

static bool is_free(const Taken *t, Box b) {
  for (int i = 0; i < t->count; i++) {
    const Box *o = &t->boxes[i];
    if (b.left < o->right && o->left < b.right && b.top < o->bottom && o->top < b.bottom) return false;
  }
  return true;
}

void text_beside(Canvas *c, Taken *t, Box frame, Spot at, double distance, TextStyle style, const char *text,
                 const Side *sides, int count) {
  double width = canvas_text_width(c, style, text), tall = style.size;
  Box place = {0};
  style.align = ALIGN_LEFT;
  bool placed = false;
  // Close by if there is room, else a little further away.
  for (int i = 0; i < 3 * count && !placed; i++) {
    double away = distance * (1 + i / count);
    Side side = sides[i % count];
    Spot middle = at;
    if (side == SIDE_RIGHT) middle.x += away + width / 2;
    if (side == SIDE_LEFT) middle.x -= away + width / 2;
    if (side == SIDE_ABOVE) middle.y -= away + 0.45 * tall;
    if (side == SIDE_BELOW) middle.y += away + 0.55 * tall;
    Box box = {middle.x - width / 2, middle.y - tall / 2, middle.x + width / 2, middle.y + tall / 2};
    placed = box.left >= frame.left && box.right <= frame.right && box.top >= frame.top &&
             box.bottom <= frame.bottom && is_free(t, box);
    if (i == 0 || placed) place = box; // the first stands in when none is free
  }
  // Paper under the letters, so that grid lines do not cross them.
  canvas_boxes(c, &place, 1, (Color){255, 255, 255}, 0.8);
  canvas_text(c, (Spot){place.left, place.bottom - 0.14 * tall}, style, text);
  taken_add(t, place);
}

// --- legends -----------------------------------------------------------------------------------------------

double legend_draw(Canvas *c, Spot at, const LegendEntry *entries, int count) {
  TextStyle style = {.size = 12, .color = COLOR_INK};
  double x = at.x;
  for (int i = 0; i < count; i++) {
    const SeriesStyle *s = &entries[i].style;
    Stroke stroke = {.color = s->color, .width = s->width, .dash = s->dash, .gap = s->gap};
    if (s->width > 0) canvas_line(c, (Spot){x, at.y - 4}, (Spot){x + 30, at.y - 4}, stroke);
    canvas_marker(c, s->marker, (Spot){x + 15, at.y - 4}, 4.2, s->color, !entries[i].hollow);
    x += 37 + canvas_text(c, (Spot){x + 37, at.y}, style, entries[i].text) + 22;
  }
  return x - at.x;
}

double legend_areas(Canvas *c, Spot at, const char *const *texts, const Color *colors, int count) {
  TextStyle style = {.size = 11.5, .color = COLOR_INK};
  double x = at.x;
  for (int i = 0; i < count; i++) {
    Box box = {x, at.y - 10, x + 12, at.y + 2};
    canvas_boxes(c, &box, 1, colors[i], 1);
    x += 18 + canvas_text(c, (Spot){x + 18, at.y}, style, texts[i]) + 18;
  }
  return x - at.x;
}
