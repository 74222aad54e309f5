// The safetensors format: 8 bytes with the header's length, the header in JSON, the values.
//
//     {"__metadata__": {"format": "pt"}, "model.norm.weight": {"dtype": "BF16", "shape": [4096],
//     "data_offsets": [0, 8192]}, ...}
//
// Offsets count from the header's end. The tensors fill the rest of the file without gaps or overlaps;
// anything else is refused. Every length and offset is checked before it is used.
#pragma once

#include "data/json.h"
#include "kernels/base/tensor.h"

enum { SAFETENSORS_RANK = 8, SAFETENSORS_NAME = 256 };

// A tensor's place in its file.
typedef struct {
  const char *name;
  const char *dtype; // the format's name: "F32", "BF16", "F16", "I64", ...
  int rank;
  int64_t shape[SAFETENSORS_RANK];
  size_t offset, bytes; // from the file's first byte
} SafetensorsEntry;

typedef struct {
  cJSON *json;               // holds the names
  SafetensorsEntry *entries; // in the file's order
  int64_t count;
} SafetensorsHeader;

// Reads a file's header, which safetensors_free frees. False with a reason, and nothing to free.
bool safetensors_parse(const char *bytes, size_t size, SafetensorsHeader *header, Reason *reason);
void safetensors_free(SafetensorsHeader *header);

TensorText safetensors_shape(const SafetensorsEntry *entry); // "[32, 64]", for messages
const char *safetensors_dtype(Dtype dtype);                  // "F32", "BF16" or "I32"

// The header of a file with these tensors, padded to a multiple of 8 bytes. The caller frees it.
char *safetensors_compose(const SafetensorsEntry *entries, int64_t count);

// `count` elements at `from`, unaligned, as fp32 or bf16; false if `stored` is not F32, F16 or BF16.
bool safetensors_convert(const char *stored, const char *from, int64_t count, Dtype dtype, void *to);
