// How fast is the last layer, what does it hold, and what do its terms cost? Times the fused layer at each
// chunk, and with --materialized the other mode, each in turn with the three bare products that no
// implementation can do without (logits = X W^T, dX = L W, dW = L^T X over all tokens at once); with --terms
// also the fused layer with one term of the loss after the other, in turn with the layer without it. Prints
// medians, the medians of the ratios to what it was in turn with, and the bytes that the layer holds. Only
// ratios of neighbours mean anything: a GPU at its power limit is slower after harder work.
//
// The filter comes last, and twice: with nothing to leave out, and with seven eighths of the tiles
// (make_filterable), each beside the layer without it on the same weights.
//
// Started as several ranks, it also times the layer with the head split over them (--vocab-parallel of
// ./train), where every rank has so many tokens, against the whole layer on every rank by itself: the same
// work for each. A time is then the slowest rank's.
//
//   tools/bench_lce --tokens 1024 --hidden-size 256 --vocab 128256
//   tools/bench_lce --device cuda --tokens 16384 --hidden-size 2048 --vocab 131072 --chunk 4096,2048,1024 --terms
//   tools/launch 4 tools/bench_lce --device cuda --tokens 16384 --hidden-size 4096 --vocab 128256
#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "base/text.h"
#include "kernels/ranks/ranks.h"
#include "tools/curves/layer.h"
#include "trainer/speed.h"

enum { CHUNKS_MOST = 8, ROUNDS_MOST = 99 };

typedef struct {
  int64_t tokens, hidden_size, vocab_size, repeat;
  int64_t chunks[CHUNKS_MOST];
  int chunk_count;
  const char *device;
  bool materialized, terms;
} Settings;

enum {
  KEY_TOKENS = 256,
  KEY_HIDDEN,
  KEY_VOCAB,
  KEY_CHUNK,
  KEY_DEVICE,
  KEY_REPEAT,
  KEY_MATERIALIZED,
  KEY_TERMS
};

static const struct argp_option option_table[] = {
    {"tokens", KEY_TOKENS, "N", 0, "Tokens (default 1024)", 0},
    {"hidden-size", KEY_HIDDEN, "H", 0, "Hidden size (default 256)", 0},
    {"vocab", KEY_VOCAB, "V", 0, "Vocabulary (default 128256)", 0},
    {"chunk", KEY_CHUNK, "C[,C...]", 0,
     "Tokens per chunk (default: the most that holds an eighth of what the materialized mode holds)", 0},
    {"device", KEY_DEVICE, "cpu|cuda", 0, "Where to run (default cpu)", 0},
    {"repeat", KEY_REPEAT, "R", 0, "Rounds, of which the median counts (default 7)", 0},
    {"materialized", KEY_MATERIALIZED, NULL, 0, "Time the materialized mode, too", 0},
    {"terms", KEY_TERMS, NULL, 0, "Time the fused layer with each term of the loss, at the first chunk", 0},
    {0}};

static int64_t positive(const char *name, const char *text, int64_t most) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (errno || end == text || *end || value < 1 || value > most)
    fail("--%s %s: give a whole number from 1 to %lld", name, text, (long long)most);
  return value;
}

