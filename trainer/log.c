#include "trainer/log.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json.h"

struct Log {
  FILE *file; // NULL: swallow
  const char *path;
};

Log *log_open(const char *path, bool append) {
  FILE *file = path ? fopen(path, append ? "a" : "w") : NULL;
  if (path && !file) fail("cannot write the log %s: %s", path, strerror(errno));
  Log *log = host_alloc(1, sizeof *log, "the log");
  *log = (Log){.file = file, .path = path};
  return log;
}

static cJSON *value_of(const LogField *f) {
  if (f->text) return cJSON_CreateString(f->text);
  if (f->tokens) return cJSON_CreateIntArray(f->tokens, (int)f->count);
  if (f->truth) return cJSON_CreateBool(*f->truth);
  return isfinite(f->number) ? cJSON_CreateNumber(f->number) : cJSON_CreateNull();
}

void log_write(Log *log, const char *event, const LogField *fields) {
  if (!log->file) return;
  cJSON *line = cJSON_CreateObject();
  cJSON_AddStringToObject(line, "event", event);
  for (const LogField *f = fields; f->name; f++)
    if (!f->optional || isfinite(f->number)) cJSON_AddItemToObject(line, f->name, value_of(f));
  char *text = json_print(line, false);
  if (fprintf(log->file, "%s\n", text) < 0 || fflush(log->file))
    fail("cannot write the log %s: %s", log->path, strerror(errno));
  free(text);
  cJSON_Delete(line);
}

void log_close(Log *log) {
  if (log->file && fclose(log->file)) warn("the log %s may be incomplete: %s", log->path, strerror(errno));
  free(log);
}
