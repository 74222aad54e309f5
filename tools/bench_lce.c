// Time and memory of linear_cross_entropy (LM head + loss), forward and backward: each mode and chunk
// alternates with the three plain GEMMs that no implementation can do without (logits = X W^T, dX = L W, dW =
// L^T X over all tokens at once), each term of the loss (--terms) with the loss without it. Prints medians,
// ratios, and the bytes pushed beyond inputs and gradients. The last term is sampling at M0 = 1. --ladder
// times the rungs of kernels/lce/LCE.md instead: on the CPU 1 to 5 and 7, with the errors against float64, on a
// Hopper 6 and 7. Token 0's target leads by about 30; its error is relative to the target's part, c W[y].
//
// How many tiles sampling drops depends on the logits. --checkpoint takes a trained state: W is the model's
// head, x the final norm's output for the first N tokens that ./train --init DIR --data PATH --val-fraction 0
// reads (seed 1), targets the tokens after them. With held-out data as PATH the state is that of validation.
// The printed mean loss can be compared with the run's.
//
// Started as several ranks, it also times the head split over them (--vocab-parallel of ./train) against the
// whole head on every rank: the same work for each. A time is then the slowest rank's.
//
// --json prints an object per line instead: mode, chunk, shape, dtype, device, layer_bytes (pushed beyond
// inputs and gradients), loss_alone_bytes (planned: the same without gradients), ledger_bytes (layer_bytes
// and the tensors), seconds, ratio, and floor_seconds of the GEMMs or base_seconds without the term; rung, gemms
// (how many it computes), and loss_error, dx_error, dweight_error and certain_error with --ladder.
//
//  bench_lce --device cuda --tokens 16384 --hidden-size 2048 --vocab 131072 --chunk 4096,2048,1024 --terms
//  bench_lce --device cuda --tokens 16384 --hidden-size 2048 --vocab 131072 --chunk 4096 --fp8
//  bench_lce --device cuda --tokens 16384 --chunk 4096,1024 --sample 1,0.5 --terms --checkpoint runs/gpt2
//    --data 'shards/*.bin'
//  bench_lce --device cuda --tokens 81920 --hidden-size 4096 --vocab 128256 --materialized --plan --json
//  OMP_NUM_THREADS=1 bench_lce --ladder --vocab 32768 --chunk 128
//  bench_lce --device cuda --ladder --materialized --tokens 8192 --hidden-size 4096 --chunk 1024
//  tools/launch 4 tools/bench_lce --device cuda --tokens 16384 --hidden-size 4096 --vocab 128256
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <stb/stb_ds.h>

#include "data/file.h"
#include "data/loader.h"
#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/random.h"
#include "kernels/base/system.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/hf_config.h"
#include "model/checkpoint/weights.h"
#include "tools/ladder/ladder.h"
#include "trainer/option_rows.h"
#include "trainer/trainer.h"

static const char advice[] =
    "give fewer --tokens, a smaller --chunk or, with --checkpoint, a shorter --seq-len";

enum { MAX_ITEMS = 32, MAX_ROUNDS = 99 }; // items of a list; rounds of --repeat

typedef struct {
  int64_t tokens, hidden_size, vocab_size, seq_len, repeat;
  DeviceKind device;
  Dtype dtype; // DTYPE_COUNT: the device's
  const char *chunk_list, *sample_list, *checkpoint;
  const char **data; // an array of stb_ds.h
  bool fp8, materialized, terms, ladder, plan, json;
  int chunk_count, sample_count;
  int64_t chunks[MAX_ITEMS];
  double samples[MAX_ITEMS]; // full masses
} Settings;

