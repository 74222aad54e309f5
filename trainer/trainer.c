#include "trainer/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/profile.h"
#include "kernels/base/system.h"
#include "kernels/cost.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/checkpoint.h"

_Static_assert((int)IGNORED_TARGET == (int)IGNORE_INDEX,
               "the loader and the loss agree on what is not counted");

static int64_t batch_tokens(const Trainer *t) {
  return t->options->batch * t->options->seq_len;
}

static Tensor reserve_table(Backend *backend, const char *name, Dtype dtype, int64_t count) {
  return memory_reserve_1d(&backend->memory, name, MEMORY_TABLES, dtype, count);
}

static void reserve_statistics(Trainer *t) {
  const Options *o = t->options;
  TokenOutputs *outputs = &t->transformer.outputs;
  t->statistics[RESULT_LOSS] = t->loss;
#define RESERVE(name, output, wanted, table)                                                                 \
  if (wanted)                                                                                                \
    t->statistics[RESULT_##name] = outputs->output =                                                         \
        reserve_table(t->backend, table, DTYPE_F32, batch_tokens(t));
  LOGGED_OUTPUTS(RESERVE)
#undef RESERVE
  double *full_mass = &t->transformer.sampling.full_mass;
  *full_mass = (float)*full_mass; // what fp32 rounds to 0 samples nothing
  if (*full_mass == 0) return;
  Tensor stats = t->transformer.sampling.stats = reserve_table(t->backend, "tiles dropped", DTYPE_F32, 3);
  fill_zero(t->backend, stats); // only the fused mode writes it
  for (int i = 0; i < 3; i++) t->statistics[RESULT_TILES_DROPPED + i] = tensor_rows(stats, i, 1);
}

void trainer_create(Trainer *t, const Options *o, Backend *backend) {
  *t = (Trainer){.options = o, .backend = backend, .transformer = o->pass};
  int64_t tokens = batch_tokens(t), step_tokens = o->micro_steps * tokens;
  model_create(&t->model, &o->model, backend, options_used_dtypes(o), o->seq_len);
  t->tokens = reserve_table(backend, "tokens", DTYPE_I32, tokens);
  t->targets = reserve_table(backend, "targets", DTYPE_I32, tokens);
  t->positions = reserve_table(backend, "counted positions", DTYPE_I32, tokens);
  t->loss = reserve_table(backend, "losses", DTYPE_F32, tokens);
  if (o->pack)
    t->documents = tensor_reshape_2d(reserve_table(backend, "documents", DTYPE_I32, 2 * tokens), 2, tokens);
  reserve_statistics(t);
  if (o->dtypes.offload & OFFLOAD_ACTIVATIONS) {
    int64_t layers = o->pass.recompute_layers ? o->pass.recompute_layers : o->model.num_hidden_layers;
    int64_t rows = (layers - 1) * tokens, columns = o->model.hidden_size;
    void *data = memory_reserve_host(&backend->memory, "layers' inputs", MEMORY_ACTIVATIONS,
                                     (size_t)(rows * columns) * dtype_bytes(backend->dtype));
    t->transformer.inputs = tensor_2d(data, backend->dtype, rows, columns);
  }
  t->squares = t->model.parameters.squares;
  t->scale = reserve_table(backend, "clip factor", DTYPE_F32, 1);
  t->results = reserve_table(backend, "step results", DTYPE_F32, RESULTS * TRAINER_PENDING);
  fill_zero(backend, t->results); // entries that are never written are summed over the ranks all the same
  if (backend->memory.planning) return;
  t->host_tokens = host_alloc(step_tokens, sizeof *t->host_tokens, "a batch");
  t->host_targets = host_alloc(step_tokens, sizeof *t->host_targets, "a batch");
  if (o->pack) t->host_documents = host_alloc(2 * step_tokens, sizeof *t->host_documents, "a batch");
  t->host_positions = host_alloc(tokens, sizeof *t->host_positions, "a batch");
  t->host_max_counted = host_alloc(o->micro_steps, sizeof *t->host_max_counted, "a batch");
  if (o->origin)
    weights_load(&t->model, backend, o->origin, o->resumed_from != NULL);
  else
    parameters_initialize(&t->model.parameters, backend, o->seed);
}

void trainer_destroy(Trainer *t) {
  model_destroy(&t->model);
  free(t->host_tokens);
  free(t->host_targets);
  free(t->host_positions);
  free(t->host_documents);
  free(t->host_max_counted);
  free(t->token_bytes);
}

// --- a step's results --------------------------------------------------------------------------------------

void trainer_begin_step(Trainer *t) {
  if (t->pending_count == TRAINER_PENDING)
    fail("internal: the results of %d steps were not collected", TRAINER_PENDING);
  profile_phase(t->backend, PHASE_STEP);
  t->wire_bytes = t->backend->wire_bytes;
}

Tensor trainer_result(const Trainer *t, int which) {
  return tensor_rows(t->results, RESULTS * t->pending_count + which, 1);
}

void trainer_add_statistics(Trainer *t, bool accumulate) {
  for (int i = 0; i < RESULT_STATISTICS; i++)
    if (tensor_exists(t->statistics[i]))
      sum_elements(
          t->backend,
          (SumElements){.sum = trainer_result(t, i), .x = t->statistics[i], .accumulate = accumulate});
}

void trainer_share_results(Trainer *t) {
  if (t->backend->ranks == 1) return;
  Tensor shared = tensor_rows(t->results, RESULTS * t->pending_count + RESULT_STOP, 2);
  Tensor summed = tensor_rows(t->results, RESULTS * t->pending_count, RESULT_NORM);
  const float values[2] = {t->stop && *t->stop, (float)t->step_seconds};
  backend_to_device(t->backend, shared, values);
  all_reduce(t->backend, (Collective){.out = summed, .x = summed, .async = true});
  collectives_join(t->backend, 0);
}

void trainer_end_step(Trainer *t, StepResult result) {
  profile_phase(t->backend, PHASE_NONE);
  t->wire_bytes = t->backend->wire_bytes - t->wire_bytes;
  t->pending[t->pending_count++] = result;
}

bool skip_empty_step(Trainer *t, int64_t step, int64_t counted) {
  if (counted) return false;
  trainer_share_results(t); // whether to stop, too
  trainer_end_step(t, (StepResult){.step = step});
  t->skipped++;
  return true;
}

int trainer_collect(Trainer *t, StepResult results[TRAINER_PENDING]) {
  int count = t->pending_count;
  if (!count) return 0;
  float values[RESULTS * TRAINER_PENDING];
  backend_to_host(t->backend, values, tensor_rows(t->results, 0, RESULTS * count));
  profile_collect(t->backend);
  for (int i = 0; i < count; i++) {
    const float *sums = values + RESULTS * i;
    StepResult *r = &results[i];
    *r = t->pending[i];
    for (int k = 0; k < RESULT_STATISTICS; k++) {
      double over = k == RESULT_TILES_DROPPED && r->counted ? (double)sums[RESULT_TILES] : (double)r->counted;
      r->means[k] = !tensor_exists(t->statistics[k]) ? NAN : over > 0 ? (double)sums[k] / over : 0;
    }
    r->grad_norm = r->counted ? (double)sums[RESULT_NORM] : 0;
    t->stopping |= sums[RESULT_STOP] > 0;
    t->agreed_seconds = (double)sums[RESULT_SECONDS] / t->backend->ranks;
  }
  t->pending_count = 0;
  return count;
}

void trainer_gradient_pass(Trainer *t) {
  for (int64_t n = 0; n < batch_tokens(t) && !t->backend->memory.planning; n++)
    if (t->host_targets[n] == IGNORE_INDEX) t->host_targets[n] = 0; // the maximum of work
  Batch batch = trainer_copy_batch(t, 0, t->options->masked);
  transformer_train(t->backend, &t->model, &batch, &t->transformer, 1.f / (float)batch_tokens(t), false,
                    t->loss);
}

void trainer_dump(const Trainer *t) {
  Reason reason;
  if (!*t->host_max_counted) fail("--dump: no target of the first step counts; raise --batch or --seq-len");
  Folder folder = folder_begin(t->options->dump, "first-step");
  const ParameterSet *p = &t->model.parameters;
  const TensorToStore per_token[] = {{.name = "tokens", .tensor = t->tokens, .dtype = DTYPE_I32},
                                     {.name = "targets", .tensor = t->targets, .dtype = DTYPE_I32},
                                     {.name = "loss", .tensor = t->loss, .dtype = DTYPE_F32}};
  TensorToStore *list = host_alloc(3 + p->count, sizeof *list, "a list of tensors");
  memcpy(list, per_token, sizeof per_token);
  for (int i = 0; i < 3; i++)
    list[i].tensor = tensor_reshape_2d(list[i].tensor, t->options->batch, t->options->seq_len);
  for (int64_t i = 0; i < p->count; i++)
    list[3 + i] = parameter_to_store("grad", p, &p->items[i], p->grad, p->grad[p->items[i].group].dtype);
  tensor_set_write(&folder, "first_step", list, 3 + p->count, t->backend, CHECKPOINT_SHARD_BYTES);
  free(list);
  if (!folder_finish(&folder, &reason)) fail("--dump: %s", reason.text);
}

// --- evaluation --------------------------------------------------------------------------------------------

enum { VALIDATION_ROUNDS = 64 }; // batches of a rank between two reads of the device

// Totals of the validation so far: the losses, the counted targets, and the bytes of their text.
typedef struct {
  double loss;
  int64_t tokens, bytes;
} Validated;

// Batch `index` of `batches` on the host; a plan has none.
static void load_validation(Trainer *t, const Loader *loader, int64_t index, int64_t batches, Validated *v) {
  if (!loader) return;
  v->tokens +=
      loader_validation_batch(loader, index, batches, t->host_tokens, t->host_targets, t->host_documents);
  for (int64_t n = 0; t->token_bytes && n < batch_tokens(t); n++)
    if (t->host_targets[n] != IGNORE_INDEX) v->bytes += t->token_bytes[t->host_targets[n]];
}

// True once any rank has received a signal; all ranks stop after the same batch. Overwrites `flag`, fp32 [1].
static bool cut_short(Trainer *t, Tensor flag) {
  float stop = t->stop && *t->stop;
  if (t->stop && t->backend->ranks > 1) {
    backend_to_device(t->backend, flag, &stop);
    all_reduce(t->backend, (Collective){.out = flag, .x = flag});
    backend_to_host(t->backend, &stop, flag);
  }
  return stop > 0;
}

// Batches from `first` on, dealt to the ranks in order; their losses are added in the order of the batches.
static void validate_some(Trainer *t, const Loader *loader, int64_t first, int64_t batches, Validated *v) {
  int64_t end = min_i64(first + (int64_t)t->backend->ranks * VALIDATION_ROUNDS, batches);
  Backend *b = t->backend;
  MemoryMark mark = memory_mark(&b->memory);
  Tensor all = memory_push_1d(&b->memory, "validation losses", MEMORY_WORKSPACE, DTYPE_F32,
                              b->ranks * VALIDATION_ROUNDS);
  Tensor local = tensor_rows(all, b->rank * VALIDATION_ROUNDS, VALIDATION_ROUNDS);
  fill_zero(b, local);
  for (int64_t i = 0; i < end - first && !t->cut_short; i++) {
    Tensor loss = tensor_rows(local, i / b->ranks, 1);
    if (i % b->ranks == 0) t->cut_short = cut_short(t, loss);
    load_validation(t, loader, first + i, batches, v); // all ranks count all batches
    if (i % b->ranks != b->rank) continue;
    Batch batch = trainer_copy_batch(t, 0, true); // the last one may be padded
    transformer_evaluate(b, &t->model, &batch, &t->transformer, t->loss);
    sum_elements(b, (SumElements){.sum = loss, .x = t->loss});
  }
  all_gather(b, (Collective){.out = all, .x = local});
  float *losses = host_alloc(b->ranks * VALIDATION_ROUNDS, sizeof *losses, "the losses of a validation");
  backend_to_host(b, losses, all);
  double sum = t->cut_short ? NAN : 0;
  for (int64_t i = 0; i < end - first; i++)
    sum += (double)losses[i % b->ranks * VALIDATION_ROUNDS + i / b->ranks];
  v->loss += sum;
  free(losses);
  memory_pop_to(&b->memory, mark);
}

double trainer_validate(Trainer *t, const Loader *loader, int64_t batches) {
  if (loader && (!batches || batches > loader->validation_batches)) batches = loader->validation_batches;
  int64_t per_round = (int64_t)t->backend->ranks * VALIDATION_ROUNDS;
  Validated v = {0};
  profile_phase(t->backend, PHASE_EVAL);
  MemoryMark mark = model_gather_head(&t->model, t->backend);
  t->cut_short = false;
  for (int64_t first = 0; first < batches && !t->cut_short; first += per_round) {
    validate_some(t, loader, first, batches, &v);
    if (t->on_validated && v.tokens && !t->cut_short)
      t->on_validated(t->observer, min_i64(first + per_round, batches), batches, v.loss / (double)v.tokens);
  }
  model_drop_head(&t->model, t->backend, mark);
  profile_phase(t->backend, PHASE_NONE);
  t->stopping |= t->cut_short;
  t->bits_per_byte = v.bytes ? v.loss / log(2) / (double)v.bytes : NAN;
  return v.tokens ? v.loss / (double)v.tokens : 0;
}

// A prompt has no more tokens than bytes; a shard may have as many as fit.
static int64_t sample_places(const Options *o) {
  int64_t prompt = text_ends_in(o->prompt, ".bin") ? o->seq_len : (int64_t)strlen(o->prompt);
  return min_i64(o->seq_len, prompt + o->generation.max_new_tokens);
}

int32_t *trainer_sample(Trainer *t, const int32_t *prompt, int64_t prompt_count, uint64_t seed,
                        int64_t *count) {
  Generation generation = t->options->generation;
  generation.prompt = prompt;
  generation.prompt_count = prompt_count;
  generation.window = sample_places(t->options);
  generation.seed = seed;
  generation.cancel = t->stop;
  MemoryMark mark = model_gather_head(&t->model, t->backend);
  int32_t *tokens = t->backend->rank ? NULL : generate_tokens(t->backend, &t->model, &generation, count);
  model_drop_head(&t->model, t->backend, mark);
  return tokens;
}

// --- signals, and the backend ------------------------------------------------------------------------------

volatile sig_atomic_t stop_requested;
static volatile sig_atomic_t stop_signal;

static void request_stop(int signal_number) {
  stop_requested = 1;
  stop_signal = signal_number;
  // A second one ends the program at once; but a closed terminal sends several, and a CPU limit one a second.
  if (signal_number != SIGHUP && signal_number != SIGXCPU) signal(signal_number, SIG_DFL);
}

// A run whose terminal or pipe is closed still saves its weights.
void stop_on_signals(void) {
  signal(SIGINT, request_stop);
  signal(SIGTERM, request_stop);
  signal(SIGXCPU, request_stop);
  if (signal(SIGHUP, request_stop) == SIG_IGN) signal(SIGHUP, SIG_IGN); // nohup
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); // a file that may not grow then fails with a sentence, like a full disk
}

