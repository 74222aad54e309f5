#include "data/source.h"

#include <assert.h>
#include <errno.h>
#include <fnmatch.h>
#include <fts.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "data/json.h"
#include "data/tokenizer.h"
#include "kernels/base/alloc.h"
#include "kernels/base/integers.h"
#include "kernels/base/text.h"

enum {
  BINARY_PROBE_BYTES = 8 << 10,
  COPY_LIMIT_BYTES = 128 << 10,
  BLOCK = 4096,           // tokens that are widened at a time
  CHECK_STRETCH = 8 << 20 // tokens after which the pages read are given back
};

// One file's share of the stream: `stored` tokens from position `first`, then perhaps a separator.
typedef struct SourceFile {
  char *path, *mask_path;                               // NULL: no mask
  enum { FILE_NAMED, FILE_MATCHED, FILE_FOUND } origin; // written out, by a glob, in a directory
  SourceKind kind;                                      // 0: its origin lets it be left out
  Mapping file, mask_file;
  const void *tokens;  // in the file
  const uint8_t *mask; // in the mask file, or NULL: every token counts
  int64_t stored, first;
} SourceFile;

// --- manifests ---------------------------------------------------------------------------------------------

static bool has_file(const char *folder, const char *train, const char *validation) {
  return path_exists(path_in(folder, train).text) || path_exists(path_in(folder, validation).text);
}

// The manifest.json of a folder that tools/prepare_data.py made; NULL: none. Fails if the folder has such
// shards and the manifest cannot be read.
static cJSON *manifest_of(const char *folder) {
  Path path = path_in(folder, "manifest.json");
  Reason reason;
  cJSON *manifest = json_read(path.text, &reason);
  if (json_is(manifest, "format", "lce.c shards")) return manifest;
  if (manifest && has_file(folder, "train_000000.ends", "val_000000.ends"))
    refuse(&reason, "%s is not that of the shards beside it", path.text);
  if (*reason.text && has_file(folder, "train_000000.bin", "val_000000.bin"))
    fail("%s; copy it again, or make the shards again with tools/prepare_data.py", reason.text);
  cJSON_Delete(manifest);
  return NULL;
}

static const cJSON *listed_split(const cJSON *manifest, const char *split) {
  return json_member(json_member(json_member(manifest, "splits"), split), "shards");
}

bool manifest_is_in(const char *folder) {
  cJSON *manifest = manifest_of(folder);
  bool ours = manifest != NULL;
  cJSON_Delete(manifest);
  return ours;
}

bool manifest_has_validation(const char *folder) {
  cJSON *manifest = manifest_of(folder);
  bool has = listed_split(manifest, "val") != NULL;
  cJSON_Delete(manifest);
  return has;
}

// True if a directory has shards of another split than the one to read. All shards to read must exist.
static bool has_other_split(const char *folder, SourceSplit split) {
  cJSON *manifest = manifest_of(folder);
  if (!manifest && has_file(folder, "train_000000.ends", "val_000000.ends"))
    fail("%s/manifest.json does not exist, which says what the shards there are for; copy it, too, or name "
         "them: '%s/%s_*.bin'",
         folder, folder, split == SPLIT_TRAIN ? "train" : "val");
  const cJSON *val = listed_split(manifest, "val"), *read = val, *shard;
  bool other = manifest && (split == SPLIT_TRAIN || val);
  if (split == SPLIT_TRAIN || !val) read = listed_split(manifest, "train");
  cJSON_ArrayForEach(shard, read) {
    const char *name = json_text(shard, "file");
    Path path = path_in(folder, name ? name : "");
    if (!path_exists(path.text))
      fail("%s does not exist, and %s/manifest.json lists it; copy it, too, or make the shards again with "
           "tools/prepare_data.py",
           path.text, folder);
  }
  cJSON_Delete(manifest);
  return other;
}

// --- the files that paths name -----------------------------------------------------------------------------

