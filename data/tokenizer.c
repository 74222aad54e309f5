#include "data/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "data/file.h"
#include "data/json.h"
#include "data/source.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/text.h"

static void *grow(void *memory, size_t size) {
  void *grown = realloc(memory, size);
  if (!grown) fail("out of host memory for a tokenizer");
  return grown;
}

#define STBDS_REALLOC(context, memory, size) grow(memory, size)
#define STBDS_FREE(context, memory)          free(memory)
#define STB_DS_IMPLEMENTATION
#define typeof __typeof__ // stb_ds.h needs it, and C11 has none
#include <stb/stb_ds.h>

enum {
  MAX_ID = 1 << 22, // of a valid tokenizer; what a damaged file claims stays within memory
  BYTES = 256,
  MAX_SPLITS = 8
};

typedef struct {
  char *bytes; // what the token stands for; NULL: no token has this id
  int64_t length;
  bool special; // a mark, not text: "<|endoftext|>"
} Token;

typedef struct {
  char *key;
  int32_t value;
} TextId;

typedef struct {
  int64_t key;    // a pair of ids, see pair_of
  int32_t rank;   // when it was learned
  int32_t merged; // what it becomes
} Merge;

// Arrays and maps are stb_ds's.
struct Tokenizer {
  Token *tokens;           // by id
  TextId *vocab;           // map from a token as the file writes it
  TextId *added;           // map from what is looked for in the text itself, before anything else
  Merge *merges;           // map from a pair
  int32_t *before, *after; // special tokens around every text
  int32_t byte_ids[BYTES]; // the token of a single byte, or -1
  // Each splits the pieces of the one before: its matches, and what lies between.
  pcre2_code *splits[MAX_SPLITS];
  int split_count;
  bool whole_words;     // a piece that is a token is taken whole, whatever merges made it
  bool space_first;     // a space is put before a text that begins without one
  Reason cannot_encode; // empty: it can
};

static const char split_gpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static Reason pcre2_text(int error) {
  Reason message = {""};
  pcre2_get_error_message(error, (PCRE2_UCHAR *)message.text, sizeof message.text);
  return message;
}

// --- bytes as characters -----------------------------------------------------------------------------------

// The vocabulary is JSON text, so each byte has a printable character: printable Latin-1 stands for itself,
// the other 68 bytes take U+0100 and up in their order. (The map is GPT-2's bytes_to_unicode.)
static int character_of(int byte) {
  if (byte < 0x21) return 0x100 + byte;
  if (byte >= 0x7F && byte < 0xA1) return 0x121 + byte - 0x7F;
  return byte == 0xAD ? 0x143 : byte;
}

// -1: the character stands for no byte.
static int byte_of(int character) {
  for (int byte = character < 0x100 ? character : 0; byte < BYTES; byte++)
    if (character_of(byte) == character) return byte;
  return -1;
}

// The id of a token as the file writes it, or -1.
static int32_t find(const Tokenizer *t, const char *text) {
  TextId *vocab = t->vocab; // a look-up may write the pointer
  return shget(vocab, text);
}

// The id of the token of these very bytes, or -1.
static int32_t find_bytes(const Tokenizer *t, const char *bytes, int64_t length) {
  char *text = host_alloc(2 * length + 1, 1, "a piece of text"), *out = text;
  for (int64_t i = 0; i < length; i++) {
    int character = character_of((unsigned char)bytes[i]);
    if (character >= 0x80) *out++ = (char)(0xC0 | character >> 6);
    *out++ = (char)(character < 0x80 ? character : 0x80 | (character & 0x3F));
  }
  int32_t id = find(t, text);
  free(text);
  return id;
}

// --- reading the file --------------------------------------------------------------------------------------

static int64_t read_id(const cJSON *item) {
  return json_is_whole(item) && item->valuedouble < MAX_ID ? (int64_t)item->valuedouble : -1;
}

