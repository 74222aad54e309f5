#include "tools/curves/timeline.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "tools/curves/table.h"
#include "tools/measure.h"
#include "trainer/machine.h"

static const char *const MODES[] = {"fused", "materialized", "fp32 logits", NULL};

static void add_moment(Timeline *t, int mode, double at, int64_t step, const size_t *bytes) {
  Moment m = {.mode = mode, .at = at, .step = step};
  memcpy(m.bytes, bytes, sizeof m.bytes);
  t->moments = host_grow(t->moments, t->count, &t->capacity, sizeof m, "a timeline");
  t->moments[t->count++] = m;
}

static double bytes_in_use(const size_t *bytes) {
  double total = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += (double)bytes[c];
  return total;
}

void timeline_record(Timeline *t, const Experiment *e, const Point *p) {
  Options o = point_options(e, p), machine = o;
  bool planned = t->planned = e->plan_only;
  Backend *backend = planned ? plan_backend_create(e->device, o.dtype) : machine_open(&machine);
  Ledger *ledger = &backend->memory.ledger;
  Steps steps;
  steps_begin(&steps, &o, backend, p->mode);
  if (!planned) {
    steps_run(&steps); // warms up
    ledger->clock = device_seconds;
    ledger->clock_context = backend;
  }
  double started = device_seconds(backend), moved = 0;
  add_moment(t, p->mode, 0, 1, ledger->now);
  ledger->recording = true;
  for (ledger->step = 1; ledger->step <= TIMELINE_STEPS; ledger->step++) steps_run(&steps);
  for (int64_t i = 0; i < ledger->event_count; i++) {
    const LedgerEvent *event = &ledger->events[i];
    moved += fabs(bytes_in_use(event->bytes) - bytes_in_use(t->moments[t->count - 1].bytes));
    add_moment(t, p->mode, planned ? moved : event->seconds - started, event->step, event->bytes);
  }
  add_moment(t, p->mode, planned ? moved : device_seconds(backend) - started, TIMELINE_STEPS, ledger->now);
  t->host_bytes = ledger_host_bytes(ledger);
  steps_end(&steps);
  backend_destroy(backend);
}

void timeline_add_fp32(Timeline *t, size_t logits) {
  int first = 0, count = timeline_of(t, LCE_MATERIALIZED).count;
  while (count && t->moments[first].mode != LCE_MATERIALIZED) first++;
  double moved = 0;
  bool held = false;
  for (int i = first; i < first + count; i++) {
    Moment m = t->moments[i];
    bool holds = m.bytes[MEMORY_HEAD] >= logits;
    if (holds != held && t->planned) moved += (double)logits;
    held = holds;
    if (holds) m.bytes[MEMORY_HEAD] += logits;
    add_moment(t, TIMELINE_FP32, m.at + moved, m.step, m.bytes);
  }
}

void timeline_free(Timeline *t) {
  free(t->moments);
  *t = (Timeline){0};
}

Timeline timeline_of(const Timeline *t, int mode) {
  Timeline part = {.planned = t->planned};
  for (int i = 0; i < t->count; i++)
    if (t->moments[i].mode == mode && !part.count++) part.moments = &t->moments[i];
  return part;
}

size_t timeline_peak(const Timeline *t, int category) {
  double peak = 0;
  for (int i = 0; i < t->count; i++) {
    const size_t *bytes = t->moments[i].bytes;
    peak = fmax(peak, category < MEMORY_CATEGORY_COUNT ? (double)bytes[category] : bytes_in_use(bytes));
  }
  return (size_t)peak;
}

// --- on disk -----------------------------------------------------------------------------------------------

enum { OTHER_COLUMNS = 3, COLUMN_COUNT = OTHER_COLUMNS + MEMORY_CATEGORY_COUNT };

static Table timeline_table(bool planned) {
  static char names[MEMORY_CATEGORY_COUNT][40];
  static Column columns[COLUMN_COUNT] = {{COLUMN(Moment, mode), .values = MODES},
                                         {.offset = offsetof(Moment, at), .number = true},
                                         {COLUMN(Moment, step)}};
  columns[1].name = planned ? "bytes_pushed_and_popped" : "seconds";
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) {
    snprintf(names[c], sizeof names[c], "\"%s\"", memory_category_name((MemoryCategory)c));
    columns[OTHER_COLUMNS + c] =
        (Column){.name = names[c], .offset = offsetof(Moment, bytes) + (size_t)c * sizeof(size_t)};
  }
  return (Table){"timeline", columns, COLUMN_COUNT, sizeof(Moment)};
}

void timeline_write(const Timeline *t, const Curve *settings, const char *path) {
  Table table = timeline_table(t->planned);
  table_write(&table, path, settings->settings, t->moments, t->count);
}

bool timeline_read(Timeline *t, Curve *settings, const char *path) {
  size_t length;
  char *text = file_read(path, &length); // the settings say what the columns are
  *t = (Timeline){.planned = text && strstr(text, "; planned=yes; ")};
  free(text);
  Table table = timeline_table(t->planned);
  t->moments =
      table_read(&table, path, settings->settings, sizeof settings->settings, &t->count, &t->capacity);
  if (t->moments && !(timeline_of(t, LCE_MATERIALIZED).count && timeline_of(t, LCE_FUSED).count))
    fail("%s lacks the timeline of a mode", path);
  return t->moments != NULL;
}
