#include "data/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "kernels/base/alloc.h"
#include "kernels/base/text.h"

// The first name that an object repeats, or NULL: cJSON takes such a name's first value, Python its last.
static const char *repeated_name(const cJSON *json) {
  struct {
    char *key;
    bool value;
  } *names = NULL;
  const char *name = NULL;
  bool named = cJSON_IsObject(json);
  for (const cJSON *item = json->child; item && !name; item = item->next) {
    name = named && shgeti(names, item->string) >= 0 ? item->string : repeated_name(item);
    if (named) shput(names, item->string, true);
  }
  shfree(names);
  return name;
}

// cJSON needs a terminator where it looks past the end, so it gets a copy that has one.
cJSON *json_parse(const char *text, size_t length, Reason *reason) {
  char *copy = host_alloc((int64_t)length + 1, 1, "a JSON text");
  memcpy(copy, text, length);
  const char *end = copy;
  cJSON *object = cJSON_ParseWithLengthOpts(copy, length + 1, &end, false);
  size_t used = (size_t)(end - copy);
  if (object) used += strspn(end, " \t\r\n");
  bool good = (cJSON_IsObject(object) && used == length) ||
              refuse(reason, "it is no JSON object (see byte %zu)", used);
  const char *twice = good ? repeated_name(object) : NULL;
  if (twice) good = refuse(reason, "\"%.40s\" stands in it twice", twice);
  if (!good) cJSON_Delete(object);
  free(copy);
  return good ? object : NULL;
}

cJSON *json_read(const char *path, Reason *given) {
  Reason why = {""}, *reason = given ? given : &why;
  size_t length;
  char *text = file_read(path, &length, given);
  cJSON *object = text ? json_parse(text, length, reason) : NULL;
  if (text && !object) refuse(reason, "%s cannot be read: %s", path, reason->text);
  if (text && !object && !given) fail("%s", reason->text);
  free(text);
  return object;
}

const cJSON *json_member(const cJSON *object, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
  return item && !cJSON_IsNull(item) ? item : NULL;
}

const char *json_text(const cJSON *object, const char *name) {
  return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
}

bool json_is(const cJSON *object, const char *name, const char *text) {
  const char *value = json_text(object, name);
  return value && strcmp(value, text) == 0;
}

bool json_is_whole(const cJSON *item) {
  double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
  return value >= 0 && value <= 0x1p53 && value == floor(value);
}

cJSON *json_string(const char *text) {
  if (utf8_valid(text)) return cJSON_CreateString(text);
  cJSON *bytes = cJSON_CreateArray();
  for (; *text; text++) cJSON_AddItemToArray(bytes, cJSON_CreateNumber((unsigned char)*text));
  return bytes;
}

const char *json_bytes(cJSON *item) {
  if (!cJSON_IsArray(item)) return cJSON_GetStringValue(item);
  int count = 0;
  char *text = cJSON_malloc((size_t)cJSON_GetArraySize(item) + 1);
  if (!text) fail("out of host memory for a JSON text");
  const cJSON *byte;
  cJSON_ArrayForEach(byte, item) text[count++] = (char)(json_is_whole(byte) ? byte->valueint : '?');
  text[count] = 0;
  cJSON_free(item->valuestring);
  return item->valuestring = text; // cJSON_Delete frees it
}

// cJSON prints up to 17 digits where fewer suffice. As raw text a number is printed as it stands.
static bool shorten_numbers(cJSON *item) {
  for (; item; item = item->next) {
    if (!shorten_numbers(item->child)) return false;
    if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)) continue;
    item->valuestring = strdup(text_number(item->valuedouble).text);
    if (!item->valuestring) return false;
    item->type = cJSON_Raw;
  }
  return true;
}

char *json_print(const cJSON *json, bool indented) {
  cJSON *copy = cJSON_Duplicate(json, true);
  char *text = NULL;
  if (copy && shorten_numbers(copy)) text = indented ? cJSON_Print(copy) : cJSON_PrintUnformatted(copy);
  cJSON_Delete(copy);
  if (!text) fail("out of host memory for a JSON text");
  return text;
}
