// Time and memory of linear_cross_entropy (LM head + loss), forward and backward: each mode and chunk alternates with the
// three plain GEMMs that no implementation can do without (logits = X W^T, dX = L W, dW = L^T X over all tokens at once),
// each term of the loss (--terms) with the loss without it. Prints medians, the medians of the ratios to what each alternates
// with (tools/measure.h), and the bytes held. --terms ends with sampling: with every tile kept, which shows what sampling
// itself costs, and with M0 = 1.
//
// How many tiles sampling drops depends on the logits, and random ones say nothing about a model's. --checkpoint
// takes a trained state: W is the model's head, x the final norm's output for the first N tokens that ./train
// --init DIR --data PATH --val-fraction 0 reads (seed 1; the last sequence is cut), targets the tokens after them.
// With held-out data as PATH the state is that of validation. The mean loss is printed, to be compared with the
// run's. The model is freed before anything is timed.
//
// Started as several ranks, it also times the head split over them (--vocab-parallel of ./train), where every
// rank has so many tokens, against the whole head on every rank: the same work for each. A time is then the
// slowest rank's.
//
//   tools/bench_lce --tokens 1024 --hidden-size 256 --vocab 128256
//   tools/bench_lce --device cuda --tokens 16384 --hidden-size 2048 --vocab 131072 --chunk 4096,2048,1024 --terms
//   tools/bench_lce --device cuda --tokens 16384 --chunk 4096,1024 --sample 1,0.5 --terms --checkpoint runs/gpt2
//     --data 'shards/*.bin'
//   tools/launch 4 tools/bench_lce --device cuda --tokens 16384 --hidden-size 4096 --vocab 128256
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/integers.h"
#include "base/option_rows.h"
#include "base/text.h"
#include "data/loader.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/hf_config.h"
#include "tools/curves/layer.h"
#include "tools/measure.h"
#include "trainer/machine.h"

enum { MAX_ITEMS = 8 }; // of a list

typedef struct {
  int64_t tokens, hidden_size, vocab_size, seq_len, repeat;
  DeviceKind device;
  const char *chunk_list, *sample_list, *checkpoint;
  TextList data;
  bool materialized, terms;
  int64_t chunks[MAX_ITEMS];
  double samples[MAX_ITEMS]; // full masses
  int chunk_count, sample_count;
} Settings;

#define OPTION_VALUES Settings
static const Option option_rows[] = {
    {WHOLE("tokens", "N", tokens, 1, INT32_MAX), DEFAULT("1024"), HELP("Tokens")},
    {WHOLE("hidden-size", "H", hidden_size, 1, INT32_MAX), DEFAULT("256"), HELP("Hidden size")},
    {WHOLE("vocab", "V", vocab_size, 1, INT32_MAX), DEFAULT("128256"), HELP("Vocabulary")},
    {TEXT("chunk", "C[,C...]", chunk_list),
     HELP("Tokens per chunk (default: the largest that holds an eighth of what materialized logits hold)")},
    {TEXT("checkpoint", "DIR", checkpoint),
     HELP("Take x, W, H and V from a model: a checkpoint of ./train, or config.json and safetensors of "
          "Hugging Face (default: x and W are random)")},
    {LIST("data", "PATH", data),
     HELP("With --checkpoint: what the model reads, as for ./train: text or shards; may be given again")},
    {WHOLE("seq-len", "T", seq_len, 1, INT32_MAX),
     HELP("With --checkpoint: tokens in a sequence (default that of ./train)")},
    {TEXT("sample", "M0[,M0...]", sample_list),
     HELP("Also time the fused mode with sampled tiles, at each chunk; M0 as for ./train --lce-sample")},
    {CHOICE("device", "cpu|cuda", device, "cpu or cuda"), DEFAULT("cpu"), HELP("Where to run")},
    {WHOLE("repeat", "R", repeat, 1, MEASURE_MAX_ROUNDS), DEFAULT("7"),
     HELP("Rounds, of which the median counts")},
    {FLAG("materialized", materialized, true), HELP("Time materialized logits, too")},
    {FLAG("terms", terms, true), HELP("Time the fused mode with each term of the loss, at the first chunk")},
    {.type = OPTION_END}};

