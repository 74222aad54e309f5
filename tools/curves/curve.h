// A curve on disk: one CSV file, a row for every point, written as soon as it is known.
//
// The first line is a comment with the settings that the rows belong to. A killed sweep leaves whole rows and
// at most one cut off, which reading drops; the next run of the same settings continues from there.
#ifndef LCE_TOOLS_CURVES_CURVE_H
#define LCE_TOOLS_CURVES_CURVE_H

#include "tools/curves/point.h"

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

// Appends "name=value" to the settings.
void curve_set(Curve *curve, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
// The value of a setting, "" when there is none.
typedef struct {
  char text[256];
} Setting;
Setting curve_setting(const Curve *curve, const char *name);
// Fails, naming the first difference, when the curves' settings differ.
void curve_require_same(const Curve *on_disk, const Curve *wanted, const char *path);

// Reads a file; false when there is none. Fails when it is not such a file.
bool curve_read(Curve *curve, const char *path);
// Writes all readings that are known, or nothing: readers never see half of the file.
void curve_write(const Curve *curve, const char *path);
// Appends one row, on disk when it returns.
void curve_append(const Reading *reading, const char *path);

#endif
