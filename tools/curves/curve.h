// A curve: the points of a sweep, what is known of each, and the settings that they belong to. On disk it is one CSV
// file, written again after each point; the next run of the same settings continues from there.
#pragma once

#include "tools/curves/point.h"
#include "tools/plot/chart.h"

typedef struct {
  char settings[2048]; // "name=value; name=value"
  Reading *readings;
  int count;
  int64_t capacity;
} Curve;

void curve_add(Curve *curve, const Reading *reading);
void curve_free(Curve *curve);
// The reading of a point, or NULL.
const Reading *curve_find(const Curve *curve, const Point *point);

// Appends the points of a sweep as readings that are not known yet, fused and materialized in turn, from small to
// large. `values` is a list of sizes ("512,1024,4096") and ranges ("256:2048:256" adds 256 each time, "128:16384:x2"
// doubles); a size of tokens may also be written as batch x sequence ("4x20480"). VALUES_USUAL: eight that suit the
// model. Of chunks, the materialized mode is a single point. The experiment gives what is not swept. Fails in one
// sentence on what is no number, no range, or no size a model can have.
#define VALUES_USUAL "usual"
void curve_add_sweep(Curve *curve, const Experiment *experiment, Sweep sweep, const char *values);

// Appends "name=value" to the settings.
void curve_set(Curve *curve, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
// The value of a setting, "" when there is none; curve_is compares it.
Label curve_setting(const Curve *curve, const char *name);
bool curve_is(const Curve *curve, const char *name, const char *value);
// Fails, naming the first difference, when the curves' settings differ.
void curve_require_same(const Curve *on_disk, const Curve *wanted, const char *path);

// Reads a file; false when there is none. Fails when it is not such a file.
bool curve_read(Curve *curve, const char *path);
// Writes all readings that are known.
void curve_write(const Curve *curve, const char *path);