// A rank among several leaves this to its launcher, which would kill the others with it.
void end_by_signal(void) {
  if (!stop_signal || ranks_self()->ranks > 1) return;
  setrlimit(RLIMIT_CORE, &(struct rlimit){0}); // SIGXCPU's
  signal(stop_signal, SIG_DFL);
  raise(stop_signal);
}

// This rank's GPU, in the ranks' order on this machine. Slurm may make only one visible to each rank.
static int ordinal(void) {
  const Launch *l = ranks_self();
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  bool one = l->launcher && !strcmp(l->launcher, "srun") && visible && *visible && !strchr(visible, ',');
  return one ? 0 : l->local_rank;
}

// All ranks compute where rank 0 does. Without MPI a rank on the CPU fails as soon as it joins the others.
static void require_same_device(const Backend *cuda, const char *reason) {
  int32_t first = cuda != NULL;
  ranks_broadcast(&first, sizeof first);
  if (first && !cuda)
    fail("rank 0 computes on a GPU and this rank does not (%s); start a rank for each GPU of a machine",
         reason);
  if (!first && cuda)
    fail("rank 0 computes on the CPU and this rank has a GPU; give --device cpu or --device cuda");
}

Backend *machine_open(Options *o) {
  const char *reason = "--device cpu";
  Backend *backend = NULL;
  if (o->device != DEVICE_CPU) {
    backend = cuda_backend_create(ordinal(), o->dtypes.weight == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16, &reason);
    if (!backend && o->device == DEVICE_CUDA)
      fail("--device cuda: %s%s", reason,
           o->fit         ? "; to plan for a GPU that is not here, give --device-memory GIB"
           : o->ranks > 1 ? "; every rank on a machine needs a GPU of its own"
                          : "; leave it out to compute on the CPU");
    if (!backend && options_given(o, "device")) printf("no GPU is used: %s\n", reason);
  }
  require_same_device(backend, reason);
  if (!backend) backend = cpu_backend_create(false);
  options_resolve_device(o, backend);
  o->card = card_of(backend->description);
  size_t given = bytes_from_gib(o->device_memory);
  if (given && given < machine_usable_bytes(backend)) {
    backend->device_capacity = backend->device_overhead + given;
    backend->memory.limit = given;
  }
  return backend;
}

