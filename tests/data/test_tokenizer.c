// The tokenizer against Hugging Face's `tokenizers`: ids and decoded bytes of many texts (golden files), what
// is shown of half characters and unknown ids, long texts, and files that are refused.
#include "data/tokenizer.h"
#include "kernels/fail.h"
#include "tests/data_files.h"
#include "tests/process.h"

#include <cjson/cJSON.h>
#include <time.h>

#define GOLDEN "tests/golden/tokenizers/"

// --- against tokenizers ------------------------------------------------------------------------------------

// Texts are in hexadecimal: they may hold what JSON or C would change.
static char *from_hex(const cJSON *item, int64_t *length) {
  const char *hex = item->valuestring;
  *length = (int64_t)strlen(hex) / 2;
  char *bytes = calloc((size_t)*length + 1, 1);
  for (int64_t i = 0; i < *length; i++) {
    unsigned value;
    assert_int_equal(sscanf(hex + 2 * i, "%2x", &value), 1);
    bytes[i] = (char)value;
  }
  return bytes;
}

static int32_t *ids_of(const cJSON *list, int64_t *count) {
  *count = cJSON_GetArraySize(list);
  int32_t *ids = calloc((size_t)*count + 1, sizeof *ids);
  int64_t i = 0;
  const cJSON *item;
  cJSON_ArrayForEach(item, list) ids[i++] = (int32_t)item->valuedouble;
  return ids;
}

static void check_encoding(const Tokenizer *t, const char *text, int64_t length, bool special,
                           const cJSON *expected, const char *hex) {
  int64_t want_count, got_count;
  int32_t *want = ids_of(expected, &want_count),
          *got = tokenizer_encode(t, text, length, special, &got_count);
  for (int64_t i = 0; i < want_count || i < got_count; i++)
    if (i >= want_count || i >= got_count || want[i] != got[i])
      fail_msg("text %s: id %d of %d (should be of %d) is %d, should be %d", hex, (int)i, (int)got_count,
               (int)want_count, i < got_count ? got[i] : -1, i < want_count ? want[i] : -1);
  free(want);
  free(got);
}

static void check_row(const Tokenizer *t, const cJSON *row, const char *name) {
  const cJSON *answer = cJSON_GetObjectItem(row, name), *hex = cJSON_GetObjectItem(row, "text");
  int64_t length, count, want_length, got_length;
  char *text = from_hex(hex, &length);
  check_encoding(t, text, length, true, cJSON_GetObjectItem(answer, "ids"), hex->valuestring);
  check_encoding(t, text, length, false, cJSON_GetObjectItem(answer, "plain"), hex->valuestring);
  int32_t *ids = ids_of(cJSON_GetObjectItem(answer, "plain"), &count);
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; i++) bytes += tokenizer_bytes(t, ids[i]);
  bool special = strstr(text, "<|") || strstr(text, "two words"); // these tokens are no text
  assert_true(special ? bytes <= length : bytes == length);
  free(ids);
  ids = ids_of(cJSON_GetObjectItem(answer, "ids"), &count);
  char *want = from_hex(cJSON_GetObjectItem(answer, "decoded"), &want_length);
  char *got = tokenizer_decode(t, ids, count, &got_length);
  assert_int_equal(got_length, want_length);
  assert_memory_equal(got, want, (size_t)want_length);
  free(ids);
  free(want);
  free(got);
  free(text);
}

// Every row of a file of texts, by the name its answers have there; returns how many there are.
static int check_rows(const char *path, const char *texts, const char *name) {
  char *text = read_text(texts);
  cJSON *rows = cJSON_Parse(text);
  Tokenizer *t = tokenizer_open(path);
  for (const cJSON *row = rows->child; row; row = row->next) check_row(t, row, name);
  int count = cJSON_GetArraySize(rows);
  tokenizer_close(t);
  cJSON_Delete(rows);
  free(text);
  return count;
}

TEST(test_the_same_as_tokenizers) {
  assert_true(check_rows(GOLDEN "gpt2", GOLDEN "texts.json", "gpt2") > 100);
  assert_true(check_rows(GOLDEN "llama3", GOLDEN "texts.json", "llama3") > 100);
}

// LCE_TOKENIZER and LCE_TOKENIZER_TEXTS name another tokenizer.json and what make.py --check says about it.
TEST(test_another_tokenizer) {
  const char *path = getenv("LCE_TOKENIZER"), *texts = getenv("LCE_TOKENIZER_TEXTS");
  if (!path || !texts) skip();
  check_rows(path, texts, "other");
}

// --- decoding ----------------------------------------------------------------------------------------------

