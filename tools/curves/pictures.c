#include "tools/curves/pictures.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"

// Apart in lightness too, so that they differ on grey paper.
const Color COLOR_MODE[2] = {[LCE_FUSED] = {0x14, 0x3d, 0x73}, [LCE_MATERIALIZED] = {0xe8, 0x7d, 0x1e}};
static const Color SAVED = {0xfb, 0xe6, 0xd0};

// --- what a curve holds ------------------------------------------------------------------------------------

typedef enum {
  NO_FIGURE,
  SIZE, // what is swept
  WHOLE_BYTES,
  LAYER_BYTES,
  DEVICE_BYTES,
  DEVICE_LAYER_BYTES,
  STEP_SECONDS,
  OVER_FLOOR,
  TERAFLOPS,
  DX_ERROR,
  DWEIGHT_ERROR,
  FIGURES
} Figure;

// NAN where it is not known.
static double figure_of(const Reading *r, Figure figure) {
  const Point *p = &r->point;
  double flops = 6.0 * (double)point_tokens(p) * (double)p->vocab_size * (double)p->hidden_size;
  double device = reading_device_bytes(r), rest = (double)r->ledger_bytes - (double)r->layer_bytes;
  const double values[FIGURES] = {[SIZE] = point_value(p),
                                  [WHOLE_BYTES] = (double)reading_bytes(r),
                                  [LAYER_BYTES] = (double)reading_layer_bytes(r),
                                  [DEVICE_BYTES] = device,
                                  [DEVICE_LAYER_BYTES] = device > 0 ? device - rest : 0,
                                  [STEP_SECONDS] = r->step_seconds,
                                  [OVER_FLOOR] = r->layer_seconds / r->floor_seconds,
                                  [TERAFLOPS] = 1e-12 * flops / r->layer_seconds,
                                  [DX_ERROR] = r->dx_error,
                                  [DWEIGHT_ERROR] = r->dweight_error};
  return values[figure] > 0 && isfinite(values[figure]) ? values[figure] : NAN;
}

static int count_status(const Curve *c, PointStatus status) {
  int count = 0;
  for (int i = 0; i < c->count; i++) count += c->readings[i].status == status;
  return count;
}

static bool about_layer(const Curve *c) {
  return curve_is(c, "what", "layer");
}

// Whether a figure is known of any point of a sweep (SWEEP_COUNT: of all sweeps).
static bool has(const Curve *c, Sweep sweep, Figure figure) {
  for (int i = 0; i < c->count; i++)
    if ((sweep == SWEEP_COUNT || c->readings[i].point.sweep == sweep) &&
        isfinite(figure_of(&c->readings[i], figure)))
      return true;
  return false;
}

static const char *const SIZE_TITLES[SWEEP_COUNT] = {"tokens", "vocabulary", "hidden size",
                                                     "tokens per chunk"};

static int64_t number(const Curve *c, const char *name) {
  return strtoll(curve_setting(c, name).text, NULL, 10);
}

static void add_part(Label *all, const char *name, const char *part) {
  *all = label("%s%s%s%.100s", all->text, all->text[0] ? ", " : "", name, part);
}

Label curve_caption(const Curve *c) {
  Label all = {""};
  bool layer = about_layer(c);
  if (!layer) add_part(&all, "", curve_setting(c, "model").text);
  // What is swept stands on the axis.
  if (!curve_is(c, "sweep", "tokens"))
    add_part(&all, "N ", text_grouped(number(c, "batch") * number(c, "seq_len")).text);
  if (layer && !curve_is(c, "sweep", "hidden")) add_part(&all, "H ", text_grouped(number(c, "hidden")).text);
  if (!curve_is(c, "sweep", "vocab")) add_part(&all, "V ", text_grouped(number(c, "vocab")).text);
  add_part(&all, "", curve_setting(c, "dtype").text);
  if (!layer && !curve_is(c, "recompute", "none"))
    add_part(&all, "recompute ", curve_setting(c, "recompute").text);
  Label offload = curve_setting(c, "offload");
  if (offload.text[0]) add_part(&all, "offload ", offload.text);
  add_part(&all, curve_is(c, "planned", "yes") ? "planned for " : "on ", curve_setting(c, "device").text);
  return all;
}

