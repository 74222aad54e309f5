// A folder that appears whole or not at all, and whose damage is noticed.
//
// Its files are written into a hidden folder beside it, each synced, and listed with length and CRC-32 in
// checksums.json, written last. Then the hidden folder is synced and renamed. Whoever is killed, or meets a
// full disk, leaves a hidden folder behind that nobody reads and the next writer removes.
#ifndef LCE_MODEL_CHECKPOINT_FOLDER_H
#define LCE_MODEL_CHECKPOINT_FOLDER_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/reason.h"

#define CHECKSUMS "checksums.json"

// A folder in the making. The first thing that goes wrong leaves its reason and ok false; the calls after it
// do nothing, so only folder_finish needs to be looked at.
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
// Puts the folder in its place (one of that name that is there goes away) and frees the writer. False with a
// reason, and nothing left behind, when anything went wrong.
bool folder_finish(Folder *folder, Reason *reason);

// Removes what a killed writer left in `parent`.
void folder_clean(const char *parent);
// Takes parent/name away at once for every reader, then removes it.
void folder_discard(const char *parent, const char *name);

typedef enum {
  CHECK_LENGTHS, // every file is there and has its length
  CHECK_ALL      // and its checksum
} FolderCheck;

// Whether a folder is what folder_finish made of it, as far as `check` goes. Files whose name `skip` wants are
// not looked at (NULL: none).
bool folder_intact(const char *path, FolderCheck check, bool (*skip)(const char *name), Reason *reason);

#endif
