#include "base/text.h"

#include <stdio.h>
#include <string.h>

Text text_bytes(uint64_t bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = (double)bytes;
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, unit++;
  Text t;
  snprintf(t.text, sizeof t.text, "%.*f %s", unit == 0 ? 0 : unit >= 3 ? 2 : 1, value, units[unit]);
  return t;
}

Text text_count(double count) {
  static const char *const units[] = {"", "K", "M", "B", "T"};
  int unit = 0;
  while (count >= 1000 && unit < 4) count /= 1000, unit++;
  Text t;
  int decimals = unit == 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2;
  snprintf(t.text, sizeof t.text, "%.*f%s", decimals, count, units[unit]);
  return t;
}

Text text_duration(double seconds) {
  int64_t s = seconds > 0 ? (int64_t)(seconds + 0.5) : 0;
  Text t;
  if (s < 60)
    snprintf(t.text, sizeof t.text, "%ds", (int)s);
  else if (s < 3600)
    snprintf(t.text, sizeof t.text, "%dm %02ds", (int)(s / 60), (int)(s % 60));
  else if (s < 86400)
    snprintf(t.text, sizeof t.text, "%dh %02dm", (int)(s / 3600), (int)(s / 60 % 60));
  else
    snprintf(t.text, sizeof t.text, "%lldd %02dh", (long long)(s / 86400), (int)(s / 3600 % 24));
  return t;
}

Text text_grouped(int64_t number) {
  char digits[24];
  snprintf(digits, sizeof digits, "%lld", (long long)number);
  Text t;
  size_t length = strlen(digits), out = 0;
  for (size_t i = 0; i < length; i++) {
    t.text[out++] = digits[i];
    size_t left = length - 1 - i;
    if (left > 0 && left % 3 == 0 && digits[i] != '-') t.text[out++] = ',';
  }
  t.text[out] = 0;
  return t;
}