// A picture with the title of the curve's recipe, or where there is none, or other pictures bear it, with `title`. What its
// marks are stands at the foot: libraries are in a picture of time against memory (`trade`) alone.
static Picture *create(double width, double height, Label title, const Curve *c, bool trade) {
  const Recipe *recipe = recipe_of(c);
  if (recipe && !(trade && recipe->sweeps[1].values)) title = label("%s", recipe->title);
  Picture *p = picture_create(width, height, title, curve_caption(c));
  bool libraries = false;
  for (const Mark *m = recipe ? recipe->marks : NULL; m && m->label; m++) libraries |= trade && m->ratio > 0;
  const char *source = recipe && recipe->grey ? recipe->grey : "";
  Label grey = label("%s%s%s", source, *source && libraries ? "; " : "",
                     libraries ? "other libraries on one H200, PyTorch 2.11" : "");
  int measured = count_status(c, POINT_MEASURED), too_large = count_status(c, POINT_NO_MEMORY), exact = 0;
  for (int i = 0; i < c->count; i++)
    exact += c->readings[i].status == POINT_MEASURED &&
             c->readings[i].planned_bytes == c->readings[i].ledger_bytes;
  Label first = label("Measured by the ledger; plan and ledger agree to the byte at %d of %d points.", exact,
                      measured),
        fit = label(" %d point%s would not fit.", too_large, too_large == 1 ? "" : "s");
  snprintf(p->note, sizeof p->note, "%s%s%s%s%s",
           measured ? first.text : "Every figure is planned: nothing was allocated.",
           too_large ? fit.text : "", *grey.text ? " Grey: " : "", grey.text, *grey.text ? "." : "");
  return p;
}

// --- lines -------------------------------------------------------------------------------------------------

// At every point: its chunk. At the right ends of lines: their values, or their names too.
typedef enum { NO_LABELS, CHUNKS, VALUES, NAMES } Labels;

// Adds the lines of both modes, materialized first, and returns them: y of each reading over x.
static Series *add_modes(Panel *p, const Curve *c, Sweep sweep, Figure x, Figure y, Labels labels) {
  Series *both = NULL;
  for (int m = LCE_MATERIALIZED; m >= 0; m--) {
    bool fused = m == LCE_FUSED;
    Series *s = panel_series(p, (Series){.name = fused ? "fused, in chunks" : "materialized logits",
                                         .color = COLOR_MODE[m],
                                         .marker = fused ? MARKER_CIRCLE : MARKER_SQUARE,
                                         .width = fused ? 2.6 : 2});
    if (!both) both = s;
    for (int i = 0; i < c->count; i++) {
      const Reading *r = &c->readings[i];
      if (r->point.sweep != sweep || r->point.mode != (LceMode)m || !isfinite(figure_of(r, y))) continue;
      Sample sample = {.x = figure_of(r, x), .y = figure_of(r, y), .planned = r->status != POINT_MEASURED};
      if (labels == CHUNKS && fused)
        sample.label = label(s->count ? "%s" : "chunk %s", text_grouped(r->point.chunk).text);
      else if (labels == CHUNKS)
        sample.label = label("%s", lce_mode_name(r->point.mode));
      if (sweep == SWEEP_CHUNK && !fused && x == SIZE) { // no chunks: the same at all of their sizes
        sample.x = -INFINITY;
        series_add(s, sample);
        sample.x = INFINITY;
      }
      series_add(s, sample);
    }
    if (!s->count || labels < VALUES) continue;
    const Sample *last = &s->samples[s->count - 1];
    Label value = axis_value(p->y.unit, last->y);
    s->end = labels == VALUES ? value : label("%s", lce_mode_name((LceMode)m));
    if (labels == NAMES) s->below = label("%s%s", value.text, last->planned ? ", planned" : "");
  }
  return both;
}

// Whether sizes double from point to point, over at least this range.
static bool doubling(const Series *s, double range) {
  const Sample *a = s->samples;
  int n = s->count;
  return n > 2 && a[n - 1].x / a[n - 2].x > 1.6 && a[1].x / a[0].x > 1.6 && a[n - 1].x / a[0].x >= range;
}

// Sizes that double over a wide range stand on a log axis, and then so does what grows with them: a line stays a
// line. All else is linear, where a difference is seen as what it is.
static void choose_scale(Panel *p, const Series *modes) {
  Range y = panel_range(p, true, true);
  p->x.log = p->y.log =
      doubling(modes[0].count > modes[1].count ? &modes[0] : &modes[1], 32) && y.high >= 8 * y.low;
}

