// Text from a model. Keys and values are cached, so that a new token costs one token's arithmetic.
#pragma once

#include <signal.h>

#include "model/transformer.h"

// How a token is drawn from its logits: divide by the temperature, keep the top_k largest, and of these the
// fewest that together have a probability of top_p. Equal logits rank by id.
typedef struct {
  double temperature; // 0 takes the largest logit
  int64_t top_k;      // 0 keeps all
  double top_p;       // 1 keeps all; 0 is read as 1
} Sampling;

// The token at which the cumulative probability of those kept passes `uniform`, in [0, 1).
int32_t sampling_draw(const Sampling *sampling, const float *logits, int64_t vocab_size, double uniform);

typedef struct {
  const int32_t *prompt;
  int64_t prompt_count; // at least 1
  int64_t max_new_tokens;
  int64_t window; // context length: a token attends to at most so many; within the model's positions
  Sampling sampling;
  uint64_t seed;       // token number i is drawn with (seed, i) alone
  const int32_t *stop; // ids that end the text
  int64_t stop_count;
  const volatile sig_atomic_t *cancel;            // not 0: no further token; NULL: nothing cancels
  void (*on_token)(void *context, int32_t token); // called for every new token at once, or NULL
  void *context;
} Generation;

// The prompt and its continuation, a stop id included; the caller frees them. *count receives how many. A
// plan returns NULL and *count 0. Within the window a new token is a pass of one token; beyond it, where all
// positions change, a pass over the window.
int32_t *generate_tokens(Backend *backend, Model *model, const Generation *generation, int64_t *count);