TEST(test_what_is_shown) {
  Tokenizer *t = tokenizer_open(GOLDEN "gpt2/tokenizer.json");
  int32_t end = (int32_t)tokenizer_size(t) - 1; // <|endoftext|>
  // The alphabet's first tokens are the bytes from '!' on, then Latin-1's printable ones, then the other
  // bytes.
  int32_t exclamation = 0, escape = 94 + 12 + 82 + 27, half = 94 + 12 + (0xC3 - 0xAE);
  char *shown = tokenizer_show(t, (const int32_t[]){exclamation, escape, half, end, -1, 1 << 30, end + 1}, 7);
  assert_string_equal(shown, "!\\x1B\\xC3<|endoftext|>\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
  free(shown);
  shown = tokenizer_show(t, NULL, 0);
  assert_string_equal(shown, "");
  free(shown);
  tokenizer_close(t);
}

// --- encoding ----------------------------------------------------------------------------------------------

TEST(test_text_must_be_utf8) {
  Tokenizer *t = tokenizer_open(GOLDEN "gpt2");
  int64_t count;
  ASSERT_FAILS(tokenizer_encode(t, "abc\xFF", 4, true, &count), "not UTF-8 at byte 3");
  ASSERT_FAILS(tokenizer_encode(t, "\xED\xA0\x80", 3, true, &count), "not UTF-8 at byte 0");
  ASSERT_FAILS(tokenizer_encode(t, "caf\xC3", 4, true, &count), "not UTF-8 at byte 3");
  int32_t *ids = tokenizer_encode(t, NULL, 0, true, &count);
  assert_int_equal(count, 0);
  free(ids);
  tokenizer_close(t);
}

// A piece of a million bytes takes no more than a few times as long as a million short pieces.
TEST(test_long_pieces) {
  enum { LENGTH = 1000000 };
  char *text = malloc(LENGTH);
  for (int i = 0; i < 2; i++) {
    memset(text, i ? ' ' : 'a', LENGTH);
    Tokenizer *t = tokenizer_open(i ? GOLDEN "gpt2" : GOLDEN "llama3");
    clock_t start = clock();
    int64_t count, length;
    int32_t *ids = tokenizer_encode(t, text, LENGTH, false, &count);
    assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 20);
    char *back = tokenizer_decode(t, ids, count, &length);
    assert_int_equal(length, LENGTH);
    assert_memory_equal(back, text, LENGTH);
    free(back);
    free(ids);
    tokenizer_close(t);
  }
  free(text);
}

// GPT-2's tokenizer with some members of the file, or of its model, replaced: {name, JSON}.
static Tokenizer *open_changed(bool of_model, const char *const (*members)[2], int count) {
  char *text = read_text(GOLDEN "gpt2/tokenizer.json");
  cJSON *root = cJSON_Parse(text), *model = cJSON_GetObjectItem(root, "model");
  for (int i = 0; i < count; i++)
    cJSON_ReplaceItemInObject(of_model ? model : root, members[i][0], cJSON_Parse(members[i][1]));
  cJSON *vocab = cJSON_GetObjectItem(model, "vocab");
  static const char *const made[] = {"ab", "bc", "aa", "aaaa"}; // as 1000 and up
  for (int i = 0; of_model && i < 4; i++) {
    cJSON_DeleteItemFromObject(vocab, made[i]);
    cJSON_AddNumberToObject(vocab, made[i], 1000 + i);
  }
  char *changed = cJSON_PrintUnformatted(root);
  Reason reason = {""};
  Tokenizer *t = tokenizer_parse(changed, strlen(changed), &reason);
  if (!t) fail_msg("%s", reason.text);
  cJSON_free(changed);
  cJSON_Delete(root);
  free(text);
  return t;
}

// "5 5" is a merge: it makes one token of 55 unless the digits are split one by one. A normalizer to NFC is not in the
// way.
TEST(test_digits) {
#define DIGITS(individual)                                                                                   \
  "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":" individual "},"    \
  "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}]}"
  static const char *const members[2][2][2] = {
      {{"normalizer", "{\"type\":\"NFC\"}"}, {"pre_tokenizer", DIGITS("false")}},
      {{"normalizer", "{\"type\":\"NFC\"}"}, {"pre_tokenizer", DIGITS("true")}}};
  for (int individual = 0; individual < 2; individual++) {
    Tokenizer *t = open_changed(false, members[individual], 2);
    int64_t count;
    free(tokenizer_encode(t, "55!", 3, true, &count));
    assert_int_equal(count, 2 + individual);
    tokenizer_close(t);
  }
}

