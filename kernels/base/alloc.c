#include "kernels/base/alloc.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/base/fail.h"

void *host_alloc(int64_t count, size_t size, const char *what) {
  void *memory = calloc(count ? (size_t)count : 1, size);
  if (!memory) fail("out of host memory for %s (%lld times %zu bytes)", what, (long long)count, size);
  return memory;
}

void *host_grow(void *array, int64_t count, int64_t *capacity, size_t size, const char *what) {
  if (count < *capacity) return array;
  *capacity = *capacity ? 2 * *capacity : 16;
  void *grown = realloc(array, (size_t)*capacity * size);
  if (!grown) fail("out of host memory for %s (%lld times %zu bytes)", what, (long long)*capacity, size);
  return grown;
}

char *text_format(const char *format, ...) {
  char *text;
  va_list arguments;
  va_start(arguments, format);
  int length = vasprintf(&text, format, arguments);
  va_end(arguments);
  if (length < 0) fail("out of host memory for a text");
  return text;
}
