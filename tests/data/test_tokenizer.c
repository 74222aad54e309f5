// The tokenizer against Hugging Face's `tokenizers` (golden files), how bytes are shown, and refused files.
#include "data/source.h"
#include "data/tokenizer.h"
#include "kernels/base/random.h"
#include "kernels/base/text.h"
#include "tests/data_files.h"
#include "tests/process.h"

#include <cjson/cJSON.h>

#define GOLDEN "tests/golden/tokenizers/"

static Tokenizer *open_tokenizer(const char *path) {
  Reason reason;
  Tokenizer *t = tokenizer_open(path, &reason);
  if (!t) fail_msg("%s", reason.text);
  return t;
}

// Texts are in hexadecimal: they may hold what JSON or C would change.
static char *from_hex(const cJSON *item, int64_t *length) {
  const char *hex = item->valuestring;
  *length = (int64_t)strlen(hex) / 2;
  char *bytes = calloc((size_t)*length + 1, 1);
  for (int64_t i = 0; i < *length; i++)
    assert_int_equal(sscanf(hex + 2 * i, "%2hhx", (unsigned char *)&bytes[i]), 1);
  return bytes;
}

// Its ids make the text, and those with the special tokens around it what `tokenizers` makes of them.
static void check_row(Tokenizer *t, const cJSON *row, const char *name) {
  const cJSON *answer = cJSON_GetObjectItem(row, name), *hex = cJSON_GetObjectItem(row, "text");
  for (int special = 0; special < 2; special++) {
    const cJSON *list = cJSON_GetObjectItem(answer, special ? "ids" : "plain"), *id;
    int64_t count = 0, want_length, length, bytes = 0;
    char *want = from_hex(special ? cJSON_GetObjectItem(answer, "decoded") : hex, &want_length);
    int32_t *ids = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *ids);
    cJSON_ArrayForEach(id, list) ids[count++] = id->valueint;
    char *decoded = tokenizer_decode(t, ids, count, &length);
    if (length != want_length || memcmp(decoded, want, (size_t)length)) fail_msg("text %s", hex->valuestring);
    for (int64_t i = 0; i < count; i++) bytes += tokenizer_bytes(t, ids[i]);
    bool marks = strstr(want, "<|") || strstr(want, "two words"); // these tokens are no text
    assert_true(marks ? bytes <= length : bytes == length);
    free(decoded);
    free(ids);
    free(want);
  }
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

static void assert_shown(const Tokenizer *t, const char *expected, const int32_t *ids, int64_t count) {
  char *shown = tokenizer_show(t, ids, count);
  assert_string_equal(shown, expected);
  free(shown);
}

#define ASSERT_SHOWN(t, expected, ...)                                                                       \
  assert_shown(t, expected, (const int32_t[]){__VA_ARGS__}, sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t))

TEST(test_what_is_shown) {
  Tokenizer *t = open_tokenizer(GOLDEN "gpt2/tokenizer.json");
  int32_t end = 400; // <|endoftext|>, the last
  // The alphabet begins with the bytes from '!' on, then Latin-1's printable ones, then the others.
  int32_t exclamation = 0, escape = 94 + 12 + 82 + 27, half = 94 + 12 + (0xC3 - 0xAE);
  ASSERT_SHOWN(t, "!\\x1B\\xC3<|endoftext|>\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", exclamation, escape, half,
               end, -1, 1 << 30, end + 1);
  assert_shown(t, "", NULL, 0);
  assert_int_equal(tokenizer_find(t, "!"), exclamation);
  assert_int_equal(tokenizer_find(t, "\x1B"), escape);
  assert_int_equal(tokenizer_find(t, "<|endoftext|>"), -1); // special
  assert_int_equal(tokenizer_find(t, "no such token"), -1);
  tokenizer_close(t);
}

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
    int32_t tokens[64];
    int64_t count = (int64_t)strlen(shown[i][0]);
    for (int64_t k = 0; k < count; k++) tokens[k] = (unsigned char)shown[i][0][k];
    assert_shown(t, shown[i][1], tokens, count);
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

// Only encoding reads these members, so they may hold anything.
TEST(test_what_only_encoding_reads) {
#define CUT  "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"invert\":false,\"pattern\":{\"Regex\":"
#define CUTS CUT "\"\\\\C\"}}," CUT "\"\\\\P{Nd}\"}},"
  static const char file[] =
      MODEL("\"vocab\":{\"\303\203\":0,\"\302\251\":1,\"b\":2},\"merges\":[\"x\",7,[\"y\"]]",
            ",\"normalizer\":{\"type\":\"NFKC\"},\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":"
            "\"ByteLevel\"}]},"
            "\"post_processor\":7,\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" CUTS CUTS CUTS
            "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}");
  Reason reason = {""};
  Tokenizer *t = tokenizer_parse(file, strlen(file), &reason);
  if (!t) fail_msg("%s", reason.text);
  ASSERT_SHOWN(t,
               "\xC3\xA9"
               "b\\xC3",
               0, 1, 2, 0);
  tokenizer_close(t);
}

// Characters stand for bytes in the vocabulary alone: an added token is found in the text itself.
TEST(test_an_added_token_is_its_text) {
  static const char file[] = MODEL("\"vocab\":{\"\303\251\":0},\"merges\":[]",
                                   ",\"added_tokens\":[{\"id\":1,\"content\":\"<\303\251>\"}],"
                                   "\"pre_tokenizer\":{\"type\":\"ByteLevel\"},"
                                   "\"decoder\":{\"type\":\"ByteLevel\"}");
  Reason reason = {""};
  Tokenizer *t = tokenizer_parse(file, strlen(file), &reason);
  if (!t) fail_msg("%s", reason.text);
  assert_int_equal(tokenizer_bytes(t, 0), 1);
  assert_int_equal(tokenizer_bytes(t, 1), 4);
  ASSERT_SHOWN(t, "\\xE9<\303\251>", 0, 1);
  tokenizer_close(t);
}

TEST_MAIN(tests_run("tokenizer", make_temp_dir, remove_temp_dir))
