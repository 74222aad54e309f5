// The run's record: one JSON object a line.
#ifndef LCE_TRAINER_LOG_H
#define LCE_TRAINER_LOG_H

#include <stdbool.h>
#include <stdint.h>

typedef struct Log Log;

// A member of the object: a text, tokens, a truth value or else a number.
typedef struct {
  const char *name;
  double number; // null where it is not finite
  bool optional; // left out where the number is not finite
  const char *text;
  const int32_t *tokens; // [count]
  int64_t count;
  const bool *truth;
} LogField;

// Creates the file, or empties it, or `append`s to what is there; NULL path gives a log that swallows
// everything. Fails when it cannot be written.
Log *log_open(const char *path, bool append);
// Writes {"event": event, ...fields} as one line; the last field has no name. Lines are complete on disk when
// this returns, so a killed run leaves a readable log. Fails when the disk is full.
void log_write(Log *log, const char *event, const LogField *fields);
void log_close(Log *log);

#endif
