#include "data/source.h"

#include <assert.h>
#include <errno.h>
#include <fts.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/integers.h"
#include "base/text.h"

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

// How a file came into the list decides how strictly it is read.
typedef enum {
  FILE_NAMED,   // the user wrote this very path
  FILE_MATCHED, // a glob matched it
  FILE_FOUND    // it lay in a directory
} FileOrigin;

typedef struct {
  char *path;
  FileOrigin origin;
} FileEntry;

typedef struct {
  FileEntry *entries;
  int64_t count, capacity;
} FileList;

// Whether a directory's entry is wanted. `name` is the last part of its path.
typedef bool (*FileFilter)(const char *name, bool is_directory);

// --- the files that paths name ------------------------------------------------------------------------------

static void append(FileList *list, const char *path, FileOrigin origin) {
  list->entries =
      host_grow(list->entries, list->count, &list->capacity, sizeof *list->entries, "a list of data files");
  list->entries[list->count++] = (FileEntry){text_format("%s", path), origin};
}

// strcmp, not the locale's order: the stream of tokens must not depend on LANG.
static int compare_paths(const void *a, const void *b) {
  return strcmp(((const FileEntry *)a)->path, ((const FileEntry *)b)->path);
}

// Adds the regular files under `directory`, all levels down, that `accept` (NULL: any) takes, without hidden names
// and directories named "build". Symbolic links to files are followed, links to directories are not.
static void add_directory(FileList *list, const char *directory, FileFilter accept) {
  char *roots[] = {(char *)directory, NULL};
  FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, NULL);
  if (!walk) fail("cannot read the directory %s: %s", directory, strerror(errno));
  FTSENT *entry;
  while (errno = 0, (entry = fts_read(walk))) {
    bool is_directory = entry->fts_info == FTS_D, is_file = entry->fts_info == FTS_F;
    struct stat target;
    if (entry->fts_info == FTS_SL) is_file = stat(entry->fts_path, &target) == 0 && S_ISREG(target.st_mode);
    if (entry->fts_info == FTS_DNR || entry->fts_info == FTS_ERR || entry->fts_info == FTS_NS)
      fail("cannot read %s: %s", entry->fts_path, strerror(entry->fts_errno));
    if (entry->fts_level <= 0) continue; // the directory itself
    bool skip = entry->fts_name[0] == '.' || (is_directory && strcmp(entry->fts_name, "build") == 0) ||
                (accept && !accept(entry->fts_name, is_directory));
    if (is_directory && skip) fts_set(walk, entry, FTS_SKIP);
    if (is_file && !skip) append(list, entry->fts_path, FILE_FOUND);
  }
  if (errno) fail("cannot read the directory %s: %s", directory, strerror(errno));
  fts_close(walk);
}

static void add_existing(FileList *list, const char *path, FileOrigin origin) {
  struct stat status;
  if (stat(path, &status) != 0) fail("cannot read %s: %s", path, strerror(errno));
  if (S_ISDIR(status.st_mode))
    add_directory(list, path, NULL);
  else if (S_ISREG(status.st_mode))
    append(list, path, origin);
  else
    fail("%s is neither a file nor a directory: name a file, a directory or a glob", path);
}

// Adds what `path` names: a file, a directory's files or, when nothing has that very name, what glob(7) matches.
static void add_path(FileList *list, const char *path) {
  if (path_exists(path) || !strpbrk(path, "*?[")) {
    add_existing(list, path, FILE_NAMED);
    return;
  }
  glob_t matches;
  int result = glob(path, GLOB_ERR | GLOB_NOSORT, NULL, &matches);
  if (result == GLOB_NOMATCH) fail("no file matches %s", path);
  if (result != 0) fail("cannot read the directories that %s names: %s", path, strerror(errno));
  for (size_t i = 0; i < matches.gl_pathc; i++) add_existing(list, matches.gl_pathv[i], FILE_MATCHED);
  globfree(&matches);
}

static void free_list(FileList *list) {
  for (int64_t i = 0; i < list->count; i++) free(list->entries[i].path);
  free(list->entries);
  *list = (FileList){0};
}

// --- shards in memory ----------------------------------------------------------------------------------------

enum {
  HEADER_INTS = 256,
  HEADER_BYTES = 4 * HEADER_INTS,
  MAGIC_UINT16 = 20240520,
  VERSION_UINT16 = 1,
  MAGIC_UINT32 = 20240801,
  VERSION_UINT32 = 7,
  BITS_VERSION = 1
};

