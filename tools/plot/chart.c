#include "tools/plot/chart.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/text.h"

const Color COLOR_INK = {0x1c, 0x23, 0x30}, COLOR_MUTED = {0x5c, 0x66, 0x73};
static const Color GRID = {0xe4, 0xe7, 0xec}, WHITE = {255, 255, 255};
static const TextStyle SMALL = {.size = 11, .color = {0x5c, 0x66, 0x73}}; // ticks and notes

Label label(const char *format, ...) {
  Label l;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(l.text, sizeof l.text, format, arguments);
  va_end(arguments);
  return l;
}

// --- axes --------------------------------------------------------------------------------------------------

typedef struct {
  double size;
  const char *name;
} UnitStep;

// The unit in which `value` is about 1 or more.
static UnitStep unit_step(Unit unit, double value) {
  static const UnitStep steps[][6] = {
      [UNIT_PLAIN] = {{1, ""}},
      [UNIT_COUNT] = {{1, ""}},
      [UNIT_BYTES] = {{1, "B"}, {0x1p10, "KiB"}, {0x1p20, "MiB"}, {0x1p30, "GiB"}, {0x1p40, "TiB"}},
      [UNIT_SECONDS] = {{1e-6, "µs"}, {1e-3, "ms"}, {1, "s"}}};
  const UnitStep *step = steps[unit];
  while (step[1].name && value >= 0.95 * step[1].size) step++;
  return *step;
}

static Label plain(double value) {
  double size = fabs(value);
  if (size == 0 || (size >= 1e-3 && size < 1e6)) return label("%.6g", value);
  int power = (int)floor(log10(size) + 1e-9);
  double digits = value / pow(10, power);
  return fabs(digits - 1) < 1e-9 ? label("1e%d", power) : label("%.3ge%d", digits, power);
}

Label axis_value(Unit unit, double value) {
  UnitStep step = unit_step(unit, value);
  double number = value / step.size;
  if (unit == UNIT_COUNT) return label("%s", text_grouped((int64_t)llround(value)).text);
  if (unit == UNIT_PLAIN) return label(fabs(value) >= 0.1 && fabs(value) < 100 ? "%.2f" : "%.3g", value);
  return label("%.*f %s", number >= 100 ? 0 : number >= 10 ? 1 : 2, number, step.name);
}

static Label tick_label(const Axis *axis, double tick) {
  if (axis->names) return label("%s", axis->names[(int)tick]);
  if (axis->unit == UNIT_COUNT) return axis_value(UNIT_COUNT, tick);
  if (axis->unit == UNIT_PLAIN) return plain(tick);
  UnitStep step = unit_step(axis->unit, axis->log ? tick * (1 + 1e-9) : axis->high);
  return label(axis->log ? "%.6g %s" : "%.6g", tick / step.size, step.name);
}

static Label axis_title(const Axis *axis) {
  const char *unit = axis->log ? "" : unit_step(axis->unit, axis->high).name;
  return label(*unit ? "%s, %s" : "%s", axis->title.text, unit);
}

// A round step of at least `rough`: 1, 2, 5 times a power of ten, or a power of two.
static double round_step(double rough, Unit unit, double unit_size) {
  if (unit == UNIT_COUNT) return fmax(1, exp2(ceil(log2(rough) - 1e-9)));
  double ten = pow(10, floor(log10(rough / unit_size) + 1e-9)), part = rough / unit_size / ten;
  return unit_size * ten * (part <= 1 + 1e-9 ? 1 : part <= 2 + 1e-9 ? 2 : part <= 5 + 1e-9 ? 5 : 10);
}

// What a log axis counts powers of: two for sizes and bytes, ten for the rest; and how many from tick to tick.
static double log_base(Unit unit) {
  return unit == UNIT_BYTES || unit == UNIT_COUNT ? 2 : 10;
}

static double log_stride(const Axis *axis) {
  double powers = log(axis->high / axis->low) / log(log_base(axis->unit));
  return fmax(1, ceil(powers / (axis->ticks - 1) - 1e-9));
}