// True if a name in a directory is left out; `tree`: names outside the corpus, too.
static bool is_left_out(const char *name, bool is_directory, bool tree) {
  static const char corpus[] = "@(*.@(c|h|cu|cuh|py|sh|md)|Makefile|LICENSE)";
  if (name[0] == '.') return true;
  if (is_directory)
    return !strcmp(name, "build") || (tree && (!strcmp(name, "runs") || !strcmp(name, "exercises")));
  return tree && fnmatch(corpus, name, FNM_EXTMATCH);
}

static void append(Source *source, const char *path, int origin) {
  SourceFile part = {.path = text_format("%s", path), .origin = origin};
  arrput(source->parts, part);
  source->files++;
}

// strcmp, not the locale's order: the stream of tokens must not depend on LANG.
static int compare_paths(const void *a, const void *b) {
  return strcmp(((const SourceFile *)a)->path, ((const SourceFile *)b)->path);
}

// Adds the regular files under `directory`, links to files included; `tree`: the corpus alone. fts_number: 1
// if a directory has files of another split.
static void add_directory(Source *source, const char *directory, bool tree) {
  char *roots[] = {(char *)directory, NULL};
  FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, NULL);
  if (!walk) fail("cannot read the directory %s: %s", directory, strerror(errno));
  FTSENT *entry;
  struct stat status;
  bool training = source->split == SPLIT_TRAIN;
  while (errno = 0, (entry = fts_read(walk))) {
    int info = entry->fts_info;
    if (info == FTS_DNR || info == FTS_ERR || info == FTS_NS)
      fail("cannot read %s: %s", entry->fts_path, strerror(entry->fts_errno));
    bool skip = entry->fts_level <= 0 || is_left_out(entry->fts_name, info == FTS_D, tree);
    if (info == FTS_D && skip && entry->fts_level > 0) fts_set(walk, entry, FTS_SKIP);
    if (info == FTS_D && source->split) entry->fts_number = has_other_split(entry->fts_path, source->split);
    if (entry->fts_level > 0 && entry->fts_parent->fts_number)
      skip |= !fnmatch(training ? "val_*.bin" : "train_*.bin", entry->fts_name, 0);
    if (!skip && !stat(entry->fts_path, &status) && S_ISREG(status.st_mode))
      append(source, entry->fts_path, FILE_FOUND);
  }
  if (errno) fail("cannot read the directory %s: %s", directory, strerror(errno));
  fts_close(walk);
}

// Adds the files that `path` names: one, a directory's or, if nothing has that name, a glob(7)'s.
static void add_path(Source *source, const char *path) {
  bool named = path_exists(path) || !strpbrk(path, "*?[");
  glob_t found = {.gl_pathc = 1, .gl_pathv = (char *[]){(char *)path}};
  int result = named ? 0 : glob(path, GLOB_ERR | GLOB_NOSORT, NULL, &found);
  if (result == GLOB_NOMATCH) fail("no file matches %s", path);
  if (result != 0) fail("cannot read the directories that %s names: %s", path, strerror(errno));
  for (size_t i = 0; i < found.gl_pathc; i++) {
    struct stat status;
    const char *one = found.gl_pathv[i];
    if (stat(one, &status) != 0) fail("cannot read %s: %s", one, strerror(errno));
    if (S_ISDIR(status.st_mode))
      add_directory(source, one, false);
    else if (S_ISREG(status.st_mode))
      append(source, one, named ? FILE_NAMED : FILE_MATCHED);
    else
      fail("%s is neither a file nor a directory: name a file, a directory or a glob", one);
  }
  if (!named) globfree(&found);
}

static void close_file(SourceFile *part) {
  free(part->path);
  free(part->mask_path);
  file_unmap(&part->file);
  file_unmap(&part->mask_file);
}

// --- shards in memory --------------------------------------------------------------------------------------

enum { HEADER_BYTES = 4 * 256, FORMATS = 4 };

static const struct {
  ShardPart part;
  int32_t magic, version, bits; // per token
} formats[FORMATS] = {{SHARD_TOKENS, 20240520, 1, 16},
                      {SHARD_TOKENS, 20240801, 7, 32},
                      {SHARD_MASK, 20261120, 1, 1},
                      {SHARD_ENDS, 20261121, 1, 1}};

