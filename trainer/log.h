// The run's record beside its output: one JSON object a line.
#ifndef LCE_TRAINER_LOG_H
#define LCE_TRAINER_LOG_H

#include <cjson/cJSON.h>
#include <stdbool.h>

typedef struct Log Log;

// Creates the file, or empties it, or `append`s to what is there; NULL path gives a log that swallows
// everything. Fails when it cannot be written.
Log *log_open(const char *path, bool append);
// Writes {"event": event, ...fields} as one line and frees fields. Lines are complete on disk when this
// returns, so a killed run leaves a readable log. Fails when the disk is full.
void log_write(Log *log, const char *event, cJSON *fields);
void log_close(Log *log);

#endif
