#include "model/checkpoint/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fail.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/files.h"
#include "model/checkpoint/json.h"

static const char saving[] = ".saving-", removing[] = ".removing-";

static char *hidden_path(const char *parent, const char *kind, const char *name) {
  char *path;
  if (asprintf(&path, "%s/%s%s", parent, kind, name) < 0) fail("out of host memory for a path in %s", parent);
  return path;
}

static char *copy_of(const char *text) {
  char *copy = strdup(text);
  if (!copy) fail("out of host memory for the path %s", text);
  return copy;
}

// --- making ------------------------------------------------------------------------------------------------

static void give_up(Folder *f, const char *path) {
  if (f->ok) refuse(&f->reason, "cannot write %s: %s", path, strerror(errno));
  f->ok = false;
}

Folder folder_begin(const char *parent, const char *name) {
  Folder f = {.ok = true,
              .parent = copy_of(parent),
              .name = copy_of(name),
              .hidden = hidden_path(parent, saving, name),
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

bool folder_finish(Folder *f, Reason *reason) {
  end_file(f);
  char *text = cJSON_Print(f->checksums), *path = path_join(f->parent, f->name);
  if (!text) fail("out of host memory for the checksums of %s", path);
  folder_file(f, CHECKSUMS);
  folder_write(f, text, strlen(text));
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
    free(names[i]);
  }
  free(names);
}

void folder_discard(const char *parent, const char *name) {
  char *path = path_join(parent, name), *away = hidden_path(parent, removing, name);
  folder_remove(away);
  if (rename(path, away)) warn("cannot remove %s: %s", path, strerror(errno));
  folder_remove(away);
  free(path);
  free(away);
}

// --- looking -----------------------------------------------------------------------------------------------

static bool file_intact(const char *path, const cJSON *entry, FolderCheck check, Reason *reason) {
  const cJSON *bytes = cJSON_GetObjectItemCaseSensitive(entry, "bytes");
  const cJSON *crc = cJSON_GetObjectItemCaseSensitive(entry, "crc32");
  if (!json_is_whole(bytes) || !cJSON_IsString(crc))
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
  if (strcmp(text, crc->valuestring))
    return refuse(reason, "%s is damaged: its checksum is %s, not %s", path, text, crc->valuestring);
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
