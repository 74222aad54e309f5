// Token ids that change while a run reads them: the fuzzer's bytes go over the tokens of a shard that was
// valid when it was opened. Every id of every batch must then lie in the vocabulary, or the read must fail.
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/loader.h"
#include "kernels/base/fail.h"

// Smaller files would be copied when they are opened.
enum { VOCABULARY = 300, TOKENS = 33000, SEQ_LEN = 255, BATCH = 3 };

static jmp_buf failed;
static char path[] = "/tmp/fuzz_source.XXXXXX.bin";

static void jump(const char *sentence) {
  (void)sentence;
  longjmp(failed, 1);
}

static void remove_file(void) {
  unlink(path);
}

static void write_all(int file, const void *bytes, size_t count, size_t at) {
  if (pwrite(file, bytes, count, (off_t)at) != (ssize_t)count) abort();
}

static void check(const int32_t *ids, bool targets) {
  for (int i = 0; i < BATCH * SEQ_LEN; i++)
    if ((ids[i] < 0 || ids[i] >= VOCABULARY) && !(targets && ids[i] == IGNORED_TARGET)) abort();
}

static void read_all(const Loader *loader) {
  int32_t tokens[BATCH * SEQ_LEN], targets[BATCH * SEQ_LEN];
  for (int64_t step = 0; step * BATCH < loader->train_windows; step++) {
    loader_train_batch(loader, step, 0, 1, tokens, targets, NULL);
    check(tokens, false);
    check(targets, true);
  }
  for (int64_t i = 0; i < loader->validation_batches; i++) {
    loader_validation_batch(loader, i, 0, tokens, targets, NULL);
    check(tokens, false);
    check(targets, true);
  }
}

static int make_file(void) {
  int32_t header[256] = {20240801, 7, TOKENS};
  int file = mkstemps(path, 4);
  if (file < 0) abort();
  atexit(remove_file);
  write_all(file, header, sizeof header, 0);
  if (ftruncate(file, sizeof header + TOKENS * sizeof(int32_t))) abort();
  return file;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const uint8_t zeros[4096];
  static int file = -1;
  const char *paths[] = {path};
  if (size < 2 || size > sizeof zeros) return 0;
  if (file < 0) file = make_file();
  size_t header = 256 * sizeof(int32_t), at = header + (size_t)(data[0] | data[1] << 8);
  Source *source = source_open(paths, 1, VOCABULARY, SPLIT_NONE);
  write_all(file, data + 2, size - 2, at);
  fail_set_handler(jump);
  if (!setjmp(failed)) {
    Loader loader = loader_create((LoaderOptions){
        .source = source, .validation_fraction = 0.2, .batch = BATCH, .seq_len = SEQ_LEN, .seed = 1});
    read_all(&loader);
  }
  fail_set_handler(NULL);
  source_close(source);
  write_all(file, zeros, size - 2, at);
  return 0;
}
