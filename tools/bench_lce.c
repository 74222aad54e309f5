// Time and memory of linear_cross_entropy (LM head + loss), forward and backward, and what its terms cost. Times
// the fused mode at each chunk, and with --materialized the other mode, each alternating with the three plain
// GEMMs that no implementation can do without (logits = X W^T, dX = L W, dW = L^T X over all tokens at once); with
// --terms also the fused mode with one term of the loss after the other, alternating with the loss without it.
// Prints medians, the medians of the ratios to what each alternates with (tools/measure.h), and the bytes held.
//
// Sampling comes last, and twice: with every tile kept, and with a full mass of 1.
//
// Started as several ranks, it also times the head split over them (--vocab-parallel of ./train), where every
// rank has so many tokens, against the whole head on every rank: the same work for each. A time is then the
// slowest rank's.
//
//   tools/bench_lce --tokens 1024 --hidden-size 256 --vocab 128256
//   tools/bench_lce --device cuda --tokens 16384 --hidden-size 2048 --vocab 131072 --chunk 4096,2048,1024 --terms
//   tools/launch 4 tools/bench_lce --device cuda --tokens 16384 --hidden-size 4096 --vocab 128256
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "kernels/ranks/ranks.h"
#include "tools/curves/layer.h"
#include "tools/measure.h"
#include "trainer/machine.h"

enum { MAX_CHUNKS = 8 };

typedef struct {
  int64_t tokens, hidden_size, vocab_size, repeat;
  const char *device, *chunk_list;
  bool materialized, terms;
  int64_t chunks[MAX_CHUNKS];
  int chunk_count;
} Settings;

#define OPTION_VALUES Settings
static const Option option_rows[] = {
    {WHOLE("tokens", "N", tokens, 1, INT32_MAX), DEFAULT("1024"), HELP("Tokens")},
    {WHOLE("hidden-size", "H", hidden_size, 1, INT32_MAX), DEFAULT("256"), HELP("Hidden size")},
    {WHOLE("vocab", "V", vocab_size, 1, INT32_MAX), DEFAULT("128256"), HELP("Vocabulary")},
    {TEXT("chunk", "C[,C...]", chunk_list),
     HELP("Tokens per chunk (default: the largest that holds an eighth of what materialized logits hold)")},
    {TEXT("device", "cpu|cuda", device), .choices = "cpu or cuda", DEFAULT("cpu"), HELP("Where to run")},
    {WHOLE("repeat", "R", repeat, 1, MEASURE_MAX_ROUNDS), DEFAULT("7"),
     HELP("Rounds, of which the median counts")},
    {FLAG("materialized", materialized, true), HELP("Time materialized logits, too")},
    {FLAG("terms", terms, true), HELP("Time the fused mode with each term of the loss, at the first chunk")},
    {.type = OPTION_END}};

static Settings parse(int argc, char **argv) {
  static const OptionTable table = {
      option_rows, "Times LM head + loss, forward and backward, against the three GEMMs it is made of.",
      NULL};
  Settings o = {0};
  option_table_parse(&table, &o, NULL, argc, argv);
  char *rest = NULL, *list = o.chunk_list ? strdup(o.chunk_list) : NULL;
  for (char *chunk = list ? strtok_r(list, ",", &rest) : NULL; chunk; chunk = strtok_r(NULL, ",", &rest)) {
    if (o.chunk_count == MAX_CHUNKS) fail("--chunk: give at most %d", MAX_CHUNKS);
    o.chunks[o.chunk_count++] = option_whole("chunk", chunk, 1, INT32_MAX);
  }
  free(list);
  return o;
}

// --- what is timed -----------------------------------------------------------------------------------------

typedef struct {
  char name[64];
  LinearCrossEntropy call; // the three plain GEMMs have none (chunk 0)
  int base;                // what it alternates with
  size_t held;             // bytes
} Work;

enum { MAX_WORKS = 2 * MAX_CHUNKS + 14 };

