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

static const char saving[] = ".saving-", removing[] = ".removing-";

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

char **folder_list(const char *path, bool (*accept)(const char *name), int *count) {
  *count = 0;
  DIR *folder = opendir(path);
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

void folder_list_free(char **names, int count) {
  for (int i = 0; i < count; i++) free(names[i]);
  free(names);
}

static bool is_entry(const char *name) {
  return strcmp(name, ".") && strcmp(name, "..");
}

void folder_remove(const char *path) {
  int count;
  char **names = folder_list(path, is_entry, &count);
  for (int i = 0; i < count; i++) {
    char *file = path_join(path, names[i]);
    unlink(file);
    free(file);
  }
  folder_list_free(names, count);
  if (rmdir(path) && errno != ENOENT) warn("cannot remove %s: %s", path, strerror(errno));
}

// --- making ------------------------------------------------------------------------------------------------

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

static void end_file(Folder *f) {
  if (!f->file) return;
  if (f->ok && fsync(f->descriptor)) give_up(f, f->file);
  if (close(f->descriptor)) give_up(f, f->file);
  char crc[16];
  snprintf(crc, sizeof crc, "%08x", f->crc);
  cJSON *entry = cJSON_AddObjectToObject(f->checksums, strrchr(f->file, '/') + 1);
  cJSON_AddNumberToObject(entry, "bytes", (double)f->bytes);
  cJSON_AddStringToObject(entry, "crc32", crc);
  free(f->file);
  f->file = NULL;
}

void folder_file(Folder *f, const char *name) {
  end_file(f);
  if (!f->ok) return;
  f->file = path_join(f->hidden, name);
  f->bytes = f->crc = 0;
  f->descriptor = open(f->file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (f->descriptor >= 0) return;
  give_up(f, f->file);
  free(f->file);
  f->file = NULL;
}

void folder_write(Folder *f, const void *bytes, size_t count) {
  if (!f->ok) return;
  f->crc = checksum(f->crc, bytes, count);
  f->bytes += count;
  const char *at = bytes;
  while (count) {
    ssize_t written = write(f->descriptor, at, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      give_up(f, f->file);
      return;
    }
    at += written;
    count -= (size_t)written;
  }
}

void folder_add(Folder *f, const char *name, const void *bytes, size_t count) {
  folder_file(f, name);
  folder_write(f, bytes, count);
}

bool folder_finish(Folder *f, Reason *reason) {
  end_file(f);
  char *text = json_print(f->checksums, true), *path = path_join(f->parent, f->name);
  folder_add(f, CHECKSUMS, text, strlen(text));
  end_file(f);
  if (f->ok && !folder_sync(f->hidden)) give_up(f, f->hidden);
  if (f->ok && path_exists(path)) folder_discard(f->parent, f->name);
  if (f->ok && (rename(f->hidden, path) || !folder_sync(f->parent))) give_up(f, path);
  if (!f->ok) {
    folder_remove(f->hidden);
    *reason = f->reason;
  }
  bool ok = f->ok;
  cJSON_Delete(f->checksums);
  free(text);
  free(path);
  free(f->parent);
  free(f->name);
  free(f->hidden);
  *f = (Folder){0};
  return ok;
}

// --- removing ----------------------------------------------------------------------------------------------

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

void folder_discard(const char *parent, const char *name) {
  char *path = path_join(parent, name), *away = text_format("%s/%s%s", parent, removing, name);
  folder_remove(away);
  if (rename(path, away)) warn("cannot remove %s: %s", path, strerror(errno));
  folder_remove(away);
  free(path);
  free(away);
}

// --- looking -----------------------------------------------------------------------------------------------

static bool file_intact(const char *path, const cJSON *entry, FolderCheck check, Reason *reason) {
  const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(entry, "bytes");
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
  char *list = path_join(path, CHECKSUMS);
  size_t length;
  char *text = file_read(list, &length);
  Reason why;
  cJSON *checksums = text ? json_parse(text, length, &why) : NULL;
  bool intact = checksums != NULL;
  if (!text)
    refuse(reason, "%s does not exist", list);
  else if (!intact)
    refuse(reason, "%s is damaged: %s", list, why.text);
  const cJSON *entry;
  cJSON_ArrayForEach(entry, checksums) {
    if (!intact || (skip && skip(entry->string))) continue;
    char *file = path_join(path, entry->string);
    intact = is_plain_name(entry->string) ? file_intact(file, entry, check, reason)
                                          : refuse(reason, "%s names files elsewhere", list);
    free(file);
  }
  cJSON_Delete(checksums);
  free(text);
  free(list);
  return intact;
}
