#include "data/tokenizer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "data/json.h"
#include "kernels/base/alloc.h"
#include "kernels/base/text.h"

enum {
  MAX_ID = 1 << 22, // a valid tokenizer's; it bounds the memory that a damaged file can claim
  BYTES = 256
};

typedef struct {
  char *bytes; // the token's text; NULL: no token has this id
  int64_t length;
  bool special; // a mark, not text: "<|endoftext|>"
} Token;

struct Tokenizer {
  Token *tokens; // by id; an array of stb_ds.h
};

// GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up.
static int character_of(int byte) {
  if (byte < 0x21) return 0x100 + byte;
  if (byte >= 0x7F && byte < 0xA1) return 0x121 + byte - 0x7F;
  return byte == 0xAD ? 0x143 : byte;
}

// The token stands for the bytes of its characters or, added or with a character that is no byte, for its text.
static bool put_token(Tokenizer *t, const cJSON *id, const char *text, bool added, bool special,
                      Reason *reason) {
  size_t length = strlen(text);
  if (!json_is_whole(id) || id->valuedouble >= MAX_ID)
    return refuse(reason, "the id of \"%s\" is not a whole number below %d", text, MAX_ID);
  Token token = {.bytes = text_format("%s", text), .special = special};
  for (size_t at = 0, taken; at < length; at += taken) {
    taken = (size_t)utf8_length(text + at, length - at);
    int character = taken == 2 ? (text[at] & 0x1F) << 6 | (text[at + 1] & 0x3F) : text[at], byte = 0;
    while (byte < BYTES && character_of(byte) != character) byte++;
    if (added || taken == 0 || taken > 2 || byte == BYTES) {
      memcpy(token.bytes, text, length);
      token.length = (int64_t)length;
      break;
    }
    token.bytes[token.length++] = (char)byte;
  }
  while (arrlen(t->tokens) <= id->valueint) arrput(t->tokens, (Token){0});
  free(t->tokens[id->valueint].bytes);
  t->tokens[id->valueint] = token;
  return true;
}

static bool read_vocabulary(Tokenizer *t, const cJSON *vocab, Reason *reason) {
  const cJSON *id;
  cJSON_ArrayForEach(id, vocab) {
    if (json_is_whole(id) && id->valuedouble < arrlen(t->tokens) && t->tokens[id->valueint].bytes)
      return refuse(reason, "the id %d belongs to two tokens", id->valueint);
    if (!put_token(t, id, id->string, false, false, reason)) return false;
  }
  return t->tokens || refuse(reason, "its vocabulary is empty");
}

static bool read_added_tokens(Tokenizer *t, const cJSON *added, Reason *reason) {
  const cJSON *item;
  cJSON_ArrayForEach(item, added) {
    const char *text = json_text(item, "content");
    if (!text) return refuse(reason, "an added token has no content");
    if (!put_token(t, json_member(item, "id"), text, true, cJSON_IsTrue(json_member(item, "special")),
                   reason))
      return false;
  }
  return true;
}

// The decoder is a ByteLevel, or a Sequence with one.
static bool is_byte_level(const cJSON *decoder) {
  const cJSON *step;
  cJSON_ArrayForEach(step, json_member(decoder, "decoders")) {
    if (json_is(step, "type", "ByteLevel")) return true;
  }
  return json_is(decoder, "type", "ByteLevel");
}

static bool read_root(Tokenizer *t, const cJSON *root, Reason *reason) {
  const cJSON *model = json_member(root, "model"), *decoder = json_member(root, "decoder");
  const cJSON *vocab = json_member(model, "vocab");
  const char *type = json_text(model, "type"), *prefix = json_text(model, "continuing_subword_prefix"),
             *suffix = json_text(model, "end_of_word_suffix");
  if (json_member(model, "type") && !json_is(model, "type", "BPE"))
    return refuse(reason, "its model is %s and not BPE", type ? type : "unknown");
  if (!cJSON_IsObject(vocab) || !cJSON_IsArray(json_member(model, "merges")))
    return refuse(reason, "its model has no vocab or no merges");
  if (cJSON_IsTrue(json_member(model, "byte_fallback")) || (prefix && *prefix) || (suffix && *suffix) ||
      (decoder && !is_byte_level(decoder)))
    return refuse(reason, "it is no byte-level BPE as GPT-2 and Llama 3 have it");
  return read_vocabulary(t, vocab, reason) && read_added_tokens(t, json_member(root, "added_tokens"), reason);
}

