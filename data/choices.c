#include "data/choices.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "data/shard.h"

enum { HEADER_INTS = 256, MAGIC = 20240522, VERSION_UINT16 = 1, VERSION_UINT32 = 2, FIXED = 5 };

// --- checking it -------------------------------------------------------------------------------------------

typedef struct {
  Choices *choices;
  int64_t example, at; // at: the next value to check
  int64_t vocab_size;
  Reason *reason;
} Check;

// Steps over a list of tokens before `end`.
static bool check_list(Check *c, int64_t end) {
  const int32_t *list = c->choices->values + c->at;
  int64_t length = c->at < end ? list[0] : 0, left = end - c->at - 1;
  if (length < 1 || length > left)
    return refuse(c->reason,
                  "has a context or completion of %lld tokens in example %lld, where %lld values are left",
                  (long long)length, (long long)c->example, (long long)left);
  for (int64_t i = 1; i <= length; i++)
    if ((uint32_t)list[i] >= c->vocab_size)
      return refuse(
          c->reason,
          "has the token %u in example %lld and the vocabulary has %lld: it was made with another tokenizer",
          (uint32_t)list[i], (long long)c->example, (long long)c->vocab_size);
  c->at += 1 + length;
  return true;
}

// Steps over an example.
static bool check_example(Check *c, bool wide) {
  Choices *choices = c->choices;
  const int32_t *v = choices->values + c->at;
  long long example = c->example;
  int64_t left = choices->value_count - c->at, bytes_each = wide ? 4 : 2;
  if (left < FIXED || v[0] != (wide ? -1 : UINT16_MAX))
    return refuse(c->reason, "is damaged: example %lld does not begin where the one before it ends", example);
  int64_t bytes = wide ? (int64_t)(uint32_t)v[1] : v[1], end = c->at + bytes / bytes_each;
  if (bytes % bytes_each || bytes < FIXED * bytes_each || end > choices->value_count)
    return refuse(c->reason,
                  "is damaged: example %lld says that it has %lld bytes and the file has %lld more", example,
                  (long long)bytes, (long long)(left * bytes_each));
  int64_t label = v[3], completions = v[4];
  if (label < 0 || label >= completions)
    return refuse(c->reason, "says that %lld is right of %lld completions in example %lld", (long long)label,
                  (long long)completions, example);
  c->at += FIXED;
  if (!check_list(c, end)) return false;
  for (int64_t i = 0; i < completions; i++) {
    const int32_t *completion = choices->values + c->at;
    if (!check_list(c, end)) return false;
    if (v[FIXED] + completion[0] > choices->longest) choices->longest = v[FIXED] + completion[0];
  }
  return c->at == end || refuse(c->reason, "is damaged: example %lld ends %lld values before its bytes do",
                                example, (long long)(end - c->at));
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
  int64_t values = (int64_t)(size - sizeof header) / (wide ? 4 : 2), count = header[2];
  if (count < 1 || count > values)
    return refuse(reason, "says that it holds %lld examples, in %zu bytes", (long long)count, size);
  c->count = count;
  c->value_count = values;
  c->values = host_alloc(values, sizeof *c->values, "values of multiple choice");
  ids_widen((const char *)bytes + sizeof header, wide ? 4 : 2, values, c->values);
  c->starts = host_alloc(count, sizeof *c->starts, "examples of multiple choice");
  Check check = {.choices = c, .vocab_size = vocab_size, .reason = reason};
  bool good = true;
  for (; check.example < count && good; check.example++) {
    c->starts[check.example] = check.at;
    good = check_example(&check, wide);
  }
  if (good && check.at < values)
    good = refuse(reason, "is damaged: something follows its %lld examples", (long long)count);
  if (!good) choices_close(c);
  return good;
}

// --- the file ----------------------------------------------------------------------------------------------

Choices choices_open(const char *path, int64_t vocab_size) {
  Mapping file = file_map_or_copy(path, 0, NULL);
  if (!file.bytes) fail("cannot open %s: %s", path, strerror(ENOENT));
  Choices choices;
  Reason reason;
  if (!choices_parse(file.bytes, file.size, vocab_size, &choices, &reason)) fail("%s %s", path, reason.text);
  file_unmap(&file);
  return choices;
}

void choices_close(Choices *c) {
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