static void fit_log(Axis *axis, double low, double high) {
  double base = log_base(axis->unit);
  if (high / low < 4) low /= 2, high *= 2;
  // A little space, then out to the next power; sizes end where they end.
  if (axis->unit != UNIT_COUNT) low *= 0.9, high *= 1.15;
  axis->low = pow(base, floor(log(low) / log(base) + 1e-9));
  axis->high = pow(base, ceil(log(high) / log(base) - 1e-9));
  if (axis->unit == UNIT_COUNT) return;
  double stride = pow(base, log_stride(axis)), end = axis->low; // and on to a tick
  while (end < axis->high * (1 - 1e-9)) end *= stride;
  axis->high = end;
}

static double linear_step(const Axis *axis, int ticks) {
  return round_step((axis->high - axis->low) / ticks, axis->unit, unit_step(axis->unit, axis->high).size);
}

static void fit_linear(Axis *axis, double low, double high) {
  if (axis->from_zero) low = fmin(low, 0);
  if (high <= low) high = low + (low != 0 ? fabs(low) : 1);
  axis->low = low, axis->high = high;
  // Sizes end close to where they end; the rest on a tick, and not where the last value would touch the frame.
  for (int pass = 0; pass < 2; pass++) {
    double step = linear_step(axis, axis->unit == UNIT_COUNT ? 6 : axis->ticks);
    axis->low = floor(axis->low / step + 1e-9) * step;
    axis->high = ceil(axis->high / step - 1e-9) * step;
    bool touches = axis->high - high < 0.02 * (axis->high - axis->low);
    if (axis->unit != UNIT_COUNT && pass == 0 && touches) axis->high += step;
  }
}

Range panel_range(const Panel *p, bool vertical, bool positive) {
  Range r = {INFINITY, -INFINITY};
  for (int k = 0; k < p->count; k++)
    for (int n = 0; n < p->series[k].count && !(vertical && p->series[k].clamped); n++) {
      const Sample *s = &p->series[k].samples[n];
      int edges = vertical && p->series[k].area ? 2 : 1;
      for (int edge = 0; edge < edges; edge++) {
        double value = edge ? s->base : vertical ? s->y : s->x;
        if (!isfinite(value) || (positive && value <= 0)) continue;
        r = (Range){fmin(r.low, value), fmax(r.high, value)};
      }
    }
  return r;
}

// Fits an axis of a panel to its series, and to those of the panels that share it.
static void fit_axis(const Picture *picture, Panel *panel, bool vertical) {
  Axis *axis = vertical ? &panel->y : &panel->x;
  double low = INFINITY, high = -INFINITY;
  if (!axis->ticks) axis->ticks = 6;
  if (axis->low < axis->high) return;
  for (int i = 0; i < picture->count; i++) {
    const Panel *p = &picture->panels[i];
    int shared = vertical ? p->y.shared : p->x.shared;
    if (p != panel && (!shared || shared != axis->shared)) continue;
    Range r = panel_range(p, vertical, axis->log);
    low = fmin(low, r.low);
    high = fmax(high, r.high);
  }
  if (low > high) low = 1, high = 2;
  if (axis->log)
    fit_log(axis, low, high);
  else
    fit_linear(axis, low, high);
}

enum { TICKS_MAX = 64 };

static int axis_ticks(const Axis *axis, double ticks[TICKS_MAX]) {
  int count = 0;
  double end = axis->high * (1 + 1e-9);
  if (axis->log) {
    double stride = pow(log_base(axis->unit), log_stride(axis));
    for (double tick = axis->low; tick <= end && count < TICKS_MAX - 1; tick *= stride) ticks[count++] = tick;
  } else {
    double step = axis->names ? 1 : linear_step(axis, axis->ticks);
    for (double k = ceil(axis->low / step - 1e-9); k * step <= end && count < TICKS_MAX - 1; k++)
      ticks[count++] = k * step + 0.0; // no -0
  }
  bool short_of_end = count && ticks[count - 1] < axis->high * (1 - 1e-9);
  if ((axis->unit == UNIT_COUNT || axis->tight) && short_of_end) ticks[count++] = axis->high;
  return count;
}

// --- building ----------------------------------------------------------------------------------------------

Picture *picture_create(double width, double height, Label title, Label subtitle) {
  Picture *p = host_alloc(1, sizeof *p, "a picture");
  p->width = width, p->height = height, p->title = title, p->subtitle = subtitle;
  return p;
}

