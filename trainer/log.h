// The run's record beside its output: one JSON object a line.
#ifndef LCE_TRAINER_LOG_H
#define LCE_TRAINER_LOG_H

#include <cjson/cJSON.h>

typedef struct Log Log;

// Creates (or empties) the file; NULL path gives a log that swallows everything. Fails when it cannot be
// written.
Log *log_open(const char *path);
// Writes {"event": event, ...fields} as one line and frees fields. Lines are complete on disk when this
// returns, so a killed run leaves a readable log. Fails when the disk is full.
void log_write(Log *log, const char *event, cJSON *fields);
void log_close(Log *log);

#endif
