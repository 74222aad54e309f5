// The code of stb_ds.h: arrays that grow (arrput, arrlen, arrfree). Without memory they fail.
#include <stdlib.h>

#include "kernels/base/fail.h"

static void *resize(void *memory, size_t size) {
  void *resized = realloc(memory, size);
  if (!resized) fail("out of host memory for an array of %zu bytes", size);
  return resized;
}

#define STBDS_REALLOC(context, memory, size) resize(memory, size)
#define STBDS_FREE(context, memory)          free(memory)
#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>