// out[i] = from[i], of unsigned integers of 1, 2 or 4 bytes; one above INT32_MAX comes out negative.
static void ids_widen(const void *from, int bytes_each, int64_t count, int32_t *out) {
  if (bytes_each == 1)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint8_t *)from)[i];
  else if (bytes_each == 2)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint16_t *)from)[i];
  else
    memcpy(out, from, (size_t)count * sizeof *out);
}

static int32_t header_value(const void *bytes, int index) {
  int32_t value;
  memcpy(&value, (const char *)bytes + 4 * index, sizeof value);
  return value;
}

static bool shard_has_magic(const void *bytes, size_t size) {
  if (size < 4) return false;
  int32_t magic = header_value(bytes, 0);
  return magic == MAGIC_UINT16 || magic == MAGIC_UINT32;
}

bool shard_parse(const void *bytes, size_t size, Shard *shard, Reason *reason) {
  if (size < HEADER_BYTES)
    return refuse(
        reason, "is truncated: a token shard begins with a header of %d bytes and this file ends at byte %zu",
        HEADER_BYTES, size);
  int32_t magic = header_value(bytes, 0), version = header_value(bytes, 1);
  if (!shard_has_magic(bytes, size))
    return refuse(reason,
                  "is no llm.c token shard: the magic at byte 0 is %d, not %d (uint16) or %d (uint32)", magic,
                  MAGIC_UINT16, MAGIC_UINT32);
  bool wide = magic == MAGIC_UINT32;
  int32_t known = wide ? VERSION_UINT32 : VERSION_UINT16;
  if (version != known)
    return refuse(reason,
                  "has shard version %d at byte 4 where magic %d goes with version %d: make it again with "
                  "the current llm.c format",
                  version, magic, known);
  int token_bytes = wide ? 4 : 2;
  int64_t count = header_value(bytes, 2), expected = HEADER_BYTES + count * token_bytes;
  if (count <= 0)
    return refuse(reason, "holds no tokens: the count at byte 8 of its header is %lld", (long long)count);
  if (expected > (int64_t)size)
    return refuse(reason,
                  "is truncated: the header at byte 8 promises %lld tokens, which end at byte %lld, and the "
                  "file ends at byte %zu",
                  (long long)count, (long long)expected, size);
  if (expected < (int64_t)size)
    return refuse(reason,
                  "disagrees with its header: the %lld tokens promised at byte 8 end at byte %lld, and the "
                  "file ends at byte %zu",
                  (long long)count, (long long)expected, size);
  *shard = (Shard){token_bytes, (const char *)bytes + HEADER_BYTES, count};
  return true;
}

const uint8_t *shard_parse_bits(const void *bytes, size_t size, ShardBits kind, int64_t count,
                                Reason *reason) {
  bool mask = kind == SHARD_MASK;
  const char *what = mask ? "mask" : "list of documents' ends";
  if (size < HEADER_BYTES || header_value(bytes, 0) != (int32_t)kind ||
      header_value(bytes, 1) != BITS_VERSION) {
    refuse(reason,
           "is no %s of a token shard (magic %d, version %d): make it and its shard again with "
           "tools/prepare_data.py, or remove it%s",
           what, (int)kind, BITS_VERSION, mask ? " to count every token" : " and give --end-of-text ID");
    return NULL;
  }
  int64_t claimed = header_value(bytes, 2), expected = HEADER_BYTES + (count + 7) / 8;
  if (claimed != count || (int64_t)size != expected) {
    refuse(reason,
           "is not the %s of its shard: it is for %lld tokens in %zu bytes, and %lld tokens in %lld bytes "
           "are needed",
           what, (long long)claimed, size, (long long)count, (long long)expected);
    return NULL;
  }
  return (const uint8_t *)bytes + HEADER_BYTES;
}

// --- one file ----------------------------------------------------------------------------------------------

static Mapping load_file(const char *path) {
  Mapping file = file_map_or_copy(path, COPY_LIMIT_BYTES, NULL);
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
  return (SourceKind)shard.token_bytes;
}

// "shards/a.mask" for "shards/a.bin"; the caller frees it. NULL where there is no such file.
static char *find_beside(const char *shard, const char *ending) {
  char *path = text_format("%.*s%s", (int)(strlen(shard) - strlen(".bin")), shard, ending);
  struct stat status;
  if (lstat(path, &status) == 0) return path; // a link that leads nowhere is not "no mask": opening it fails
  free(path);
  return NULL;
}