// The token stands for the bytes of its characters; one with a character that is no byte, for its text.
static bool put_token(Tokenizer *t, const cJSON *item, const char *text, bool special, Reason *reason) {
  int64_t id = read_id(item), length = (int64_t)strlen(text);
  if (id < 0) return refuse(reason, "the id of \"%s\" is not a whole number below %d", text, MAX_ID);
  while (arrlen(t->tokens) <= id) arrput(t->tokens, (Token){0});
  Token token = {.bytes = host_alloc(length + 1, 1, "a tokenizer"), .special = special};
  for (int64_t at = 0, taken; at < length; at += taken) {
    taken = utf8_length(text + at, (size_t)(length - at));
    int byte = taken == 1 ? byte_of(text[at]) : -1;
    if (taken == 2) byte = byte_of((text[at] & 0x1F) << 6 | (text[at + 1] & 0x3F));
    if (byte < 0) {
      memcpy(token.bytes, text, (size_t)length);
      token.length = length;
      break;
    }
    token.bytes[token.length++] = (char)byte;
  }
  free(t->tokens[id].bytes);
  t->tokens[id] = token;
  return true;
}

static bool read_vocabulary(Tokenizer *t, const cJSON *vocab, Reason *reason) {
  const cJSON *item;
  sh_new_strdup(t->vocab);
  shdefault(t->vocab, -1);
  cJSON_ArrayForEach(item, vocab) {
    int64_t id = read_id(item);
    if (id >= 0 && id < arrlen(t->tokens) && t->tokens[id].bytes)
      return refuse(reason, "the id %lld belongs to two tokens", (long long)id);
    if (!put_token(t, item, item->string, false, reason)) return false;
    shput(t->vocab, item->string, (int32_t)id);
  }
  for (int byte = 0; byte < BYTES; byte++) t->byte_ids[byte] = find_bytes(t, &(char){(char)byte}, 1);
  return arrlen(t->tokens) > 0 || refuse(reason, "its vocabulary is empty");
}

// lstrip, rstrip and single_word look at the text around an added token; language models do not use them.
static bool read_added_tokens(Tokenizer *t, const cJSON *added, Reason *reason) {
  static const char *const settings[] = {"lstrip", "rstrip", "single_word"};
  const cJSON *item;
  sh_new_strdup(t->added);
  cJSON_ArrayForEach(item, added) {
    const cJSON *id = json_member(item, "id");
    const char *text = json_text(item, "content");
    if (!text) return refuse(reason, "an added token has no content");
    if (!put_token(t, id, text, json_true(item, "special", false), reason)) return false;
    shput(t->added, text, id->valueint);
    for (int i = 0; i < 3; i++)
      if (json_true(item, settings[i], false))
        refuse(&t->cannot_encode, "the added token \"%s\" has %s", text, settings[i]);
  }
  return true;
}

// Ids are below 2^24, which keeps stb_ds.h's hash within its ints.
static int64_t pair_of(int64_t left, int64_t right) {
  return left << 32 | right;
}

static const Merge *find_merge(const Tokenizer *t, int64_t left, int64_t right) {
  Merge *merges = t->merges;
  ptrdiff_t at = merges ? hmgeti(merges, pair_of(left, right)) : -1;
  return at >= 0 ? &merges[at] : NULL;
}

// "a b" or, in newer files, ["a", "b"]. Of equal pairs the first learned counts.
static bool read_merges(Tokenizer *t, const cJSON *merges, Reason *reason) {
  const cJSON *item;
  int32_t rank = 0;
  cJSON_ArrayForEach(item, merges) {
    const char *pair = cJSON_GetStringValue(item), *space = pair ? strchr(pair, ' ') : NULL;
    const char *left = space ? pair : cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));
    const char *right = space ? space + 1 : cJSON_GetStringValue(cJSON_GetArrayItem(item, 1));
    if (!left || !right || (!space && cJSON_GetArraySize(item) != 2))
      return refuse(reason, "merge %d is no pair of tokens", rank);
    int length = (int)(space ? space - pair : (ptrdiff_t)strlen(left));
    char *first = text_format("%.*s", length, left), *both = text_format("%s%s", first, right);
    int64_t ids[] = {find(t, first), find(t, right), find(t, both)};
    free(first);
    free(both);
    if (ids[0] < 0 || ids[1] < 0 || ids[2] < 0)
      return refuse(reason, "merge %d names a token that the vocabulary lacks", rank);
    Merge merge = {pair_of(ids[0], ids[1]), rank++, (int32_t)ids[2]};
    if (!find_merge(t, ids[0], ids[1])) hmputs(t->merges, merge);
  }
  return true;
}

