// The tokenizer against Hugging Face's `tokenizers`: ids and decoded bytes of many texts (golden files), what
// is shown of half characters and unknown ids, long texts, and files that are refused.
#include "data/source.h"
#include "data/tokenizer.h"
#include "kernels/random.h"
#include "kernels/text.h"
#include "tests/data_files.h"
#include "tests/process.h"

#include <cjson/cJSON.h>
#include <time.h>

#define GOLDEN "tests/golden/tokenizers/"

static Tokenizer *open_tokenizer(const char *path) {
  Reason reason;
  Tokenizer *t = tokenizer_open(path, &reason);
  if (!t) fail_msg("%s", reason.text);
  return t;
}

static int32_t *encode(Tokenizer *t, const char *text, int64_t length, bool special, int64_t *count) {
  Reason reason;
  int32_t *ids = tokenizer_encode(t, text, length, special, count, &reason);
  if (!ids) fail_msg("%s", reason.text);
  return ids;
}

// The text becomes these ids. They and the text are freed.
static void assert_ids(Tokenizer *t, const char *text, int64_t length, const int32_t *want,
                       int64_t want_count) {
  int64_t count;
  int32_t *ids = encode(t, text, length, false, &count);
  assert_int_equal(count, want_count);
  if (count) assert_memory_equal(ids, want, (size_t)count * sizeof *ids);
  free(ids);
}

// --- against tokenizers ------------------------------------------------------------------------------------

// Texts are in hexadecimal: they may hold what JSON or C would change.
static char *from_hex(const cJSON *item, int64_t *length) {
  const char *hex = item->valuestring;
  *length = (int64_t)strlen(hex) / 2;
  char *bytes = calloc((size_t)*length + 1, 1);
  for (int64_t i = 0; i < *length; i++)
    assert_int_equal(sscanf(hex + 2 * i, "%2hhx", (unsigned char *)&bytes[i]), 1);
  return bytes;
}

static void check_row(Tokenizer *t, const cJSON *row, const char *name) {
  const cJSON *answer = cJSON_GetObjectItem(row, name), *hex = cJSON_GetObjectItem(row, "text");
  int64_t length, count, want_length, got_length, bytes = 0;
  char *text = from_hex(hex, &length), *want = from_hex(cJSON_GetObjectItem(answer, "decoded"), &want_length);
  for (int special = 0; special < 2; special++) {
    const cJSON *ids = cJSON_GetObjectItem(answer, special ? "ids" : "plain"), *id = ids->child;
    int32_t *got = encode(t, text, length, special, &count);
    for (int64_t i = 0; i < count && id; i++, id = id->next)
      if (got[i] != id->valueint)
        fail_msg("text %s: id %d is %d, should be %d", hex->valuestring, (int)i, got[i], id->valueint);
    if (count != cJSON_GetArraySize(ids))
      fail_msg("text %s: %d ids, should be %d", hex->valuestring, (int)count, cJSON_GetArraySize(ids));
    for (int64_t i = 0; i < count && !special; i++) bytes += tokenizer_bytes(t, got[i]);
    char *decoded = tokenizer_decode(t, got, count, &got_length);
    if (special) assert_int_equal(got_length, want_length);
    if (special) assert_memory_equal(decoded, want, (size_t)want_length);
    free(decoded);
    free(got);
  }
  bool special = strstr(text, "<|") || strstr(text, "two words"); // these tokens are no text
  assert_true(special ? bytes <= length : bytes == length);
  free(want);
  free(text);
}

// Every row of a file of texts, by the name its answers have there; returns how many there are.
static int check_rows(const char *path, const char *texts, const char *name) {
  char *text = read_text(texts);
  cJSON *rows = cJSON_Parse(text);
  Tokenizer *t = open_tokenizer(path);
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

static void assert_shown(const Tokenizer *t, const char *expected, const int32_t *ids, int64_t count) {
  char *shown = tokenizer_show(t, ids, count);
  assert_string_equal(shown, expected);
  free(shown);
}

#define ASSERT_SHOWN(t, expected, ...)                                                                       \
  assert_shown(t, expected, (const int32_t[]){__VA_ARGS__}, sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t))

