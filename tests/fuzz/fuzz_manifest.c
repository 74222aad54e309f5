// checksums.json, the manifest of a checkpoint, out of the fuzzer's bytes, in a folder with two files.
// Whatever is accepted must have been there: a name that leads out of the folder, or a file that is not as
// listed, must not.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "model/checkpoint/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[] = "/tmp/fuzz_manifest.XXXXXX";

static void put(const char *name, const void *bytes, size_t count) {
  char *path = path_join(folder, name);
  int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0 || write(descriptor, bytes, count) != (ssize_t)count || close(descriptor)) abort();
  free(path);
}

static void leave(void) {
  put(CHECKSUMS, "{\"a\":0,\"b\":0}", 13);
  folder_remove(folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const struct { const char *name, *bytes; } files[] = {{"a", "123456789"}, {"b", ""}};
  static bool ready;
  if (!ready) {
    if (!mkdtemp(folder) || atexit(leave)) abort();
    for (int i = 0; i < 2; i++) put(files[i].name, files[i].bytes, strlen(files[i].bytes));
    ready = true;
  }
  put(CHECKSUMS, data, size);
  Reason reason;
  bool lengths = folder_intact(folder, CHECK_LENGTHS, NULL, &reason);
  bool all = folder_intact(folder, CHECK_ALL, NULL, &reason);
  if (all && !lengths) abort();
  if (!all) return 0;
  cJSON *json = json_parse((const char *)data, size, &reason);
  if (!json) abort();
  const cJSON *entry;
  cJSON_ArrayForEach(entry, json) {
    bool known = false;
    for (int i = 0; i < 2; i++) {
      char crc[16];
      snprintf(crc, sizeof crc, "%08x", checksum(0, files[i].bytes, strlen(files[i].bytes)));
      known |= !strcmp(entry->string, files[i].name) &&
               !strcmp(cJSON_GetObjectItemCaseSensitive(entry, "crc32")->valuestring, crc);
    }
    if (!known) abort();
  }
  cJSON_Delete(json);
  return 0;
}
