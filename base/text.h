// Numbers as people read them.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct {
  char text[32];
} Text;

Text text_bytes(uint64_t bytes);    // "0 B", "512 B", "12.3 KiB", "978.5 MiB", "15.66 GiB"
Text text_count(double count);      // "950", "12.4K", "124M", "8.03B"
Text text_duration(double seconds); // "45s", "3m 05s", "2h 14m", "3d 04h"
Text text_grouped(int64_t number);  // "128,256"
