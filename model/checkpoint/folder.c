#include "model/checkpoint/folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "kernels/ranks/ranks.h"

static const char saving[] = ".saving-", removing[] = ".removing-", fresh_list[] = CHECKSUMS ".new";

// --- folders and checksums -----------------------------------------------------------------------------------

bool is_plain_name(const char *name) {
  return *name && !strchr(name, '/') && strcmp(name, ".") && strcmp(name, "..") && strlen(name) < 256;
}

uint32_t checksum(uint32_t so_far, const void *bytes, size_t count) {
  enum { BLOCK = 1 << 20, AT_ONCE = 64 };
  const unsigned char *at = bytes;
  while (count) {
    size_t part = count < (size_t)BLOCK * AT_ONCE ? count : (size_t)BLOCK * AT_ONCE;
    int blocks = (int)((part + BLOCK - 1) / BLOCK);
    uLong sums[AT_ONCE];
#pragma omp parallel for schedule(static)
    for (int b = 0; b < blocks; b++) {
      size_t first = (size_t)b * BLOCK, length = part - first < BLOCK ? part - first : BLOCK;
      sums[b] = crc32_z(0, at + first, length);
    }
    for (int b = 0; b < blocks; b++) {
      size_t first = (size_t)b * BLOCK, length = part - first < BLOCK ? part - first : BLOCK;
      so_far = (uint32_t)crc32_combine(so_far, sums[b], (z_off_t)length);
    }
    at += part;
    count -= part;
  }
  return so_far;
}

bool folder_sync(const char *path) {
  int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  // Some network file systems cannot sync a folder and say EINVAL; there is nothing more to be done there.
  bool synced = fsync(descriptor) == 0 || errno == EINVAL;
  int error = errno;
  close(descriptor);
  errno = error;
  return synced;
}

static int by_bytes(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

// Closes the descriptor.
static char **list_entries(int descriptor, const char *path, bool (*accept)(const char *name), int *count) {
  *count = 0;
  DIR *folder = descriptor < 0 ? NULL : fdopendir(descriptor);
  if (!folder) return NULL;
  char **names = NULL;
  int64_t capacity = 0;
  for (struct dirent *entry; (entry = readdir(folder));) {
    if (!accept(entry->d_name)) continue;
    names = host_grow(names, *count, &capacity, sizeof *names, path);
    names[(*count)++] = text_format("%s", entry->d_name);
  }
  closedir(folder);
  if (*count) qsort(names, (size_t)*count, sizeof *names, by_bytes);
  return names;
}

char **folder_list(const char *path, bool (*accept)(const char *name), int *count) {
  return list_entries(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), path, accept, count);
}

void folder_list_free(char **names, int count) {
  for (int i = 0; i < count; i++) free(names[i]);
  free(names);
}

// --- removing ----------------------------------------------------------------------------------------------

static bool is_list(const char *name) {
  return !strcmp(name, CHECKSUMS) || !strcmp(name, fresh_list);
}

// Removes a folder and the files in it that `listed` names, its list last; with `dry`, only checks that this is
// possible. False with a reason: it is a link, or holds anything else, and nothing is removed. True where there is none.
static bool remove_listed(const char *path, const cJSON *listed, bool dry, Reason *reason) {
  int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), count;
  if (folder < 0 && errno == ENOENT) return true;
  if (folder < 0) return refuse(reason, "%s is left: it is a link or no folder", path);
  char **names = list_entries(dup(folder), path, is_plain_name, &count);
  bool ok = true;
  for (int i = 0; i < count && ok; i++) {
    struct stat status;
    bool ours = is_list(names[i]) || cJSON_GetObjectItemCaseSensitive(listed, names[i]);
    if (!ours || fstatat(folder, names[i], &status, AT_SYMLINK_NOFOLLOW) || !S_ISREG(status.st_mode))
      ok = refuse(reason, "%s is left: it holds %s, which this program did not write", path, names[i]);
  }
  for (int last = 0; last < 2 && !dry; last++)
    for (int i = 0; i < count && ok; i++)
      if (is_list(names[i]) == last) unlinkat(folder, names[i], 0);
  if (ok && !dry && rmdir(path)) ok = refuse(reason, "cannot remove %s: %s", path, strerror(errno));
  folder_list_free(names, count);
  close(folder);
  return ok;
}

