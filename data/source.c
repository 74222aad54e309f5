#include "data/source.h"

#include <assert.h>
#include <errno.h>
#include <fnmatch.h>
#include <fts.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/integers.h"
#include "kernels/text.h"

enum {
  BINARY_PROBE_BYTES = 8 << 10,
  COPY_LIMIT_BYTES = 128 << 10,
  CHECK_BLOCK = 4096,     // tokens a thread widens at a time
  CHECK_STRETCH = 8 << 20 // tokens after which the pages read are given back
};

// How a file came into the list decides how strictly it is read.
typedef enum {
  FILE_NAMED,   // the user wrote this very path
  FILE_MATCHED, // a glob matched it
  FILE_FOUND    // it lay in a directory
} FileOrigin;

// One file's share of the stream: `stored` tokens from position `first`, then perhaps a separator.
struct SourcePiece {
  char *path;
  FileOrigin origin;
  Mapping file, mask_file;
  const void *tokens;  // in the file
  const uint8_t *mask; // in the mask file, or NULL: every token counts
  int64_t stored, first;
};

typedef struct SourcePiece Piece;

// --- the files that paths name ------------------------------------------------------------------------------

// Whether a name in a directory is left out; `tree`: what is not of the corpus, too.
static bool is_left_out(const char *name, bool is_directory, bool tree) {
  static const char *const corpus[] = {"*.c",  "*.h",  "*.cu",     "*.cuh",  "*.py",
                                       "*.sh", "*.md", "Makefile", "LICENSE"};
  if (name[0] == '.') return true;
  if (is_directory) return !strcmp(name, "build") || (tree && !strcmp(name, "runs"));
  bool found = !tree;
  for (size_t i = 0; i < sizeof corpus / sizeof *corpus; i++) found |= fnmatch(corpus[i], name, 0) == 0;
  return !found;
}

static bool is_bin(const char *path) {
  return text_ends_in(path, ".bin");
}

static void append(Source *source, const char *path, FileOrigin origin) {
  source->pieces = host_grow(source->pieces, source->files, &source->capacity, sizeof *source->pieces,
                             "a list of data files");
  source->pieces[source->files++] = (Piece){.path = text_format("%s", path), .origin = origin};
}

// strcmp, not the locale's order: the stream of tokens must not depend on LANG.
static int compare_paths(const void *a, const void *b) {
  return strcmp(((const Piece *)a)->path, ((const Piece *)b)->path);
}

// Adds the regular files under `directory`, all levels down; `tree`: those of the corpus. Symbolic links to files are
// followed, links to directories are not.
static void add_directory(Source *source, const char *directory, bool tree) {
  char *roots[] = {(char *)directory, NULL};
  FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, NULL);
  if (!walk) fail("cannot read the directory %s: %s", directory, strerror(errno));
  FTSENT *entry;
  while (errno = 0, (entry = fts_read(walk))) {
    int info = entry->fts_info;
    struct stat target;
    bool is_file =
        info == FTS_F || (info == FTS_SL && !stat(entry->fts_path, &target) && S_ISREG(target.st_mode));
    if (info == FTS_DNR || info == FTS_ERR || info == FTS_NS)
      fail("cannot read %s: %s", entry->fts_path, strerror(entry->fts_errno));
    if (entry->fts_level <= 0) continue; // the directory itself
    bool skip = is_left_out(entry->fts_name, info == FTS_D, tree);
    if (info == FTS_D && skip) fts_set(walk, entry, FTS_SKIP);
    if (is_file && !skip) append(source, entry->fts_path, FILE_FOUND);
  }
  if (errno) fail("cannot read the directory %s: %s", directory, strerror(errno));
  fts_close(walk);
}

static void add_existing(Source *source, const char *path, FileOrigin origin) {
  struct stat status;
  if (stat(path, &status) != 0) fail("cannot read %s: %s", path, strerror(errno));
  if (S_ISDIR(status.st_mode))
    add_directory(source, path, false);
  else if (S_ISREG(status.st_mode))
    append(source, path, origin);
  else
    fail("%s is neither a file nor a directory: name a file, a directory or a glob", path);
}

