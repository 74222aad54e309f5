#include "tools/curves/curve.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fail.h"

static const char MARK[] = "# lce.c memory curve; ";
static const char COLUMNS[] =
    "sweep,mode,batch,seq_len,tokens,vocab_size,hidden_size,chunk,status,planned_bytes,planned_layer_bytes,"
    "ledger_bytes,layer_bytes,device_bytes,device_base_bytes,usable_bytes,step_seconds,layer_seconds,"
    "floor_seconds,loss_error,dx_error,dweight_error";
enum { COLUMN_COUNT = 22 };

// --- in memory ---------------------------------------------------------------------------------------------

void curve_add(Curve *c, const Reading *reading) {
  if (c->count == c->capacity) {
    c->capacity = c->capacity ? 2 * c->capacity : 32;
    c->readings = realloc(c->readings, (size_t)c->capacity * sizeof *c->readings);
    if (!c->readings) fail("out of host memory for a curve");
  }
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
  int room = (int)(sizeof c->settings - length);
  if (snprintf(c->settings + length, (size_t)room, "%s%s=%s", length ? "; " : "", name, value) >= room)
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

static void put_bytes(FILE *out, size_t bytes) {
  if (bytes)
    fprintf(out, ",%zu", bytes);
  else
    fputc(',', out);
}

static void put_number(FILE *out, double value) {
  if (isfinite(value) && value > 0)
    fprintf(out, ",%.6g", value);
  else
    fputc(',', out);
}

static void put_row(FILE *out, const Reading *r) {
  const Point *p = &r->point;
  fprintf(out, "%s,%s,%lld,%lld,%lld,%lld,%lld,%lld,%s", sweep_name(p->sweep), lce_mode_name(p->mode),
          (long long)p->batch, (long long)p->seq_len, (long long)point_tokens(p), (long long)p->vocab_size,
          (long long)p->hidden_size, (long long)p->chunk, point_status_name(r->status));
  const size_t bytes[] = {r->planned_bytes, r->planned_layer_bytes, r->ledger_bytes, r->layer_bytes,
                          r->device_bytes,  r->device_base_bytes,   r->usable_bytes};
  const double numbers[] = {r->step_seconds, r->layer_seconds, r->floor_seconds,
                            r->loss_error,   r->dx_error,      r->dweight_error};
  for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) put_bytes(out, bytes[i]);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) put_number(out, numbers[i]);
  fputc('\n', out);
}

static void finish(FILE *out, const char *path) {
  bool bad = ferror(out) || fflush(out) || fsync(fileno(out));
  if (fclose(out) || bad) fail("cannot write %s: %s", path, strerror(errno));
}

void curve_append(const Reading *reading, const char *path) {
  FILE *out = fopen(path, "a");
  if (!out) fail("cannot write %s: %s", path, strerror(errno));
  put_row(out, reading);
  finish(out, path);
}

void curve_write(const Curve *c, const char *path) {
  char temporary[600];
  snprintf(temporary, sizeof temporary, "%s.new", path);
  FILE *out = fopen(temporary, "w");
  if (!out) fail("cannot write %s: %s", temporary, strerror(errno));
  fprintf(out, "%s%s\n%s\n", MARK, c->settings, COLUMNS);
  for (int i = 0; i < c->count; i++) put_row(out, &c->readings[i]);
  finish(out, temporary);
  if (rename(temporary, path)) fail("cannot write %s: %s", path, strerror(errno));
}

static int index_of(const char *text, const char *(*name)(int), int count) {
  for (int i = 0; i < count; i++)
    if (strcmp(text, name(i)) == 0) return i;
  return -1;
}

static const char *nth_sweep(int i) {
  return sweep_name((Sweep)i);
}
static const char *nth_mode(int i) {
  return lce_mode_name((LceMode)i);
}
static const char *nth_status(int i) {
  return point_status_name((PointStatus)i);
}

// One row; false when it is none.
static bool parse_row(char *line, Reading *r) {
  char *field[COLUMN_COUNT];
  int count = 0;
  for (char *part = line, *next; part; part = next) {
    next = strchr(part, ',');
    if (next) *next++ = 0;
    if (count == COLUMN_COUNT) return false;
    field[count++] = part;
  }
  if (count != COLUMN_COUNT) return false;
  int sweep = index_of(field[0], nth_sweep, SWEEP_COUNT), mode = index_of(field[1], nth_mode, 2);
  int status = index_of(field[8], nth_status, POINT_STATUS_COUNT);
  if (sweep < 0 || mode < 0 || status < 0) return false;
  *r = (Reading){.point = {.sweep = (Sweep)sweep,
                           .mode = (LceMode)mode,
                           .batch = strtoll(field[2], NULL, 10),
                           .seq_len = strtoll(field[3], NULL, 10),
                           .vocab_size = strtoll(field[5], NULL, 10),
                           .hidden_size = strtoll(field[6], NULL, 10),
                           .chunk = strtoll(field[7], NULL, 10)},
                 .status = (PointStatus)status};
  size_t *const bytes[] = {&r->planned_bytes, &r->planned_layer_bytes, &r->ledger_bytes, &r->layer_bytes,
                           &r->device_bytes,  &r->device_base_bytes,   &r->usable_bytes};
  double *const numbers[] = {&r->step_seconds, &r->layer_seconds, &r->floor_seconds,
                             &r->loss_error,   &r->dx_error,      &r->dweight_error};
  for (int i = 0; i < 7; i++) *bytes[i] = strtoull(field[9 + i], NULL, 10);
  for (int i = 0; i < 6; i++) *numbers[i] = *field[16 + i] ? strtod(field[16 + i], NULL) : i < 3 ? 0 : NAN;
  return point_tokens(&r->point) > 0 && r->planned_bytes > 0;
}

bool curve_read(Curve *c, const char *path) {
  *c = (Curve){0};
  FILE *in = fopen(path, "r");
  if (!in && errno == ENOENT) return false;
  if (!in) fail("cannot read %s: %s", path, strerror(errno));
  char line[4096];
  bool header = fgets(line, sizeof line, in) && strncmp(line, MARK, sizeof MARK - 1) == 0;
  line[strcspn(line, "\n")] = 0;
  header = header && strlen(line + sizeof MARK - 1) < sizeof c->settings;
  if (header) {
    strcpy(c->settings, line + sizeof MARK - 1);
    header = fgets(line, sizeof line, in) && strncmp(line, COLUMNS, sizeof COLUMNS - 1) == 0;
  }
  if (!header)
    fail("%s is no memory curve of this version; move it away, or give --fresh to replace it", path);
  for (int number = 3; fgets(line, sizeof line, in); number++) {
    char *end = strchr(line, '\n');
    if (!end) break; // cut off where the writer was killed
    *end = 0;
    Reading r;
    if (!parse_row(line, &r))
      fail("%s:%d is no row of a memory curve; remove the line, or give --fresh", path, number);
    curve_add(c, &r);
  }
  fclose(in);
  return true;
}