TEST(test_what_is_shown) {
  Tokenizer *t = open_tokenizer(GOLDEN "gpt2/tokenizer.json");
  int32_t end = (int32_t)tokenizer_size(t) - 1; // <|endoftext|>
  // The alphabet's first tokens are the bytes from '!' on, then Latin-1's printable ones, then the other
  // bytes.
  int32_t exclamation = 0, escape = 94 + 12 + 82 + 27, half = 94 + 12 + (0xC3 - 0xAE);
  ASSERT_SHOWN(t, "!\\x1B\\xC3<|endoftext|>\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", exclamation, escape, half,
               end, -1, 1 << 30, end + 1);
  assert_shown(t, "", NULL, 0);
  tokenizer_close(t);
}

// --- encoding ----------------------------------------------------------------------------------------------

static void assert_not_encoded(Tokenizer *t, const char *text, const char *part) {
  int64_t count;
  Reason reason = {""};
  assert_null(tokenizer_encode(t, text, (int64_t)strlen(text), true, &count, &reason));
  if (!strstr(reason.text, part)) fail_msg("%s: should say \"%s\" and says \"%s\"", text, part, reason.text);
}

TEST(test_text_must_be_utf8) {
  Tokenizer *t = open_tokenizer(GOLDEN "gpt2");
  assert_not_encoded(t, "abc\xFF", "not UTF-8 at byte 3");
  assert_not_encoded(t, "\xED\xA0\x80", "not UTF-8 at byte 0");
  assert_not_encoded(t, "caf\xC3", "not UTF-8 at byte 3");
  assert_ids(t, NULL, 0, NULL, 0);
  tokenizer_close(t);
}

// A piece of a million bytes takes no more than a few times as long as a million short pieces.
TEST(test_long_pieces) {
  enum { LENGTH = 1000000 };
  char *text = malloc(LENGTH);
  for (int i = 0; i < 2; i++) {
    memset(text, i ? ' ' : 'a', LENGTH);
    Tokenizer *t = open_tokenizer(i ? GOLDEN "gpt2" : GOLDEN "llama3");
    clock_t start = clock();
    int64_t count, length;
    int32_t *ids = encode(t, text, LENGTH, false, &count);
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
    free(encode(t, "55!", 3, true, &count));
    assert_int_equal(count, 2 + individual);
    tokenizer_close(t);
  }
}

// Of added tokens that begin alike the longest is taken, wherever it stands in the list.
TEST(test_added_tokens) {
  static const char *const members[][2] = {
      {"added_tokens",
       "[{\"id\":5,\"content\":\"<a>\"},{\"id\":6,\"content\":\"<a><b>\"},{\"id\":7,\"content\":\"<a\"}]"}};
  Tokenizer *t = open_changed(false, members, 1);
  assert_ids(t, "<a><b><a><a", 11, (const int32_t[]){6, 5, 7}, 3);
  tokenizer_close(t);
}

// The pair learned first is merged first, of equal ones the leftmost; a pair's second merge is none.
TEST(test_merges) {
  static const char *const merges[][2] = {{"merges", "[\"b c\",\"a b\",\"a a\",\"aa aa\",\"b c\"]"}};
  Tokenizer *t = open_changed(true, merges, 1);
  int64_t count;
  int32_t *a = encode(t, "a", 1, false, &count);
  const int32_t want[] = {*a, 1001, 1000, 1003, *a};
  assert_ids(t, "abcabaaaaa", 10, want, 5);
  assert_ids(t, "", 0, NULL, 0);
  free(a);
  tokenizer_close(t);
}

// --- bytes as tokens ---------------------------------------------------------------------------------------

