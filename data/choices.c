#include "data/choices.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"

enum { HEADER_INTS = 256, MAGIC = 20240522, VERSION_UINT16 = 1, VERSION_UINT32 = 2, FIXED = 5 };

// --- reading the file --------------------------------------------------------------------------------------

static FILE *open_file(const char *path, int64_t *bytes) {
  FILE *file = fopen(path, "rb");
  if (!file) fail("cannot open %s: %s", path, strerror(errno));
  if (fseek(file, 0, SEEK_END) != 0 || (*bytes = ftell(file)) < 0)
    fail("cannot read %s: %s", path, strerror(errno));
  rewind(file);
  return file;
}

// The stream as int32; a uint32 above INT32_MAX comes out negative.
static void read_values(Choices *c, FILE *file, bool wide) {
  size_t count = (size_t)c->value_count, size = wide ? 4 : 2;
  c->values = malloc(count * sizeof *c->values + 4);
  if (!c->values) fail("out of memory for %s", c->path);
  char *raw = (char *)c->values + count * (sizeof *c->values - size); // widened in place, from the front
  if (fread(raw, size, count, file) != count) fail("cannot read %s: %s", c->path, strerror(errno));
  for (size_t i = 0; i < count && !wide; i++) {
    uint16_t value;
    memcpy(&value, raw + 2 * i, sizeof value);
    c->values[i] = value;
  }
}

// --- checking it -------------------------------------------------------------------------------------------

// Steps over a list of tokens at `at` within the example's end; returns where it ends.
static int64_t check_list(const Choices *c, int64_t example, int64_t at, int64_t end, int64_t vocab_size) {
  int64_t length = at < end ? c->values[at] : 0;
  if (length < 1 || length > end - at - 1)
    fail("%s: example %lld has a context or completion of %lld tokens where %lld values are left", c->path,
         (long long)example, (long long)length, (long long)(end - at - 1));
  for (int64_t i = at + 1; i <= at + length; i++)
    if ((uint32_t)c->values[i] >= vocab_size)
      fail(
          "%s: example %lld has the token %u and the vocabulary has %lld: it was made with another tokenizer",
          c->path, (long long)example, (uint32_t)c->values[i], (long long)vocab_size);
  return at + 1 + length;
}

// The example that begins at `at`; returns where it ends.
static int64_t check_example(Choices *c, int64_t example, int64_t at, bool wide, int64_t vocab_size) {
  const int32_t *v = c->values + at;
  int64_t left = c->value_count - at, bytes_each = wide ? 4 : 2;
  if (left < FIXED || v[0] != (wide ? -1 : UINT16_MAX))
    fail("%s is damaged: example %lld does not begin where the one before it ends", c->path,
         (long long)example);
  int64_t bytes = wide ? (int64_t)(uint32_t)v[1] : v[1], end = at + bytes / bytes_each;
  if (bytes % bytes_each || bytes < FIXED * bytes_each || end > c->value_count)
    fail("%s is damaged: example %lld says that it has %lld bytes and the file has %lld more", c->path,
         (long long)example, (long long)bytes, (long long)(left * bytes_each));
  int64_t label = v[3], completions = v[4];
  if (label < 0 || label >= completions)
    fail("%s: example %lld says that %lld is right of %lld completions", c->path, (long long)example,
         (long long)label, (long long)completions);
  int64_t next = check_list(c, example, at + FIXED, end, vocab_size), context = v[FIXED];
  for (int64_t i = 0; i < completions; i++) {
    int64_t tokens = context + (next < end ? c->values[next] : 0);
    next = check_list(c, example, next, end, vocab_size);
    if (tokens > c->longest) c->longest = tokens;
  }
  if (next != end)
    fail("%s is damaged: example %lld ends %lld values before its bytes do", c->path, (long long)example,
         (long long)(end - next));
  return end;
}

Choices choices_open(const char *path, int64_t vocab_size) {
  int64_t bytes;
  FILE *file = open_file(path, &bytes);
  int32_t header[HEADER_INTS] = {0};
  size_t got = fread(header, sizeof *header, HEADER_INTS, file);
  if (got < HEADER_INTS || header[0] != MAGIC || (header[1] != VERSION_UINT16 && header[1] != VERSION_UINT32))
    fail("%s is no evaluation file of llm.c: it should begin with the magic %d and version %d or %d", path,
         MAGIC, VERSION_UINT16, VERSION_UINT32);
  bool wide = header[1] == VERSION_UINT32;
  Choices c = {.path = strdup(path),
               .count = header[2],
               .value_count = (bytes - (int64_t)sizeof header) / (wide ? 4 : 2)};
  if (!c.path) fail("out of memory for the path %s", path);
  if (c.count < 1 || c.count > c.value_count)
    fail("%s says that it holds %lld examples, in %lld bytes", path, (long long)c.count, (long long)bytes);
  read_values(&c, file, wide);
  fclose(file);
  c.starts = malloc((size_t)c.count * sizeof *c.starts);
  if (!c.starts) fail("out of memory for the %lld examples of %s", (long long)c.count, path);
  int64_t at = 0;
  for (int64_t i = 0; i < c.count; i++) {
    c.starts[i] = at;
    at = check_example(&c, i, at, wide, vocab_size);
  }
  if (at != c.value_count)
    fail("%s is damaged: something follows its %lld examples", path, (long long)c.count);
  return c;
}

void choices_close(Choices *c) {
  free(c->path);
  free(c->values);
  free(c->starts);
  *c = (Choices){0};
}

// --- examples ----------------------------------------------------------------------------------------------

Choice choices_get(const Choices *c, int64_t example) {
  const int32_t *v = c->values + c->starts[example];
  return (Choice){.label = v[3],
                  .completion_count = v[4],
                  .context = v + FIXED + 1,
                  .context_length = v[FIXED],
                  .completions = v + FIXED + 1 + v[FIXED]};
}

const int32_t *choice_completion(const Choice *choice, int64_t completion, int64_t *length) {
  const int32_t *at = choice->completions;
  for (int64_t i = 0; i < completion; i++) at += 1 + at[0];
  *length = at[0];
  return at + 1;
}