// Shades what the fused mode saves.
static void shade_saving(Panel *p, const Series *modes) {
  const Series *high = &modes[0], *low = &modes[1];
  if (low->count != high->count || low->count < 2) return;
  for (int i = 0; i < low->count; i++)
    if (low->samples[i].x != high->samples[i].x) return;
  Series *s = panel_series(p, (Series){.area = true, .color = SAVED, .opacity = 0.75});
  for (int i = 0; i < low->count; i++)
    series_add(s, (Sample){.x = low->samples[i].x, .y = high->samples[i].y, .base = low->samples[i].y});
}

static void add_rule(Panel *p, bool vertical, double at, Color color, double dash, const char *text) {
  Series *s = panel_series(
      p, (Series){.color = color, .width = 1.2, .dash = dash, .gap = 4, .sides = vertical ? "64" : "93"});
  for (int end = 0; end < 2; end++) {
    double far = end ? INFINITY : -INFINITY;
    Sample sample = vertical ? (Sample){.x = at, .y = -far} : (Sample){.x = far, .y = at};
    if (!end) sample.label = label("%s", text);
    series_add(s, sample);
  }
}

// The source's figures, in grey: marks of the same name are a line; one without a size is a rule, or, in a
// picture of time against memory, a point where the source has a time.
static void add_marks(Panel *p, const Curve *c, Sweep sweep, bool trade) {
  const Recipe *recipe = recipe_of(c);
  if (!recipe || recipe->sweeps[0].sweep != sweep) return;
  for (const Mark *m = recipe->marks; m->label; m++) {
    if (!m->value && !m->ratio) add_rule(p, trade, m->bytes, COLOR_MUTED, 2, m->label);
    if (!m->value && (!m->ratio || !trade)) continue;
    bool goes_on = m > recipe->marks && strcmp(m->label, m[-1].label) == 0;
    Series *s = goes_on ? &p->series[p->count - 1]
                        : panel_series(p, (Series){.color = COLOR_MUTED,
                                                   .marker = MARKER_DIAMOND,
                                                   .width = 1.2,
                                                   .dash = 2,
                                                   .gap = 4,
                                                   .clamped = trade,
                                                   .sides = trade ? "6482" : "7842"});
    series_add(s, trade ? (Sample){.x = m->bytes, .y = m->ratio} : (Sample){.x = m->value, .y = m->bytes});
    if (goes_on) {
      s->samples[0].label = (Label){""}; // named at its end
      s->end = label("%s", m->label);
      s->below = axis_value(p->y.unit, m->bytes);
    } else {
      s->samples[0].label = label("%s", m->label);
    }
  }
}

// --- memory over a size ------------------------------------------------------------------------------------

// What the device has to give, where a curve reaches for it.
static void add_capacity(Panel *p, const Curve *c) {
  double usable = 0, highest = 0;
  for (int i = 0; i < c->count; i++) {
    usable = fmax(usable, (double)c->readings[i].usable_bytes);
    highest = fmax(highest, (double)reading_bytes(&c->readings[i]));
  }
  if (usable > 0 && highest > 0.6 * usable)
    add_rule(p, false, usable, COLOR_INK, 7,
             label("the device has %s", axis_value(UNIT_BYTES, usable).text).text);
}

static void add_device(Panel *p, const Curve *c, Figure bytes) {
  Series *s =
      panel_series(p, (Series){.name = "counted by the device", .color = COLOR_INK, .marker = MARKER_CROSS});
  for (int i = 0; i < c->count; i++) {
    const Reading *r = &c->readings[i];
    if (isfinite(figure_of(r, bytes)))
      series_add(s, (Sample){.x = figure_of(r, SIZE), .y = figure_of(r, bytes)});
  }
}

static Panel *size_panel(Picture *picture, Box box, const char *title, Sweep sweep, Unit unit,
                         const char *y_title) {
  Panel *p = picture_panel(picture, box, label("%s", title));
  p->x = (Axis){.unit = UNIT_COUNT, .from_zero = true, .title = label("%s", SIZE_TITLES[sweep])};
  p->y = (Axis){.unit = unit, .from_zero = true, .title = label("%s", y_title)};
  return p;
}