static int parse_list(const char *list, const Option *item, void *values) {
  int count = 0;
  char *rest = NULL, *words = list ? strdup(list) : NULL;
  for (char *word = words ? strtok_r(words, ",", &rest) : NULL; word; word = strtok_r(NULL, ",", &rest)) {
    if (count == MAX_ITEMS) fail("--%s: give at most %d", item->name, MAX_ITEMS);
    option_set(item, (char *)values + item->size * (size_t)count++, word);
  }
  free(words);
  return count;
}

static void check_checkpoint(const Settings *o, const bool *given) {
  static const char *const sizes[] = {"hidden-size", "vocab"};
  for (int i = 0; i < 2 && o->checkpoint; i++)
    if (given[option_row(option_rows, sizes[i])])
      fail("--checkpoint takes the hidden size and the vocabulary from the model: leave out --%s", sizes[i]);
  if (o->checkpoint && !o->data.count) fail("--checkpoint: name the text or shards to read with --data PATH");
  if (!o->checkpoint && (o->data.count || o->seq_len))
    fail("--%s is what a model reads: name the model with --checkpoint DIR",
         o->data.count ? "data" : "seq-len");
}

static Settings parse(int argc, char **argv) {
  static const OptionTable table = {
      option_rows, "Times LM head + loss, forward and backward, against the three GEMMs it is made of.",
      "paths are given with --checkpoint DIR and --data PATH"};
  static const Option chunk = {OPTION_WHOLE, "chunk", .size = sizeof(int64_t), .min = 1, .max = INT32_MAX},
                      sample = {OPTION_NUMBER, "sample", .size = sizeof(double), .min = 1e-30, .max = 1e6};
  Settings o = {0};
  bool given[OPTION_ROWS_MAX] = {false};
  option_table_parse(&table, &o, given, argc, argv);
  check_checkpoint(&o, given);
  o.chunk_count = parse_list(o.chunk_list, &chunk, o.chunks);
  o.sample_count = parse_list(o.sample_list, &sample, o.samples);
  return o;
}

// --- a trained state ---------------------------------------------------------------------------------------

// What --checkpoint and --data give, on the host and in the backend's dtype.
typedef struct {
  void *x, *weight; // [N, H], [V, H]
  int32_t *targets; // [N]
  int64_t counted;  // targets that no mask leaves out
} State;

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

// Fills x and targets, one sequence of the data at a time. On a plan, where loader and state are not read, one
// forward pass counts its stack.
static void read_hidden_states(const Settings *o, Model *model, Backend *backend, const Loader *loader,
                               State *state) {
  int64_t hidden_size = o->hidden_size, seq_len = o->seq_len;
  Tensor flat = reserve_vector(backend, "x", backend->dtype, seq_len * hidden_size, false);
  Tensor x = tensor_2d(flat.data, backend->dtype, seq_len, hidden_size);
  Batch batch = {
      .batch = 1, .seq_len = seq_len, .tokens = reserve_vector(backend, "tokens", DTYPE_I32, seq_len, false)};
  if (backend->memory.planning) {
    transformer_last_hidden_state(backend, model, &batch, x);
    return;
  }
  int32_t *tokens = host_alloc(2 * seq_len, sizeof *tokens, "a sequence"), *targets = tokens + seq_len;
  LoaderPlace place = {.micro_steps = 1, .rank = ranks_self()->rank, .ranks = ranks_self()->ranks};
  for (int64_t first = 0; first < o->tokens; first += seq_len, place.step++) {
    int64_t count = min_i64(seq_len, o->tokens - first);
    loader_train_batch(loader, place, tokens, targets, NULL);
    backend_to_device(backend, batch.tokens, tokens);
    transformer_last_hidden_state(backend, model, &batch, x);
    size_t row_bytes = (size_t)hidden_size * dtype_bytes(x.dtype);
    backend_to_host(backend, (char *)state->x + (size_t)first * row_bytes, tensor_rows(x, 0, count));
    for (int64_t i = 0; i < count; i++) state->counted += targets[i] != IGNORE_INDEX;
    memcpy(state->targets + first, targets, (size_t)count * sizeof *targets);
  }
  free(tokens);
}