static int32_t header_value(const void *bytes, int index) {
  int32_t value;
  memcpy(&value, (const char *)bytes + 4 * index, sizeof value);
  return value;
}

// The row of `formats`; FORMATS if the bytes do not begin with a magic of the part's.
static int find_format(const void *bytes, size_t size, ShardPart part) {
  int row = 0;
  while (row < FORMATS &&
         (formats[row].part != part || size < 4 || header_value(bytes, 0) != formats[row].magic))
    row++;
  return row;
}

bool shard_parse(const void *bytes, size_t size, ShardPart part, Shard *shard, Reason *reason) {
  static const char *const what[] = {[SHARD_TOKENS] =
                                         "llm.c token shard (20240520, uint16, or 20240801, uint32)",
                                     [SHARD_MASK] = "mask of a token shard (20261120)",
                                     [SHARD_ENDS] = "list of documents' ends of a token shard (20261121)"};
  int row = find_format(bytes, size, part);
  if (size >= 4 && row == FORMATS)
    return refuse(reason, "is no %s: the magic at byte 0 is %d", what[part], header_value(bytes, 0));
  if (size < HEADER_BYTES)
    return refuse(reason, "is truncated: it begins with a header of %d bytes and ends at byte %zu",
                  HEADER_BYTES, size);
  int32_t version = header_value(bytes, 1);
  if (version != formats[row].version)
    return refuse(
        reason,
        "has version %d at byte 4 where magic %d goes with version %d: make it again in the current format",
        version, formats[row].magic, formats[row].version);
  int64_t count = header_value(bytes, 2), end = HEADER_BYTES + ceil_div(count * formats[row].bits, 8);
  if (count <= 0)
    return refuse(reason, "holds no tokens: the count at byte 8 of its header is %lld", (long long)count);
  if (end != (int64_t)size)
    return refuse(reason,
                  "%s: the header at byte 8 promises %lld tokens, which end at byte %lld, and the file ends "
                  "at byte %zu",
                  end > (int64_t)size ? "is truncated" : "disagrees with its header", (long long)count,
                  (long long)end, size);
  *shard = (Shard){formats[row].bits, (const char *)bytes + HEADER_BYTES, count};
  return true;
}

static Mapping load_file(const char *path) {
  Mapping file = file_map_or_copy(path, COPY_LIMIT_BYTES, NULL);
  if (!file.bytes) fail("cannot open %s: %s", path, strerror(ENOENT));
  return file;
}

// "shards/a.mask" for "shards/a.bin", or NULL; the caller frees it.
static char *find_beside(const char *shard, ShardPart part) {
  const char *ending = part == SHARD_MASK ? ".mask" : ".ends";
  char *path = text_format("%.*s%s", (int)(strlen(shard) - strlen(".bin")), shard, ending);
  struct stat status;
  if (!lstat(path, &status)) return path; // a link that leads nowhere is not "no mask": opening it fails
  if (errno != ENOENT) fail("cannot read %s: %s", path, strerror(errno));
  free(path);
  return NULL;
}

// Loads the bits of a shard from `path`, if given, and checks that they fit.
static const uint8_t *open_bits(const SourceFile *part, ShardPart which, const char *path, Mapping *file) {
  if (!path) return NULL;
  *file = load_file(path);
  Reason reason;
  Shard bits = {0};
  bool good = shard_parse(file->bytes, file->size, which, &bits, &reason);
  if (good && bits.count != part->stored)
    good = refuse(&reason, "is not that of its shard: it is for %lld tokens and the shard has %lld",
                  (long long)bits.count, (long long)part->stored);
  if (!good)
    fail("%s %s; make it and its shard again with tools/prepare_data.py, or remove it%s", path, reason.text,
         which == SHARD_MASK ? " to count every token" : " and give --end-of-text ID");
  return bits.data;
}