// Splits pieces of text by one expression more.
static bool add_split(Tokenizer *t, const char *expression) {
  int error;
  PCRE2_SIZE at;
  if (t->split_count == MAX_SPLITS)
    return refuse(&t->cannot_encode, "it splits text by more than %d expressions", MAX_SPLITS);
  pcre2_code *code =
      pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &at, NULL);
  if (!code)
    return refuse(&t->cannot_encode, "character %zu of its regular expression is not understood (%s)",
                  (size_t)at, pcre2_text(error).text);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // where that is not possible the interpreter remains
  t->splits[t->split_count++] = code;
  return true;
}

// The step after this one (NULL: the first) of a "Sequence", or the one step there is; NULL past the last.
static const cJSON *next_step(const cJSON *steps, const char *list, const cJSON *step) {
  if (step) return step == steps ? NULL : step->next;
  if (!json_is(steps, "type", "Sequence")) return steps;
  const cJSON *sequence = json_member(steps, list);
  return sequence ? sequence->child : NULL;
}

static bool has_byte_level(const cJSON *steps, const char *list) {
  for (const cJSON *step = NULL; (step = next_step(steps, list, step));)
    if (json_is(step, "type", "ByteLevel")) return true;
  return false;
}

// How text is split: a ByteLevel as GPT-2's, Splits (Llama 3) or Digits (SmolLM2). Only a lone ByteLevel may add a space.
static bool read_split(Tokenizer *t, const cJSON *step, bool alone) {
  const char *type = json_text(step, "type"), *expression = json_text(json_member(step, "pattern"), "Regex");
  if (json_is(step, "type", "Sequence")) {
    for (const cJSON *item = NULL; (item = next_step(step, "pretokenizers", item));)
      if (!read_split(t, item, false)) return false;
    return true;
  }
  if (json_is(step, "type", "ByteLevel")) {
    t->space_first = json_true(step, "add_prefix_space", true);
    if (t->space_first && !alone)
      return refuse(&t->cannot_encode, "a ByteLevel step within a sequence adds a space");
    return !json_true(step, "use_regex", true) || add_split(t, split_gpt2);
  }
  if (json_is(step, "type", "Digits"))
    return add_split(t, json_true(step, "individual_digits", false) ? "\\p{N}" : "\\p{N}+");
  if (json_is(step, "type", "Split") && expression && json_is(step, "behavior", "Isolated") &&
      !json_true(step, "invert", false))
    return add_split(t, expression);
  return refuse(&t->cannot_encode,
                "its pre_tokenizer has a step of type %s, which this program does not support",
                type ? type : "unknown");
}

// Templates: special tokens, the text ("A") somewhere among them. A ByteLevel is about offsets, not about ids.
static bool read_post_processor(Tokenizer *t, const cJSON *step) {
  const cJSON *item = NULL, *id;
  if (!step || json_is(step, "type", "ByteLevel")) return true;
  if (json_is(step, "type", "Sequence")) {
    while ((item = next_step(step, "processors", item)))
      if (!read_post_processor(t, item)) return false;
    return true;
  }
  if (!json_is(step, "type", "TemplateProcessing"))
    return refuse(&t->cannot_encode, "its post_processor is of a type that this program does not support");
  int32_t **list = &t->before;
  cJSON_ArrayForEach(item, json_member(step, "single")) {
    const cJSON *special = json_member(item, "SpecialToken");
    if (!special) {
      list = &t->after;
      continue;
    }
    const char *name = json_text(special, "id");
    const cJSON *ids = json_member(json_member(json_member(step, "special_tokens"), name ? name : ""), "ids");
    if (!ids) return refuse(&t->cannot_encode, "its template names a special token that it does not explain");
    cJSON_ArrayForEach(id, ids) {
      if (read_id(id) < 0 || read_id(id) >= arrlen(t->tokens))
        return refuse(&t->cannot_encode, "a special token of its template has no id");
      arrput(*list, id->valueint);
    }
  }
  return true;
}

