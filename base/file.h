// Files as memory: read whole, or mapped and read ahead; and which files may be written.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

char *path_join(const char *folder, const char *name); // "folder/name"; the caller frees it
bool path_exists(const char *path);
bool path_is_folder(const char *path);
// Makes the folder and those above it; fails naming the option that needs it.
void path_make_folders(const char *option, const char *path);

// Opens a regular file for reading; -1 where there is none. Fails naming it when it is anything else (a pipe or a device
// might never end) or cannot be opened. `output`: as what this process may also write it; NULL: not at all.
int file_open(const char *path, const char *output, size_t *size);

// Fails unless an output `what` ("the log") may be written at `path`: nothing is there, or a pipe or character device,
// or an empty file, or one that begins with `mark`, as earlier outputs of this kind do; and this process neither reads
// it, nor writes another output there.
void file_require_output(const char *what, const char *path, const char *mark);
// Opens it, too. Fails when it cannot.
FILE *file_create(const char *what, const char *path, const char *mark, bool append);

// The whole file with a 0 behind it, which *length does not count; NULL when there is none. The caller frees
// it. Fails naming the file when it cannot be read or is larger than 256 MiB.
char *file_read(const char *path, size_t *length);

// A file in memory: its pages are the system's cache, so a large one takes nothing away from the program. Or a copy.
// Should a mapped file be shortened while in use, the program fails naming it.
typedef struct {
  const char *bytes; // NULL when there is no such file
  size_t size;
  bool copied;
} Mapping;

// Fails naming the file when it exists and cannot be mapped.
Mapping file_map(const char *path);
// The same, but a file of up to `limit` bytes is copied: it may then change while it is in use.
Mapping file_map_or_copy(const char *path, size_t limit);
void file_unmap(Mapping *mapping);
// Hints for a part of a mapped file: it is read soon (the disk reads ahead), or not again (pages may go).
void file_will_need(const Mapping *mapping, size_t first, size_t count);
void file_done_with(const Mapping *mapping, size_t first, size_t count);

// Reads a mapped file ahead of the thread that uses it: a few threads request the next pages, since a request
// is a system call that blocks while the disk's queue is full.
typedef struct ReadAhead ReadAhead;

// The file, which may be missing, stays mapped until read_ahead_destroy. Requests nothing before read_ahead_reached.
ReadAhead *read_ahead_create(Mapping file);
// The reader (one thread) is at byte `offset` and continues from there: requests the next 256 MiB, each page once
// and none that was skipped. Does not wait. Only a hint: where no thread can be started, pages load when touched.
void read_ahead_reached(ReadAhead *ahead, size_t offset);
// Waits for the calls in progress and ends the threads; the file may then be unmapped. NULL is fine.
void read_ahead_destroy(ReadAhead *ahead);