// Fails unless a shard is as its folder's manifest lists it. Files with other names may stand beside it.
static void check_listed(const cJSON *manifest, const SourceFile *part) {
  const char *name = strrchr(part->path, '/') ? strrchr(part->path, '/') + 1 : part->path;
  const cJSON *shard, *listed = NULL,
                      *splits[] = {listed_split(manifest, "train"), listed_split(manifest, "val")};
  for (int i = 0; i < 2; i++) cJSON_ArrayForEach(shard, splits[i]) {
      if (json_is(shard, "file", name)) listed = shard;
    }
  const cJSON *tokens = json_member(listed, "tokens");
  static const char remedy[] = "copy the whole folder again, or make it again with tools/prepare_data.py";
  if (!listed && !fnmatch("@(train|val)_*.bin", name, FNM_EXTMATCH))
    fail("%s is not in the manifest.json beside it; %s", part->path, remedy);
  if (listed && !(cJSON_IsNumber(tokens) && tokens->valuedouble == (double)part->stored))
    fail("%s has %lld tokens, which the manifest.json beside it does not say; %s", part->path,
         (long long)part->stored, remedy);
  if (listed && !cJSON_IsFalse(json_member(manifest, "masked")) && !part->mask)
    fail("%s has no mask, and the manifest.json beside it does not say \"masked\": false; %s", part->path,
         remedy);
}

static void check_manifests(const SourceFile *parts, int64_t count) {
  Path folder, last = {""};
  cJSON *manifest = NULL;
  for (int64_t i = 0; i < count; i++, last = folder) {
    folder = path_folder(parts[i].path);
    if (strcmp(folder.text, last.text)) {
      cJSON_Delete(manifest);
      manifest = manifest_of(folder.text);
    }
    if (manifest && parts[i].kind != SOURCE_TEXT) check_listed(manifest, &parts[i]);
  }
  cJSON_Delete(manifest);
}

static const char *const kind_names[] = {[SOURCE_TEXT] = "byte-level text",
                                         [SOURCE_SHARDS_UINT16] = "llm.c shards, uint16",
                                         [SOURCE_SHARDS_UINT32] = "llm.c shards, uint32"};

static void open_file(SourceFile *part) {
  part->file = load_file(part->path);
  const Mapping *file = &part->file;
  bool magic = find_format(file->bytes, file->size, SHARD_TOKENS) < FORMATS;
  if (text_ends_in(part->path, ".bin") && (part->origin != FILE_FOUND || magic)) {
    Shard shard;
    Reason reason;
    if (!shard_parse(file->bytes, file->size, SHARD_TOKENS, &shard, &reason))
      fail("%s %s", part->path, reason.text);
    part->kind = shard.bits / 8;
    part->tokens = shard.data;
    part->stored = shard.count;
    part->mask_path = find_beside(part->path, SHARD_MASK);
    part->mask = open_bits(part, SHARD_MASK, part->mask_path, &part->mask_file);
    return;
  }
  const char *nul = memchr(file->bytes, 0, (size_t)min_i64((int64_t)file->size, BINARY_PROBE_BYTES));
  if (part->origin == FILE_NAMED && file->size == 0)
    fail("%s is empty: name a file with at least one byte of text", part->path);
  if (part->origin == FILE_NAMED && nul)
    fail("%s is not text (NUL at byte %lld): name text files, or llm.c token shards ending in .bin",
         part->path, (long long)(nul - file->bytes));
  part->tokens = file->bytes;
  part->stored = (int64_t)file->size;
  part->kind = nul || !file->size ? 0 : SOURCE_TEXT;
}

// --- token ids ---------------------------------------------------------------------------------------------

// out[i] = the part's token first + i. Returns the largest; in `out` one above INT32_MAX is negative.
static uint32_t widen(const SourceFile *part, int64_t first, int64_t count, int32_t *out) {
  const void *from = (const char *)part->tokens + first * part->kind;
  uint32_t largest = 0;
  if (part->kind == SOURCE_TEXT)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint8_t *)from)[i];
  else if (part->kind == SOURCE_SHARDS_UINT16)
    for (int64_t i = 0; i < count; i++) out[i] = ((const uint16_t *)from)[i];
  else
    memcpy(out, from, (size_t)count * sizeof *out);
  for (int64_t i = 0; i < count; i++) largest = (uint32_t)out[i] > largest ? (uint32_t)out[i] : largest;
  return largest;
}