void picture_free(Picture *p) {
  for (int i = 0; p && i < p->count; i++)
    for (int k = 0; k < p->panels[i].count; k++) free(p->panels[i].series[k].samples);
  free(p);
}

Panel *picture_panel(Picture *p, Box box, Label title) {
  if (p->count == PANELS_MAX) fail("a picture has at most %d panels", PANELS_MAX);
  Panel *panel = &p->panels[p->count++];
  panel->box = box, panel->title = title;
  return panel;
}

Series *panel_series(Panel *panel, Series series) {
  if (panel->count == SERIES_MAX) fail("a panel has at most %d series", SERIES_MAX);
  panel->series[panel->count] = series;
  return &panel->series[panel->count++];
}

void panel_bar(Panel *panel, Series style, double value, double low, double high, Label end) {
  style.area = true;
  Series *bar = panel_series(panel, style);
  series_add(bar, (Sample){.x = 0, .y = low, .base = high});
  series_add(bar, (Sample){.x = value, .y = low, .base = high});
  Series *text = panel_series(panel, (Series){.color = COLOR_INK, .sides = "6"});
  series_add(text, (Sample){.x = value, .y = (low + high) / 2, .label = end});
}

void series_add(Series *s, Sample sample) {
  s->samples = host_grow(s->samples, s->count, &s->capacity, sizeof sample, "a picture");
  s->samples[s->count++] = sample;
}

Box picture_cell(Box frame, double gap_x, double gap_y, int rows, int columns, int row, int column) {
  double width = (frame.right - frame.left + gap_x) / columns,
         height = (frame.bottom - frame.top + gap_y) / rows;
  double left = frame.left + column * width, top = frame.top + row * height;
  return (Box){left, top, left + width - gap_x, top + height - gap_y};
}

// --- text where there is space -----------------------------------------------------------------------------

// The boxes of a panel that marks and text occupy.
typedef struct {
  Box *boxes;
  int count;
  int64_t capacity;
} Occupied;

static void occupy(Occupied *o, Box box) {
  o->boxes = host_grow(o->boxes, o->count, &o->capacity, sizeof box, "a picture");
  o->boxes[o->count++] = box;
}

static bool is_free(const Occupied *o, Box b) {
  for (int i = 0; i < o->count; i++) {
    const Box *other = &o->boxes[i];
    if (b.left < other->right && other->left < b.right && b.top < other->bottom && other->top < b.bottom)
      return false;
  }
  return true;
}

static void occupy_series(const Panel *p, const Series *s, Occupied *o) {
  for (int i = 0; i < s->count; i++) {
    Spot at = panel_spot(p, s->samples[i].x, s->samples[i].y), next = at;
    if (!s->area) occupy(o, (Box){at.x - 6, at.y - 6, at.x + 6, at.y + 6});
    if (i + 1 < s->count) next = panel_spot(p, s->samples[i + 1].x, s->samples[i + 1].y);
    if (s->area && next.x > at.x)
      occupy(o, (Box){at.x, at.y, next.x, panel_spot(p, 0, s->samples[i].base).y});
    double length = hypot(next.x - at.x, next.y - at.y);
    for (double along = 0; !s->area && s->width > 0 && along < length; along += 5) {
      double x = at.x + (next.x - at.x) * along / length, y = at.y + (next.y - at.y) * along / length;
      occupy(o, (Box){x - 2, y - 2, x + 2, y + 2});
    }
  }
}

// The box of a text on a side of a spot, as on a number pad, `distance` away.
static Box box_beside(Spot at, char side, double distance, double width, double height) {
  int dx = (side - '1') % 3 - 1, dy = 1 - (side - '1') / 3;
  double x = at.x + dx * (width / 2 + (dy ? 0 : distance)), y = at.y + dy * (distance + height / 2);
  return (Box){x - width / 2, y - height / 2, x + width / 2, y + height / 2};
}

// A place near a spot for a text: on one of the sides, in their order, `rings` times further and further away.
static bool find_place(const Panel *p, const Occupied *o, Spot at, const char *sides, int rings, Box *place,
                       double *distance) {
  double width = place->right - place->left, height = place->bottom - place->top;
  int count = (int)strlen(sides);
  for (int i = 0; i < rings * count; i++) {
    *distance = 8 * (1 + i / count);
    Box b = box_beside(at, sides[i % count], *distance, width, height);
    if (b.left < p->box.left || b.right > p->box.right + 60 || b.top < p->box.top - 2 ||
        b.bottom > p->box.bottom || !is_free(o, b))
      continue;
    *place = b;
    return true;
  }
  return false;
}