// As many sequences as N tokens need on every rank; the last is cut.
static Loader open_loader(const Settings *o, const Source *source) {
  Loader loader =
      loader_create((LoaderOptions){.source = source, .batch = 1, .seq_len = o->seq_len, .seed = 1});
  int64_t ranks = ranks_self()->ranks, needed = ranks * ceil_div(o->tokens, o->seq_len);
  if (loader.train_windows < needed)
    fail("%s has %s sequences of %lld tokens, and %s tokens need %s: lower --tokens or name more --data",
         source->name, text_grouped(loader.train_windows).text, (long long)o->seq_len,
         text_grouped(ranks * o->tokens).text, text_grouped(needed).text);
  return loader;
}

// Runs the model on a backend of its own, which is then destroyed, and sets the sizes that the model has.
static State read_state(Settings *o) {
  ModelConfig config = hf_config_read(o->checkpoint);
  if (config.final_logit_softcapping > 0)
    fail("%s has a logit soft-cap, which is timed only as one of --terms: name another model", o->checkpoint);
  o->hidden_size = config.hidden_size;
  o->vocab_size = config.vocab_size;
  if (!o->seq_len) o->seq_len = model_default_seq_len(&config);
  model_check_seq_len(&config, o->seq_len);
  Source *source = source_open(o->data.items, o->data.count, o->vocab_size);
  Loader loader = open_loader(o, source);
  char *tokenizer = path_join(o->checkpoint, "tokenizer.json");
  if (source->kind == SOURCE_TEXT && path_exists(tokenizer))
    warn("%s is read byte by byte, though %s has a tokenizer; tools/prepare_data.py makes its text into "
         "tokens",
         source->name, o->checkpoint);
  free(tokenizer);

  Backend *backend = layer_backend(o->device, ranks_self()->local_rank);
  Backend *plan = plan_backend_create(backend->device, backend->dtype);
  ParameterDtypes dtypes = {.weight = backend->dtype, .frozen = true};
  Model model;
  model_create(&model, &config, plan, dtypes, o->seq_len);
  read_hidden_states(o, &model, plan, NULL, NULL);
  size_t stack = plan->memory.ledger.stack_peak;
  model_destroy(&model);
  backend_destroy(plan);

  model_create(&model, &config, backend, dtypes, o->seq_len);
  checkpoint_load(o->checkpoint, &model, backend, false);
  memory_set_stack(&backend->memory, stack);
  Tensor head = model.head.value;
  State state = {.x = host_alloc(o->tokens * o->hidden_size, dtype_bytes(backend->dtype), "x"),
                 .weight = host_alloc(tensor_count(head), dtype_bytes(head.dtype), "the head"),
                 .targets = host_alloc(o->tokens, sizeof(int32_t), "the targets")};
  read_hidden_states(o, &model, backend, &loader, &state);
  backend_to_host(backend, state.weight, head);
  printf("x, W and targets: %s on %s, sequences of %s\n", o->checkpoint, source->name,
         text_grouped(o->seq_len).text);
  model_destroy(&model);
  backend_destroy(backend);
  source_close(source);
  return state;
}

static void upload_state(const LceTensors *layer, const State *state) {
  backend_to_device(layer->backend, layer->x, state->x);
  backend_to_device(layer->backend, layer->weight, state->weight);
  backend_to_device(layer->backend, layer->targets, state->targets);
  backend_synchronize(layer->backend);
}

// --- what is timed -----------------------------------------------------------------------------------------

typedef struct {
  char name[64];
  LinearCrossEntropy call; // the three plain GEMMs have none (chunk 0)
  int base;                // what it alternates with
  size_t held;             // bytes
} Work;

enum { GEMMS, FUSED }; // the first works: three plain GEMMs, the fused mode at the first chunk
enum { MAX_WORKS = (2 + MAX_ITEMS) * MAX_ITEMS + 14 };