static error_t parse_option(int key, char *argument, struct argp_state *state) {
  Settings *o = state->input;
  switch (key) {
  case KEY_TOKENS:
    o->tokens = positive("tokens", argument, INT32_MAX);
    return 0;
  case KEY_HIDDEN:
    o->hidden_size = positive("hidden-size", argument, INT32_MAX);
    return 0;
  case KEY_VOCAB:
    o->vocab_size = positive("vocab", argument, INT32_MAX);
    return 0;
  case KEY_CHUNK:
    for (char *chunk = strtok(argument, ","); chunk; chunk = strtok(NULL, ",")) {
      if (o->chunk_count == CHUNKS_MOST) fail("--chunk: give at most %d", CHUNKS_MOST);
      o->chunks[o->chunk_count++] = positive("chunk", chunk, INT32_MAX);
    }
    return 0;
  case KEY_REPEAT:
    o->repeat = positive("repeat", argument, ROUNDS_MOST);
    return 0;
  case KEY_MATERIALIZED:
    o->materialized = true;
    return 0;
  case KEY_TERMS:
    o->terms = true;
    return 0;
  case KEY_DEVICE:
    if (strcmp(argument, "cpu") && strcmp(argument, "cuda")) fail("--device %s: give cpu or cuda", argument);
    o->device = argument;
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

// --- what is timed -----------------------------------------------------------------------------------------

typedef struct {
  char name[64];
  LinearCrossEntropy call; // of the layer; the bare products have none (chunk 0)
  size_t held;
  double times[ROUNDS_MOST], ratios[ROUNDS_MOST];
} Work;

enum { WORKS_MOST = 2 * CHUNKS_MOST + 14 };

typedef struct {
  const Settings *settings;
  LastLayer layer;
  Tensor bias, dbias, class_weights, token_weights, entropy_weights, told, filtered; // what terms need
  Work works[WORKS_MOST];
  Tensor barrier;                     // fp32 [1]
  int count, first_split, first_term; // terms come last
} Bench;

static Tensor reserve_vector(Backend *backend, const char *name, Dtype dtype, int64_t count, bool ones) {
  size_t bytes = (size_t)count * dtype_bytes(dtype);
  Tensor t = tensor_1d(memory_reserve(&backend->memory, name, MEMORY_TABLES, bytes), dtype, count);
  fill_zero(backend, t);
  if (!ones) return t;
  float *values = malloc(bytes);
  if (!values) fail("out of host memory for %s", name);
  for (int64_t i = 0; i < count; i++) values[i] = 1;
  backend_to_device(backend, t, values);
  backend_synchronize(backend);
  free(values);
  return t;
}

// What a call pushes at its peak, by running it.
static size_t held_by(Backend *backend, LinearCrossEntropy call) {
  Ledger *ledger = &backend->memory.ledger;
  size_t before = ledger->stack;
  ledger->stack_peak = before;
  linear_cross_entropy(backend, call);
  backend_synchronize(backend);
  return ledger->stack_peak - before;
}

static Work *add_work(Bench *b, const char *name, LinearCrossEntropy call) {
  Work *work = &b->works[b->count++];
  snprintf(work->name, sizeof work->name, "%s", name);
  work->call = call;
  return work;
}

static void add_terms(Bench *b, int64_t chunk) {
  const LinearCrossEntropy plain = layer_call(&b->layer, LCE_FUSED, chunk);
  LinearCrossEntropy call;
  call = plain, call.mean = true;
  add_work(b, "+ mean on the device", call);
  call = plain, call.token_weights = b->token_weights;
  add_work(b, "+ token weights", call);
  call = plain, call.terms.class_weights = b->class_weights;
  add_work(b, "+ class weights", call);
  call = plain, call.terms.z_loss = 1e-4f, call.outputs.z_loss = b->told;
  add_work(b, "+ z-loss", call);
  call = plain, call.terms.label_smoothing = 0.1f;
  add_work(b, "+ label smoothing", call);
  call = plain, call.terms.temperature = 0.7f;
  add_work(b, "+ temperature", call);
  call = plain, call.terms.softcap = 30;
  add_work(b, "+ soft-cap", call);
  call = plain, call.bias = b->bias, call.dbias = b->dbias;
  add_work(b, "+ bias", call);
  call = plain, call.entropy_weights = b->entropy_weights, call.outputs.entropy = b->told;
  add_work(b, "+ entropy", call);
  call = plain, call.filtered = b->filtered, call.terms.filter = 1e-30f;
  add_work(b, "+ filter of nothing", call);
  call.terms.filter = 2.0f / (float)b->settings->vocab_size;
  add_work(b, "+ filter", call);
}

// The layer with this rank's rows of the head.
static LinearCrossEntropy split_call(const LastLayer *layer, int64_t chunk) {
  const Backend *backend = layer->backend;
  LinearCrossEntropy call = layer_call(layer, LCE_FUSED, chunk);
  int64_t vocab_size = layer->weight.shape[0], part = (vocab_size + backend->ranks - 1) / backend->ranks;
  int64_t first = backend->rank * part, rows = vocab_size - first < part ? vocab_size - first : part;
  if (rows < 1) fail("--vocab %lld cannot be split over %d ranks", (long long)vocab_size, backend->ranks);
  call.weight = tensor_rows(layer->weight, first, rows);
  call.dweight = tensor_rows(layer->dweight, first, rows);
  call.shard = (VocabShard){.first = first, .vocab_size = vocab_size};
  return call;
}

static void prepare(Bench *b) {
  const Settings *o = b->settings;
  Backend *backend = b->layer.backend;
  add_work(b, "three bare products", (LinearCrossEntropy){.chunk = 0});
  for (int i = 0; i < o->chunk_count; i++) {
    LinearCrossEntropy call = layer_call(&b->layer, LCE_FUSED, o->chunks[i]);
    snprintf(add_work(b, "", call)->name, sizeof b->works->name, "fused, chunk %lld",
             (long long)o->chunks[i]);
  }
  if (o->materialized) add_work(b, "materialized", layer_call(&b->layer, LCE_MATERIALIZED, 1));
  b->first_split = b->count;
  for (int i = 0; i < o->chunk_count && backend->ranks > 1; i++) {
    LinearCrossEntropy call = split_call(&b->layer, o->chunks[i]);
    snprintf(add_work(b, "", call)->name, sizeof b->works->name, "split, chunk %lld",
             (long long)o->chunks[i]);
  }
  b->barrier = reserve_vector(backend, "barrier", DTYPE_F32, 1, false);
  b->first_term = b->count;
  if (!o->terms) return;
  b->bias = reserve_vector(backend, "bias", backend->dtype, o->vocab_size, false);
  b->dbias = reserve_vector(backend, "dbias", DTYPE_F32, o->vocab_size, false);
  b->class_weights = reserve_vector(backend, "class weights", DTYPE_F32, o->vocab_size, true);
  b->token_weights = reserve_vector(backend, "token weights", DTYPE_F32, o->tokens, true);
  b->entropy_weights = reserve_vector(backend, "entropy weights", DTYPE_F32, o->tokens, true);
  b->told = reserve_vector(backend, "told", DTYPE_F32, o->tokens, false);
  b->filtered = reserve_vector(backend, "what is filtered", DTYPE_F32, 3, false);
  add_terms(b, o->chunks[0]);
}

// Something to filter: all but the first eighth of the vocabulary gets a logit of 0, and so a probability of
// about 1 / V, while every tile before has some of more than 2 / V.
static void make_filterable(Bench *b) {
  int64_t vocab_size = b->settings->vocab_size;
  int64_t first = vocab_size / 8 / LCE_FILTER_COLUMNS * LCE_FILTER_COLUMNS;
  fill_zero(b->layer.backend, tensor_rows(b->layer.weight, first, vocab_size - first));
}

static void report_filtered(const Bench *b) {
  float told[3];
  backend_to_host(b->layer.backend, told, b->filtered);
  printf("   %.1f%% of the tiles, a mass of %.3g per token", 100 * (double)(told[0] / told[1]),
         (double)told[2] / (double)b->settings->tokens);
}

static void wait_for_all(const Bench *b) {
  Backend *backend = b->layer.backend;
  if (backend->ranks > 1) all_reduce(backend, (Collective){.out = b->barrier, .x = b->barrier});
  backend_synchronize(backend);
}

static double seconds(const Bench *b, const Work *work) {
  Backend *backend = b->layer.backend;
  wait_for_all(b);
  double start = now_seconds();
  if (work->call.chunk)
    linear_cross_entropy(backend, work->call);
  else
    layer_gemms(&b->layer, b->settings->tokens);
  wait_for_all(b);
  return now_seconds() - start;
}

// Times both in turn, `work` also as a ratio to the turn's time of `base`. Before that they run in turn untimed,
// for a GPU settles at its power limit only after a while.
static void time_in_turn(Bench *b, Work *base, Work *work) {
  const double settled = 0.7;
  for (double warm = 0; warm < settled;) warm += seconds(b, base) + seconds(b, work);
  for (int64_t round = 0; round < b->settings->repeat; round++) {
    base->times[round] = seconds(b, base);
    base->ratios[round] = 1;
    work->times[round] = seconds(b, work);
    work->ratios[round] = work->times[round] / base->times[round];
  }
}

static void report(const Bench *b, Work *work) {
  int64_t rounds = b->settings->repeat;
  printf("  %-24s %9.2f ms %7.3f", work->name, 1e3 * median(work->times, rounds),
         median(work->ratios, rounds));
  if (work->held) printf("   %s", text_bytes(work->held).text);
  if (tensor_exists(work->call.filtered)) report_filtered(b);
  putchar('\n');
}

static void run(Bench *b) {
  layer_gemms(&b->layer, b->settings->tokens); // chooses its algorithms; held_by does so for the others
  for (int i = 1; i < b->count; i++) b->works[i].held = held_by(b->layer.backend, b->works[i].call);
  for (int i = 1; i < b->first_split; i++) time_in_turn(b, &b->works[0], &b->works[i]);
  printf("  %-24s %12s %7s   held\n", "", "median", "ratio");
  for (int i = 0; i < b->first_split; i++) report(b, &b->works[i]);
  if (b->first_split < b->first_term)
    printf("  over %d ranks %25s %7s   held\n", b->layer.backend->ranks, "median", "over one's");
  for (int i = b->first_split; i < b->first_term; i++) {
    time_in_turn(b, &b->works[1 + i - b->first_split], &b->works[i]);
    report(b, &b->works[i]);
  }
  if (b->first_term == b->count) return;
  printf("  %-24s %12s %7s   held\n", "with a term", "median", "over without");
  for (int i = b->first_term; i < b->count; i++) {
    if (tensor_exists(b->works[i].call.filtered)) make_filterable(b);
    time_in_turn(b, &b->works[1], &b->works[i]);
    report(b, &b->works[i]);
  }
}

int main(int argc, char **argv) {
  Settings options = {.tokens = 1024, .hidden_size = 256, .vocab_size = 128256, .repeat = 7, .device = "cpu"};
  const struct argp parser = {.options = option_table,
                              .parser = parse_option,
                              .doc = "Times the last layer against the three products it is made of."};
  argp_parse(&parser, argc, argv, 0, NULL, &options);

  const char *reason = NULL;
  bool cuda = strcmp(options.device, "cuda") == 0;
  int ordinal = ranks_begin()->local_rank;
  Backend *backend = cuda ? cuda_backend_create(ordinal, DTYPE_BF16, &reason) : cpu_backend_create(false);
  if (!backend) fail("--device cuda: %s", reason);
  if (cuda)
    cuda_backend_join_ranks(backend);
  else
    cpu_backend_join_ranks(backend);
  LceShape shape = {.tokens = options.tokens,
                    .hidden_size = options.hidden_size,
                    .vocab_size = options.vocab_size,
                    .dtype = backend->dtype};
  size_t materialized_bytes = lce_bytes(backend, LCE_MATERIALIZED, 1, shape);
  if (!options.chunk_count) {
    int64_t chunk = lce_chunk_within(backend, materialized_bytes / 8, shape);
    options.chunks[options.chunk_count++] = chunk ? chunk : 1;
  }
  size_t stack = materialized_bytes;
  for (int i = 0; i < options.chunk_count; i++) {
    LceShape widest = shape, split = shape;
    widest.logits = options.terms && i == 0;
    split.ranks = backend->ranks;
    size_t bytes = lce_bytes(backend, LCE_FUSED, options.chunks[i], widest) +
                   lce_bytes(backend, LCE_FUSED, options.chunks[i], shape);
    size_t on_ranks = lce_bytes(backend, LCE_FUSED, options.chunks[i], split);
    if (bytes > stack) stack = bytes;
    if (on_ranks > stack) stack = on_ranks;
  }

  printf("%s: N %s, H %s, V %s\n", backend->description, text_grouped(options.tokens).text,
         text_grouped(options.hidden_size).text, text_grouped(options.vocab_size).text);
  Bench *bench = calloc(1, sizeof *bench);
  if (!bench) fail("out of host memory");
  bench->settings = &options;
  bench->layer = layer_reserve(backend, shape, 1);
  prepare(bench);
  // The bare products hold all logits whatever the layer holds; terms push a little more than is planned for.
  memory_set_stack(&backend->memory, stack + ((size_t)64 << 20));
  run(bench);
  free(bench);
  backend_destroy(backend);
  return 0;
}
