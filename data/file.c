#include "data/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <zlib.h>

#include "kernels/base/alloc.h"
#include "kernels/base/integers.h"
#include "kernels/ranks/ranks.h"

Path path_in(const char *folder, const char *name) {
  Path path;
  if (snprintf(path.text, sizeof path.text, "%s/%s", folder, name) >= (int)sizeof path.text) path.text[0] = 0;
  return path;
}

Path path_folder(const char *path) {
  const char *slash = strrchr(path, '/');
  Path folder;
  snprintf(folder.text, sizeof folder.text, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
  return folder;
}

bool path_exists(const char *path) {
  struct stat status;
  return lstat(path, &status) == 0;
}

bool path_is_folder(const char *path) {
  struct stat status;
  return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

bool path_is_same(const char *a, const char *b) {
  struct stat x, y;
  return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

bool path_make_folders(const char *path, Reason *reason) {
  char *partial = text_format("%s", path);
  bool made = *path || refuse(reason, "the name of the folder is empty");
  for (char *slash = partial; made && slash;) {
    slash = strchr(slash + 1, '/');
    if (slash) *slash = 0;
    if (mkdir(partial, 0777) && !(errno == EEXIST && path_is_folder(partial)))
      made = refuse(reason, "cannot make the folder %s: %s", partial, strerror(errno));
    if (slash) *slash = '/';
  }
  free(partial);
  return made;
}

static int open_regular(const char *path, size_t *size, Reason *reason) {
  *reason = (Reason){""};
  int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); // opening a pipe would wait for its writer
  if (file < 0 && errno == ENOENT && !path_exists(path)) return -1;
  struct stat status;
  if (file < 0)
    refuse(reason, "cannot open %s: %s", path, strerror(errno));
  else if (fstat(file, &status))
    refuse(reason, "cannot read %s: %s", path, strerror(errno));
  else if (!S_ISREG(status.st_mode))
    refuse(reason, "cannot read %s: it is not a regular file; copy it into one", path);
  if (!*reason->text) {
    *size = (size_t)status.st_size;
    return file;
  }
  if (file >= 0) close(file);
  return -1;
}

// False for a pipe or a device.
static bool is_output(const char *what, const char *path, const char *mark) {
  struct stat status;
  if (stat(path, &status)) return true;
  if (S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode)) return false;
  char begin[64] = "";
  int file = S_ISREG(status.st_mode) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  bool known = file >= 0 && read(file, begin, sizeof begin) >= 0 && !strncmp(begin, mark, strlen(mark));
  if (file >= 0) close(file);
  if (!known && (status.st_size || !S_ISREG(status.st_mode)))
    fail("cannot write %s %s: what is there is not from this program; name another file, or move it away",
         what, path);
  return true;
}

// The regular file `path` if the shell has opened it for standard output or error, else NULL.
static FILE *same_stream(const char *path) {
  struct stat named, open_already;
  for (int stream = STDOUT_FILENO; stream <= STDERR_FILENO; stream++)
    if (!stat(path, &named) && !fstat(stream, &open_already) && S_ISREG(named.st_mode) &&
        named.st_ino == open_already.st_ino && named.st_dev == open_already.st_dev)
      return fdopen(dup(stream), "a");
  return NULL;
}

// A mounted file, or one in a folder that may not be written, cannot be renamed: it is left as it is.
static void move_away(const char *what, const char *path) {
  for (int64_t number = 1, moved = 0; !moved; number++) {
    char *kept = text_format("%s.%lld", path, (long long)number);
    moved = !renameat2(AT_FDCWD, path, AT_FDCWD, kept, RENAME_NOREPLACE);
    bool taken = !moved && errno == EEXIST;
    if (!moved && (errno == EINVAL || errno == ENOSYS)) { // NFS and 9p have no RENAME_NOREPLACE
      taken = path_exists(kept);
      moved = !taken && !rename(path, kept);
    }
    if (!moved && !taken)
      fail("cannot write %s %s: an earlier one is there and cannot be renamed to %s: %s; name another file",
           what, path, kept, strerror(errno));
    free(kept);
  }
}

FILE *file_create(const char *what, const char *path, const char *mark, EarlierOutput earlier) {
  FILE *shared = same_stream(path);
  if (shared) return shared;
  bool append = earlier == APPEND;
  bool regular = is_output(what, path, mark);
  int flags = O_CREAT | O_CLOEXEC | (append ? O_APPEND : 0) | (regular ? O_RDWR : O_WRONLY);
  int file = open(path, flags, 0666);
  // Until it is closed, other outputs are kept out, this program's too. Some file systems have no locks.
  if (regular && file >= 0 && flock(file, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
    fail("cannot write %s %s: another output is written there; name another file", what, path);
  struct stat status;
  if (earlier == BACK_UP && regular && file >= 0 && !fstat(file, &status) && status.st_size > 0) {
    move_away(what, path);
    close(file);
    return file_create(what, path, mark, OVERWRITE);
  }
  off_t end = regular && append && file >= 0 ? lseek(file, 0, SEEK_END) : 0;
  char last; // a full disk may have cut the last line
  while (end > 0 && pread(file, &last, 1, end - 1) == 1 && last != '\n') end--;
  FILE *out = file < 0 || (regular && ftruncate(file, end)) ? NULL : fdopen(file, append ? "a" : "w");
  if (!out) fail("cannot write %s %s: %s", what, path, strerror(errno));
  return out;
}

char *file_read(const char *path, size_t *length, Reason *given) {
  enum { MAX_BYTES = 256 << 20 };
  Reason why = {""}, *reason = given ? given : &why;
  size_t size = 0, have = 0;
  int file = open_regular(path, &size, reason);
  if (size > MAX_BYTES)
    refuse(reason, "%s is larger than %d MiB, which no file of its kind is", path, MAX_BYTES >> 20);
  char *text = file < 0 || *reason->text ? NULL : host_alloc((int64_t)size + 1, 1, path);
  for (ssize_t got = 1; text && have < size && got > 0; have += (size_t)got) {
    got = read(file, text + have, size - have);
    if (got >= 0) continue;
    refuse(reason, "cannot read %s at byte %zu: %s", path, have, strerror(errno));
    free(text);
    text = NULL;
  }
  if (file >= 0) close(file);
  if (!given && *reason->text) fail("%s", reason->text);
  *length = have;
  return text;
}

// Names the file that has lost a mapped page. A read raises the signal, so no lock of the C library is held.
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

Mapping file_map_or_copy(const char *path, size_t limit, Reason *given) {
  Mapping mapping = {0};
  Reason why = {""}, *reason = given ? given : &why;
  int file = open_regular(path, &mapping.size, reason);
  if (file >= 0 && mapping.size > 0 && mapping.size > limit) {
    void *bytes = mmap(NULL, mapping.size, PROT_READ, MAP_SHARED, file, 0);
    sigaction(SIGBUS, &(struct sigaction){.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO}, NULL);
    if (bytes == MAP_FAILED)
      refuse(reason, "cannot map %s: %s", path, strerror(errno));
    else
      mapping.bytes = bytes;
  } else if (file >= 0) {
    mapping.copied = true;
    mapping.bytes = file_read(path, &mapping.size, reason);
  }
  if (file >= 0) close(file);
  if (!given && *reason->text) fail("%s", reason->text);
  return mapping;
}

void file_unmap(Mapping *mapping) {
  if (mapping->copied)
    free((void *)mapping->bytes);
  else if (mapping->size)
    munmap((void *)mapping->bytes, mapping->size);
  *mapping = (Mapping){0};
}

void file_advise(const Mapping *mapping, size_t first, size_t count, int advice) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), begin = first / page * page;
  if (mapping->copied || first >= mapping->size) return;
  if (count > mapping->size - first) count = mapping->size - first;
  madvise((char *)mapping->bytes + begin, first - begin + count, advice); // only ever a hint
}

uint32_t checksum(uint32_t crc, const void *bytes, size_t count) {
  enum { PIECE = 1 << 20 };
  int64_t pieces = ceil_div((int64_t)count, PIECE), last = (int64_t)count - (pieces - 1) * PIECE;
  uint32_t *each = host_alloc(pieces, sizeof *each, "checksums");
#pragma omp parallel for schedule(static) if (pieces > 1)
  for (int64_t i = 0; i < pieces; i++) {
    ranks_alive();
    each[i] = crc32(0, (const Bytef *)bytes + i * PIECE, i + 1 < pieces ? PIECE : (uInt)last);
  }
  for (int64_t i = 0; i < pieces; i++) crc = crc32_combine(crc, each[i], i + 1 < pieces ? PIECE : last);
  free(each);
  return crc;
}