// Writes near a spot: on one of its sides where nothing is, else all around it, else over lines but over no text, else
// not at all. A text that stands away from its spot has a line to it, unless that would cross another.
static void place_label(Canvas *c, const Panel *p, Occupied *all, Occupied *texts, Spot at, bool pointed,
                        TextStyle style, const char *sides, const char *text) {
  Box place = {.right = canvas_text_width(c, style, text), .bottom = style.size};
  double distance;
  if (!find_place(p, all, at, sides, 4, &place, &distance) &&
      !find_place(p, all, at, "98764321", 12, &place, &distance) &&
      !find_place(p, texts, at, sides, 4, &place, &distance) &&
      !find_place(p, texts, at, "98764321", 4, &place, &distance))
    return;
  Spot end = {fmin(fmax(at.x, place.left), place.right), fmin(fmax(at.y, place.top), place.bottom)};
  Box line = {fmin(at.x, end.x), fmin(at.y, end.y), fmax(at.x, end.x) + 0.1, fmax(at.y, end.y) + 0.1};
  if (pointed && distance > 8 && is_free(texts, line))
    canvas_line(c, at, end, (Stroke){.color = style.color, .width = 0.8});
  canvas_box(c, place, WHITE, 0.8); // so that grid lines do not cross the letters
  canvas_text(c, (Spot){place.left, place.bottom - 0.14 * style.size}, style, text);
  occupy(all, place);
  occupy(texts, place);
}

typedef struct {
  double y, height;
  const Series *series;
} EndLabel;

static int by_y(const void *a, const void *b) {
  double x = ((const EndLabel *)a)->y, y = ((const EndLabel *)b)->y;
  return (x > y) - (x < y);
}

// Labels to the right of the panel, pushed apart where they would overlap.
static void draw_end_labels(Canvas *c, const Panel *p, Occupied *o) {
  EndLabel labels[SERIES_MAX] = {{0}};
  int count = 0;
  for (int i = 0; i < p->count; i++) {
    const Series *s = &p->series[i];
    if (!s->end.text[0] || !s->count) continue;
    const Sample *last = &s->samples[s->count - 1];
    Spot top = panel_spot(p, last->x, last->y), bottom = panel_spot(p, last->x, last->base);
    if (s->area && bottom.y - top.y < 9) continue;
    labels[count++] = (EndLabel){s->area ? (top.y + bottom.y) / 2 : top.y, s->below.text[0] ? 34 : 18, s};
  }
  qsort(labels, (size_t)count, sizeof *labels, by_y);
  // From top to bottom, each far enough below the one before; then back up if the last one fell off.
  for (int i = 1; i < count; i++) labels[i].y = fmax(labels[i].y, labels[i - 1].y + labels[i - 1].height);
  double limit = p->box.bottom + 18;
  for (int i = count - 1; i >= 0; i--) limit = labels[i].y = fmin(labels[i].y, limit - labels[i].height);
  for (int i = 0; i < count; i++) {
    const Series *s = labels[i].series;
    TextStyle style = {.size = 12, .bold = true, .color = s->color};
    if (s->area) style = SMALL;
    Spot at = {p->box.right + 12, labels[i].y + 4};
    double width = canvas_text(c, at, style, s->end.text);
    canvas_text(c, (Spot){at.x, at.y + 15}, SMALL, s->below.text);
    occupy(o, (Box){at.x, at.y - 12, at.x + width, at.y - 12 + labels[i].height});
  }
}

// --- the panel ---------------------------------------------------------------------------------------------

static double share_of(const Axis *axis, double value) {
  if (axis->log)
    value = log(fmax(value, 1e-300) / axis->low) / log(axis->high / axis->low);
  else
    value = (value - axis->low) / (axis->high - axis->low);
  return fmin(1, fmax(0, value));
}

Spot panel_spot(const Panel *p, double x, double y) {
  double up = p->y.names ? 1 - share_of(&p->y, y) : share_of(&p->y, y);
  return (Spot){p->box.left + share_of(&p->x, x) * (p->box.right - p->box.left),
                p->box.bottom - up * (p->box.bottom - p->box.top)};
}

