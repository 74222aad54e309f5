#include "trainer/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/integers.h"

// Rows of `width` inputs in the trainer's buffers, and the summed losses of those that are done.
typedef struct {
  Trainer *trainer;
  int64_t width, capacity; // capacity rows at a time
  int64_t filled;          // rows waiting
  float *losses;           // host [capacity * width]
  double *sums;            // of every row so far
  int64_t done;
} Rows;

// Evaluates the waiting rows.
static void flush(Rows *r) {
  if (!r->filled) return;
  Trainer *t = r->trainer;
  Batch batch = trainer_batch(t, 0, r->filled, r->width, true);
  Tensor loss = tensor_rows(t->loss, 0, r->filled * r->width);
  transformer_evaluate(t->backend, trainer_model(t), &batch, &t->transformer, loss);
  backend_to_host(t->backend, r->losses, loss);
  for (int64_t row = 0; row < r->filled; row++) {
    double sum = 0;
    for (int64_t i = 0; i < r->width; i++) sum += (double)r->losses[row * r->width + i];
    if (!isfinite(sum))
      fail("%s: the loss of a completion is %g; there is NaN or infinity among the weights",
           t->options->hellaswag, sum);
    r->sums[r->done++] = sum;
  }
  r->filled = 0;
}

// Appends a context with a completion, whose tokens count; returns how many. The last of them is predicted and never
// read, so a row of width w takes w + 1 tokens; where that is too few the context's beginning is left out.
static int64_t add_row(Rows *r, const Choice *choice, const int32_t *completion, int64_t length,
                       bool *shortened) {
  Trainer *t = r->trainer;
  int32_t *tokens = t->host_tokens + r->filled * r->width, *targets = t->host_targets + r->filled * r->width;
  int64_t all = choice->context_length + length, skipped = all > r->width + 1 ? all - r->width - 1 : 0;
  int64_t counted = 0;
  for (int64_t i = 0; i < r->width; i++) {
    int64_t at = skipped + i, next = at + 1;
    bool read = next < all, counts = read && next >= choice->context_length;
    tokens[i] = !read                         ? 0
                : at < choice->context_length ? choice->context[at]
                                              : completion[at - choice->context_length];
    targets[i] = counts ? completion[next - choice->context_length] : IGNORE_INDEX;
    counted += counts;
  }
  *shortened = skipped > 0;
  if (++r->filled == r->capacity) flush(r);
  return counted;
}

static int64_t argmin(const double *values, const int64_t *divisors, int64_t count) {
  int64_t best = 0;
  double lowest = INFINITY;
  for (int64_t i = 0; i < count; i++) {
    double value = divisors ? values[i] / (double)divisors[i] : values[i];
    if (value < lowest) lowest = value, best = i;
  }
  return best;
}

static void sum_over_ranks(Trainer *t, ChoiceScore *score) {
  ChoiceScore *all = host_alloc(t->backend->ranks, sizeof *all, "the scores of all ranks");
  trainer_gather(t, score, all, sizeof *score);
  *score = (ChoiceScore){.examples = score->examples};
  for (int r = 0; r < t->backend->ranks; r++) {
    score->correct += all[r].correct;
    score->correct_normalized += all[r].correct_normalized;
    score->shortened += all[r].shortened;
  }
  free(all);
}

ChoiceScore trainer_score_choices(Trainer *t, const Choices *choices, int64_t examples) {
  if (!examples || examples > choices->count) examples = choices->count;
  int64_t seq_len = t->options->seq_len, tokens = t->options->batch * seq_len;
  Rows r = {.trainer = t, .width = min_i64(choices->longest - 1, seq_len)};
  r.capacity = tokens / r.width;
  int64_t all_rows = 1;                                             // at least one row on every rank
  const int64_t rank = t->backend->rank, ranks = t->backend->ranks; // example e is rank e % ranks'
  for (int64_t e = rank; e < examples; e += ranks) all_rows += choices_get(choices, e).completion_count;
  int64_t *counts = host_alloc(all_rows, sizeof *counts, "multiple choice");
  r.sums = host_alloc(all_rows, sizeof *r.sums, "multiple choice");
  r.losses = host_alloc(tokens, sizeof *r.losses, "multiple choice");

  ChoiceScore score = {.examples = examples};
  Model *model = trainer_model(t);
  MemoryMark mark = model_gather_head(model, t->backend);
  int64_t row = 0, length;
  for (int64_t e = rank; e < examples; e += ranks) {
    Choice choice = choices_get(choices, e);
    for (int64_t i = 0; i < choice.completion_count; i++) {
      bool shortened;
      const int32_t *completion = choice_completion(&choice, i, &length);
      counts[row++] = add_row(&r, &choice, completion, length, &shortened);
      score.shortened += shortened;
    }
  }
  flush(&r);
  model_drop_head(model, t->backend, mark);
  row = 0;
  for (int64_t e = rank; e < examples; e += ranks) {
    Choice choice = choices_get(choices, e);
    score.correct += argmin(r.sums + row, NULL, choice.completion_count) == choice.label;
    score.correct_normalized += argmin(r.sums + row, counts + row, choice.completion_count) == choice.label;
    row += choice.completion_count;
  }
  free(counts);
  free(r.sums);
  free(r.losses);
  if (ranks > 1) sum_over_ranks(t, &score);
  return score;
}
