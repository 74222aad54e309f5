// Time and memory of linear_cross_entropy (LM head + loss), forward and backward: each mode and chunk alternates with the
// three plain GEMMs that no implementation can do without (logits = X W^T, dX = L W, dW = L^T X over all tokens at once),
// each term of the loss (--terms) with the loss without it. Prints medians, the medians of the ratios to what each alternates
// with, and the bytes pushed beyond inputs and gradients. --terms ends with sampling: with every tile kept, which shows what
// sampling itself costs, and with M0 = 1. --ladder times the six versions of kernels/LCE.md instead.
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
// --json prints an object a line instead: mode, chunk, shape, dtype, device, layer_bytes (pushed beyond inputs and
// gradients), loss_alone_bytes (planned: the same without gradients), ledger_bytes (layer_bytes and the tensors), and what
// was measured: seconds, ratio, and floor_seconds of the GEMMs or base_seconds of the loss without the term.
//
//   tools/bench_lce --tokens 1024 --hidden-size 256 --vocab 128256
//   tools/bench_lce --device cuda --tokens 16384 --hidden-size 2048 --vocab 131072 --chunk 4096,2048,1024 --terms
//   tools/bench_lce --device cuda --tokens 16384 --chunk 4096,1024 --sample 1,0.5 --terms --checkpoint runs/gpt2
//     --data 'shards/*.bin'
//   tools/bench_lce --device cuda --tokens 81920 --hidden-size 4096 --vocab 128256 --materialized --plan --json
//   OMP_NUM_THREADS=1 tools/bench_lce --ladder --vocab 32768 --chunk 128
//   tools/launch 4 tools/bench_lce --device cuda --tokens 16384 --hidden-size 4096 --vocab 128256
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "data/file.h"
#include "data/loader.h"
#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/integers.h"
#include "kernels/random.h"
#include "kernels/ranks/ranks.h"
#include "kernels/system.h"
#include "kernels/text.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/hf_config.h"
#include "tools/ladder/ladder.h"
#include "trainer/machine.h"
#include "trainer/option_rows.h"
#include "trainer/report.h"

enum { MAX_ITEMS = 32, MAX_ROUNDS = 99 }; // of a list; of --repeat

typedef struct {
  int64_t tokens, hidden_size, vocab_size, seq_len, repeat;
  DeviceKind device;
  Dtype dtype; // DTYPE_COUNT: the device's
  const char *chunk_list, *sample_list, *checkpoint;
  TextList data;
  bool materialized, terms, ladder, plan, json;
  int64_t chunks[MAX_ITEMS];
  double samples[MAX_ITEMS]; // full masses
  int chunk_count, sample_count;
} Settings;

