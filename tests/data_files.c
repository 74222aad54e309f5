#include "tests/data_files.h"

#include "kernels/base/random.h"

#include <sys/stat.h>
#include <unistd.h>

static char temp_dir[32];

int make_temp_dir(void **state) {
  (void)state;
  strcpy(temp_dir, "/tmp/test_data.XXXXXX");
  return mkdtemp(temp_dir) ? 0 : -1;
}

int remove_temp_dir(void **state) {
  (void)state;
  char command[256];
  snprintf(command, sizeof command, "rm -rf '%s'", temp_dir);
  return system(command);
}

const char *temp_path(const char *name) {
  static char paths[8][512];
  static int turn;
  char *path = paths[turn++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", temp_dir, name);
  return path;
}

int make_words(void **state) {
  static const char *const words[] = {"return ", "tensor", " = ",    "0",     ";\n", "for (", "int ", "i",
                                      "++",      ") ",     "float ", "x[i] ", "+ ",  "{\n",   "}\n",  "sum "};
  if (make_temp_dir(state)) return -1;
  char text[40000] = "";
  size_t length = 0;
  for (uint64_t i = 0; length < sizeof text - 16; i++) {
    const char *word = words[random_bits(1, 1, i) % 16];
    memcpy(text + length, word, strlen(word));
    length += strlen(word);
  }
  write_bytes("words.txt", text, length);
  return 0;
}

void make_directory(const char *name) {
  assert_int_equal(mkdir(temp_path(name), 0755), 0);
}

static void write_parts(const char *name, const void *header, size_t header_size, const void *bytes,
                        size_t size) {
  char folder[256];
  for (const char *slash = name; (slash = strchr(slash, '/')); slash++) {
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - name), name);
    mkdir(temp_path(folder), 0755); // or it is there
  }
  FILE *file = fopen(temp_path(name), "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(header, 1, header_size, file), header_size);
  if (size) assert_int_equal(fwrite(bytes, 1, size, file), size);
  assert_int_equal(fclose(file), 0);
}

void write_bytes(const char *name, const void *bytes, size_t size) {
  write_parts(name, "", 0, bytes, size);
}

void write_text(const char *name, const char *text) {
  write_bytes(name, text, strlen(text));
}

void write_texts(const char *const (*texts)[2], size_t count) {
  for (size_t i = 0; i < count; i++) write_text(texts[i][0], texts[i][1]);
}

void write_shard(const char *name, int32_t magic, int32_t version, int32_t claimed, const void *tokens,
                 size_t bytes) {
  int32_t header[256] = {magic, version, claimed};
  write_parts(name, header, sizeof header, tokens, bytes);
}

void write_shard16(const char *name, const uint16_t *tokens, int32_t count) {
  write_shard(name, 20240520, 1, count, tokens, (size_t)count * 2);
}

void write_shard32(const char *name, const uint32_t *tokens, int32_t count) {
  write_shard(name, 20240801, 7, count, tokens, (size_t)count * 4);
}

void write_sparse_shard16(const char *name, int32_t count) {
  write_shard(name, 20240520, 1, count, NULL, 0);
  assert_int_equal(truncate(temp_path(name), 1024 + 2L * count), 0);
}

