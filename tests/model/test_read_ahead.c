// model/checkpoint/read_ahead.h: what is asked of the system, and when. The test's own madvise notes what is said
// of the file that is watched and keeps it from the system, so that a large file costs nothing.
#include "base/file.h"
#include "tests/data_files.h"

#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const size_t MIB = 1 << 20, AHEAD = 256 << 20; // of which no more is asked for at a time

// --- the system --------------------------------------------------------------------------------------------

static struct {
  pthread_mutex_t lock;
  Mapping file;
  unsigned char *asked; // of each page how often
  size_t bytes, end;    // asked for in all; where the last of it ends
  int calls, wrong;     // wrong: about something else than pages of the file, to be read
} watched = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t page_size(void) {
  return (size_t)sysconf(_SC_PAGESIZE);
}

static void note(size_t first, size_t length, int advice) {
  size_t page = page_size();
  watched.calls++;
  watched.wrong += advice != MADV_WILLNEED || first % page || first + length > watched.file.size || !length;
  watched.bytes += length;
  if (first + length > watched.end) watched.end = first + length;
  for (size_t i = first / page; i * page < first + length; i++) watched.asked[i]++;
}

int madvise(void *address, size_t length, int advice) {
  pthread_mutex_lock(&watched.lock);
  uintptr_t base = (uintptr_t)watched.file.bytes, at = (uintptr_t)address;
  bool ours = watched.file.size && at >= base && at < base + watched.file.size;
  if (ours) note(at - base, length, advice);
  pthread_mutex_unlock(&watched.lock);
  return ours ? 0 : (int)syscall(SYS_madvise, address, length, advice);
}

// A file of holes, and nothing asked of it yet.
static Mapping watch(const char *name, size_t size) {
  write_bytes(name, "", 0);
  assert_int_equal(truncate(temp_path(name), (off_t)size), 0);
  Mapping file = file_map(temp_path(name));
  assert_non_null(file.bytes);
  assert_int_equal(file.size, size);
  watched.asked = calloc(size / page_size() + 1, 1);
  assert_non_null(watched.asked);
  watched.bytes = watched.end = 0;
  watched.calls = watched.wrong = 0;
  watched.file = file;
  return file;
}

static void unwatch(Mapping *file) {
  assert_int_equal(watched.wrong, 0);
  watched.file = (Mapping){0};
  free(watched.asked);
  file_unmap(file);
}

static size_t asked_bytes(void) {
  pthread_mutex_lock(&watched.lock);
  size_t bytes = watched.bytes;
  pthread_mutex_unlock(&watched.lock);
  return bytes;
}

static int tasks(void) {
  DIR *folder = opendir("/proc/self/task");
  assert_non_null(folder);
  int count = 0;
  for (const struct dirent *entry; (entry = readdir(folder));) count += entry->d_name[0] != '.';
  closedir(folder);
  return count;
}

// A while at most, since threads take their time: at first what is waited for, then what must not change.
static void becomes(int count) {
  for (int i = 0; i < 5000 && tasks() != count; i++) usleep(1000);
  assert_int_equal(tasks(), count);
}

static void asks_for(size_t bytes) {
  for (int i = 0; i < 5000 && asked_bytes() < bytes; i++) usleep(1000);
  usleep(20000); // for whoever asks for more
  assert_int_equal(asked_bytes(), bytes);
}

// Every page of [first, end) was asked for so often.
static void asked(size_t first, size_t end, int times) {
  size_t page = page_size();
  for (size_t i = first / page; i * page < end; i++)
    if (watched.asked[i] != times)
      fail_msg("page %zu is asked for %d times, not %d", i, watched.asked[i], times);
}

// --- tests -------------------------------------------------------------------------------------------------

// The window before the reader is asked for, once; it goes with the reader, and ends where the file does.
static void asks_to_the_end_of_the_file(void **state) {
  (void)state;
  const size_t size = 600 * MIB + 12345;
  int before = tasks();
  Mapping file = watch("large", size);
  ReadAhead *ahead = read_ahead_create(file);
  assert_int_equal(tasks(), before); // nothing before the reader has come
  assert_int_equal(watched.calls, 0);
  read_ahead_reached(ahead, 0);
  asks_for(AHEAD);
  asked(0, AHEAD, 1);
  assert_true(tasks() > before);
  read_ahead_reached(ahead, 40 * MIB);
  asks_for(AHEAD + 40 * MIB);
  asked(0, AHEAD + 40 * MIB, 1);
  asked(AHEAD + 40 * MIB, size, 0);
  read_ahead_reached(ahead, 30 * MIB); // back: all of that has been asked for
  asks_for(AHEAD + 40 * MIB);
  read_ahead_reached(ahead, 290 * MIB);
  asks_for(552 * MIB); // whole pieces of 8 MiB
  read_ahead_reached(ahead, 350 * MIB);
  asks_for(size);
  asked(0, size, 1);
  assert_int_equal(watched.end, size);
  becomes(before); // nobody waits for more
  read_ahead_reached(ahead, size);
  asks_for(size);
  read_ahead_destroy(ahead);
  becomes(before);
  unwatch(&file);
}

