// Files as memory: read whole or mapped; and which files may be written.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "kernels/fail.h"

typedef struct {
  char text[4096]; // PATH_MAX
} Path;

Path path_in(const char *folder, const char *name); // "folder/name"; too long: "", which is no file's
bool path_exists(const char *path);                 // something is there, be it a link that leads nowhere
bool path_is_folder(const char *path);
bool path_is_same(const char *a, const char *b);          // both lead to one file or folder
bool path_make_folders(const char *path, Reason *reason); // the folder and those above it

// Opens an output `what` ("the log"). Fails unless it may be written: nothing is there, or a pipe or
// character device, or an empty file, or one that begins with `mark`, as earlier outputs of this kind do; and
// nothing else writes there. KEEP renames what is there to PATH.1, or the next free number. Where standard
// output or error goes to the same file both write on at one place.
typedef enum { REPLACE, APPEND, KEEP } EarlierOutput;
FILE *file_create(const char *what, const char *path, const char *mark, EarlierOutput earlier);

// The whole file with a 0 behind it, which *length does not count; NULL when there is none. The caller frees
// it. Fails naming the file when it is no regular file (a pipe or a device might never end), a link that
// leads nowhere, cannot be read or is larger than 256 MiB; file_try_read has a reason then, and "" otherwise.
char *file_read(const char *path, size_t *length);
char *file_try_read(const char *path, size_t *length, Reason *reason);

// A file in memory: its pages are the system's cache, so a large one takes nothing away from the program. Or
// a copy. Should a mapped file be shortened while in use, the program fails naming it.
typedef struct {
  const char *bytes; // NULL when there is no such file
  size_t size;
  bool copied;
} Mapping;

// A file of up to `limit` bytes is copied: it may then change while it is in use. With `reason` errors are
// as with file_try_read.
Mapping file_map_or_copy(const char *path, size_t limit, Reason *reason);
void file_unmap(Mapping *mapping);
// Hints for a part of a mapped file: it is read soon (the disk reads ahead), or not again (pages may go).
void file_will_need(const Mapping *mapping, size_t first, size_t count);
void file_done_with(const Mapping *mapping, size_t first, size_t count);
