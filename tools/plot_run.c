// Draws the logs of one or more runs as one picture: loss (with validation), learning rate, gradient norm and
// throughput over steps.
//
//   ./train --log run.jsonl ... && tools/plot_run run.jsonl
//   tools/plot_run --out compare.png runs/fused.jsonl runs/materialized.jsonl
#include <argp.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "tools/plot/chart.h"

enum { RUNS_MOST = 8, DRAWN_MOST = 800, FIGURES = 5 };

// What a log says of each step, and of each validation.
typedef enum { LOSS, VALIDATION, RATE, NORM, SPEED } Figure;
static const char *const FIELDS[FIGURES] = {"loss", "val_loss", "learning_rate", "grad_norm",
                                            "tokens_per_second"};
static const char *const EVENTS[FIGURES] = {"step", "validation", "step", "step", "step"};

typedef struct {
  double *x, *y;
  int64_t count, capacity;
} Series;

typedef struct {
  char name[48];
  Series figures[FIGURES];
} Log;

typedef struct {
  const char *out;
  double from;
  Log logs[RUNS_MOST];
  int count;
} Wanted;

static const Color COLORS[RUNS_MOST] = {{0xd9, 0x6a, 0x1c}, {0x2b, 0x6c, 0xb0}, {0x3a, 0x8f, 0x4f},
                                        {0x8e, 0x4b, 0xa8}, {0xb8, 0x32, 0x42}, {0x5f, 0x6b, 0x7a},
                                        {0x1f, 0x93, 0x9a}, {0xa8, 0x87, 0x14}};

// --- reading logs ------------------------------------------------------------------------------------------

// A run that was resumed says again what comes after its checkpoint: the later word counts.
static void append(Series *s, double x, double y) {
  while (s->count && s->x[s->count - 1] >= x) s->count--;
  if (!isfinite(y)) return;
  if (s->count == s->capacity) {
    s->capacity = s->capacity ? 2 * s->capacity : 256;
    s->x = realloc(s->x, (size_t)s->capacity * sizeof *s->x);
    s->y = realloc(s->y, (size_t)s->capacity * sizeof *s->y);
    if (!s->x || !s->y) fail("out of memory for a log of %lld steps", (long long)s->capacity);
  }
  s->x[s->count] = x;
  s->y[s->count++] = y;
}

static void read_line(Log *log, const cJSON *line, double from) {
  const cJSON *event = cJSON_GetObjectItemCaseSensitive(line, "event");
  const cJSON *step = cJSON_GetObjectItemCaseSensitive(line, "step");
  if (!cJSON_IsString(event) || !cJSON_IsNumber(step) || step->valuedouble < from) return;
  for (int f = 0; f < FIGURES; f++) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(line, FIELDS[f]);
    if (strcmp(event->valuestring, EVENTS[f]) == 0 && cJSON_IsNumber(value))
      append(&log->figures[f], step->valuedouble, value->valuedouble);
  }
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static void read_log(Log *log, const char *path, double from) {
  FILE *file = fopen(path, "r");
  if (!file) fail("cannot open the log %s: %s", path, strerror(errno));
  const char *name = base_name(path), *dot = strrchr(name, '.');
  snprintf(log->name, sizeof log->name, "%.*s", (int)(dot && dot > name ? dot - name : (long)strlen(name)),
           name);
  char *text = NULL;
  size_t room = 0;
  ssize_t length;
  for (int64_t number = 1; (length = getline(&text, &room, file)) >= 0; number++) {
    cJSON *line = cJSON_Parse(text);
    // A run that is being written, or was killed, may leave half a line at the end.
    if (!cJSON_IsObject(line) && text[length - 1] == '\n')
      fail("%s, line %lld: this is no JSON object; name a log that ./train --log wrote", path,
           (long long)number);
    read_line(log, line, from);
    cJSON_Delete(line);
  }
  free(text);
  fclose(file);
  if (!log->figures[LOSS].count && !log->figures[VALIDATION].count) fail("%s has no step to draw", path);
}

// --- drawing -----------------------------------------------------------------------------------------------

// A long series as means over equal stretches, so that a line is no thicker than its noise.
static Series thinned(const Series *s, int64_t most) {
  Series out = {0};
  int64_t each = (s->count + most - 1) / most;
  for (int64_t first = 0; first < s->count; first += each) {
    int64_t end = first + each < s->count ? first + each : s->count;
    double sum = 0;
    for (int64_t i = first; i < end; i++) sum += s->y[i];
    append(&out, s->x[end - 1], sum / (double)(end - first));
  }
  return out;
}

// The trend of a noisy series: an exponential mean over about a fiftieth of it, without the pull of its
// start.
static Series smoothed(const Series *s) {
  Series out = {0};
  double keep = 1 - 1 / fmax(1, (double)s->count / 50), mean = 0, weight = 0;
  for (int64_t i = 0; i < s->count; i++) {
    mean = keep * mean + (1 - keep) * s->y[i];
    weight = keep * weight + (1 - keep);
    append(&out, s->x[i], mean / weight);
  }
  return out;
}

static void free_series(Series *s) {
  free(s->x);
  free(s->y);
}

static Axis axis_of(const Wanted *w, const Figure *figures, int figure_count, bool steps, Unit unit,
                    bool from_zero) {
  Series all = {0};
  int64_t total = 0;
  for (int k = 0; k < w->count; k++)
    for (int f = 0; f < figure_count; f++) {
      const Series *s = &w->logs[k].figures[figures[f]];
      for (int64_t i = 0; i < s->count; i++) append(&all, (double)total++, steps ? s->x[i] : s->y[i]);
    }
  if (!all.count) append(&all, 0, 0);
  Axis axis = axis_around(all.y, (int)all.count, unit, false, from_zero);
  free_series(&all);
  return axis;
}

