// JSON files as somebody else wrote them: parsed by cJSON, read with a reason for every member that is not
// what it should be.
#ifndef LCE_MODEL_CHECKPOINT_JSON_H
#define LCE_MODEL_CHECKPOINT_JSON_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

#include "base/reason.h"

// An object from `length` bytes of text (no terminator needed); NULL with a reason when it is none. The caller
// deletes it.
cJSON *json_parse(const char *text, size_t length, Reason *reason);

// The same from a file; fails naming it. NULL when the file does not exist.
cJSON *json_read(const char *path);

// A whole number from 0 to 2^53: what a double holds exactly.
bool json_is_whole(const cJSON *item);

// Reads members one after the other; the first one that is wrong leaves its reason and ok false. A member that
// is absent or null leaves *value as it is.
typedef struct {
  const cJSON *object;
  Reason *reason;
  bool ok;
} JsonMembers;

const cJSON *json_member(const JsonMembers *from, const char *name);  // NULL when absent or null
void json_size(JsonMembers *from, const char *name, int64_t *value);  // whole, 1 to 2^31 - 1
void json_number(JsonMembers *from, const char *name, double *value); // finite, above 0
void json_bool(JsonMembers *from, const char *name, bool *value);
// The text belongs to the object.
void json_text(JsonMembers *from, const char *name, const char **value);

#endif
