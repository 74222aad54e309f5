#include "base/reason.h"

#include <stdarg.h>
#include <stdio.h>

bool refuse(Reason *reason, const char *format, ...) {
  Reason written;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(written.text, sizeof written.text, format, arguments);
  va_end(arguments);
  *reason = written;
  return false;
}