// Loads the bits of a shard, if there are any, and checks that they fit.
static const uint8_t *open_bits(const Piece *piece, ShardBits kind, Mapping *file) {
  char *path = find_beside(piece->path, kind == SHARD_MASK ? ".mask" : ".ends");
  if (!path) return NULL;
  *file = load_file(path);
  Reason reason;
  const uint8_t *bits = shard_parse_bits(file->bytes, file->size, kind, piece->stored, &reason);
  if (!bits) fail("%s %s", path, reason.text);
  free(path);
  return bits;
}

static const char *const kind_names[] = {[SOURCE_TEXT] = "byte-level text",
                                         [SOURCE_SHARDS_UINT16] = "llm.c shards, uint16",
                                         [SOURCE_SHARDS_UINT32] = "llm.c shards, uint32"};

static bool is_bin(const char *path) {
  return text_ends_in(path, ".bin");
}

static void leave_out(Source *source, const char *path) {
  if (text_ends_in(path, ".mask") || text_ends_in(path, ".ends")) return;
  if (!source->left++) source->first_left = text_format("%s", path);
}

// Appends the file unless its origin lets it be skipped.
static void add_file(Source *source, const FileEntry *entry) {
  Piece piece = {.path = entry->path, .file = load_file(entry->path)};
  const Mapping *file = &piece.file;
  SourceKind kind = SOURCE_TEXT;
  if (is_bin(entry->path) && (entry->origin != FILE_FOUND || shard_has_magic(file->bytes, file->size))) {
    kind = open_shard(&piece);
    piece.mask = open_bits(&piece, SHARD_MASK, &piece.mask_file);
    source->masked |= piece.mask != NULL;
  } else {
    const char *nul = memchr(file->bytes, 0, (size_t)min_i64((int64_t)file->size, BINARY_PROBE_BYTES));
    if (entry->origin == FILE_NAMED && file->size == 0)
      fail("%s is empty: name a file with at least one byte of text", entry->path);
    if (entry->origin == FILE_NAMED && nul)
      fail("%s is not text (NUL at byte %lld): name text files, or llm.c token shards ending in .bin",
           entry->path, (long long)(nul - file->bytes));
    if (file->size == 0 || nul) {
      leave_out(source, entry->path);
      file_unmap(&piece.file);
      return;
    }
    piece.tokens = file->bytes;
    piece.stored = (int64_t)file->size;
  }
  if (source->files > 0 && source->kind != kind)
    fail("%s (%s) and %s (%s) cannot be mixed: name files of one kind", source->pieces[0].path,
         kind_names[source->kind], entry->path, kind_names[kind]);
  source->kind = kind;
  piece.path = text_format("%s", entry->path);
  source->pieces = host_grow(source->pieces, source->files, &source->capacity, sizeof piece, "data files");
  source->pieces[source->files++] = piece;
}

// --- token ids ---------------------------------------------------------------------------------------------

// out[i] = the piece's token first + i
static void widen(SourceKind kind, const Piece *piece, int64_t first, int64_t count, int32_t *out) {
  ids_widen((const char *)piece->tokens + first * kind, kind, count, out);
}

// The index of the first id that is none of the vocabulary, or `count`.
static int64_t first_outside(const Source *source, const int32_t *ids, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = (uint32_t)ids[i] > largest ? (uint32_t)ids[i] : largest;
  for (int64_t i = 0; i < count && largest >= source->vocab_size; i++)
    if ((uint32_t)ids[i] >= source->vocab_size) return i;
  return count;
}

// The first index in [first, end) whose id is no id of the vocabulary, or `end`.
static int64_t find_outside(const Source *source, const Piece *piece, int64_t first, int64_t end) {
  int64_t found = end;
#pragma omp parallel for reduction(min : found)
  for (int64_t start = first; start < end; start += CHECK_BLOCK) {
    int32_t ids[CHECK_BLOCK];
    int64_t count = min_i64(end - start, CHECK_BLOCK);
    widen(source->kind, piece, start, count, ids);
    int64_t outside = first_outside(source, ids, count);
    if (outside < count) found = min_i64(found, start + outside);
  }
  return found;
}

