#include "model/checkpoint/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "base/fail.h"

char *path_join(const char *folder, const char *name) {
  char *path;
  if (asprintf(&path, "%s/%s", folder, name) < 0) fail("out of host memory for the path %s/%s", folder, name);
  return path;
}

bool path_exists(const char *path) {
  struct stat status;
  return stat(path, &status) == 0;
}

bool is_plain_name(const char *name) {
  return *name && !strchr(name, '/') && strcmp(name, ".") && strcmp(name, "..") && strlen(name) < 256;
}

char *file_read(const char *path, size_t *length) {
  enum { MOST = 256 << 20 };
  FILE *file = fopen(path, "rb");
  if (!file && errno == ENOENT) return NULL;
  struct stat status;
  if (!file || fstat(fileno(file), &status)) fail("cannot read %s: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("cannot read %s: it is no file", path);
  if (status.st_size > MOST) fail("%s is larger than %d MiB, which no file of its kind is", path, MOST >> 20);
  char *text = malloc((size_t)status.st_size + 1);
  if (!text) fail("out of host memory for %s", path);
  *length = fread(text, 1, (size_t)status.st_size, file);
  if (ferror(file)) fail("cannot read %s: %s", path, strerror(errno));
  text[*length] = 0;
  fclose(file);
  return text;
}

Mapping file_map(const char *path) {
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0 && errno == ENOENT) return (Mapping){0};
  struct stat status;
  if (descriptor < 0 || fstat(descriptor, &status)) fail("cannot read %s: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("cannot read %s: it is no file", path);
  Mapping mapping = {.bytes = "", .size = (size_t)status.st_size};
  if (mapping.size) {
    mapping.bytes = mmap(NULL, mapping.size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapping.bytes == MAP_FAILED) fail("cannot map %s: %s", path, strerror(errno));
  }
  close(descriptor);
  return mapping;
}

void file_unmap(Mapping *mapping) {
  if (mapping->size) munmap((void *)mapping->bytes, mapping->size);
  *mapping = (Mapping){0};
}

static void advise(const Mapping *mapping, size_t first, size_t count, int advice) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), begin = first / page * page;
  if (first >= mapping->size) return;
  if (count > mapping->size - first) count = mapping->size - first;
  madvise((char *)mapping->bytes + begin, first - begin + count, advice); // only ever a hint
}

void file_will_need(const Mapping *mapping, size_t first, size_t count) {
  advise(mapping, first, count, MADV_WILLNEED);
}

void file_done_with(const Mapping *mapping, size_t first, size_t count) {
  advise(mapping, first, count, MADV_DONTNEED);
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

static bool is_entry(const char *name) {
  return strcmp(name, ".") && strcmp(name, "..");
}

void folder_remove(const char *path) {
  int count = 0;
  char **names = folder_list(path, is_entry, &count);
  for (int i = 0; i < count; i++) {
    char *file = path_join(path, names[i]);
    unlink(file);
    free(file);
    free(names[i]);
  }
  free(names);
  if (rmdir(path) && errno != ENOENT) warn("cannot remove %s: %s", path, strerror(errno));
}

static int by_bytes(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

char **folder_list(const char *path, bool (*accept)(const char *name), int *count) {
  *count = 0;
  DIR *folder = opendir(path);
  if (!folder) return NULL;
  char **names = NULL;
  int capacity = 0;
  for (struct dirent *entry; (entry = readdir(folder));) {
    if (!accept(entry->d_name)) continue;
    if (*count == capacity) {
      capacity = capacity ? 2 * capacity : 16;
      names = realloc(names, (size_t)capacity * sizeof *names);
      if (!names) fail("out of host memory for the entries of %s", path);
    }
    names[*count] = strdup(entry->d_name);
    if (!names[(*count)++]) fail("out of host memory for the entries of %s", path);
  }
  closedir(folder);
  if (*count) qsort(names, (size_t)*count, sizeof *names, by_bytes);
  return names;
}
