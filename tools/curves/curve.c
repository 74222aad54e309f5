#include "tools/curves/curve.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "tools/curves/table.h"

// --- in memory ---------------------------------------------------------------------------------------------

void curve_add(Curve *c, const Reading *reading) {
  c->readings = host_grow(c->readings, c->count, &c->capacity, sizeof *reading, "a curve");
  c->readings[c->count++] = *reading;
}

void curve_free(Curve *c) {
  free(c->readings);
  *c = (Curve){0};
}

static bool same_point(const Point *a, const Point *b) {
  return a->sweep == b->sweep && a->mode == b->mode && a->batch == b->batch && a->seq_len == b->seq_len &&
         a->vocab_size == b->vocab_size && a->hidden_size == b->hidden_size && a->chunk == b->chunk;
}

const Reading *curve_find(const Curve *c, const Point *point) {
  for (int i = 0; i < c->count; i++)
    if (same_point(&c->readings[i].point, point)) return &c->readings[i];
  return NULL;
}

// --- settings ----------------------------------------------------------------------------------------------

void curve_set(Curve *c, const char *name, const char *format, ...) {
  size_t length = strlen(c->settings);
  char value[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(value, sizeof value, format, arguments);
  va_end(arguments);
  // Separators and line ends inside a value would be read as the next setting.
  for (char *at = value; *at; at++)
    if (*at == ';' || *at == '\n') *at = ',';
  int space = (int)(sizeof c->settings - length);
  if (snprintf(c->settings + length, (size_t)space, "%s%s=%s", length ? "; " : "", name, value) >= space)
    fail("the settings of this sweep are too long to write down; give --values as a range");
}

Setting curve_setting(const Curve *c, const char *name) {
  Setting s = {""};
  size_t length = strlen(name);
  for (const char *at = c->settings; at; at = strstr(at, "; ")) {
    if (at[0] == ';') at += 2;
    if (strncmp(at, name, length) || at[length] != '=') continue;
    const char *value = at + length + 1, *end = strstr(value, "; ");
    size_t size = end ? (size_t)(end - value) : strlen(value);
    if (size >= sizeof s.text) size = sizeof s.text - 1;
    memcpy(s.text, value, size);
    s.text[size] = 0;
    return s;
  }
  return s;
}

void curve_require_same(const Curve *on_disk, const Curve *wanted, const char *path) {
  if (strcmp(on_disk->settings, wanted->settings) == 0) return;
  char names[sizeof wanted->settings];
  strcpy(names, wanted->settings);
  for (char *name = names, *next; name; name = next) {
    next = strstr(name, "; ");
    if (next) *next = 0, next += 2;
    *strchr(name, '=') = 0;
    Setting have = curve_setting(on_disk, name), want = curve_setting(wanted, name);
    if (strcmp(have.text, want.text))
      fail("%s holds a sweep with %s %s, and this one has %s; give another --out, or --fresh to start over",
           path, name, have.text[0] ? have.text : "(none)", want.text);
  }
  fail("%s holds a sweep with other settings; give another --out, or --fresh to start over", path);
}

// --- on disk -----------------------------------------------------------------------------------------------

typedef struct {
  Reading reading;
  int64_t tokens; // written for other programs
} Row;

#define AT(field) offsetof(Row, reading.field)
#define NAMES(name, at, names)                                                                               \
  { name, COLUMN_NAME, AT(at), false, names }
#define SIZE(name)                                                                                           \
  { #name, COLUMN_INTEGER, AT(point.name), false, NULL }
#define BYTES(name)                                                                                          \
  { #name, COLUMN_INTEGER, AT(name), true, NULL }
#define NUMBER(name)                                                                                         \
  { #name, COLUMN_NUMBER, AT(name), true, NULL }

static const Column columns[] = {
    NAMES("sweep", point.sweep, SWEEP_NAMES),
    NAMES("mode", point.mode, MODE_NAMES),
    SIZE(batch),
    SIZE(seq_len),
    {"tokens", COLUMN_INTEGER, offsetof(Row, tokens), false, NULL},
    SIZE(vocab_size),
    SIZE(hidden_size),
    SIZE(chunk),
    NAMES("status", status, STATUS_NAMES),
    BYTES(planned_bytes),
    BYTES(planned_layer_bytes),
    BYTES(ledger_bytes),
    BYTES(layer_bytes),
    BYTES(device_bytes),
    BYTES(device_base_bytes),
    BYTES(usable_bytes),
    NUMBER(step_seconds),
    NUMBER(layer_seconds),
    NUMBER(floor_seconds),
    NUMBER(loss_error),
    NUMBER(dx_error),
    NUMBER(dweight_error),
};
static const Table table = {"# lce.c memory curve; ", columns, sizeof columns / sizeof *columns};

static FILE *open_or_fail(const char *path, const char *how) {
  FILE *out = fopen(path, how);
  if (!out) fail("cannot write %s: %s", path, strerror(errno));
  return out;
}

static void write_row(FILE *out, const Reading *r) {
  table_write_row(out, &table, &(Row){*r, point_tokens(&r->point)});
}

static void finish(FILE *out, const char *path) {
  bool bad = ferror(out) || fflush(out) || fsync(fileno(out));
  if (fclose(out) || bad) fail("cannot write %s: %s", path, strerror(errno));
}

void curve_append(const Reading *reading, const char *path) {
  FILE *out = open_or_fail(path, "a");
  write_row(out, reading);
  finish(out, path);
}

void curve_write(const Curve *c, const char *path) {
  char temporary[600];
  snprintf(temporary, sizeof temporary, "%s.new", path);
  FILE *out = open_or_fail(temporary, "w");
  table_write_header(out, &table, c->settings);
  for (int i = 0; i < c->count; i++)
    if (reading_known(&c->readings[i])) write_row(out, &c->readings[i]);
  finish(out, temporary);
  if (rename(temporary, path)) fail("cannot write %s: %s", path, strerror(errno));
}

bool curve_read(Curve *c, const char *path) {
  *c = (Curve){0};
  bool damaged;
  FILE *in = table_open(&table, path, c->settings, sizeof c->settings, &damaged);
  if (damaged)
    fail("%s is no memory curve of this version; move it away, or give --fresh to replace it", path);
  Row row = {0};
  for (int line = 3; in && table_read_row(in, &table, path, line, &row); line++) {
    if (row.tokens != point_tokens(&row.reading.point) || row.tokens <= 0 || !reading_known(&row.reading))
      fail("%s:%d is no row of this table; remove the line, or give --fresh", path, line);
    curve_add(c, &row.reading);
  }
  if (in) fclose(in);
  return in != NULL;
}
