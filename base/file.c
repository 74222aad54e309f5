#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
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
    if (*partial && mkdir(partial, 0777) && !(errno == EEXIST && path_is_folder(partial)))
      fail("--%s %s: cannot make the folder %s: %s", option, path, partial, strerror(errno));
    if (slash) *slash = '/';
  }
  free(partial);
}

// --- inputs and outputs --------------------------------------------------------------------------------------

// The files that this process has opened, newest last.
typedef struct {
  dev_t device;
  ino_t inode;
  const char *output; // what it is; NULL: an input
  char *path;         // of an output
} Opened;

static Opened *opened;
static int64_t opened_count, opened_capacity;

static void remember(const struct stat *status, const char *output, const char *path) {
  opened = host_grow(opened, opened_count, &opened_capacity, sizeof *opened, "a list of open files");
  opened[opened_count++] =
      (Opened){status->st_dev, status->st_ino, output, path ? text_format("%s", path) : NULL};
}

// Whether an output was renamed, removed or replaced since: then another file may have its inode.
static bool is_gone(const Opened *o) {
  struct stat now;
  return o->path && (stat(o->path, &now) || now.st_dev != o->device || now.st_ino != o->inode);
}

static const Opened *find_opened(const struct stat *status) {
  for (int64_t i = opened_count - 1; i >= 0; i--)
    if (opened[i].device == status->st_dev && opened[i].inode == status->st_ino && !is_gone(&opened[i]))
      return &opened[i];
  return NULL;
}

// O_NONBLOCK: opening a pipe would wait for its writer.
int file_open(const char *path, const char *output, size_t *size) {
  int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0 && errno == ENOENT) return -1;
  struct stat status;
  if (file < 0) fail("cannot open %s: %s", path, strerror(errno));
  if (fstat(file, &status)) fail("cannot read %s: %s", path, strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("cannot read %s: it is not a regular file; copy it into one", path);
  remember(&status, output, output ? path : NULL);
  *size = (size_t)status.st_size;
  return file;
}

void file_require_output(const char *what, const char *path, const char *mark) {
  struct stat status;
  if (stat(path, &status) || S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode)) return;
  const Opened *other = find_opened(&status);
  if (other && other->output && strcmp(other->output, what))
    fail("cannot write %s %s: %s is written there; name another file", what, path, other->output);
  if (other && !other->output && status.st_size)
    fail("cannot write %s %s: this run reads that file; name another", what, path);
  char begin[64] = "";
  int file = S_ISREG(status.st_mode) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  bool known = file >= 0 && read(file, begin, sizeof begin) >= 0 && !strncmp(begin, mark, strlen(mark));
  if (file >= 0) close(file);
  if (!known && (status.st_size || !S_ISREG(status.st_mode)))
    fail("cannot write %s %s: what is there is not from this program; name another file, or move it away",
         what, path);
}

FILE *file_create(const char *what, const char *path, const char *mark, bool append) {
  file_require_output(what, path, mark);
  FILE *file = fopen(path, append ? "a+" : "w");
  struct stat status;
  bool ready = file && !fstat(fileno(file), &status);
  if (ready && append && S_ISREG(status.st_mode)) { // a full disk may have cut the last line
    char last;
    off_t end = status.st_size;
    while (end > 0 && pread(fileno(file), &last, 1, end - 1) == 1 && last != '\n') end--;
    ready = end == status.st_size || !ftruncate(fileno(file), end);
  }
  if (!ready) fail("cannot write %s %s: %s", what, path, strerror(errno));
  if (S_ISREG(status.st_mode)) remember(&status, what, path);
  return file;
}

// --- files in memory -----------------------------------------------------------------------------------------

char *file_read(const char *path, size_t *length) {
  enum { MAX_BYTES = 256 << 20 };
  size_t size = 0, have = 0;
  int file = file_open(path, NULL, &size);
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

// A page of a mapped file is gone: the line of /proc/self/maps that holds the address names it. The signal comes from a
// read of the page itself, so no lock of the C library is held here.
static void on_bus_error(int number, siginfo_t *info, void *context) {
  (void)context;
  static atomic_flag first = ATOMIC_FLAG_INIT;
  while (atomic_flag_test_and_set(&first)) pause(); // another thread reports it
  char line[PATH_MAX + 128];
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps && fgets(line, sizeof line, maps)) {
    uintptr_t from, to;
    const char *path = strchr(line, '/');
    bool inside = sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &from, &to) == 2 &&
                  (uintptr_t)info->si_addr >= from && (uintptr_t)info->si_addr < to;
    if (inside && path)
      fail("%.*s was shortened while it was read, or its disk failed; restore it and start again",
           (int)strcspn(path, "\n"), path);
  }
  signal(number, SIG_DFL); // no file: the access is repeated, and ends the program
}

Mapping file_map_or_copy(const char *path, size_t limit) {
  Mapping mapping = {0};
  int file = file_open(path, NULL, &mapping.size);
  if (file < 0) return mapping;
  if (mapping.size > 0 && mapping.size > limit) {
    mapping.bytes = mmap(NULL, mapping.size, PROT_READ, MAP_SHARED, file, 0);
    sigaction(SIGBUS, &(struct sigaction){.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO}, NULL);
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
