#include "data/loader.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "kernels/base/alloc.h"
#include "kernels/base/integers.h"
#include "kernels/base/random.h"
#include "kernels/base/text.h"

// --- packing -----------------------------------------------------------------------------------------------

// Windows with free space: stacks by their free tokens, and a bit for each stack that is not empty.
typedef struct {
  int64_t seq_len;
  int64_t *next;  // each window's: the one below; an array of stb_ds.h
  int64_t *top;   // [seq_len + 1]: a window, or -1
  uint64_t *some; // [seq_len / 64 + 1]
} FreeSpace;

// The window that a piece goes into: the one with the least space that suffices, else a new one.
static int64_t best_fit(FreeSpace *s, int64_t length) {
  int64_t space = s->seq_len, window = arrlen(s->next), word = length / 64;
  uint64_t bits = s->some[word] >> length % 64 << length % 64;
  while (!bits && ++word <= s->seq_len / 64) bits = s->some[word];
  if (bits) {
    space = word * 64 + __builtin_ctzll(bits);
    window = s->top[space];
    s->top[space] = s->next[window];
    if (s->top[space] < 0) s->some[space / 64] &= ~((uint64_t)1 << space % 64);
  } else {
    arrput(s->next, -1);
  }
  space -= length;
  s->next[window] = s->top[space];
  s->top[space] = window;
  s->some[space / 64] |= (uint64_t)1 << space % 64;
  return window;
}

// Sorts by window, then in the order of the stream.
static int by_window(const void *a, const void *b) {
  const PackedSpan *x = a, *y = b;
  if (x->window != y->window) return x->window < y->window ? -1 : 1;
  return (x->first > y->first) - (x->first < y->first);
}

void source_pack(Source *source, int64_t seq_len, int64_t end_of_text) {
  static const char what[] = "packed documents";
  Packing *p = &source->packing;
  int64_t *ends = source_document_ends(source, end_of_text);
  p->documents = arrlen(ends);
  for (int64_t i = 0, first = 0; i < p->documents; first = ends[i++])
    for (int64_t length; first < ends[i] - 1; first += length) {
      length = min_i64(seq_len, ends[i] - 1 - first);
      PackedSpan piece = {first, length, .window = -length}; // the longest first
      arrput(p->pieces, piece);
      p->pairs += length;
    }
  arrfree(ends);
  int64_t count = arrlen(p->pieces);
  FreeSpace space = {.seq_len = seq_len,
                     .top = host_alloc(seq_len + 1, sizeof *space.top, what),
                     .some = host_alloc(seq_len / 64 + 1, sizeof *space.some, what)};
  for (int64_t i = 0; i <= seq_len; i++) space.top[i] = -1;
  if (count) qsort(p->pieces, (size_t)count, sizeof *p->pieces, by_window);
  for (int64_t i = 0; i < count; i++) p->pieces[i].window = best_fit(&space, p->pieces[i].length);
  if (count) qsort(p->pieces, (size_t)count, sizeof *p->pieces, by_window);
  p->windows = arrlen(space.next);
  p->starts = host_alloc(p->windows + 1, sizeof *p->starts, what);
  for (int64_t i = 0; i < count; i++) p->starts[p->pieces[i].window + 1] = i + 1;
  arrfree(space.next);
  free(space.top);
  free(space.some);
}

// --- windows -----------------------------------------------------------------------------------------------

// Streams of random_permute, far above the small ones that other modules use.
static const uint64_t split_seed = 0, split_stream = (uint64_t)1 << 40, order_stream = (uint64_t)1 << 41;

// Tokens from a window's beginning to the next one's.
static int64_t stride(const LoaderOptions *o, const Source *source) {
  return o->seq_len + (o->order == ORDER_SHUFFLED && source == o->source);
}

static int64_t source_windows(const LoaderOptions *o) {
  const Packing *packing = &o->source->packing;
  return packing->starts ? packing->windows
                         : (o->source->tokens - (o->order == ORDER_SEQUENTIAL)) / stride(o, o->source);
}

static void require_windows(const LoaderOptions *o, int64_t windows, const char *kinds, const char *advice) {
  int64_t have = o->source->tokens, window = o->seq_len + 1;
  if (source_windows(o) >= windows) return;
  if (o->source->packing.starts)
    fail("%s holds %lld documents, which --pack documents fits into %lld window%s of --seq-len %lld, and %s "
         "are needed: name more data%s",
         o->source->name, (long long)o->source->packing.documents, (long long)source_windows(o),
         source_windows(o) == 1 ? "" : "s", (long long)o->seq_len, kinds, advice);
  char left[256];
  source_describe_left(o->source, left, sizeof left);
  fail("%s holds %lld tokens and %s of --seq-len %lld + 1 tokens needs %lld: name more data%s%s%s%s",
       o->source->name, (long long)have, kinds, (long long)o->seq_len,
       (long long)((windows - 1) * stride(o, o->source) + window), advice, *left ? " (" : "", left,
       *left ? ")" : "");
}

