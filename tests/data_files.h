// Shared by tests with files: small files in a temporary directory, sources whose tokens tell their place.
#pragma once

#include "data/source.h"
#include "tests/test.h"

// Group set-up and tear-down: the directory comes and goes.
int make_temp_dir(void **state);
int remove_temp_dir(void **state);
// A set-up that writes words.txt, too: 40 KB of words that, unlike the source tree, never change.
int make_words(void **state);
// And shards of 3000 tokens. masked.bin: runs of tokens count, runs do not; packed.bin: the same in short
// documents; nothing.bin: none counts.
int make_masked(void **state);

// The path of `name` in the temporary directory, in one of eight buffers used in turn.
const char *temp_path(const char *name);

void make_directory(const char *name);
// Folders above a file are made, too.
void write_bytes(const char *name, const void *bytes, size_t size);
void write_text(const char *name, const char *text);
void write_texts(const char *const (*texts)[2], size_t count);
// WRITE_TEXTS({name, text}, ...)
#define WRITE_TEXTS(...)                                                                                     \
  do {                                                                                                       \
    static const char *const texts_[][2] = {__VA_ARGS__};                                                    \
    write_texts(texts_, sizeof texts_ / sizeof *texts_);                                                     \
  } while (0)

// A shard whose header says `magic`, `version` and `claimed` tokens, whatever follows it.
void write_shard(const char *name, int32_t magic, int32_t version, int32_t claimed, const void *tokens,
                 size_t bytes);
void write_shard16(const char *name, const uint16_t *tokens, int32_t count);
void write_shard32(const char *name, const uint32_t *tokens, int32_t count);
// A uint16 shard of zeros that take no space on the disk, and one token put into it.
void write_sparse_shard16(const char *name, int32_t count);
void put_token16(const char *name, long position, uint16_t id);

Source *open_one(const char *name, int64_t vocab_size);
Source *open_two(const char *first, const char *second, int64_t vocab_size);
// A source whose token at position i is i.
Source *open_counting(const char *name, int64_t count);

// The number of files of the directory that are mapped now.
int mappings(void);

// The stream and its targets, read whole and from any place to any other. assert_stream: all tokens count.
void assert_stream_and_targets(const Source *source, const int32_t *tokens, const int32_t *targets,
                               int64_t count);
void assert_stream(const Source *source, const int32_t *expected, int64_t count);
// The same for text, where '|' stands for END_OF_TEXT.
void assert_text(const Source *source, const char *expected);

// The caught sentence is one line, without a full stop, and has every part.
void assert_sentence(const char *const *parts, int count);

// The call fails, and its sentence holds every one of the given strings.
#define ASSERT_FAILS(call, ...)                                                                              \
  do {                                                                                                       \
    const char *const parts_[] = {__VA_ARGS__};                                                              \
    CATCH(call);                                                                                             \
    if (!caught_sentence[0]) fail_msg("%s did not fail", #call);                                             \
    assert_sentence(parts_, (int)(sizeof parts_ / sizeof *parts_));                                          \
  } while (0)