#define OPTION_VALUES Settings
static const Option option_rows[] = {
    {INTEGER("tokens", "N", tokens, 1, INT32_MAX), "Tokens", .initial = "1024"},
    {INTEGER("hidden-size", "H", hidden_size, 1, INT32_MAX), "Hidden size", .initial = "256"},
    {INTEGER("vocab", "V", vocab_size, 1, INT32_MAX), "Vocabulary size", .initial = "128256"},
    {TEXT("chunk", "C[,C...]", chunk_list), "Tokens per chunk (default: as for ./train --lce-chunk)"},
    {LIST("data", "PATH", data), "What the model reads: text or shards, as for ./train; may be given again",
     NEEDS("checkpoint", 1, "without a model x is random")},
    {TEXT("checkpoint", "DIR", checkpoint),
     "Take x, W, H and V from a model: a checkpoint of ./train, or config.json and safetensors of Hugging "
     "Face (default: x and W are random)",
     NEEDS("data", 1, "the model reads it to make x"),
     EXCLUDES("the model has its own sizes", "hidden-size", "vocab")},
    {INTEGER("seq-len", "T", seq_len, 1, INT32_MAX), "Tokens per sequence (default: as for ./train)",
     NEEDS("checkpoint", 1, "without a model x is random")},
    {TEXT("sample", "M0[,M0...]", sample_list),
     "Also time the fused mode with sampled tiles, at each chunk; M0 as for ./train --lce-sample"},
    {CHOICE("device", device, "cpu", "cuda"), "Where to run", .initial = "cpu"},
    {CHOICE("dtype", dtype, "fp32", "bf16"), "Type of x, W and dX (default: bf16 on cuda)"},
    {INTEGER("repeat", "R", repeat, 1, MAX_ROUNDS), "Rounds, of which the median counts", .initial = "7"},
    {FLAG("fp8", fp8, true), "Also time these with FP8 logits; a call makes the codes of W once"},
    {FLAG("materialized", materialized, true), "Time materialized logits, too"},
    {FLAG("terms", terms, true), "Time the fused mode with each term of the loss, at the first chunk"},
    {FLAG("ladder", ladder, true), "Time the versions of kernels/lce/LCE.md instead, at the first chunk",
     EXCLUDES("the ladder has seven rungs and no more", "terms", "sample", "fp8")},
    {FLAG("plan", plan, true), "Compute nothing: only the memory, also for a GPU that is not here",
     EXCLUDES("a plan computes nothing", "checkpoint", "ladder")},
    {FLAG("json", json, true), "Print a JSON object per line instead of the table"},
    {.type = OPTION_END}};

