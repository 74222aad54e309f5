// A source: one long stream of token ids, read from files that are memory-mapped and never copied whole.
//
// Two kinds of files, which one source does not mix:
//   - text: every byte is a token, its id the byte (0..255). With a vocabulary of more than 256 ids one
//     END_OF_TEXT (256) separates two files.
//   - llm.c token shards (*.bin): a header of 256 little-endian int32 (magic, version, number of tokens),
//     then the tokens: uint16 with magic 20240520, version 1, or uint32 with 20240801, 7. Shards join without
//     a separator: they contain theirs.
//
// Next to x.bin there may be x.mask, which says what tokens count as targets (tools/prepare_data.py makes it
// for fine-tuning data, where the prompt's tokens are read but not learned), and x.ends, which marks the last
// token of each document. They have the same header (magic 20261120 or 20261121, version 1) and a bit for
// each token, the lowest bit of a byte first.
//
// A path is a file; a directory, of which all regular files are read, all levels down, but hidden names and
// directories named "build"; or, when nothing has that very name, a glob(7). The files of one path are in
// byte order. A path written out must be text or a shard and not empty. Files matched by a glob or found in a
// directory are skipped when they are empty or binary (a NUL byte in the first 8 KiB), and a directory that
// holds shards is read for them alone. A *.bin file that is named or matched must be a shard; one found in a
// directory is one when it begins with the magic.
//
// Text files up to 128 KiB are copied into memory: a source tree may be edited while a run reads it, and a
// million small files would exceed the system's limit on mappings. Larger files and shards are mapped; they
// must not change while the source is open. One that shrinks, or gets an id outside the vocabulary, ends the
// program.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/fail.h"

// IGNORED_TARGET stands in targets where there is no counted one: the value of kernels.h's IGNORE_INDEX.
enum { END_OF_TEXT = 256, IGNORED_TARGET = -100 };

// The bytes of a token.
typedef enum { SOURCE_TEXT = 1, SOURCE_SHARDS_UINT16 = 2, SOURCE_SHARDS_UINT32 = 4 } SourceKind;

typedef struct {
  int64_t first, length, window; // pairs of an input and its target, from a position of the source on
} PackedSpan;

typedef struct {
  int64_t windows, documents, pairs;
  PackedSpan *pieces; // by window, and within one in the order of the stream; an array of stb_ds.h
  int64_t *starts;    // [windows + 1]: where the pieces of a window begin; NULL: the source is not packed
} Packing;

typedef struct {
  char *name; // "corpus.txt", "shards/a.bin and 2 more"
  SourceKind kind;
  int64_t tokens; // separators included
  int64_t files;
  int64_t vocab_size;
  bool masked;              // some file has a mask: targets may be ignored
  int64_t left;             // files of directories and globs that were not taken, masks not counted
  char *first_left;         // the path of one; NULL: there is none
  struct SourceFile *parts; // an array of stb_ds.h
  Packing packing;          // source_pack's
} Source;

// Opens what `paths[0..count)` name, in this order. Where there are none, the corpus that every checkout has,
// as text: the program's own sources and prose (*.c *.h *.cu *.cuh *.py *.sh *.md, Makefile, LICENSE; not
// build/, runs/, hidden names), so that a log or a data set in the tree is never trained on. The tree is
// looked for upward from the executable, then in the current directory.
//
// Checks every token id against the vocabulary, which reads all data unless the type cannot exceed it. Fails,
// naming file and offset, on a path that is missing, unreadable or empty, a mix of kinds, a damaged shard,
// and an id at or above `vocab_size`. The caller closes it.
Source *source_open(const char *const *paths, int64_t count, int64_t vocab_size);

void source_close(Source *source); // NULL is fine

// "byte-level text", "llm.c shards, uint16" or "llm.c shards, uint32".
const char *source_kind_name(const Source *source);

// "63 files are left out, such as notes.txt: ..." and why, cut to `size` bytes; "" where all were taken.
void source_describe_left(const Source *source, char *out, size_t size);

// out[i] = token at position first + i for i in [0, count), all within the source and, checked, the
// vocabulary. Any number of threads may read.
void source_read(const Source *source, int64_t first, int64_t count, int32_t *out);

// The same for tokens as targets: those that a mask leaves out become IGNORED_TARGET. Returns how many count.
int64_t source_read_targets(const Source *source, int64_t first, int64_t count, int32_t *out);

// Where each document ends, in order: the position after its last token. The documents are the whole stream,
// and the last one ends with it. Ends are: after each token `end_of_text` where that is 0 or more, else what
// the shards' .ends files say; and after a text file with its separator. Reads all data. Fails where a shard
// has no .ends file and no end_of_text is given. An array of stb_ds.h, which the caller frees.
int64_t *source_document_ends(const Source *source, int64_t end_of_text);

// Whether a source opened from these paths would be masked, without reading the files.
bool source_paths_masked(const char *const *paths, int64_t count);

enum { SOURCE_ENTROPY_SAMPLE = 64 << 20 };

// The unigram entropy in nats per token, -sum p ln p over the frequencies of the first SOURCE_ENTROPY_SAMPLE
// tokens: the loss of the best predictor that looks at no context, so a trained model must fall below it.
double source_entropy(const Source *source);

// --- shards in memory, as the fuzzer has them --------------------------------------------------------------

typedef enum { SHARD_TOKENS, SHARD_MASK, SHARD_ENDS } ShardPart;

typedef struct {
  int bits;         // of a token: 16 or 32; 1 of a mask or of ends
  const void *data; // within the file
  int64_t count;    // of tokens
} Shard;

// Checks a file against its header; false with a reason, which reads on from the file's name.
bool shard_parse(const void *bytes, size_t size, ShardPart part, Shard *shard, Reason *reason);
