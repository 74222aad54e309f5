// Why something was refused, for callers that carry on without it: fail() is for those that cannot.
#ifndef LCE_BASE_REASON_H
#define LCE_BASE_REASON_H

#include <stdbool.h>

typedef struct {
  char text[640]; // a sentence without its full stop
} Reason;

// Writes the sentence and returns false, so that a check can end with `return refuse(reason, ...)`. The
// sentence may hold reason->text itself.
bool refuse(Reason *reason, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