// Sets the array that begins at the item's field, and returns how many items the list has.
static int parse_list(const char *list, Option item, Settings *o) {
  int count = 0;
  Reason reason;
  char *rest = NULL, *words = strdup(list ? list : "");
  for (char *word = strtok_r(words, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
    if (count++ == MAX_ITEMS) fail("--%s: give at most %d", item.name, MAX_ITEMS);
    if (!option_set(&item, o, word, &reason)) fail("--%s %s: %s", item.name, word, reason.text);
    item.offset += item.size;
  }
  free(words);
  return count;
}

static Settings parse(int argc, char **argv) {
  static const OptionTable table = {
      .rows = option_rows,
      .doc = "Times LM head + loss, forward and backward, against the three GEMMs it is made of.",
      .stray = "paths are given with --checkpoint DIR and --data PATH"};
  bool given[OPTION_ROWS_MAX] = {false};
  Settings o = {.dtype = DTYPE_COUNT};
  option_table_parse(&table, &o, given, argc, argv);
  option_require_possible(option_rows, &o, given);
  if (o.device == ON_CPU && o.dtype == DTYPE_BF16)
    fail("the CPU computes in fp32 only; leave out --dtype, or give --device cuda");
  if (o.dtype == DTYPE_COUNT) o.dtype = o.device == ON_CUDA ? DTYPE_BF16 : DTYPE_F32;
  o.chunk_count = parse_list(o.chunk_list, (Option){INTEGER("chunk", "C", chunks[0], 1, INT32_MAX)}, &o);
  o.sample_count = parse_list(o.sample_list, (Option){NUMBER("sample", "M0", samples[0], 1e-30, 1e6)}, &o);
  if (!o.chunk_count) o.chunks[o.chunk_count++] = lce_default_chunk(o.device, o.tokens);
  return o;
}

// --- a trained state ---------------------------------------------------------------------------------------

// Tensors of --checkpoint and --data on the host, in the backend's dtype; x and targets of whole sequences.
typedef struct {
  void *x, *weight; // [N or more, H], [V, H]
  int32_t *targets;
} State;

static Backend *open_backend(const Settings *o) {
  return machine_open(
      &(Options){.device = o->device == ON_CUDA ? DEVICE_CUDA : DEVICE_CPU, .dtypes.weight = o->dtype});
}

// Bytes that the device can give now. A host's memory is shared, so only free memory counts.
static size_t usable_bytes(const Backend *backend) {
  size_t usable = machine_usable_bytes(backend);
  size_t left = backend->device == ON_CPU ? host_memory_left() : 0;
  if (left && left < usable) usable = left;
  return usable - usable / 32; // a margin for what the ledger does not count
}

// Reads `sequences` of the data with the model, one at a time. Nothing of it is left on the device.
static State run_model(const Settings *o, const ModelConfig *config, const Loader *loader,
                       int64_t sequences) {
  Backend *backend = open_backend(o);
  Memory *memory = &backend->memory;
  Model model;
  model_create(&model, config, backend, (ParameterDtypes){.weight = o->dtype, .weights_only = true},
               o->seq_len);
  weights_load(&model, backend, o->checkpoint, false);
  size_t usable = usable_bytes(backend), weights = memory->ledger.total;
  memory_set_stack(memory, usable > weights ? usable - weights : 0);
  Batch batch = {.batch = 1, .seq_len = o->seq_len};
  batch.tokens = memory_push_1d(memory, "tokens", MEMORY_TABLES, DTYPE_I32, o->seq_len);
  Tensor head = model.head.value,
         x = memory_push_2d(memory, "x", MEMORY_ACTIVATIONS, o->dtype, o->seq_len, o->hidden_size);
  int32_t *tokens = host_alloc(o->seq_len, sizeof *tokens, "a sequence");
  State state = {.x = host_alloc(sequences, tensor_bytes(x), "x"),
                 .weight = host_alloc(1, tensor_bytes(head), "the head"),
                 .targets = host_alloc(sequences * o->seq_len, sizeof *tokens, "the targets")};
  for (int64_t i = 0; i < sequences; i++) {
    const Launch *self = ranks_self();
    loader_train_batch(loader, i, self->rank, self->ranks, tokens, state.targets + i * o->seq_len, NULL);
    backend_to_device(backend, batch.tokens, tokens);
    transformer_last_hidden_state(backend, &model, &batch, x);
    backend_to_host(backend, (char *)state.x + (size_t)i * tensor_bytes(x), x);
  }
  backend_to_host(backend, state.weight, head);
  free(tokens);
  model_destroy(&model);
  backend_destroy(backend);
  return state;
}

// Also sets the sizes that the model has.
static State read_state(Settings *o) {
  ModelConfig config = hf_config_read(o->checkpoint);
  if (config.final_logit_softcapping > 0)
    fail("%s has a logit soft-cap, which is timed only as one of --terms: name another model", o->checkpoint);
  o->hidden_size = config.hidden_size;
  o->vocab_size = config.vocab_size;
  if (!o->seq_len) o->seq_len = model_default_seq_len(&config);
  model_check_seq_len(&config, o->seq_len);
  Source *source = source_open(o->data, arrlen(o->data), o->vocab_size, SPLIT_NONE);
  Loader loader =
      loader_create((LoaderOptions){.source = source, .batch = 1, .seq_len = o->seq_len, .seed = 1});
  int64_t ranks = ranks_self()->ranks, sequences = ceil_div(o->tokens, o->seq_len); // per rank
  if (loader.train_windows < ranks * sequences)
    fail("%s has %s sequences of %lld tokens, and %s tokens need %s: lower --tokens or name more --data",
         source->name, text_grouped(loader.train_windows).text, (long long)o->seq_len,
         text_grouped(ranks * o->tokens).text, text_grouped(ranks * sequences).text);
  Path tokenizer = path_in(o->checkpoint, "tokenizer.json");
  if (source->kind == SOURCE_TEXT && path_exists(tokenizer.text))
    warn("%s is read byte by byte, though %s has a tokenizer; tools/prepare_data.py makes its text into "
         "tokens",
         source->name, o->checkpoint);
  State state = run_model(o, &config, &loader, sequences);
  if (!o->json)
    printf("x, W and targets: %s on %s, sequences of %s\n", o->checkpoint, source->name,
           text_grouped(o->seq_len).text);
  source_close(source);
  return state;
}

// --- works to time -----------------------------------------------------------------------------------------

typedef struct {
  char name[64];
  LinearCrossEntropy call;
  int rung;                            // of the ladder; 0: three plain GEMMs, RUNGS: linear_cross_entropy
  int base;                            // the work it alternates with
  const char *term;                    // of the loss, or NULL
  size_t held, loss_alone;             // bytes; the second without gradients
  double seconds, base_seconds, ratio; // medians, once it is measured
  LadderErrors errors;                 // of a rung on the CPU, else 0
} Work;

enum { GEMMS, FUSED }; // the first works: three plain GEMMs, the fused mode at the first chunk
enum { MAX_WORKS = (3 + 2 * MAX_ITEMS) * MAX_ITEMS + 15 };

typedef struct {
  const Settings *settings;
  State state; // of --checkpoint
  Backend *backend;
  LinearCrossEntropy layer; // its tensors, and the fused mode at the first chunk
  size_t layer_bytes;       // the tensors' and the backend's own
  Tensor barrier, sampled;  // fp32 [1]; TileSampling's stats
  QuantizedRows codes;      // of W, with --fp8
  int64_t gemm_rows;        // tokens of the plain GEMMs at a time: all if memory suffices
  double *exact_losses;     // on the CPU with --ladder: rungs are compared with them
  Work works[MAX_WORKS];
  int count;
} Bench;

// Token 0's target leads by about 30, if rows of W are long: its probability is 1 - 1e-8.
static void make_certain(const LinearCrossEntropy *l) {
  float *x = l->x.data, square = 0;
  const float *w = (const float *)l->weight.data + *(const int32_t *)l->targets.data * l->weight.stride;
  for (int64_t i = 0; i < l->x.shape[1]; i++) square += w[i] * w[i];
  for (int64_t i = 0; i < l->x.shape[1]; i++) x[i] = 30 * w[i] / square;
}

// Fills the tensors with the state, or with random values.
static void fill(Bench *b) {
  Backend *backend = b->backend;
  const LinearCrossEntropy *l = &b->layer;
  State *s = &b->state;
  if (s->x) {
    backend_to_device(backend, l->x, s->x);
    backend_to_device(backend, l->weight, s->weight);
  } else {
    parameters_fill_normal(backend, l->x, 0, 1, 1, 100);
    parameters_fill_normal(backend, l->weight, 0, 0.02, 1, 101);
    s->targets = host_alloc(b->settings->tokens, sizeof *s->targets, "the targets");
    for (int64_t n = 0; n < b->settings->tokens; n++)
      s->targets[n] = (int32_t)(random_bits(1, 102, (uint64_t)n) % (uint64_t)b->settings->vocab_size);
  }
  backend_to_device(backend, l->targets, s->targets);
  backend_synchronize(backend);
  if (!b->settings->ladder || backend->device != ON_CPU) return;
  make_certain(l);
  b->exact_losses = ladder_exact_losses(l);
}

// Keeps the plan's findings about the work.
__attribute__((format(printf, 4, 5))) static Work *add_work(Bench *b, int base, LinearCrossEntropy call,
                                                            const char *name, ...) {
  Work *work = &b->works[b->count++];
  work->call = call;
  work->base = base;
  work->rung = RUNGS;
  va_list arguments;
  va_start(arguments, name);
  vsnprintf(work->name, sizeof work->name, name, arguments);
  va_end(arguments);
  return work;
}

static LinearCrossEntropy *add_term(Bench *b, const char *name) {
  Work *work = add_work(b, FUSED, b->layer, "+ %s", name);
  work->term = name;
  return &work->call;
}

static void add_terms(Bench *b) {
  Memory *m = &b->backend->memory;
  int64_t tokens = b->settings->tokens, vocab_size = b->settings->vocab_size;
  Tensor stats = memory_push_1d(m, "stats", MEMORY_TABLES, DTYPE_F32, tokens);
  Tensor ones = memory_push_1d(m, "ones", MEMORY_TABLES, DTYPE_F32, max_i64(tokens, vocab_size));
  Tensor bias = memory_push_1d(m, "bias", MEMORY_TABLES, b->settings->dtype, vocab_size);
  Tensor dbias = memory_push_1d(m, "dbias", MEMORY_TABLES, DTYPE_F32, vocab_size);
  if (!m->planning) parameters_fill_normal(b->backend, ones, 1, 0, 1, 0);
  fill_zero(b->backend, bias);
  add_term(b, "mean on the device")->mean = true;
  add_term(b, "token weights")->token_weights = tensor_rows(ones, 0, tokens);
  add_term(b, "class weights")->terms.class_weights = tensor_rows(ones, 0, vocab_size);
  LinearCrossEntropy *call = add_term(b, "z-loss");
  call->terms.z_loss = 1e-4f;
  call->outputs.token_z_loss = stats;
  add_term(b, "label smoothing")->terms.label_smoothing = 0.1f;
  add_term(b, "temperature")->terms.temperature = 0.7f;
  add_term(b, "soft-cap")->terms.softcap = 30;
  call = add_term(b, "bias");
  call->bias = bias;
  call->dbias = dbias;
  if (b->backend->device == ON_CPU) { // a GPU computes such rows again, one after the other
    Tensor leading = memory_push_1d(m, "leading bias", MEMORY_TABLES, b->settings->dtype, vocab_size);
    fill_zero(b->backend, leading);
    if (!m->planning)
      parameters_fill_normal(b->backend, tensor_rows(leading, vocab_size / 2, 1), 100, 0, 1, 0);
    call = add_term(b, "bias, every row repaired");
    call->bias = leading;
    call->dbias = dbias;
  }
  add_term(b, "entropy")->outputs.entropy = stats;
  add_term(b, "squared probabilities")->outputs.log_sum_sq_probs = stats;
  add_term(b, "largest logit")->outputs.max_logit = stats;
  add_term(b, "sampling")->sampling = (TileSampling){.full_mass = 1, .stats = b->sampled};
}

// Narrows the call to this rank's rows of the head.
static void split(const Bench *b, LinearCrossEntropy *call) {
  int64_t vocab_size = b->settings->vocab_size, part = ceil_div(vocab_size, b->backend->ranks);
  int64_t first = b->backend->rank * part, rows = min_i64(part, vocab_size - first);
  if (rows < 1) fail("--vocab %lld cannot be split over %d ranks", (long long)vocab_size, b->backend->ranks);
  call->weight = tensor_rows(call->weight, first, rows);
  call->dweight = tensor_rows(call->dweight, first, rows);
  call->shard = (VocabShard){.first = first, .vocab_size = vocab_size};
}

static void add_modes(Bench *b) {
  const Settings *o = b->settings;
  LinearCrossEntropy call = b->layer;
  for (int k = 0; k < o->chunk_count; k++) {
    call.chunk = o->chunks[k];
    add_work(b, GEMMS, call, "fused, chunk %lld", (long long)call.chunk);
  }
  for (int i = 0; i < o->sample_count * o->chunk_count; i++) {
    double mass = o->samples[i / o->chunk_count];
    call.chunk = o->chunks[i % o->chunk_count];
    call.sampling = (TileSampling){.full_mass = (float)mass, .stats = b->sampled};
    add_work(b, GEMMS, call, "M0 %g, chunk %lld", mass, (long long)call.chunk);
  }
  for (int k = FUSED, bf16 = b->count; k < bf16 && o->fp8; k++) {
    call = b->works[k].call;
    call.weight_codes = b->codes;
    add_work(b, GEMMS, call, "%s, fp8", b->works[k].name);
  }
  if (o->materialized) add_work(b, GEMMS, b->layer, "materialized")->call.mode = LCE_MATERIALIZED;
  for (int k = 0; k < o->chunk_count && b->backend->ranks > 1; k++) {
    call = b->works[FUSED + k].call;
    split(b, &add_work(b, FUSED + k, call, "split, chunk %lld", (long long)call.chunk)->call);
  }
  if (o->terms) add_terms(b);
}

// Pushes all tensors and lists what is timed: for the plan, and again on the device.
static void lay_out(Bench *b, Backend *backend) {
  const Settings *o = b->settings;
  Memory *m = &backend->memory;
  int64_t n = o->tokens, h = o->hidden_size, v = o->vocab_size;
  b->backend = backend;
  b->layer = (LinearCrossEntropy){.mode = LCE_FUSED,
                                  .chunk = o->ladder ? min_i64(o->chunks[0], n) : o->chunks[0],
                                  .x = memory_push_2d(m, "x", MEMORY_ACTIVATIONS, o->dtype, n, h),
                                  .weight = memory_push_2d(m, "weight", MEMORY_WEIGHTS, o->dtype, v, h),
                                  .targets = memory_push_1d(m, "targets", MEMORY_TABLES, DTYPE_I32, n),
                                  .loss = memory_push_1d(m, "losses", MEMORY_TABLES, DTYPE_F32, n),
                                  .dx = memory_push_2d(m, "dx", MEMORY_ACTIVATION_GRADIENTS, o->dtype, n, h),
                                  .dweight = memory_push_2d(m, "dweight", MEMORY_GRADIENTS, DTYPE_F32, v, h),
                                  .scale = 1.0f / (float)n};
  b->layer_bytes = m->ledger.total;
  b->barrier = memory_push_1d(m, "barrier", MEMORY_TABLES, DTYPE_F32, 1);
  b->sampled = memory_push_1d(m, "tiles dropped", MEMORY_TABLES, DTYPE_F32, 3);
  if (o->fp8)
    b->codes = (QuantizedRows){.codes = memory_push_2d(m, "codes of W", MEMORY_WEIGHTS, DTYPE_E4M3, v, h),
                               .scale = memory_push_1d(m, "scale of W", MEMORY_WEIGHTS, DTYPE_F32, 1)};
  b->count = 0;
  Work *gemms = add_work(b, GEMMS, b->layer, "three plain GEMMs");
  gemms->rung = 0;
  gemms->call.chunk = b->gemm_rows;
  if (o->ladder && o->materialized)
    add_work(b, GEMMS, b->layer, "materialized")->call.mode = LCE_MATERIALIZED;
  for (int rung = 1; o->ladder && rung <= RUNGS; rung++)
    if (ladder_has(b->backend, rung)) add_work(b, GEMMS, b->layer, "%s", ladder_names[rung - 1])->rung = rung;
  if (!o->ladder) add_modes(b);
}

// --- memory ------------------------------------------------------------------------------------------------

// Runs it once and returns the bytes that it pushed at its peak, its operations' scratch included.
static size_t held_by(const Bench *b, const Work *w) {
  Ledger *ledger = &b->backend->memory.ledger;
  // Rungs before the last run kernels even on a plan; none holds more than fp32 logits and their gradients.
  size_t tokens = (size_t)b->settings->tokens, padded_vocab = (size_t)b->settings->vocab_size + 1024;
  if (b->backend->memory.planning && w->rung && w->rung < RUNGS)
    return 2 * tokens * padded_vocab * sizeof(float) + ((size_t)64 << 20);
  ledger->stack_peak = ledger->stack;
  ladder_run(b->backend, w->rung, w->call);
  return ledger->stack_peak - ledger->stack;
}

// Plans every work, and returns the stack that all need. Fails if one needs more than `usable` bytes (0:
// boundless); the plain GEMMs then take fewer tokens at a time.
static size_t plan_works(Bench *b, size_t usable) {
  const Ledger *ledger = &b->backend->memory.ledger;
  size_t most = 0, left = usable > ledger->total ? usable - ledger->total : 0;
  for (Work *w = b->works; w < b->works + b->count; w++) {
    while ((w->held = held_by(b, w)) > left && usable && w == b->works && w->call.chunk > 1)
      w->call.chunk = b->gemm_rows = ceil_div(b->gemm_rows, 2);
    if (usable && w->held > left)
      fail("%s needs %s, and this device has %s for it; %s", w->name,
           text_bytes(ledger->total + w->held).text, text_bytes(usable).text, advice);
    if (w->held > most) most = w->held;
    Work alone = *w;
    alone.call.dx = alone.call.dweight = alone.call.dbias = (Tensor){0};
    if (w->rung == RUNGS && !b->settings->ladder) w->loss_alone = held_by(b, &alone);
  }
  return ledger->stack + most;
}

// --- time --------------------------------------------------------------------------------------------------

// The time once all ranks have arrived; with one CPU thread the process's own, which others disturb less.
static double clock_seconds(const Bench *b) {
  Backend *backend = b->backend;
  if (backend->ranks > 1) all_reduce(backend, (Collective){.out = b->barrier, .x = b->barrier});
  backend_synchronize(backend);
  if (backend->device == ON_CUDA || backend->ranks > 1 || omp_get_max_threads() > 1) return now_seconds();
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_work(const Bench *b, const Work *w) {
  if (tensor_exists(w->call.weight_codes.codes))
    quantize_rows(b->backend, (QuantizeRows){.out = b->codes, .x = b->layer.weight});
  ladder_run(b->backend, w->rung, w->call);
}

static double seconds_of(const Bench *b, const Work *work) {
  double start = clock_seconds(b);
  run_work(b, work);
  double seconds = clock_seconds(b) - start;
  machine_broadcast(b->backend, &seconds, sizeof seconds); // how often they run follows from it
  return seconds;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// The middle one of `count` values, or the mean of the middle two. Sorts them.
static double median(double *values, int64_t count) {
  qsort(values, (size_t)count, sizeof *values, by_size);
  return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

// Work and base alternate, at first untimed: a GPU reaches its power limit only after a while, and is then
// slower after harder work, so only neighbours compare.
static void measure(const Bench *b, Work *w) {
  const Work *base = &b->works[w->base];
  double bases[MAX_ROUNDS] = {0}, works[MAX_ROUNDS] = {0}, ratios[MAX_ROUNDS] = {0};
  double warm_up = b->backend->device == ON_CUDA ? 0.7 : 0.1;
  int64_t rounds = b->settings->repeat;
  for (double spent = 0; spent < warm_up;) spent += seconds_of(b, base) + seconds_of(b, w);
  for (int64_t i = 0; i < rounds; i++) {
    bases[i] = seconds_of(b, base);
    works[i] = seconds_of(b, w);
    ratios[i] = works[i] / bases[i];
  }
  w->base_seconds = median(bases, rounds);
  w->seconds = median(works, rounds);
  w->ratio = median(ratios, rounds);
  if (b->exact_losses) w->errors = ladder_errors(&b->layer, b->exact_losses);
}

// --- output ------------------------------------------------------------------------------------------------

static void print_json(const Bench *b, const Work *w) {
  const Settings *o = b->settings;
  const LinearCrossEntropy *c = &w->call;
  bool rung = o->ladder && c->mode == LCE_FUSED;
  const char *mode = rung ? "ladder" : c->shard.vocab_size ? "split" : lce_mode_name(c->mode);
  printf("{\"event\":\"layer\",\"name\":\"%s\",\"mode\":\"%s\",\"dtype\":\"%s\",\"device\":\"%s\"", w->name,
         mode, dtype_name(o->dtype), device_name(o->device));
  printf(",\"tokens\":%lld,\"hidden_size\":%lld,\"vocab_size\":%lld,\"ranks\":%d", (long long)o->tokens,
         (long long)o->hidden_size, (long long)o->vocab_size, b->backend->ranks);
  printf(",\"layer_bytes\":%zu,\"ledger_bytes\":%zu", w->held, b->layer_bytes + w->held);
  if (w->loss_alone) printf(",\"loss_alone_bytes\":%zu", w->loss_alone);
  if (w->term) printf(",\"term\":\"%s\"", w->term);
  if (rung) printf(",\"rung\":%d,\"gemms\":%d", w->rung, ladder_gemms[w->rung - 1]);
  const LadderErrors *e = &w->errors;
  if (e->dx > 0)
    printf(",\"loss_error\":%.3g,\"dx_error\":%.3g,\"dweight_error\":%.3g,\"certain_error\":%.3g", e->loss,
           e->dx, e->dweight, e->certain);
  if (c->mode == LCE_FUSED) printf(",\"chunk\":%lld", (long long)c->chunk);
  if (c->sampling.full_mass > 0) printf(",\"sample\":%g", (double)c->sampling.full_mass);
  if (w->seconds > 0)
    printf(",\"gpu\":\"%s\",\"seconds\":%.9g,\"%s\":%.9g,\"ratio\":%.9g", b->backend->description, w->seconds,
           w->base == GEMMS ? "floor_seconds" : "base_seconds", w->base_seconds, w->ratio);
}

// A row of the table, or an object.
static void report(const Bench *b, const Work *w) {
  bool json = b->settings->json, timed = w->seconds > 0;
  if (json) print_json(b, w);
  if (!json) printf("  %-32s", w->name);
  if (!json && timed) printf(" %9.2f ms %7.3f", 1e3 * w->seconds, w->ratio);
  if (!json && w->held) printf("   %9s", text_bytes(w->held).text);
  const LadderErrors *e = &w->errors;
  if (!json && e->dx > 0) printf("   %8.1e %8.1e %8.1e %8.1e", e->loss, e->dx, e->dweight, e->certain);
  if (timed && tensor_exists(w->call.sampling.stats)) {
    float stats[3];
    backend_to_host(b->backend, stats, b->sampled);
    printf(json ? ",\"dropped_tiles\":%.9g,\"dropped_mass\":%.9g"
                : "   drops %.1f%% of the tiles, a mass of %.3g per token",
           (json ? 1 : 100) * (double)(stats[0] / fmaxf(1, stats[1])),
           (double)stats[2] / (double)b->settings->tokens);
  }
  puts(json ? "}" : "");
  fflush(stdout);
}

static void heading(const Bench *b, const char *what, const char *ratio) {
  const char *errors = b->exact_losses ? "   errors: loss   dX      dW       nearly certain" : "";
  if (!b->settings->json) printf("  %-32s %12s %7s        held%s\n", what, "median", ratio, errors);
}

// Prints the mean loss, to compare with the model's run.
static void report_loss(const Bench *b, const Work *w) {
  int64_t tokens = b->settings->tokens, counted = 0;
  float *loss = host_alloc(tokens, sizeof *loss, "the losses");
  double sum = 0;
  run_work(b, w);
  backend_to_host(b->backend, loss, b->layer.loss);
  for (int64_t n = 0; n < tokens; n++) {
    sum += (double)loss[n];
    counted += b->state.targets[n] != IGNORE_INDEX;
  }
  free(loss);
  double mean = sum / (double)max_i64(counted, 1);
  if (b->settings->json)
    printf("{\"event\":\"loss\",\"of\":\"%s\",\"loss\":%.9g,\"targets\":%lld}\n", w->name, mean,
           (long long)counted);
  else
    printf("  loss %.4f over %s targets: %s\n", mean, text_grouped(counted).text, w->name);
}

static void run(Bench *b) {
  Work *gemms = &b->works[GEMMS], *first = &b->works[FUSED], *end = b->works + b->count;
  held_by(b, gemms); // everything once: the GEMMs' algorithms are chosen
  for (Work *w = first; w < end; w++) w->held = held_by(b, w);
  for (Work *w = first; w < end; w++)
    if (b->state.x && (w == first || tensor_exists(w->call.weight_codes.codes))) report_loss(b, w);
  for (Work *w = first; w < end; w++) {
    measure(b, w);
    if (w == first) {
      heading(b, "", "ratio");
      gemms->held = 0; // is not shown
      gemms->seconds = w->base_seconds;
      gemms->ratio = 1;
      if (!b->settings->json) report(b, gemms);
    }
    if (w->base != GEMMS && !w->term && w[-1].base == GEMMS) heading(b, "split over the ranks", "over one's");
    if (w->term && !w[-1].term) heading(b, "with a term", "over without");
    report(b, w);
  }
}

int main(int argc, char **argv) {
  static Bench b;
  ranks_begin();
  memory_set_advice(advice);
  Settings o = parse(argc, argv);
  if (o.checkpoint) b.state = read_state(&o);
  Backend *plan = plan_backend_create(o.device, o.dtype), *backend = o.plan ? NULL : open_backend(&o);
  if (backend) {
    backend_join_ranks(backend);
    plan_join_ranks(plan, backend->ranks);
    plan->no_sampling = backend->no_sampling;
  }
  if (!o.json)
    printf("%s: N %s, H %s, V %s\n", (backend ? backend : plan)->description, text_grouped(o.tokens).text,
           text_grouped(o.hidden_size).text, text_grouped(o.vocab_size).text);
  b.settings = &o;
  b.gemm_rows = o.tokens;
  lay_out(&b, plan);
  size_t stack = plan_works(&b, backend ? usable_bytes(backend) : 0);
  if (backend) {
    memory_set_stack(&backend->memory, stack);
    lay_out(&b, backend);
    fill(&b);
    run(&b);
    backend_destroy(backend);
  } else {
    if (!o.json) printf("  %-32s   held\n", "");
    for (int i = FUSED; i < b.count; i++) report(&b, &b.works[i]);
  }
  backend_destroy(plan);
  free(b.exact_losses);
  free(b.state.x);
  free(b.state.weight);
  free(b.state.targets);
  arrfree(o.data);
  return 0;
}