// What the reader leaves out is not asked for.
static void goes_along_with_a_leap(void **state) {
  (void)state;
  const size_t size = 700 * MIB, leap = 400 * MIB + 4096;
  int before = tasks();
  Mapping file = watch("leap", size);
  ReadAhead *ahead = read_ahead_create(file);
  read_ahead_reached(ahead, 0);
  asks_for(AHEAD);
  read_ahead_reached(ahead, leap);
  asks_for(AHEAD + (AHEAD < size - leap ? AHEAD : size - leap));
  asked(AHEAD, leap, 0);
  asked(leap, leap + AHEAD, 1);
  read_ahead_destroy(ahead);
  becomes(before);
  unwatch(&file);
}

static void one_piece_and_less(void **state) {
  (void)state;
  const size_t sizes[] = {1, 4095, 4096, 8 * MIB, 8 * MIB + 1};
  int before = tasks();
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    Mapping file = watch("small", sizes[i]);
    ReadAhead *ahead = read_ahead_create(file);
    read_ahead_reached(ahead, 0);
    asks_for(sizes[i]);
    asked(0, sizes[i], 1);
    read_ahead_destroy(ahead);
    becomes(before);
    unwatch(&file);
  }
}

// A reader who has enough, in the middle of everything: no thread stays, and nothing is asked for afterwards.
static void stops_early(void **state) {
  (void)state;
  int before = tasks();
  Mapping file = watch("stopped", 2048 * MIB);
  for (int i = 0; i < 200; i++) {
    ReadAhead *ahead = read_ahead_create(file);
    if (i % 4) read_ahead_reached(ahead, 0);
    if (i % 4 == 2) read_ahead_reached(ahead, 1024 * MIB);
    if (i % 4 == 3) usleep(100);
    read_ahead_destroy(ahead);
    int calls = watched.calls; // without the lock: nobody else is there
    becomes(before);
    assert_int_equal(watched.calls, calls);
    assert_true(watched.end <= (1024 + 256) * MIB);
  }
  unwatch(&file);
}

static void nothing_to_read(Mapping file) {
  int before = tasks();
  const size_t offsets[] = {0, 1, (size_t)1 << 40, 0};
  for (size_t count = 0; count <= sizeof offsets / sizeof *offsets; count++) {
    ReadAhead *ahead = read_ahead_create(file);
    for (size_t i = 0; i < count; i++) read_ahead_reached(ahead, offsets[i]);
    read_ahead_destroy(ahead);
    becomes(before);
  }
}

static void a_file_that_is_missing_or_empty(void **state) {
  (void)state;
  Mapping missing = file_map(temp_path("missing"));
  assert_null(missing.bytes);
  nothing_to_read(missing);
  write_bytes("empty", "", 0);
  Mapping empty = file_map(temp_path("empty"));
  assert_non_null(empty.bytes);
  nothing_to_read(empty);
  file_unmap(&empty);
  read_ahead_destroy(NULL);
}

// A reader who is behind the end asks for nothing.
static void behind_the_end(void **state) {
  (void)state;
  int before = tasks();
  Mapping file = watch("behind", 100 * MIB);
  const size_t places[] = {100 * MIB, 100 * MIB + 1, SIZE_MAX / 2};
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    ReadAhead *ahead = read_ahead_create(file);
    read_ahead_reached(ahead, places[i]);
    becomes(before);
    read_ahead_destroy(ahead);
  }
  assert_int_equal(watched.calls, 0);
  unwatch(&file);
}

static void default_stack(size_t size) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  assert_int_equal(pthread_attr_setstacksize(&attributes, size), 0);
  assert_int_equal(pthread_setattr_default_np(&attributes), 0);
  pthread_attr_destroy(&attributes);
}

// It goes without threads while there are none to be had (here: no stack fits), and with them once there are.
static void without_threads(void **state) {
  (void)state;
  int before = tasks();
  Mapping file = watch("alone", 20 * MIB);
  ReadAhead *ahead = read_ahead_create(file);
  default_stack((size_t)1 << 47);
  read_ahead_reached(ahead, 0);
  assert_int_equal(tasks(), before);
  assert_int_equal(watched.calls, 0);
  read_ahead_destroy(ahead);
  ahead = read_ahead_create(file);
  read_ahead_reached(ahead, 0);
  default_stack(8 * MIB);
  read_ahead_reached(ahead, 0);
  asks_for(20 * MIB);
  read_ahead_destroy(ahead);
  becomes(before);
  unwatch(&file);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(asks_to_the_end_of_the_file),
      cmocka_unit_test(goes_along_with_a_leap),
      cmocka_unit_test(one_piece_and_less),
      cmocka_unit_test(stops_early),
      cmocka_unit_test(a_file_that_is_missing_or_empty),
      cmocka_unit_test(behind_the_end),
      cmocka_unit_test(without_threads),
  };
  return cmocka_run_group_tests_name("reading ahead", tests, make_temp_dir, remove_temp_dir);
}
