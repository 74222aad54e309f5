#include "data/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "data/source.h"

static void *grow(void *memory, size_t size) {
  void *grown = realloc(memory, size);
  if (!grown) fail("out of host memory for a tokenizer");
  return grown;
}

#define STBDS_REALLOC(context, memory, size) grow(memory, size)
#define STBDS_FREE(context, memory)          free(memory)
#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>

enum {
  MAX_ID = 1 << 22, // of a valid tokenizer; what a damaged file claims stays within memory
  BYTES = 256,
  ALPHABET = 324, // characters that stand for bytes: below this
  MAX_SPLITS = 8,
  MAX_TEXT = 1 << 30 // bytes encoded at a time
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
  int32_t left, right; // a pair of ids
  int32_t rank;        // when it was learned
  int32_t merged;      // what it becomes
} Merge;

// Arrays and maps are stb_ds's.
struct Tokenizer {
  uint16_t character_of[BYTES]; // the alphabet, and back (-1: none)
  int16_t byte_of[ALPHABET];
  Token *tokens;           // by id
  TextId *vocab;           // map from a token as the file writes it
  Merge *merges;           // sorted
  TextId *added;           // looked for in the text itself, before anything else
  int32_t *before, *after; // special tokens around every text
  int32_t byte_ids[BYTES]; // the token of a single byte, or -1
  pcre2_code
      *splits[MAX_SPLITS]; // each splits the pieces of the one before: its matches, and what lies between
  int split_count;
  bool whole_words;     // a piece that is a token is taken whole, whatever merges made it
  bool space_first;     // a space is put before a text that begins without one
  Reason cannot_encode; // empty: it can
};

static const char split_gpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

// --- bytes as characters -----------------------------------------------------------------------------------

// The vocabulary is JSON text, so each byte has a printable character: printable Latin-1 stands for itself,
// the other 68 bytes take U+0100 and up in their order. (The map is GPT-2's bytes_to_unicode.)
static void fill_alphabet(Tokenizer *t) {
  memset(t->byte_of, -1, sizeof t->byte_of);
  for (int byte = 0, next = BYTES; byte < BYTES; byte++) {
    bool itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    t->character_of[byte] = (uint16_t)(itself ? byte : next++);
    t->byte_of[t->character_of[byte]] = (int16_t)byte;
  }
}

// Bytes as the vocabulary writes them; the caller frees it.
static char *characters(const Tokenizer *t, const char *bytes, int64_t length) {
  char *text = host_alloc(2 * length + 1, 1, "a piece of text"), *out = text;
  for (int64_t i = 0; i < length; i++) {
    int character = t->character_of[(unsigned char)bytes[i]];
    if (character >= 0x80) *out++ = (char)(0xC0 | character >> 6);
    *out++ = (char)(character < 0x80 ? character : 0x80 | (character & 0x3F));
  }
  return text;
}

// The bytes of a token of the vocabulary. One with a character that is no byte stands for its text.
static Token read_token(const Tokenizer *t, const char *text) {
  int64_t length = (int64_t)strlen(text);
  Token token = {.bytes = host_alloc(length + 1, 1, "a tokenizer")};
  for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
    unsigned character = *at; // the alphabet's have one byte or two in UTF-8
    if (character >= 0x80) at++, character = (character - 0xC0u) << 6 | (*at & 0x3Fu);
    if (character >= ALPHABET || t->byte_of[character] < 0 || (character >= 0x80 && (*at & 0xC0) != 0x80)) {
      memcpy(token.bytes, text, (size_t)length);
      token.length = length;
      break;
    }
    token.bytes[token.length++] = (char)t->byte_of[character];
  }
  return token;
}

// --- reading the file --------------------------------------------------------------------------------------

static int64_t read_id(const cJSON *item) {
  return json_is_whole(item) && item->valuedouble <= MAX_ID ? (int64_t)item->valuedouble : -1;
}

static void put_token(Tokenizer *t, int64_t id, const char *text, bool special) {
  int64_t size = arrlen(t->tokens), more = id + 1 - size;
  if (more > 0) memset(arraddnptr(t->tokens, more), 0, (size_t)more * sizeof *t->tokens);
  free(t->tokens[id].bytes);
  t->tokens[id] = read_token(t, text);
  t->tokens[id].special = special;
}

static int32_t find(const Tokenizer *t, const char *text) {
  TextId *vocab = t->vocab; // a look-up may write the pointer
  return shget(vocab, text);
}

static bool read_vocabulary(Tokenizer *t, const cJSON *vocab, Reason *reason) {
  const cJSON *item;
  sh_new_strdup(t->vocab);
  shdefault(t->vocab, -1);
  cJSON_ArrayForEach(item, vocab) {
    int64_t id = read_id(item);
    if (id < 0) return refuse(reason, "the id of a token is not a whole number up to %d", MAX_ID);
    if (id < arrlen(t->tokens) && t->tokens[id].bytes)
      return refuse(reason, "the id %lld belongs to two tokens", (long long)id);
    put_token(t, id, item->string, false);
    if (find(t, item->string) < 0) shput(t->vocab, item->string, (int32_t)id);
  }
  for (int byte = 0; byte < BYTES; byte++) {
    char *text = characters(t, (const char[]){(char)byte}, 1);
    t->byte_ids[byte] = find(t, text);
    free(text);
  }
  return arrlen(t->tokens) > 0 || refuse(reason, "its vocabulary is empty");
}

