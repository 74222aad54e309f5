#include "data/tokenizer.h"

#include <errno.h>
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
  int64_t key;   // left << 32 | right
  int32_t value; // what the pair becomes
} Merge;

enum { TEXT = -1 }; // in a template

// Arrays and maps are stb_ds's; the maps keep the order in which they were filled.
struct Tokenizer {
  Token *tokens;           // by id
  TextId *vocab;           // the ids of tokens as the file writes them
  TextId *added;           // the same of those looked for in the text itself, before anything else
  Merge *merges;           // the first learned first
  int32_t byte_ids[BYTES]; // the token of a single byte, or -1
  int32_t *template;       // special tokens around TEXT
  // Each splits the pieces of the one before: its matches, and what lies between.
  pcre2_code *splits[MAX_SPLITS];
  int split_count;
  bool whole_words;     // a piece that is a token is taken whole, whatever merges made it
  bool space_first;     // a space is put before a text that begins without one
  Reason cannot_encode; // empty: it can
  int32_t *ids;         // of the text that is being encoded
  int64_t count;        // so far
};

// --- bytes as characters -----------------------------------------------------------------------------------

// The file is JSON text, so each byte has a printable character: printable Latin-1 stands for itself, the other
// 68 bytes take U+0100 and up in their order. (The map is GPT-2's bytes_to_unicode.)
static int character_of(int byte) {
  if (byte < 0x21) return 0x100 + byte;
  if (byte >= 0x7F && byte < 0xA1) return 0x121 + byte - 0x7F;
  return byte == 0xAD ? 0x143 : byte;
}

// The id of the token of these very bytes, or -1.
static int32_t find_bytes(Tokenizer *t, const char *bytes, int64_t length) {
  char *text = host_alloc(2 * length + 1, 1, "a piece of text"), *out = text;
  for (int64_t i = 0; i < length; i++) {
    int character = character_of((unsigned char)bytes[i]);
    if (character >= 0x80) *out++ = (char)(0xC0 | character >> 6);
    *out++ = (char)(character < 0x80 ? character : 0x80 | (character & 0x3F));
  }
  int32_t id = shget(t->vocab, text);
  free(text);
  return id;
}

// --- reading the file --------------------------------------------------------------------------------------

static int32_t read_id(const cJSON *item) {
  return json_is_whole(item) && item->valuedouble < MAX_ID ? item->valueint : -1;
}

// The token stands for the bytes of its characters; one with a character that is no byte, for its text.
static bool put_token(Tokenizer *t, const cJSON *item, const char *text, bool special, Reason *reason) {
  int32_t id = read_id(item);
  size_t length = strlen(text);
  if (id < 0) return refuse(reason, "the id of \"%s\" is not a whole number below %d", text, MAX_ID);
  Token token = {.bytes = text_format("%s", text), .special = special};
  for (size_t at = 0, taken; at < length; at += taken) {
    taken = (size_t)utf8_length(text + at, length - at);
    int character = taken == 2 ? (text[at] & 0x1F) << 6 | (text[at + 1] & 0x3F) : text[at], byte = 0;
    while (byte < BYTES && character_of(byte) != character) byte++;
    if (taken == 0 || taken > 2 || byte == BYTES) {
      memcpy(token.bytes, text, length);
      token.length = (int64_t)length;
      break;
    }
    token.bytes[token.length++] = (char)byte;
  }
  while (arrlen(t->tokens) <= id) arrput(t->tokens, (Token){0});
  free(t->tokens[id].bytes);
  t->tokens[id] = token;
  return true;
}

static bool read_vocabulary(Tokenizer *t, const cJSON *vocab, Reason *reason) {
  const cJSON *item;
  cJSON_ArrayForEach(item, vocab) {
    int32_t id = read_id(item);
    if (id >= 0 && id < arrlen(t->tokens) && t->tokens[id].bytes)
      return refuse(reason, "the id %d belongs to two tokens", id);
    if (!put_token(t, item, item->string, false, reason)) return false;
    shput(t->vocab, item->string, id);
  }
  return t->tokens || refuse(reason, "its vocabulary is empty");
}

// "a b" or, in newer files, ["a", "b"]. A pair that comes again keeps its first place.
static bool read_merges(Tokenizer *t, const cJSON *merges, Reason *reason) {
  const cJSON *item;
  int count = 0;
  cJSON_ArrayForEach(item, merges) {
    const char *pair = cJSON_GetStringValue(item), *left = cJSON_GetStringValue(cJSON_GetArrayItem(item, 0)),
               *right = cJSON_GetStringValue(cJSON_GetArrayItem(item, 1));
    bool two = left && right && cJSON_GetArraySize(item) == 2;
    if (!two && !(pair && strchr(pair, ' '))) return refuse(reason, "merge %d is no pair of tokens", count);
    char *text = two ? text_format("%s %s", left, right) : text_format("%s", pair),
         *space = strchr(text, ' ');
    *space = 0;
    int64_t ids[] = {shget(t->vocab, text), shget(t->vocab, space + 1)};
    memmove(space, space + 1, strlen(space + 1) + 1);
    int32_t both = shget(t->vocab, text);
    free(text);
    if (ids[0] < 0 || ids[1] < 0 || both < 0)
      return refuse(reason, "merge %d names a token that the vocabulary lacks", count);
    hmput(t->merges, ids[0] << 32 | ids[1], both);
    count++;
  }
  return true;
}