Loader loader_create(LoaderOptions o) {
  assert(o.batch > 0 && o.seq_len > 0 && o.validation_fraction >= 0 && o.validation_fraction < 1);
  Loader loader = {.options = o};
  int64_t windows = source_windows(&o);
  if (o.validation_source) {
    const Packing *packing = o.validation_source->packing.starts ? &o.validation_source->packing : NULL;
    require_windows(&o, 1, "one window", " or shorten --seq-len");
    int64_t targets = packing ? packing->pairs : o.validation_source->tokens - 1;
    if (targets < 1)
      fail("%s holds %s and validation needs at least 2: name more --val-data", o.validation_source->name,
           packing ? "documents of 1 token" : "1 token");
    loader.validation_windows = packing ? packing->windows : ceil_div(targets, o.seq_len);
    loader.train_windows = windows;
  } else {
    bool split = o.validation_fraction > 0;
    require_windows(&o, 1 + split, split ? "one training and one validation window" : "one window",
                    split ? ", shorten --seq-len or name --val-data" : " or shorten --seq-len");
    int64_t held_back = llround(o.validation_fraction * (double)windows);
    loader.validation_windows = split ? max_i64(1, min_i64(held_back, windows - 1)) : 0;
    loader.train_windows = windows - loader.validation_windows;
  }
  loader.validation_batches = ceil_div(loader.validation_windows, o.batch);
  return loader;
}

// The window at this place of the split's order; training has the last places.
static int64_t split_window(const Loader *loader, int64_t place) {
  const LoaderOptions *o = &loader->options;
  int64_t windows = source_windows(o), window = (place + loader->train_windows) % windows;
  if (o->order == ORDER_SHUFFLED)
    window = (int64_t)random_permute(split_seed, split_stream, (uint64_t)place, (uint64_t)windows);
  return window;
}

// The rows of `batches` validation batches (0: all).
static int64_t validation_rows(const Loader *loader, int64_t batches) {
  bool all = !batches || batches >= loader->validation_batches;
  return all ? loader->validation_windows : batches * loader->options.batch;
}

// The place of training's row `number`, counted from the loader's start.
static DataPlace place_of(const Loader *loader, int64_t number) {
  int64_t windows = loader->train_windows, T = loader->options.seq_len, shift = loader->start.tokens % T;
  int64_t window = loader->start.tokens / T + number;
  if (shift && window >= windows - 1) window++, shift = 0; // one window less fits into the first pass
  return (DataPlace){loader->start.pass + window / windows, window % windows * T + shift};
}

void loader_start(Loader *loader, int64_t step, DataPlace place) {
  const LoaderOptions *o = &loader->options;
  if (o->order == ORDER_SHUFFLED) place.tokens -= place.tokens % o->seq_len;
  if (ceil_div(place.tokens, o->seq_len) >= loader->train_windows) place = (DataPlace){place.pass + 1, 0};
  loader->first_step = step;
  loader->start = place;
}

DataPlace loader_place(const Loader *loader, int64_t step, int64_t windows) {
  return place_of(loader, (step - loader->first_step) * windows);
}

// The window of row `number` of training (validated < 0), or of `validated` rows of validation; -1: none.
// *shift: how many tokens later it begins.
static int64_t window_of(const Loader *loader, int64_t validated, int64_t number, int64_t *shift) {
  const LoaderOptions *o = &loader->options;
  *shift = 0;
  if (validated >= 0 && number >= validated) return -1;
  if (validated > 0 && validated < loader->validation_windows)
    number = (number * loader->validation_windows + loader->validation_windows / 2) / validated;
  if (validated >= 0) return o->validation_source ? number : split_window(loader, number);
  DataPlace at = place_of(loader, number);
  uint64_t windows = (uint64_t)loader->train_windows, place = (uint64_t)(at.tokens / o->seq_len);
  *shift = at.tokens % o->seq_len;
  if (o->order == ORDER_SHUFFLED)
    place = random_permute(o->seed, order_stream + (uint64_t)at.pass, place, windows);
  return split_window(loader, source_windows(o) - loader->train_windows + (int64_t)place);
}

// Fills rows from `number` on, padded. Returns how many targets count.
static int64_t fill_batch(const Loader *loader, int64_t validated, int64_t number, int32_t *tokens,
                          int32_t *targets, int32_t *documents) {
  const LoaderOptions *o = &loader->options;
  const Source *source = validated >= 0 && o->validation_source ? o->validation_source : o->source;
  const Packing *packing = &source->packing;
  int64_t counted = 0, at = 0, all = o->batch * o->seq_len;
  for (int64_t row = 0; row < o->batch; row++) {
    int64_t shift, window = window_of(loader, validated, number + row, &shift);
    int64_t first = window * stride(o, source) + shift;
    PackedSpan whole = {.first = first, .length = min_i64(o->seq_len, source->tokens - 1 - first)};
    const PackedSpan *piece = &whole, *last = piece + (window >= 0);
    if (packing->starts && window >= 0)
      piece = packing->pieces + packing->starts[window], last = packing->pieces + packing->starts[window + 1];
    for (; piece < last; at += piece++->length) {
      source_read(source, piece->first, piece->length, tokens + at);
      counted += source_read_targets(source, piece->first + 1, piece->length, targets + at);
      for (int64_t i = 0; i < piece->length && documents; i++) {
        documents[at + i] = (int32_t)i;
        documents[all + at + i] = (int32_t)(piece->length - 1 - i);
      }
    }
    for (; at < (row + 1) * o->seq_len; at++) {
      tokens[at] = 0, targets[at] = IGNORED_TARGET;
      if (documents) documents[at] = documents[all + at] = 0;
    }
  }
  return counted;
}

