// Host memory; without any left these fail ("out of host memory for ..."). The caller frees what it gets.
#pragma once

#include <stddef.h>
#include <stdint.h>

// `count` elements of `size` bytes, zeroed. `what` names them in the message.
void *host_alloc(int64_t count, size_t size, const char *what);
// An array with space for more than `count` elements: `array`, or moved to twice its *capacity (0: none yet).
void *host_grow(void *array, int64_t count, int64_t *capacity, size_t size, const char *what);
char *text_format(const char *format, ...) __attribute__((format(printf, 1, 2)));