// lstrip, rstrip and single_word look at the text around an added token; language models do not use them.
static bool read_added_tokens(Tokenizer *t, const cJSON *added, Reason *reason) {
  static const char *const settings[] = {"lstrip", "rstrip", "single_word"};
  const cJSON *item;
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
  const char *type = json_text(step, "type"), *expression = NULL;
  if (json_is(step, "type", "ByteLevel") && (alone || !json_true(step, "add_prefix_space", true))) {
    t->space_first = json_true(step, "add_prefix_space", true);
    if (!json_true(step, "use_regex", true)) return true;
    expression = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
  } else if (json_is(step, "type", "Digits")) {
    expression = json_true(step, "individual_digits", false) ? "\\p{N}" : "\\p{N}+";
  } else if (json_is(step, "type", "Split") && json_is(step, "behavior", "Isolated") &&
             !json_true(step, "invert", false)) {
    expression = json_text(json_member(step, "pattern"), "Regex");
  }
  if (!expression || t->split_count == MAX_SPLITS)
    return refuse(
        &t->cannot_encode,
        "its pre_tokenizer has more than %d steps, or one of type %s as this program does not support it",
        MAX_SPLITS, type ? type : "unknown");
  int error;
  PCRE2_SIZE at;
  pcre2_code *code =
      pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &at, NULL);
  if (!code)
    return refuse(&t->cannot_encode,
                  "its regular expression is not understood at character %zu (PCRE2 error %d)", at, error);
  t->splits[t->split_count++] = code;
  return true;
}

// A template: special tokens, the text ("A") somewhere among them. A ByteLevel is about offsets, not about ids.
static bool read_post_processor(Tokenizer *t, const cJSON *step) {
  const cJSON *item, *id;
  bool good = json_is(step, "type", "TemplateProcessing") || json_is(step, "type", "ByteLevel");
  cJSON_ArrayForEach(item, json_member(step, "single")) {
    const char *name = json_text(json_member(item, "SpecialToken"), "id");
    const cJSON *ids = json_member(json_member(json_member(step, "special_tokens"), name ? name : ""), "ids");
    good &= !name || ids;
    if (!name) arrput(t->template, TEXT);
    cJSON_ArrayForEach(id, ids) {
      good &= read_id(id) >= 0 && read_id(id) < arrlen(t->tokens);
      arrput(t->template, read_id(id));
    }
  }
  return good ||
         refuse(&t->cannot_encode, "its post_processor is not supported, or names tokens that are none");
}

// What only encoding needs. False leaves the reason in cannot_encode.
static bool read_encoding(Tokenizer *t, const cJSON *root, const cJSON *model) {
  Reason *reason = &t->cannot_encode;
  const cJSON *pre = json_member(root, "pre_tokenizer"), *post = json_member(root, "post_processor");
  const cJSON *normalizer = json_member(root, "normalizer"), *dropout = json_member(model, "dropout");
  if (*reason->text) return false;
  if (normalizer && !json_is(normalizer, "type", "NFC")) // text is taken to be in NFC already
    return refuse(reason, "it has a normalizer, which this program does not apply");
  if (!has_byte_level(pre, "pretokenizers")) return refuse(reason, "its pre_tokenizer has no ByteLevel step");
  if (dropout && dropout->valuedouble != 0) return refuse(reason, "its merges are dropped at random");
  for (int byte = 0; byte < BYTES; byte++)
    if ((t->byte_ids[byte] = find_bytes(t, &(char){(char)byte}, 1)) < 0)
      return refuse(reason, "its vocabulary has no token for byte %d", byte);
  t->whole_words = json_true(model, "ignore_merges", false);
  for (const cJSON *step = NULL; (step = next_step(pre, "pretokenizers", step));)
    if (!read_split(t, step, step == pre)) return false;
  for (const cJSON *step = NULL; (step = next_step(post, "processors", step));)
    if (!read_post_processor(t, step)) return false;
  if (!t->template) arrput(t->template, TEXT);
  return true;
}