static cJSON *read_list(const char *path, Reason *reason) {
  char *list = path_join(path, CHECKSUMS);
  size_t length;
  char *text = file_read(list, &length);
  cJSON *listed = text ? json_parse(text, length, reason) : NULL;
  if (!text)
    refuse(reason, "%s does not exist", list);
  else if (!listed)
    refuse(reason, "%s is damaged: %s", list, reason->text);
  free(text);
  free(list);
  return listed;
}

// remove_listed by the folder's own list; warns where it cannot.
static bool remove_folder(const char *path, bool dry) {
  Reason reason;
  cJSON *listed = read_list(path, &reason);
  bool ok = remove_listed(path, listed, dry, &reason);
  if (!ok) warn("%s", reason.text);
  cJSON_Delete(listed);
  return ok;
}

void folder_remove(const char *path) {
  remove_folder(path, false);
}

static bool is_left_over(const char *name) {
  return !strncmp(name, saving, sizeof saving - 1) || !strncmp(name, removing, sizeof removing - 1);
}

void folder_clean(const char *parent) {
  int count;
  char **names = folder_list(parent, is_left_over, &count);
  for (int i = 0; i < count; i++) {
    char *path = path_join(parent, names[i]);
    folder_remove(path);
    free(path);
  }
  folder_list_free(names, count);
}

// Takes parent/name away at once for every reader, whatever it is, and removes it if it is ours.
static void take_away(const char *parent, const char *name) {
  char *path = path_join(parent, name), *away = text_format("%s/%s%s", parent, removing, name);
  folder_remove(away);
  if (rename(path, away)) warn("cannot remove %s: %s", path, strerror(errno));
  folder_remove(away);
  free(path);
  free(away);
}

void folder_discard(const char *parent, const char *name) {
  char *path = path_join(parent, name);
  if (remove_folder(path, true)) take_away(parent, name);
  free(path);
}

// --- writing -----------------------------------------------------------------------------------------------

static bool write_all(int file, const char *bytes, size_t count) {
  while (count) {
    ssize_t written = write(file, bytes, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes += written;
    count -= (size_t)written;
  }
  return true;
}

static void give_up(Folder *f, const char *path) {
  if (f->ok) refuse(&f->reason, "cannot write %s: %s", path, strerror(errno));
  f->ok = false;
}

Folder folder_begin(const char *parent, const char *name) {
  Folder f = {.ok = true,
              .parent = text_format("%s", parent),
              .name = text_format("%s", name),
              .hidden = text_format("%s/%s%s", parent, saving, name),
              .checksums = cJSON_CreateObject()};
  folder_remove(f.hidden);
  if (mkdir(f.hidden, 0777)) give_up(&f, f.hidden);
  return f;
}

// Writes what is listed so far. Every file is listed before it is made, so that whoever removes what a killed writer
// left knows it.
static void write_list(Folder *f, bool last) {
  char *fresh = path_join(f->hidden, fresh_list), *list = path_join(f->hidden, CHECKSUMS);
  char *text = json_print(f->checksums, true);
  size_t length = strlen(text);
  int file = f->ok ? open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666) : -1;
  bool written = file >= 0 && write_all(file, text, length) && (!last || !fsync(file));
  if (file >= 0 && close(file)) written = false;
  if (f->ok && (!written || rename(fresh, list))) give_up(f, list);
  free(text);
  free(fresh);
  free(list);
}

static void end_file(Folder *f) {
  if (!f->file) return;
  if (f->ok && fsync(f->descriptor)) give_up(f, f->file);
  if (close(f->descriptor)) give_up(f, f->file);
  char crc[16];
  snprintf(crc, sizeof crc, "%08x", f->crc);
  cJSON *entry = cJSON_GetObjectItemCaseSensitive(f->checksums, strrchr(f->file, '/') + 1);
  cJSON_AddNumberToObject(entry, "bytes", (double)f->bytes);
  cJSON_AddStringToObject(entry, "crc32", crc);
  free(f->file);
  f->file = NULL;
}