// lstrip, rstrip and single_word look at the text around an added token; language models do not use them.
static bool read_added_tokens(Tokenizer *t, const cJSON *added, Reason *reason) {
  const cJSON *item;
  cJSON_ArrayForEach(item, added) {
    int64_t id = read_id(json_member(item, "id"));
    const char *text = json_text(item, "content");
    if (id < 0 || !text) return refuse(reason, "an added token has no id or no content");
    put_token(t, id, text, json_true(item, "special", false));
    arrput(t->added, ((TextId){text_format("%s", text), (int32_t)id}));
    if (!*t->cannot_encode.text && (json_true(item, "lstrip", false) || json_true(item, "rstrip", false) ||
                                    json_true(item, "single_word", false)))
      refuse(&t->cannot_encode, "the added token \"%s\" has lstrip, rstrip or single_word", text);
  }
  return true;
}

static int compare_merges(const void *a, const void *b) {
  const Merge *x = a, *y = b;
  if (x->left != y->left) return x->left < y->left ? -1 : 1;
  if (x->right != y->right) return x->right < y->right ? -1 : 1;
  return x->rank < y->rank ? -1 : x->rank > y->rank;
}

// "a b" or, in newer files, ["a", "b"].
static bool read_merges(Tokenizer *t, const cJSON *merges, Reason *reason) {
  const cJSON *item;
  cJSON_ArrayForEach(item, merges) {
    const char *pair = cJSON_GetStringValue(item), *space = pair ? strchr(pair, ' ') : NULL;
    const char *left = space ? pair : cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));
    const char *right = space ? space + 1 : cJSON_GetStringValue(cJSON_GetArrayItem(item, 1));
    Merge merge = {.rank = (int32_t)arrlen(t->merges)};
    if (!left || !right || (!space && cJSON_GetArraySize(item) != 2))
      return refuse(reason, "merge %d is no pair of tokens", merge.rank);
    int length = (int)(space ? space - pair : (ptrdiff_t)strlen(left));
    char *first = text_format("%.*s", length, left), *both = text_format("%s%s", first, right);
    merge.left = find(t, first), merge.right = find(t, right), merge.merged = find(t, both);
    free(first);
    free(both);
    if (merge.left < 0 || merge.right < 0 || merge.merged < 0)
      return refuse(reason, "merge %d names a token that the vocabulary lacks", merge.rank);
    arrput(t->merges, merge);
  }
  if (t->merges) qsort(t->merges, (size_t)arrlen(t->merges), sizeof *t->merges, compare_merges);
  return true;
}

static Reason pcre2_text(int error) {
  Reason message = {""};
  pcre2_get_error_message(error, (PCRE2_UCHAR *)message.text, sizeof message.text);
  return message;
}

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

