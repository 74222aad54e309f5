#include "trainer/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"

struct Log {
  FILE *file; // NULL: swallow
  const char *path;
};

Log *log_open(const char *path, bool append) {
  FILE *file = path ? fopen(path, append ? "a" : "w") : NULL;
  if (path && !file) fail("cannot write the log %s: %s", path, strerror(errno));
  Log *log = calloc(1, sizeof *log);
  if (!log) fail("out of host memory for the log");
  *log = (Log){.file = file, .path = path};
  return log;
}

void log_write(Log *log, const char *event, cJSON *fields) {
  if (log->file) {
    cJSON *line = cJSON_CreateObject();
    cJSON_AddStringToObject(line, "event", event);
    // The event's name comes first; the fields move over behind it.
    while (fields->child) {
      cJSON *field = cJSON_DetachItemViaPointer(fields, fields->child);
      cJSON_AddItemToObject(line, field->string, field);
    }
    char *text = cJSON_PrintUnformatted(line);
    if (!text) fail("out of host memory for a line of the log");
    if (fprintf(log->file, "%s\n", text) < 0 || fflush(log->file))
      fail("cannot write the log %s: %s", log->path, strerror(errno));
    free(text);
    cJSON_Delete(line);
  }
  cJSON_Delete(fields);
}

void log_close(Log *log) {
  if (log->file && fclose(log->file)) warn("the log %s may be incomplete: %s", log->path, strerror(errno));
  free(log);
}
