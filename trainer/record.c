#include "trainer/record.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "data/json.h"

static cJSON *value_of(const RecordField *f) {
  if (f->item) return f->item;
  if (f->text) return json_string(f->text);
  if (f->tokens) return cJSON_CreateIntArray(f->tokens, (int)f->count);
  return f->truth ? cJSON_CreateBool(*f->truth) : cJSON_CreateNumber(f->number);
}

cJSON *record_object(const RecordField *fields) {
  cJSON *object = cJSON_CreateObject();
  for (const RecordField *f = fields; f->name; f++)
    if (!f->optional || isfinite(f->number)) cJSON_AddItemToObject(object, f->name, value_of(f));
  return object;
}

bool record_write(FILE *log, const RecordField *fields) {
  cJSON *line = record_object(fields);
  char *text = json_print(line, false);
  bool written = fprintf(log, "%s\n", text) >= 0 && !fflush(log);
  int error = errno;
  free(text);
  cJSON_Delete(line);
  errno = error;
  return written;
}