// What only encoding needs. False leaves the reason in cannot_encode.
static bool read_encoding(Tokenizer *t, const cJSON *root, const cJSON *model) {
  Reason *reason = &t->cannot_encode;
  const cJSON *pre = json_member(root, "pre_tokenizer");
  const cJSON *normalizer = json_member(root, "normalizer"), *dropout = json_member(model, "dropout");
  if (normalizer && !json_is(normalizer, "type", "NFC")) // text is taken to be in NFC already
    return refuse(reason, "it has a normalizer, which this program does not apply");
  if (!has_byte_level(pre, "pretokenizers")) return refuse(reason, "its pre_tokenizer has no ByteLevel step");
  if (dropout && dropout->valuedouble != 0) return refuse(reason, "its merges are dropped at random");
  for (int byte = 0; byte < BYTES; byte++)
    if (t->byte_ids[byte] < 0) return refuse(reason, "its vocabulary has no token for byte %d", byte);
  t->whole_words = json_true(model, "ignore_merges", false);
  return read_split(t, pre, true) && read_post_processor(t, json_member(root, "post_processor"));
}

static bool has_text(const cJSON *object, const char *name) {
  const char *text = json_text(object, name);
  return text && *text;
}

static bool read_root(Tokenizer *t, const cJSON *root, Reason *reason) {
  const cJSON *model = json_member(root, "model"), *decoder = json_member(root, "decoder");
  const cJSON *vocab = json_member(model, "vocab"), *merges = json_member(model, "merges");
  const char *type = json_text(model, "type");
  if (json_member(model, "type") && !json_is(model, "type", "BPE"))
    return refuse(reason, "its model is %s and not BPE", type ? type : "unknown");
  if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
    return refuse(reason, "its model has no vocab or no merges");
  if (json_true(model, "byte_fallback", false) || has_text(model, "continuing_subword_prefix") ||
      has_text(model, "end_of_word_suffix") || (decoder && !has_byte_level(decoder, "decoders")))
    return refuse(reason, "it is no byte-level BPE as GPT-2 and Llama 3 have it");
  if (!read_vocabulary(t, vocab, reason) || !read_merges(t, merges, reason) ||
      !read_added_tokens(t, json_member(root, "added_tokens"), reason))
    return false;
  if (!*t->cannot_encode.text) read_encoding(t, root, model);
  return true;
}

Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason) {
  cJSON *root = json_parse(text, length, reason);
  if (!root) return NULL;
  Tokenizer *t = host_alloc(1, sizeof *t, "a tokenizer");
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
  for (int64_t i = 0; i < arrlen(t->tokens); i++) free(t->tokens[i].bytes);
  for (int i = 0; i < t->split_count; i++) pcre2_code_free(t->splits[i]);
  arrfree(t->tokens);
  arrfree(t->before);
  arrfree(t->after);
  hmfree(t->merges);
  shfree(t->vocab);
  shfree(t->added);
  free(t);
}

int64_t tokenizer_size(const Tokenizer *t) {
  return arrlen(t->tokens);
}

int64_t tokenizer_bytes(const Tokenizer *t, int64_t id) {
  return id >= 0 && id < arrlen(t->tokens) && !t->tokens[id].special ? t->tokens[id].length : 0;
}

// --- encoding ----------------------------------------------------------------------------------------------

typedef struct {
  const Tokenizer *tokenizer;
  int32_t *ids; // so far
  Reason *reason;
} Encoding;

