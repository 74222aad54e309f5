#include "data/tokenizer/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/json.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/split.h"

enum {
  MAX_ID = 1 << 22, // of a valid tokenizer; what a damaged file claims stays within memory
  BYTES = 256,
  ALPHABET = 324,    // characters that stand for bytes: below this
  MAX_TEXT = 1 << 30 // bytes encoded at a time
};

typedef struct {
  char *bytes; // what the token stands for; NULL: no token has this id
  int64_t length;
  bool special; // a mark, not text: "<|endoftext|>"
} Token;

// A token that is looked for in the text itself, before anything else.
typedef struct {
  char *text;
  int64_t length;
  int32_t id;
} AddedToken;

typedef struct {
  int32_t *ids;
  int64_t count, capacity;
} Ids;

struct Tokenizer {
  int16_t byte_of[ALPHABET]; // the byte that a character stands for, or -1
  Token *tokens;
  int64_t size;
  AddedToken *added;
  int64_t added_count;
  Ids before, after; // special tokens around every text
  // encoding
  int32_t byte_ids[BYTES]; // the token of a single byte, or -1
  BpeMerges merges;
  int32_t *by_bytes; // hash table of ids, open addressing by the tokens' bytes; -1: empty
  uint64_t by_bytes_mask;
  bool whole_words; // a piece that is a token is taken whole, whatever merges made it
  bool space_first; // a space is put before a text that begins without one
  Splitter splitter;
  Reason cannot_encode; // empty: it can
};

static void *allocate(int64_t count, size_t size) {
  return host_alloc(count, size, "a tokenizer");
}

// --- bytes as characters -----------------------------------------------------------------------------------

// The vocabulary is JSON text, so each byte has a printable character: printable Latin-1 stands for itself,
// the other 68 bytes take U+0100 and up in their order. (The map is GPT-2's bytes_to_unicode.)
static bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
}

static void fill_alphabet(int16_t byte_of[ALPHABET]) {
  for (int character = 0; character < ALPHABET; character++) byte_of[character] = -1;
  for (int byte = 0, next = 0; byte < BYTES; byte++)
    byte_of[stands_for_itself(byte) ? byte : BYTES + next++] = (int16_t)byte;
}

// The byte that the character at *text stands for, which is stepped over, or -1. Those of the alphabet have one byte or
// two in UTF-8.
static int next_byte(const Tokenizer *t, const char **text) {
  const unsigned char *at = (const unsigned char *)*text;
  bool two = at[0] >= 0x80;
  uint32_t character = two ? (at[0] - 0xC0u) << 6 | (at[1] & 0x3Fu) : at[0];
  *text += 1 + two;
  return (!two || (at[1] & 0xC0) == 0x80) && character < ALPHABET ? t->byte_of[character] : -1;
}

// The bytes of a token of the vocabulary. One with a character that is no byte stands for its text.
static Token read_token(const Tokenizer *t, const char *text) {
  Token token = {.bytes = allocate((int64_t)strlen(text) + 1, 1)};
  for (const char *at = text; *at;) {
    int byte = next_byte(t, &at);
    if (byte < 0) {
      token.length = (int64_t)strlen(text);
      memcpy(token.bytes, text, (size_t)token.length);
      return token;
    }
    token.bytes[token.length++] = (char)byte;
  }
  return token;
}

// --- tokens by their bytes ---------------------------------------------------------------------------------

