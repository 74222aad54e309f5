#include "data/source.h"
#include "base/fail.h"
#include "data/shard.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  BINARY_PROBE_BYTES = 8 << 10,
  COPY_LIMIT_BYTES = 128 << 10,
  CHECK_BLOCK = 4096,     // tokens a thread widens at a time
  CHECK_STRETCH = 8 << 20 // tokens after which the pages read are given back
};

// A whole file in memory.
typedef struct {
  char *path;
  void *memory;
  size_t bytes;
  bool mapped;
} File;

// One file's share of the stream: `stored` tokens from position `first`, then perhaps a separator.
typedef struct {
  File file, mask_file;
  const void *tokens;  // in the file
  const uint8_t *mask; // in the mask file, or NULL: every token counts
  int64_t stored, first;
} Piece;

struct Source {
  char *name;
  SourceKind kind;
  int64_t vocab_size, count, total;
  bool masked;
  Piece *pieces;
};

static int64_t token_bytes(SourceKind kind) {
  return kind == SOURCE_TEXT ? 1 : kind == SOURCE_SHARDS_UINT16 ? 2 : 4;
}

// --- one file ----------------------------------------------------------------------------------------------

static File load_file(const char *path) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) fail("cannot open %s: %s", path, strerror(errno));
  struct stat status;
  if (fstat(file, &status) != 0) fail("cannot read %s: %s", path, strerror(errno));
  File loaded = {.bytes = (size_t)status.st_size, .mapped = status.st_size > COPY_LIMIT_BYTES};
  if (loaded.mapped) {
    loaded.memory = mmap(NULL, loaded.bytes, PROT_READ, MAP_PRIVATE, file, 0);
    if (loaded.memory == MAP_FAILED) fail("cannot map %s into memory: %s", path, strerror(errno));
  } else {
    loaded.memory = malloc(loaded.bytes + 1);
    if (!loaded.memory) fail("out of memory for %s", path);
    size_t have = 0;
    ssize_t got = 1;
    while (have < loaded.bytes && got > 0) {
      got = read(file, (char *)loaded.memory + have, loaded.bytes - have);
      if (got < 0) fail("cannot read %s at byte %zu: %s", path, have, strerror(errno));
      have += (size_t)got;
    }
    loaded.bytes = have;
  }
  close(file);
  loaded.path = strdup(path);
  if (!loaded.path) fail("out of memory for the path %s", path);
  return loaded;
}

static void unload(const File *file) {
  if (file->mapped)
    munmap(file->memory, file->bytes);
  else
    free(file->memory);
  free(file->path);
}

// Checks the shard and points the piece at its tokens.
static SourceKind open_shard(Piece *piece) {
  const File *file = &piece->file;
  Shard shard;
  Reason reason;
  if (!shard_parse(file->memory, file->bytes, &shard, &reason)) fail("%s %s", file->path, reason.text);
  piece->tokens = shard.tokens;
  piece->stored = shard.count;
  return shard.wide ? SOURCE_SHARDS_UINT32 : SOURCE_SHARDS_UINT16;
}

// "shards/a.mask" for "shards/a.bin"; the caller frees it. NULL where there is no such file.
static char *find_mask(const char *shard) {
  char *path = NULL;
  if (asprintf(&path, "%.*s.mask", (int)(strlen(shard) - strlen(".bin")), shard) < 0)
    fail("out of memory for the path of the mask of %s", shard);
  if (access(path, F_OK) == 0) return path;
  free(path);
  return NULL;
}

// Loads the mask beside a shard, if there is one, and checks that it belongs to it.
static void open_mask(Piece *piece) {
  char *path = find_mask(piece->file.path);
  if (!path) return;
  piece->mask_file = load_file(path);
  free(path);
  const File *file = &piece->mask_file;
  Reason reason;
  piece->mask = shard_parse_mask(file->memory, file->bytes, piece->stored, &reason);
  if (!piece->mask) fail("%s %s", file->path, reason.text);
}

static const char *kind_name(SourceKind kind) {
  static const char *const names[] = {"byte-level text", "llm.c shards, uint16", "llm.c shards, uint32"};
  return names[kind];
}

static bool is_bin(const char *path) {
  const char *suffix = strrchr(path, '.');
  return suffix && strcmp(suffix, ".bin") == 0;
}

