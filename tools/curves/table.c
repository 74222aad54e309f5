#include "tools/curves/table.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"

static const char mark[] = "# lce.c "; // what every table begins with

static void write_field(FILE *out, const Column *c, const void *field) {
  if (c->values) {
    fputs(c->values[*(const int *)field], out);
  } else if (c->number) {
    double value = *(const double *)field;
    if (!c->optional || (isfinite(value) && value > 0)) fprintf(out, "%.9g", value);
  } else {
    int64_t value = *(const int64_t *)field;
    if (!c->optional || value) fprintf(out, "%lld", (long long)value);
  }
}

void table_write(const Table *t, const char *path, const char *settings, const void *records, int count) {
  char *temporary = text_format("%s.new", path);
  FILE *out = file_create(t->what, temporary, mark, false);
  fprintf(out, "# lce.c %s; %s\n", t->what, settings);
  for (int row = -1; row < count; row++)
    for (int i = 0; i < t->count; i++) {
      const Column *c = &t->columns[i];
      if (row < 0)
        fputs(c->name, out);
      else
        write_field(out, c, (const char *)records + (size_t)row * t->record_size + c->offset);
      fputc(i + 1 < t->count ? ',' : '\n', out);
    }
  bool bad = ferror(out) || fflush(out) || fsync(fileno(out));
  if (fclose(out) || bad || rename(temporary, path)) fail("cannot write %s: %s", path, strerror(errno));
  free(temporary);
}

static bool read_field(const Column *c, const char *text, void *field) {
  char *end = (char *)text;
  for (int i = 0; c->values && c->values[i]; i++)
    if (strcmp(text, c->values[i]) == 0) return *(int *)field = i, true;
  if (c->values) return false;
  if (c->number)
    *(double *)field = strtod(text, &end);
  else
    *(int64_t *)field = strtoll(text, &end, 10);
  return !*end && (end > text || c->optional);
}

static bool is_header(const Table *t, const char *line) {
  for (int i = 0; i < t->count; i++) {
    size_t length = strlen(t->columns[i].name); // a name may contain a comma
    if (strncmp(line, t->columns[i].name, length) || line[length] != (i + 1 < t->count ? ',' : 0))
      return false;
    line += length + 1;
  }
  return true;
}

static bool read_row(const Table *t, char *line, char *record) {
  for (int i = 0; i < t->count; i++) {
    char *next = strchr(line, ',');
    if ((next != NULL) != (i + 1 < t->count)) return false;
    if (next) *next++ = 0;
    if (!read_field(&t->columns[i], line, record + t->columns[i].offset)) return false;
    line = next;
  }
  return true;
}

void *table_read(const Table *t, const char *path, char *settings, size_t size, int *count,
                 int64_t *capacity) {
  size_t bytes;
  int file = file_open(path, &bytes);
  FILE *in = file < 0 ? NULL : fdopen(file, "r");
  if (!in) return NULL;
  char line[4096], mark[64], *records = host_grow(NULL, 0, capacity, t->record_size, "a table");
  int length = snprintf(mark, sizeof mark, "# lce.c %s; ", t->what), number = 1;
  for (; fgets(line, sizeof line, in) && strchr(line, '\n'); number++) {
    line[strcspn(line, "\n")] = 0;
    if (number == 1 && (strncmp(line, mark, (size_t)length) || strlen(line + length) >= size)) break;
    if (number == 1) strcpy(settings, line + length);
    if (number == 2 && !is_header(t, line)) break;
    if (number < 3) continue;
    records = host_grow(records, number - 3, capacity, t->record_size, "a table");
    if (!read_row(t, line, records + (size_t)(number - 3) * t->record_size))
      fail("%s:%d is no row of this table; remove the line, or give --fresh", path, number);
  }
  fclose(in);
  if (number < 3)
    fail("%s is no %s of this version; move it away, or give --fresh to replace it", path, t->what);
  *count = number - 3;
  return records;
}
