// A source: one long stream of token ids from files, which are of one kind:
//   - text: every byte is a token (0..255). With a larger vocabulary one END_OF_TEXT (256) separates two
//     files.
//   - llm.c token shards (*.bin): a header of 256 little-endian int32 (magic, version, number of tokens),
//     then the tokens: uint16 with magic 20240520, version 1, or uint32 with 20240801, 7. Shards contain
//     their separators.
//
// Next to x.bin there may be x.mask, which says what tokens count as targets, and x.ends, which marks the
// last token of each document (tools/prepare_data.py writes both): the same header (magic 20261120 or
// 20261121, version 1) and a bit for each token, the lowest bit of a byte first.
//
// A path is a file; a directory, whose regular files are read at all levels, but for hidden names and
// directories named "build"; or else a glob(7). The files of one path are in byte order. A file that is named
// must be text or a shard and not empty. Files found by a glob or in a directory are skipped if they are
// empty or binary (a NUL byte in the first 8 KiB), and a directory that holds shards is read for them alone.
// A *.bin file must be a shard, but one found in a directory only if it begins with the magic.
//
// Beside shards of tools/prepare_data.py lies its manifest.json. All that it lists must exist: a directory's
// shards, their tokens, their masks.
//
// Text files up to 128 KiB are copied, as a source tree may be edited during a run and mappings are limited.
// Others are mapped and must not change: one that shrinks, or gets an id outside the vocabulary, ends the
// program.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/base/fail.h"

// IGNORED_TARGET: a target that does not count; kernels.h's IGNORE_INDEX.
enum { END_OF_TEXT = 256, IGNORED_TARGET = -100 };

// The bytes of a token.
typedef enum { SOURCE_TEXT = 1, SOURCE_SHARDS_UINT16 = 2, SOURCE_SHARDS_UINT32 = 4 } SourceKind;

typedef struct {
  int64_t first, length, window; // pairs of an input and its target, from a position of the source on
} PackedSpan;

typedef struct {
  int64_t windows, documents, pairs;
  PackedSpan *pieces; // by window, and within one in the order of the stream; an array of stb_ds.h
  int64_t *starts;    // [windows + 1]: each window's first piece; NULL: the source is not packed
} Packing;

// True if tools/prepare_data.py made a folder, by its manifest.json: train_*.bin, the tokenizer.json that
// made them and, for the second, val_*.bin. Fail if shards of that program have a damaged manifest.
bool manifest_is_in(const char *folder);
bool manifest_has_validation(const char *folder);

// The part of such folders that is read: all; all but val_*.bin; or, if val_*.bin exist, all but train_*.bin.
typedef enum { SPLIT_NONE, SPLIT_TRAIN, SPLIT_VALIDATION } SourceSplit;

typedef struct {
  char *name; // "corpus.txt", "shards/a.bin and 2 more"
  SourceKind kind;
  int64_t tokens; // separators included
  int64_t files;
  int64_t vocab_size;
  SourceSplit split;
  bool masked;              // some file has a mask: targets may be ignored
  int64_t left;             // files of directories and globs that were not taken, but prepare_data.py's
  char *first_left;         // the path of one; NULL: none
  struct SourceFile *parts; // an array of stb_ds.h
  Packing packing;          // source_pack's
} Source;

// Opens the data that `paths[0..count)` name, in this order; with count 0 the program's own sources and prose
// as text (*.c *.h *.cu *.cuh *.py *.sh *.md, Makefile, LICENSE; not build/, runs/, hidden names) in the tree
// above the executable, or else in the current directory. Fails, naming file and offset, on a path that is
// missing, unreadable or empty, a mix of kinds, a damaged shard, and an id at or above `vocab_size`, for
// which it may read all data. The caller closes it.
Source *source_open(const char *const *paths, int64_t count, int64_t vocab_size, SourceSplit split);

void source_close(Source *source);                                // NULL is fine
const char *source_path(const Source *source, int64_t file);      // the path of one of `files`
const char *source_shared_file(const Source *a, const Source *b); // the path in b of a file of both, or NULL
// "byte-level text", "llm.c shards, uint16" or "llm.c shards, uint32".
const char *source_kind_name(const Source *source);
// "63 files are left out, such as notes.txt: ..." and why, cut to `size` bytes; "" if all were taken.
void source_describe_left(const Source *source, char *out, size_t size);

// out[i] = token first + i, for i in [0, count), all within the source. Any number of threads may read.
void source_read(const Source *source, int64_t first, int64_t count, int32_t *out);
// The same for tokens as targets: masked ones become IGNORED_TARGET. Returns how many count.
int64_t source_read_targets(const Source *source, int64_t first, int64_t count, int32_t *out);

// The position after the last token of each document, in order, the stream's end included: after each
// `end_of_text` if that is 0 or more, else as the shards' .ends files say; and after a text file with its
// separator. Reads all data. Fails if a shard has no .ends file and no end_of_text is given. An array of
// stb_ds.h, which the caller frees.
int64_t *source_document_ends(const Source *source, int64_t end_of_text);

// The files of these paths, and whether a source opened from them is masked. Does not read them.
Source *source_list(const char *const *paths, int64_t count);

// The vocabulary of the tokenizer that made the first of the listed shards, as the manifest or the
// tokenizer.json beside it says; 0: neither does.
int64_t source_tokenizer_vocab_size(const Source *listed);

enum { SOURCE_ENTROPY_SAMPLE = 64 << 20 };

// -sum p ln p over the first SOURCE_ENTROPY_SAMPLE tokens: the loss of the best predictor without context.
double source_entropy(const Source *source);

typedef enum { SHARD_TOKENS, SHARD_MASK, SHARD_ENDS } ShardPart;

typedef struct {
  int bits;         // per token: 16 or 32; 1 in a mask or in ends
  const void *data; // within the file
  int64_t count;    // number of tokens
} Shard;

// Checks a file against its header; false with a reason, a sentence whose subject is the file.
bool shard_parse(const void *bytes, size_t size, ShardPart part, Shard *shard, Reason *reason);