// Appends the file unless its origin lets it be skipped. The array has room for it.
static void add_file(Source *source, const FileEntry *entry) {
  Piece piece = {.file = load_file(entry->path)};
  const File *file = &piece.file;
  SourceKind kind = SOURCE_TEXT;
  if (is_bin(entry->path) && (entry->origin != FILE_FOUND || shard_has_magic(file->memory, file->bytes))) {
    kind = open_shard(&piece);
    open_mask(&piece);
    source->masked |= piece.mask != NULL;
  } else {
    size_t probe = file->bytes < BINARY_PROBE_BYTES ? file->bytes : BINARY_PROBE_BYTES;
    const char *nul = memchr(file->memory, 0, probe);
    if (entry->origin == FILE_NAMED && file->bytes == 0)
      fail("%s is empty: name a file with at least one byte of text", entry->path);
    if (entry->origin == FILE_NAMED && nul)
      fail("%s is not text (NUL at byte %lld): name text files, or llm.c token shards ending in .bin",
           entry->path, (long long)(nul - (const char *)file->memory));
    if (file->bytes == 0 || nul) {
      unload(file);
      return;
    }
    piece.tokens = file->memory;
    piece.stored = (int64_t)file->bytes;
  }
  if (source->count > 0 && source->kind != kind)
    fail("%s (%s) and %s (%s) cannot be mixed: name files of one kind", source->pieces[0].file.path,
         kind_name(source->kind), entry->path, kind_name(kind));
  source->kind = kind;
  source->pieces[source->count++] = piece;
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

// The least index in [first, end) whose id is no id of the vocabulary, or `end`.
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
  int64_t at =
      (const char *)piece->tokens - (const char *)piece->file.memory + index * token_bytes(source->kind);
  fail("%s: token %lld (byte %lld) has id %u and the vocabulary has %lld: raise --vocab to at least %lld or "
       "%s",
       piece->file.path, (long long)index, (long long)at, (uint32_t)id, (long long)source->vocab_size,
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
    if (piece->file.mapped) madvise(piece->file.memory, piece->file.bytes, MADV_DONTNEED);
  }
}

// --- the source --------------------------------------------------------------------------------------------

static Source *new_source(const char *first_name, int64_t more, int64_t vocab_size) {
  assert(vocab_size > 0);
  Source *source = calloc(1, sizeof *source);
  if (!source) fail("out of memory for the data source %s", first_name);
  source->vocab_size = vocab_size;
  int written = more > 0 ? asprintf(&source->name, "%s and %lld more", first_name, (long long)more)
                         : asprintf(&source->name, "%s", first_name);
  if (written < 0) fail("out of memory for the data source %s", first_name);
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
  int64_t before = source->count;
  Piece *pieces = realloc(source->pieces, (size_t)(before + files->count + 1) * sizeof *pieces);
  if (!pieces) fail("out of memory for %lld data files", (long long)(before + files->count));
  source->pieces = pieces;
  bool shards_found = false;
  for (int64_t i = 0; i < files->count; i++) shards_found |= is_found_shard(&files->entries[i]);
  for (int64_t i = 0; i < files->count; i++) {
    const FileEntry *entry = &files->entries[i];
    if (!shards_found || entry->origin != FILE_FOUND || is_found_shard(entry)) add_file(source, entry);
  }
  if (source->count == before) fail("%s holds no text and no token shards", name);
  for (int64_t i = before; i < source->count; i++) check_ids(source, &source->pieces[i]);
}

static bool has_separators(const Source *source) {
  return source->kind == SOURCE_TEXT && source->vocab_size > END_OF_TEXT;
}

static Source *join(Source *source) {
  for (int64_t i = 0; i < source->count; i++) {
    if (i > 0) source->total += has_separators(source);
    source->pieces[i].first = source->total;
    source->total += source->pieces[i].stored;
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
  for (int64_t i = 0; i < source->count; i++) {
    unload(&source->pieces[i].file);
    unload(&source->pieces[i].mask_file);
  }
  free(source->pieces);
  free(source->name);
  free(source);
}

const char *source_name(const Source *source) {
  return source->name;
}

SourceKind source_kind(const Source *source) {
  return source->kind;
}

const char *source_kind_name(const Source *source) {
  return kind_name(source->kind);
}

int64_t source_files(const Source *source) {
  return source->count;
}

int64_t source_tokens(const Source *source) {
  return source->total;
}

bool source_masked(const Source *source) {
  return source->masked;
}

int64_t source_vocab_size(const Source *source) {
  return source->vocab_size;
}

// The last piece that begins at or before `position`.
static const Piece *piece_at(const Source *source, int64_t position) {
  int64_t low = 0, high = source->count;
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
  assert(first >= 0 && count >= 0 && first <= source->total - count);
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