static bool read_root(Tokenizer *t, const cJSON *root, Reason *reason) {
  const cJSON *model = json_member(root, "model"), *decoder = json_member(root, "decoder");
  const cJSON *vocab = json_member(model, "vocab"), *merges = json_member(model, "merges");
  const char *type = json_text(model, "type"), *prefix = json_text(model, "continuing_subword_prefix"),
             *suffix = json_text(model, "end_of_word_suffix");
  if (json_member(model, "type") && !json_is(model, "type", "BPE"))
    return refuse(reason, "its model is %s and not BPE", type ? type : "unknown");
  if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
    return refuse(reason, "its model has no vocab or no merges");
  if (json_true(model, "byte_fallback", false) || (prefix && *prefix) || (suffix && *suffix) ||
      (decoder && !has_byte_level(decoder, "decoders")))
    return refuse(reason, "it is no byte-level BPE as GPT-2 and Llama 3 have it");
  if (!read_vocabulary(t, vocab, reason) || !read_merges(t, merges, reason) ||
      !read_added_tokens(t, json_member(root, "added_tokens"), reason))
    return false;
  read_encoding(t, root, model);
  return true;
}

static Tokenizer *new_tokenizer(void) {
  Tokenizer *t = host_alloc(1, sizeof *t, "a tokenizer");
  sh_new_strdup(t->vocab);
  sh_new_strdup(t->added);
  shdefault(t->vocab, -1);
  return t;
}

Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason) {
  cJSON *root = json_parse(text, length, reason);
  Tokenizer *t = root ? new_tokenizer() : NULL;
  bool good = root && read_root(t, root, reason);
  cJSON_Delete(root);
  if (good) return t;
  tokenizer_close(t);
  return NULL;
}

Tokenizer *tokenizer_open(const char *path, Reason *reason) {
  Path within = path_in(path, "tokenizer.json");
  if (path_is_folder(path)) path = within.text;
  size_t length;
  char *text = file_try_read(path, &length, reason);
  Tokenizer *t = text ? tokenizer_parse(text, length, reason) : NULL;
  if (text && !t) refuse(reason, "%s is no tokenizer that this program can use: %s", path, reason->text);
  if (!text && !*reason->text) refuse(reason, "cannot open the tokenizer %s: %s", path, strerror(ENOENT));
  free(text);
  return t;
}

Tokenizer *tokenizer_of_bytes(void) {
  Tokenizer *t = new_tokenizer();
  for (int byte = 0; byte < BYTES; byte++) {
    Token token = {text_format("%c", byte), .length = 1};
    arrput(t->tokens, token);
    t->byte_ids[byte] = byte;
  }
  Token end = {text_format("\n<|endoftext|>\n"), .length = 15, .special = true};
  arrput(t->tokens, end);
  arrput(t->template, TEXT);
  return t;
}

void tokenizer_close(Tokenizer *t) {
  if (!t) return;
  for (int64_t i = 0; i < arrlen(t->tokens); i++) free(t->tokens[i].bytes);
  for (int i = 0; i < t->split_count; i++) pcre2_code_free(t->splits[i]);
  arrfree(t->tokens);
  arrfree(t->template);
  hmfree(t->merges);
  shfree(t->vocab);
  shfree(t->added);
  free(t);
}

int64_t tokenizer_size(const Tokenizer *t) {
  return arrlen(t->tokens);
}

// --- encoding ----------------------------------------------------------------------------------------------

// The place of a pair in the order of merges, or -1. Ids are below 2^24, which keeps stb_ds.h's hash within its ints.
static ptrdiff_t find_merge(Tokenizer *t, int64_t left, int64_t right) {
  return hmgeti(t->merges, left << 32 | right);
}

// Merges the pair that was learned first wherever it stands, left to right, again and again. Returns how many ids remain.
static int64_t merge_pairs(Tokenizer *t, int32_t *ids, int64_t count) {
  for (;;) {
    ptrdiff_t first = PTRDIFF_MAX;
    for (int64_t i = 0; i + 1 < count; i++) {
      ptrdiff_t place = find_merge(t, ids[i], ids[i + 1]);
      if (place >= 0 && place < first) first = place;
    }
    if (first == PTRDIFF_MAX) return count;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      bool merges = i + 1 < count && find_merge(t, ids[i], ids[i + 1]) == first;
      ids[kept++] = merges ? t->merges[first].value : ids[i];
      i += merges;
    }
    count = kept;
  }
}

static void encode_piece(Tokenizer *t, const char *piece, int64_t length) {
  int32_t *ids = t->ids + t->count, whole = t->whole_words ? find_bytes(t, piece, length) : -1;
  for (int64_t i = 0; i < length; i++) ids[i] = t->byte_ids[(unsigned char)piece[i]];
  if (whole >= 0) *ids = whole;
  t->count += whole >= 0 ? 1 : merge_pairs(t, ids, length);
}

