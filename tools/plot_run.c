// Draws the logs of one or more runs as one picture: loss (with validation), learning rate, gradient norm and
// throughput over steps. With --groups, runs that differ in their seed are one curve with a band, and a table.
//
//   ./train --log run.jsonl ... && tools/plot_run run.jsonl
//   tools/plot_run --out compare.png runs/fused.jsonl runs/materialized.jsonl
//   tools/plot_run --groups runs/fused-1.jsonl runs/fused-2.jsonl runs/sampled-1.jsonl runs/sampled-2.jsonl
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/json.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "tools/plot/chart.h"

enum { LOGS_MAX = 256, LINES_MAX = 8, DRAWN_MAX = 800 }; // a line has at most 3 series in a panel

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

// What the summary at a log's end says of the whole run.
enum { VAL_LOSS, TOKENS_PER_SECOND, HEAD_BYTES, DROPPED_TILES, DROPPED_MASS, TOTALS };
static const char *const totals[TOTALS] = {"val_loss", "tokens_per_second", "head_peak_bytes",
                                           "dropped_tiles", "dropped_mass"};

typedef struct {
  char name[256];
  Series figures[FIGURES]; // x is the step
  double total_batch;      // tokens of a step
  double totals[TOTALS];   // NAN where the log has none
  int group;
} Log;

typedef struct {
  const char *out;
  double from;
  bool grouped;
  Log logs[LOGS_MAX];
  int count;
  int groups;
  const Log *first[LINES_MAX]; // of each group
} Wanted;

static const Color COLORS[LINES_MAX] = {{0xd9, 0x6a, 0x1c}, {0x2b, 0x6c, 0xb0}, {0x3a, 0x8f, 0x4f},
                                        {0x8e, 0x4b, 0xa8}, {0xb8, 0x32, 0x42}, {0x5f, 0x6b, 0x7a},
                                        {0x1f, 0x93, 0x9a}, {0xa8, 0x87, 0x14}};

// --- reading logs ------------------------------------------------------------------------------------------

// A run that was resumed logs again what comes after its checkpoint: the later line counts.
static void append(Series *s, double x, double y) {
  while (s->count && s->samples[s->count - 1].x >= x) s->count--;
  if (isfinite(y)) series_add(s, (Sample){.x = x, .y = y});
}

static double number_in(const cJSON *line, const char *name) {
  const cJSON *value = json_member(line, name);
  return cJSON_IsNumber(value) ? value->valuedouble : NAN;
}

static void read_line(Log *log, const cJSON *line, double from) {
  if (json_is(line, "event", "start")) log->total_batch = number_in(line, "total_batch");
  for (int t = 0; t < TOTALS && json_is(line, "event", "summary"); t++)
    log->totals[t] = number_in(line, totals[t]);
  const cJSON *step = json_member(line, "step");
  if (!cJSON_IsNumber(step) || step->valuedouble < from) return;
  for (int f = 0; f < FIGURES; f++) {
    const cJSON *value = json_member(line, figures[f].field);
    if (json_is(line, "event", figures[f].event) && cJSON_IsNumber(value))
      append(&log->figures[f], step->valuedouble, value->valuedouble);
  }
}

static void read_log(Log *log, const char *path, double from) {
  size_t size;
  int descriptor = file_open(path, &size);
  FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "r");
  if (!file) fail("cannot open the log %s: %s", path, strerror(errno));
  for (int t = 0; t < TOTALS; t++) log->totals[t] = NAN;
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

static const char *file_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// A log's file name without its suffix; its path where runs of a picture share that.
static void name_logs(Wanted *w, char *const paths[]) {
  for (int k = 0; k < w->count; k++) {
    const char *name = file_name(paths[k]), *dot = strrchr(name, '.');
    int length = (int)(dot && dot > name ? dot - name : (long)strlen(name));
    for (int j = 0; j < w->count && !w->grouped; j++)
      if (j != k && !strcmp(file_name(paths[j]), file_name(paths[k])))
        length += (int)(name - paths[k]), name = paths[k];
    snprintf(w->logs[k].name, sizeof w->logs[k].name, "%.*s", length, name);
  }
}