#define OPTION_VALUES Settings
static const Option option_rows[] = {
    {WHOLE("tokens", "N", tokens, 1, INT32_MAX), DEFAULT("1024"), HELP("Tokens")},
    {WHOLE("hidden-size", "H", hidden_size, 1, INT32_MAX), DEFAULT("256"), HELP("Hidden size")},
    {WHOLE("vocab", "V", vocab_size, 1, INT32_MAX), DEFAULT("128256"), HELP("Vocabulary")},
    {TEXT("chunk", "C[,C...]", chunk_list), HELP("Tokens per chunk (default as for ./train --lce-chunk)")},
    {TEXT("checkpoint", "DIR", checkpoint), EXCLUDES("hidden-size, vocab", "the model has its own sizes"),
     HELP("Take x, W, H and V from a model: a checkpoint of ./train, or config.json and safetensors of "
          "Hugging Face (default: x and W are random)")},
    {LIST("data", "PATH", data),
     HELP("With --checkpoint: what the model reads, as for ./train: text or shards; may be given again")},
    {WHOLE("seq-len", "T", seq_len, 1, INT32_MAX),
     HELP("With --checkpoint: tokens in a sequence (default that of ./train)")},
    {TEXT("sample", "M0[,M0...]", sample_list),
     HELP("Also time the fused mode with sampled tiles, at each chunk; M0 as for ./train --lce-sample")},
    {CHOICE("device", "cpu|cuda", device, "cpu or cuda"), DEFAULT("cpu"), HELP("Where to run")},
    {CHOICE("dtype", "TYPE", dtype, "fp32 or bf16"), HELP("Of x, W and dX (default bf16 on cuda)")},
    {WHOLE("repeat", "R", repeat, 1, MAX_ROUNDS), DEFAULT("7"), HELP("Rounds, of which the median counts")},
    {FLAG("materialized", materialized, true), HELP("Time materialized logits, too")},
    {FLAG("terms", terms, true), HELP("Time the fused mode with each term of the loss, at the first chunk")},
    {FLAG("ladder", ladder, true),
     EXCLUDES("materialized, terms, sample", "the ladder has six rungs and no more"),
     HELP("Time the six versions of kernels/LCE.md instead, at the first chunk")},
    {FLAG("plan", plan, true), EXCLUDES("checkpoint, ladder", "a plan computes nothing"),
     HELP("Compute nothing: only the memory, also for a GPU that is not here")},
    {FLAG("json", json, true), HELP("Print a JSON object a line instead of the table")},
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

static Settings parse(int argc, char **argv) {
  static const OptionTable table = {
      option_rows, "Times LM head + loss, forward and backward, against the three GEMMs it is made of.",
      "paths are given with --checkpoint DIR and --data PATH"};
  static const Option chunk = {OPTION_WHOLE, "chunk", .size = sizeof(int64_t), .min = 1, .max = INT32_MAX},
                      sample = {OPTION_NUMBER, "sample", .size = sizeof(double), .min = 1e-30, .max = 1e6};
  Settings o = {.dtype = DTYPE_COUNT};
  option_table_parse(&table, &o, NULL, argc, argv);
  if (o.checkpoint && !o.data.count) fail("--checkpoint: name the text or shards to read with --data PATH");
  if (!o.checkpoint && (o.data.count || o.seq_len))
    fail("--%s is what a model reads: name the model with --checkpoint DIR",
         o.data.count ? "data" : "seq-len");
  if (o.device == ON_CPU && o.dtype == DTYPE_BF16)
    fail("the CPU computes in fp32 only; leave out --dtype, or give --device cuda");
  if (o.dtype == DTYPE_COUNT) o.dtype = o.device == ON_CUDA ? DTYPE_BF16 : DTYPE_F32;
  o.chunk_count = parse_list(o.chunk_list, &chunk, o.chunks);
  o.sample_count = parse_list(o.sample_list, &sample, o.samples);
  return o;
}

// --- the layer and its random data ------------------------------------------------------------------------

typedef struct {
  Backend *backend;
  Tensor x, weight, targets, loss, dx, dweight;
} LceTensors;

enum { SEED = 1, STREAM_X = 100, STREAM_WEIGHT, STREAM_TARGETS };

// N(0, scale): functions of the element alone. Uploaded in blocks of rows, so that the host never holds the matrix.
static void fill_normal(Backend *backend, Tensor t, double scale, uint64_t stream) {
  int64_t columns = t.shape[1], block = ((int64_t)16 << 20) / columns + 1;
  float *values = host_alloc(block * columns, sizeof *values, "random values");
  uint16_t *rounded = host_alloc(block * columns, sizeof *rounded, "random values");
  for (int64_t first = 0; first < t.shape[0]; first += block) {
    int64_t rows = min_i64(block, t.shape[0] - first), count = rows * columns;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++)
      values[i] = (float)(scale * random_normal(SEED, stream, (uint64_t)(first * columns + i)));
    backend_to_device(backend, tensor_rows(t, first, rows),
                      parameters_round(t.dtype, values, count, rounded));
    backend_synchronize(backend);
  }
  free(values);
  free(rounded);
}

static Tensor reserve(Backend *backend, const char *name, MemoryCategory category, Dtype dtype, int64_t rows,
                      int64_t columns) {
  size_t bytes = (size_t)rows * (size_t)columns * dtype_bytes(dtype);
  return tensor_2d(memory_reserve(&backend->memory, name, category, bytes), dtype, rows, columns);
}

static Tensor reserve_vector(Backend *backend, const char *name, Dtype dtype, int64_t count) {
  return tensor_flat(reserve(backend, name, MEMORY_TABLES, dtype, 1, count));
}

static void upload(Backend *backend, Tensor t, const void *values) {
  backend_to_device(backend, t, values);
  backend_synchronize(backend);
}

typedef struct {
  int64_t tokens, hidden_size, vocab_size;
  Dtype dtype;
} Shape;

