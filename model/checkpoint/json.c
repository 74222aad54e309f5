#include "model/checkpoint/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "model/checkpoint/files.h"

// cJSON needs a terminator where it looks past the end, so it gets a copy that has one.
cJSON *json_parse(const char *text, size_t length, Reason *reason) {
  char *copy = malloc(length + 1);
  if (!copy) fail("out of host memory for %zu bytes of JSON", length);
  memcpy(copy, text, length);
  copy[length] = 0;
  const char *end = copy;
  cJSON *object = cJSON_ParseWithLengthOpts(copy, length + 1, &end, false);
  size_t used = (size_t)(end - copy);
  if (object) used += strspn(end, " \t\r\n");
  if (object && (used != length || !cJSON_IsObject(object))) {
    cJSON_Delete(object);
    object = NULL;
  }
  if (!object) refuse(reason, "it is no JSON object (see byte %zu)", used);
  free(copy);
  return object;
}

cJSON *json_read(const char *path) {
  size_t length;
  char *text = file_read(path, &length);
  if (!text) return NULL;
  Reason reason;
  cJSON *object = json_parse(text, length, &reason);
  if (!object) fail("%s cannot be read: %s", path, reason.text);
  free(text);
  return object;
}

bool json_is_whole(const cJSON *item) {
  double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
  return value >= 0 && value <= 0x1p53 && value == floor(value);
}

const cJSON *json_member(const JsonMembers *from, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(from->object, name);
  return item && !cJSON_IsNull(item) ? item : NULL;
}

static void wrong(JsonMembers *from, const char *name, const char *wanted) {
  if (from->ok) refuse(from->reason, "%s is not %s", name, wanted);
  from->ok = false;
}

void json_size(JsonMembers *from, const char *name, int64_t *value) {
  const cJSON *item = json_member(from, name);
  if (!item) return;
  if (json_is_whole(item) && item->valuedouble >= 1 && item->valuedouble <= INT32_MAX)
    *value = (int64_t)item->valuedouble;
  else
    wrong(from, name, "a whole number from 1 to 2147483647");
}

void json_number(JsonMembers *from, const char *name, double *value) {
  const cJSON *item = json_member(from, name);
  if (!item) return;
  if (cJSON_IsNumber(item) && isfinite(item->valuedouble) && item->valuedouble > 0)
    *value = item->valuedouble;
  else
    wrong(from, name, "a number above 0");
}

void json_bool(JsonMembers *from, const char *name, bool *value) {
  const cJSON *item = json_member(from, name);
  if (!item) return;
  if (cJSON_IsBool(item))
    *value = cJSON_IsTrue(item);
  else
    wrong(from, name, "true or false");
}

void json_text(JsonMembers *from, const char *name, const char **value) {
  const cJSON *item = json_member(from, name);
  if (!item) return;
  if (cJSON_IsString(item))
    *value = item->valuestring;
  else
    wrong(from, name, "a text");
}