static Picture *memory_picture(const Curve *c) {
  static const Box MAIN = {92, 150, 520, 486}, SIDE = {716, 150, 936, 486};
  static const struct {
    const char *title, *y_title;
    Figure figure;
    Unit unit;
  } PANELS[2][3] = {
      {{"Peak memory of a training step", "in total", WHOLE_BYTES, UNIT_BYTES},
       {"LM head + loss alone", "beyond its inputs and gradients", LAYER_BYTES, UNIT_BYTES},
       {"Time of a step", "forward, backward, AdamW", STEP_SECONDS, UNIT_SECONDS}},
      {{"Memory of the LM head + loss", "beyond its inputs and gradients", LAYER_BYTES, UNIT_BYTES},
       {"With its inputs and gradients", "in total", WHOLE_BYTES, UNIT_BYTES},
       {"Time of the LM head + loss", "over that of its three GEMMs", OVER_FLOOR, UNIT_PLAIN}}};
  bool layer = about_layer(c), measured = count_status(c, POINT_MEASURED) > 0;
  Sweep sweep = c->readings[0].point.sweep;
  const char *size = sweep == SWEEP_TOKENS ? "tokens of a step" : SIZE_TITLES[sweep];
  Picture *picture =
      create(1040, 560,
             label(layer ? "Memory of the LM head + loss over the %s" : "Training memory over the %s", size),
             c, false);
  for (int i = 0; i < 2 + measured; i++) {
    Figure figure = PANELS[layer][i].figure;
    Panel *p = size_panel(picture, i ? picture_cell(SIDE, 84, 84, 1 + measured, 1, i - 1, 0) : MAIN,
                          PANELS[layer][i].title, sweep, PANELS[layer][i].unit, PANELS[layer][i].y_title);
    Series *modes = add_modes(p, c, sweep, SIZE, figure, i ? VALUES : NAMES);
    if (i == 0) {
      shade_saving(p, modes);
      add_device(p, c, layer ? DEVICE_LAYER_BYTES : DEVICE_BYTES);
    }
    if (i == 0 && !layer) add_capacity(p, c);
    if (figure == LAYER_BYTES) add_marks(p, c, sweep, false);
    if (figure == OVER_FLOOR) add_rule(p, false, 1, COLOR_INK, 2, "");
    choose_scale(p, modes);
    if (i) p->x.ticks = 4;
    if (i && measured) p->y.ticks = 5;
    if (i == 1 && measured) p->x.title = (Label){""};
  }
  return picture;
}

// --- time against memory -----------------------------------------------------------------------------------

bool picture_has_trade(const Curve *c) {
  int count = 0;
  for (int i = 0; i < c->count; i++)
    count += c->readings[i].point.sweep == SWEEP_CHUNK && c->readings[i].point.mode == LCE_FUSED &&
             isfinite(figure_of(&c->readings[i], OVER_FLOOR));
  return count > 1;
}

Picture *picture_trade(const Curve *c) {
  Picture *picture = create(1040, 560, label("LM head + loss: time against memory, chunk by chunk"), c, true);
  Panel *p =
      picture_panel(picture, (Box){92, 150, 960, 486}, label("Forward and backward of the LM head + loss"));
  p->x = (Axis){
      .unit = UNIT_BYTES, .log = true, .title = label("memory beyond inputs and gradients"), .ticks = 10};
  p->y = (Axis){.title = label("time over that of the three GEMMs"), .ticks = 7};
  Series *modes = add_modes(p, c, SWEEP_CHUNK, LAYER_BYTES, OVER_FLOOR, CHUNKS);
  modes[0].bold = true;
  modes[1].sides = "2468";
  add_rule(p, false, 1, COLOR_INK, 2, "the three GEMMs alone");
  // The y axis is fitted to our figures, and to 0.9 and 1.5; what the source measured beyond it stands at its top.
  Series *range = panel_series(p, (Series){.color = COLOR_INK});
  series_add(range, (Sample){.x = INFINITY, .y = 0.9});
  series_add(range, (Sample){.x = INFINITY, .y = 1.5});
  add_marks(p, c, SWEEP_CHUNK, true);
  return picture;
}

// --- every size in a column --------------------------------------------------------------------------------