// The pair learned first is merged first, of equal ones the leftmost; a pair's second merge is none.
TEST(test_merges) {
  static const char *const merges[][2] = {{"merges", "[\"b c\",\"a b\",\"a a\",\"aa aa\",\"b c\"]"}};
  Tokenizer *t = open_changed(true, merges, 1);
  int64_t count, b;
  int32_t *single = tokenizer_encode(t, "a", 1, false, &b);
  int32_t *ids = tokenizer_encode(t, "abcabaaaaa", 10, false, &count);
  const int32_t want[] = {*single, 1001, 1000, 1003, *single};
  assert_int_equal(count, 5);
  assert_memory_equal(ids, want, sizeof want);
  free(single);
  free(ids);
  free(tokenizer_encode(t, "", 0, false, &count));
  assert_int_equal(count, 0);
  tokenizer_close(t);
}

// --- files that will not do --------------------------------------------------------------------------------

#define BPE "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"

// A file with this model, of which one member is given; and the rest of the file.
#define MODEL(members, rest) "{\"model\":{" members "}" rest "}"
#define A                    "\"vocab\":{\"a\":0}"
#define NONE                 "\"merges\":[]"

TEST(test_refusals) {
  static const char *const cases[][2] = {
      {"", "no JSON object"},
      {"[]", "no JSON object"},
      {"{\"model\":{", "no JSON object"},
      {"{}", "no vocab"},
      {MODEL("\"type\":\"Unigram\",\"vocab\":[]", ""), "Unigram and not BPE"},
      {MODEL("\"vocab\":{}," NONE, ""), "vocabulary is empty"},
      {MODEL(A ",\"merges\":{}", ""), "no merges"},
      {MODEL("\"vocab\":{\"a\":-1}," NONE, ""), "not a whole number"},
      {MODEL("\"vocab\":{\"a\":1e18}," NONE, ""), "not a whole number"},
      {MODEL("\"vocab\":{\"a\":0.5}," NONE, ""), "not a whole number"},
      {MODEL("\"vocab\":{\"a\":\"0\"}," NONE, ""), "not a whole number"},
      {MODEL("\"vocab\":{\"a\":0,\"b\":0}," NONE, ""), "belongs to two tokens"},
      {MODEL(A ",\"merges\":[\"a\"]", ""), "merge 0 is no pair"},
      {MODEL(A ",\"merges\":[[\"a\",1]]", ""), "merge 0 is no pair"},
      {MODEL(A ",\"merges\":[\"a a\"]", ""), "names a token that the vocabulary lacks"},
      {MODEL(A "," NONE ",\"byte_fallback\":true", ""), "no byte-level BPE"},
      {MODEL(A "," NONE, ",\"decoder\":{\"type\":\"WordPiece\"}"), "no byte-level BPE"},
      {MODEL(A "," NONE, ",\"added_tokens\":[{\"id\":3}]"), "no content"},
      {MODEL(A "," NONE, ",\"added_tokens\":[{\"content\":\"b\"}]"), "the id of \"b\" is not a whole number"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Reason reason = {""};
    Tokenizer *t = tokenizer_parse(cases[i][0], strlen(cases[i][0]), &reason);
    if (t || !strstr(reason.text, cases[i][1]))
      fail_msg("%s: should say \"%s\" and says \"%s\"", cases[i][0], cases[i][1], reason.text);
  }
  write_text("broken.json", "{");
  ASSERT_FAILS(tokenizer_open(temp_path("broken.json")), "broken.json is no tokenizer", "no JSON object");
  ASSERT_FAILS(tokenizer_open(temp_path("nowhere.json")), "cannot open", "nowhere.json");
  make_directory("empty");
  ASSERT_FAILS(tokenizer_open(temp_path("empty")), "cannot open", "empty/tokenizer.json");
}

// What only encoding needs is asked for when something is encoded.
static void assert_decodes_only(const char *text, const char *part) {
  Reason reason = {""};
  Tokenizer *t = tokenizer_parse(text, strlen(text), &reason);
  if (!t) fail_msg("%s: %s", text, reason.text);
  int64_t count, length;
  char *decoded = tokenizer_decode(t, (const int32_t[]){0, 2}, 2, &length);
  assert_string_equal(decoded, "aab");
  free(decoded);
  ASSERT_FAILS(tokenizer_encode(t, "a", 1, true, &count), "can decode, but not encode", part);
  tokenizer_close(t);
}

TEST(test_what_cannot_be_encoded) {
  assert_decodes_only(BPE "}", "no ByteLevel step");
  assert_decodes_only(BPE ",\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}", "no token for byte 0");
  assert_decodes_only(BPE ",\"normalizer\":{\"type\":\"NFKC\"}}", "normalizer");
  assert_decodes_only(BPE ",\"added_tokens\":[{\"id\":1,\"content\":\"b\",\"lstrip\":true}]}", "lstrip");
}

int main(void) {
  return tests_run("tokenizer", make_temp_dir, remove_temp_dir);
}