static void fail_outside(const Source *source, const Piece *piece, int64_t index) {
  int64_t at = (const char *)piece->tokens - piece->file.bytes + index * source->kind;
  int32_t id, other;
  widen(source->kind, piece, index, 1, &id);
  uint32_t largest = (uint32_t)id;
  for (int64_t i = index + 1; i < piece->stored; i++) {
    widen(source->kind, piece, i, 1, &other);
    if ((uint32_t)other > largest) largest = (uint32_t)other;
  }
  fail("%s: token %lld (byte %lld) has id %u and the vocabulary has %lld: raise --vocab to at least %lld or "
       "%s",
       piece->path, (long long)index, (long long)at, (uint32_t)id, (long long)source->vocab_size,
       (long long)largest + 1,
       source->kind == SOURCE_TEXT ? "name other text" : "make the shards with the model's tokenizer");
}

static void check_ids(const Source *source, const Piece *piece) {
  int64_t possible = (int64_t)1 << (8 * source->kind);
  if (source->vocab_size >= possible) return;
  for (int64_t first = 0; first < piece->stored; first += CHECK_STRETCH) {
    int64_t end = min_i64(piece->stored, first + CHECK_STRETCH);
    int64_t outside = find_outside(source, piece, first, end);
    if (outside < end) fail_outside(source, piece, outside);
    // The pages stay in the system's cache: a scan of all the data must not show as memory that training needed.
    file_done_with(&piece->file, 0, piece->file.size);
  }
}

// --- the source --------------------------------------------------------------------------------------------

// Takes `name` over.
static Source *new_source(char *name, int64_t vocab_size) {
  assert(vocab_size > 0);
  Source *source = host_alloc(1, sizeof *source, "a data source");
  *source = (Source){.name = name, .vocab_size = vocab_size};
  return source;
}

static bool is_found_shard(const FileEntry *entry) {
  if (entry->origin != FILE_FOUND || !is_bin(entry->path)) return false;
  int32_t magic = 0;
  size_t size;
  int file = file_open(entry->path, &size);
  bool has = file >= 0 && read(file, &magic, sizeof magic) == sizeof magic;
  if (file >= 0) close(file);
  return has && shard_has_magic(&magic, sizeof magic);
}

