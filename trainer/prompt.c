#include "trainer/prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"

Tokenizer *prompt_tokenizer(const char *named, const char *directory, bool required) {
  if (named) return tokenizer_open(named);
  if (!directory) return NULL;
  char *path = path_join(directory, "tokenizer.json");
  size_t length;
  char *text = file_read(path, &length);
  Reason reason;
  Tokenizer *tokenizer = text ? tokenizer_parse(text, length, &reason) : NULL;
  if (text && !tokenizer && required)
    fail("%s is no tokenizer that this program can use: %s", path, reason.text);
  if (text && !tokenizer) warn("%s is not used, and samples are not shown as text: %s", path, reason.text);
  free(text);
  free(path);
  return tokenizer;
}

static void check(const Options *o, const Prompt *p) {
  if (p->count < 1) fail("--prompt \"%s\" has no token; give another", o->prompt);
  for (int64_t i = 0; i < p->count; i++)
    if (p->tokens[i] < 0 || p->tokens[i] >= o->model.vocab_size)
      fail("--prompt: %s %lld is %d and the vocabulary has %lld; give another prompt or %s",
           p->bytes ? "byte" : "token", (long long)i, p->tokens[i], (long long)o->model.vocab_size,
           p->bytes ? "raise --vocab" : "the tokenizer that the model was made for");
}

// NULL where the tokenizer cannot encode, unless it or the prompt was asked for.
static int32_t *encode_prompt(const Options *o, const Tokenizer *tokenizer, int64_t *count) {
  Reason reason;
  int32_t *tokens =
      tokenizer_try_encode(tokenizer, o->prompt, (int64_t)strlen(o->prompt), true, count, &reason);
  if (tokens) return tokens;
  if (o->tokenizer || options_given(o, "prompt")) fail("--prompt: %s", reason.text);
  warn("samples begin with the data's first token: %s", reason.text);
  return NULL;
}

Prompt prompt_open(const Options *o, const Source *source) {
  Prompt p = {.tokenizer = prompt_tokenizer(o->tokenizer, o->origin, false)};
  int64_t length = (int64_t)strlen(o->prompt);
  p.bytes = !p.tokenizer && source->kind == SOURCE_TEXT;
  if (p.tokenizer && source->kind == SOURCE_TEXT)
    warn("%s is read byte by byte, though there is a tokenizer; tools/prepare_data.py makes its text into "
         "tokens",
         source->name);
  if (p.tokenizer) p.tokens = encode_prompt(o, p.tokenizer, &p.count);
  if (p.bytes) {
    p.tokens = host_alloc(length, sizeof *p.tokens, "the prompt");
    p.count = length;
    byte_encode(o->prompt, length, p.tokens);
  } else if (!p.tokens) {
    p.tokens = host_alloc(1, sizeof *p.tokens, "the prompt");
    p.count = 1;
    source_read(source, 0, 1, p.tokens);
  }
  if (o->sample_every) check(o, &p);
  return p;
}

void prompt_close(Prompt *p) {
  tokenizer_close(p->tokenizer);
  free(p->tokens);
  *p = (Prompt){0};
}

int32_t *prompt_token_bytes(const Prompt *p, const Source *source, int64_t vocab_size) {
  bool text = source->kind == SOURCE_TEXT;
  if (!text && !p->tokenizer) return NULL;
  int32_t *bytes = host_alloc(vocab_size, sizeof *bytes, "the tokens' lengths");
  for (int64_t id = 0; id < vocab_size; id++)
    bytes[id] = text ? id < END_OF_TEXT : (int32_t)tokenizer_bytes(p->tokenizer, id);
  return bytes;
}

char *prompt_show(const Prompt *p, const int32_t *tokens, int64_t count) {
  return p->tokenizer || p->bytes ? tokenizer_show(p->tokenizer, tokens, count) : NULL;
}