// Ticks along an axis with their labels: first those at the ends, then what fits between.
static void draw_ticks(Canvas *c, const Panel *p, bool vertical) {
  const Axis *axis = vertical ? &p->y : &p->x;
  double ticks[TICKS_MAX];
  int count = axis_ticks(axis, ticks);
  Occupied labels = {0};
  TextStyle style = SMALL;
  style.before = vertical ? 1 : 0.5;
  for (int i = 0; i < count; i++) {
    int k = i == 0 ? 0 : i == 1 ? count - 1 : i - 1;
    Label text = tick_label(axis, ticks[k]);
    Spot at = vertical ? panel_spot(p, p->x.low, ticks[k]) : panel_spot(p, ticks[k], p->y.low);
    double half = vertical ? 6 : canvas_text_width(c, SMALL, text.text) / 2 + 3;
    Box box = vertical ? (Box){0, at.y - half, 1, at.y + half} : (Box){at.x - half, 0, at.x + half, 1};
    if (!is_free(&labels, box)) continue;
    occupy(&labels, box);
    if (vertical && !axis->names) canvas_rule(c, at, (Spot){p->box.right, at.y}, GRID);
    if (!vertical) canvas_rule(c, at, (Spot){at.x, at.y + 4}, COLOR_MUTED);
    Spot place = vertical ? (Spot){at.x - 8, at.y + 4} : (Spot){at.x, at.y + 18};
    if (!axis->hidden) canvas_text(c, place, style, text.text);
  }
  free(labels.boxes);
}

static void draw_frame(Canvas *c, const Panel *p) {
  Box b = p->box;
  TextStyle centered = SMALL, bold = {.size = 13, .bold = true, .color = COLOR_INK};
  centered.before = 0.5;
  draw_ticks(c, p, true);
  canvas_text(c, (Spot){b.left, b.top - (p->y.names ? 8 : 28)}, bold, p->title.text);
  if (p->y.names) return; // bars have their values next to them
  draw_ticks(c, p, false);
  canvas_rule(c, (Spot){b.left, b.bottom}, (Spot){b.right, b.bottom}, COLOR_MUTED);
  if (p->y.title.text[0]) canvas_text(c, (Spot){b.left, b.top - 11}, SMALL, axis_title(&p->y).text);
  if (p->x.title.text[0])
    canvas_text(c, (Spot){(b.left + b.right) / 2, b.bottom + 37}, centered, axis_title(&p->x).text);
}

static Stroke stroke_of(const Series *s, bool planned) {
  Stroke stroke = {.color = s->color, .width = s->width, .dash = s->dash, .gap = s->gap};
  if (planned) stroke.dash = 5, stroke.gap = 4;
  return stroke;
}

static double marker_radius(Marker marker) {
  return marker == MARKER_CROSS ? 7 : marker == MARKER_DIAMOND ? 5 : 4.2;
}

static void draw_area(Canvas *c, const Panel *p, const Series *s) {
  double *x = host_alloc(3 * s->count, sizeof *x, "a picture"), *upper = x + s->count,
         *lower = upper + s->count;
  for (int i = 0; i < s->count; i++) {
    Spot top = panel_spot(p, s->samples[i].x, s->samples[i].y);
    x[i] = top.x, upper[i] = top.y, lower[i] = panel_spot(p, 0, s->samples[i].base).y;
  }
  canvas_area(c, x, upper, lower, s->count, s->color, s->opacity > 0 ? s->opacity : 1);
  free(x);
}

static void draw_line(Canvas *c, const Panel *p, const Series *s) {
  for (int i = 0; i + 1 < s->count && s->width > 0; i++) {
    const Sample *a = &s->samples[i], *b = a + 1;
    canvas_line(c, panel_spot(p, a->x, a->y), panel_spot(p, b->x, b->y),
                stroke_of(s, a->planned || b->planned));
  }
  for (int i = 0; i < s->count; i++)
    canvas_marker(c, s->marker, panel_spot(p, s->samples[i].x, s->samples[i].y), marker_radius(s->marker),
                  s->color, !s->samples[i].planned);
}