// Adds what `path` names: a file, a directory's files or, when nothing has that very name, what glob(7) matches.
static void add_path(Source *source, const char *path) {
  if (path_exists(path) || !strpbrk(path, "*?[")) {
    add_existing(source, path, FILE_NAMED);
    return;
  }
  glob_t found;
  int result = glob(path, GLOB_ERR | GLOB_NOSORT, NULL, &found);
  if (result == GLOB_NOMATCH) fail("no file matches %s", path);
  if (result != 0) fail("cannot read the directories that %s names: %s", path, strerror(errno));
  for (size_t i = 0; i < found.gl_pathc; i++) add_existing(source, found.gl_pathv[i], FILE_MATCHED);
  globfree(&found);
}

static void close_piece(Piece *piece) {
  free(piece->path);
  file_unmap(&piece->file);
  file_unmap(&piece->mask_file);
}

// --- shards in memory ----------------------------------------------------------------------------------------

enum { HEADER_BYTES = 4 * 256, BITS_VERSION = 1 };

typedef struct {
  int32_t magic, version;
  int token_bytes;
} Format;

static const Format formats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

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

// NULL where the bytes do not begin with a shard's magic.
static const Format *shard_format(const void *bytes, size_t size) {
  for (int i = 0; size >= 4 && i < 2; i++)
    if (header_value(bytes, 0) == formats[i].magic) return &formats[i];
  return NULL;
}

