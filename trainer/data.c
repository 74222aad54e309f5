#include "trainer/data.h"

#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"

RunData run_data_open(const Options *o) {
  RunData d = {.source = source_open(o->data.items, o->data.count, o->model.vocab_size)};
  if (o->val_data.count)
    d.val_source = source_open(o->val_data.items, o->val_data.count, o->model.vocab_size);
  if (o->pack) source_pack(d.source, o->seq_len, o->end_of_text);
  if (o->pack && d.val_source) source_pack(d.val_source, o->seq_len, o->end_of_text);
  d.loader = loader_create((LoaderOptions){.source = d.source,
                                           .validation_source = d.val_source,
                                           .validation_fraction = o->val_fraction,
                                           .batch = o->batch,
                                           .seq_len = o->seq_len,
                                           .seed = o->seed,
                                           .order = o->data_order});
  loader_describe(&d.loader, d.text, sizeof d.text);
  return d;
}

void run_data_close(RunData *d) {
  source_close(d->val_source);
  source_close(d->source);
  *d = (RunData){0};
}

// A tokenizer that nobody named ends no training: it serves the samples alone.
static Tokenizer *open_tokenizer(const Options *o, const Source *source) {
  bool text = source && source->kind == SOURCE_TEXT;
  Path own = path_in(o->origin ? o->origin : ".", "tokenizer.json");
  const char *path = o->tokenizer ? o->tokenizer : o->origin && path_exists(own.text) ? own.text : NULL;
  Reason reason;
  Tokenizer *tokenizer = path ? tokenizer_open(path, &reason) : NULL;
  if (path && !tokenizer && (o->tokenizer || !source)) fail("%s", reason.text);
  if (path && !tokenizer) warn("%s is not used, and samples are not shown as text: %s", path, reason.text);
  if (tokenizer && text)
    warn("%s is read byte by byte, though there is a tokenizer; tools/prepare_data.py makes its text into "
         "tokens",
         source->name);
  return tokenizer || (source && !text) ? tokenizer : tokenizer_of_bytes();
}

Prompt prompt_open(const Options *o, const Source *source) {
  Prompt p = {.tokenizer = open_tokenizer(o, source)};
  Reason reason;
  if (p.tokenizer)
    p.tokens = tokenizer_encode(p.tokenizer, o->prompt, (int64_t)strlen(o->prompt), true, &p.count, &reason);
  if (p.tokenizer && !p.tokens) {
    if (!source || o->tokenizer || options_given(o, "prompt")) fail("--prompt: %s", reason.text);
    warn("samples begin with the data's first token: %s", reason.text);
  }
  if (!p.tokens) {
    p.tokens = host_alloc(1, sizeof *p.tokens, "the prompt");
    p.count = 1;
    source_read(source, 0, 1, p.tokens);
  }
  if (p.count < 1) fail("--prompt: give at least one character to continue");
  for (int64_t i = 0; i < p.count && (!source || o->sample_every); i++)
    if (p.tokens[i] >= o->model.vocab_size)
      fail("--prompt: token %lld is %d and the vocabulary has %lld; give another prompt or the model's own "
           "--tokenizer",
           (long long)i, p.tokens[i], (long long)o->model.vocab_size);
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
