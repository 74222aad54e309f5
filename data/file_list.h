// From the paths a user names to a sorted list of files.
#ifndef LCE_DATA_FILE_LIST_H
#define LCE_DATA_FILE_LIST_H

#include <stdbool.h>
#include <stdint.h>

// How a file came into the list decides how strictly it is read (source.h).
typedef enum {
  FILE_NAMED,   // the user wrote this very path
  FILE_MATCHED, // a glob matched it
  FILE_FOUND    // it lay in a directory
} FileOrigin;

typedef struct {
  char *path;
  FileOrigin origin;
} FileEntry;

// Starts as {0}. Owns its paths; file_list_free gives them back and leaves {0}.
typedef struct {
  FileEntry *entries;
  int64_t count, capacity;
} FileList;

// Whether a directory's entry is wanted. `name` is the last part of its path.
typedef bool (*FileFilter)(const char *name, bool is_directory);

// Adds what `path` names: a regular file; a directory, as below; or, when nothing has that very name and it
// holds one of * ? [, every file and directory that glob(7) matches. Within one path the files are in byte
// order of their paths. Fails when the path is missing, unreadable or neither file nor directory, or when no
// file matches.
void file_list_add(FileList *list, const char *path);

// Adds the regular files under `directory`, all levels down, that `accept` (or absent: NULL) wants. Skipped
// are hidden names (".git" among them), directories named "build", and whatever is no regular file. Symbolic
// links to files are followed, links to directories are not, so there are no loops. Fails on an unreadable
// directory; adding nothing is no failure.
void file_list_add_directory(FileList *list, const char *directory, FileFilter accept);

void file_list_free(FileList *list);

#endif