static LceTensors layer_reserve(Backend *b, Shape s) {
  int64_t n = s.tokens, h = s.hidden_size, v = s.vocab_size;
  return (LceTensors){.backend = b,
                      .x = reserve(b, "x", MEMORY_ACTIVATIONS, s.dtype, n, h),
                      .weight = reserve(b, "weight", MEMORY_WEIGHTS, s.dtype, v, h),
                      .dx = reserve(b, "dx", MEMORY_ACTIVATION_GRADIENTS, s.dtype, n, h),
                      .dweight = reserve(b, "dweight", MEMORY_GRADIENTS, DTYPE_F32, v, h),
                      .loss = reserve_vector(b, "losses", DTYPE_F32, n),
                      .targets = reserve_vector(b, "targets", DTYPE_I32, n)};
}

static void layer_fill(const LceTensors *l) {
  int64_t tokens = l->x.shape[0], vocab_size = l->weight.shape[0];
  fill_normal(l->backend, l->x, 1, STREAM_X);
  fill_normal(l->backend, l->weight, 0.02, STREAM_WEIGHT);
  int32_t *ids = host_alloc(tokens, sizeof *ids, "the targets");
  for (int64_t n = 0; n < tokens; n++)
    ids[n] = (int32_t)(random_bits(SEED, STREAM_TARGETS, (uint64_t)n) % (uint64_t)vocab_size);
  upload(l->backend, l->targets, ids);
  free(ids);
}

static LinearCrossEntropy layer_call(const LceTensors *l, LceMode mode, int64_t chunk) {
  return (LinearCrossEntropy){.mode = mode,
                              .chunk = chunk,
                              .loss = l->loss,
                              .dx = l->dx,
                              .dweight = l->dweight,
                              .x = l->x,
                              .weight = l->weight,
                              .targets = l->targets,
                              .scale = 1.0f / (float)l->x.shape[0]};
}

// The three GEMMs that no implementation can do without, for `rows` of the tokens at a time.
static void layer_gemms(const LceTensors *l, int64_t rows) {
  Backend *backend = l->backend;
  int64_t tokens = l->x.shape[0], vocab_size = l->weight.shape[0];
  MemoryMark mark = memory_mark(&backend->memory);
  int64_t stride = backend->scratch->logits_stride(vocab_size, backend->dtype);
  Tensor padded = memory_push_2d(&backend->memory, "logits", MEMORY_HEAD, backend->dtype, rows, stride);
  for (int64_t first = 0; first < tokens; first += rows) {
    int64_t count = min_i64(rows, tokens - first);
    Tensor logits = tensor_columns(tensor_rows(padded, 0, count), 0, vocab_size);
    Tensor x = tensor_rows(l->x, first, count), dx = tensor_rows(l->dx, first, count);
    linear_forward(backend, (LinearForward){.out = logits, .x = x, .weight = l->weight});
    linear_backward_input(backend, (LinearBackwardInput){.dx = dx, .dout = logits, .weight = l->weight});
    linear_backward_weight(
        backend, (LinearBackwardWeight){
                     .dweight = l->dweight, .dout = logits, .x = x, .alpha = 1, .accumulate = first > 0});
  }
  memory_pop_to(&backend->memory, mark);
}

// --- a trained state ---------------------------------------------------------------------------------------

// What --checkpoint and --data give, on the host and in the backend's dtype.
typedef struct {
  void *x, *weight; // [N, H], [V, H]
  int32_t *targets; // [N]
  int64_t counted;  // targets that no mask leaves out
} State;