typedef struct {
  const Settings *settings;
  LceTensors layer;
  Tensor bias, dbias, class_weights, token_weights, entropy_weights, stats, sampled; // what terms need
  Work works[MAX_WORKS];
  Tensor barrier;                     // fp32 [1]
  int count, first_split, first_term; // terms come last
} Bench;

static Tensor reserve_vector(Backend *backend, const char *name, Dtype dtype, int64_t count, bool ones) {
  size_t bytes = (size_t)count * dtype_bytes(dtype);
  Tensor t = tensor_1d(memory_reserve(&backend->memory, name, MEMORY_TABLES, bytes), dtype, count);
  fill_zero(backend, t);
  if (!ones) return t;
  float *values = host_alloc(count, sizeof *values, name);
  for (int64_t i = 0; i < count; i++) values[i] = 1;
  backend_to_device(backend, t, values);
  backend_synchronize(backend);
  free(values);
  return t;
}

__attribute__((format(printf, 4, 5))) static Work *add_work(Bench *b, int base, LinearCrossEntropy call,
                                                            const char *name, ...) {
  Work *work = &b->works[b->count++];
  va_list arguments;
  va_start(arguments, name);
  vsnprintf(work->name, sizeof work->name, name, arguments);
  va_end(arguments);
  work->base = base;
  work->call = call;
  return work;
}

static void add_terms(Bench *b, int fused) {
  const LinearCrossEntropy plain = b->works[fused].call;
  add_work(b, fused, plain, "+ mean on the device")->call.mean = true;
  add_work(b, fused, plain, "+ token weights")->call.token_weights = b->token_weights;
  add_work(b, fused, plain, "+ class weights")->call.terms.class_weights = b->class_weights;
  LinearCrossEntropy *call = &add_work(b, fused, plain, "+ z-loss")->call;
  call->terms.z_loss = 1e-4f;
  call->outputs.z_loss = b->stats;
  add_work(b, fused, plain, "+ label smoothing")->call.terms.label_smoothing = 0.1f;
  add_work(b, fused, plain, "+ temperature")->call.terms.temperature = 0.7f;
  add_work(b, fused, plain, "+ soft-cap")->call.terms.softcap = 30;
  call = &add_work(b, fused, plain, "+ bias")->call;
  call->bias = b->bias;
  call->dbias = b->dbias;
  call = &add_work(b, fused, plain, "+ entropy")->call;
  call->entropy_weights = b->entropy_weights;
  call->outputs.entropy = b->stats;
  LinearCrossEntropy sampled = plain;
  sampled.sampling.stats = b->sampled;
  add_work(b, fused, sampled, "+ sampling, all kept")->call.sampling.full_mass = 1e-30f;
  add_work(b, fused, sampled, "+ sampling")->call.sampling.full_mass = 1;
}

// The call with this rank's rows of the head.
static LinearCrossEntropy split_call(const LceTensors *layer, int64_t chunk) {
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
  const int gemms = 0, fused = 1;
  add_work(b, gemms, (LinearCrossEntropy){.chunk = 0}, "three plain GEMMs");
  for (int i = 0; i < o->chunk_count; i++)
    add_work(b, gemms, layer_call(&b->layer, LCE_FUSED, o->chunks[i]), "fused, chunk %lld",
             (long long)o->chunks[i]);
  if (o->materialized) add_work(b, gemms, layer_call(&b->layer, LCE_MATERIALIZED, 1), "materialized");
  b->first_split = b->count;
  for (int i = 0; i < o->chunk_count && backend->ranks > 1; i++)
    add_work(b, fused + i, split_call(&b->layer, o->chunks[i]), "split, chunk %lld", (long long)o->chunks[i]);
  b->barrier = reserve_vector(backend, "barrier", DTYPE_F32, 1, false);
  b->first_term = b->count;
  if (!o->terms) return;
  b->bias = reserve_vector(backend, "bias", backend->dtype, o->vocab_size, false);
  b->dbias = reserve_vector(backend, "dbias", DTYPE_F32, o->vocab_size, false);
  b->class_weights = reserve_vector(backend, "class weights", DTYPE_F32, o->vocab_size, true);
  b->token_weights = reserve_vector(backend, "token weights", DTYPE_F32, o->tokens, true);
  b->entropy_weights = reserve_vector(backend, "entropy weights", DTYPE_F32, o->tokens, true);
  b->stats = reserve_vector(backend, "stats", DTYPE_F32, o->tokens, false);
  b->sampled = reserve_vector(backend, "tiles dropped", DTYPE_F32, 3, false);
  add_terms(b, fused);
}

