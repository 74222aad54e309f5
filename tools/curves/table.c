#include "tools/curves/table.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"

void table_write_header(FILE *out, const Table *t, const char *settings) {
  fprintf(out, "%s%s\n", t->mark, settings);
  for (int i = 0; i < t->count; i++) fprintf(out, "%s%s", i ? "," : "", t->columns[i].name);
  fputc('\n', out);
}

void table_write_row(FILE *out, const Table *t, const void *record) {
  for (int i = 0; i < t->count; i++) {
    const Column *c = &t->columns[i];
    const void *field = (const char *)record + c->offset;
    if (i) fputc(',', out);
    if (c->kind == COLUMN_NAME) {
      fputs(c->values[*(const int *)field], out);
    } else if (c->kind == COLUMN_INTEGER) {
      int64_t value = *(const int64_t *)field;
      if (!c->optional || value) fprintf(out, "%lld", (long long)value);
    } else {
      double value = *(const double *)field;
      if (!c->optional || (isfinite(value) && value > 0)) fprintf(out, "%.9g", value);
    }
  }
  fputc('\n', out);
}

FILE *table_open(const Table *t, const char *path, char *settings, size_t size, bool *damaged) {
  char line[TABLE_LINE];
  size_t mark = strlen(t->mark);
  *damaged = false;
  FILE *in = fopen(path, "r");
  if (!in && errno == ENOENT) return NULL;
  if (!in) fail("cannot read %s: %s", path, strerror(errno));
  *damaged = !fgets(line, sizeof line, in) || strncmp(line, t->mark, mark) != 0;
  line[strcspn(line, "\n")] = 0;
  *damaged = *damaged || strlen(line + mark) >= size;
  if (!*damaged) strcpy(settings, line + mark);
  *damaged = *damaged || !fgets(line, sizeof line, in);
  const char *at = line;
  for (int i = 0; i < t->count && !*damaged; i++) {
    size_t length = strlen(t->columns[i].name);
    *damaged = strncmp(at, t->columns[i].name, length) || at[length] != (i + 1 < t->count ? ',' : '\n');
    at += length + 1;
  }
  if (!*damaged) return in;
  fclose(in);
  return NULL;
}

static bool read_field(const Column *c, const char *text, void *field) {
  char *end = (char *)text;
  if (c->kind == COLUMN_NAME) {
    for (int i = 0; c->values[i]; i++)
      if (strcmp(text, c->values[i]) == 0) return *(int *)field = i, true;
    return false;
  }
  if (c->kind == COLUMN_NUMBER)
    *(double *)field = strtod(text, &end);
  else
    *(int64_t *)field = strtoll(text, &end, 10);
  return !*end && (end > text || c->optional);
}

bool table_read_row(FILE *in, const Table *t, const char *path, int line, void *record) {
  char text[TABLE_LINE], *part = text;
  if (!fgets(text, sizeof text, in) || !strchr(text, '\n')) return false;
  text[strcspn(text, "\n")] = 0;
  bool good = true;
  for (int i = 0; i < t->count && good; i++) {
    char *next = strchr(part, ',');
    good = (next != NULL) == (i + 1 < t->count);
    if (next) *next++ = 0;
    good = good && read_field(&t->columns[i], part, (char *)record + t->columns[i].offset);
    part = next;
  }
  if (!good) fail("%s:%d is no row of this table; remove the line, or give --fresh", path, line);
  return true;
}