static uint64_t hash_of(const char *bytes, int64_t length) {
  uint64_t hash = 0xCBF29CE484222325u; // FNV-1a
  for (int64_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001B3u;
  return hash ^ hash >> 29;
}

static int32_t *slot_of(const Tokenizer *t, const char *bytes, int64_t length) {
  for (uint64_t i = hash_of(bytes, length);; i++) {
    int32_t *slot = &t->by_bytes[i & t->by_bytes_mask];
    if (*slot < 0) return slot;
    const Token *token = &t->tokens[*slot];
    if (token->length == length && memcmp(token->bytes, bytes, (size_t)length) == 0) return slot;
  }
}

// --- reading the file --------------------------------------------------------------------------------------

static bool read_id(const cJSON *item, int64_t *id) {
  *id = json_is_whole(item) && item->valuedouble <= MAX_ID ? (int64_t)item->valuedouble : -1;
  return *id >= 0;
}

static void put_token(Tokenizer *t, int64_t id, const char *text) {
  free(t->tokens[id].bytes);
  t->tokens[id] = read_token(t, text);
}

// Sizes the table by a first walk, then fills it.
static bool read_vocabulary(Tokenizer *t, const cJSON *vocab, const cJSON *added, Reason *reason) {
  const cJSON *item;
  int64_t id, count = 0;
  cJSON_ArrayForEach(item, vocab) {
    if (!read_id(item, &id))
      return refuse(reason, "the id of a token is not a whole number up to %d", MAX_ID);
    if (id >= t->size) t->size = id + 1;
    count++;
  }
  cJSON_ArrayForEach(item, added) {
    if (!read_id(json_member(item, "id"), &id) || !cJSON_IsString(json_member(item, "content")))
      return refuse(reason, "an added token has no id or no content");
    if (id >= t->size) t->size = id + 1;
    t->added_count++;
  }
  if (count == 0) return refuse(reason, "its vocabulary is empty");
  t->tokens = allocate(t->size, sizeof *t->tokens);
  uint64_t slots = 16;
  while (slots < 2 * (uint64_t)count) slots *= 2;
  t->by_bytes = allocate((int64_t)slots, sizeof *t->by_bytes);
  t->by_bytes_mask = slots - 1;
  for (uint64_t i = 0; i < slots; i++) t->by_bytes[i] = -1;
  cJSON_ArrayForEach(item, vocab) {
    read_id(item, &id);
    if (t->tokens[id].bytes) return refuse(reason, "the id %lld belongs to two tokens", (long long)id);
    put_token(t, id, item->string);
    int32_t *slot = slot_of(t, t->tokens[id].bytes, t->tokens[id].length);
    if (*slot < 0) *slot = (int32_t)id;
  }
  for (int byte = 0; byte < BYTES; byte++) t->byte_ids[byte] = *slot_of(t, (const char[]){(char)byte}, 1);
  return true;
}

// lstrip, rstrip and single_word look at the text around an added token; language models do not use them.
static void read_added_tokens(Tokenizer *t, const cJSON *added) {
  t->added = allocate(t->added_count, sizeof *t->added);
  const cJSON *item;
  int64_t i = 0;
  cJSON_ArrayForEach(item, added) {
    int64_t id;
    const char *text = json_member(item, "content")->valuestring;
    read_id(json_member(item, "id"), &id);
    put_token(t, id, text);
    t->tokens[id].special = json_true(item, "special", false);
    t->added[i++] = (AddedToken){text_format("%s", text), (int64_t)strlen(text), (int32_t)id};
    if (!*t->cannot_encode.text && (json_true(item, "lstrip", false) || json_true(item, "rstrip", false) ||
                                    json_true(item, "single_word", false)))
      refuse(&t->cannot_encode, "the added token \"%s\" has lstrip, rstrip or single_word", text);
  }
}

// The id of a token of the vocabulary, or -1.
static int32_t find_text(const Tokenizer *t, const char *text) {
  Token token = read_token(t, text);
  int32_t id = *slot_of(t, token.bytes, token.length);
  free(token.bytes);
  return id;
}

// The halves of "a b" or, in newer files, ["a", "b"], a 0 after each; NULL: it is no pair. The caller frees them.
static char *read_merge(const cJSON *item) {
  if (cJSON_IsString(item) && strchr(item->valuestring, ' ')) {
    char *halves = text_format("%s", item->valuestring);
    *strchr(halves, ' ') = 0;
    return halves;
  }
  const char *left = cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));
  const char *right = cJSON_GetStringValue(cJSON_GetArrayItem(item, 1));
  if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != 2 || !left || !right) return NULL;
  return text_format("%s%c%s", left, 0, right);
}