// Pushes words that ranks exchange, before the step's stack has its size.
static Tensor push_words(Memory *memory, size_t bytes) {
  if (memory->stack_capacity < memory_padded(bytes)) memory_set_stack(memory, memory_padded(bytes));
  return memory_push_1d(memory, "broadcast", MEMORY_WORKSPACE, DTYPE_I32, (int64_t)bytes / 4);
}

void machine_broadcast(Backend *backend, void *bytes, size_t count) {
  if (backend->ranks == 1) return;
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor words = push_words(&backend->memory, count);
  backend_to_device(backend, words, bytes);
  broadcast_rank_0(backend, (Collective){.out = words, .x = words});
  backend_to_host(backend, bytes, words);
  memory_pop_to(&backend->memory, mark);
}

size_t machine_usable_bytes(const Backend *backend) {
  size_t capacity = backend->device_capacity, overhead = backend->device_overhead;
  return capacity > overhead ? capacity - overhead : capacity > 0;
}

size_t machine_agreed_bytes(Backend *backend, Options *options) {
  enum { COUNT = 4, WORDS = COUNT * sizeof(size_t) / 4 };
  size_t least[COUNT] = {machine_usable_bytes(backend), host_memory_left(), !options->no_sampling,
                         !options->no_codes},
         all[backend->ranks][COUNT];
  char first[sizeof backend->description]; // rank 0's
  if (backend->ranks == 1) return least[0];
  memcpy(first, backend->description, sizeof first);
  machine_broadcast(backend, first, sizeof first);
  options->card = card_of(first);
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor words = push_words(&backend->memory, sizeof all),
         own = tensor_rows(words, backend->rank * WORDS, WORDS);
  backend_to_device(backend, own, least);
  all_gather(backend, (Collective){.out = words, .x = own});
  backend_to_host(backend, all, words);
  memory_pop_to(&backend->memory, mark);
  for (int i = 0; i < COUNT * backend->ranks; i++)
    if (all[i / COUNT][i % COUNT] < least[i % COUNT]) least[i % COUNT] = all[i / COUNT][i % COUNT];
  options->host_bytes = least[1];
  options->no_sampling = !least[2];
  options->no_codes = !least[3];
  return least[0];
}