typedef struct {
  const Settings *settings;
  const State *state; // NULL: random
  LceTensors layer;
  Work works[MAX_WORKS];
  Tensor barrier, sampled;            // fp32 [1]; TileSampling's stats
  int count, first_split, first_term; // terms come last
} Bench;

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

static LinearCrossEntropy *add_term(Bench *b, const char *name) {
  return &add_work(b, FUSED, b->works[FUSED].call, "+ %s", name)->call;
}

static void add_terms(Bench *b) {
  Backend *backend = b->layer.backend;
  int64_t tokens = b->settings->tokens, vocab_size = b->settings->vocab_size;
  Tensor stats = reserve_vector(backend, "stats", DTYPE_F32, tokens, false);
  add_term(b, "mean on the device")->mean = true;
  add_term(b, "token weights")->token_weights =
      reserve_vector(backend, "token weights", DTYPE_F32, tokens, true);
  add_term(b, "class weights")->terms.class_weights =
      reserve_vector(backend, "class weights", DTYPE_F32, vocab_size, true);
  LinearCrossEntropy *call = add_term(b, "z-loss");
  call->terms.z_loss = 1e-4f;
  call->outputs.z_loss = stats;
  add_term(b, "label smoothing")->terms.label_smoothing = 0.1f;
  add_term(b, "temperature")->terms.temperature = 0.7f;
  add_term(b, "soft-cap")->terms.softcap = 30;
  call = add_term(b, "bias");
  call->bias = reserve_vector(backend, "bias", backend->dtype, vocab_size, false);
  call->dbias = reserve_vector(backend, "dbias", DTYPE_F32, vocab_size, false);
  call = add_term(b, "entropy");
  call->entropy_weights = reserve_vector(backend, "entropy weights", DTYPE_F32, tokens, true);
  call->outputs.entropy = stats;
  add_term(b, "sampling, all kept")->sampling = (TileSampling){.full_mass = 1e-30f, .stats = b->sampled};
  add_term(b, "sampling")->sampling = (TileSampling){.full_mass = 1, .stats = b->sampled};
}

// The call with this rank's rows of the head.
static LinearCrossEntropy split_call(const LceTensors *layer, int64_t chunk) {
  const Backend *backend = layer->backend;
  LinearCrossEntropy call = layer_call(layer, LCE_FUSED, chunk);
  int64_t vocab_size = layer->weight.shape[0], part = ceil_div(vocab_size, backend->ranks);
  int64_t first = backend->rank * part, rows = min_i64(part, vocab_size - first);
  if (rows < 1) fail("--vocab %lld cannot be split over %d ranks", (long long)vocab_size, backend->ranks);
  call.weight = tensor_rows(layer->weight, first, rows);
  call.dweight = tensor_rows(layer->dweight, first, rows);
  call.shard = (VocabShard){.first = first, .vocab_size = vocab_size};
  return call;
}

