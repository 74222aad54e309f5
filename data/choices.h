// Multiple choice (HellaSwag, Zellers et al. 2019; MMLU): contexts with completions, in llm.c's evaluation files.
//
// A file is 256 int32 of header (magic 20240522, version, number of examples, bytes of the longest example),
// then the examples. Version 1 holds uint16 and version 2 uint32, little-endian; an example is
//     the largest value there is, the example's bytes (all of it), its number from 0, the right completion's
//     number, how many completions; then the context and each completion: how many tokens, then the tokens.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fail.h"

typedef struct {
  int32_t *values; // the stream after the header
  int64_t value_count;
  int64_t *starts; // where each example begins in it
  int64_t count;   // examples
  int64_t longest; // tokens of the longest context with a completion
} Choices;

// Reads the whole file. Fails naming file and example when it is damaged or an id is at or above vocab_size.
Choices choices_open(const char *path, int64_t vocab_size);
// The same from the file's bytes; false with a reason, which reads on from the file's name.
bool choices_parse(const void *bytes, size_t size, int64_t vocab_size, Choices *choices, Reason *reason);
void choices_close(Choices *choices);

// One example; the pointers are into the stream.
typedef struct {
  int64_t label, completion_count;
  const int32_t *context, *completions; // completions: each a length, then its tokens
  int64_t context_length;
} Choice;

Choice choices_get(const Choices *choices, int64_t example);
// The tokens of one of its completions; *length receives how many.
const int32_t *choice_completion(const Choice *choice, int64_t completion, int64_t *length);