// Pieces by the expressions from `level` on: matches, and what lies between them.
static bool encode_split(Tokenizer *t, int level, const char *text, int64_t length, Reason *reason) {
  if (length == 0) return true;
  if (level == t->split_count) {
    encode_piece(t, text, length);
    return true;
  }
  pcre2_match_data *match = pcre2_match_data_create_from_pattern(t->splits[level], NULL);
  if (!match) fail("out of memory for a piece of text of %lld bytes", (long long)length);
  bool good = true;
  for (int64_t done = 0, start, end; good && done < length; done = end) {
    int result = pcre2_match(t->splits[level], (PCRE2_SPTR)text, (size_t)length, (size_t)done,
                             PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match, NULL);
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(match);
    bool matches = result > 0 && (int64_t)found[0] >= done && found[1] > found[0]; // \K may say otherwise
    start = matches ? (int64_t)found[0] : length;
    end = matches ? (int64_t)found[1] : length;
    if (result < 0 && result != PCRE2_ERROR_NOMATCH)
      good = refuse(reason, "its regular expression fails on the text (PCRE2 error %d)", result);
    good = good && encode_split(t, level + 1, text + done, start - done, reason) &&
           encode_split(t, level + 1, text + start, end - start, reason);
  }
  pcre2_match_data_free(match);
  return good;
}

// Text without added tokens.
static bool encode_part(Tokenizer *t, const char *text, int64_t length, Reason *reason) {
  bool space = t->space_first && length && *text != ' ';
  for (int64_t at = 0, taken; t->split_count && at < length; at += taken)
    if (!(taken = utf8_length(text + at, (size_t)(length - at))))
      return refuse(reason, "the text is not UTF-8 at byte %lld", (long long)at);
  char *part = host_alloc(length + 1, 1, "a text");
  *part = ' ';
  if (length) memcpy(part + space, text, (size_t)length);
  bool good = encode_split(t, 0, part, length + space, reason);
  free(part);
  return good;
}

// Cuts the text at added tokens, the longest first, and encodes what lies between them.
static bool encode_text(Tokenizer *t, const char *text, int64_t length, Reason *reason) {
  const TextId *added = t->added, *end = added + shlen(added);
  int64_t done = 0;
  for (int64_t at = 0; at < length; at++) {
    int64_t longest = 0;
    int32_t id = 0;
    for (const TextId *a = added; a < end; a++) {
      int64_t size = *a->key == text[at] ? (int64_t)strlen(a->key) : 0;
      if (size > longest && size <= length - at && !memcmp(a->key, text + at, (size_t)size))
        longest = size, id = a->value;
    }
    if (!longest) continue;
    if (!encode_part(t, text + done, at - done, reason)) return false;
    t->ids[t->count++] = id;
    done = at + longest;
    at = done - 1;
  }
  return encode_part(t, text + done, length - done, reason);
}

int32_t *tokenizer_encode(Tokenizer *t, const char *text, int64_t length, bool special, int64_t *count,
                          Reason *reason) {
  if (*t->cannot_encode.text) {
    refuse(reason, "the tokenizer can decode, but not encode: %s", t->cannot_encode.text);
    return NULL;
  }
  bool good = true;
  t->count = 0; // a byte makes at most one token, and a space before it another
  t->ids = host_alloc((2 * length + 1) * arrlen(t->template), sizeof *t->ids, "tokens");
  for (int64_t i = 0; i < arrlen(t->template) && good; i++)
    if (t->template[i] == TEXT)
      good = encode_text(t, text, length, reason);
    else if (special)
      t->ids[t->count++] = t->template[i];
  *count = t->count;
  if (good) return t->ids;
  free(t->ids);
  return NULL;
}

// --- decoding ----------------------------------------------------------------------------------------------

// U+FFFD where no token has this id.
static Token token_of(const Tokenizer *t, int64_t id) {
  bool known = id >= 0 && id < arrlen(t->tokens) && t->tokens[id].bytes;
  return known ? t->tokens[id] : (Token){.bytes = "\xEF\xBF\xBD", .length = 3, .special = true};
}

int64_t tokenizer_bytes(const Tokenizer *t, int64_t id) {
  Token token = token_of(t, id);
  return token.special ? 0 : token.length;
}

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, int64_t *length) {
  *length = 0;
  for (int64_t i = 0; i < count; i++) *length += token_of(t, ids[i]).length;
  char *text = host_alloc(*length + 1, 1, "a text"), *out = text;
  for (int64_t i = 0; i < count; i++) {
    Token token = token_of(t, ids[i]);
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
  for (int64_t at = 0, end; at < length; at = end + 1) {
    for (end = at; end < length && bytes[end] != '\n' && bytes[end] != '\t';) end++;
    text_escape(out, (size_t)(4 * (end - at) + 1), bytes + at, (size_t)(end - at));
    out += strlen(out);
    if (end < length) *out++ = bytes[end];
  }
  return text;
}