// NAME-1, NAME-2, ... are runs of the group NAME.
static void find_groups(Wanted *w) {
  for (Log *log = w->logs; log < w->logs + w->count; log++) {
    char *dash = strrchr(log->name, '-');
    if (dash && dash > log->name && dash[1] && !dash[1 + strspn(dash + 1, "0123456789")]) *dash = 0;
    while (log->group < w->groups && strcmp(w->first[log->group]->name, log->name) != 0) log->group++;
    if (log->group == LINES_MAX) fail("one picture has space for %d groups", LINES_MAX);
    if (log->group == w->groups) w->first[w->groups++] = log;
  }
}

// --- statistics of a group ---------------------------------------------------------------------------------

// Of the values that are not NAN.
typedef struct {
  int count;
  double sum, squares, low, high;
} Sums;

static void sums_add(Sums *s, double value) {
  if (isnan(value)) return;
  s->low = s->count ? fmin(s->low, value) : value;
  s->high = s->count ? fmax(s->high, value) : value;
  s->sum += value;
  s->squares += value * value;
  s->count++;
}

static double mean(Sums s) {
  return s.count ? s.sum / s.count : NAN;
}

// The standard error of the mean; NAN for one value.
static double standard_error(Sums s) {
  return s.count > 1 ? sqrt(fmax(0, s.squares / s.count - mean(s) * mean(s)) / (s.count - 1)) : NAN;
}

static Sums total_of(const Wanted *w, int group, int total) {
  Sums sums = {0};
  for (int k = 0; k < w->count; k++)
    if (w->logs[k].group == group) sums_add(&sums, w->logs[k].totals[total]);
  return sums;
}

// The time of the steps up to one, without validation.
static double seconds_until(const Log *log, double step) {
  const Series *s = &log->figures[SPEED];
  double seconds = 0;
  for (int i = 0; i < s->count && s->samples[i].x <= step; i++) seconds += log->total_batch / s->samples[i].y;
  return seconds;
}

// Validation losses after a step and the times that it took.
static void validations_at(const Wanted *w, int group, double step, Sums *losses, Sums *seconds) {
  *losses = *seconds = (Sums){0};
  for (const Log *log = w->logs; log < w->logs + w->count; log++) {
    const Series *s = &log->figures[VALIDATION];
    for (int i = 0; i < s->count && log->group == group; i++) {
      if (s->samples[i].x != step) continue;
      sums_add(losses, s->samples[i].y);
      sums_add(seconds, seconds_until(log, step));
    }
  }
}

static Label total_text(Sums s, int total) {
  double value = mean(s), error = standard_error(s);
  if (!s.count) return label("none");
  if (total == VAL_LOSS) return label(isnan(error) ? "%.4f" : "%.4f ± %.4f", value, error);
  if (total == TOKENS_PER_SECOND) return label("%s", text_count(value).text);
  return total == HEAD_BYTES ? axis_value(UNIT_BYTES, value) : label("%.1f%%", 100 * value);
}

static void print_table(const Wanted *w) {
  printf(
      "| mode | runs | validation loss | tokens/s | LM head + loss, peak | tiles dropped | mass dropped |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  for (int g = 0; g < w->groups; g++) {
    printf("| %s | %d |", w->first[g]->name, total_of(w, g, VAL_LOSS).count);
    for (int t = 0; t < TOTALS; t++) printf(" %s |", total_text(total_of(w, g, t), t).text);
    putchar('\n');
  }
}

// --- drawing -----------------------------------------------------------------------------------------------

