#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fail.h"

char *path_join(const char *folder, const char *name) {
  return text_format("%s/%s", folder, name);
}

bool path_exists(const char *path) {
  struct stat status;
  return stat(path, &status) == 0;
}

bool path_is_folder(const char *path) {
  struct stat status;
  return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

void path_make_folders(const char *option, const char *path) {
  char *partial = text_format("%s", path);
  for (char *slash = partial; slash;) {
    slash = strchr(slash + 1, '/');
    if (slash) *slash = 0;
    if (*partial && mkdir(partial, 0777) && errno != EEXIST)
      fail("--%s %s: cannot make the folder %s: %s", option, path, partial, strerror(errno));
    if (slash) *slash = '/';
  }
  free(partial);
}

// Opens a regular file; -1 where there is none.
static int open_file(const char *path, size_t *size) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0 && errno == ENOENT) return -1;
  struct stat status;
  if (file < 0) fail("cannot open %s: %s", path, strerror(errno));
  if (fstat(file, &status)) fail("cannot read %s: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("cannot read %s: it is no file", path);
  *size = (size_t)status.st_size;
  return file;
}

char *file_read(const char *path, size_t *length) {
  enum { MAX_BYTES = 256 << 20 };
  size_t size = 0, have = 0;
  int file = open_file(path, &size);
  if (file < 0) return NULL;
  if (size > MAX_BYTES) fail("%s is larger than %d MiB, which no file of its kind is", path, MAX_BYTES >> 20);
  char *text = host_alloc((int64_t)size + 1, 1, path);
  for (ssize_t got = 1; have < size && got > 0; have += (size_t)got) {
    got = read(file, text + have, size - have);
    if (got < 0) fail("cannot read %s at byte %zu: %s", path, have, strerror(errno));
  }
  close(file);
  *length = have;
  return text;
}

Mapping file_map_or_copy(const char *path, size_t limit) {
  Mapping mapping = {0};
  int file = open_file(path, &mapping.size);
  if (file < 0) return mapping;
  if (mapping.size > 0 && mapping.size > limit) {
    mapping.bytes = mmap(NULL, mapping.size, PROT_READ, MAP_SHARED, file, 0);
    if (mapping.bytes == MAP_FAILED) fail("cannot map %s: %s", path, strerror(errno));
  } else {
    mapping.copied = true;
    mapping.bytes = file_read(path, &mapping.size);
  }
  close(file);
  return mapping;
}

Mapping file_map(const char *path) {
  return file_map_or_copy(path, 0);
}

void file_unmap(Mapping *mapping) {
  if (mapping->copied)
    free((void *)mapping->bytes);
  else if (mapping->size)
    munmap((void *)mapping->bytes, mapping->size);
  *mapping = (Mapping){0};
}

static void advise(const Mapping *mapping, size_t first, size_t count, int advice) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), begin = first / page * page;
  if (mapping->copied || first >= mapping->size) return;
  if (count > mapping->size - first) count = mapping->size - first;
  madvise((char *)mapping->bytes + begin, first - begin + count, advice); // only ever a hint
}

void file_will_need(const Mapping *mapping, size_t first, size_t count) {
  advise(mapping, first, count, MADV_WILLNEED);
}

void file_done_with(const Mapping *mapping, size_t first, size_t count) {
  advise(mapping, first, count, MADV_DONTNEED);
}

// --- reading ahead -------------------------------------------------------------------------------------------

enum { PIECE = 8 << 20, AHEAD = 256 << 20 }; // bytes per request, and at most beyond the reader
enum { THREADS = 4 };                        // a disk is faster with several requests

struct ReadAhead {
  Mapping file;
  size_t reached, next; // the reader's place; the first byte not requested yet
  bool over;
  int started;
  pthread_t threads[THREADS];
  pthread_mutex_t lock;
  pthread_cond_t changed;
};

// Where the next piece begins, once it is time for it; the file's size when there is none.
static size_t next_piece(ReadAhead *r) {
  pthread_mutex_lock(&r->lock);
  while (!r->over && r->next < r->file.size && r->next >= r->reached + AHEAD)
    pthread_cond_wait(&r->changed, &r->lock);
  if (r->next < r->reached) r->next = r->reached;
  size_t at = r->over || r->next > r->file.size ? r->file.size : r->next;
  r->next = at + PIECE;
  pthread_mutex_unlock(&r->lock);
  return at;
}

static void *request_pages(void *given) {
  ReadAhead *r = given;
  for (size_t at; (at = next_piece(r)) < r->file.size;) file_will_need(&r->file, at, PIECE);
  return NULL;
}

ReadAhead *read_ahead_create(Mapping file) {
  ReadAhead *r = host_alloc(1, sizeof *r, "reading ahead");
  r->file = file;
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->changed, NULL);
  return r;
}

void read_ahead_reached(ReadAhead *r, size_t offset) {
  pthread_mutex_lock(&r->lock);
  r->reached = offset;
  while (r->started < THREADS && pthread_create(&r->threads[r->started], NULL, request_pages, r) == 0)
    r->started++;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

void read_ahead_destroy(ReadAhead *r) {
  if (!r) return;
  pthread_mutex_lock(&r->lock);
  r->over = true;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
  for (int i = 0; i < r->started; i++) pthread_join(r->threads[i], NULL);
  pthread_cond_destroy(&r->changed);
  pthread_mutex_destroy(&r->lock);
  free(r);
}
