// llm.c's token shards, and their masks, in memory. source.h says what the files hold.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fail.h"

// out[i] = from[i], of unsigned integers of 1, 2 or 4 bytes; one above INT32_MAX comes out negative.
void ids_widen(const void *from, int bytes_each, int64_t count, int32_t *out);

typedef struct {
  int token_bytes;    // 2 or 4
  const void *tokens; // within the file
  int64_t count;
} Shard;

// Whether a file's first bytes are a shard's.
bool shard_has_magic(const void *bytes, size_t size);
// Checks a file against its header; false with a reason, which reads on from the file's name.
bool shard_parse(const void *bytes, size_t size, Shard *shard, Reason *reason);
// The same for a file of a bit for each token of a shard of `count`; NULL with a reason, or the bits.
typedef enum { SHARD_MASK = 20261120, SHARD_ENDS = 20261121 } ShardBits; // its magic
const uint8_t *shard_parse_bits(const void *bytes, size_t size, ShardBits kind, int64_t count,
                                Reason *reason);
