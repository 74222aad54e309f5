// The first half of a tokenizer: text cut into pieces by regular expressions (PCRE2, where built with it).
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/fail.h"

enum { SPLIT_MAX = 8 };

// Expressions applied one after the other, each to the pieces of the one before: its matches, and what lies between
// them. Starts as {0}.
typedef struct {
  struct pcre2_real_code_8 *expressions[SPLIT_MAX];
  int count;
} Splitter;

// Adds an expression; false with a reason when it is none, or the program has no PCRE2.
bool splitter_add(Splitter *splitter, const char *expression, Reason *reason);
void splitter_free(Splitter *splitter);

// Calls `piece` for each piece, left to right. False with a reason: no UTF-8, or an expression takes too long on it.
typedef void (*SplitPiece)(void *context, const char *piece, int64_t length);
bool splitter_split(const Splitter *splitter, const char *text, int64_t length, SplitPiece piece,
                    void *context, Reason *reason);

// GPT-2's expression, which tokenizer.json calls ByteLevel with use_regex.
extern const char split_gpt2[];
