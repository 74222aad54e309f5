// tokenizer.json out of the fuzzer's bytes, and what its tokens show.
#include <stdlib.h>

#include "data/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Reason reason;
  Tokenizer *t = tokenizer_parse((const char *)data, size, &reason);
  if (!t) return 0;
  const int32_t most = 1 << 22, ids[] = {0, 1, -1, most - 1, most};
  free(tokenizer_show(t, ids, 5));
  if (tokenizer_find(t, "\n") >= most) abort();
  tokenizer_close(t);
  return 0;
}
