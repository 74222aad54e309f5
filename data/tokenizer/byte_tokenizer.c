#include "base/fail.h"
#include "base/text.h"
#include "data/source.h"
#include "data/tokenizer/tokenizer.h"

#include <stdbool.h>
#include <stdio.h>

void byte_encode(const char *text, int64_t length, int32_t *tokens) {
  for (int64_t i = 0; i < length; i++) tokens[i] = (unsigned char)text[i];
}

char *byte_decode(const int32_t *tokens, int64_t count) {
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) fail("out of memory for a text of %lld tokens", (long long)count);
  for (int64_t i = 0; i < count;) {
    if (tokens[i] == END_OF_TEXT) {
      fputs("\n<|endoftext|>\n", out);
      i++;
    } else if (tokens[i] < 0 || tokens[i] > 255) {
      fputs("\xEF\xBF\xBD", out);
      i++;
    } else {
      char next[4], shown[17];
      size_t have = 0;
      for (; have < sizeof next && i + (int64_t)have < count && (uint32_t)tokens[i + (int64_t)have] < 256;
           have++)
        next[have] = (char)tokens[i + (int64_t)have];
      int length = utf8_length(next, have);
      if (length == 0) length = 1;
      text_escape(shown, sizeof shown, next, (size_t)length);
      bool layout = *next == '\n' || *next == '\t';
      layout ? fputc(*next, out) : fputs(shown, out);
      i += length;
    }
  }
  if (fclose(out) != 0) fail("out of memory for a text of %lld tokens", (long long)count);
  return text;
}