bool shard_parse(const void *bytes, size_t size, Shard *shard, Reason *reason) {
  const Format *format = shard_format(bytes, size);
  if (size < HEADER_BYTES)
    return refuse(
        reason, "is truncated: a token shard begins with a header of %d bytes and this file ends at byte %zu",
        HEADER_BYTES, size);
  if (!format)
    return refuse(reason,
                  "is no llm.c token shard: the magic at byte 0 is %d, not %d (uint16) or %d (uint32)",
                  header_value(bytes, 0), formats[0].magic, formats[1].magic);
  if (header_value(bytes, 1) != format->version)
    return refuse(reason,
                  "has shard version %d at byte 4 where magic %d goes with version %d: make it again with "
                  "the current llm.c format",
                  header_value(bytes, 1), format->magic, format->version);
  int64_t count = header_value(bytes, 2), expected = HEADER_BYTES + count * format->token_bytes;
  if (count <= 0)
    return refuse(reason, "holds no tokens: the count at byte 8 of its header is %lld", (long long)count);
  if (expected != (int64_t)size)
    return refuse(reason,
                  "%s: the header at byte 8 promises %lld tokens, which end at byte %lld, and the file ends "
                  "at byte %zu",
                  expected > (int64_t)size ? "is truncated" : "disagrees with its header", (long long)count,
                  (long long)expected, size);
  *shard = (Shard){format->token_bytes, (const char *)bytes + HEADER_BYTES, count};
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

// "shards/a.mask" for "shards/a.bin"; the caller frees it. NULL where there is no such file.
static char *find_beside(const char *shard, ShardBits kind) {
  const char *ending = kind == SHARD_MASK ? ".mask" : ".ends";
  char *path = text_format("%.*s%s", (int)(strlen(shard) - strlen(".bin")), shard, ending);
  struct stat status;
  if (lstat(path, &status) == 0) return path; // a link that leads nowhere is not "no mask": opening it fails
  free(path);
  return NULL;
}

// Loads the bits of a shard, if there are any, and checks that they fit.
static const uint8_t *open_bits(const Piece *piece, ShardBits kind, Mapping *file) {
  char *path = find_beside(piece->path, kind);
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

// Reads the file into the piece and returns its kind; 0: its origin lets it be left out.
static SourceKind open_piece(Piece *piece) {
  piece->file = load_file(piece->path);
  const Mapping *file = &piece->file;
  if (is_bin(piece->path) && (piece->origin != FILE_FOUND || shard_format(file->bytes, file->size))) {
    Shard shard;
    Reason reason;
    if (!shard_parse(file->bytes, file->size, &shard, &reason)) fail("%s %s", piece->path, reason.text);
    piece->tokens = shard.tokens;
    piece->stored = shard.count;
    piece->mask = open_bits(piece, SHARD_MASK, &piece->mask_file);
    return (SourceKind)shard.token_bytes;
  }
  const char *nul = memchr(file->bytes, 0, (size_t)min_i64((int64_t)file->size, BINARY_PROBE_BYTES));
  if (piece->origin == FILE_NAMED && file->size == 0)
    fail("%s is empty: name a file with at least one byte of text", piece->path);
  if (piece->origin == FILE_NAMED && nul)
    fail("%s is not text (NUL at byte %lld): name text files, or llm.c token shards ending in .bin",
         piece->path, (long long)(nul - file->bytes));
  piece->tokens = file->bytes;
  piece->stored = (int64_t)file->size;
  return nul || !file->size ? 0 : SOURCE_TEXT;
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
  if (source->vocab_size >= (int64_t)1 << (8 * source->kind)) return;
  for (int64_t first = 0; first < piece->stored; first += CHECK_STRETCH) {
    int64_t end = min_i64(piece->stored, first + CHECK_STRETCH), found = end;
#pragma omp parallel for reduction(min : found)
    for (int64_t start = first; start < end; start += CHECK_BLOCK) {
      int32_t ids[CHECK_BLOCK];
      int64_t count = min_i64(end - start, CHECK_BLOCK);
      widen(source->kind, piece, start, count, ids);
      int64_t outside = first_outside(source, ids, count);
      if (outside < count) found = min_i64(found, start + outside);
    }
    if (found < end) fail_outside(source, piece, found);
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

static bool is_found_shard(const Piece *piece) {
  if (piece->origin != FILE_FOUND || !is_bin(piece->path)) return false;
  Mapping file = file_map_or_copy(piece->path, 0, NULL);
  bool has = shard_format(file.bytes, file.size);
  file_unmap(&file);
  return has;
}

// Reads the pieces from `before` on, which `name` names, and drops those that are left out.
static void open_pieces(Source *source, int64_t before, const char *name) {
  int64_t end = source->files;
  Piece *pieces = source->pieces;
  if (end > before) qsort(pieces + before, (size_t)(end - before), sizeof *pieces, compare_paths);
  bool shards_found = false;
  for (int64_t i = before; i < end; i++) shards_found |= is_found_shard(&pieces[i]);
  source->files = before;
  for (int64_t i = before; i < end; i++) {
    Piece piece = pieces[i];
    bool beside_shards = shards_found && piece.origin == FILE_FOUND && !is_found_shard(&piece);
    SourceKind kind = beside_shards ? 0 : open_piece(&piece);
    if (!kind) {
      bool of_a_shard = text_ends_in(piece.path, ".mask") || text_ends_in(piece.path, ".ends");
      if (!of_a_shard && !source->left++) source->first_left = text_format("%s", piece.path);
      close_piece(&piece);
      continue;
    }
    if (source->files > 0 && source->kind != kind)
      fail("%s (%s) and %s (%s) cannot be mixed: name files of one kind", pieces[0].path,
           kind_names[source->kind], piece.path, kind_names[kind]);
    source->kind = kind;
    source->masked |= piece.mask != NULL;
    pieces[source->files++] = piece;
  }
  if (source->files == before) fail("%s holds no text and no token shards", name);
  for (int64_t i = before; i < source->files; i++) check_ids(source, &pieces[i]);
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
    int64_t before = source->files;
    add_path(source, paths[i]);
    open_pieces(source, before, paths[i]);
  }
  return join(source);
}

void source_close(Source *source) {
  if (!source) return;
  for (int64_t i = 0; i < source->files; i++) close_piece(&source->pieces[i]);
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

static bool is_set(const uint8_t *bits, int64_t index) {
  return bits[index / 8] >> (index % 8) & 1;
}

// As source_read_targets, or, where they are no targets, without masks.
static int64_t read_tokens(const Source *source, int64_t first, int64_t count, int32_t *out, bool targets) {
  assert(first >= 0 && count >= 0 && first <= source->tokens - count);
  int64_t counted = count;
  for (const Piece *piece = count ? piece_at(source, first) : NULL; count > 0; piece++) {
    int64_t start = first - piece->first;
    int64_t taken = min_i64(piece->stored - start, count); // 0 when `first` is the separator itself
    widen(source->kind, piece, start, taken, out);
    int64_t outside = first_outside(source, out, taken); // the file may have changed since it was opened
    if (outside < taken) fail_outside(source, piece, start + outside);
    for (int64_t i = 0; targets && piece->mask && i < taken; i++)
      if (!is_set(piece->mask, start + i)) out[i] = IGNORED_TARGET, counted--;
    if (taken < count && has_separators(source)) out[taken++] = END_OF_TEXT;
    first += taken, out += taken, count -= taken;
  }
  return counted;
}

void source_read(const Source *source, int64_t first, int64_t count, int32_t *out) {
  read_tokens(source, first, count, out, false);
}

int64_t source_read_targets(const Source *source, int64_t first, int64_t count, int32_t *out) {
  return read_tokens(source, first, count, out, true);
}

typedef struct {
  int64_t *items, count, capacity;
} Ends;

static void append_end(Ends *ends, int64_t end) {
  if (ends->count && ends->items[ends->count - 1] == end) return;
  ends->items = host_grow(ends->items, ends->count, &ends->capacity, sizeof *ends->items, "documents");
  ends->items[ends->count++] = end;
}

int64_t *source_document_ends(const Source *source, int64_t end_of_text, int64_t *count) {
  Ends ends = {0};
  bool text = source->kind == SOURCE_TEXT;
  for (int64_t i = 0; i < source->files; i++) {
    const Piece *piece = &source->pieces[i];
    Mapping file = {0};
    const uint8_t *bits = text || end_of_text >= 0 ? NULL : open_bits(piece, SHARD_ENDS, &file);
    if (!text && end_of_text < 0 && !bits)
      fail("--pack documents: %s does not say where documents end: give --end-of-text ID, or make it again "
           "with tools/prepare_data.py, which writes that next to it",
           piece->path);
    for (int64_t k = 0; k < piece->stored && (bits || end_of_text >= 0); k++) {
      int32_t id = 0;
      if (!bits) widen(source->kind, piece, k, 1, &id);
      if (bits ? is_set(bits, k) : id == end_of_text) append_end(&ends, piece->first + k + 1);
    }
    bool last = i + 1 == source->files;
    if (text || last) append_end(&ends, last ? source->tokens : source->pieces[i + 1].first);
    file_done_with(&piece->file, 0, piece->file.size); // as in check_ids
    file_unmap(&file);
  }
  *count = ends.count;
  return ends.items;
}

bool source_paths_masked(const char *const *paths, int64_t count) {
  bool masked = false;
  Source *listed = new_source(NULL, 1);
  for (int64_t i = 0; i < count; i++) add_path(listed, paths[i]);
  for (int64_t i = 0; i < listed->files && !masked; i++) {
    const char *path = listed->pieces[i].path;
    char *mask = is_bin(path) ? find_beside(path, SHARD_MASK) : NULL;
    masked = mask;
    free(mask);
  }
  source_close(listed);
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

Source *source_open_tree(int64_t vocab_size) {
  char root[PATH_MAX];
  find_root(root);
  Source *source = new_source(text_format("the source tree %s", root), vocab_size);
  add_directory(source, root, true);
  open_pieces(source, 0, source->name);
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
