#include "base/fail.h"
#include "data/source.h"
#include "data/tokenizer/tokenizer.h"

#include <stdbool.h>
#include <stdio.h>

void byte_encode(const char *text, int64_t length, int32_t *tokens) {
  for (int64_t i = 0; i < length; i++) tokens[i] = (unsigned char)text[i];
}

// The number of tokens that make up the well-formed UTF-8 character at tokens[0], 0 when there is none
// (Unicode's table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF).
static int utf8_length(const int32_t *tokens, int64_t count) {
  int32_t lead = tokens[0], low = 0x80, high = 0xBF;
  if (lead < 0x80) return 1;
  int length = lead >= 0xC2 && lead <= 0xDF ? 2 : lead >= 0xE0 && lead <= 0xEF ? 3 : 4;
  if (lead < 0xC2 || lead > 0xF4 || length > count) return 0;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  if (tokens[1] < low || tokens[1] > high) return 0;
  for (int i = 2; i < length; i++)
    if (tokens[i] < 0x80 || tokens[i] > 0xBF) return 0;
  return length;
}

// C0, DEL, and C1 (U+0080..U+009F, which is C2 80..C2 9F): what moves a cursor or starts an escape sequence.
static bool is_control(const int32_t *character) {
  int32_t c = character[0];
  return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F || (c == 0xC2 && character[1] < 0xA0);
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
      int length = utf8_length(tokens + i, count - i);
      bool shown = length > 0 && !is_control(tokens + i);
      for (int end = length > 0 ? length : 1, k = 0; k < end; k++, i++)
        shown ? fputc(tokens[i], out) : fprintf(out, "\\x%02X", (unsigned)tokens[i]);
    }
  }
  if (fclose(out) != 0) fail("out of memory for a text of %lld tokens", (long long)count);
  return text;
}
