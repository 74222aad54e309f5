#include "kernels/base/text.h"

#include <ctype.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Text text_of(const char *format, ...) {
  Text t;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(t.text, sizeof t.text, format, arguments);
  va_end(arguments);
  return t;
}

Text text_bytes(uint64_t bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = (double)bytes;
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, unit++;
  return text_of("%.*f %s", unit == 0 ? 0 : unit >= 3 ? 2 : 1, value, units[unit]);
}

Text text_count(double count) {
  static const char *const units[] = {"", "K", "M", "B", "T"};
  int unit = 0;
  while (count >= 1000 && unit < 4) count /= 1000, unit++;
  int decimals = unit == 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2;
  return text_of("%.*f%s", decimals, count, units[unit]);
}

Text text_duration(double seconds) {
  int64_t s = seconds > 0 ? (int64_t)(seconds + 0.5) : 0;
  if (s < 60) return text_of("%ds", (int)s);
  if (s < 3600) return text_of("%dm %02ds", (int)(s / 60), (int)(s % 60));
  if (s < 86400) return text_of("%dh %02dm", (int)(s / 3600), (int)(s / 60 % 60));
  return text_of("%lldd %02dh", (long long)(s / 86400), (int)(s / 3600 % 24));
}

Text text_grouped(int64_t number) {
  Text t, digits = text_of("%lld", (long long)number);
  size_t length = strlen(digits.text), out = 0;
  for (size_t i = 0; i < length; i++) {
    t.text[out++] = digits.text[i];
    size_t left = length - 1 - i;
    if (left > 0 && left % 3 == 0 && digits.text[i] != '-') t.text[out++] = ',';
  }
  t.text[out] = 0;
  return t;
}

Text text_number(double number) {
  Text t;
  int digits = 15; // fewer come out where fewer suffice
  do t = text_of("%.*g", digits, number);
  while (strtod(t.text, NULL) != number && digits++ < 17);
  return t;
}

bool text_ends_in(const char *text, const char *end) {
  size_t length = strlen(text), tail = strlen(end);
  return length >= tail && !strcmp(text + length - tail, end);
}

// Unicode's table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF.
int utf8_length(const char *text, size_t count) {
  const unsigned char *t = (const unsigned char *)text;
  unsigned char lead = count ? t[0] : 0xFF, low = 0x80, high = 0xBF;
  if (lead < 0x80) return 1;
  int length = lead >= 0xC2 && lead <= 0xDF ? 2 : lead >= 0xE0 && lead <= 0xEF ? 3 : 4;
  if (lead < 0xC2 || lead > 0xF4 || (size_t)length > count) return 0;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  if (t[1] < low || t[1] > high) return 0;
  for (int i = 2; i < length; i++)
    if (t[i] < 0x80 || t[i] > 0xBF) return 0;
  return length;
}

bool utf8_valid(const char *text) {
  size_t left = strlen(text);
  for (int length; left; text += length, left -= (size_t)length)
    if (!(length = utf8_length(text, left))) return false;
  return true;
}

// C0, DEL, and C1 (U+0080..U+009F, which is C2 80..C2 9F): what moves a cursor or starts an escape sequence.
static bool is_control(const char *character) {
  unsigned char first = (unsigned char)character[0];
  return first < 0x20 || first == 0x7F || (first == 0xC2 && (unsigned char)character[1] < 0xA0);
}

void text_escape(char *out, size_t size, const char *text, size_t count) {
  while (count) {
    int length = utf8_length(text, count), taken = length ? length : 1;
    bool shown = length && !is_control(text);
    size_t needed = (size_t)taken * (shown ? 1 : 4);
    if (needed >= size) break;
    for (int i = 0; i < taken; i++)
      shown ? (out[i] = text[i]) : sprintf(out + 4 * i, "\\x%02X", (unsigned)(unsigned char)text[i]);
    out += needed, size -= needed, text += taken, count -= (size_t)taken;
  }
  *out = 0;
}

const char *text_shell_word(const char *path) {
  static char quoted[2 * PATH_MAX], word[8 * PATH_MAX];
  size_t length = 0, plain = 0;
  while (path[plain] && (isalnum((unsigned char)path[plain]) || strchr("/._-+=,:@%", path[plain]))) plain++;
  if (!path[plain]) return path;
  for (; *path && length < sizeof quoted - 4; quoted[length++] = *path++)
    if (*path == '\'' || *path == '\\') quoted[length++] = '\\';
  memcpy(word, "$'", 2);
  text_escape(word + 2, sizeof word - 4, quoted, length);
  return strcat(word, "'");
}
