// A run's data, and its tokens as text: by a tokenizer.json, byte by byte, or not at all.
#pragma once

#include "data/source.h"
#include "data/tokenizer.h"
#include "trainer/options.h"

typedef struct {
  Source *source, *val_source; // val_source: of --val-data, or NULL
  Loader loader;
  char text[256]; // loader_describe's
} RunData;

RunData run_data_open(const Options *options);
void run_data_close(RunData *data);

typedef struct {
  Tokenizer *tokenizer; // or NULL: nothing says what tokens mean
  int32_t *tokens;      // what samples continue
  int64_t count;
} Prompt;

// --prompt in the tokens of --tokenizer or of the model that the run begins with, else in bytes where the data are
// text, else the data's first token. Without a source (NULL) there are no data. Fails when a token is none of the
// model's, and, where the tokenizer was named or there are no data, when this program cannot use it; otherwise that is a
// warning. The caller closes it.
Prompt prompt_open(const Options *options, const Source *source);
void prompt_close(Prompt *prompt);

// The bytes of text that each id of a vocabulary stands for in the tokens of `source`: what bits per byte divide by. NULL
// when nothing says. The caller frees it.
int32_t *prompt_token_bytes(const Prompt *prompt, const Source *source, int64_t vocab_size);
