// An evaluation file out of the fuzzer's bytes. What is accepted must be readable to its last completion,
// with tokens of the vocabulary only.
#include <stdlib.h>

#include "data/choices.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  enum { VOCABULARY = 50257 };
  Choices choices;
  Reason reason;
  if (!choices_parse(data, size, VOCABULARY, &choices, &reason)) return 0;
  for (int64_t e = 0; e < choices.count; e++) {
    Choice choice = choices_get(&choices, e);
    if (choice.label >= choice.completion_count || choice.context_length < 1) abort();
    for (int64_t i = 0; i < choice.completion_count; i++) {
      int64_t length;
      const int32_t *tokens = choice_completion(&choice, i, &length);
      if (length < 1 || choice.context_length + length > choices.longest) abort();
      for (int64_t k = 0; k < length; k++)
        if (tokens[k] < 0 || tokens[k] >= VOCABULARY) abort();
    }
  }
  choices_close(&choices);
  return 0;
}
