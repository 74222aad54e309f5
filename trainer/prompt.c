#include "trainer/prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"

Tokenizer *prompt_tokenizer(const char *named, const char *directory) {
  if (named) return tokenizer_open(named);
  if (!directory) return NULL;
  char *path = path_join(directory, "tokenizer.json");
  Tokenizer *tokenizer = path_exists(path) ? tokenizer_open(path) : NULL;
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

Prompt prompt_open(const Options *o, const Source *source) {
  Prompt p = {.tokenizer = prompt_tokenizer(o->tokenizer, o->origin)};
  int64_t length = (int64_t)strlen(o->prompt);
  p.bytes = !p.tokenizer && source->kind == SOURCE_TEXT;
  if (p.tokenizer && source->kind == SOURCE_TEXT)
    warn("%s is read byte by byte, though there is a tokenizer; tools/prepare_data.py makes its text into "
         "tokens",
         source->name);
  if (p.tokenizer) {
    p.tokens = tokenizer_encode(p.tokenizer, o->prompt, length, true, &p.count);
  } else if (p.bytes) {
    p.tokens = host_alloc(length, sizeof *p.tokens, "the prompt");
    p.count = length;
    byte_encode(o->prompt, length, p.tokens);
  } else {
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

char *prompt_show(const Prompt *p, const int32_t *tokens, int64_t count) {
  if (p->tokenizer) return tokenizer_show(p->tokenizer, tokens, count);
  return p->bytes ? byte_decode(tokens, count) : NULL;
}
