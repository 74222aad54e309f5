// A folder that appears whole or not at all, and whose damage is noticed.
//
// Its files are written into a hidden folder in the same parent, each synced, and listed with length and CRC-32 in
// checksums.json. Then the hidden folder is synced and renamed. A hidden folder that a killed writer leaves behind is
// never read, and the next writer removes it.
//
// Only a folder whose every file is listed is ever removed: links are not followed, and a folder with anything else in
// it is left as it is, with a warning.
#pragma once

#include <stdint.h>

#include "base/json.h"

#define CHECKSUMS "checksums.json"

// CRC-32 (zlib's) of the bytes that `so_far` (0: none) is the checksum of, followed by these; with all threads.
uint32_t checksum(uint32_t so_far, const void *bytes, size_t count);

bool is_plain_name(const char *name); // of a file in a folder: no path, not "." or ".."
bool folder_sync(const char *path);   // what was made and renamed in it is on the disk; errno says why not
void folder_remove(const char *path); // with the files that its list names; warns where it is not wholly ours

// The `count` entries that `accept` takes, in byte order; NULL: unreadable. folder_list_free frees names and list.
char **folder_list(const char *path, bool (*accept)(const char *name), int *count);
void folder_list_free(char **names, int count);

// A folder in the making. After the first error, which folder_finish returns, calls do nothing.
typedef struct {
  bool ok;
  Reason reason;
  char *parent, *name, *hidden; // parent/name is where it will be, hidden where it is made
  cJSON *checksums;
  // the file being written
  int descriptor;
  char *file; // its path; NULL between files
  uint64_t bytes;
  uint32_t crc;
} Folder;

// `parent` must exist; `name` is plain.
Folder folder_begin(const char *parent, const char *name);
void folder_file(Folder *folder, const char *name); // the next file; ends the one before
void folder_write(Folder *folder, const void *bytes, size_t count);
void folder_add(Folder *folder, const char *name, const void *bytes, size_t count); // both: a small file
// Puts the folder in its place (replacing an old one) and frees the writer. False with a reason: nothing is left.
bool folder_finish(Folder *folder, Reason *reason);

// Removes what a killed writer left in `parent`.
void folder_clean(const char *parent);
// Takes parent/name away at once for every reader and removes it, if it is ours.
void folder_discard(const char *parent, const char *name);

typedef enum {
  CHECK_LENGTHS, // every file is there and has its length
  CHECK_ALL      // and its checksum
} FolderCheck;

// Whether a folder is what folder_finish made of it, as far as `check` goes, without files that `skip` (or NULL) takes.
bool folder_intact(const char *path, FolderCheck check, bool (*skip)(const char *name), Reason *reason);