// The mean over a 25th of the values around i, centered, so that it neither lags nor leads; towards the ends over fewer.
static double mean_around(const double *values, int count, int i) {
  int half = count / 50, end = i < count - 1 - i ? i : count - 1 - i;
  if (half > end) half = end;
  double sum = 0;
  for (int k = i - half; k <= i + half; k++) sum += values[k];
  return sum / (2 * half + 1);
}

// The trend of a noisy series: its moving mean, and that of what the mean leaves (Tukey's twicing), since the mean of a
// convex curve, such as a loss, lies above it. The caller frees it.
static double *trend_of(const Series *s) {
  double *values = host_alloc(3 * (s->count + 1), sizeof *values, "a trend"), *mean = values + s->count,
         *rest = mean + s->count;
  for (int i = 0; i < s->count; i++) values[i] = s->samples[i].y;
  for (int i = 0; i < s->count; i++) mean[i] = mean_around(values, s->count, i);
  for (int i = 0; i < s->count; i++) rest[i] = values[i] - mean[i];
  for (int i = 0; i < s->count; i++) values[i] = mean[i] + mean_around(rest, s->count, i);
  return values;
}

// Adds a series, or its trend, as means over so many equal stretches at most that a line is no thicker than its
// noise and markers stand apart.
static void add_line(Panel *p, Series style, const Series *s, bool trend) {
  Series *out = panel_series(p, style);
  int max = style.marker ? 40 : DRAWN_MAX;
  int each = (s->count + max - 1) / max;
  double *smooth = trend ? trend_of(s) : NULL;
  for (int first = 0; first < s->count; first += each) {
    int end = first + each < s->count ? first + each : s->count;
    double x = 0, y = 0;
    for (int i = first; i < end; i++) x += s->samples[i].x, y += smooth ? smooth[i] : s->samples[i].y;
    append(out, x / (end - first), y / (end - first));
  }
  free(smooth);
}

static Color pale(Color c) {
  return (Color){(unsigned char)(255 - (255 - c.r) / 3), (unsigned char)(255 - (255 - c.g) / 3),
                 (unsigned char)(255 - (255 - c.b) / 3)};
}

static double last_step(const Wanted *w) {
  double last = w->from + 1;
  for (int k = 0; k < w->count; k++)
    for (int f = 0; f < FIGURES; f++) {
      const Series *s = &w->logs[k].figures[f];
      if (s->count) last = fmax(last, s->samples[s->count - 1].x);
    }
  return last;
}