// Names the first id from `first` on that is outside the vocabulary. `passed`: check_ids has seen another.
static void fail_outside(const Source *source, const SourceFile *part, int64_t first, bool passed) {
  int32_t id;
  while (widen(part, first, 1, &id) < source->vocab_size && first + 1 < part->stored) first++;
  char at[64];
  snprintf(at, sizeof at, "token %lld (byte %lld)", (long long)first,
           (long long)((const char *)part->tokens - part->file.bytes + first * part->kind));
  if (passed)
    fail("%s has changed since it was opened: %s has id %u now and the vocabulary has %lld; put back what "
         "was there and start again",
         part->path, at, (uint32_t)id, (long long)source->vocab_size);
  uint32_t largest = (uint32_t)id;
  for (int64_t i = first; i < part->stored; i++) {
    uint32_t other = widen(part, i, 1, &(int32_t){0});
    if (other > largest) largest = other;
  }
  fail("%s: %s has id %u and the vocabulary has %lld: %s, or train a new model with --vocab %lld or more",
       part->path, at, (uint32_t)id, (long long)source->vocab_size,
       part->kind == SOURCE_TEXT ? "name other text" : "make the shards with the model's tokenizer",
       (long long)largest + 1);
}

static void check_ids(const Source *source, const SourceFile *part) {
  if (source->vocab_size >= (int64_t)1 << (8 * part->kind)) return;
  for (int64_t first = 0; first < part->stored; first += CHECK_STRETCH) {
    int64_t end = min_i64(part->stored, first + CHECK_STRETCH);
    uint32_t largest = 0;
#pragma omp parallel for reduction(max : largest)
    for (int64_t start = first; start < end; start += BLOCK) {
      int32_t ids[BLOCK];
      uint32_t found = widen(part, start, min_i64(end - start, BLOCK), ids);
      if (found > largest) largest = found;
    }
    if (largest >= source->vocab_size) fail_outside(source, part, first, false);
    // A scan of all the data must not show as memory that training needed.
    file_advise(&part->file, 0, part->file.size, MADV_DONTNEED);
  }
}

// --- the source --------------------------------------------------------------------------------------------

// Opens the parts from `before` on, which `name` names, and drops those that are left out.
static void open_parts(Source *source, int64_t before, const char *name) {
  static const char beside_shards[] = // by tools/prepare_data.py
      "*@(.mask|.ends|/manifest.json|/tokenizer.json|/tokenizer_config.json|/generation_config.json|"
      "/chat_template.jinja)";
  int64_t end = source->files;
  SourceFile *parts = source->parts;
  bool shards_found = false;
  if (end > before) qsort(parts + before, (size_t)(end - before), sizeof *parts, compare_paths);
  for (int64_t i = before; i < end; i++) {
    open_file(&parts[i]);
    shards_found |= parts[i].origin == FILE_FOUND && parts[i].kind > SOURCE_TEXT;
  }
  source->files = before;
  for (int64_t i = before; i < end; i++) {
    SourceFile part = parts[i];
    if (!part.kind || (shards_found && part.origin == FILE_FOUND && part.kind == SOURCE_TEXT)) {
      if (fnmatch(beside_shards, part.path, FNM_EXTMATCH) && !source->left++)
        source->first_left = text_format("%s", part.path);
      close_file(&part);
      continue;
    }
    if (source->files > 0 && source->kind != part.kind)
      fail("%s (%s) and %s (%s) cannot be mixed: name files of one kind", parts[0].path,
           kind_names[source->kind], part.path, kind_names[part.kind]);
    source->kind = part.kind;
    source->masked |= part.mask != NULL;
    parts[source->files++] = part;
  }
  arrsetlen(source->parts, source->files);
  if (source->files == before) fail("%s holds no text and no token shards", name);
  check_manifests(parts + before, source->files - before);
  for (int64_t i = before; i < source->files; i++) check_ids(source, &parts[i]);
}