Tokenizer *tokenizer_parse(const char *text, size_t length, Reason *reason) {
  cJSON *root = json_parse(text, length, reason);
  Tokenizer *t = root ? host_alloc(1, sizeof *t, "a tokenizer") : NULL;
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
  char *text = file_read(path, &length, reason);
  Tokenizer *t = text ? tokenizer_parse(text, length, reason) : NULL;
  if (text && !t) refuse(reason, "%s is no tokenizer that this program can use: %s", path, reason->text);
  if (!text && !*reason->text) refuse(reason, "cannot open the tokenizer %s: %s", path, strerror(ENOENT));
  free(text);
  return t;
}

Tokenizer *tokenizer_of_bytes(void) {
  Tokenizer *t = host_alloc(1, sizeof *t, "a tokenizer");
  for (int byte = 0; byte < BYTES; byte++) {
    Token token = {text_format("%c", byte), .length = 1};
    arrput(t->tokens, token);
  }
  Token end = {text_format("\n<|endoftext|>\n"), .length = 15, .special = true};
  arrput(t->tokens, end);
  return t;
}

void tokenizer_close(Tokenizer *t) {
  if (!t) return;
  for (int64_t i = 0; i < arrlen(t->tokens); i++) free(t->tokens[i].bytes);
  arrfree(t->tokens);
  free(t);
}

// U+FFFD where no token has this id.
static Token find_token(const Tokenizer *t, int64_t id) {
  bool known = id >= 0 && id < arrlen(t->tokens) && t->tokens[id].bytes;
  return known ? t->tokens[id] : (Token){.bytes = "\xEF\xBF\xBD", .length = 3, .special = true};
}

int64_t tokenizer_vocab_size(const Tokenizer *t) {
  return arrlen(t->tokens);
}

int64_t tokenizer_bytes(const Tokenizer *t, int64_t id) {
  Token token = find_token(t, id);
  return token.special ? 0 : token.length;
}

int32_t tokenizer_find(const Tokenizer *t, const char *text) {
  int64_t length = (int64_t)strlen(text);
  for (int64_t id = 0; id < arrlen(t->tokens); id++)
    if (tokenizer_bytes(t, id) == length && !memcmp(t->tokens[id].bytes, text, (size_t)length))
      return (int32_t)id;
  return -1;
}

char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t count, int64_t *length) {
  *length = 0;
  for (int64_t i = 0; i < count; i++) *length += find_token(t, ids[i]).length;
  char *text = host_alloc(*length + 1, 1, "a text"), *out = text;
  for (int64_t i = 0; i < count; i++) {
    Token token = find_token(t, ids[i]);
    memcpy(out, token.bytes, (size_t)token.length);
    out += token.length;
  }
  return text;
}

char *tokenizer_show(const Tokenizer *t, const int32_t *ids, int64_t count) {
  int64_t length;
  char *bytes = tokenizer_decode(t, ids, count, &length);
  char *text = host_alloc(4 * length + 1, 1, "a text"), *out = text;
  for (int64_t at = 0, end; at < length; at = end + 1) {
    for (end = at; end < length && bytes[end] != '\n' && bytes[end] != '\t';) end++;
    text_escape(out, (size_t)(4 * (end - at) + 1), bytes + at, (size_t)(end - at));
    out += strlen(out);
    if (end < length) *out++ = bytes[end];
  }
  free(bytes);
  return text;
}
