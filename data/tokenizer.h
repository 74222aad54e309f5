// Token ids to text, by the vocabulary of a Hugging Face tokenizer.json: a byte-level BPE as GPT-2 and Llama
// 3 have it (Radford et al. 2019; Sennrich et al. 2016). Python encodes: tools/prepare_data.py and
// tools/generate.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/base/fail.h"

typedef struct Tokenizer Tokenizer;

// A tokenizer.json, or the one in a directory; NULL with a reason that names the file. The caller closes it.
Tokenizer *tokenizer_open(const char *path, Reason *reason);
// The same from the file's text.
Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason);
// Without a file: a byte is a token, and END_OF_TEXT shows as "<|endoftext|>" on a line of its own.
Tokenizer *tokenizer_of_bytes(void);
void tokenizer_close(Tokenizer *tokenizer); // NULL is fine

int64_t tokenizer_vocab_size(const Tokenizer *tokenizer); // the largest id + 1

// The length of a token's text: 0 for a special token or an unknown id.
int64_t tokenizer_bytes(const Tokenizer *tokenizer, int64_t id);
// The first token with this text that is not special, or -1.
int32_t tokenizer_find(const Tokenizer *tokenizer, const char *text);

// The tokens' bytes, U+FFFD for an unknown id, and a 0 that *length does not count. The caller frees them.
char *tokenizer_decode(const Tokenizer *tokenizer, const int32_t *ids, int64_t count, int64_t *length);

// The same for a terminal: control characters but newline and tab, and what is not UTF-8, show as \xNN.
char *tokenizer_show(const Tokenizer *tokenizer, const int32_t *ids, int64_t count);
