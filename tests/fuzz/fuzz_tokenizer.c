// tokenizer.json out of the fuzzer's bytes, up to the first zero byte; what follows is text to encode. Ids
// must be the tokenizer's.
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void encode(Tokenizer *t, const char *text, int64_t length) {
  Reason reason;
  int64_t count, back;
  int32_t *ids = tokenizer_encode(t, text, length, true, &count, &reason);
  if (!ids) return;
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= tokenizer_size(t)) abort();
  free(tokenizer_decode(t, ids, count, &back));
  free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const uint8_t *end = memchr(data, 0, size);
  size_t length = end ? (size_t)(end - data) : size;
  Reason reason;
  Tokenizer *t = tokenizer_parse((const char *)data, length, &reason);
  if (!t) return 0;
  const int32_t ids[] = {0, 1, -1, (int32_t)tokenizer_size(t) - 1, (int32_t)tokenizer_size(t)};
  free(tokenizer_show(t, ids, 5));
  if (end) encode(t, (const char *)end + 1, (int64_t)(size - length - 1));
  tokenizer_close(t);
  return 0;
}