static Color pale(Color c) {
  return (Color){(unsigned char)(255 - (255 - c.r) / 3), (unsigned char)(255 - (255 - c.g) / 3),
                 (unsigned char)(255 - (255 - c.b) / 3)};
}

static void draw_series(const Panel *panel, const Series *s, Color color, double width, Marker marker) {
  Series drawn = thinned(s, DRAWN_MOST);
  panel_series(panel, (SeriesStyle){.color = color, .marker = marker, .width = width}, drawn.x, drawn.y, NULL,
               (int)drawn.count);
  free_series(&drawn);
}

static void draw_panel(const Wanted *w, Canvas *canvas, Box box, Figure figure, const char *title, Unit unit,
                       bool from_zero) {
  static const Figure steps[] = {LOSS, VALIDATION};
  const Figure figures[] = {figure, VALIDATION};
  Panel panel = {.canvas = canvas,
                 .box = box,
                 .x = axis_of(w, steps, 2, true, UNIT_PLAIN, false),
                 .y = axis_of(w, figures, figure == LOSS ? 2 : 1, false, unit, from_zero),
                 .title = title,
                 .x_title = "step",
                 .y_title = "",
                 .x_ticks = 6,
                 .y_ticks = 6};
  panel_draw(&panel);
  bool noisy = figure != RATE;
  for (int k = 0; k < w->count && noisy; k++)
    draw_series(&panel, &w->logs[k].figures[figure], pale(COLORS[k]), 1, MARKER_NONE);
  for (int k = 0; k < w->count; k++) {
    Series trend =
        noisy ? smoothed(&w->logs[k].figures[figure]) : thinned(&w->logs[k].figures[figure], DRAWN_MOST);
    draw_series(&panel, &trend, COLORS[k], 2, MARKER_NONE);
    free_series(&trend);
    if (figure == LOSS) {
      Series validation = thinned(&w->logs[k].figures[VALIDATION], 40);
      draw_series(&panel, &validation, COLORS[k], 0.8, MARKER_CIRCLE);
      free_series(&validation);
    }
  }
}

static void draw(const Wanted *w) {
  const double width = 1040, height = 720;
  Canvas *canvas = canvas_create(width, height, 2);
  LegendEntry entries[RUNS_MOST];
  for (int k = 0; k < w->count; k++)
    entries[k] = (LegendEntry){.text = w->logs[k].name, .style = {.color = COLORS[k], .width = 2}};
  legend_draw(canvas, (Spot){72, 34}, entries, w->count);
  draw_panel(w, canvas, (Box){72, 96, 500, 360}, LOSS, "Loss (circles: validation)", UNIT_PLAIN, false);
  draw_panel(w, canvas, (Box){588, 96, 1016, 360}, NORM, "Gradient norm", UNIT_PLAIN, true);
  draw_panel(w, canvas, (Box){72, 452, 500, 664}, RATE, "Learning rate", UNIT_PLAIN, true);
  draw_panel(w, canvas, (Box){588, 452, 1016, 664}, SPEED, "Tokens a second", UNIT_COUNT, true);
  canvas_write_png(canvas, w->out);
  canvas_destroy(canvas);
}

// --- the command line --------------------------------------------------------------------------------------

enum { KEY_OUT = 1000, KEY_FROM };
static const struct argp_option table[] = {
    {"out", KEY_OUT, "FILE", 0, "The picture (default run.png)", 0},
    {"from", KEY_FROM, "STEP", 0, "Leave out the steps before it (default 0)", 0},
    {0}};

typedef struct {
  Wanted *wanted;
  const char *paths[RUNS_MOST];
} Parsed;

static error_t parse(int key, char *text, struct argp_state *state) {
  Parsed *p = state->input;
  char *end = NULL;
  switch (key) {
  case KEY_OUT:
    p->wanted->out = text;
    return 0;
  case KEY_FROM:
    p->wanted->from = strtod(text, &end);
    if (end == text || *end || !(p->wanted->from >= 0)) fail("--from %s: give a step from 0", text);
    return 0;
  case ARGP_KEY_ARG:
    if (p->wanted->count == RUNS_MOST) fail("one picture has room for %d runs", RUNS_MOST);
    p->paths[p->wanted->count++] = text;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

int main(int argc, char **argv) {
  static const struct argp argp = {
      .options = table,
      .parser = parse,
      .args_doc = "LOG...",
      .doc = "Draws logs that ./train --log wrote: loss, learning rate, gradient norm, "
             "throughput."};
  Wanted wanted = {.out = "run.png"};
  Parsed parsed = {.wanted = &wanted};
  error_t error = argp_parse(&argp, argc, argv, 0, NULL, &parsed);
  if (error) fail("cannot read the command line: %s", strerror(error));
  if (!wanted.count) fail("name one or more logs that ./train --log wrote");
  const char *reason;
  if (!canvas_possible(&reason)) fail("no picture can be drawn: %s", reason);
  for (int k = 0; k < wanted.count; k++) read_log(&wanted.logs[k], parsed.paths[k], wanted.from);
  draw(&wanted);
  printf("%s\n", wanted.out);
  for (int k = 0; k < wanted.count; k++)
    for (int f = 0; f < FIGURES; f++) free_series(&wanted.logs[k].figures[f]);
  return 0;
}
