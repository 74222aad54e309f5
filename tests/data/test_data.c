// Sources, the byte tokenizer and the corpus.
#include "data/file.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "kernels/base/random.h"
#include "kernels/base/text.h"
#include "tests/data_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stb/stb_ds.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// The source is of this kind, and so many files, and holds these tokens; closes it.
#define ASSERT_SOURCE(source, kind, files, ...)                                                              \
  assert_source(source, kind, files, (const int32_t[]){__VA_ARGS__},                                         \
                sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void assert_source(Source *source, const char *kind, int64_t files, const int32_t *tokens,
                          int64_t count) {
  assert_string_equal(source_kind_name(source), kind);
  assert_int_equal(source->files, files);
  assert_stream(source, tokens, count);
  source_close(source);
}

TEST(one_text_file_is_its_bytes) {
  write_bytes("bytes.txt", "a\xFF\x80z\n", 5);
  Source *source = open_one("bytes.txt", 50257);
  assert_string_equal(source->name, temp_path("bytes.txt"));
  assert_int_equal(source->vocab_size, 50257);
  ASSERT_SOURCE(source, "byte-level text", 1, 'a', 255, 128, 'z', '\n');
  source_close(NULL);
}

static void assert_opens(const char *path, const char *text) {
  Source *source = open_one(path, 300);
  assert_text(source, text);
  source_close(source);
}

TEST(end_of_text_stands_between_documents) {
  WRITE_TEXTS({"one.txt", "one"}, {"two.txt", "to"}, {"three.txt", "x"});
  const char *paths[] = {temp_path("one.txt"), temp_path("three.txt"), temp_path("two.txt")};
  for (int vocab_size = 256; vocab_size <= 257; vocab_size++) {
    Source *source = source_open(paths, 3, vocab_size, SPLIT_NONE);
    assert_text(source, vocab_size == 257 ? "one|x|to" : "onexto");
    assert_non_null(strstr(source->name, "one.txt and 2 more"));
    source_close(source);
  }
}

TEST(a_directory_gives_its_text_in_order) {
  WRITE_TEXTS({"tree/.git/config", "no"}, {"tree/.hidden", "no"}, {"tree/build/made.txt", "no"},
              {"tree/b/build/made.txt", "no"}, {"tree/z", "last"}, {"tree/a.txt", "first"},
              {"tree/b/deep/m.txt", "deep"}, {"tree/b/empty.txt", ""}, {"outside.txt", "linked"});
  write_bytes("tree/b/binary", "x\0y", 3);
  write_bytes("tree/b/foreign.bin", "x\0y", 3);
  static const char *const links[][2] = {{"../../outside.txt", "tree/b/link.txt"},
                                         {"..", "tree/b/loop"},
                                         {"deep", "tree/b/also_deep"},
                                         {"self", "tree/b/self"},
                                         {"nowhere", "tree/b/dangling"}};
  for (int i = 0; i < 5; i++) assert_int_equal(symlink(links[i][0], temp_path(links[i][1])), 0);
  assert_opens("tree", "first|deep|linked|last");

  // A NUL just inside the probe makes a binary, one just outside does not.
  char bytes[8193];
  memset(bytes, 'p', sizeof bytes);
  bytes[8191] = 0;
  write_bytes("probe/binary", bytes, sizeof bytes);
  bytes[8191] = 'p', bytes[8192] = 0;
  write_bytes("probe/text", bytes, sizeof bytes);
  Source *source = open_one("probe", 300);
  assert_int_equal(source->files, 1);
  int32_t last;
  source_read(source, 8192, 1, &last);
  assert_int_equal(last, 0);
  source_close(source);
}

TEST(a_glob_gives_what_it_matches) {
  WRITE_TEXTS({"globbed/b.txt", "b"}, {"globbed/a.txt", "a"}, {"globbed/c.md", "c"},
              {"globbed/sub.txt/d", "d"}, {"globbed/empty.txt", ""});
  assert_opens("globbed/*.txt", "a|b|d");
  assert_opens("globbed/[bc].*", "b|c");
  write_text("globbed/[x]?.txt", "literal"); // a name that exists is that file, whatever it looks like
  assert_opens("globbed/[x]?.txt", "literal");
}

TEST(large_files_are_mapped_and_closed) {
  enum { SIZE = (128 << 10) + 1 };
  char *text = malloc(SIZE);
  for (int i = 0; i < SIZE; i++) text[i] = (char)('a' + i % 26);
  write_bytes("large.txt", text, SIZE);
  write_bytes("small.txt", text, SIZE - 1);
  int free_before = dup(0);
  close(free_before);
  Source *source = open_two("large.txt", "small.txt", 256);
  int free_after = dup(0); // the least free descriptor: the files are closed, only the mapping stays
  close(free_after);
  assert_int_equal(free_after, free_before);
  assert_int_equal(mappings(), 1);
  int32_t *ids = malloc((2 * SIZE - 1) * sizeof *ids);
  source_read(source, 0, 2 * SIZE - 1, ids);
  for (int i = 0; i < 2 * SIZE - 1; i++) assert_int_equal(ids[i], text[i % SIZE]);
  write_bytes("small.txt", "", 0); // a copied file may change under a run
  source_read(source, SIZE, SIZE - 1, ids);
  for (int i = 0; i < SIZE - 1; i++) assert_int_equal(ids[i], text[i]);
  source_close(source);
  assert_int_equal(mappings(), 0);
  free(ids);
  free(text);
}

TEST(a_cut_within_a_page_is_noticed) {
  enum { TOKENS = (64 << 10) + 100 };
  write_sparse_shard16("cut.bin", TOKENS);
  put_token16("cut.bin", TOKENS - 1, 7);
  Source *source = open_one("cut.bin", 300);
  int32_t ids[3];
  source_read(source, TOKENS - 4, 3, ids); // zeros of its own
  assert_int_equal(truncate(temp_path("cut.bin"), 1024 + 2 * (TOKENS - 1)), 0);
  ASSERT_FAILS(source_read(source, TOKENS - 3, 3, ids), "cut.bin was shortened while it was read");
  source_close(source);
}

TEST(text_errors_are_one_sentence) {
  WRITE_TEXTS({"good.txt", "good"}, {"dull/empty.txt", ""}, {"high.txt", "abc\xC3\xA9"});
  write_bytes("parquet.dat", "PAR\0", 4);
  make_directory("bare");
  ASSERT_FAILS(open_two("good.txt", "missing.txt", 300), "missing.txt");
  ASSERT_FAILS(open_one("good.txt/x", 300), "good.txt/x", "Not a directory");
  ASSERT_FAILS(open_one("parquet.dat", 300), "parquet.dat is not text", "NUL at byte 3", ".bin");
  ASSERT_FAILS(open_one("bare", 300), "bare holds no text");
  ASSERT_FAILS(open_one("dull", 300), "dull holds no text");
  ASSERT_FAILS(open_two("good.txt", "dull", 300), "dull holds no text");
  ASSERT_FAILS(open_one("dull/*", 300), "dull/* holds no text");
  ASSERT_FAILS(open_one("high.txt", 128), "high.txt", "token 3 (byte 3)", "id 195", "has 128", "--vocab",
               "196");
}

// Opening `path` fails with these words, for somebody whom permissions stop.
static void assert_unreadable(const char *path, const char *words, const char *named) {
  bool root = geteuid() == 0;
  if (root) assert_int_equal(seteuid(65534), 0);
  ASSERT_FAILS(open_one(path, 300), words, named, "Permission denied");
  if (root) assert_int_equal(seteuid(0), 0);
}

TEST(unreadable_paths_are_named) {
  WRITE_TEXTS({"locked/secret.txt", "secret"}, {"locked/inner/deeper.txt", "deeper"});
  assert_int_equal(chmod(temp_path("."), 0755), 0);
  assert_int_equal(chmod(temp_path("locked/secret.txt"), 0), 0);
  assert_unreadable("locked/secret.txt", "cannot open", "locked/secret.txt");
  assert_unreadable("locked", "cannot open", "locked/secret.txt");
  assert_int_equal(chmod(temp_path("locked/inner"), 0), 0);
  assert_unreadable("locked", "cannot read", "locked/inner");
  assert_unreadable("locked/inner/*.txt", "cannot read", "locked/inner/*.txt");
  assert_int_equal(chmod(temp_path("locked/inner"), 0755), 0);
}

TEST(shards_of_both_widths_join) {
  write_shard16("s16_a.bin", (const uint16_t[]){0, 50256, 65535}, 3);
  write_shard16("s16_b.bin", (const uint16_t[]){7}, 1);
  ASSERT_SOURCE(open_one("s16_*.bin", 65536), "llm.c shards, uint16", 2, 0, 50256, 65535, 7);
  write_shard32("s32.bin", (const uint32_t[]){128255, 0, 65536}, 3);
  ASSERT_SOURCE(open_two("s32.bin", "s32.bin", 128256), "llm.c shards, uint32", 2, 128255, 0, 65536, 128255,
                0, 65536);
  // A directory of shards: what lies next to them (a manifest, a tokenizer) is not taken for data.
  write_shard16("shards/1.bin", (const uint16_t[]){1, 2}, 2);
  write_shard16("shards/0.bin", (const uint16_t[]){3}, 1);
  write_bytes("shards/cache.bin", "\0\0\0\0\0", 5);
  WRITE_TEXTS({"shards/manifest.json", "{}"}, {"shards/zebra.txt", "text"});
  ASSERT_SOURCE(open_one("shards", 10), "llm.c shards, uint16", 2, 3, 1, 2);
}

TEST(kinds_do_not_mix) {
  write_text("mix.txt", "text");
  write_shard16("mix16.bin", (const uint16_t[]){1}, 1);
  write_shard32("mix32.bin", (const uint32_t[]){1}, 1);
  ASSERT_FAILS(open_two("mix.txt", "mix16.bin", 300), "mix.txt (byte-level text)",
               "mix16.bin (llm.c shards, uint16)", "cannot be mixed");
  ASSERT_FAILS(open_two("mix32.bin", "mix.txt", 300), "mix32.bin (llm.c shards, uint32)", "mix.txt",
               "cannot be mixed");
  ASSERT_FAILS(open_two("mix16.bin", "mix32.bin", 300), "uint16", "uint32", "cannot be mixed");
  // Only within a directory do shards hide text.
  WRITE_TEXTS({"mixed/a.txt", "text"}, {"blend/folder/a.txt", "text"});
  write_shard16("mixed/folder/b.bin", (const uint16_t[]){1}, 1);
  write_shard16("blend/b.bin", (const uint16_t[]){1}, 1);
  ASSERT_FAILS(open_one("mixed/*", 300), "mixed/a.txt", "mixed/folder/b.bin", "cannot be mixed");
  ASSERT_FAILS(open_one("blend/*", 300), "blend/folder/a.txt", "blend/b.bin", "cannot be mixed");
}

static void write_mask(const char *name, int32_t count, const void *bits, size_t bytes) {
  write_shard(name, 20261120, 1, count, bits, bytes);
}

TEST(masks_say_what_counts) {
  enum { NO = IGNORED_TARGET };
  write_shard16("a_masked.bin", (const uint16_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 11);
  write_mask("a_masked.mask", 11, "\xA1\xFE", 2); // bits 0, 5, 7, then 9 and 10 and some past the end
  write_shard16("b_plain.bin", (const uint16_t[]){20, 21}, 2);
  Source *plain = open_one("b_plain.bin", 50), *both = open_two("a_masked.bin", "b_plain.bin", 50);
  assert_false(plain->masked);
  assert_stream(plain, (const int32_t[]){20, 21}, 2);
  assert_true(both->masked);
  assert_stream_and_targets(both, (const int32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 21},
                            (const int32_t[]){0, NO, NO, NO, NO, 5, NO, 7, NO, 9, 10, 20, 21}, 13);
  source_close(both);
  source_close(plain);
  const char *paths[] = {temp_path("b_plain.bin"), temp_path("a_*.bin")};
  for (int count = 1; count <= 2; count++) {
    Source *listed = source_list(paths, count);
    assert_int_equal(listed->masked, count == 2);
    source_close(listed);
  }
}

static void assert_ends(const Source *source, int64_t end_of_text, const int64_t *want, int64_t count) {
  int64_t *ends = source_document_ends(source, end_of_text);
  assert_int_equal(arrlen(ends), count);
  assert_memory_equal(ends, want, (size_t)count * sizeof *ends);
  arrfree(ends);
}

static bool no_masks; // what lies beside a shard cannot be read

int lstat(const char *restrict path, struct stat *restrict status) {
  if (no_masks && strstr(path, ".mask")) return errno = EIO, -1;
  return (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}

static bool two_disks; // files called "0..." and "1..." have one number, each on a disk of its own

int stat(const char *restrict path, struct stat *restrict status) {
  int result = (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, 0);
  const char *name = strrchr(path, '/');
  if (two_disks && name) status->st_ino = 1, status->st_dev = (dev_t)name[1];
  return result;
}

TEST(files_of_two_disks_are_not_one) {
  write_text("0.txt", "text");
  write_text("1.txt", "text");
  Source *a = open_one("0.txt", 300), *b = open_one("1.txt", 300);
  assert_null(source_shared_file(a, b));
  two_disks = true;
  assert_null(source_shared_file(a, b));
  two_disks = false;
  assert_string_equal(source_shared_file(b, b), temp_path("1.txt"));
  source_close(a);
  source_close(b);
}

TEST(a_manifest_is_compared_with_its_shards) {
  assert_string_equal(path_folder("train_000000.bin").text, ".");
#define MANIFEST(masked, train)                                                                              \
  "{\"format\": \"lce.c shards\", \"masked\": " masked ", \"splits\": {\"train\": {\"shards\": [" train      \
  "]}, \"val\": {\"shards\": [{\"file\": \"val_000000.bin\", \"tokens\": 2}]}}}"
#define SHARD(number, tokens) "{\"file\": \"train_00000" number ".bin\", \"tokens\": " tokens "}"
#define RIGHT                 SHARD("0", "3") ", " SHARD("1", "1")
  static const struct {
    const char *manifest, *damage, *why; // damage: a file that goes
  } cases[] = {
      {MANIFEST("false", RIGHT), NULL, NULL},
      {"", NULL, "manifest.json cannot be read: it is no JSON object (see byte 0)"},
      {"{\"format\"", NULL, "manifest.json cannot be read"},
      {"{\"format\": \"lce.b shards\"}", NULL, "manifest.json is not that of the shards beside it"},
      {MANIFEST("false", RIGHT), "made/manifest.json", "manifest.json does not exist"},
      {MANIFEST("false", RIGHT), "made/train_000001.bin", "train_000001.bin does not exist"},
      {MANIFEST("false", RIGHT), "made/val_000000.bin", NULL}, // is not read
      {MANIFEST("false", SHARD("0", "3")), NULL, "train_000001.bin is not in the manifest.json"},
      {MANIFEST("false", SHARD("0", "4") ", " SHARD("1", "1")), NULL, "train_000000.bin has 3 tokens"},
      {MANIFEST("false", "5, " SHARD("0", "\"3\"")), NULL, "train_000000.bin has 3 tokens"},
      {MANIFEST("false", "{\"file\": \"train_000000.bin\"}, " SHARD("1", "1")), NULL,
       "train_000000.bin has 3 tokens"},
      {MANIFEST("true", RIGHT), NULL, "train_000000.bin has no mask"},
      {MANIFEST("null", RIGHT), NULL, "train_000000.bin has no mask"}};
  char path[256];
  const char *folder[] = {path};
  snprintf(path, sizeof path, "%s", temp_path("made"));
  for (volatile size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    write_shard16("made/train_000000.bin", (const uint16_t[]){3, 4, 5}, 3);
    write_shard16("made/train_000001.bin", (const uint16_t[]){6}, 1);
    write_shard16("made/val_000000.bin", (const uint16_t[]){7, 8}, 2);
    WRITE_TEXTS({"made/train_000000.ends", ""}); // which nothing reads here
    write_text("made/manifest.json", cases[i].manifest);
    if (cases[i].damage) assert_int_equal(unlink(temp_path(cases[i].damage)), 0);
    if (cases[i].why)
      ASSERT_FAILS(source_open(folder, 1, 10, SPLIT_TRAIN), cases[i].why, "made");
    else
      ASSERT_SOURCE(source_open(folder, 1, 10, SPLIT_TRAIN), "llm.c shards, uint16", 2, 3, 4, 5, 6);
  }
  // A shard that is named is compared, too; one that is not of the tool's stands beside those that are.
  ASSERT_FAILS(open_one("made/train_000000.bin", 10), "train_000000.bin has no mask");
  write_shard16("made/more.bin", (const uint16_t[]){1}, 1);
  ASSERT_SOURCE(open_one("made/more.bin", 10), "llm.c shards, uint16", 1, 1);
  no_masks = true;
  ASSERT_FAILS(open_one("made/more.bin", 10), "cannot read", "made/more.mask", strerror(EIO));
  no_masks = false;
  // Validation reads training shards where there are no others; those others alone need their manifest, too.
  write_text("made/manifest.json",
             "{\"format\": \"lce.c shards\", \"masked\": false, \"splits\": {\"train\": "
             "{\"shards\": [" RIGHT "]}}}");
  assert_int_equal(unlink(temp_path("made/more.bin")) | unlink(temp_path("made/val_000000.bin")), 0);
  ASSERT_SOURCE(source_open(folder, 1, 10, SPLIT_VALIDATION), "llm.c shards, uint16", 2, 3, 4, 5, 6);
  assert_int_equal(unlink(temp_path("made/train_000000.bin")) | unlink(temp_path("made/train_000001.bin")),
                   0);
  write_shard16("made/val_000000.bin", (const uint16_t[]){7, 8}, 2);
  write_text("made/manifest.json", "");
  ASSERT_FAILS(source_open(folder, 1, 10, SPLIT_VALIDATION), "manifest.json cannot be read");
}

TEST(documents_end_where_the_data_say) {
  // Shards: a token, or their .ends; the stream's last document ends with it, and one may span two shards.
  write_shard16("a_ends.bin", (const uint16_t[]){7, 1, 7, 3, 4, 5, 6, 8, 8, 1}, 10);
  write_shard16("b_ends.bin", (const uint16_t[]){2, 7, 3}, 3);
  Source *both = open_two("a_ends.bin", "b_ends.bin", 50);
  assert_ends(both, 7, (const int64_t[]){1, 3, 12, 13}, 4);
  assert_ends(both, 40, (const int64_t[]){13}, 1);
  ASSERT_FAILS(source_document_ends(both, -1), "a_ends.bin does not say", "prepare_data.py");
  write_shard("a_ends.ends", 20261121, 1, 10, "\x04\x01", 2);
  write_shard("b_ends.ends", 20261121, 1, 3, "\x04", 1);
  assert_ends(both, -1, (const int64_t[]){3, 9, 13}, 3);
  assert_ends(both, 7, (const int64_t[]){1, 3, 12, 13}, 4);
  write_shard("b_ends.ends", 20261120, 1, 3, "\x04", 1);
  ASSERT_FAILS(source_document_ends(both, -1), "b_ends.ends is no list of documents' ends", "20261121",
               "--end-of-text");
  write_shard("b_ends.ends", 20261121, 1, 4, "\x04", 1);
  ASSERT_FAILS(source_document_ends(both, -1), "b_ends.ends is not that of its shard");
  source_close(both);
  // Text: a file with its separator, or up to a byte as well.
  write_text("a_ends.txt", "one\ntwo");
  write_text("b_ends.txt", "three\n");
  for (int vocab_size = 256; vocab_size <= 257; vocab_size++) {
    int64_t separator = vocab_size == 257;
    Source *text = open_two("a_ends.txt", "b_ends.txt", vocab_size);
    assert_ends(text, -1, (const int64_t[]){7 + separator, 13 + separator}, 2);
    assert_ends(text, '\n', (const int64_t[]){4, 7 + separator, 13 + separator}, 3);
    source_close(text);
  }
}

TEST(a_mask_cut_within_a_page_is_noticed) {
  enum { TOKENS = (1 << 20) + 100, MASK_BYTES = TOKENS / 8 + 1 }; // more than is copied
  char *mask = calloc(MASK_BYTES, 1);
  mask[MASK_BYTES - 1] = 8; // the last token alone counts
  write_sparse_shard16("masked.bin", TOKENS);
  write_mask("masked.mask", TOKENS, mask, MASK_BYTES);
  free(mask);
  Source *source = open_one("masked.bin", 300);
  int32_t ids[3];
  assert_int_equal(source_read_targets(source, TOKENS - 4, 3, ids), 0);
  assert_int_equal(source_read_targets(source, TOKENS - 3, 3, ids), 1);
  assert_int_equal(truncate(temp_path("masked.mask"), 1024 + MASK_BYTES - 1), 0);
  ASSERT_FAILS(source_read_targets(source, TOKENS - 3, 3, ids),
               "masked.mask was shortened while it was read");
  source_close(source);
}

TEST(masks_of_other_shards_are_refused) {
  write_shard16("wrong.bin", (const uint16_t[]){1, 2, 3, 4, 5, 6, 7, 8, 9}, 9);
  write_text("wrong.mask", "not a mask");
  ASSERT_FAILS(open_one("wrong.bin", 50), "wrong.mask is no mask", "its shard", "prepare_data.py",
               "count every token");
  write_shard("wrong.mask", 20240520, 1, 9, "ab", 2);
  ASSERT_FAILS(open_one("wrong.bin", 50), "wrong.mask is no mask", "20261120");
  write_mask("wrong.mask", 10, "ab", 2);
  ASSERT_FAILS(open_one("wrong.bin", 50), "wrong.mask is not that of its shard", "10 tokens", "has 9");
  write_mask("wrong.mask", 9, "a", 1);
  ASSERT_FAILS(open_one("wrong.bin", 50), "wrong.mask is truncated", "byte 1026", "ends at byte 1025");
  write_mask("wrong.mask", 9, "ab", 2);
  source_close(open_one("wrong.bin", 50));
  // A mask that cannot be read is not "no mask", which would train on all tokens.
  write_shard16("linked.bin", (const uint16_t[]){1, 2}, 2);
  assert_int_equal(symlink("nowhere.mask", temp_path("linked.mask")), 0);
  ASSERT_FAILS(open_one("linked.bin", 50), "cannot open", "linked.mask");
  unlink(temp_path("linked.mask"));
  assert_int_equal(symlink("linked.mask", temp_path("linked.mask")), 0);
  ASSERT_FAILS(open_one("linked.bin", 50), "linked.mask", "symbolic links");
  unlink(temp_path("linked.mask"));
}

// A shard's header, and bytes after it; -1: a byte of the header is missing.
TEST(damaged_shards_are_refused) {
  static const struct {
    int32_t magic, version, count;
    int bytes;
    char parts[4][40]; // of the sentence
  } cases[] = {
      {20240520, 1, 4, -1, {"is truncated", "1024", "ends at byte 1023"}},
      {20240520, 1, 4, 7, {"is truncated", "4 tokens", "byte 1032", "ends at byte 1031"}},
      {20240801, 7, 4, 8, {"is truncated", "4 tokens", "byte 1040", "ends at byte 1032"}},
      {20240520, 1, 3, 8, {"disagrees", "3 tokens", "byte 1030", "and the file ends at byte 1032"}},
      {20240520, 1, 4, 9, {"disagrees", "byte 1032", "and the file ends at byte 1033"}},
      {20240521, 1, 4, 8, {"is no llm.c token shard", "20240521", "20240520", "20240801"}},
      {20240520, 7, 4, 8, {"has version 7", "20240520", "version 1"}},
      {20240801, 1, 2, 8, {"has version 1", "20240801", "version 7"}},
      {20240520, 1, 0, 0, {"holds no tokens", "byte 8", "is 0"}},
      {20240520, 1, -1, 8, {"holds no tokens", "is -1"}},
      {20240801, 7, INT32_MIN, 8, {"holds no tokens", "is -2147483648"}},
      {20240520, 1, INT32_MAX, 8, {"is truncated", "2147483647 tokens", "byte 4294968318"}},
      {20240801, 7, 1 << 30, 8, {"is truncated", "byte 4294968320"}}, // times 4 is 0 in 32 bits
  };
  for (volatile size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    size_t bytes = cases[i].bytes < 0 ? 0 : (size_t)cases[i].bytes;
    write_shard("hurt.bin", cases[i].magic, cases[i].version, cases[i].count, "123456789", bytes);
    if (cases[i].bytes < 0) assert_int_equal(truncate(temp_path("hurt.bin"), 1023), 0);
    ASSERT_FAILS(open_one("hurt.bin", 300), "hurt.bin ", cases[i].parts[0], cases[i].parts[1],
                 cases[i].parts[2], cases[i].parts[3]);
  }
  write_text("void.bin", "");
  ASSERT_FAILS(open_one("void.bin", 300), "void.bin is truncated", "ends at byte 0");
  ASSERT_FAILS(open_one("vo*.bin", 300), "void.bin is truncated", "ends at byte 0");
}

TEST(ids_outside_the_vocabulary_are_found) {
  write_shard16("ids16.bin", (const uint16_t[]){5, 299, 300, 301}, 4);
  ASSERT_FAILS(open_one("ids16.bin", 300), "ids16.bin", "token 2 (byte 1028)", "id 300", "has 300",
               "--vocab 302 or more", "tokenizer");
  source_close(open_one("ids16.bin", 302));
  write_shard32("ids32.bin", (const uint32_t[]){5, 4294967295u, 128256}, 3);
  ASSERT_FAILS(open_one("ids32.bin", 128256), "ids32.bin", "token 1 (byte 1028)", "id 4294967295",
               "--vocab 4294967296");
  ASSERT_FAILS(open_one("ids32.bin", INT32_MAX), "id 4294967295");

  // Far into a file: at the end of the stretch that one scan covers, past it, and at the last token.
  enum { STRETCH = 8 << 20, COUNT = (9 << 20) + 11 };
  write_sparse_shard16("sparse.bin", COUNT);
  put_token16("sparse.bin", STRETCH - 1, 400);
  put_token16("sparse.bin", STRETCH + 4099, 1000);
  put_token16("sparse.bin", STRETCH + 9099, 1500);
  put_token16("sparse.bin", COUNT - 1, 2000);
  ASSERT_FAILS(open_one("sparse.bin", 400), "token 8388607 (byte 16778238)", "id 400");
  ASSERT_FAILS(open_one("sparse.bin", 401), "token 8392707 (byte 16786438)", "id 1000");
  ASSERT_FAILS(open_one("sparse.bin", 1001), "token 8397707 (byte 16796438)", "id 1500");
  ASSERT_FAILS(open_one("sparse.bin", 1501), "token 9437194 (byte 18875412)", "id 2000");
  int before = mappings(); // the failures above left theirs
  Source *source = open_one("sparse.bin", 2001);
  int32_t id;
  source_read(source, STRETCH + 4099, 1, &id);
  assert_int_equal(id, 1000);
  put_token16("sparse.bin", STRETCH + 4099, 3000); // while it is open
  ASSERT_FAILS(source_read(source, STRETCH + 4099, 1, &id), "sparse.bin has changed",
               "token 8392707 (byte 16786438)", "id 3000");
  source_close(source);
  assert_int_equal(mappings(), before);
}

static void assert_entropy(Source *source, double expected) {
  assert_true(fabs(source_entropy(source) - expected) < 1e-9);
  source_close(source);
}

TEST(entropy_of_known_distributions) {
  WRITE_TEXTS({"entropy.txt", "aaaaabbbccddaaab"}, {"constant.txt", "aaaa"}); // 8, 4, 2, 2 of 16
  assert_entropy(open_one("entropy.txt", 257), 1.75 * log(2));
  assert_entropy(open_one("constant.txt", 257), 0);
  assert_entropy(open_counting("counting.bin", 10000), log(10000));
}

TEST(entropy_counts_a_bounded_sample) {
  enum { COUNT = SOURCE_ENTROPY_SAMPLE + 5000 };
  write_sparse_shard16("huge.bin", COUNT); // zeros as far as the sample goes, then one other id
  put_token16("huge.bin", SOURCE_ENTROPY_SAMPLE, 9);
  Source *source = open_one("huge.bin", 65536);
  assert_int_equal(source->tokens, COUNT);
  assert_true(source_entropy(source) == 0);
  source_close(source);
  unlink(temp_path("huge.bin"));
}

TEST(the_corpus_is_this_source_tree) {
  Source *source = source_open(NULL, 0, 128256, SPLIT_NONE);
  assert_int_equal(source->kind, SOURCE_TEXT);
  assert_true(source->files > 10);
  assert_non_null(strstr(source->name, "the source tree /"));
  Tokenizer *bytes = tokenizer_of_bytes();
  int32_t *tokens = malloc((size_t)source->tokens * sizeof *tokens);
  int64_t length;
  source_read(source, 0, source->tokens, tokens);
  char *text = tokenizer_decode(bytes, tokens, source->tokens, &length);
  assert_non_null(strstr(text, "static void the_corpus_is_this_source_tree(void **state) {"));
  free(text);
  free(tokens);
  tokenizer_close(bytes);
  source_close(source);
}

// Runs this program's copy in `directory`; it prints the corpus it finds (see main).
static const char *corpus_seen_from(const char *directory, const char *program) {
  static char output[1024];
  char command[2048];
  snprintf(command, sizeof command, "cd '%s' && '%s' --print-corpus 2>&1", temp_path(directory),
           temp_path(program));
  FILE *pipe = popen(command, "r");
  assert_non_null(pipe);
  output[fread(output, 1, sizeof output - 1, pipe)] = 0;
  pclose(pipe);
  return output;
}

TEST(the_corpus_leaves_out_what_runs_leave_behind) {
  WRITE_TEXTS(
      {"checkout/Makefile", "M"}, {"checkout/data/source.h", "H"}, {"checkout/data/input.txt", "a data set"},
      {"checkout/run.jsonl", "a log"}, {"checkout/runs/notes.md", "a run"}, {"checkout/build/made.c", "made"},
      {"checkout/train", "a program"}, {"elsewhere/stray.c", "stray"}, {"checkout/build/tests/made.h", ""});
  WRITE_TEXTS({"checkout/exercises/1.c", "a reader's"});
  char command[2048];
  snprintf(command, sizeof command, "cp /proc/%d/exe '%s' && cp '%s' '%s'", (int)getpid(),
           temp_path("checkout/build/tests/copy"), temp_path("checkout/build/tests/copy"),
           temp_path("elsewhere/copy"));
  assert_int_equal(system(command), 0);
  char expected[1024];
  snprintf(expected, sizeof expected, "the source tree %s: 2 files: M\n<|endoftext|>\nH",
           temp_path("checkout"));
  assert_string_equal(corpus_seen_from("elsewhere", "checkout/build/tests/copy"), expected); // by the program
  assert_string_equal(corpus_seen_from("checkout", "elsewhere/copy"), expected); // by the directory
  const char *lost = corpus_seen_from("elsewhere", "elsewhere/copy");
  assert_non_null(strstr(lost, "lce: the built-in corpus is the source tree"));
  assert_non_null(strstr(lost, "--data"));
}

static void print_corpus(void) {
  Source *source = source_open(NULL, 0, 257, SPLIT_NONE);
  int32_t tokens[64];
  int64_t count = source->tokens < 64 ? source->tokens : 64;
  source_read(source, 0, count, tokens);
  Tokenizer *t = tokenizer_of_bytes();
  char *text = tokenizer_show(t, tokens, count);
  printf("%s: %d files: %s", source->name, (int)source->files, text);
  free(text);
  tokenizer_close(t);
  source_close(source);
}

// One shard deep in a tree hides its text, and that is said; where nothing is left out, nothing is.
static void assert_left_out(const char *path, const char *start, const char *part, const char *other) {
  char said[512];
  Source *source = open_one(path, 300);
  source_describe_left(source, said, sizeof said);
  assert_int_equal(strncmp(said, start, strlen(start)), 0);
  assert_non_null(strstr(said, part));
  assert_non_null(strstr(said, other));
  if (source->kind != SOURCE_TEXT && *said)
    ASSERT_FAILS(loader_create((LoaderOptions){.source = source, .batch = 1, .seq_len = 16}),
                 "holds 4 tokens", start);
  assert_int_equal(!*said, !*start);
  source_close(source);
}

TEST(what_is_left_out_is_said) {
  uint16_t tokens[4] = {1, 2, 3, 4};
  WRITE_TEXTS({"hiding/a.txt", "text"}, {"hiding/b.txt", "text"});
  write_bytes("hiding/c\x1B[2J.png", "x\0y", 3);
  assert_left_out("hiding", "1 file is left out, such as ", "hiding/c\\x1B[2J.png: empty or binary", "");
  write_shard16("hiding/deep/one.bin", tokens, 4);
  write_shard("hiding/deep/one.mask", 20261120, 1, 4, "\x0f", 1); // belongs to its shard
  assert_left_out("hiding", "3 files are left out, such as ", "hiding/a.txt: a directory with token shards (",
                  "hiding/deep/one.bin) is read for them alone");
  assert_left_out("hiding/deep", "", "", "");
}

TEST(an_output_is_locked) {
  write_bytes("new.jsonl", "", 0);
  FILE *log = file_create("the log", temp_path("new.jsonl"), "{", false);
  ASSERT_FAILS(file_create("the picture", temp_path("new.jsonl"), "{", true),
               "another output is written there");
  fputs("{\n{\"cut", log);
  fclose(log);
  fclose(file_create("the log", temp_path("new.jsonl"), "{", true)); // whose last line a full disk cut
  size_t length;
  char *text = file_read(temp_path("new.jsonl"), &length, NULL);
  assert_string_equal(text, "{\n");
  free(text);
  ASSERT_FAILS(file_create("the picture", temp_path("new.jsonl"), "\x89", false), "is not from this program");
}

// An earlier output is kept beside the new one or, where it cannot be renamed, left as it is.
TEST(an_earlier_output_is_kept) {
  char longest[256];
  memset(longest, 'n', 255);
  longest[255] = 0;
  const char *const names[] = {"kept.jsonl", longest};
  size_t length;
  for (volatile int i = 0; i < 2; i++) {
    write_bytes(names[i], "{earlier", 8);
    if (i == 0)
      fclose(file_create("the log", temp_path(names[i]), "{", BACK_UP));
    else
      ASSERT_FAILS(file_create("the log", temp_path(names[i]), "{", BACK_UP), "name another file");
    char *text = file_read(temp_path(i == 0 ? "kept.jsonl.1" : names[i]), &length, NULL);
    assert_string_equal(text, "{earlier");
    free(text);
  }
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "--print-corpus") == 0) {
    print_corpus();
    return 0;
  }
  return tests_run("data", make_temp_dir, remove_temp_dir);
}