static bool has_separators(const Source *source) {
  return source->kind == SOURCE_TEXT && source->vocab_size > END_OF_TEXT;
}

// The root of the checkout: looked for upward from the program, then in the current directory.
static void find_root(char root[PATH_MAX]) {
  static const char marker[] = "data/source.h";
  ssize_t length = readlink("/proc/self/exe", root, PATH_MAX - 1);
  root[length > 0 ? length : 0] = 0;
  for (char *slash; (slash = strrchr(root, '/'));) {
    *slash = 0;
    if (path_exists(path_in(root, marker).text)) return;
  }
  if (!getcwd(root, PATH_MAX) || !path_exists(marker))
    fail("the built-in corpus is the source tree, and neither the program nor the current directory lies in "
         "one: name text with --data");
}

Source *source_open(const char *const *paths, int64_t count, int64_t vocab_size, SourceSplit split) {
  Source *source = host_alloc(1, sizeof *source, "a data source");
  source->vocab_size = vocab_size;
  source->split = split;
  if (count == 0) {
    char root[PATH_MAX];
    find_root(root);
    source->name = text_format("the source tree %s", root);
    add_directory(source, root, true);
    open_parts(source, 0, source->name);
  } else {
    source->name = text_format(count > 1 ? "%s and %lld more" : "%s", paths[0], (long long)count - 1);
  }
  for (int64_t i = 0; i < count; i++) {
    int64_t before = source->files;
    add_path(source, paths[i]);
    open_parts(source, before, paths[i]);
  }
  for (int64_t i = 0; i < source->files; i++) {
    if (i > 0) source->tokens += has_separators(source);
    source->parts[i].first = source->tokens;
    source->tokens += source->parts[i].stored;
  }
  return source;
}

void source_close(Source *source) {
  if (!source) return;
  for (int64_t i = 0; i < source->files; i++) close_file(&source->parts[i]);
  arrfree(source->parts);
  arrfree(source->packing.pieces);
  free(source->packing.starts);
  free(source->first_left);
  free(source->name);
  free(source);
}

const char *source_path(const Source *source, int64_t file) {
  return source->parts[file].path;
}

const char *source_shared_file(const Source *a, const Source *b) {
  struct stat *all = host_alloc(a->files, sizeof *all, "the files of a data source"), own;
  const char *shared = NULL;
  for (int64_t i = 0; i < a->files; i++) stat(a->parts[i].path, &all[i]);
  for (int64_t k = 0; k < b->files && !shared; k++) {
    bool there = !stat(b->parts[k].path, &own);
    for (int64_t i = 0; i < a->files && there; i++)
      if (own.st_ino == all[i].st_ino && own.st_dev == all[i].st_dev) shared = b->parts[k].path;
  }
  free(all);
  return shared;
}

const char *source_kind_name(const Source *source) {
  return kind_names[source->kind];
}

void source_describe_left(const Source *source, char *out, size_t size) {
  bool one = source->left == 1, text = source->kind == SOURCE_TEXT;
  char *said = text_format("%s file%s left out, such as %s: %s%s%s", text_grouped(source->left).text,
                           one ? " is" : "s are", source->first_left ? source->first_left : "",
                           text ? "empty or binary" : "a directory with token shards (",
                           text ? "" : source->parts[0].path, text ? "" : ") is read for them alone");
  text_escape(out, size, said, source->left ? strlen(said) : 0); // found names may hold anything
  free(said);
}

// The last part that begins at or before `position`.
static const SourceFile *file_at(const Source *source, int64_t position) {
  int64_t low = 0, high = source->files;
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    if (source->parts[middle].first <= position)
      low = middle;
    else
      high = middle;
  }
  return &source->parts[low];
}

static bool is_set(const uint8_t *bits, int64_t index) {
  return bits[index / 8] >> (index % 8) & 1;
}

