#include "data/shard.h"

#include <string.h>

enum {
  HEADER_INTS = 256,
  HEADER_BYTES = 4 * HEADER_INTS,
  MAGIC_UINT16 = 20240520,
  VERSION_UINT16 = 1,
  MAGIC_UINT32 = 20240801,
  VERSION_UINT32 = 7,
  BITS_VERSION = 1
};

void ids_widen(const void *from, int bytes_each, int64_t count, int32_t *out) {
  if (bytes_each == 1)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint8_t *)from)[i];
  else if (bytes_each == 2)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint16_t *)from)[i];
  else
    memcpy(out, from, (size_t)count * sizeof *out);
}

static int32_t header_value(const void *bytes, int index) {
  int32_t value;
  memcpy(&value, (const char *)bytes + 4 * index, sizeof value);
  return value;
}

bool shard_has_magic(const void *bytes, size_t size) {
  if (size < 4) return false;
  int32_t magic = header_value(bytes, 0);
  return magic == MAGIC_UINT16 || magic == MAGIC_UINT32;
}

bool shard_parse(const void *bytes, size_t size, Shard *shard, Reason *reason) {
  if (size < HEADER_BYTES)
    return refuse(
        reason, "is truncated: a token shard begins with a header of %d bytes and this file ends at byte %zu",
        HEADER_BYTES, size);
  int32_t magic = header_value(bytes, 0), version = header_value(bytes, 1);
  if (!shard_has_magic(bytes, size))
    return refuse(reason,
                  "is no llm.c token shard: the magic at byte 0 is %d, not %d (uint16) or %d (uint32)", magic,
                  MAGIC_UINT16, MAGIC_UINT32);
  bool wide = magic == MAGIC_UINT32;
  int32_t known = wide ? VERSION_UINT32 : VERSION_UINT16;
  if (version != known)
    return refuse(reason,
                  "has shard version %d at byte 4 where magic %d goes with version %d: make it again with "
                  "the current llm.c format",
                  version, magic, known);
  int token_bytes = wide ? 4 : 2;
  int64_t count = header_value(bytes, 2), expected = HEADER_BYTES + count * token_bytes;
  if (count <= 0)
    return refuse(reason, "holds no tokens: the count at byte 8 of its header is %lld", (long long)count);
  if (expected > (int64_t)size)
    return refuse(reason,
                  "is truncated: the header at byte 8 promises %lld tokens, which end at byte %lld, and the "
                  "file ends at byte %zu",
                  (long long)count, (long long)expected, size);
  if (expected < (int64_t)size)
    return refuse(reason,
                  "disagrees with its header: the %lld tokens promised at byte 8 end at byte %lld, and the "
                  "file ends at byte %zu",
                  (long long)count, (long long)expected, size);
  *shard = (Shard){token_bytes, (const char *)bytes + HEADER_BYTES, count};
  return true;
}

const uint8_t *shard_parse_bits(const void *bytes, size_t size, ShardBits kind, int64_t count,
                                Reason *reason) {
  bool mask = kind == SHARD_MASK;
  const char *what = mask ? "mask" : "list of documents' ends";
  if (size < HEADER_BYTES || header_value(bytes, 0) != (int32_t)kind ||
      header_value(bytes, 1) != BITS_VERSION) {
    refuse(reason,
           "is no %s of a token shard (magic %d, version %d): make it and its shard again with "
           "tools/prepare_data.py, or remove it%s",
           what, (int)kind, BITS_VERSION, mask ? " to count every token" : " and give --end-of-text ID");
    return NULL;
  }
  int64_t claimed = header_value(bytes, 2), expected = HEADER_BYTES + (count + 7) / 8;
  if (claimed != count || (int64_t)size != expected) {
    refuse(reason,
           "is not the %s of its shard: it is for %lld tokens in %zu bytes, and %lld tokens in %lld bytes "
           "are needed",
           what, (long long)claimed, size, (long long)count, (long long)expected);
    return NULL;
  }
  return (const uint8_t *)bytes + HEADER_BYTES;
}
