// ReadAhead (base/file.h): what is requested of the system, and when. The test's own madvise records the requests for
// the watched file and does not pass them on, so that a large file costs nothing.
#include "base/file.h"
#include "tests/data_files.h"

#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const size_t MIB = 1 << 20, AHEAD = 256 << 20; // the most that is requested at a time

// --- the system --------------------------------------------------------------------------------------------

static struct {
  pthread_mutex_t lock;
  Mapping file;
  unsigned char *requested; // how often each page was requested
  size_t bytes, end;        // requested in all; where the last request ends
  int calls, wrong;         // wrong: about something else than pages of the file, to be read
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
  for (size_t i = first / page; i * page < first + length; i++) watched.requested[i]++;
}

int madvise(void *address, size_t length, int advice) {
  pthread_mutex_lock(&watched.lock);
  uintptr_t base = (uintptr_t)watched.file.bytes, at = (uintptr_t)address;
  bool ours = watched.file.size && at >= base && at < base + watched.file.size;
  if (ours) note(at - base, length, advice);
  pthread_mutex_unlock(&watched.lock);
  return ours ? 0 : (int)syscall(SYS_madvise, address, length, advice);
}

// A sparse file, of which nothing has been requested yet.
static Mapping watch(const char *name, size_t size) {
  write_bytes(name, "", 0);
  assert_int_equal(truncate(temp_path(name), (off_t)size), 0);
  Mapping file = file_map(temp_path(name));
  assert_non_null(file.bytes);
  assert_int_equal(file.size, size);
  watched.requested = calloc(size / page_size() + 1, 1);
  assert_non_null(watched.requested);
  watched.bytes = watched.end = 0;
  watched.calls = watched.wrong = 0;
  watched.file = file;
  return file;
}

static void unwatch(Mapping *file) {
  assert_int_equal(watched.wrong, 0);
  watched.file = (Mapping){0};
  free(watched.requested);
  file_unmap(file);
}

static size_t requested_bytes(void) {
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

static void wait_for_requests(size_t bytes) {
  for (int i = 0; i < 5000 && requested_bytes() < bytes; i++) usleep(1000);
  usleep(20000); // in case more is requested
  assert_int_equal(requested_bytes(), bytes);
}

// Every page of [first, end) was requested `times` times.
static void requested(size_t first, size_t end, int times) {
  size_t page = page_size();
  for (size_t i = first / page; i * page < end; i++)
    if (watched.requested[i] != times)
      fail_msg("page %zu is requested %d times, not %d", i, watched.requested[i], times);
}

// --- tests -------------------------------------------------------------------------------------------------

// The window before the reader is requested once; it goes with the reader, and ends where the file does.
static void requests_to_the_end_of_the_file(void **state) {
  (void)state;
  const size_t size = 600 * MIB + 12345;
  int before = tasks();
  Mapping file = watch("large", size);
  ReadAhead *ahead = read_ahead_create(file);
  assert_int_equal(tasks(), before); // nothing before the reader has come
  assert_int_equal(watched.calls, 0);
  read_ahead_reached(ahead, 0);
  wait_for_requests(AHEAD);
  requested(0, AHEAD, 1);
  assert_true(tasks() > before);
  read_ahead_reached(ahead, 40 * MIB);
  wait_for_requests(AHEAD + 40 * MIB);
  requested(0, AHEAD + 40 * MIB, 1);
  requested(AHEAD + 40 * MIB, size, 0);
  read_ahead_reached(ahead, 30 * MIB); // back: all of that has been requested
  wait_for_requests(AHEAD + 40 * MIB);
  read_ahead_reached(ahead, 290 * MIB);
  wait_for_requests(552 * MIB); // whole pieces of 8 MiB
  read_ahead_reached(ahead, 350 * MIB);
  wait_for_requests(size);
  requested(0, size, 1);
  assert_int_equal(watched.end, size);
  becomes(before); // no thread waits for more
  read_ahead_reached(ahead, size);
  wait_for_requests(size);
  read_ahead_destroy(ahead);
  becomes(before);
  unwatch(&file);
}

// What the reader skips is not requested.
static void goes_along_with_a_leap(void **state) {
  (void)state;
  const size_t size = 700 * MIB, leap = 400 * MIB + 4096;
  int before = tasks();
  Mapping file = watch("leap", size);
  ReadAhead *ahead = read_ahead_create(file);
  read_ahead_reached(ahead, 0);
  wait_for_requests(AHEAD);
  read_ahead_reached(ahead, leap);
  wait_for_requests(AHEAD + (AHEAD < size - leap ? AHEAD : size - leap));
  requested(AHEAD, leap, 0);
  requested(leap, leap + AHEAD, 1);
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
    wait_for_requests(sizes[i]);
    requested(0, sizes[i], 1);
    read_ahead_destroy(ahead);
    becomes(before);
    unwatch(&file);
  }
}

// A reader that stops early, while requests are in progress: no thread stays, and nothing is requested afterwards.
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
    int calls = watched.calls; // without the lock: there is no other thread
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

// A reader behind the end requests nothing.
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
  wait_for_requests(20 * MIB);
  read_ahead_destroy(ahead);
  becomes(before);
  unwatch(&file);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(requests_to_the_end_of_the_file),
      cmocka_unit_test(goes_along_with_a_leap),
      cmocka_unit_test(one_piece_and_less),
      cmocka_unit_test(stops_early),
      cmocka_unit_test(a_file_that_is_missing_or_empty),
      cmocka_unit_test(behind_the_end),
      cmocka_unit_test(without_threads),
  };
  return cmocka_run_group_tests_name("reading ahead", tests, make_temp_dir, remove_temp_dir);
}
