// The safetensors format: 8 bytes with the header's length, the header in JSON, the values.
//
//     {"__metadata__": {"format": "pt"}, "model.norm.weight": {"dtype": "BF16", "shape": [4096],
//     "data_offsets": [0, 8192]}, ...}
//
// Offsets count from the header's end. The tensors fill the rest of the file without gaps or overlaps; anything else is
// refused with a reason, and every length and offset is checked against the file before it is used.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/fail.h"
#include "kernels/tensor.h"

enum { SAFETENSORS_RANK = 8, SAFETENSORS_NAME = 256 };

// Where a tensor lies in its file.
typedef struct {
  char *name;
  const char *dtype; // the format's name: "F32", "BF16", "F16", "I64", ...
  int rank;
  int64_t shape[SAFETENSORS_RANK];
  size_t offset, bytes; // from the file's first byte
} SafetensorsEntry;

typedef struct {
  SafetensorsEntry *entries; // in the file's order
  int64_t count;
} SafetensorsHeader;

// Reads a file's header, to be freed by safetensors_free. False with a reason, and an empty one, where it is not valid.
bool safetensors_parse(const char *bytes, size_t size, SafetensorsHeader *header, Reason *reason);
void safetensors_free(SafetensorsHeader *header);

// "[32, 64]", for messages.
TensorText safetensors_shape(const SafetensorsEntry *entry);

// The format's name of a dtype: "F32", "BF16" or "I32".
const char *safetensors_dtype(Dtype dtype);

// The first bytes of a file whose tensors follow in this order (only name, dtype, rank, shape and bytes are
// read): length and header, padded to a multiple of 8. The caller frees them.
char *safetensors_compose(const SafetensorsEntry *entries, int64_t count, size_t *length);

// `count` elements at `from` (any alignment) as fp32, exactly; false where dtype is none of F32, F16 and BF16.
bool safetensors_widen(const char *dtype, const char *from, int64_t count, float *to);
