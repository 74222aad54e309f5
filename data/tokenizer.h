// Token ids to text, by the vocabulary of a Hugging Face tokenizer.json: the byte-level BPE of GPT-2, Llama 3
// and similar models (Radford et al. 2019; Sennrich et al. 2016). Python makes text into ids:
// tools/prepare_data.py and tools/generate, with `tokenizers`.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/fail.h"

typedef struct Tokenizer Tokenizer;

// Opens a tokenizer.json, or the one in a directory; NULL with a reason, which names the file, when it is
// missing, damaged, or no byte-level BPE. The caller closes it.
Tokenizer *tokenizer_open(const char *path, Reason *reason);
// The same from the file's text.
Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason);
// Without a file: a byte is a token (ids 0..255), and END_OF_TEXT shows as "<|endoftext|>" on a line of its
// own.
Tokenizer *tokenizer_of_bytes(void);
void tokenizer_close(Tokenizer *tokenizer); // NULL is fine

int64_t tokenizer_size(const Tokenizer *tokenizer); // the largest id + 1
// The bytes of text that a token stands for: 0 of a special token, and of an id that is none.
int64_t tokenizer_bytes(const Tokenizer *tokenizer, int64_t id);
// The first token that is this text and not special; -1: there is none.
int32_t tokenizer_find(const Tokenizer *tokenizer, const char *text);

// The bytes of the tokens one after the other, a character perhaps cut in two at either end; an id that is
// none shows as U+FFFD. The caller frees them; a terminator follows that *length does not count.
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int64_t count, int64_t *length);

// The same as text that is safe to print on a terminal: well-formed UTF-8, newline and tab stay as they are;
// other control characters and bytes that are no UTF-8 show as \xNN. The caller frees it.
char *tokenizer_show(const Tokenizer *tokenizer, const int32_t *ids, int64_t count);
