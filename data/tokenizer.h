// Text to token ids and back, by a Hugging Face tokenizer.json: the byte-level BPE of GPT-2, Llama 3 and
// similar models (Radford et al. 2019; Sennrich et al. 2016).
//
// Decoding needs the vocabulary alone. Encoding takes three steps: added tokens ("<|endoftext|>") are cut out
// of the text; regular expressions split the rest into pieces (PCRE2);
// and within a piece the pair of tokens that was learned first is merged, again and again.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/fail.h"

typedef struct Tokenizer Tokenizer;

// Opens a tokenizer.json, or the one in a directory; NULL with a reason, which names the file, when it is missing, damaged,
// or no byte-level BPE. The caller closes it.
Tokenizer *tokenizer_open(const char *path, Reason *reason);
// The same from the file's text.
Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason);
// Without a file: a byte is a token (ids 0..255), and END_OF_TEXT shows as "<|endoftext|>" on a line of its own.
Tokenizer *tokenizer_of_bytes(void);
void tokenizer_close(Tokenizer *tokenizer); // NULL is fine

int64_t tokenizer_size(const Tokenizer *tokenizer); // the largest id + 1
// The bytes of text that a token stands for: 0 of a special token, and of an id that is none.
int64_t tokenizer_bytes(const Tokenizer *tokenizer, int64_t id);

// The ids of UTF-8 text, with `special` also those that the file puts around every text ("<|begin_of_text|>"). The
// caller frees them; *count receives how many. A normalizer to NFC (Qwen) is not applied: text is taken to be in that
// form, as nearly all is. NULL with a reason when the text is not UTF-8 or the file needs something this program does not
// do (decoding still works).
int32_t *tokenizer_encode(Tokenizer *tokenizer, const char *text, int64_t length, bool special,
                          int64_t *count, Reason *reason);

// The bytes of the tokens one after the other, a character perhaps cut in two at either end; an id that is none shows as
// U+FFFD. The caller frees them; a terminator follows that *length does not count.
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int64_t count, int64_t *length);

// The same as text that is safe to print on a terminal (see bytes_show).
char *tokenizer_show(const Tokenizer *tokenizer, const int32_t *ids, int64_t count);

// Bytes as text that is safe to print on a terminal: well-formed UTF-8, newline and tab stay as they are; other control
// characters and bytes that are no UTF-8 show as \xNN. The caller frees it.
char *bytes_show(const char *bytes, int64_t length);