// Merges the pair that was learned first wherever it stands, left to right, again and again. Returns how many ids remain.
static int64_t merge_pairs(const Tokenizer *t, int32_t *ids, int64_t count) {
  const Merge **merges = host_alloc(count, sizeof *merges, "a piece of text"); // of each id with the next
  for (int64_t i = 0; i + 1 < count; i++) merges[i] = find_merge(t, ids[i], ids[i + 1]);
  for (;;) {
    const Merge *first = NULL;
    for (int64_t i = 0; i + 1 < count; i++)
      if (merges[i] && (!first || merges[i]->rank < first->rank)) first = merges[i];
    if (!first) break;
    int64_t kept = 0, merged_at = -2; // the last merge's place
    for (int64_t i = 0; i < count; kept++) {
      bool merge = i + 1 < count && merges[i] == first;
      merges[kept] = merges[i];
      ids[kept] = merge ? first->merged : ids[i];
      i += 1 + merge;
      if (kept > 0 && (merge || merged_at == kept - 1))
        merges[kept - 1] = find_merge(t, ids[kept - 1], ids[kept]);
      if (merge) merged_at = kept;
    }
    count = kept;
  }
  free(merges);
  return count;
}

static void encode_piece(Encoding *e, const char *piece, int64_t length) {
  const Tokenizer *t = e->tokenizer;
  int32_t whole = t->whole_words ? find_bytes(t, piece, length) : -1;
  if (whole >= 0) {
    arrput(e->ids, whole);
    return;
  }
  int64_t first = arrlen(e->ids);
  for (int64_t i = 0; i < length; i++) arrput(e->ids, t->byte_ids[(unsigned char)piece[i]]);
  int64_t kept = merge_pairs(t, e->ids + first, length);
  arrsetlen(e->ids, first + kept);
}

// Pieces by the expressions from `level` on: matches, and what lies between them.
static bool encode_split(Encoding *e, int level, const char *text, int64_t length) {
  const Tokenizer *t = e->tokenizer;
  if (length == 0) return true;
  if (level == t->split_count) {
    encode_piece(e, text, length);
    return true;
  }
  pcre2_match_data *match = pcre2_match_data_create_from_pattern(t->splits[level], NULL);
  if (!match) fail("out of memory for a piece of text of %lld bytes", (long long)length);
  int64_t done = 0, from = 0; // pieces end at `done`; the next match is looked for at `from`
  bool good = true;
  while (good && from < length) {
    int result = pcre2_match(t->splits[level], (PCRE2_SPTR)text, (size_t)length, (size_t)from,
                             PCRE2_NO_UTF_CHECK, match, NULL);
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0)
      good = refuse(e->reason, "its regular expression fails on the text (%s)", pcre2_text(result).text);
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(match);
    int64_t start = (int64_t)ends[0], end = (int64_t)ends[1];
    if (good && (start < done || end <= start)) { // an empty match (or one by \K) splits nothing
      for (from++; from < length && ((unsigned char)text[from] & 0xC0) == 0x80;) from++;
      continue;
    }
    good = good && encode_split(e, level + 1, text + done, start - done) &&
           encode_split(e, level + 1, text + start, end - start);
    done = from = end;
  }
  pcre2_match_data_free(match);
  return good && encode_split(e, level + 1, text + done, length - done);
}

// Text without added tokens.
static bool encode_part(Encoding *e, const char *text, int64_t length) {
  for (int64_t at = 0, taken; at < length; at += taken)
    if (!(taken = utf8_length(text + at, (size_t)(length - at))))
      return refuse(e->reason, "the text is not UTF-8 at byte %lld", (long long)at);
  if (!e->tokenizer->space_first || length == 0 || text[0] == ' ') return encode_split(e, 0, text, length);
  char *spaced = host_alloc(length + 1, 1, "a text");
  spaced[0] = ' ';
  memcpy(spaced + 1, text, (size_t)length);
  bool good = encode_split(e, 0, spaced, length + 1);
  free(spaced);
  return good;
}

// The longest added token at the beginning of the text, or NULL.
static const TextId *added_at(const Tokenizer *t, const char *text, int64_t length) {
  const TextId *longest = NULL;
  for (const TextId *a = t->added, *end = a + shlen(t->added); a < end; a++) {
    if (*a->key != *text) continue; // the fast way out
    size_t size = strlen(a->key);
    if ((int64_t)size <= length && !memcmp(a->key, text, size) && (!longest || size > strlen(longest->key)))
      longest = a;
  }
  return longest && *longest->key ? longest : NULL;
}

