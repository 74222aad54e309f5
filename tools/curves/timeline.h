// Bytes in use over a few training steps, by category: where the memory of a step goes, and when.
#pragma once

#include "tools/curves/curve.h"

enum { TIMELINE_STEPS = 3 };

// The modes of a timeline: LceMode's two, and a baseline that is planned from the materialized mode.
enum { TIMELINE_FP32 = 2, TIMELINE_MODES };

// From `at` on (until the next moment) these bytes were in use.
typedef struct {
  int mode;  // LceMode or TIMELINE_FP32
  double at; // seconds since the first step began; of a plan, bytes pushed and popped since
  int64_t step;
  size_t bytes[MEMORY_CATEGORY_COUNT];
} Moment;

// Of one mode, or of several, one after the other. A mode's last moment is the end of its steps.
typedef struct {
  bool planned;      // `at` are bytes, not seconds
  size_t host_bytes; // offloaded; not on disk
  Moment *moments;
  int count;
  int64_t capacity;
} Timeline;

// Runs three steps of the point (after one to warm up) and appends the ledger's events. On a device every event
// waits for the work before it, so that its bytes stand where its time is. A plan has no time: an event takes as
// much of the axis as the bytes that it pushes or pops.
void timeline_record(Timeline *timeline, const Experiment *experiment, const Point *point);
// Appends what the materialized mode would hold with its logits in fp32: its moments with `logits` bytes (those of the
// bf16 logits) more while it holds these. A baseline that upcasts the logits holds at least that much.
void timeline_add_fp32(Timeline *timeline, size_t logits);
void timeline_free(Timeline *timeline);
// The part of a mode, which shares the moments; empty where there is none.
Timeline timeline_of(const Timeline *timeline, int mode);
// The most bytes in use of a category, or with MEMORY_CATEGORY_COUNT of all together.
size_t timeline_peak(const Timeline *timeline, int category);

// The timeline of all modes as CSV, and back; false when there is none. `settings` is the comment on its first line.
void timeline_write(const Timeline *timeline, const Curve *settings, const char *path);
bool timeline_read(Timeline *timeline, Curve *settings, const char *path);