void folder_file(Folder *f, const char *name) {
  end_file(f);
  if (!f->ok) return;
  cJSON_AddObjectToObject(f->checksums, name);
  write_list(f, false);
  if (!f->ok) return;
  f->file = path_join(f->hidden, name);
  f->bytes = f->crc = 0;
  f->descriptor = open(f->file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (f->descriptor >= 0) return;
  give_up(f, f->file);
  free(f->file);
  f->file = NULL;
}

void folder_write(Folder *f, const void *bytes, size_t count) {
  if (!f->ok) return;
  f->crc = checksum(f->crc, bytes, count);
  f->bytes += count;
  if (!write_all(f->descriptor, bytes, count)) give_up(f, f->file);
}

void folder_add(Folder *f, const char *name, const void *bytes, size_t count) {
  folder_file(f, name);
  folder_write(f, bytes, count);
}

bool folder_finish(Folder *f, Reason *reason) {
  end_file(f);
  char *path = path_join(f->parent, f->name);
  struct stat status;
  Reason why;
  write_list(f, true);
  if (f->ok && !folder_sync(f->hidden)) give_up(f, f->hidden);
  if (f->ok && !lstat(path, &status)) take_away(f->parent, f->name);
  if (f->ok && (rename(f->hidden, path) || !folder_sync(f->parent))) give_up(f, path);
  if (!f->ok) {
    if (!remove_listed(f->hidden, f->checksums, false, &why)) warn("%s", why.text);
    *reason = f->reason;
  }
  bool ok = f->ok;
  cJSON_Delete(f->checksums);
  free(path);
  free(f->parent);
  free(f->name);
  free(f->hidden);
  *f = (Folder){0};
  return ok;
}

// --- checking ----------------------------------------------------------------------------------------------

static bool file_intact(const char *path, const cJSON *entry, FolderCheck check, Reason *reason) {
  const cJSON *bytes = json_member(entry, "bytes");
  const char *crc = json_text(entry, "crc32");
  if (!json_is_whole(bytes) || !crc)
    return refuse(reason, "%s is listed in " CHECKSUMS " without length and checksum", path);
  struct stat status;
  if (stat(path, &status)) return refuse(reason, "%s cannot be read: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode) || (double)status.st_size != bytes->valuedouble)
    return refuse(reason, "%s has %lld bytes, not the %.0f that were written", path,
                  (long long)status.st_size, bytes->valuedouble);
  if (check == CHECK_LENGTHS) return true;
  Mapping mapping = file_map(path);
  const size_t piece = (size_t)64 << 20;
  uint32_t sum = 0;
  file_will_need(&mapping, 0, piece);
  for (size_t first = 0; first < mapping.size; first += piece) {
    size_t count = mapping.size - first < piece ? mapping.size - first : piece;
    file_will_need(&mapping, first + piece, piece);
    sum = checksum(sum, mapping.bytes + first, count);
    ranks_alive();
    file_done_with(&mapping, first, count);
  }
  file_unmap(&mapping);
  char text[16];
  snprintf(text, sizeof text, "%08x", sum);
  if (strcmp(text, crc)) return refuse(reason, "%s is damaged: its checksum is %s, not %s", path, text, crc);
  return true;
}

bool folder_intact(const char *path, FolderCheck check, bool (*skip)(const char *name), Reason *reason) {
  cJSON *checksums = read_list(path, reason);
  bool intact = checksums != NULL;
  const cJSON *entry;
  cJSON_ArrayForEach(entry, checksums) {
    if (!intact || (skip && skip(entry->string))) continue;
    char *file = path_join(path, entry->string);
    intact = is_plain_name(entry->string) ? file_intact(file, entry, check, reason)
                                          : refuse(reason, "%s/" CHECKSUMS " names files elsewhere", path);
    free(file);
  }
  cJSON_Delete(checksums);
  return intact;
}
