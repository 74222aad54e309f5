#include "data/source.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "data/shard.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  BINARY_PROBE_BYTES = 8 << 10,
  COPY_LIMIT_BYTES = 128 << 10,
  CHECK_BLOCK = 4096,     // tokens a thread widens at a time
  CHECK_STRETCH = 8 << 20 // tokens after which the pages read are given back
};

// One file's share of the stream: `stored` tokens from position `first`, then perhaps a separator.
struct SourcePiece {
  char *path;
  Mapping file, mask_file;
  const void *tokens;  // in the file
  const uint8_t *mask; // in the mask file, or NULL: every token counts
  int64_t stored, first;
};

typedef struct SourcePiece Piece;

static int64_t token_bytes(SourceKind kind) {
  return kind == SOURCE_TEXT ? 1 : kind == SOURCE_SHARDS_UINT16 ? 2 : 4;
}

// --- one file ----------------------------------------------------------------------------------------------

static Mapping load_file(const char *path) {
  Mapping file = file_map_or_copy(path, COPY_LIMIT_BYTES);
  if (!file.bytes) fail("cannot open %s: %s", path, strerror(ENOENT));
  return file;
}

// Checks the shard and points the piece at its tokens.
static SourceKind open_shard(Piece *piece) {
  Shard shard;
  Reason reason;
  if (!shard_parse(piece->file.bytes, piece->file.size, &shard, &reason))
    fail("%s %s", piece->path, reason.text);
  piece->tokens = shard.tokens;
  piece->stored = shard.count;
  return shard.wide ? SOURCE_SHARDS_UINT32 : SOURCE_SHARDS_UINT16;
}

// "shards/a.mask" for "shards/a.bin"; the caller frees it. NULL where there is no such file.
static char *find_mask(const char *shard) {
  char *path = text_format("%.*s.mask", (int)(strlen(shard) - strlen(".bin")), shard);
  if (path_exists(path)) return path;
  free(path);
  return NULL;
}

// Loads the mask of a shard, if there is one, and checks that it fits.
static void open_mask(Piece *piece) {
  char *path = find_mask(piece->path);
  if (!path) return;
  piece->mask_file = load_file(path);
  Reason reason;
  piece->mask = shard_parse_mask(piece->mask_file.bytes, piece->mask_file.size, piece->stored, &reason);
  if (!piece->mask) fail("%s %s", path, reason.text);
  free(path);
}

static const char *kind_name(SourceKind kind) {
  static const char *const names[] = {"byte-level text", "llm.c shards, uint16", "llm.c shards, uint32"};
  return names[kind];
}

static bool is_bin(const char *path) {
  const char *suffix = strrchr(path, '.');
  return suffix && strcmp(suffix, ".bin") == 0;
}

// Appends the file unless its origin lets it be skipped.
static void add_file(Source *source, const FileEntry *entry) {
  Piece piece = {.path = entry->path, .file = load_file(entry->path)};
  const Mapping *file = &piece.file;
  SourceKind kind = SOURCE_TEXT;
  if (is_bin(entry->path) && (entry->origin != FILE_FOUND || shard_has_magic(file->bytes, file->size))) {
    kind = open_shard(&piece);
    open_mask(&piece);
    source->masked |= piece.mask != NULL;
  } else {
    size_t probe = file->size < BINARY_PROBE_BYTES ? file->size : BINARY_PROBE_BYTES;
    const char *nul = memchr(file->bytes, 0, probe);
    if (entry->origin == FILE_NAMED && file->size == 0)
      fail("%s is empty: name a file with at least one byte of text", entry->path);
    if (entry->origin == FILE_NAMED && nul)
      fail("%s is not text (NUL at byte %lld): name text files, or llm.c token shards ending in .bin",
           entry->path, (long long)(nul - file->bytes));
    if (file->size == 0 || nul) {
      file_unmap(&piece.file);
      return;
    }
    piece.tokens = file->bytes;
    piece.stored = (int64_t)file->size;
  }
  if (source->files > 0 && source->kind != kind)
    fail("%s (%s) and %s (%s) cannot be mixed: name files of one kind", source->pieces[0].path,
         kind_name(source->kind), entry->path, kind_name(kind));
  source->kind = kind;
  piece.path = text_format("%s", entry->path);
  source->pieces = host_grow(source->pieces, source->files, &source->capacity, sizeof piece, "data files");
  source->pieces[source->files++] = piece;
}