TEST(decoded_text_is_safe_to_print) {
  Tokenizer *t = tokenizer_of_bytes();
  static const char *const shown[][2] = {
      {"", ""},
      {"plain\tand\nsimple ~", "plain\tand\nsimple ~"},
      {"gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x98\x80",
       "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x98\x80"},
      {"\x1B[2J\r\x07\x7F", "\\x1B[2J\\x0D\\x07\\x7F"},
      {"\xC2\x9B|\xC2\xA0", "\\xC2\\x9B|\xC2\xA0"}, // C1's CSI; no-break space
      {"\xC3(\xFF\x80", "\\xC3(\\xFF\\x80"},        // broken sequences
      {"\xC0\xAF \xE0\x80\x80 \xF0\x80\x80\x80",
       "\\xC0\\xAF \\xE0\\x80\\x80 \\xF0\\x80\\x80\\x80"},                       // overlong
      {"\xED\xA0\x80 \xF4\x90\x80\x80", "\\xED\\xA0\\x80 \\xF4\\x90\\x80\\x80"}, // surrogate; too high
      {"\xE2\x82", "\\xE2\\x82"},                                                // cut off
  };
  for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
    int64_t count;
    int32_t *tokens = encode(t, shown[i][0], (int64_t)strlen(shown[i][0]), true, &count);
    assert_int_equal(count, strlen(shown[i][0]));
    for (int64_t k = 0; k < count; k++) assert_int_equal(tokens[k], (unsigned char)shown[i][0][k]);
    assert_shown(t, shown[i][1], tokens, count);
    free(tokens);
  }
  ASSERT_SHOWN(t, "a\n<|endoftext|>\nb\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\\x00", 'a', 256, 'b', 257, 128255,
               -1, 0);
  ASSERT_SHOWN(t, "\\xE2\n<|endoftext|>\n\\x82\\xAC", 0xE2, 256, 0x82,
               0xAC); // no character spans another token

  char line[12];
  text_escape(line, sizeof line, "a\n\xE2\x82\xAC\xE2\x82\xAC", 8); // cut to whole characters
  assert_string_equal(line, "a\\x0A\xE2\x82\xAC\xE2\x82\xAC");
  text_escape(line, 8, "\xE2\x82\xAC\x1B[", 5);
  assert_string_equal(line, "\xE2\x82\xAC\\x1B");

  for (uint64_t trial = 0; trial < 2000; trial++) {
    int32_t tokens[24];
    for (uint64_t i = 0; i < 24; i++) tokens[i] = (int32_t)(random_bits(1, trial, i) % 260);
    char *text = tokenizer_show(t, tokens, 24);
    for (const char *c = text; *c; c++)
      assert_true((unsigned char)*c >= 0x20 ? *c != 0x7F : *c == '\n' || *c == '\t');
    assert_null(strstr(text, "\xC2\x9B"));
    free(text);
  }
  assert_int_equal(tokenizer_bytes(t, 255), 1);
  assert_int_equal(tokenizer_bytes(t, END_OF_TEXT), 0);
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
  make_directory("empty");
  static const char *const files[][3] = {{"broken.json", "broken.json is no tokenizer", "no JSON object"},
                                         {"nowhere.json", "cannot open", "nowhere.json"},
                                         {"empty", "cannot open", "empty/tokenizer.json"}};
  for (int i = 0; i < 3; i++) {
    Reason reason = {""};
    assert_null(tokenizer_open(temp_path(files[i][0]), &reason));
    assert_true(strstr(reason.text, files[i][1]) && strstr(reason.text, files[i][2]));
  }
}

#define SPLIT(behavior, regex)                                                                               \
  "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"behavior\":" behavior                     \
  ",\"pattern\":{\"Regex\":" regex "}},{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]}"

// What only encoding needs is asked for when something is encoded.
TEST(test_what_cannot_be_encoded) {
  static const char *const cases[][2] = {
      {BPE "}", "no ByteLevel step"},
      {BPE ",\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}", "no token for byte 0"},
      {BPE ",\"normalizer\":{\"type\":\"NFKC\"}}", "normalizer"},
      {BPE ",\"added_tokens\":[{\"id\":1,\"content\":\"b\",\"lstrip\":true}]}",
       "the added token \"b\" has lstrip"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Reason reason = {""};
    Tokenizer *t = tokenizer_parse(cases[i][0], strlen(cases[i][0]), &reason);
    if (!t) fail_msg("%s: %s", cases[i][0], reason.text);
    ASSERT_SHOWN(t, "aab", 0, 2);
    assert_not_encoded(t, "a", "can decode, but not encode");
    assert_not_encoded(t, "a", cases[i][1]);
    tokenizer_close(t);
  }
  // Steps that this program does not support, in an else complete tokenizer.
  static const char *const steps[][3] = {
      {"pre_tokenizer", "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"}]}",
       "type ByteLevel"},
      {"pre_tokenizer", SPLIT("\"Removed\"", "\"a\""), "type Split"},
      {"pre_tokenizer", SPLIT("\"Isolated\"", "\"(\""),
       "regular expression is not understood at character 1"},
      {"post_processor", "{\"type\":\"BertProcessing\"}", "post_processor"},
      {"post_processor", "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}]}",
       "post_processor"}};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    Tokenizer *t = open_changed(false, (const char *const[][2]){{steps[i][0], steps[i][1]}}, 1);
    assert_not_encoded(t, "a", steps[i][2]);
    tokenizer_close(t);
  }
}

int main(void) {
  return tests_run("tokenizer", make_temp_dir, remove_temp_dir);
}
