// Numbers as people read them, and text that is safe to print.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  char text[48];
} Text;

Text text_of(const char *format, ...) __attribute__((format(printf, 1, 2)));
Text text_bytes(uint64_t bytes);    // "0 B", "512 B", "12.3 KiB", "978.5 MiB", "15.66 GiB"
Text text_count(double count);      // "950", "12.4K", "124M", "8.03B"
Text text_duration(double seconds); // "45s", "3m 05s", "2h 14m", "3d 04h"
Text text_grouped(int64_t number);  // "128,256"
Text text_number(double number);    // "0.1", "500000", "1e-05": the fewest digits that read back the same

bool text_ends_in(const char *text, const char *end);
// The bytes of the well-formed UTF-8 character that text[0..count) begins with; 0 if none.
int utf8_length(const char *text, size_t count);
bool utf8_valid(const char *text);
// One line of valid UTF-8: bytes of control characters or of no character become \x1B. Cut to whole
// characters that fit `size` with the 0 at the end; 4 * count + 1 always suffice.
void text_escape(char *out, size_t size, const char *text, size_t count);
// A path as a shell takes it, without what a terminal would act on; valid until the next call.
const char *text_shell_word(const char *path);
