// A run's tokens as text: by a tokenizer.json, byte by byte, or not at all.
#pragma once

#include "data/source.h"
#include "data/tokenizer.h"
#include "trainer/options.h"

typedef struct {
  Tokenizer *tokenizer; // or NULL
  bool bytes;           // without a tokenizer: a byte is a token
  int32_t *tokens;      // what samples continue
  int64_t count;
} Prompt;

// That of `named` (a file or directory), else of `directory`; NULL: neither has one. Where this program cannot use the
// directory's it fails, or unless one is required warns and returns NULL. The caller closes it.
Tokenizer *prompt_tokenizer(const char *named, const char *directory, bool required);

// --prompt in the tokens of --tokenizer or of the model that the run begins with, else in bytes where the data are
// text, else the data's first token. Fails when a token is none of the model's. The caller closes it.
Prompt prompt_open(const Options *options, const Source *source);
void prompt_close(Prompt *prompt);

// The bytes of text that each id of a vocabulary stands for in the tokens of `source`: what bits per byte divide by. NULL
// when nothing says. The caller frees it.
int32_t *prompt_token_bytes(const Prompt *prompt, const Source *source, int64_t vocab_size);

// Tokens as text that is safe to print on a terminal; NULL when nothing says what they mean. The caller frees it.
char *prompt_show(const Prompt *prompt, const int32_t *tokens, int64_t count);
