// Draws the logs of one or more runs as one picture: loss (with validation), learning rate, gradient norm and
// throughput over steps.
//
//   ./train --log run.jsonl ... && tools/plot_run run.jsonl
//   tools/plot_run --out compare.png runs/fused.jsonl runs/materialized.jsonl
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/json.h"
#include "base/option_rows.h"
#include "tools/plot/chart.h"

enum { RUNS_MAX = 8, DRAWN_MAX = 800 }; // 3 series a run and panel at most

// What a log says of each step, a panel each, and of each validation.
enum { LOSS, NORM, RATE, SPEED, VALIDATION, FIGURES };
static const struct {
  const char *event, *field, *title;
  Unit unit;
  bool from_zero;
} figures[FIGURES] = {{"step", "loss", "Loss (circles: validation)", UNIT_PLAIN, false},
                      {"step", "grad_norm", "Gradient norm", UNIT_PLAIN, true},
                      {"step", "learning_rate", "Learning rate", UNIT_PLAIN, true},
                      {"step", "tokens_per_second", "Tokens a second", UNIT_COUNT, true},
                      {"validation", "val_loss", NULL, UNIT_PLAIN, false}};

typedef struct {
  char name[48];
  Series figures[FIGURES]; // x is the step
} Log;

typedef struct {
  const char *out;
  double from;
  Log logs[RUNS_MAX];
  int count;
} Wanted;

static const Color COLORS[RUNS_MAX] = {{0xd9, 0x6a, 0x1c}, {0x2b, 0x6c, 0xb0}, {0x3a, 0x8f, 0x4f},
                                       {0x8e, 0x4b, 0xa8}, {0xb8, 0x32, 0x42}, {0x5f, 0x6b, 0x7a},
                                       {0x1f, 0x93, 0x9a}, {0xa8, 0x87, 0x14}};

// --- reading logs ------------------------------------------------------------------------------------------

// A run that was resumed logs again what comes after its checkpoint: the later line counts.
static void append(Series *s, double x, double y) {
  while (s->count && s->samples[s->count - 1].x >= x) s->count--;
  if (isfinite(y)) series_add(s, (Sample){.x = x, .y = y});
}

static void read_line(Log *log, const cJSON *line, double from) {
  const cJSON *step = json_member(line, "step");
  if (!cJSON_IsNumber(step) || step->valuedouble < from) return;
  for (int f = 0; f < FIGURES; f++) {
    const cJSON *value = json_member(line, figures[f].field);
    if (json_is(line, "event", figures[f].event) && cJSON_IsNumber(value))
      append(&log->figures[f], step->valuedouble, value->valuedouble);
  }
}

static void read_log(Log *log, const char *path, double from) {
  FILE *file = fopen(path, "r");
  if (!file) fail("cannot open the log %s: %s", path, strerror(errno));
  const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
  snprintf(log->name, sizeof log->name, "%.*s", (int)(dot && dot > name ? dot - name : (long)strlen(name)),
           name);
  char *text = NULL;
  size_t capacity = 0;
  ssize_t length;
  for (int64_t number = 1; (length = getline(&text, &capacity, file)) >= 0; number++) {
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

// The trend of a noisy series at sample i: the mean over a 25th of the series, centered, so that it neither lags
// nor leads; towards the ends over fewer samples.
static double trend_at(const Series *s, int i) {
  int half = s->count / 50, end = i < s->count - 1 - i ? i : s->count - 1 - i;
  if (half > end) half = end;
  double sum = 0;
  for (int k = i - half; k <= i + half; k++) sum += s->samples[k].y;
  return sum / (2 * half + 1);
}

// Adds a series, or its trend, as means over so many equal stretches at most that a line is no thicker than its
// noise and markers stand apart.
static void add_line(Panel *p, Series style, const Series *s, bool trend) {
  Series *out = panel_series(p, style);
  int max = style.marker ? 40 : DRAWN_MAX;
  int each = (s->count + max - 1) / max;
  for (int first = 0; first < s->count; first += each) {
    int end = first + each < s->count ? first + each : s->count;
    double sum = 0;
    for (int i = first; i < end; i++) sum += trend ? trend_at(s, i) : s->samples[i].y;
    append(out, s->samples[end - 1].x, sum / (end - first));
  }
}

static Color pale(Color c) {
  return (Color){(unsigned char)(255 - (255 - c.r) / 3), (unsigned char)(255 - (255 - c.g) / 3),
                 (unsigned char)(255 - (255 - c.b) / 3)};
}

static void add_panel(const Wanted *w, Picture *picture, int figure) {
  Box box = picture_cell((Box){72, 96, 1016, 664}, 88, 92, 2, 2, figure / 2, figure % 2);
  Panel *p = picture_panel(picture, box, label("%s", figures[figure].title));
  p->x = (Axis){.shared = 1, .title = label("step")};
  p->y = (Axis){.unit = figures[figure].unit, .from_zero = figures[figure].from_zero};
  bool noisy = figure != RATE;
  for (int k = 0; k < w->count && noisy; k++)
    add_line(p, (Series){.color = pale(COLORS[k]), .width = 1}, &w->logs[k].figures[figure], false);
  for (int k = 0; k < w->count; k++) {
    const Log *log = &w->logs[k];
    add_line(p, (Series){.name = log->name, .color = COLORS[k], .width = 2}, &log->figures[figure], noisy);
    if (figure == LOSS)
      add_line(p, (Series){.color = COLORS[k], .width = 0.8, .marker = MARKER_CIRCLE},
               &log->figures[VALIDATION], false);
  }
}

static void draw(const Wanted *w) {
  Picture *picture = picture_create(1040, 720, (Label){""}, (Label){""});
  for (int figure = LOSS; figure <= SPEED; figure++) add_panel(w, picture, figure);
  picture_write(picture, 2, w->out);
  picture_free(picture);
}

// --- the command line --------------------------------------------------------------------------------------

#define OPTION_VALUES Wanted
static const Option option_rows[] = {
    {TEXT("out", "FILE", out), DEFAULT("run.png"), HELP("The picture")},
    {NUMBER("from", "STEP", from, 0, 1e18), DEFAULT("0"), HELP("Leave out the steps before it")},
    {.type = OPTION_END}};

int main(int argc, char **argv) {
  static const OptionTable table = {
      option_rows,
      "Draws LOG..., logs that ./train --log wrote: loss, learning rate, gradient norm, throughput.", NULL};
  Wanted wanted = {0};
  wanted.count = option_table_take(&table, &wanted, NULL, argc, argv) - 1;
  if (!wanted.count) fail("name one or more logs that ./train --log wrote");
  if (wanted.count > RUNS_MAX) fail("one picture has space for %d runs", RUNS_MAX);
  const char *reason;
  if (!canvas_possible(&reason)) fail("no picture can be drawn: %s", reason);
  for (int k = 0; k < wanted.count; k++) {
    if (argv[k + 1][0] == '-') fail("%s is no option; --help lists them", argv[k + 1]);
    read_log(&wanted.logs[k], argv[k + 1], wanted.from);
  }
  draw(&wanted);
  printf("%s\n", wanted.out);
  for (int k = 0; k < wanted.count; k++)
    for (int f = 0; f < FIGURES; f++) free(wanted.logs[k].figures[f].samples);
  return 0;
}
