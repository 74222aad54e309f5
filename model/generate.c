// A prompt enters the cache in chunks, so that the memory does not depend on its length. The last chunk is
// padded: attention only looks back, and the padding's positions are written again before they are read.
#include "model/generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/random.h"

enum { PREFILL_CHUNK = 64, SAMPLE_STREAM = 7 };

static bool outranks(const float *logits, int32_t a, int32_t b) {
  return a < b ? logits[a] >= logits[b] : logits[a] > logits[b];
}

// Restores the heap (the first of all on top) below `at`.
static void sift_down(const float *logits, int32_t *heap, int64_t count, int64_t at) {
  for (int64_t child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && outranks(logits, heap[child + 1], heap[child])) child++;
    if (!outranks(logits, heap[child], heap[at])) return;
    int32_t moved = heap[at];
    heap[at] = heap[child];
    heap[child] = moved;
  }
}

// Pops the likeliest to the array's end, the first one last, until `max` or they weigh `enough`.
static int64_t pop_likeliest(const float *logits, int32_t *heap, int64_t count, int64_t max, double enough,
                             const double *weights) {
  for (int64_t i = count / 2; i-- > 0;) sift_down(logits, heap, count, i);
  double popped = 0;
  int64_t kept = 0;
  while (kept < max && (kept == 0 || popped < enough)) {
    int64_t last = count - 1 - kept++;
    int32_t top = heap[0];
    heap[0] = heap[last];
    heap[last] = top;
    sift_down(logits, heap, last, 0);
    popped += weights[top];
  }
  return kept;
}

static double sum_of(const double *weights, const int32_t *ids, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += weights[ids[i]];
  return sum;
}

int32_t sampling_draw(const Sampling *s, const float *logits, int64_t vocab_size, double uniform) {
  int32_t best = 0;
  for (int64_t v = 0; v < vocab_size; v++) {
    if (!(logits[v] < INFINITY))
      fail("the logit of token %lld is %g: some weight is NaN or infinite", (long long)v, logits[v]);
    if (logits[v] > logits[best]) best = (int32_t)v;
  }
  if (s->temperature == 0) return best;
  double *weights = host_alloc(vocab_size, sizeof *weights, "a draw");
  int32_t *ids = host_alloc(vocab_size, sizeof *ids, "a draw");
  for (int64_t v = 0; v < vocab_size; v++) {
    weights[v] = exp((double)(logits[v] - logits[best]) / s->temperature);
    ids[v] = (int32_t)v;
  }
  int64_t kept = vocab_size;
  if (s->top_k > 0 && s->top_k < kept)
    kept = pop_likeliest(logits, ids, vocab_size, s->top_k, INFINITY, weights);
  if (s->top_p > 0 && s->top_p < 1) {
    double enough = s->top_p * sum_of(weights, ids + vocab_size - kept, kept);
    kept = pop_likeliest(logits, ids, vocab_size, kept, enough, weights);
  }
  const int32_t *candidates = ids + vocab_size - kept;
  double passing = uniform * sum_of(weights, candidates, kept), passed = 0;
  int32_t drawn = best;
  for (int64_t i = 0; i < kept && passed <= passing; i++) {
    passed += weights[candidates[i]];
    if (passed > passing) drawn = candidates[i];
  }
  free(weights);
  free(ids);
  return drawn;
}

typedef struct {
  Backend *backend;
  Model *model;
  KeyValueCache cache;
  Tensor tokens; // int32 [chunk]
  Tensor row;    // int32 [1]
  Tensor logits; // fp32 [1, V]
  int64_t chunk;
  int64_t start;  // the token at position 0
  int64_t cached; // how many tokens from there on are in the cache
} Decoder;

// A pass over `length` tokens from the text's token start + past on; predicts from the row-th, if any.
static void pass(const Decoder *d, const int32_t *tokens, int64_t past, int64_t length, int64_t row) {
  Batch batch = {.batch = 1, .seq_len = length, .tokens = tensor_rows(d->tokens, 0, length)};
  if (tokens) backend_to_device(d->backend, batch.tokens, tokens + d->start + past);
  bool predicts = row < length;
  int32_t wanted = (int32_t)row;
  if (predicts && tokens) backend_to_device(d->backend, d->row, &wanted);
  transformer_logits(d->backend, d->model, &batch, &d->cache, past, predicts ? d->row : (Tensor){0},
                     predicts ? d->logits : (Tensor){0});
}

// Makes d->logits those of the token after tokens[0..have), which `chunk` tokens of padding follow.
static void predict(Decoder *d, const int32_t *tokens, int64_t have) {
  if (have - d->start > d->cache.capacity) {
    d->start = have - d->cache.capacity;
    d->cached = 0;
  }
  int64_t last = have - d->start - 1;
  while (d->cached <= last) {
    int64_t length = d->cached > 0 && d->cached == last ? 1 : d->chunk;
    int64_t past = min_i64(d->cached, d->cache.capacity - length);
    pass(d, tokens, past, length, last - past);
    d->cached = min_i64(past + length, last + 1);
  }
}

static int32_t *write_text(Decoder *d, const Generation *g, int64_t *count) {
  double cap = d->model->config.final_logit_softcapping;
  int64_t vocab_size = d->model->config.vocab_size, end = g->prompt_count + g->max_new_tokens;
  int32_t *tokens = host_alloc(end + d->chunk, sizeof *tokens, "a text");
  float *logits = host_alloc(vocab_size, sizeof *logits, "a text");
  memcpy(tokens, g->prompt, (size_t)g->prompt_count * sizeof *tokens);
  int64_t have = g->prompt_count;
  for (bool stopped = false; have < end && !stopped; have++) {
    predict(d, tokens, have);
    backend_to_host(d->backend, logits, d->logits);
    for (int64_t v = 0; cap > 0 && v < vocab_size; v++)
      logits[v] = (float)(cap * tanh((double)logits[v] / cap));
    double uniform = random_uniform(g->seed, SAMPLE_STREAM, (uint64_t)have);
    tokens[have] = sampling_draw(&g->sampling, logits, vocab_size, uniform);
    if (g->on_token) g->on_token(g->context, tokens[have]);
    stopped = g->cancel && *g->cancel;
    for (int64_t i = 0; i < g->stop_count; i++) stopped |= g->stop[i] == tokens[have];
  }
  free(logits);
  *count = have;
  return tokens;
}

int32_t *generate_tokens(Backend *backend, Model *model, const Generation *g, int64_t *count) {
  Memory *memory = &backend->memory;
  bool planning = memory->planning;
  if (!planning && g->prompt_count < 1) fail("a text needs a prompt of at least one token to begin with");
  MemoryMark mark = memory_mark(memory);
  Decoder d = {.backend = backend, .model = model, .chunk = min_i64(g->window, PREFILL_CHUNK)};
  d.logits =
      memory_push_2d(memory, "sampled logits", MEMORY_WORKSPACE, DTYPE_F32, 1, model->config.vocab_size);
  d.tokens = memory_push_1d(memory, "sampled tokens", MEMORY_WORKSPACE, DTYPE_I32, d.chunk);
  d.row = memory_push_1d(memory, "sampled row", MEMORY_WORKSPACE, DTYPE_I32, 1);
  d.cache = key_value_cache_push(backend, &model->config, 1, g->window);
  int32_t *tokens = NULL;
  *count = 0;
  if (planning)
    pass(&d, NULL, 0, d.chunk, 0);
  else
    tokens = write_text(&d, g, count);
  memory_pop_to(memory, mark);
  return tokens;
}
