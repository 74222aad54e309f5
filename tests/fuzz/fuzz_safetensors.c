// A safetensors file of the fuzzer's bytes. The tensors that are accepted must lie within the file.
#include <stdlib.h>
#include <string.h>

#include "model/checkpoint/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  // The first two bytes are the header's length, so that the fuzzer need not guess eight.
  if (size < 2) return 0;
  size_t text = (size_t)data[0] | (size_t)data[1] << 8;
  char *file = malloc(size + 6);
  uint64_t length = text == 0xFFFF ? UINT64_MAX >> 1 : text;
  memcpy(file, &length, sizeof length);
  memcpy(file + 8, data + 2, size - 2);
  SafetensorsHeader header;
  Reason reason;
  if (safetensors_parse(file, size + 6, &header, &reason)) {
    size_t end = 8 + text;
    for (int64_t i = 0; i < header.count; i++) {
      const SafetensorsEntry *e = &header.entries[i];
      if (e->offset != end || e->bytes > size + 6 - end) abort();
      end += e->bytes;
      float *values = malloc(e->bytes * 2 + 1);
      safetensors_convert(e->dtype, file + e->offset,
                          (int64_t)(e->bytes / (e->dtype[0] == 'F' && e->dtype[1] == '3' ? 4 : 2)), DTYPE_F32,
                          values);
      free(values);
    }
    if (end != size + 6) abort();
    free(safetensors_compose(header.entries, header.count));
    safetensors_free(&header);
  }
  free(file);
  return 0;
}
