// JSON that others wrote and that this program writes: cJSON, with every failure turned into a sentence.
#pragma once

#include <cjson/cJSON.h>
#include <stddef.h>

#include "kernels/base/fail.h"

// An object from `length` bytes of text (no terminator needed), or NULL with a reason. The caller deletes it.
cJSON *json_parse(const char *text, size_t length, Reason *reason);
// The same from a file; NULL if it is absent, with "" as the reason. Errors are fatal if `reason` is NULL.
cJSON *json_read(const char *path, Reason *reason);

const cJSON *json_member(const cJSON *object, const char *name);       // NULL when absent or null
const char *json_text(const cJSON *object, const char *name);          // NULL when it is no text
bool json_is(const cJSON *object, const char *name, const char *text); // the member is this text
bool json_is_whole(const cJSON *item); // a whole number from 0 to 2^53, exact in a double

// A text, or its bytes as an array if it is not UTF-8. json_bytes reads either, into the item's memory.
cJSON *json_string(const char *text);
const char *json_bytes(cJSON *item);

// Indented, or on one line, numbers in the fewest digits that read back as the same; the caller frees it.
char *json_print(const cJSON *json, bool indented);
