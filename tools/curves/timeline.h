// Bytes in use over a few training steps, by category: where the memory of a step goes, and when.
#ifndef LCE_TOOLS_CURVES_TIMELINE_H
#define LCE_TOOLS_CURVES_TIMELINE_H

#include "tools/curves/curve.h"

enum { TIMELINE_STEPS = 3 };

// From `at` on (until the next moment) these bytes were in use.
typedef struct {
  int mode;  // LceMode
  double at; // seconds since the first step began; of a plan, bytes pushed and popped since
  int64_t step;
  size_t bytes[MEMORY_CATEGORY_COUNT];
} Moment;

typedef struct {
  LceMode mode;
  bool planned;    // `at` are bytes, not seconds
  double duration; // of all steps, as `at`
  Moment *moments;
  int count;
  int64_t capacity;
} Timeline;

// Runs three steps of the point (after one to warm up) and records the ledger's events. On a device every event
// waits for the work before it, so that its bytes stand where its time is. A plan has no time: an event takes as
// much of the axis as the bytes that it pushes or pops.
Timeline timeline_record(const Experiment *experiment, const Point *point);
void timeline_free(Timeline *timeline);

// Both timelines as one CSV, and back; false when there is none. `settings` is the comment on its first line.
void timeline_write(const Timeline timelines[2], const Curve *settings, const char *path);
bool timeline_read(Timeline timelines[2], Curve *settings, const char *path);

#endif
