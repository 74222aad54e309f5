#include "trainer/data.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/text.h"

RunData run_data_open(const Options *o) {
  RunData d = {.source = source_open(o->data, arrlen(o->data), o->model.vocab_size)};
  if (o->val_data) d.val_source = source_open(o->val_data, arrlen(o->val_data), o->model.vocab_size);
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
}

// A tokenizer that nobody named ends no training: it serves the samples alone.
static Tokenizer *open_tokenizer(const Options *o, const Source *source, const char *path) {
  Reason reason;
  Tokenizer *tokenizer = path ? tokenizer_open(path, &reason) : NULL;
  if (path && !tokenizer && o->tokenizer) fail("%s", reason.text);
  if (path && !tokenizer) warn("%s is not used, and samples are not shown as text: %s", path, reason.text);
  if (tokenizer && source->kind == SOURCE_TEXT)
    warn("%s is read byte by byte, despite a tokenizer; tools/prepare_data.py makes tokens of it",
         source->name);
  return tokenizer;
}

static void put_token(int32_t **tokens, long long token, int64_t vocab_size) {
  if (token >= vocab_size)
    fail("--prompt: token %lld is %lld and the vocabulary has %lld; give another prompt, or ids by the "
         "model's own tokenizer",
         (long long)arrlen(*tokens), token, (long long)vocab_size);
  arrput(*tokens, (int32_t)token);
}

int32_t *prompt_ids(const char *list, int64_t vocab_size) {
  static const char between[] = ", \t\n";
  int32_t *ids = NULL;
  char *end;
  for (const char *at = list + strspn(list, between); *at; at = end + strspn(end, between)) {
    long long id = isdigit((unsigned char)*at) ? strtoll(at, &end, 10) : -1;
    if (id < 0 || !strchr(between, *end)) {
      arrfree(ids);
      return NULL;
    }
    put_token(&ids, id, vocab_size);
  }
  return ids;
}

// All tokens of a shard.
static int32_t *prompt_shard(const char *path, int64_t vocab_size) {
  enum { MOST = 1 << 20 };
  int32_t *tokens = NULL;
  Source *shard = source_open(&path, 1, vocab_size);
  if (shard->tokens > MOST)
    fail("--prompt %s: it has %lld tokens; give a shard of at most %d", path, (long long)shard->tokens, MOST);
  arrsetlen(tokens, shard->tokens);
  source_read(shard, 0, shard->tokens, tokens);
  source_close(shard);
  return tokens;
}

Prompt prompt_open(const Options *o, const Source *source) {
  Path own = path_in(o->origin ? o->origin : ".", "tokenizer.json");
  const char *path = o->tokenizer ? o->tokenizer : o->origin && path_exists(own.text) ? own.text : NULL;
  Prompt p = {.tokenizer = open_tokenizer(o, source, path)};
  int64_t vocab_size = o->model.vocab_size;
  if (!p.tokenizer && source->kind == SOURCE_TEXT) {
    p.tokenizer = tokenizer_of_bytes();
    for (const char *byte = o->prompt; *byte; byte++)
      put_token(&p.tokens, (unsigned char)*byte, o->sample_every ? vocab_size : INT32_MAX);
  } else if (!options_given(o, "prompt")) {
    int32_t token = p.tokenizer ? tokenizer_find(p.tokenizer, o->prompt) : -1;
    if (token < 0 || token >= vocab_size) source_read(source, 0, 1, &token);
    arrput(p.tokens, token);
  } else if (text_ends_in(o->prompt, ".bin")) {
    p.tokens = prompt_shard(o->prompt, vocab_size);
  } else if (!(p.tokens = prompt_ids(o->prompt, vocab_size))) {
    fail("--prompt: a token of this run is no byte: give a shard (*.bin), or ids such as 15496,995, which "
         "python3 -c 'import sys, tokenizers as t; "
         "print(*t.Tokenizer.from_file(sys.argv[1]).encode(sys.argv[2]).ids, sep=\",\")' %s%s 'TEXT' prints "
         "(pip install tokenizers)",
         path ? path : "tokenizer.json", path && path_is_folder(path) ? "/tokenizer.json" : "");
  }
  p.count = arrlen(p.tokens);
  return p;
}

void prompt_close(Prompt *p) {
  tokenizer_close(p->tokenizer);
  arrfree(p->tokens);
}

int32_t *prompt_token_bytes(const Prompt *p, const RunData *data, int64_t vocab_size) {
  bool text = (data->val_source ? data->val_source : data->source)->kind == SOURCE_TEXT;
  if (!text && !p->tokenizer) return NULL;
  int32_t *bytes = host_alloc(vocab_size, sizeof *bytes, "the tokens' lengths");
  for (int64_t id = 0; id < vocab_size; id++)
    bytes[id] = text ? id < END_OF_TEXT : (int32_t)tokenizer_bytes(p->tokenizer, id);
  return bytes;
}
