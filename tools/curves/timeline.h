// Bytes in use over a few training steps, by category: where the memory of a step goes, and when.
#pragma once

#include "tools/curves/curve.h"

enum { TIMELINE_STEPS = 3 };

// From `at` on (until the next moment) these bytes were in use.
typedef struct {
  int mode;  // LceMode
  double at; // seconds since the first step began; of a plan, bytes pushed and popped since
  int64_t step;
  size_t bytes[MEMORY_CATEGORY_COUNT];
} Moment;

// Of one mode, or of one after the other. A mode's last moment is the end of its steps.
typedef struct {
  bool planned; // `at` are bytes, not seconds
  Moment *moments;
  int count;
  int64_t capacity;
} Timeline;

// Runs three steps of the point (after one to warm up) and appends the ledger's events. On a device every event
// waits for the work before it, so that its bytes stand where its time is. A plan has no time: an event takes as
// much of the axis as the bytes that it pushes or pops.
void timeline_record(Timeline *timeline, const Experiment *experiment, const Point *point);
void timeline_free(Timeline *timeline);
// The part of a mode, which shares the moments.
Timeline timeline_of(const Timeline *timeline, LceMode mode);

// The timeline of both modes as CSV, and back; false when there is none. `settings` is the comment on its first line.
void timeline_write(const Timeline *timeline, const Curve *settings, const char *path);
bool timeline_read(Timeline *timeline, Curve *settings, const char *path);
