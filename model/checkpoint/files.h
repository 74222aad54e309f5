// Files as checkpoints need them: whole or mapped, with checksums, and folders that come and go.
#ifndef LCE_MODEL_CHECKPOINT_FILES_H
#define LCE_MODEL_CHECKPOINT_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

char *path_join(const char *folder, const char *name); // "folder/name"; the caller frees it
bool path_exists(const char *path);
// Whether `name` is the name of something in a folder and no way out of it.
bool is_plain_name(const char *name);

// The whole file with a 0 behind it, which *length does not count; NULL when there is none. The caller frees
// it. Fails naming the file when it cannot be read or is larger than 256 MiB.
char *file_read(const char *path, size_t *length);

// A file as memory. Its pages are the system's cache, so a large one takes nothing away from the program.
typedef struct {
  const char *bytes; // NULL when there is no such file
  size_t size;
} Mapping;

// Fails naming the file when it exists and cannot be mapped.
Mapping file_map(const char *path);
void file_unmap(Mapping *mapping);
// Says what will be read soon (the disk then works ahead) or not again (its pages may go).
void file_will_need(const Mapping *mapping, size_t first, size_t count);
void file_done_with(const Mapping *mapping, size_t first, size_t count);

// CRC-32 (zlib's) of the bytes that `so_far` (0 at the beginning) is the checksum of, followed by these. All
// threads take part.
uint32_t checksum(uint32_t so_far, const void *bytes, size_t count);

bool folder_sync(const char *path);   // what was made and renamed in it is on the disk; errno says why not
void folder_remove(const char *path); // with the files in it; warns where that fails

// The entries of a folder that `accept` wants, in byte order; *count receives how many. The caller frees each
// and the list. NULL when the folder cannot be read.
char **folder_list(const char *path, bool (*accept)(const char *name), int *count);

#endif
