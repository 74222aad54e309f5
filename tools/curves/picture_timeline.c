// Bytes in use over three steps, stacked by category, both modes on the same scales.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "tools/curves/drawing.h"

// From the bottom up: what stays, then what comes and goes, the last layer on top where its spike stands free.
// Neighbours differ in lightness.
static const MemoryCategory STACK[] = {
    MEMORY_WEIGHTS,     MEMORY_MASTER_WEIGHTS,       MEMORY_GRADIENTS, MEMORY_MOMENTS, MEMORY_TABLES,
    MEMORY_ACTIVATIONS, MEMORY_ACTIVATION_GRADIENTS, MEMORY_WORKSPACE, MEMORY_HEAD};
static const Color STACK_COLOR[MEMORY_CATEGORY_COUNT] = {[MEMORY_WEIGHTS] = {0x33, 0x41, 0x4b},
                                                         [MEMORY_MASTER_WEIGHTS] = {0x55, 0x6b, 0x78},
                                                         [MEMORY_GRADIENTS] = {0x83, 0x97, 0xa3},
                                                         [MEMORY_MOMENTS] = {0xb4, 0xc2, 0xca},
                                                         [MEMORY_TABLES] = {0x6d, 0x6d, 0x6d},
                                                         [MEMORY_ACTIVATIONS] = {0x5b, 0xad, 0x9c},
                                                         [MEMORY_ACTIVATION_GRADIENTS] = {0xc6, 0xe9, 0xdf},
                                                         [MEMORY_WORKSPACE] = {0xe3, 0xb0, 0x3c},
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
    snprintf(text, sizeof text, "%s %s", memory_category_name(STACK[level]),
             axis_value(UNIT_BYTES, own).text);
    canvas_text(p->canvas, (Spot){p->box.right + 10, 0.5 * (low.y + high.y) + 4}, text_small(), text);
  }
}

// The last layer's bytes, over its first tower and the line at the peak, where nothing else is.
static void label_head(const Panel *p, const Timeline *t, double peak_y) {
  int at = 0;
  for (int i = 0; i < t->count; i++)
    if (t->moments[i].step == 1 && t->moments[i].bytes[MEMORY_HEAD] > t->moments[at].bytes[MEMORY_HEAD])
      at = i;
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
               .x_title = i == 0       ? NULL
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
    canvas_text(canvas, (Spot){right.x + 10, right.y + 4},
                (TextStyle){.size = 12, .bold = true, .color = COLOR_INK}, text);
    label_bands(&p, t, from);
    label_head(&p, t, right.y);
  }
  canvas_write_png(canvas, path);
  canvas_destroy(canvas);
}