static bool read_merges(Tokenizer *t, const cJSON *merges, Reason *reason) {
  t->merges = bpe_merges_create(cJSON_GetArraySize(merges));
  int32_t rank = 0;
  const cJSON *item;
  cJSON_ArrayForEach(item, merges) {
    char *left = read_merge(item);
    if (!left) return refuse(reason, "merge %d is no pair of tokens", rank);
    const char *right = left + strlen(left) + 1;
    char *both = text_format("%s%s", left, right);
    int32_t a = find_text(t, left), b = find_text(t, right), merged = find_text(t, both);
    free(left);
    free(both);
    if (a < 0 || b < 0 || merged < 0)
      return refuse(reason, "merge %d names a token that the vocabulary lacks", rank);
    bpe_merges_add(&t->merges, a, b, rank++, merged);
  }
  return true;
}

// How text is split: GPT-2's ByteLevel, or a sequence that ends in a ByteLevel, of Splits (Llama 3) or Digits (SmolLM2).
static bool read_pre_tokenizer(Tokenizer *t, const cJSON *step, bool alone) {
  Reason *reason = &t->cannot_encode;
  if (json_is(step, "type", "Sequence")) {
    const cJSON *item;
    cJSON_ArrayForEach(item, json_member(step, "pretokenizers")) {
      if (!read_pre_tokenizer(t, item, false)) return false;
    }
    return true;
  }
  if (json_is(step, "type", "ByteLevel")) {
    t->space_first = json_true(step, "add_prefix_space", true);
    if (t->space_first && !alone) return refuse(reason, "a ByteLevel step within a sequence adds a space");
    return !json_true(step, "use_regex", true) || splitter_add(&t->splitter, split_gpt2, reason);
  }
  if (json_is(step, "type", "Digits"))
    return splitter_add(&t->splitter, json_true(step, "individual_digits", false) ? "\\p{N}" : "\\p{N}+",
                        reason);
  const char *type = json_text(step, "type"), *expression = json_text(json_member(step, "pattern"), "Regex");
  if (json_is(step, "type", "Split") && expression && json_is(step, "behavior", "Isolated") &&
      !json_true(step, "invert", false))
    return splitter_add(&t->splitter, expression, reason);
  return refuse(reason, "its pre_tokenizer has a step of type %s, which this program does not support",
                type ? type : "unknown");
}

static bool has_byte_level(const cJSON *step, const char *list) {
  const cJSON *item;
  if (json_is(step, "type", "ByteLevel")) return true;
  cJSON_ArrayForEach(item, json_member(step, list)) {
    if (json_is(item, "type", "ByteLevel")) return true;
  }
  return false;
}

static void append(Ids *ids, int32_t id) {
  ids->ids = host_grow(ids->ids, ids->count, &ids->capacity, sizeof *ids->ids, "tokens");
  ids->ids[ids->count++] = id;
}

// A template: special tokens, the text ("A") somewhere among them.
static bool read_template(Tokenizer *t, const cJSON *template) {
  const cJSON *item;
  Ids *into = &t->before;
  cJSON_ArrayForEach(item, json_member(template, "single")) {
    const cJSON *special = json_member(item, "SpecialToken"), *id;
    if (!special) {
      into = &t->after;
      continue;
    }
    const char *name = json_text(special, "id");
    const cJSON *known = name ? json_member(json_member(template, "special_tokens"), name) : NULL;
    if (!known)
      return refuse(&t->cannot_encode, "its template names a special token that it does not explain");
    cJSON_ArrayForEach(id, json_member(known, "ids")) {
      int64_t value;
      if (!read_id(id, &value) || value >= t->size)
        return refuse(&t->cannot_encode, "a special token of its template has no id");
      append(into, (int32_t)value);
    }
  }
  return true;
}

static bool read_post_processor(Tokenizer *t, const cJSON *step) {
  const cJSON *item;
  if (!step || json_is(step, "type", "ByteLevel")) return true; // about offsets, not about ids
  if (json_is(step, "type", "TemplateProcessing")) return read_template(t, step);
  if (!json_is(step, "type", "Sequence"))
    return refuse(&t->cannot_encode, "its post_processor is of a type that this program does not support");
  cJSON_ArrayForEach(item, json_member(step, "processors")) {
    if (!read_post_processor(t, item)) return false;
  }
  return true;
}