// Fills x and targets, one sequence of the data at a time. On a plan, where loader and state are not read, one
// forward pass counts its stack.
static void read_hidden_states(const Settings *o, Model *model, Backend *backend, const Loader *loader,
                               State *state) {
  int64_t hidden_size = o->hidden_size, seq_len = o->seq_len;
  Tensor x = reserve(backend, "x", MEMORY_ACTIVATIONS, backend->dtype, seq_len, hidden_size);
  Batch batch = {
      .batch = 1, .seq_len = seq_len, .tokens = reserve_vector(backend, "tokens", DTYPE_I32, seq_len)};
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

static Backend *open_backend(const Settings *o) {
  const char *reason = NULL;
  Backend *backend = o->device == ON_CUDA ? cuda_backend_create(ranks_self()->local_rank, o->dtype, &reason)
                                          : cpu_backend_create(false);
  if (!backend) fail("--device cuda: %s; --plan needs no GPU", reason);
  return backend;
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
  Path tokenizer = path_in(o->checkpoint, "tokenizer.json");
  if (source->kind == SOURCE_TEXT && path_exists(tokenizer.text))
    warn("%s is read byte by byte, though %s has a tokenizer; tools/prepare_data.py makes its text into "
         "tokens",
         source->name, o->checkpoint);

  Backend *backend = open_backend(o);
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
  if (!o->json)
    printf("x, W and targets: %s on %s, sequences of %s\n", o->checkpoint, source->name,
           text_grouped(o->seq_len).text);
  model_destroy(&model);
  backend_destroy(backend);
  source_close(source);
  return state;
}

// --- what is timed -----------------------------------------------------------------------------------------

typedef struct {
  char name[64];
  const char *mode, *term; // for JSON; a term's name or NULL
  LinearCrossEntropy call; // the three plain GEMMs have none
  int rung;                // of the ladder, 1 to RUNGS; 0: the call as it is
  int base;                // what it alternates with
  size_t held, loss_alone; // bytes
} Work;

enum { GEMMS, FUSED }; // the first works: three plain GEMMs, the fused mode at the first chunk
enum { MAX_WORKS = (2 + MAX_ITEMS) * MAX_ITEMS + 14 };

typedef struct {
  const Settings *settings;
  const State *state; // NULL: random
  Shape shape;
  LceTensors layer;
  size_t layer_total; // bytes of the layer's tensors and of what the backend keeps
  int64_t gemm_rows;  // tokens of the plain GEMMs at a time: all where memory suffices
  Work works[MAX_WORKS];
  Tensor barrier, sampled;            // fp32 [1]; TileSampling's stats
  int count, first_split, first_term; // terms come last
} Bench;

__attribute__((format(printf, 5, 6))) static Work *add_work(Bench *b, int base, const char *mode,
                                                            LinearCrossEntropy call, const char *name, ...) {
  Work *work = &b->works[b->count++];
  va_list arguments;
  va_start(arguments, name);
  vsnprintf(work->name, sizeof work->name, name, arguments);
  va_end(arguments);
  work->base = base;
  work->mode = mode;
  work->call = call;
  return work;
}

static LinearCrossEntropy *add_term(Bench *b, const char *name) {
  Work *work = add_work(b, FUSED, "fused", b->works[FUSED].call, "+ %s", name);
  work->term = name;
  return &work->call;
}

static Tensor reserve_ones(Backend *backend, const char *name, int64_t count) {
  Tensor t = reserve_vector(backend, name, DTYPE_F32, count);
  if (backend->memory.planning) return t;
  float *values = host_alloc(count, sizeof *values, name);
  for (int64_t i = 0; i < count; i++) values[i] = 1;
  upload(backend, t, values);
  free(values);
  return t;
}

static void add_terms(Bench *b) {
  Backend *backend = b->layer.backend;
  int64_t tokens = b->shape.tokens, vocab_size = b->shape.vocab_size;
  Tensor stats = reserve_vector(backend, "stats", DTYPE_F32, tokens);
  add_term(b, "mean on the device")->mean = true;
  add_term(b, "token weights")->token_weights = reserve_ones(backend, "token weights", tokens);
  add_term(b, "class weights")->terms.class_weights = reserve_ones(backend, "class weights", vocab_size);
  LinearCrossEntropy *call = add_term(b, "z-loss");
  call->terms.z_loss = 1e-4f;
  call->outputs.z_loss = stats;
  add_term(b, "label smoothing")->terms.label_smoothing = 0.1f;
  add_term(b, "temperature")->terms.temperature = 0.7f;
  add_term(b, "soft-cap")->terms.softcap = 30;
  call = add_term(b, "bias");
  call->bias = reserve_vector(backend, "bias", backend->dtype, vocab_size);
  call->dbias = reserve_vector(backend, "dbias", DTYPE_F32, vocab_size);
  call = add_term(b, "entropy");
  call->entropy_weights = reserve_ones(backend, "entropy weights", tokens);
  call->outputs.entropy = stats;
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

static void add_rungs(Bench *b) {
  LinearCrossEntropy call =
      layer_call(&b->layer, LCE_FUSED, min_i64(b->settings->chunks[0], b->shape.tokens));
  for (int rung = 1; rung <= RUNGS; rung++)
    add_work(b, GEMMS, "ladder", call, "%s", ladder_names[rung - 1])->rung = rung;
}

static void add_modes(Bench *b) {
  const Settings *o = b->settings;
  const LceTensors *layer = &b->layer;
  for (int i = 0; i < o->chunk_count; i++)
    add_work(b, GEMMS, "fused", layer_call(layer, LCE_FUSED, o->chunks[i]), "fused, chunk %lld",
             (long long)o->chunks[i]);
  for (int i = 0; i < o->sample_count * o->chunk_count; i++) {
    int64_t chunk = o->chunks[i % o->chunk_count];
    double full_mass = o->samples[i / o->chunk_count];
    add_work(b, GEMMS, "fused", layer_call(layer, LCE_FUSED, chunk), "M0 %g, chunk %lld", full_mass,
             (long long)chunk)
        ->call.sampling = (TileSampling){.full_mass = (float)full_mass, .stats = b->sampled};
  }
  if (o->materialized)
    add_work(b, GEMMS, "materialized", layer_call(layer, LCE_MATERIALIZED, 1), "materialized");
  b->first_split = b->count;
  for (int i = 0; i < o->chunk_count && layer->backend->ranks > 1; i++)
    add_work(b, FUSED + i, "split", split_call(layer, o->chunks[i]), "split, chunk %lld",
             (long long)o->chunks[i]);
  b->first_term = b->count;
  if (o->terms) add_terms(b);
}

// Reserves all tensors and lists what is timed.
static Bench *bench_create(const Settings *o, Backend *backend, Shape shape) {
  Bench *b = host_alloc(1, sizeof *b, "the benchmark");
  *b = (Bench){
      .settings = o, .shape = shape, .gemm_rows = shape.tokens, .layer = layer_reserve(backend, shape)};
  b->layer_total = backend->memory.ledger.total;
  b->barrier = reserve_vector(backend, "barrier", DTYPE_F32, 1);
  b->sampled = reserve_vector(backend, "tiles dropped", DTYPE_F32, 3);
  add_work(b, GEMMS, "gemms", (LinearCrossEntropy){0}, "three plain GEMMs");
  (o->ladder ? add_rungs : add_modes)(b);
  return b;
}

static void run_work(const Bench *b, const Work *work) {
  if (work == &b->works[GEMMS])
    layer_gemms(&b->layer, b->gemm_rows);
  else if (work->rung)
    ladder_run(b->layer.backend, work->rung, work->call);
  else
    linear_cross_entropy(b->layer.backend, work->call);
}

// --- memory ------------------------------------------------------------------------------------------------

// Runs it once and returns the bytes that it pushed at its peak, its operations' scratch included.
static size_t held_by(const Bench *b, const Work *work) {
  const Backend *backend = b->layer.backend;
  Ledger *ledger = &b->layer.backend->memory.ledger;
  // Rungs before the last call kernels of their own, on a plan too; none holds more than fp32 logits and gradients.
  size_t logits_row = (size_t)backend->scratch->logits_stride(b->shape.vocab_size, DTYPE_F32) * sizeof(float);
  if (backend->memory.planning && work->rung && work->rung < RUNGS)
    return 2 * (size_t)b->shape.tokens * logits_row + ((size_t)64 << 20);
  size_t before = ledger->stack;
  ledger->stack_peak = before;
  run_work(b, work);
  return ledger->stack_peak - before;
}

// Bytes that the device can give now. A host's memory is shared: what is free counts, not what is there.
static size_t usable_bytes(const Backend *backend) {
  size_t usable = machine_usable_bytes(backend);
  size_t left = backend->device == ON_CPU ? system_bytes("/proc/meminfo", "MemAvailable") : 0;
  if (left && left < usable) usable = left;
  return usable - usable / 32; // a margin for what the ledger does not count
}

// Plans every work. Fails where one needs more than `usable` bytes (0: boundless); the plain GEMMs then take fewer
// tokens at a time. Returns the stack that all of them need.
static size_t plan_works(Bench *b, size_t usable) {
  Ledger *ledger = &b->layer.backend->memory.ledger;
  size_t stack = 0, left = usable > ledger->total ? usable - ledger->total : 0;
  for (Work *work = &b->works[1]; work < b->works + b->count; work++) {
    work->held = held_by(b, work);
    if (usable && work->held > left)
      fail("%s needs %s, and this device has %s for it; give fewer --tokens or a smaller --chunk", work->name,
           text_bytes(ledger->total + work->held).text, text_bytes(usable).text);
    if (work->held > stack) stack = work->held;
    Work alone = *work;
    alone.call.dx = alone.call.dweight = alone.call.dbias = (Tensor){0};
    if (!work->rung) work->loss_alone = held_by(b, &alone);
  }
  size_t gemms = held_by(b, &b->works[GEMMS]);
  for (; usable && gemms > left && b->gemm_rows > 1; gemms = held_by(b, &b->works[GEMMS]))
    b->gemm_rows = ceil_div(b->gemm_rows, 2);
  return gemms > stack ? gemms : stack;
}

// --- time --------------------------------------------------------------------------------------------------

static void wait_for_all(const Bench *b) {
  Backend *backend = b->layer.backend;
  if (backend->ranks > 1) all_reduce(backend, (Collective){.out = b->barrier, .x = b->barrier});
  backend_synchronize(backend);
}

// With one CPU thread the process's own time, which other programs on the machine disturb less.
static double clock_seconds(const Backend *backend) {
  struct timespec t;
  if (backend->device == ON_CUDA || backend->ranks > 1 || omp_get_max_threads() > 1) return now_seconds();
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double seconds_of(const Bench *b, const Work *work) {
  wait_for_all(b);
  double start = clock_seconds(b->layer.backend);
  run_work(b, work);
  wait_for_all(b);
  double seconds = clock_seconds(b->layer.backend) - start;
  machine_broadcast(b->layer.backend, &seconds, sizeof seconds); // how often they run follows from it
  return seconds;
}

// Medians over the rounds. The ratio is that of neighbours, work over base: a GPU at its power limit is slower
// after harder work, so only neighbours compare.
typedef struct {
  double base, work; // seconds
  double ratio;
} Medians;

// Work and base alternate, at first untimed: a GPU reaches its power limit only after a while.
static Medians measure(const Bench *b, const Work *work) {
  const Work *base = &b->works[work->base];
  double bases[MAX_ROUNDS], works[MAX_ROUNDS], ratios[MAX_ROUNDS];
  double warm_up = b->layer.backend->device == ON_CUDA ? 0.7 : 0.1;
  int64_t rounds = b->settings->repeat;
  for (double spent = 0; spent < warm_up;) spent += seconds_of(b, base) + seconds_of(b, work);
  for (int64_t i = 0; i < rounds; i++) {
    bases[i] = seconds_of(b, base);
    works[i] = seconds_of(b, work);
    ratios[i] = works[i] / bases[i];
  }
  return (Medians){median(bases, rounds), median(works, rounds), median(ratios, rounds)};
}

// --- output ------------------------------------------------------------------------------------------------

static void report_json(const Bench *b, const Work *work, const Medians *m) {
  const Backend *backend = b->layer.backend;
  const Shape *s = &b->shape;
  printf("{\"event\":\"layer\",\"name\":\"%s\",\"mode\":\"%s\",\"dtype\":\"%s\",\"device\":\"%s\"",
         work->name, work->mode, dtype_name(s->dtype), device_name(backend->device));
  printf(",\"tokens\":%lld,\"hidden_size\":%lld,\"vocab_size\":%lld,\"ranks\":%d", (long long)s->tokens,
         (long long)s->hidden_size, (long long)s->vocab_size, backend->ranks);
  printf(",\"layer_bytes\":%zu,\"ledger_bytes\":%zu", work->held, b->layer_total + work->held);
  if (work->loss_alone) printf(",\"loss_alone_bytes\":%zu", work->loss_alone);
  if (work->term) printf(",\"term\":\"%s\"", work->term);
  if (work->rung) printf(",\"rung\":%d", work->rung);
  if (work->call.mode == LCE_FUSED) printf(",\"chunk\":%lld", (long long)work->call.chunk);
  if (work->call.sampling.full_mass > 0) printf(",\"sample\":%g", (double)work->call.sampling.full_mass);
  if (m)
    printf(",\"gpu\":\"%s\",\"seconds\":%.9g,\"%s\":%.9g,\"ratio\":%.9g", backend->description, m->work,
           work->base == GEMMS ? "floor_seconds" : "base_seconds", m->base, m->ratio);
}

static void report_text(const Work *work, const Medians *m) {
  printf("  %-32s", work->name);
  if (m) printf(" %9.2f ms %7.3f", 1e3 * m->work, m->ratio);
  if (work->held) printf("   %s", text_bytes(work->held).text);
}

// A row of the table, or an object. m: NULL where nothing was measured.
static void report(const Bench *b, const Work *work, const Medians *m) {
  bool json = b->settings->json;
  json ? report_json(b, work, m) : report_text(work, m);
  if (m && tensor_exists(work->call.sampling.stats)) {
    float stats[3];
    backend_to_host(b->layer.backend, stats, b->sampled);
    printf(json ? ",\"dropped_tiles\":%.9g,\"dropped_mass\":%.9g"
                : "   drops %.1f%% of the tiles, a mass of %.3g per token",
           (json ? 1 : 100) * (double)(stats[0] / fmaxf(1, stats[1])),
           (double)stats[2] / (double)b->shape.tokens);
  }
  puts(json ? "}" : "");
  fflush(stdout);
}

static void heading(const Bench *b, const char *what, const char *ratio) {
  if (!b->settings->json) printf("  %-32s %12s %7s   held\n", what, "median", ratio);
}

// The mean loss, to compare with what the model's run says.
static void report_loss(const Bench *b) {
  int64_t tokens = b->shape.tokens, counted = b->state->counted;
  float *loss = host_alloc(tokens, sizeof *loss, "the losses");
  double mean = 0;
  run_work(b, &b->works[FUSED]);
  backend_to_host(b->layer.backend, loss, b->layer.loss);
  for (int64_t n = 0; n < tokens; n++) mean += (double)loss[n] / (double)max_i64(counted, 1);
  free(loss);
  if (b->settings->json)
    printf("{\"event\":\"loss\",\"loss\":%.9g,\"targets\":%lld}\n", mean, (long long)counted);
  else
    printf("  loss %.4f over %s targets\n", mean, text_grouped(counted).text);
}

static void print_plan(const Bench *b) {
  if (!b->settings->json) printf("  %-32s   held\n", "");
  for (int i = 1; i < b->count; i++) report(b, &b->works[i], NULL);
}

static void run(Bench *b) {
  run_work(b, &b->works[GEMMS]); // everything once: the GEMMs' algorithms are chosen
  for (int i = 1; i < b->count; i++) b->works[i].held = held_by(b, &b->works[i]);
  if (b->state) report_loss(b);
  for (int i = 1; i < b->count; i++) {
    const Work *work = &b->works[i];
    Medians m = measure(b, work);
    if (i == 1) heading(b, "", "ratio");
    if (i == 1 && !b->settings->json) report(b, &b->works[GEMMS], &(Medians){m.base, m.base, 1});
    if (i == b->first_split && i < b->first_term) heading(b, "split over the ranks", "over one's");
    if (i == b->first_term) heading(b, "with a term", "over without");
    report(b, work, &m);
  }
}

int main(int argc, char **argv) {
  ranks_begin();
  Settings o = parse(argc, argv);
  State state = {0};
  if (o.checkpoint) state = read_state(&o);
  Shape shape = {o.tokens, o.hidden_size, o.vocab_size, o.dtype};
  Backend *plan = plan_backend_create(o.device, o.dtype), *backend = NULL;
  if (!o.plan) {
    backend = open_backend(&o);
    machine_join_ranks(backend);
    plan->ranks = backend->ranks;
    plan->no_sampling = backend->no_sampling;
  }
  if (!o.chunk_count) o.chunks[o.chunk_count++] = lce_default_chunk(o.device, o.tokens);
  if (!o.json)
    printf("%s: N %s, H %s, V %s\n", (backend ? backend : plan)->description, text_grouped(o.tokens).text,
           text_grouped(o.hidden_size).text, text_grouped(o.vocab_size).text);
  Bench *planned = bench_create(&o, plan, shape);
  size_t stack = plan_works(planned, backend ? usable_bytes(backend) : 0);
  if (!backend) {
    print_plan(planned);
  } else {
    Bench *b = bench_create(&o, backend, shape);
    b->gemm_rows = planned->gemm_rows;
    for (int i = 1; i < b->count; i++) b->works[i].loss_alone = planned->works[i].loss_alone;
    b->state = o.checkpoint ? &state : NULL;
    if (b->state) {
      upload(backend, b->layer.x, state.x);
      upload(backend, b->layer.weight, state.weight);
      upload(backend, b->layer.targets, state.targets);
    } else {
      layer_fill(&b->layer);
    }
    memory_set_stack(&backend->memory, stack);
    run(b);
    free(b);
    backend_destroy(backend);
  }
  free(planned);
  backend_destroy(plan);
  free(state.x);
  free(state.weight);
  free(state.targets);
  free(o.data.items);
  return 0;
}
