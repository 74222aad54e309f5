#include "trainer/data.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/text.h"

// Shards of tools/prepare_data.py must be made with the model's tokenizer.
static void require_tokenizer(const Options *o, const Source *source) {
  Path own = path_in(o->origin ? o->origin : "", "tokenizer.json"), folder, last = {""};
  if (!o->origin || o->other_tokenizer || !path_exists(own.text)) return;
  for (int64_t i = 0; i < source->files; last = folder, i++) {
    const char *path = source_path(source, i);
    folder = path_folder(path);
    if (!strcmp(folder.text, last.text) || !manifest_is_in(folder.text)) continue;
    Path theirs = path_in(folder.text, "tokenizer.json");
    size_t sizes[2] = {0};
    char *mine = file_read(own.text, &sizes[0], NULL), *other = file_read(theirs.text, &sizes[1], NULL);
    bool found = other, same = mine && other && sizes[0] == sizes[1] && !memcmp(mine, other, sizes[0]);
    free(mine);
    free(other);
    if (!found)
      warn("%s does not exist: nothing says whether %s is of the tokenizer of the model", theirs.text, path);
    if (found && !same)
      fail("%s was not made with the model's tokenizer (%s and %s differ); make it again with "
           "tools/prepare_data.py --tokenizer %s, or give --other-tokenizer to use it anyway",
           path, theirs.text, own.text, o->origin);
  }
}

// The place of the checkpoint's run in its data.
static DataPlace saved_place(const Options *o, const RunData *d, const char **order) {
  const cJSON *place = json_member(o->resumed_from, "place"), *pass = json_member(place, "pass"),
              *tokens = json_member(place, "tokens");
  *order = place ? json_text(place, "order") : d->order;
  if (place && !(json_is_whole(pass) && json_is_whole(tokens) && *order))
    fail("%s/trainer_state.json: \"place\" has no pass, tokens and order; name another checkpoint",
         o->origin);
  if (place) return (DataPlace){(int64_t)pass->valuedouble, (int64_t)tokens->valuedouble};
  // Checkpoints of an earlier version have no place.
  const char *total = json_text(json_member(o->resumed_from, "settings"), "total-batch");
  int64_t in_pass = d->loader.train_windows * o->seq_len, read;
  if (__builtin_mul_overflow(o->first_step, total ? strtoll(total, NULL, 10) : o->total_batch, &read) ||
      read < 0)
    fail("%s/trainer_state.json: the setting total-batch is wrong; name another checkpoint", o->origin);
  return (DataPlace){read / in_pass, read % in_pass};
}

static void go_on(const Options *o, RunData *d) {
  const char *order;
  DataPlace place = saved_place(o, d, &order);
  if (strcmp(order, d->order)) {
    warn("%s was saved %s tokens into pass %lld over \"%s\", and now there are \"%s\": a new pass begins in "
         "place of the rest",
         o->origin, text_grouped(place.tokens).text, (long long)place.pass + 1, order, d->order);
    place = (DataPlace){place.pass + (place.tokens > 0), 0};
  }
  loader_start(&d->loader, o->first_step, place);
}

RunData run_data_open(const Options *o) {
  int64_t vocab_size = o->model.vocab_size;
  SourceSplit split = o->trains || !o->val_data ? SPLIT_TRAIN : SPLIT_VALIDATION;
  RunData d = {.source = source_open(o->data, arrlen(o->data), vocab_size, split)};
  if (o->val_data) d.val_source = source_open(o->val_data, arrlen(o->val_data), vocab_size, SPLIT_VALIDATION);
  const char *shared = o->trains && d.val_source ? source_shared_file(d.source, d.val_source) : NULL;
  if (shared)
    fail("%s is both in --data and in --val-data; leave it out of one, to validate on what is not trained on",
         shared);
  require_tokenizer(o, d.source);
  if (d.val_source) require_tokenizer(o, d.val_source);
  Path folder = path_folder(source_path(d.source, 0));
  if (manifest_is_in(folder.text) && path_exists(path_in(folder.text, "tokenizer.json").text))
    d.prepared = folder;
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
  loader_describe_order(&d.loader, d.order, sizeof d.order);
  if (o->resumed_from) go_on(o, &d);
  return d;
}

void run_data_close(RunData *d) {
  source_close(d->val_source);
  source_close(d->source);
}

// A tokenizer that nobody named ends no training: it serves the samples alone.
static Tokenizer *open_tokenizer(const Options *o, const RunData *d, const char *path) {
  Reason reason;
  Tokenizer *tokenizer = path ? tokenizer_open(path, &reason) : NULL;
  if (path && !tokenizer && o->tokenizer) fail("%s", reason.text);
  if (path && !tokenizer && path != d->prepared.text)
    warn("%s is not used, and samples are not shown as text: %s", path, reason.text);
  if (tokenizer && d->source->kind == SOURCE_TEXT)
    warn("%s is read byte by byte, despite a tokenizer; tools/prepare_data.py makes tokens of it",
         d->source->name);
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
  Source *shard = source_open(&path, 1, vocab_size, SPLIT_NONE);
  if (shard->tokens > MOST)
    fail("--prompt %s: it has %lld tokens; give a shard of at most %d", path, (long long)shard->tokens, MOST);
  arrsetlen(tokens, shard->tokens);
  source_read(shard, 0, shard->tokens, tokens);
  source_close(shard);
  return tokens;
}

Prompt prompt_open(const Options *o, const RunData *d) {
  const Source *source = d->source;
  Path own = path_in(o->origin ? o->origin : ".", "tokenizer.json");
  const char *path = o->tokenizer                         ? o->tokenizer
                     : o->origin && path_exists(own.text) ? own.text
                     : *d->prepared.text                  ? d->prepared.text
                                                          : NULL;
  Prompt p = {.tokenizer = open_tokenizer(o, d, path)};
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
         "python3 -c 'import sys, tokenizers as t; print(*t.Tokenizer.from_file(sys.argv[1]).encode("
         "sys.argv[2]).ids, sep=\",\")' %s%s 'TEXT' prints (pip install tokenizers)",
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