// Fails if a mapped file was cut: what its last page has behind the cut reads as zeros, without a signal.
static void require_size(const char *path, const Mapping *file) {
  struct stat status;
  if (!file->copied && path && !stat(path, &status) && (size_t)status.st_size < file->size)
    fail("%s was shortened while it was read; restore it and start again", path);
}

// As source_read_targets or, if they are no targets, without masks.
static int64_t read_tokens(const Source *source, int64_t first, int64_t count, int32_t *out, bool targets) {
  assert(first >= 0 && count >= 0 && first <= source->tokens - count);
  int64_t counted = count;
  for (const SourceFile *part = count ? file_at(source, first) : NULL; count > 0; part++) {
    int64_t start = first - part->first;
    int64_t taken = min_i64(part->stored - start, count); // 0 when `first` is the separator itself
    if (widen(part, start, taken, out) >= source->vocab_size) fail_outside(source, part, start, true);
    if (taken && out[taken - 1] == 0) require_size(part->path, &part->file);
    for (int64_t i = 0; targets && part->mask && i < taken; i++)
      if (!is_set(part->mask, start + i)) out[i] = IGNORED_TARGET, counted--;
    if (taken && out[taken - 1] == IGNORED_TARGET) require_size(part->mask_path, &part->mask_file);
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

int64_t *source_document_ends(const Source *source, int64_t end_of_text) {
  int64_t *ends = NULL;
  bool text = source->kind == SOURCE_TEXT;
  for (int64_t i = 0; i < source->files; i++) {
    const SourceFile *part = &source->parts[i];
    int64_t next = i + 1 < source->files ? part[1].first : source->tokens;
    Mapping file = {0};
    char *path = text || end_of_text >= 0 ? NULL : find_beside(part->path, SHARD_ENDS);
    const uint8_t *bits = open_bits(part, SHARD_ENDS, path, &file);
    if (!text && end_of_text < 0 && !bits)
      fail("--pack documents: %s does not say where documents end: give --end-of-text ID, or make it again "
           "with tools/prepare_data.py, which writes that next to it",
           part->path);
    for (int64_t k = 0; k < part->stored && (bits || end_of_text >= 0); k++) {
      int32_t id = -1;
      if (!bits) widen(part, k, 1, &id);
      if (bits ? is_set(bits, k) : id == end_of_text) arrput(ends, part->first + k + 1);
    }
    bool is_end = text || next == source->tokens; // the end of a text, or of the stream
    if (is_end && !(arrlen(ends) && arrlast(ends) == next)) arrput(ends, next);
    file_advise(&part->file, 0, part->file.size, MADV_DONTNEED); // as in check_ids
    file_unmap(&file);
    free(path);
  }
  return ends;
}

Source *source_list(const char *const *paths, int64_t count) {
  Source *listed = host_alloc(1, sizeof *listed, "a data source");
  for (int64_t i = 0; i < count; i++) add_path(listed, paths[i]);
  for (int64_t i = 0; i < listed->files && !listed->masked; i++) {
    const char *path = listed->parts[i].path;
    char *mask = text_ends_in(path, ".bin") ? find_beside(path, SHARD_MASK) : NULL;
    listed->masked = mask;
    free(mask);
  }
  return listed;
}

int64_t source_tokenizer_vocab_size(const Source *listed) {
  int64_t shard = 0;
  while (shard < listed->files && !text_ends_in(listed->parts[shard].path, ".bin")) shard++;
  if (shard == listed->files) return 0;
  Path folder = path_folder(listed->parts[shard].path);
  cJSON *manifest = manifest_of(folder.text);
  const cJSON *said = json_member(json_member(manifest, "tokenizer"), "vocab_size");
  int64_t size = json_is_whole(said) ? (int64_t)said->valuedouble : 0;
  cJSON_Delete(manifest);
  Reason reason;
  Tokenizer *tokenizer = size ? NULL : tokenizer_open(folder.text, &reason);
  if (tokenizer) size = tokenizer_vocab_size(tokenizer);
  tokenizer_close(tokenizer);
  return size;
}

double source_entropy(const Source *source) {
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
