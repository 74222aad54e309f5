// A shard and its mask of the fuzzer's bytes, cut where the first two say. What is accepted lies within them.
#include <stdlib.h>
#include <string.h>

#include "data/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 2) return 0;
  size_t cut = (size_t)(data[0] | data[1] << 8) % (size - 1), rest = size - 2 - cut;
  uint8_t *file = malloc(cut + 1),
          *mask_file = malloc(rest + 1); // of their own, so that reading past one shows
  memcpy(file, data + 2, cut);
  memcpy(mask_file, data + 2 + cut, rest);
  Reason reason;
  Shard shard, mask;
  unsigned sum = 0;
  if (shard_parse(file, cut, SHARD_TOKENS, &shard, &reason))
    for (int64_t i = 0; i < shard.count * shard.bits / 8; i++) sum += ((const uint8_t *)shard.data)[i];
  if (shard_parse(mask_file, rest, SHARD_MASK, &mask, &reason))
    for (int64_t i = 0; i < mask.count; i++) sum += ((const uint8_t *)mask.data)[i / 8] >> (i % 8) & 1;
  if (sum == 1u << 31) abort(); // never; keeps the reads
  free(file);
  free(mask_file);
  return 0;
}