static bool encode_text(Encoding *e, const char *text, int64_t length) {
  int64_t done = 0;
  for (int64_t at = 0; at < length;) {
    const TextId *added = added_at(e->tokenizer, text + at, length - at);
    if (!added) {
      at++;
      continue;
    }
    if (!encode_part(e, text + done, at - done)) return false;
    arrput(e->ids, added->value);
    done = at += (int64_t)strlen(added->key);
  }
  return encode_part(e, text + done, length - done);
}

int32_t *tokenizer_try_encode(const Tokenizer *t, const char *text, int64_t length, bool special,
                              int64_t *count, Reason *reason) {
  Encoding e = {.tokenizer = t, .reason = reason};
  if (*t->cannot_encode.text) {
    refuse(reason, "the tokenizer can decode, but not encode: %s", t->cannot_encode.text);
    return NULL;
  }
  for (int64_t i = 0; special && i < arrlen(t->before); i++) arrput(e.ids, t->before[i]);
  bool good = encode_text(&e, text, length);
  for (int64_t i = 0; special && i < arrlen(t->after); i++) arrput(e.ids, t->after[i]);
  *count = arrlen(e.ids);
  int32_t *ids = good ? host_alloc(*count, sizeof *ids, "tokens") : NULL;
  if (good && *count) memcpy(ids, e.ids, (size_t)*count * sizeof *ids);
  arrfree(e.ids);
  return ids;
}

int32_t *tokenizer_encode(const Tokenizer *t, const char *text, int64_t length, bool special,
                          int64_t *count) {
  Reason reason;
  int32_t *ids = tokenizer_try_encode(t, text, length, special, count, &reason);
  if (!ids) fail("cannot make tokens of a text: %s", reason.text);
  return ids;
}

void byte_encode(const char *text, int64_t length, int32_t *tokens) {
  for (int64_t i = 0; i < length; i++) tokens[i] = (unsigned char)text[i];
}

// --- decoding ----------------------------------------------------------------------------------------------

// What an id stands for; without a tokenizer in `byte`.
static Token token_of(const Tokenizer *t, int32_t id, char *byte) {
  *byte = (char)id;
  if (t && id >= 0 && id < arrlen(t->tokens) && t->tokens[id].bytes) return t->tokens[id];
  if (!t && id >= 0 && id < BYTES) return (Token){.bytes = byte, .length = 1};
  if (!t && id == END_OF_TEXT) return (Token){.bytes = "\n<|endoftext|>\n", .length = 15};
  return (Token){.bytes = "\xEF\xBF\xBD", .length = 3};
}

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, int64_t *length) {
  char byte;
  *length = 0;
  for (int64_t i = 0; i < count; i++) *length += token_of(t, ids[i], &byte).length;
  char *text = host_alloc(*length + 1, 1, "a text"), *out = text;
  for (int64_t i = 0; i < count; i++) {
    Token token = token_of(t, ids[i], &byte);
    memcpy(out, token.bytes, (size_t)token.length);
    out += token.length;
  }
  return text;
}

char *tokenizer_show(const Tokenizer *t, const int32_t *ids, int64_t count) {
  int64_t length;
  char *bytes = tokenizer_decode(t, ids, count, &length), *shown = bytes_show(bytes, length);
  free(bytes);
  return shown;
}

char *bytes_show(const char *bytes, int64_t length) {
  char *text = host_alloc(4 * length + 1, 1, "a text"), *out = text;
  for (int64_t i = 0, taken; i < length; i += taken) {
    taken = utf8_length(bytes + i, (size_t)(length - i));
    if (taken == 0) taken = 1;
    if (bytes[i] == '\n' || bytes[i] == '\t')
      *out++ = bytes[i];
    else
      text_escape(out, (size_t)(4 * taken + 1), bytes + i, (size_t)taken);
    out += strlen(out);
  }
  return text;
}