static void add_panel(const Wanted *w, Picture *picture, int figure) {
  Box box = picture_cell((Box){72, 96, 1016, 664}, 88, 92, 2, 2, figure / 2, figure % 2);
  Panel *p = picture_panel(picture, box, label("%s", figures[figure].title));
  p->x = (Axis){.tight = true, .low = w->from, .high = last_step(w), .title = label("step")};
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

// --- drawing groups ----------------------------------------------------------------------------------------

typedef enum { OVER_STEPS, OVER_TIME, AGAINST_FIRST } View;

// The mean of a group's validation losses, and a band between the lowest and the highest.
static void add_validations(const Wanted *w, Panel *p, int group, View view) {
  const Series *steps = &w->first[group]->figures[VALIDATION];
  Series *band = panel_series(p, (Series){.area = true, .color = COLORS[group], .opacity = 0.15});
  Series *line = panel_series(p, (Series){.color = COLORS[group], .width = 2});
  for (int i = 0; i < steps->count; i++) {
    double step = steps->samples[i].x;
    Sums losses, seconds, first = {0}, ignored;
    if (step < w->from) continue;
    validations_at(w, group, step, &losses, &seconds);
    if (view == AGAINST_FIRST) validations_at(w, 0, step, &first, &ignored);
    double x = view == OVER_TIME ? mean(seconds) : step, base = first.count ? mean(first) : 0;
    series_add(line, (Sample){.x = x, .y = mean(losses) - base});
    series_add(band, (Sample){.x = x, .y = losses.high - base, .base = losses.low - base});
  }
  if (!line->count) return;
  line->end = label("%s", w->first[group]->name);
  line->below = label(view == AGAINST_FIRST ? "%+.4f" : "%.4f", line->samples[line->count - 1].y);
}

static void add_validation_panel(const Wanted *w, Picture *picture, View view, Box box) {
  static const char *const names[] = {"Validation loss: mean and range of the runs",
                                      "Validation loss over the time of the steps",
                                      "Validation loss minus the mean of %s"};
  Panel *p = picture_panel(picture, box, label(names[view], w->first[0]->name));
  p->x = (Axis){.title = label(view == OVER_TIME ? "time" : "step"),
                .unit = view == OVER_TIME ? UNIT_SECONDS : UNIT_PLAIN};
  for (int g = 0; g < w->groups; g++) add_validations(w, p, g, view);
}

static void add_bars(const Wanted *w, Picture *picture, const char *title, int total, Box box) {
  static const char *names[LINES_MAX];
  Panel *p = picture_panel(picture, box, label("%s", title));
  p->x.from_zero = true;
  p->y = (Axis){.names = names, .low = -0.5, .high = w->groups - 0.5};
  for (int g = 0; g < w->groups; g++) {
    Sums s = total_of(w, g, total);
    names[g] = w->first[g]->name;
    if (s.count) panel_bar(p, (Series){.color = COLORS[g]}, mean(s), g - 0.3, g + 0.3, total_text(s, total));
  }
}

static void draw_groups(const Wanted *w) {
  Picture *picture = picture_create(1120, 720, (Label){""}, (Label){""});
  const Box frame = {72, 72, 1000, 664};
  for (int view = OVER_STEPS; view <= AGAINST_FIRST; view++)
    add_validation_panel(w, picture, (View)view, picture_cell(frame, 230, 92, 2, 2, view / 2, view % 2));
  Box cell = picture_cell(frame, 230, 92, 2, 2, 1, 1);
  add_bars(w, picture, "LM head + loss, peak memory", HEAD_BYTES, picture_cell(cell, 0, 44, 2, 1, 0, 0));
  add_bars(w, picture, "Tokens a second", TOKENS_PER_SECOND, picture_cell(cell, 0, 44, 2, 1, 1, 0));
  picture_write(picture, 2, w->out);
  picture_free(picture);
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
    {FLAG("groups", grouped, 1),
     HELP("Logs NAME-1.jsonl, NAME-2.jsonl, ... are runs of one group: draw the mean and the range of their "
          "validation losses over steps and time, memory and speed; print a table in Markdown")},
    {.type = OPTION_END}};

int main(int argc, char **argv) {
  static const OptionTable table = {
      option_rows,
      "Draws LOG..., logs that ./train --log wrote: loss, learning rate, gradient norm, throughput.", NULL};
  Wanted wanted = {0};
  wanted.count = option_table_take(&table, &wanted, argc, argv) - 1;
  if (!wanted.count) fail("name one or more logs that ./train --log wrote");
  int max = wanted.grouped ? LOGS_MAX : LINES_MAX;
  if (wanted.count > max) fail("one picture has space for %d runs", max);
  for (int k = 0; k < wanted.count; k++) {
    if (argv[k + 1][0] == '-') fail("%s is no option; --help lists them", argv[k + 1]);
    read_log(&wanted.logs[k], argv[k + 1], wanted.grouped ? 0 : wanted.from);
  }
  name_logs(&wanted, argv + 1);
  if (wanted.grouped) {
    find_groups(&wanted);
    print_table(&wanted);
    fflush(stdout);
  }
  const char *missing = canvas_missing();
  if (missing) fail("no picture can be drawn: %s", missing);
  (wanted.grouped ? draw_groups : draw)(&wanted);
  printf("%s\n", wanted.out);
  for (int k = 0; k < wanted.count; k++)
    for (int f = 0; f < FIGURES; f++) free(wanted.logs[k].figures[f].samples);
  return 0;
}