// How text is split: GPT-2's ByteLevel, or a sequence that ends in a ByteLevel, of Splits (Llama 3) or Digits (SmolLM2).
static bool read_pre_tokenizer(Tokenizer *t, const cJSON *step, bool alone) {
  const cJSON *item;
  if (json_is(step, "type", "Sequence")) {
    cJSON_ArrayForEach(item, json_member(step, "pretokenizers")) {
      if (!read_pre_tokenizer(t, item, false)) return false;
    }
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
  const char *type = json_text(step, "type"), *expression = json_text(json_member(step, "pattern"), "Regex");
  if (json_is(step, "type", "Split") && expression && json_is(step, "behavior", "Isolated") &&
      !json_true(step, "invert", false))
    return add_split(t, expression);
  return refuse(&t->cannot_encode,
                "its pre_tokenizer has a step of type %s, which this program does not support",
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

// Templates: special tokens, the text ("A") somewhere among them. A ByteLevel is about offsets, not about ids.
static bool read_post_processor(Tokenizer *t, const cJSON *step) {
  const cJSON *item, *id;
  if (!step || json_is(step, "type", "ByteLevel")) return true;
  if (!json_is(step, "type", "TemplateProcessing") && !json_is(step, "type", "Sequence"))
    return refuse(&t->cannot_encode, "its post_processor is of a type that this program does not support");
  cJSON_ArrayForEach(item, json_member(step, "processors")) {
    if (!read_post_processor(t, item)) return false;
  }
  bool text_passed = false;
  cJSON_ArrayForEach(item, json_member(step, "single")) {
    const cJSON *special = json_member(item, "SpecialToken");
    text_passed |= !special;
    if (!special) continue;
    const char *name = json_text(special, "id");
    const cJSON *known = name ? json_member(json_member(step, "special_tokens"), name) : NULL;
    if (!known)
      return refuse(&t->cannot_encode, "its template names a special token that it does not explain");
    cJSON_ArrayForEach(id, json_member(known, "ids")) {
      if (read_id(id) < 0 || read_id(id) >= arrlen(t->tokens))
        return refuse(&t->cannot_encode, "a special token of its template has no id");
      arrput(*(text_passed ? &t->after : &t->before), (int32_t)read_id(id));
    }
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

static bool is_text(const cJSON *item) {
  return cJSON_IsString(item) && *item->valuestring;
}

static bool read_root(Tokenizer *t, const cJSON *root, Reason *reason) {
  const cJSON *model = json_member(root, "model"), *type = json_member(model, "type");
  const cJSON *vocab = json_member(model, "vocab"), *merges = json_member(model, "merges");
  const cJSON *decoder = json_member(root, "decoder");
  if (type && !json_is(model, "type", "BPE"))
    return refuse(reason, "its model is %s and not BPE",
                  cJSON_IsString(type) ? type->valuestring : "unknown");
  if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
    return refuse(reason, "its model has no vocab or no merges");
  if (json_true(model, "byte_fallback", false) || is_text(json_member(model, "continuing_subword_prefix")) ||
      is_text(json_member(model, "end_of_word_suffix")) || (decoder && !has_byte_level(decoder, "decoders")))
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
  fill_alphabet(t);
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
  for (int64_t i = 0; i < arrlen(t->added); i++) free(t->added[i].key);
  for (int i = 0; i < t->split_count; i++) pcre2_code_free(t->splits[i]);
  arrfree(t->tokens);
  arrfree(t->merges);
  arrfree(t->added);
  arrfree(t->before);
  arrfree(t->after);
  shfree(t->vocab);
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

// The merge of a pair; NULL where there is none. Of equal pairs the first learned counts.
static const Merge *find_merge(const Tokenizer *t, int32_t left, int32_t right) {
  int64_t low = 0, high = arrlen(t->merges);
  const Merge wanted = {.left = left, .right = right, .rank = -1};
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (compare_merges(&t->merges[middle], &wanted) < 0)
      low = middle + 1;
    else
      high = middle;
  }
  bool found = low < arrlen(t->merges) && t->merges[low].left == left && t->merges[low].right == right;
  return found ? &t->merges[low] : NULL;
}

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
      bool merge = i + 1 < count && ids[i] == first->left && ids[i + 1] == first->right;
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
  if (t->whole_words) {
    char *text = characters(t, piece, length);
    int32_t whole = find(t, text);
    free(text);
    if (whole >= 0) {
      arrput(e->ids, whole);
      return;
    }
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
  for (int64_t i = 0; i < arrlen(t->added); i++) {
    const TextId *a = &t->added[i];
    if (*a->key && *a->key == *text && (int64_t)strlen(a->key) <= length &&
        !memcmp(a->key, text, strlen(a->key)) && (!longest || strlen(a->key) > strlen(longest->key)))
      longest = a;
  }
  return longest;
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
  bool good = true;
  if (*t->cannot_encode.text)
    good = refuse(reason, "the tokenizer can decode, but not encode: %s", t->cannot_encode.text);
  else if (length > MAX_TEXT)
    good = refuse(reason, "a text of %lld bytes is too long to be encoded at once", (long long)length);
  for (int64_t i = 0; special && i < arrlen(t->before); i++) arrput(e.ids, t->before[i]);
  good = good && encode_text(&e, text, length);
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

// Appends to an stb array of bytes.
static void append(char **text, const char *bytes, int64_t length) {
  if (length) memcpy(arraddnptr(*text, length), bytes, (size_t)length);
}

// The array as memory of the caller's, with a terminator.
static char *take(char *array, int64_t *length) {
  *length = arrlen(array);
  char *text = host_alloc(*length + 1, 1, "a text");
  if (array) memcpy(text, array, (size_t)*length);
  arrfree(array);
  return text;
}

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, int64_t *length) {
  char *text = NULL;
  for (int64_t i = 0; i < count; i++) {
    bool known = ids[i] >= 0 && ids[i] < arrlen(t->tokens) && t->tokens[ids[i]].bytes;
    if (known)
      append(&text, t->tokens[ids[i]].bytes, t->tokens[ids[i]].length);
    else
      append(&text, "\xEF\xBF\xBD", 3);
  }
  return take(text, length);
}

static char *show(char *bytes, int64_t length) {
  char *shown = bytes_show(bytes, length);
  free(bytes);
  return shown;
}

char *tokenizer_show(const Tokenizer *t, const int32_t *ids, int64_t count) {
  int64_t length;
  char *bytes = tokenizer_decode(t, ids, count, &length);
  return show(bytes, length);
}

char *byte_decode(const int32_t *tokens, int64_t count) {
  static const char end_of_text[] = "\n<|endoftext|>\n";
  int64_t length;
  char *text = NULL;
  for (int64_t i = 0; i < count; i++) {
    if (tokens[i] == END_OF_TEXT)
      append(&text, end_of_text, sizeof end_of_text - 1);
    else if (tokens[i] < 0 || tokens[i] > 255)
      append(&text, "\xEF\xBF\xBD", 3);
    else
      append(&text, &(char){(char)tokens[i]}, 1);
  }
  char *bytes = take(text, &length);
  return show(bytes, length);
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