static void draw_panel(Canvas *c, const Panel *p) {
  Occupied occupied = {0}, texts = {0};
  draw_frame(c, p);
  for (int i = 0; i < p->count; i++) {
    if (p->series[i].area && p->series[i].count) draw_area(c, p, &p->series[i]);
  }
  bool labels = false;
  for (int i = 0; i < p->count; i++) {
    const Series *s = &p->series[i];
    if (!s->area) draw_line(c, p, s);
    for (int n = 0; n < s->count; n++) labels |= s->samples[n].label.text[0] != 0;
  }
  draw_end_labels(c, p, &occupied);
  for (int i = 0; labels && i < p->count; i++) occupy_series(p, &p->series[i], &occupied);
  for (int i = 0; labels && i < p->count; i++)
    for (int n = 0; n < p->series[i].count; n++) {
      const Series *s = &p->series[i];
      const Sample *at = &s->samples[n];
      TextStyle style = {.size = s->bold ? 12 : 11, .bold = s->bold, .color = s->color};
      bool beyond = s->clamped && at->y > p->y.high;
      if (at->label.text[0])
        place_label(c, p, &occupied, &texts, panel_spot(p, at->x, at->y), isfinite(at->x) && isfinite(at->y),
                    style, s->sides ? s->sides : "6482",
                    label(beyond ? "%s, at %.2f" : "%s", at->label.text, at->y).text);
    }
  free(occupied.boxes);
  free(texts.boxes);
}

// --- the picture -------------------------------------------------------------------------------------------

static double legend_entry(Canvas *c, Spot at, const Series *s, bool planned) {
  if (s->area) {
    canvas_box(c, (Box){at.x, at.y - 10, at.x + 12, at.y + 2}, s->color, 1);
  } else {
    if (s->width > 0)
      canvas_line(c, (Spot){at.x, at.y - 4}, (Spot){at.x + 30, at.y - 4}, stroke_of(s, planned));
    canvas_marker(c, s->marker, (Spot){at.x + 15, at.y - 4}, fmin(4.2, marker_radius(s->marker)), s->color,
                  !planned);
  }
  at.x += s->area ? 19 : 37;
  return at.x + canvas_text(c, at, (TextStyle){.size = 12, .color = COLOR_INK}, s->name) + 20;
}

// Every name once; "planned only" where the picture has both kinds.
static void draw_legend(Canvas *c, const Picture *p, Spot at) {
  const char *names[SERIES_MAX];
  int count = 0;
  bool any_planned = false, any_measured = false;
  for (int i = 0; i < p->count; i++)
    for (int k = 0; k < p->panels[i].count; k++) {
      const Series *s = &p->panels[i].series[k];
      if (!s->name || !s->count) continue;
      int planned = 0, same = 0;
      for (int n = 0; n < s->count; n++) planned += s->samples[n].planned;
      any_planned |= planned > 0;
      any_measured |= planned < s->count;
      while (same < count && strcmp(names[same], s->name)) same++;
      if (same < count || count == SERIES_MAX) continue;
      names[count++] = s->name;
      at.x = legend_entry(c, at, s, planned == s->count);
    }
  Series style = {.name = "planned only", .color = COLOR_MUTED, .marker = MARKER_CIRCLE, .width = 1.6};
  if (any_planned && any_measured) legend_entry(c, at, &style, true);
}

void picture_write(Picture *p, double scale, const char *path) {
  Canvas *c = canvas_create(p->width, p->height, scale);
  bool titled = p->title.text[0] != 0;
  canvas_text(c, (Spot){36, 40}, (TextStyle){.size = 17, .bold = true, .color = COLOR_INK}, p->title.text);
  canvas_text(c, (Spot){36, 61}, (TextStyle){.size = 12, .color = COLOR_MUTED}, p->subtitle.text);
  draw_legend(c, p, (Spot){36, titled ? 92 : 34});
  for (int i = 0; i < p->count; i++) {
    fit_axis(p, &p->panels[i], 0);
    fit_axis(p, &p->panels[i], 1);
  }
  for (int i = 0; i < p->count; i++) draw_panel(c, &p->panels[i]);
  canvas_text(c, (Spot){36, p->height - 18}, SMALL, p->note);
  canvas_write_png(c, path);
  canvas_destroy(c);
}