// Reserves all tensors and lists what is timed.
static Bench *bench_create(const Settings *o, Backend *backend, LceShape shape) {
  Bench *b = host_alloc(1, sizeof *b, "the benchmark");
  *b = (Bench){.settings = o, .layer = layer_reserve(backend, shape)};
  b->barrier = reserve_vector(backend, "barrier", DTYPE_F32, 1, false);
  b->sampled = reserve_vector(backend, "tiles dropped", DTYPE_F32, 3, false);
  add_work(b, GEMMS, (LinearCrossEntropy){.chunk = 0}, "three plain GEMMs");
  for (int i = 0; i < o->chunk_count; i++)
    add_work(b, GEMMS, layer_call(&b->layer, LCE_FUSED, o->chunks[i]), "fused, chunk %lld",
             (long long)o->chunks[i]);
  for (int i = 0; i < o->sample_count * o->chunk_count; i++) {
    int64_t chunk = o->chunks[i % o->chunk_count];
    double full_mass = o->samples[i / o->chunk_count];
    LinearCrossEntropy call = layer_call(&b->layer, LCE_FUSED, chunk);
    call.sampling = (TileSampling){.full_mass = (float)full_mass, .stats = b->sampled};
    add_work(b, GEMMS, call, "M0 %g, chunk %lld", full_mass, (long long)chunk);
  }
  if (o->materialized) add_work(b, GEMMS, layer_call(&b->layer, LCE_MATERIALIZED, 1), "materialized");
  b->first_split = b->count;
  for (int i = 0; i < o->chunk_count && backend->ranks > 1; i++)
    add_work(b, FUSED + i, split_call(&b->layer, o->chunks[i]), "split, chunk %lld", (long long)o->chunks[i]);
  b->first_term = b->count;
  if (o->terms) add_terms(b);
  return b;
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

// Runs everything once: the GEMMs' algorithms are chosen, and a plan has the stack that it takes.
static void find_held(Bench *b) {
  layer_gemms(&b->layer, b->settings->tokens);
  for (int i = 1; i < b->count; i++) b->works[i].held = layer_held(b->layer.backend, b->works[i].call);
}

static size_t plan_stack(const Settings *o, const Backend *backend, LceShape shape) {
  Backend *plan = plan_backend_create(backend->device, backend->dtype);
  plan->ranks = backend->ranks;
  Bench *bench = bench_create(o, plan, shape);
  find_held(bench);
  size_t stack = plan->memory.ledger.stack_peak;
  free(bench);
  backend_destroy(plan);
  return stack;
}

// The mean loss, to compare with what the model's run says.
static void report_loss(const Bench *b) {
  int64_t tokens = b->settings->tokens;
  float *loss = host_alloc(tokens, sizeof *loss, "the losses");
  double sum = 0;
  linear_cross_entropy(b->layer.backend, b->works[FUSED].call);
  backend_to_host(b->layer.backend, loss, b->layer.loss);
  for (int64_t n = 0; n < tokens; n++) sum += (double)loss[n];
  printf("  loss %.4f over %s targets\n", sum / (double)max_i64(b->state->counted, 1),
         text_grouped(b->state->counted).text);
  free(loss);
}

static void run(Bench *b) {
  find_held(b);
  if (b->state) report_loss(b);
  for (int i = 1; i < b->count; i++) {
    const Work *work = &b->works[i];
    double warm_up = b->layer.backend->device == ON_CUDA ? 0.7 : 0.1;
    Medians m = measure(seconds, b, work->base, i, warm_up, b->settings->repeat);
    if (i == 1) heading("", "ratio");
    if (i == 1) report(b, &b->works[0], m.base, 1);
    if (i == b->first_split && i < b->first_term) heading("split over the ranks", "over one's");
    if (i == b->first_term) heading("with a term", "over without");
    report(b, work, m.work, m.ratio);
  }
}

int main(int argc, char **argv) {
  const Launch *launch = ranks_begin();
  Settings options = parse(argc, argv);
  State state = {0};
  if (options.checkpoint) state = read_state(&options);
  Backend *backend = layer_backend(options.device, launch->local_rank);
  machine_join_ranks(backend);
  LceShape shape = {.tokens = options.tokens,
                    .hidden_size = options.hidden_size,
                    .vocab_size = options.vocab_size,
                    .dtype = backend->dtype};
  if (!options.chunk_count) {
    int64_t chunk = lce_chunk_within(backend, lce_bytes(backend, LCE_MATERIALIZED, 1, shape) / 8, shape);
    options.chunks[options.chunk_count++] = chunk ? chunk : 1;
  }

  printf("%s: N %s, H %s, V %s\n", backend->description, text_grouped(options.tokens).text,
         text_grouped(options.hidden_size).text, text_grouped(options.vocab_size).text);
  Bench *bench = bench_create(&options, backend, shape);
  if (options.checkpoint) {
    bench->state = &state;
    upload_state(&bench->layer, &state);
  }
  memory_set_stack(&backend->memory, plan_stack(&options, backend, shape));
  run(bench);
  free(bench);
  free(state.x);
  free(state.weight);
  free(state.targets);
  free(options.data.items);
  backend_destroy(backend);
  return 0;
}
