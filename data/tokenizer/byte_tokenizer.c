#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/text.h"
#include "data/source.h"
#include "data/tokenizer/tokenizer.h"

void byte_encode(const char *text, int64_t length, int32_t *tokens) {
  for (int64_t i = 0; i < length; i++) tokens[i] = (unsigned char)text[i];
}

char *byte_decode(const int32_t *tokens, int64_t count) {
  static const char end_of_text[] = "\n<|endoftext|>\n";
  char *bytes = host_alloc(count * (int64_t)sizeof end_of_text + 1, 1, "a text"), *out = bytes;
  for (int64_t i = 0; i < count; i++) {
    if (tokens[i] == END_OF_TEXT)
      out = stpcpy(out, end_of_text);
    else if (tokens[i] < 0 || tokens[i] > 255)
      out = stpcpy(out, "\xEF\xBF\xBD");
    else
      *out++ = (char)tokens[i];
  }
  char *text = bytes_show(bytes, out - bytes);
  free(bytes);
  return text;
}

char *bytes_show(const char *bytes, int64_t length) {
  char *text = host_alloc(4 * length + 1, 1, "a text"), *out = text;
  for (int64_t i = 0, taken; i < length; i += taken) {
    taken = utf8_length(bytes + i, (size_t)(length - i));
    if (taken == 0) taken = 1;
    if (bytes[i] == '\n' || bytes[i] == '\t')
      *out++ = bytes[i];
    else
      text_escape(out, (size_t)(4 * taken + 1), bytes + i, (size_t)taken);
    out += strlen(out);
  }
  return text;
}