static Picture *grid_picture(const Curve *c) {
  static const struct {
    const char *title;
    Figure figure, second; // the second line of a mode, dashed
    Unit unit;
  } ROWS[] = {{"memory held", LAYER_BYTES, NO_FIGURE, UNIT_BYTES},
              {"TFLOP/s", TERAFLOPS, NO_FIGURE, UNIT_PLAIN},
              {"relative error of dX (whole), dW (dashed)", DX_ERROR, DWEIGHT_ERROR, UNIT_PLAIN}};
  int rows = 0, column = 0;
  for (int r = 0; r < 3; r++) rows += has(c, SWEEP_COUNT, ROWS[r].figure);
  Picture *picture = create(1180, 180 + 190 * rows, label("LM head + loss over every size"), c, false);
  Box frame = {96, 160, 96 + 4 * 268 - 56, 160 + 190 * rows - 60};
  for (int s = 0; s < SWEEP_COUNT; s++) {
    Sweep sweep = (Sweep)((s + SWEEP_CHUNK) % SWEEP_COUNT); // chunk first: it is what a user chooses
    if (!has(c, sweep, LAYER_BYTES)) continue;
    const Series *sizes = NULL; // the fused line of the first row
    for (int r = 0, row = 0; r < 3; r++) {
      if (!has(c, SWEEP_COUNT, ROWS[r].figure)) continue;
      Panel *p = size_panel(picture, picture_cell(frame, 56, 60, rows, 4, row, column),
                            row == 0 ? SIZE_TITLES[sweep] : "", sweep, ROWS[r].unit,
                            column == 0 ? ROWS[r].title : "");
      Series *modes = add_modes(p, c, sweep, SIZE, ROWS[r].figure, NO_LABELS);
      if (row++ == 0) sizes = &modes[1];
      p->x = (Axis){
          .unit = UNIT_COUNT, .from_zero = true, .log = doubling(sizes, 7), .shared = 1 + s, .ticks = 5};
      p->y.log = ROWS[r].unit == UNIT_BYTES || ROWS[r].second;
      p->y.shared = 1 + r, p->y.ticks = 5;
      p->y.hidden = column > 0;
      Series *second = ROWS[r].second ? add_modes(p, c, sweep, SIZE, ROWS[r].second, NO_LABELS) : NULL;
      for (int m = 0; second && m < 2; m++)
        second[m].marker = MARKER_NONE, second[m].width = 1.6, second[m].dash = 4, second[m].gap = 3;
    }
    column++;
  }
  return picture;
}

Picture *picture_curve(const Curve *c) {
  if (!c->count) fail("there is no point to draw");
  if (c->readings[c->count - 1].point.sweep != c->readings[0].point.sweep) return grid_picture(c);
  return picture_has_trade(c) ? picture_trade(c) : memory_picture(c);
}

// --- timelines ---------------------------------------------------------------------------------------------

// From the bottom up: what stays, then what comes and goes, the LM head on top where its spike stands free.
// Neighbours differ in lightness.
enum { STAYING = 5, LEVELS = MEMORY_CATEGORY_COUNT };
static const struct {
  MemoryCategory category;
  Color color;
} STACK[LEVELS] = {{MEMORY_WEIGHTS, {0x33, 0x41, 0x4b}},
                   {MEMORY_MASTER_WEIGHTS, {0x55, 0x6b, 0x78}},
                   {MEMORY_GRADIENTS, {0x83, 0x97, 0xa3}},
                   {MEMORY_MOMENTS, {0xb4, 0xc2, 0xca}},
                   {MEMORY_TABLES, {0x6d, 0x6d, 0x6d}},
                   {MEMORY_ACTIVATIONS, {0x5b, 0xad, 0x9c}},
                   {MEMORY_ACTIVATION_GRADIENTS, {0xc6, 0xe9, 0xdf}},
                   {MEMORY_WORKSPACE, {0xe3, 0xb0, 0x3c}},
                   {MEMORY_HEAD, {0xa8, 0x1c, 0x33}}};

// Bytes of the levels from `first` up to `end` at a moment.
static double bytes_between(const Moment *m, int first, int end) {
  double bytes = 0;
  for (int level = first; level < end; level++) bytes += (double)m->bytes[STACK[level].category];
  return bytes;
}

// One category's area on what lies below it, its size near the top of its first tower if it is the LM head's.
static void add_level(Panel *p, const Timeline *t, int from, int level) {
  Series *s = panel_series(p, (Series){.area = true,
                                       .name = memory_category_name(STACK[level].category),
                                       .color = STACK[level].color,
                                       .bold = true,
                                       .sides = "96874"});
  double most = (double)timeline_peak(t, STACK[level].category);
  bool named = STACK[level].category != MEMORY_HEAD || most == 0;
  for (int i = 0; i + 1 < t->count; i++) {
    const Moment *m = &t->moments[i];
    double base = bytes_between(m, from, level), bytes = bytes_between(m, level, level + 1);
    Sample sample = {.x = m->at, .y = base + bytes, .base = base};
    if (!named && bytes == most) sample.label = label("LM head + loss %s", axis_value(UNIT_BYTES, most).text);
    named |= bytes == most;
    series_add(s, sample);
    series_add(s, (Sample){.x = m[1].at, .y = sample.y, .base = base});
  }
  const Sample *last = &s->samples[s->count - 1];
  if (last->y > last->base)
    s->end = label("%s %s", s->name, axis_value(UNIT_BYTES, last->y - last->base).text);
}

