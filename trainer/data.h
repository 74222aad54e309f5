// A run's data, and its tokens as text: by a tokenizer.json, byte by byte, or not at all.
#pragma once

#include "data/file.h"
#include "data/source.h"
#include "data/tokenizer.h"
#include "trainer/options.h"

typedef struct {
  Source *source, *val_source; // val_source: --val-data's, or NULL
  Loader loader;
  char text[256];  // loader_describe's
  char order[256]; // loader_describe_order's
  Path prepared;   // the folder that is trained on, if tools/prepare_data.py made it, tokenizer and all
} RunData;

// Opens the data. A resumed run goes on from the checkpoint's place in them or, with a warning, with a new
// pass if the windows' order is another one. Fails if a file is both trained on and validated, and if the
// tokenizer.json beside a manifest is not that of options->origin, unless other_tokenizer.
RunData run_data_open(const Options *options);
void run_data_close(RunData *data);

typedef struct {
  Tokenizer *tokenizer; // or NULL: nothing says what tokens mean
  int32_t *tokens;      // the prompt that samples continue
  int64_t count;
} Prompt;

// --prompt as tokens: text if a token is a byte (data of text, no tokenizer), else a shard (*.bin) or ids.
// Not given: a newline, or the data's first token if none is known to be a newline. Fails on anything else,
// on a token outside the vocabulary, and on a --tokenizer that cannot be used; a model's own one warns.
// Without either, the tokenizer is that of `data`, if it can be used.
Prompt prompt_open(const Options *options, const RunData *data);
void prompt_close(Prompt *prompt);
// The ids of a list such as "15496,995" or "15496 995", an array of stb_ds.h that the caller frees; NULL: it
// is no such list. Fails if an id is outside the vocabulary.
int32_t *prompt_ids(const char *list, int64_t vocab_size);
// Each id's bytes of text in the validation data, for bits per byte; NULL: not known. The caller frees it.
int32_t *prompt_token_bytes(const Prompt *prompt, const RunData *data, int64_t vocab_size);
