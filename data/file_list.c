#include "data/file_list.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <errno.h>
#include <fts.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static void append(FileList *list, const char *path, FileOrigin origin) {
  list->entries =
      host_grow(list->entries, list->count, &list->capacity, sizeof *list->entries, "a list of data files");
  list->entries[list->count++] = (FileEntry){text_format("%s", path), origin};
}

static int compare_paths(const void *a, const void *b) {
  return strcmp(((const FileEntry *)a)->path, ((const FileEntry *)b)->path);
}

// strcmp, not the locale's order: the stream of tokens must not depend on LANG.
static void sort_from(FileList *list, int64_t first) {
  if (list->count > first)
    qsort(list->entries + first, (size_t)(list->count - first), sizeof *list->entries, compare_paths);
}

void file_list_add_directory(FileList *list, const char *directory, FileFilter accept) {
  int64_t first = list->count;
  char *roots[] = {(char *)directory, NULL};
  FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, NULL);
  if (!walk) fail("cannot read the directory %s: %s", directory, strerror(errno));
  FTSENT *entry;
  while (errno = 0, (entry = fts_read(walk))) {
    bool inside = entry->fts_level > 0;
    bool is_directory = entry->fts_info == FTS_D;
    bool is_file = entry->fts_info == FTS_F;
    struct stat target;
    if (entry->fts_info == FTS_SL) is_file = stat(entry->fts_path, &target) == 0 && S_ISREG(target.st_mode);
    if (entry->fts_info == FTS_DNR || entry->fts_info == FTS_ERR || entry->fts_info == FTS_NS)
      fail("cannot read %s: %s", entry->fts_path, strerror(entry->fts_errno));
    if (!inside || !(is_directory || is_file)) continue;
    bool skip = entry->fts_name[0] == '.' || (is_directory && strcmp(entry->fts_name, "build") == 0) ||
                (accept && !accept(entry->fts_name, is_directory));
    if (is_directory && skip) fts_set(walk, entry, FTS_SKIP);
    if (is_file && !skip) append(list, entry->fts_path, FILE_FOUND);
  }
  if (errno) fail("cannot read the directory %s: %s", directory, strerror(errno));
  fts_close(walk);
  sort_from(list, first);
}

static void add_existing(FileList *list, const char *path, FileOrigin origin) {
  struct stat status;
  if (stat(path, &status) != 0) fail("cannot read %s: %s", path, strerror(errno));
  if (S_ISDIR(status.st_mode))
    file_list_add_directory(list, path, NULL);
  else if (S_ISREG(status.st_mode))
    append(list, path, origin);
  else
    fail("%s is neither a file nor a directory: name a file, a directory or a glob", path);
}

void file_list_add(FileList *list, const char *path) {
  struct stat status;
  bool is_glob = strpbrk(path, "*?[") && stat(path, &status) != 0;
  if (!is_glob) {
    add_existing(list, path, FILE_NAMED);
    return;
  }
  int64_t first = list->count;
  glob_t matches;
  int result = glob(path, GLOB_ERR | GLOB_NOSORT, NULL, &matches);
  if (result == GLOB_NOMATCH) fail("no file matches %s", path);
  if (result != 0) fail("cannot read the directories that %s names: %s", path, strerror(errno));
  for (size_t i = 0; i < matches.gl_pathc; i++) add_existing(list, matches.gl_pathv[i], FILE_MATCHED);
  globfree(&matches);
  sort_from(list, first);
}

void file_list_free(FileList *list) {
  for (int64_t i = 0; i < list->count; i++) free(list->entries[i].path);
  free(list->entries);
  *list = (FileList){0};
}