// What only encoding needs. False leaves the reason in cannot_encode.
static bool read_encoding(Tokenizer *t, const cJSON *root, const cJSON *model) {
  Reason *reason = &t->cannot_encode;
  const cJSON *pre = json_member(root, "pre_tokenizer"), *dropout = json_member(model, "dropout");
  const cJSON *normalizer = json_member(root, "normalizer");
  if (normalizer && !json_is(normalizer, "type", "NFC")) // text is taken to be in NFC already
    return refuse(reason, "it has a normalizer, which this program does not apply");
  if (!has_byte_level(pre, "pretokenizers")) return refuse(reason, "its pre_tokenizer has no ByteLevel step");
  if (dropout && dropout->valuedouble != 0) return refuse(reason, "its merges are dropped at random");
  for (int byte = 0; byte < BYTES; byte++)
    if (t->byte_ids[byte] < 0) return refuse(reason, "its vocabulary has no token for byte %d", byte);
  t->whole_words = json_true(model, "ignore_merges", false);
  return read_pre_tokenizer(t, pre, true) && read_post_processor(t, json_member(root, "post_processor"));
}

static bool is_empty_text(const cJSON *item) {
  return !item || (cJSON_IsString(item) && !*item->valuestring);
}

static bool read_root(Tokenizer *t, const cJSON *root, Reason *reason) {
  const cJSON *model = json_member(root, "model"), *type = json_member(model, "type");
  const cJSON *vocab = json_member(model, "vocab"), *merges = json_member(model, "merges"),
              *decoder = json_member(root, "decoder");
  const cJSON *added = json_member(root, "added_tokens");
  if (type && !json_is(model, "type", "BPE"))
    return refuse(reason, "its model is %s and not BPE",
                  cJSON_IsString(type) ? type->valuestring : "unknown");
  if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
    return refuse(reason, "its model has no vocab or no merges");
  if (json_true(model, "byte_fallback", false) ||
      !is_empty_text(json_member(model, "continuing_subword_prefix")) ||
      !is_empty_text(json_member(model, "end_of_word_suffix")) ||
      (decoder && !has_byte_level(decoder, "decoders")))
    return refuse(reason, "it is no byte-level BPE as GPT-2 and Llama 3 have it");
  if (!read_vocabulary(t, vocab, added, reason) || !read_merges(t, merges, reason)) return false;
  read_added_tokens(t, added);
  if (!*t->cannot_encode.text) read_encoding(t, root, model);
  return true;
}

// --- opening -----------------------------------------------------------------------------------------------

Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason) {
  cJSON *root = json_parse(text, length, reason);
  if (!root) return NULL;
  Tokenizer *t = allocate(1, sizeof *t);
  fill_alphabet(t->byte_of);
  bool good = read_root(t, root, reason);
  cJSON_Delete(root);
  if (good) return t;
  tokenizer_close(t);
  return NULL;
}

Tokenizer *tokenizer_open(const char *path) {
  char *name = path_is_folder(path) ? path_join(path, "tokenizer.json") : text_format("%s", path);
  size_t length;
  char *text = file_read(name, &length);
  if (!text) fail("cannot open the tokenizer %s: %s", name, strerror(ENOENT));
  Reason reason;
  Tokenizer *tokenizer = tokenizer_parse(text, length, &reason);
  if (!tokenizer) fail("%s is no tokenizer that this program can use: %s", name, reason.text);
  free(text);
  free(name);
  return tokenizer;
}

void tokenizer_close(Tokenizer *t) {
  if (!t) return;
  for (int64_t i = 0; t->tokens && i < t->size; i++) free(t->tokens[i].bytes);
  for (int64_t i = 0; t->added && i < t->added_count; i++) free(t->added[i].text);
  free(t->tokens);
  free(t->added);
  free(t->before.ids);
  free(t->after.ids);
  free(t->by_bytes);
  bpe_merges_free(&t->merges);
  splitter_free(&t->splitter);
  free(t);
}

int64_t tokenizer_size(const Tokenizer *t) {
  return t->size;
}

int64_t tokenizer_bytes(const Tokenizer *t, int64_t id) {
  return id >= 0 && id < t->size && !t->tokens[id].special ? t->tokens[id].length : 0;
}

// --- encoding ----------------------------------------------------------------------------------------------

typedef struct {
  const Tokenizer *tokenizer;
  Ids ids;
} Encoding;