int64_t loader_train_batch(const Loader *loader, int64_t step, int64_t index, int64_t batches,
                           int32_t *tokens, int32_t *targets, int32_t *documents) {
  assert(step >= loader->first_step && index >= 0 && index < batches);
  int64_t number = (step - loader->first_step) * batches + index;
  return fill_batch(loader, -1, number * loader->options.batch, tokens, targets, documents);
}

int64_t loader_validation_batch(const Loader *loader, int64_t index, int64_t batches, int32_t *tokens,
                                int32_t *targets, int32_t *documents) {
  assert(index >= 0);
  return fill_batch(loader, validation_rows(loader, batches), index * loader->options.batch, tokens, targets,
                    documents);
}

// Continues a CRC-32 with evenly spaced blocks of a source: all of it up to 4 M tokens.
static uint32_t add_checksum(const Source *source, uint32_t crc) {
  enum { BLOCK = 4096, MAX_BLOCKS = 1024 };
  int64_t blocks = ceil_div(source->tokens, BLOCK), taken = min_i64(blocks, MAX_BLOCKS);
  for (int64_t i = 0; i < taken; i++) {
    int32_t ids[2 * BLOCK];
    int64_t first = (taken > 1 ? i * (blocks - 1) / (taken - 1) : 0) * BLOCK;
    int64_t count = min_i64(source->tokens - first, BLOCK);
    source_read(source, first, count, ids);
    source_read_targets(source, first, count, ids + count); // with the mask
    crc = checksum(crc, ids, 2 * (size_t)count * sizeof *ids);
  }
  return crc;
}

void loader_require_targets(const Loader *loader, bool training, int64_t validation_batches) {
  const LoaderOptions *o = &loader->options;
  const Source *sources[] = {o->source, o->validation_source ? o->validation_source : o->source};
  int64_t rows[] = {training ? loader->train_windows : 0, validation_rows(loader, validation_batches)};
  Loader by_row = *loader; // a batch may exceed the memory
  by_row.options.batch = 1;
  int32_t *tokens = host_alloc(2 * o->seq_len, sizeof *tokens, "a sequence"), *targets = tokens + o->seq_len;
  for (int validation = 0; validation < 2; validation++) {
    int64_t counted = rows[validation] == 0;
    for (int64_t row = 0; !counted && row < rows[validation]; row++)
      counted = fill_batch(&by_row, validation ? rows[1] : -1, row, tokens, targets, NULL);
    if (!counted)
      fail("%s: no target of the %s counts, for the masks leave all out: name other %s",
           sources[validation]->name, validation ? "validation batches" : "training windows",
           validation ? "--val-data, or raise --eval-batches"
                      : "data, or make shards and masks again with tools/prepare_data.py");
  }
  free(tokens);
}

void loader_describe(const Loader *loader, char *out, size_t size) {
  const LoaderOptions *o = &loader->options;
  int64_t files = o->source->files;
  uint32_t crc = add_checksum(o->source, 0);
  if (o->validation_source) crc = add_checksum(o->validation_source, crc);
  char packed[96] = "";
  const Packing *p = &o->source->packing;
  if (p->starts)
    snprintf(packed, sizeof packed, ", packed from %s documents with %.2f%% padding",
             text_grouped(p->documents).text,
             100 - 100 * (double)p->pairs / ((double)p->windows * (double)o->seq_len));
  snprintf(out, size,
           "%s, %s file%s, %s tokens; %s training and %s validation windows of %s%s; checksum %08x",
           source_kind_name(o->source), text_grouped(files).text, files == 1 ? "" : "s",
           text_grouped(o->source->tokens).text, text_grouped(loader->train_windows).text,
           text_grouped(loader->validation_windows).text, text_grouped(o->seq_len).text, packed, crc);
}

void loader_describe_order(const Loader *loader, char *out, size_t size) {
  const LoaderOptions *o = &loader->options;
  char windows[160] = "windows in file order";
  if (o->order == ORDER_SHUFFLED)
    snprintf(windows, sizeof windows, "%lld of %lld %swindows of %lld, shuffled by seed %llu",
             (long long)loader->train_windows, (long long)source_windows(o),
             o->source->packing.starts ? "packed " : "", (long long)o->seq_len, (unsigned long long)o->seed);
  snprintf(out, size, "%s; checksum %08x", windows, add_checksum(o->source, 0));
}