// --- token ids ---------------------------------------------------------------------------------------------

// out[i] = tokens[first + i]; a uint32 above INT32_MAX comes out negative.
static void widen(SourceKind kind, const void *tokens, int64_t first, int64_t count, int32_t *out) {
  if (kind == SOURCE_TEXT)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint8_t *)tokens)[first + i];
  else if (kind == SOURCE_SHARDS_UINT16)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint16_t *)tokens)[first + i];
  else
    memcpy(out, (const uint32_t *)tokens + first, (size_t)count * sizeof *out);
}

// The first index in [first, end) whose id is no id of the vocabulary, or `end`.
static int64_t find_outside(const Source *source, const Piece *piece, int64_t first, int64_t end) {
  int64_t found = end;
#pragma omp parallel for reduction(min : found)
  for (int64_t start = first; start < end; start += CHECK_BLOCK) {
    int32_t ids[CHECK_BLOCK];
    int64_t count = end - start < CHECK_BLOCK ? end - start : CHECK_BLOCK;
    widen(source->kind, piece->tokens, start, count, ids);
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = (uint32_t)ids[i] > largest ? (uint32_t)ids[i] : largest;
    if (largest < source->vocab_size) continue;
    int64_t i = 0;
    while ((uint32_t)ids[i] < source->vocab_size) i++;
    found = start + i < found ? start + i : found;
  }
  return found;
}

static void fail_outside(const Source *source, const Piece *piece, int64_t index) {
  int32_t id;
  widen(source->kind, piece->tokens, index, 1, &id);
  int64_t at = (const char *)piece->tokens - piece->file.bytes + index * token_bytes(source->kind);
  fail("%s: token %lld (byte %lld) has id %u and the vocabulary has %lld: raise --vocab to at least %lld or "
       "%s",
       piece->path, (long long)index, (long long)at, (uint32_t)id, (long long)source->vocab_size,
       (long long)(uint32_t)id + 1,
       source->kind == SOURCE_TEXT ? "name other text" : "make the shards with the model's tokenizer");
}

static void check_ids(const Source *source, const Piece *piece) {
  int64_t possible = (int64_t)1 << (8 * token_bytes(source->kind));
  if (source->vocab_size >= possible) return;
  for (int64_t first = 0; first < piece->stored; first += CHECK_STRETCH) {
    int64_t end = piece->stored - first < CHECK_STRETCH ? piece->stored : first + CHECK_STRETCH;
    int64_t outside = find_outside(source, piece, first, end);
    if (outside < end) fail_outside(source, piece, outside);
    // The pages stay in the system's cache but leave this process: a scan of all the data must not show as
    // memory that training needed.
    file_done_with(&piece->file, 0, piece->file.size);
  }
}

// --- the source --------------------------------------------------------------------------------------------

static Source *new_source(const char *first_name, int64_t more, int64_t vocab_size) {
  assert(vocab_size > 0);
  Source *source = host_alloc(1, sizeof *source, "a data source");
  source->vocab_size = vocab_size;
  source->name =
      more > 0 ? text_format("%s and %lld more", first_name, (long long)more) : text_format("%s", first_name);
  return source;
}

static bool is_found_shard(const FileEntry *entry) {
  if (entry->origin != FILE_FOUND || !is_bin(entry->path)) return false;
  int32_t magic = 0;
  FILE *file = fopen(entry->path, "rb");
  bool has = file && fread(&magic, sizeof magic, 1, file) == 1;
  if (file) fclose(file);
  return has && shard_has_magic(&magic, sizeof magic);
}

