// Bytes in use over a few training steps, by category: where the memory of a step goes, and when.
#ifndef LCE_TOOLS_CURVES_TIMELINE_H
#define LCE_TOOLS_CURVES_TIMELINE_H

#include "tools/curves/point.h"

enum { TIMELINE_STEPS = 3 };

// From `seconds` on (until the next moment) these bytes were in use.
typedef struct {
  double seconds; // since the first step began
  int step;
  size_t bytes[MEMORY_CATEGORY_COUNT];
} Moment;

typedef struct {
  LceMode mode;
  bool planned;    // seconds are guessed from flops and bytes, not measured
  double duration; // of all steps
  Moment *moments;
  int count, capacity;
} Timeline;

// Runs three steps of the point (after one to warm up) and records them. On a device every operation is waited
// for, so that its bytes stand where its time is. A plan's clock ticks by each operation's flops and bytes, at
// the speed of a device of its kind.
Timeline timeline_record(const Experiment *experiment, const Point *point);
void timeline_free(Timeline *timeline);

// Both timelines as one CSV, and back. `settings` is the comment on its first line.
void timeline_write(const Timeline timelines[2], const char *settings, const char *path);
void timeline_read(Timeline timelines[2], char *settings, size_t size, const char *path);

#endif