static void report_sampled(const Bench *b) {
  float stats[3];
  backend_to_host(b->layer.backend, stats, b->sampled);
  printf("   drops %.1f%% of the tiles, a mass of %.3g per token", 100 * (double)(stats[0] / stats[1]),
         (double)stats[2] / (double)b->settings->tokens);
}

static void wait_for_all(const Bench *b) {
  Backend *backend = b->layer.backend;
  if (backend->ranks > 1) all_reduce(backend, (Collective){.out = b->barrier, .x = b->barrier});
  backend_synchronize(backend);
}

static double seconds(void *bench, int which) {
  const Bench *b = bench;
  const Work *work = &b->works[which];
  wait_for_all(b);
  double start = now_seconds();
  if (work->call.chunk)
    linear_cross_entropy(b->layer.backend, work->call);
  else
    layer_gemms(&b->layer, b->settings->tokens);
  wait_for_all(b);
  return now_seconds() - start;
}

static void report(const Bench *b, const Work *work, double seconds, double ratio) {
  printf("  %-24s %9.2f ms %7.3f", work->name, 1e3 * seconds, ratio);
  if (work->held) printf("   %s", text_bytes(work->held).text);
  if (tensor_exists(work->call.sampling.stats)) report_sampled(b);
  putchar('\n');
}

static void heading(const char *what, const char *ratio) {
  printf("  %-24s %12s %7s   held\n", what, "median", ratio);
}

static void run(Bench *b) {
  layer_gemms(&b->layer, b->settings->tokens); // chooses its algorithms; layer_held does so for the calls
  for (int i = 1; i < b->count; i++) b->works[i].held = layer_held(b->layer.backend, b->works[i].call);
  for (int i = 1; i < b->count; i++) {
    const Work *work = &b->works[i];
    Medians m = measure(seconds, b, work->base, i, 0.7, b->settings->repeat);
    if (i == 1) heading("", "ratio");
    if (i == 1) report(b, &b->works[0], m.base, 1);
    if (i == b->first_split && i < b->first_term) heading("split over the ranks", "over one's");
    if (i == b->first_term) heading("with a term", "over without");
    report(b, work, m.work, m.ratio);
  }
}

int main(int argc, char **argv) {
  Settings options = parse(argc, argv);
  Backend *backend = layer_backend(options.device, ranks_begin()->local_rank);
  machine_join_ranks(backend);
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
    int64_t chunk = options.chunks[i];
    size_t whole = lce_bytes(backend, LCE_FUSED, chunk, widest) + lce_bytes(backend, LCE_FUSED, chunk, shape);
    size_t on_ranks = lce_bytes(backend, LCE_FUSED, chunk, split);
    if (whole > stack) stack = whole;
    if (on_ranks > stack) stack = on_ranks;
  }

  printf("%s: N %s, H %s, V %s\n", backend->description, text_grouped(options.tokens).text,
         text_grouped(options.hidden_size).text, text_grouped(options.vocab_size).text);
  Bench *bench = host_alloc(1, sizeof *bench, "the benchmark");
  bench->settings = &options;
  bench->layer = layer_reserve(backend, shape, 1);
  prepare(bench);
  // The plain GEMMs hold all logits whatever the modes hold; terms push a little more than is planned for.
  memory_set_stack(&backend->memory, stack + ((size_t)64 << 20));
  run(bench);
  free(bench);
  backend_destroy(backend);
  return 0;
}
