// Time against memory: what a smaller chunk costs, and what it saves.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "tools/curves/drawing.h"

const Size TRADE_SIZE = {1040, 560};

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

bool is_trade(const Curve *c) {
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

// Where a mark with a time stands; one beyond the top stands at it.
static Spot mark_spot(const Panel *p, const Mark *m) {
  return panel_spot(p, m->bytes, m->ratio > p->y.high ? p->y.high : m->ratio);
}

static void take_marks(const Panel *p, const Recipe *recipe, Taken *taken) {
  Marks marks = marks_of(recipe, SWEEP_CHUNK);
  for (int i = 0; i < marks.count; i++) {
    if (!(marks.items[i]->ratio > 0)) continue;
    Spot at = mark_spot(p, marks.items[i]);
    taken_add(taken, (Box){at.x - 7, at.y - 7, at.x + 7, at.y + 7});
  }
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
      Spot at = mark_spot(p, m);
      char text[96];
      snprintf(text, sizeof text, beyond ? "%s, at %.2f" : "%s", m->label, m->ratio);
      canvas_marker(p->canvas, MARKER_DIAMOND, at, 5, COLOR_MUTED, true);
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

void draw_trade(Canvas *canvas, const Curve *c, const Recipe *recipe) {
  Trade fused = trade_of(c, LCE_FUSED), whole = trade_of(c, LCE_MATERIALIZED);
  Marks marks = marks_of(recipe, SWEEP_CHUNK);
  double x[32 + 2 * LINE_MOST];
  int count = 0;
  for (int i = 0; i < fused.line.count; i++) x[count++] = fused.line.x[i];
  for (int i = 0; i < whole.line.count; i++) x[count++] = whole.line.x[i];
  for (int i = 0; i < marks.count; i++) x[count++] = marks.items[i]->bytes;
  heading(canvas,
          recipe && recipe->sweep_count == 1 ? recipe->title
                                             : "The last layer: time against memory, chunk by chunk",
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
  take_marks(&p, recipe, &taken);
  small.color = COLOR_MODE[LCE_FUSED];
  for (int i = 0; i < fused.line.count; i++) {
    Spot at = panel_spot(&p, fused.line.x[i], fused.line.y[i]);
    char text[48];
    snprintf(text, sizeof text, i == 0 ? "chunk %s" : "%s", text_grouped(fused.chunk[i]).text);
    text_beside(canvas, &taken, p.box, at, 8, small, text,
                (const Side[]){SIDE_BELOW, SIDE_LEFT, SIDE_RIGHT, SIDE_ABOVE}, 4);
  }
  TextStyle bold = {.size = 12, .bold = true, .color = COLOR_MODE[LCE_MATERIALIZED]};
  for (int i = 0; i < whole.line.count; i++)
    text_beside(canvas, &taken, p.box, panel_spot(&p, whole.line.x[i], whole.line.y[i]), 9, bold,
                MODE_TEXT[LCE_MATERIALIZED], (const Side[]){SIDE_RIGHT, SIDE_LEFT, SIDE_ABOVE, SIDE_BELOW},
                4);
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
