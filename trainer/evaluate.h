// Multiple-choice accuracy of a model, as llm.c counts it.
#pragma once

#include "data/choices.h"
#include "trainer/trainer.h"

typedef struct {
  int64_t examples;
  int64_t correct;            // the right completion has the lowest loss summed over its tokens
  int64_t correct_normalized; // the lowest mean loss per token: llm.c's figure, "acc_norm"
  int64_t shortened;          // completions whose context lost its beginning, to fit into seq_len
} ChoiceScore;

// Of the first `examples` (0: all), which the ranks share; every rank gets the whole score. Each completion
// is a row, as many rows at a time as fit the trainer's batch.
ChoiceScore trainer_score_choices(Trainer *trainer, const Choices *choices, int64_t examples);