static void encode_piece(void *context, const char *piece, int64_t length) {
  Encoding *e = context;
  const Tokenizer *t = e->tokenizer;
  int32_t whole = t->whole_words ? *slot_of(t, piece, length) : -1;
  if (whole >= 0) {
    append(&e->ids, whole);
    return;
  }
  int64_t first = e->ids.count;
  for (int64_t i = 0; i < length; i++) append(&e->ids, t->byte_ids[(unsigned char)piece[i]]);
  e->ids.count = first + bpe_merge(&t->merges, e->ids.ids + first, length);
}

// Text without added tokens.
static bool encode_part(Encoding *e, const char *text, int64_t length, Reason *reason) {
  char *spaced = NULL;
  if (e->tokenizer->space_first && length > 0 && text[0] != ' ') {
    spaced = allocate(length + 1, 1);
    spaced[0] = ' ';
    memcpy(spaced + 1, text, (size_t)length++);
    text = spaced;
  }
  bool good = splitter_split(&e->tokenizer->splitter, text, length, encode_piece, e, reason);
  free(spaced);
  return good;
}

// The longest added token at the beginning of the text, or NULL.
static const AddedToken *added_at(const Tokenizer *t, const char *text, int64_t length) {
  const AddedToken *longest = NULL;
  for (int64_t i = 0; i < t->added_count; i++) {
    const AddedToken *a = &t->added[i];
    if (a->length > 0 && a->length <= length && (!longest || a->length > longest->length) &&
        memcmp(a->text, text, (size_t)a->length) == 0)
      longest = a;
  }
  return longest;
}

// The text with its added tokens.
static bool encode_text(Encoding *e, const char *text, int64_t length, Reason *reason) {
  int64_t done = 0;
  for (int64_t at = 0; at < length;) {
    const AddedToken *added = added_at(e->tokenizer, text + at, length - at);
    if (!added) {
      at++;
      continue;
    }
    if (!encode_part(e, text + done, at - done, reason)) return false;
    append(&e->ids, added->id);
    done = at += added->length;
  }
  return encode_part(e, text + done, length - done, reason);
}

int32_t *tokenizer_try_encode(const Tokenizer *t, const char *text, int64_t length, bool special,
                              int64_t *count, Reason *reason) {
  if (*t->cannot_encode.text) {
    refuse(reason, "the tokenizer can decode, but not encode: %s", t->cannot_encode.text);
    return NULL;
  }
  if (length > MAX_TEXT) {
    refuse(reason, "a text of %lld bytes is too long to be encoded at once", (long long)length);
    return NULL;
  }
  Encoding e = {.tokenizer = t, .ids = {.ids = allocate(16, sizeof *e.ids.ids), .capacity = 16}};
  for (int64_t i = 0; special && i < t->before.count; i++) append(&e.ids, t->before.ids[i]);
  if (!encode_text(&e, text, length, reason)) {
    free(e.ids.ids);
    return NULL;
  }
  for (int64_t i = 0; special && i < t->after.count; i++) append(&e.ids, t->after.ids[i]);
  *count = e.ids.count;
  return e.ids.ids;
}

int32_t *tokenizer_encode(const Tokenizer *t, const char *text, int64_t length, bool special,
                          int64_t *count) {
  Reason reason;
  int32_t *ids = tokenizer_try_encode(t, text, length, special, count, &reason);
  if (!ids) fail("cannot make tokens of a text: %s", reason.text);
  return ids;
}

// --- decoding ----------------------------------------------------------------------------------------------

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, int64_t *length) {
  const Token unknown = {.bytes = "\xEF\xBF\xBD", .length = 3};
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) fail("out of host memory for a text of %lld tokens", (long long)count);
  for (int64_t i = 0; i < count; i++) {
    bool known = ids[i] >= 0 && ids[i] < t->size && t->tokens[ids[i]].bytes;
    const Token *token = known ? &t->tokens[ids[i]] : &unknown;
    fwrite(token->bytes, 1, (size_t)token->length, out);
  }
  if (fclose(out) != 0) fail("out of host memory for a text of %lld tokens", (long long)count);
  *length = (int64_t)size;
  return text;
}

char *tokenizer_show(const Tokenizer *t, const int32_t *ids, int64_t count) {
  int64_t length;
  char *bytes = tokenizer_decode(t, ids, count, &length), *shown = bytes_show(bytes, length);
  free(bytes);
  return shown;
}
