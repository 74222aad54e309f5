// Files as memory: read whole or mapped; and which files may be written.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>

#include "kernels/base/fail.h"

typedef struct {
  char text[4096]; // PATH_MAX
} Path;

Path path_in(const char *folder, const char *name); // "folder/name", or "" if that is too long
Path path_folder(const char *path);                 // "folder" of "folder/name", "." of "name"
bool path_exists(const char *path);                 // a broken link exists
bool path_is_folder(const char *path);
bool path_is_same(const char *a, const char *b);          // both lead to one file or folder
bool path_make_folders(const char *path, Reason *reason); // the folder and its parents

// Opens an output `what` ("the log"). Fails if another output is written there, or if it is neither absent,
// empty, a pipe, a character device nor an earlier output, which begins with `mark`. BACK_UP renames an
// earlier one to PATH.1, or the next free number, or fails. Standard output may go to the same file.
typedef enum { OVERWRITE, APPEND, BACK_UP } EarlierOutput;
FILE *file_create(const char *what, const char *path, const char *mark, EarlierOutput earlier);

// The whole file and a 0, which *length does not count; NULL: absent. The caller frees it. If it is no
// regular file, unreadable or larger than 256 MiB, it fails, or `reason` (not NULL; "" if absent) says so.
char *file_read(const char *path, size_t *length, Reason *reason);

// A file in memory, mapped or copied. The program fails, naming it, when a mapped file is shortened.
typedef struct {
  const char *bytes; // NULL: absent
  size_t size;
  bool copied;
} Mapping;

// Copies a file of up to `limit` bytes. Errors as file_read's.
Mapping file_map_or_copy(const char *path, size_t limit, Reason *reason);
void file_unmap(Mapping *mapping);
// CRC-32, as zlib's crc32, by all threads. `crc`: of the bytes before, 0 for none.
uint32_t checksum(uint32_t crc, const void *bytes, size_t count);
// madvise for a part of a mapped file: MADV_WILLNEED reads ahead, MADV_DONTNEED gives pages back.
void file_advise(const Mapping *mapping, size_t first, size_t count, int advice);