void put_token16(const char *name, long position, uint16_t id) {
  FILE *file = fopen(temp_path(name), "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, 1024 + 2 * position, SEEK_SET), 0);
  assert_int_equal(fwrite(&id, sizeof id, 1, file), 1);
  assert_int_equal(fclose(file), 0);
}

int make_masked(void **state) {
  enum { TOKENS = 3000 };
  if (make_words(state)) return -1;
  uint16_t tokens[TOKENS];
  uint8_t mask[TOKENS / 8] = {0}, ends[TOKENS / 8] = {0}, none[TOKENS / 8] = {0};
  bool counts = false;
  for (int i = 0, left = 0; i < TOKENS; i++, left--) {
    if (left <= 0) {
      counts = !counts;
      left = 1 + (int)(random_bits(5, 1, (uint64_t)i) % (counts ? 20 : 60));
    }
    tokens[i] = (uint16_t)(i % 7 == 0 ? random_bits(5, 2, (uint64_t)i) % 61 : (uint64_t)(3 * i % 61));
    mask[i / 8] |= (uint8_t)(counts << i % 8);
  }
  for (int i = 0; i < TOKENS; i += 1 + (int)(random_bits(6, 1, (uint64_t)i) % 40))
    ends[i / 8] |= (uint8_t)(1 << i % 8);
  write_shard16("masked.bin", tokens, TOKENS);
  write_shard16("packed.bin", tokens, TOKENS);
  write_shard16("nothing.bin", tokens, TOKENS);
  write_shard("masked.mask", 20261120, 1, TOKENS, mask, sizeof mask);
  write_shard("packed.mask", 20261120, 1, TOKENS, mask, sizeof mask);
  write_shard("nothing.mask", 20261120, 1, TOKENS, none, sizeof none);
  write_shard("packed.ends", 20261121, 1, TOKENS, ends, sizeof ends);
  return 0;
}

Source *open_counting(const char *name, int64_t count) {
  uint32_t *tokens = malloc((size_t)count * sizeof *tokens);
  for (int64_t i = 0; i < count; i++) tokens[i] = (uint32_t)i;
  write_shard32(name, tokens, (int32_t)count);
  free(tokens);
  return open_one(name, count);
}

Source *open_one(const char *name, int64_t vocab_size) {
  const char *path = temp_path(name);
  return source_open(&path, 1, vocab_size, SPLIT_NONE);
}

Source *open_two(const char *first, const char *second, int64_t vocab_size) {
  const char *paths[] = {temp_path(first), temp_path(second)};
  return source_open(paths, 2, vocab_size, SPLIT_NONE);
}

int mappings(void) {
  FILE *maps = fopen("/proc/self/maps", "r");
  assert_non_null(maps);
  char line[1024];
  int count = 0;
  while (fgets(line, sizeof line, maps)) count += strstr(line, temp_dir) != NULL;
  fclose(maps);
  return count;
}

void assert_stream_and_targets(const Source *source, const int32_t *tokens, const int32_t *targets,
                               int64_t count) {
  assert_int_equal(source->tokens, count);
  int32_t *got = malloc((size_t)(count + 1) * sizeof *got);
  for (int64_t first = 0; first <= count; first++)
    for (int64_t length = 0, counted = 0; length <= count - first; length++) {
      got[length] = -7;
      source_read(source, first, length, got);
      assert_memory_equal(got, tokens + first, (size_t)length * sizeof *got);
      assert_int_equal(source_read_targets(source, first, length, got), counted);
      assert_memory_equal(got, targets + first, (size_t)length * sizeof *got);
      assert_int_equal(got[length], -7);
      if (length < count - first) counted += targets[first + length] != IGNORED_TARGET;
    }
  free(got);
}

void assert_stream(const Source *source, const int32_t *expected, int64_t count) {
  assert_stream_and_targets(source, expected, expected, count);
}

void assert_text(const Source *source, const char *expected) {
  int64_t count = (int64_t)strlen(expected);
  int32_t *tokens = malloc((size_t)count * sizeof *tokens);
  for (int64_t i = 0; i < count; i++) tokens[i] = expected[i] == '|' ? END_OF_TEXT : expected[i];
  assert_stream(source, tokens, count);
  free(tokens);
}

void assert_sentence(const char *const *parts, int count) {
  assert_null(strchr(caught_sentence, '\n'));
  assert_null(strstr(caught_sentence, ". "));
  assert_int_not_equal(caught_sentence[strlen(caught_sentence) - 1], '.');
  for (int i = 0; i < count; i++)
    if (!strstr(caught_sentence, parts[i])) fail_msg("\"%s\" does not say \"%s\"", caught_sentence, parts[i]);
}