static void add_files(Source *source, FileList *files, const char *name) {
  int64_t before = source->files;
  if (files->count) qsort(files->entries, (size_t)files->count, sizeof *files->entries, compare_paths);
  bool shards_found = false;
  for (int64_t i = 0; i < files->count; i++) shards_found |= is_found_shard(&files->entries[i]);
  for (int64_t i = 0; i < files->count; i++) {
    const FileEntry *entry = &files->entries[i];
    if (!shards_found || entry->origin != FILE_FOUND || is_found_shard(entry))
      add_file(source, entry);
    else
      leave_out(source, entry->path);
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
  char *name = text_format(count > 1 ? "%s and %lld more" : "%s", paths[0], (long long)count - 1);
  Source *source = new_source(name, vocab_size);
  for (int64_t i = 0; i < count; i++) {
    FileList files = {0};
    add_path(&files, paths[i]);
    add_files(source, &files, paths[i]);
    free_list(&files);
  }
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
  free(source->first_left);
  free(source->name);
  free(source);
}

const char *source_kind_name(const Source *source) {
  return kind_names[source->kind];
}

void source_describe_left(const Source *source, char *out, size_t size) {
  *out = 0;
  if (!source->left) return;
  const char *s = source->left == 1 ? "" : "s", *are = source->left == 1 ? "is" : "are";
  char *why =
      source->kind == SOURCE_TEXT
          ? text_format("empty or binary")
          : text_format("a directory with token shards (%s) is read for them alone", source->pieces[0].path);
  char *text = text_format("%s file%s %s left out, such as %s: %s", text_grouped(source->left).text, s, are,
                           source->first_left, why);
  text_escape(out, size, text, strlen(text)); // found names may hold anything
  free(text);
  free(why);
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
    int64_t taken = min_i64(piece->stored - start, count); // 0 when `first` is the separator itself
    widen(source->kind, piece, start, taken, out);
    int64_t outside = first_outside(source, out, taken); // the file may have changed since it was opened
    if (outside < taken) fail_outside(source, piece, start + outside);
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

// Ends are appended to an array.
typedef struct {
  int64_t *items, count, capacity;
} Ends;

static void append_end(Ends *ends, int64_t end) {
  ends->items = host_grow(ends->items, ends->count, &ends->capacity, sizeof *ends->items, "documents");
  ends->items[ends->count++] = end;
}

static void find_ends(const Source *source, const Piece *piece, int64_t end_of_text, Ends *ends) {
  Mapping file = {0};
  const uint8_t *bits = end_of_text < 0 ? open_bits(piece, SHARD_ENDS, &file) : NULL;
  if (end_of_text < 0 && !bits)
    fail("--pack documents: %s does not say where documents end: give --end-of-text ID, or make it again "
         "with tools/prepare_data.py, which writes that next to it",
         piece->path);
  for (int64_t first = 0; first < piece->stored; first += CHECK_BLOCK) {
    int32_t ids[CHECK_BLOCK];
    int64_t count = min_i64(piece->stored - first, CHECK_BLOCK);
    if (!bits) widen(source->kind, piece, first, count, ids);
    for (int64_t i = 0; i < count; i++)
      if (bits ? bits[(first + i) / 8] >> ((first + i) % 8) & 1 : ids[i] == end_of_text)
        append_end(ends, piece->first + first + i + 1);
  }
  file_done_with(&piece->file, 0, piece->file.size); // as in check_ids
  file_unmap(&file);
}

int64_t *source_document_ends(const Source *source, int64_t end_of_text, int64_t *count) {
  Ends ends = {0};
  bool text = source->kind == SOURCE_TEXT;
  for (int64_t i = 0; i < source->files; i++) {
    if (!text || end_of_text >= 0) find_ends(source, &source->pieces[i], end_of_text, &ends);
    int64_t end = i + 1 < source->files ? source->pieces[i + 1].first : source->tokens;
    bool closes = text || i + 1 == source->files, closed = ends.count && ends.items[ends.count - 1] == end;
    if (closes && !closed) append_end(&ends, end);
  }
  *count = ends.count;
  return ends.items;
}

bool source_paths_masked(const char *const *paths, int64_t count) {
  bool masked = false;
  for (int64_t i = 0; i < count; i++) {
    FileList files = {0};
    add_path(&files, paths[i]);
    for (int64_t k = 0; k < files.count && !masked; k++) {
      char *mask = is_bin(files.entries[k].path) ? find_beside(files.entries[k].path, ".mask") : NULL;
      masked = mask != NULL;
      free(mask);
    }
    free_list(&files);
  }
  return masked;
}

// --- the source tree --------------------------------------------------------------------------------------------

static bool is_source_tree(const char *directory) {
  char marker[PATH_MAX + 32];
  snprintf(marker, sizeof marker, "%s/data/source.h", directory);
  return access(marker, R_OK) == 0;
}

// Writes the root of the checkout into `root`.
static void find_root(char root[PATH_MAX]) {
  ssize_t length = readlink("/proc/self/exe", root, PATH_MAX - 1);
  root[length > 0 ? length : 0] = 0;
  for (char *slash; (slash = strrchr(root, '/'));) {
    *slash = 0;
    if (is_source_tree(root)) return;
  }
  if (!getcwd(root, PATH_MAX) || !is_source_tree(root))
    fail("the built-in corpus is the source tree, and neither the program nor the current directory lies in "
         "one: name text with --data");
}

static bool is_corpus_file(const char *name, bool is_directory) {
  static const char *const endings[] = {".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md"};
  if (is_directory) return strcmp(name, "runs") != 0;
  if (strcmp(name, "Makefile") == 0 || strcmp(name, "LICENSE") == 0) return true;
  for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
    if (text_ends_in(name, endings[i])) return true;
  return false;
}

Source *source_open_tree(int64_t vocab_size) {
  char root[PATH_MAX];
  find_root(root);
  FileList files = {0};
  add_directory(&files, root, is_corpus_file);
  Source *source = new_source(text_format("the source tree %s", root), vocab_size);
  add_files(source, &files, source->name);
  free_list(&files);
  return join(source);
}

double source_entropy(const Source *source) {
  enum { BLOCK = 4096 };
  int64_t vocab_size = source->vocab_size;
  int64_t total = min_i64(source->tokens, SOURCE_ENTROPY_SAMPLE);
  int64_t *counts = host_alloc(vocab_size, sizeof *counts, "the counts of tokens");
  for (int64_t first = 0; first < total; first += BLOCK) {
    int32_t ids[BLOCK];
    int64_t count = min_i64(total - first, BLOCK);
    source_read(source, first, count, ids);
    for (int64_t i = 0; i < count; i++) counts[ids[i]]++;
  }
  double entropy = 0;
  for (int64_t id = 0; id < vocab_size; id++) {
    double p = (double)counts[id] / (double)total;
    if (p > 0) entropy -= p * log(p);
  }
  free(counts);
  return entropy;
}
