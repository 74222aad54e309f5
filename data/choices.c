#include "data/choices.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"

enum { HEADER_INTS = 256, MAGIC = 20240522, VERSION_UINT16 = 1, VERSION_UINT32 = 2, FIXED = 5 };

// --- checking it -------------------------------------------------------------------------------------------

typedef struct {
  Choices *choices;
  int64_t example, vocab_size;
  Reason *reason;
} Check;

// Steps over a list of tokens at `at`, before `end`; returns where it ends, or -1 with a reason.
static int64_t check_list(const Check *c, int64_t at, int64_t end) {
  const int32_t *values = c->choices->values;
  int64_t length = at < end ? values[at] : 0;
  if (length < 1 || length > end - at - 1) {
    refuse(c->reason,
           "has a context or completion of %lld tokens in example %lld, where %lld values are left",
           (long long)length, (long long)c->example, (long long)(end - at - 1));
    return -1;
  }
  for (int64_t i = at + 1; i <= at + length; i++)
    if ((uint32_t)values[i] >= c->vocab_size) {
      refuse(
          c->reason,
          "has the token %u in example %lld and the vocabulary has %lld: it was made with another tokenizer",
          (uint32_t)values[i], (long long)c->example, (long long)c->vocab_size);
      return -1;
    }
  return at + 1 + length;
}

// The example that begins at `at`; returns where it ends, or -1 with a reason.
static int64_t check_example(const Check *c, int64_t at, bool wide) {
  Choices *choices = c->choices;
  const int32_t *v = choices->values + at;
  long long example = c->example;
  int64_t left = choices->value_count - at, bytes_each = wide ? 4 : 2;
  if (left < FIXED || v[0] != (wide ? -1 : UINT16_MAX)) {
    refuse(c->reason, "is damaged: example %lld does not begin where the one before it ends", example);
    return -1;
  }
  int64_t bytes = wide ? (int64_t)(uint32_t)v[1] : v[1], end = at + bytes / bytes_each;
  if (bytes % bytes_each || bytes < FIXED * bytes_each || end > choices->value_count) {
    refuse(c->reason, "is damaged: example %lld says that it has %lld bytes and the file has %lld more",
           example, (long long)bytes, (long long)(left * bytes_each));
    return -1;
  }
  int64_t label = v[3], completions = v[4];
  if (label < 0 || label >= completions) {
    refuse(c->reason, "says that %lld is right of %lld completions in example %lld", (long long)label,
           (long long)completions, example);
    return -1;
  }
  int64_t next = check_list(c, at + FIXED, end);
  for (int64_t i = 0; i < completions && next >= 0; i++) {
    int64_t tokens = (int64_t)v[FIXED] + (next < end ? choices->values[next] : 0);
    next = check_list(c, next, end);
    if (tokens > choices->longest) choices->longest = tokens;
  }
  if (next >= 0 && next != end) {
    refuse(c->reason, "is damaged: example %lld ends %lld values before its bytes do", example,
           (long long)(end - next));
    return -1;
  }
  return next;
}

// The stream as int32; a uint32 above INT32_MAX comes out negative.
static int32_t *widen(const char *bytes, int64_t count, bool wide) {
  int32_t *values = malloc((size_t)(count + 1) * sizeof *values);
  if (!values) fail("out of memory for %lld values of multiple choice", (long long)count);
  for (int64_t i = 0; i < count; i++) {
    uint16_t narrow;
    if (wide)
      memcpy(&values[i], bytes + 4 * i, 4);
    else
      memcpy(&narrow, bytes + 2 * i, 2), values[i] = narrow;
  }
  return values;
}

bool choices_parse(const void *bytes, size_t size, int64_t vocab_size, Choices *c, Reason *reason) {
  int32_t header[HEADER_INTS] = {0};
  *c = (Choices){0};
  if (size >= sizeof header) memcpy(header, bytes, sizeof header);
  if (header[0] != MAGIC || (header[1] != VERSION_UINT16 && header[1] != VERSION_UINT32))
    return refuse(reason,
                  "is no evaluation file of llm.c: it should begin with the magic %d and version %d or %d",
                  MAGIC, VERSION_UINT16, VERSION_UINT32);
  bool wide = header[1] == VERSION_UINT32;
  int64_t values = (int64_t)(size - sizeof header) / (wide ? 4 : 2), count = header[2], at = 0;
  if (count < 1 || count > values)
    return refuse(reason, "says that it holds %lld examples, in %zu bytes", (long long)count, size);
  c->count = count;
  c->value_count = values;
  c->values = widen((const char *)bytes + sizeof header, values, wide);
  c->starts = malloc((size_t)count * sizeof *c->starts);
  if (!c->starts) fail("out of memory for %lld examples", (long long)count);
  for (int64_t i = 0; i < count && at >= 0; i++) {
    c->starts[i] = at;
    at = check_example(&(Check){c, i, vocab_size, reason}, at, wide);
  }
  if (at >= 0 && at < values) {
    refuse(reason, "is damaged: something follows its %lld examples", (long long)count);
    at = -1;
  }
  if (at < 0) choices_close(c);
  return at >= 0;
}

// --- the file ----------------------------------------------------------------------------------------------

Choices choices_open(const char *path, int64_t vocab_size) {
  FILE *file = fopen(path, "rb");
  if (!file) fail("cannot open %s: %s", path, strerror(errno));
  long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
  if (size < 0) fail("cannot read %s: %s", path, strerror(errno));
  rewind(file);
  char *bytes = malloc((size_t)size + 1);
  if (!bytes) fail("out of memory for %s", path);
  if (fread(bytes, 1, (size_t)size, file) != (size_t)size) fail("cannot read %s: %s", path, strerror(errno));
  fclose(file);
  Choices choices;
  Reason reason;
  if (!choices_parse(bytes, (size_t)size, vocab_size, &choices, &reason)) fail("%s %s", path, reason.text);
  free(bytes);
  choices.path = strdup(path);
  if (!choices.path) fail("out of memory for the path %s", path);
  return choices;
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