static void add_files(Source *source, const FileList *files, const char *name) {
  int64_t before = source->files;
  bool shards_found = false;
  for (int64_t i = 0; i < files->count; i++) shards_found |= is_found_shard(&files->entries[i]);
  for (int64_t i = 0; i < files->count; i++) {
    const FileEntry *entry = &files->entries[i];
    if (!shards_found || entry->origin != FILE_FOUND || is_found_shard(entry)) add_file(source, entry);
  }
  if (source->files == before) fail("%s holds no text and no token shards", name);
  for (int64_t i = before; i < source->files; i++) check_ids(source, &source->pieces[i]);
}

static bool has_separators(const Source *source) {
  return source->kind == SOURCE_TEXT && source->vocab_size > END_OF_TEXT;
}

static Source *join(Source *source) {
  for (int64_t i = 0; i < source->files; i++) {
    if (i > 0) source->tokens += has_separators(source);
    source->pieces[i].first = source->tokens;
    source->tokens += source->pieces[i].stored;
  }
  return source;
}

Source *source_open(const char *const *paths, int64_t count, int64_t vocab_size) {
  assert(count > 0);
  Source *source = new_source(paths[0], count - 1, vocab_size);
  for (int64_t i = 0; i < count; i++) {
    FileList files = {0};
    file_list_add(&files, paths[i]);
    add_files(source, &files, paths[i]);
    file_list_free(&files);
  }
  return join(source);
}

Source *source_open_files(const FileList *files, const char *name, int64_t vocab_size) {
  Source *source = new_source(name, 0, vocab_size);
  add_files(source, files, name);
  return join(source);
}

void source_close(Source *source) {
  if (!source) return;
  for (int64_t i = 0; i < source->files; i++) {
    free(source->pieces[i].path);
    file_unmap(&source->pieces[i].file);
    file_unmap(&source->pieces[i].mask_file);
  }
  free(source->pieces);
  free(source->name);
  free(source);
}

const char *source_kind_name(const Source *source) {
  return kind_name(source->kind);
}

// The last piece that begins at or before `position`.
static const Piece *piece_at(const Source *source, int64_t position) {
  int64_t low = 0, high = source->files;
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    if (source->pieces[middle].first <= position)
      low = middle;
    else
      high = middle;
  }
  return &source->pieces[low];
}

void source_read(const Source *source, int64_t first, int64_t count, int32_t *out) {
  assert(first >= 0 && count >= 0 && first <= source->tokens - count);
  if (count == 0) return;
  for (const Piece *piece = piece_at(source, first); count > 0; piece++) {
    int64_t start = first - piece->first;
    int64_t available = piece->stored - start; // 0 when `first` is the separator itself
    int64_t taken = available < count ? available : count;
    widen(source->kind, piece->tokens, start, taken, out);
    if (taken < count && has_separators(source)) out[taken++] = END_OF_TEXT;
    first += taken, out += taken, count -= taken;
  }
}

int64_t source_read_targets(const Source *source, int64_t first, int64_t count, int32_t *out) {
  source_read(source, first, count, out);
  if (!source->masked || count == 0) return count;
  int64_t counted = 0, end = first + count;
  for (const Piece *piece = piece_at(source, first); first < end; piece++) {
    int64_t piece_end = piece->first + piece->stored; // shards have no separators
    for (; first < end && first < piece_end; first++, out++) {
      int64_t bit = first - piece->first;
      bool counts = !piece->mask || (piece->mask[bit / 8] >> (bit % 8) & 1);
      if (!counts) *out = IGNORED_TARGET;
      counted += counts;
    }
  }
  return counted;
}

bool source_paths_masked(const char *const *paths, int64_t count) {
  bool masked = false;
  for (int64_t i = 0; i < count; i++) {
    FileList files = {0};
    file_list_add(&files, paths[i]);
    for (int64_t k = 0; k < files.count && !masked; k++) {
      char *mask = is_bin(files.entries[k].path) ? find_mask(files.entries[k].path) : NULL;
      masked = mask != NULL;
      free(mask);
    }
    file_list_free(&files);
  }
  return masked;
}
