// The tokenizer that needs no file: a byte is a token (ids 0..255), and END_OF_TEXT (256) parts documents.
#ifndef LCE_DATA_TOKENIZER_BYTE_TOKENIZER_H
#define LCE_DATA_TOKENIZER_BYTE_TOKENIZER_H

#include <stdint.h>

// tokens[i] = text[i] as 0..255, for i in [0, length).
void byte_encode(const char *text, int64_t length, int32_t *tokens);

// The text of tokens[0..count), safe to print on a terminal: well-formed UTF-8, newline and tab stay as they
// are; other control characters and bytes that are no UTF-8 show as \xNN; END_OF_TEXT shows as
// "<|endoftext|>" on a line of its own; any other id shows as U+FFFD. The caller frees it.
char *byte_decode(const int32_t *tokens, int64_t count);

#endif