Picture *picture_timeline(const Timeline *all, const Curve *settings) {
  // From the top down.
  static const struct {
    int mode;
    const char *title;
  } PANELS[TIMELINE_MODES] = {{TIMELINE_FP32, "logits in fp32: a baseline, planned"},
                              {LCE_MATERIALIZED, "materialized logits"},
                              {LCE_FUSED, "fused, in chunks"}};
  const Recipe *recipe = recipe_of(settings);
  Timeline logits = timeline_of(all, LCE_MATERIALIZED);
  int rows = timeline_of(all, TIMELINE_FP32).count ? 3 : 2;
  double more = rows > 2 ? 280 : 0; // points of height
  Picture *picture = picture_create(1080, 710 + more,
                                    label("%s", recipe ? recipe->title : "Memory over three training steps"),
                                    curve_caption(settings));
  double peak = (double)timeline_peak(all, MEMORY_CATEGORY_COUNT), end = 0;
  for (int i = 0; i < all->count; i++) end = fmax(end, all->moments[i].at);
  // Where most memory stays from step to step, a label names it and the picture leaves it out: the shape of a
  // step is what comes and goes.
  double stays = bytes_between(&logits.moments[logits.count - 1], 0, STAYING);
  int from = stays > 0.55 * peak ? STAYING : 0;
  for (int i = 0; i < rows; i++) {
    int panel = i + TIMELINE_MODES - rows;
    Timeline t = timeline_of(all, PANELS[panel].mode);
    Panel *p = picture_panel(picture, picture_cell((Box){92, 152, 880, 642 + more}, 0, 70, rows, 1, i, 0),
                             label("%s", PANELS[panel].title));
    p->x = (Axis){.unit = t.planned ? UNIT_BYTES : UNIT_SECONDS, .ticks = 8, .high = end};
    p->y = (Axis){
        .unit = UNIT_BYTES, .from_zero = true, .ticks = 5, .shared = 1, .title = label("bytes in use")};
    if (i == rows - 1)
      p->x.title =
          label(t.planned ? "bytes pushed and popped so far, over three steps" : "time of three steps");
    if (from)
      p->y.title = label("bytes in use beyond the %s of weights, gradients and optimizer state",
                         axis_value(UNIT_BYTES, stays).text);
    for (int level = LEVELS - 1; level >= from; level--)
      if ((double)timeline_peak(all, STACK[level].category) > 0.004 * peak) add_level(p, &t, from, level);
    double most = (double)timeline_peak(&t, MEMORY_CATEGORY_COUNT);
    add_rule(p, false, most - (from ? stays : 0), COLOR_INK, 5, "");
    p->series[p->count - 1].end =
        label("peak %s%s", axis_value(UNIT_BYTES, most).text, from ? " in all" : "");
  }
  return picture;
}

// --- the longest sequences ---------------------------------------------------------------------------------

Picture *picture_longest(const Longest *all, int count, const Curve *settings) {
  static Label rows[LONGEST_MAX];
  static const char *names[LONGEST_MAX];
  int pairs = count / 2;
  Picture *picture = picture_create(1040, 180 + 62 * pairs, label("%s", recipe_of(settings)->title),
                                    curve_caption(settings));
  snprintf(picture->note, sizeof picture->note, "Every figure is planned: nothing was allocated.");
  Panel *p =
      picture_panel(picture, (Box){190, 128, 900, 102 + 62 * pairs},
                    label("tokens of the longest sequence, batch %s", curve_setting(settings, "batch").text));
  p->x = (Axis){.unit = UNIT_COUNT, .from_zero = true};
  p->y = (Axis){.names = names, .low = -0.5, .high = pairs - 0.5};
  for (int i = 0; i < count; i++) {
    const Longest *l = &all[i];
    bool fused = l->mode == LCE_FUSED;
    int row = i / 2;
    rows[row] = label("%g GiB%s", l->memory_gib, l->offload ? ", all offloaded" : "");
    names[row] = rows[row].text;
    double top = row + (fused ? 0 : -0.38), length = (double)l->seq_len;
    Series style = {.name = fused ? "fused, in chunks" : "materialized logits", .color = COLOR_MODE[l->mode]};
    panel_bar(p, style, length, top, top + 0.36, l->seq_len ? axis_value(UNIT_COUNT, length) : label("none"));
  }
  return picture;
}
