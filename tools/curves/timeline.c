#include "tools/curves/timeline.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "tools/curves/table.h"
#include "trainer/machine.h"
#include "trainer/speed.h"
#include "trainer/trainer.h"

static void add_moment(Timeline *t, double at, int step, const size_t *bytes) {
  Moment m = {.mode = t->mode, .at = at, .step = step};
  memcpy(m.bytes, bytes, sizeof m.bytes);
  t->moments = host_grow(t->moments, t->count, &t->capacity, sizeof m, "a timeline");
  t->moments[t->count++] = m;
}

static double bytes_in_use(const size_t *bytes) {
  double total = 0;
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) total += (double)bytes[c];
  return total;
}

// The ledger's clock: seconds, once the device has done what it was given.
static double device_seconds(void *backend) {
  backend_synchronize(backend);
  return now_seconds();
}

Timeline timeline_record(const Experiment *e, const Point *p) {
  Options o = point_options(e, p), machine = o;
  bool planned = e->plan_only;
  Backend *backend = planned ? plan_backend_create(e->device, o.dtype) : machine_open(&machine);
  Source *source = NULL;
  Loader loader = {0};
  if (!planned) loader = point_loader(&o, &source);
  Trainer trainer;
  trainer_create(&trainer, &o, backend);
  trainer_set_mode(&trainer, p->mode);
  StepResult results[TRAINER_PENDING];
  Ledger *ledger = &backend->memory.ledger;
  Timeline t = {.mode = p->mode, .planned = planned};
  double started = 0;
  for (int step = planned; step <= TIMELINE_STEPS; step++) {
    if (step == 1) { // step 0 warms up
      if (!planned) ledger->clock = device_seconds, ledger->clock_context = backend;
      started = planned ? 0 : device_seconds(backend);
      add_moment(&t, 0, 1, ledger->now);
      ledger_record(ledger, true);
    }
    ledger_step(ledger, step);
    trainer_step(&trainer, planned ? NULL : &loader, step);
    if (!planned) trainer_collect(&trainer, results);
  }
  double moved = 0;
  for (int64_t i = 0; i < ledger->event_count; i++) {
    const LedgerEvent *event = &ledger->events[i];
    moved += fabs(bytes_in_use(event->bytes) - bytes_in_use(t.moments[t.count - 1].bytes));
    add_moment(&t, planned ? moved : event->seconds - started, event->step, event->bytes);
  }
  t.duration = planned ? moved : device_seconds(backend) - started;
  trainer_destroy(&trainer);
  source_close(source);
  backend_destroy(backend);
  return t;
}

void timeline_free(Timeline *t) {
  free(t->moments);
  *t = (Timeline){0};
}

// --- on disk -----------------------------------------------------------------------------------------------

enum { OTHER_COLUMNS = 3, COLUMN_COUNT = OTHER_COLUMNS + MEMORY_CATEGORY_COUNT };

static Table timeline_table(bool planned, Column columns[COLUMN_COUNT],
                            char names[MEMORY_CATEGORY_COUNT][40]) {
  columns[0] = (Column){"mode", COLUMN_NAME, offsetof(Moment, mode), false, MODE_NAMES};
  columns[1] = (Column){planned ? "bytes_pushed_and_popped" : "seconds", COLUMN_NUMBER, offsetof(Moment, at),
                        false, NULL};
  columns[2] = (Column){"step", COLUMN_INTEGER, offsetof(Moment, step), false, NULL};
  for (int c = 0; c < MEMORY_CATEGORY_COUNT; c++) {
    snprintf(names[c], sizeof names[c], "\"%s\"", memory_category_name((MemoryCategory)c));
    columns[OTHER_COLUMNS + c] =
        (Column){names[c], COLUMN_INTEGER, offsetof(Moment, bytes) + (size_t)c * sizeof(size_t), false, NULL};
  }
  return (Table){"# lce.c timeline; ", columns, COLUMN_COUNT};
}

void timeline_write(const Timeline timelines[2], const Curve *settings, const char *path) {
  Column columns[COLUMN_COUNT];
  char names[MEMORY_CATEGORY_COUNT][40];
  Table table = timeline_table(timelines[0].planned, columns, names);
  FILE *out = fopen(path, "w");
  if (!out) fail("cannot write %s: %s", path, strerror(errno));
  table_write_header(out, &table, settings->settings);
  for (int i = 0; i < 2; i++) {
    const Timeline *t = &timelines[i];
    for (int k = 0; k < t->count; k++) table_write_row(out, &table, &t->moments[k]);
    Moment end = t->moments[t->count - 1]; // once more, at the end
    end.at = t->duration;
    table_write_row(out, &table, &end);
  }
  if (fclose(out)) fail("cannot write %s: %s", path, strerror(errno));
}

bool timeline_read(Timeline timelines[2], Curve *settings, const char *path) {
  Column columns[COLUMN_COUNT];
  char names[MEMORY_CATEGORY_COUNT][40];
  bool damaged = false, planned = false;
  FILE *in = NULL;
  for (int i = 0; i < 2 && !in; i++) {
    Table table = timeline_table(planned = i, columns, names);
    in = table_open(&table, path, settings->settings, sizeof settings->settings, &damaged);
  }
  // Earlier versions wrote guessed seconds for a plan.
  bool guessed = in && !planned && strcmp(curve_setting(settings, "planned").text, "yes") == 0;
  if (guessed || (damaged && !in)) fail("%s is no timeline of this version; record it again", path);
  if (!in) return false;
  Table table = timeline_table(planned, columns, names);
  timelines[0] = (Timeline){.mode = LCE_MATERIALIZED, .planned = planned};
  timelines[1] = (Timeline){.mode = LCE_FUSED, .planned = planned};
  Moment m;
  for (int line = 3; table_read_row(in, &table, path, line, &m); line++) {
    Timeline *t = &timelines[m.mode == LCE_FUSED];
    add_moment(t, m.at, (int)m.step, m.bytes);
    t->duration = m.at;
  }
  fclose(in);
  if (!timelines[0].count || !timelines[1].count) fail("%s lacks the timeline of a mode", path);
  return true;
}
