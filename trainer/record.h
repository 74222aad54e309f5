// A log's records: one JSON object a line.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct cJSON;

// A member of a record: a text, tokens, a truth value or else a number, null where that is not finite.
typedef struct {
  const char *name;
  double number;
  bool optional; // left out where the number is not finite
  const char *text;
  const int32_t *tokens; // [count]
  int64_t count;
  const bool *truth;
  struct cJSON *item; // the record takes it
} RecordField;

#define NUMBER(name, value)                                                                                  \
  { name, .number = (double)(value) }
#define OPTIONAL(name, value)                                                                                \
  { name, .number = value, .optional = true }
#define TEXT(name, value)                                                                                    \
  { name, .text = value }

// An object of the fields up to one without a name.
struct cJSON *record_object(const RecordField *fields);

// Writes the object as a line that is on disk on return; false, with errno, where that fails.
bool record_write(FILE *log, const RecordField *fields);
#define EVENT(event, ...)                                                                                    \
  (const RecordField[]) {                                                                                    \
    TEXT("event", event), __VA_ARGS__, {                                                                     \
      0                                                                                                      \
    }                                                                                                        \
  }
