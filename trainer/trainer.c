#include "trainer/trainer.h"

#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/integers.h"
#include "base/random.h"
#include "kernels/profile.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/weights.h"
#include "model/generate.h"
#include "trainer/plan.h"
#include "trainer/reduction.h"

_Static_assert((int)IGNORED_TARGET == (int)IGNORE_INDEX,
               "the loader and the loss agree on what is not counted");

Source *trainer_open_source(const Options *o) {
  const TextList *paths = o->data.count || !o->eval_only ? &o->data : &o->val_data;
  return paths->count ? source_open(paths->items, paths->count, o->model.vocab_size)
                      : source_open_tree(o->model.vocab_size);
}

// --- creation ----------------------------------------------------------------------------------------------

// The results of a step; all but the norm are summed over the ranks in one all-reduce.
enum {
  RESULT_LOSS,
  RESULT_Z_LOSS,
  RESULT_CORRECT,
  RESULT_ENTROPY,
  RESULT_MAX_LOGIT,
  RESULT_TILES_DROPPED,
  RESULT_TILES,
  RESULT_MASS_DROPPED,
  RESULT_STOP,
  RESULT_SECONDS,
  RESULT_NORM,
  RESULTS
};

enum { STREAM_TILES = 8 }; // of random numbers: --lce-sample's seeds

static int64_t tokens_of(const Trainer *t) {
  return t->options->batch * t->options->seq_len;
}

static Tensor reserve_table(Backend *backend, const char *name, Dtype dtype, int64_t count) {
  size_t bytes = (size_t)count * dtype_bytes(dtype);
  return tensor_1d(memory_reserve(&backend->memory, name, MEMORY_TABLES, bytes), dtype, count);
}

void trainer_create(Trainer *t, const Options *options, Backend *backend) {
  *t = (Trainer){.options = options,
                 .backend = backend,
                 .transformer = {.mode = options->mode,
                                 .chunk = options->lce_chunk,
                                 .recompute = options->recompute,
                                 .recompute_layers = options->recompute_layers,
                                 .mlp_chunk = options->mlp_chunk,
                                 .label_smoothing = (float)options->label_smoothing,
                                 .z_loss = (float)options->z_loss,
                                 .sampling.full_mass = (float)options->lce_sample}};
  int64_t tokens = tokens_of(t);
  model_create(&t->late_model, &options->model, backend, options->dtypes, options->seq_len);
  t->tokens = reserve_table(backend, "tokens", DTYPE_I32, tokens);
  t->targets = reserve_table(backend, "targets", DTYPE_I32, tokens);
  t->rows = reserve_table(backend, "counted rows", DTYPE_I32, tokens);
  t->loss = reserve_table(backend, "losses", DTYPE_F32, tokens);
  if (options->pack)
    t->documents = tensor_reshape_2d(reserve_table(backend, "documents", DTYPE_I32, 2 * tokens), 2, tokens);
  if (options->z_loss > 0)
    t->transformer.outputs.z_loss = reserve_table(backend, "z-losses", DTYPE_F32, tokens);
  if (options->metrics) {
    t->transformer.outputs.correct = reserve_table(backend, "right predictions", DTYPE_F32, tokens);
    t->transformer.outputs.entropy = reserve_table(backend, "entropies", DTYPE_F32, tokens);
    t->transformer.outputs.max_logit = reserve_table(backend, "largest logits", DTYPE_F32, tokens);
  }
  if (t->transformer.sampling.full_mass > 0) {
    t->transformer.sampling.stats = reserve_table(backend, "tiles dropped", DTYPE_F32, 3);
    fill_zero(backend, t->transformer.sampling.stats); // only the fused mode writes it
  }
  if (options->dtypes.offload & OFFLOAD_ACTIVATIONS && !options->eval_only) {
    int64_t layers = options->recompute_layers ? options->recompute_layers : options->model.num_hidden_layers;
    int64_t rows = (layers - 1) * tokens, columns = options->model.hidden_size;
    void *data = memory_reserve_host(&backend->memory, "layers' inputs", MEMORY_ACTIVATIONS,
                                     (size_t)(rows * columns) * dtype_bytes(backend->dtype));
    t->transformer.inputs = tensor_2d(data, backend->dtype, rows, columns);
  }
  t->squares = reserve_table(backend, "sum of squares", DTYPE_F32, 1);
  t->scale = reserve_table(backend, "clip factor", DTYPE_F32, 1);
  t->results = reserve_table(backend, "step results", DTYPE_F32, RESULTS * TRAINER_PENDING);
  fill_zero(backend, t->results); // entries that are never written are summed over the ranks all the same
  if (backend->memory.planning) return;
  t->host_tokens = host_alloc(options->micro_steps * tokens, sizeof *t->host_tokens, "a batch");
  t->host_targets = host_alloc(options->micro_steps * tokens, sizeof *t->host_targets, "a batch");
  if (options->pack)
    t->host_documents = host_alloc(options->micro_steps * 2 * tokens, sizeof *t->host_documents, "a batch");
  t->host_rows = host_alloc(tokens, sizeof *t->host_rows, "a batch");
  t->host_max_counted = host_alloc(options->micro_steps, sizeof *t->host_max_counted, "a batch");
  if (options->origin)
    checkpoint_load(options->origin, &t->late_model, backend, options->resumed_from != NULL);
  else
    parameters_initialize(&t->late_model.parameters, backend, options->seed);
}

void trainer_destroy(Trainer *t) {
  model_destroy(&t->late_model);
  free(t->host_tokens);
  free(t->host_targets);
  free(t->host_rows);
  free(t->host_documents);
  free(t->host_max_counted);
  free(t->token_bytes);
  *t = (Trainer){0};
}

void trainer_set_mode(Trainer *t, LceMode mode) {
  t->transformer.mode = mode;
  if (t->backend->memory.planning) return;
  Ledger plan = plan_run(t->options, t->backend->device, mode);
  backend_synchronize(t->backend);
  memory_set_stack(&t->backend->memory, plan.stack_peak);
}

// --- the update --------------------------------------------------------------------------------------------

// What is updated in one call: this rank's slice of a bucket; where nothing is spread a layer's matrices, or the rest of a
// group.
typedef struct {
  int place; // of the group, in the order of the updates
  ParameterGroup group;
  Bucket bucket;
  int64_t layer; // -1: none
} Piece;

// Steps to the next piece, from {0} to the first; false after the last. A group's last elements come first.
static bool next_piece(const Parameters *p, Piece *piece) {
  static const ParameterGroup order[GROUP_COUNT] = {GROUP_MATRICES, GROUP_HEAD, GROUP_VECTORS};
  int64_t end = piece->bucket.count ? piece->bucket.first : p->group_elements[order[piece->place]];
  while (end == 0 && ++piece->place < GROUP_COUNT) end = p->group_elements[order[piece->place]];
  if (piece->place == GROUP_COUNT) return false;
  piece->group = order[piece->place];
  int64_t above = end - p->spread.before_layers;
  bool whole = p->spread.parts == 1, of_layer = whole && piece->group == GROUP_MATRICES && above > 0;
  piece->layer = of_layer ? above / p->spread.layer - 1 : -1;
  int64_t count = of_layer ? p->spread.layer : end;
  piece->bucket = whole ? (Bucket){end - count, count} : shards_bucket(p, piece->group, end);
  return true;
}

static void update_bucket(Trainer *t, ParameterGroup group, Bucket bucket, AdamW a) {
  const Parameters *p = &t->late_model.parameters;
  a.weight = shards_weights(p, group, bucket);
  a.master = shards_slice_of_shard(p, p->master[group], bucket);
  Tensor states[OPTIMIZER_STATES];
  for (int s = 0; s < OPTIMIZER_STATES; s++) states[s] = shards_slice_of_shard(p, p->state[s][group], bucket);
  a.grad = shards_reduced_grads(p, group, bucket);
  a.seed = t->options->seed * GROUP_COUNT + (uint64_t)group;
  a.first = bucket.first + p->spread.part * (bucket.count / p->spread.parts);
  if (group == GROUP_VECTORS) a.weight_decay = 0;
  p->optimizer->update(t->backend, a, states);
  if (p->spread.parts == 1 || !shards_weights_are_whole(p, group)) return;
  Tensor whole = tensor_rows(p->value[group], bucket.first, bucket.count);
  all_gather(t->backend, (Collective){.out = whole, .x = a.weight, .async = true});
}

// Whether the backward pass sums the squares of the layers' gradients.
static bool sums_squares(const Trainer *t) {
  return t->backend->ranks == 1 && tensor_exists(t->late_model.parameters.layer_grads);
}

// The norm over all gradients (fp32 [1], written), the clip factor, and AdamW. Each rank updates its part of what is
// spread, and the new weights are gathered. step counts from 0.
static void update_weights(Trainer *t, Tensor norm, double learning_rate, int64_t step) {
  const Options *o = t->options;
  const Parameters *p = &t->late_model.parameters;
  bool started = false;
  for (Piece piece = {0}; next_piece(p, &piece); started = true) {
    if (piece.layer >= 0 && sums_squares(t)) continue; // done
    reduce(t->backend, (Reduce){.sum = t->squares,
                                .x = shards_reduced_grads(p, piece.group, piece.bucket),
                                .squares = true,
                                .accumulate = started});
  }
  if (p->spread.parts > 1) all_reduce(t->backend, (Collective){.out = t->squares, .x = t->squares});
  clip_scale(t->backend, (ClipScale){.norm = norm,
                                     .scale = t->scale,
                                     .sum_of_squares = t->squares,
                                     .max_norm = (float)o->max_grad_norm});
  AdamW settings = {.grad_scale = t->scale,
                    .lr = (float)learning_rate,
                    .beta1 = (float)o->beta1,
                    .beta2 = (float)o->beta2,
                    .epsilon = (float)o->epsilon,
                    .weight_decay = (float)o->weight_decay,
                    .step = step + 1};
  t->update_deferred = t->backend->ranks == 1;
  t->update = settings;
  t->update.async = true;
  for (Piece piece = {0}; next_piece(p, &piece);)
    if (piece.layer <= 0 || !t->update_deferred)
      update_bucket(t, piece.group, piece.bucket, settings); // what the forward pass begins with
  collectives_join(t->backend, 0);
}

// TransformerOptions.update_layer.
static void update_layer(void *trainer, int64_t layer) {
  Trainer *t = trainer;
  const Spread *spread = &t->late_model.parameters.spread;
  Bucket bucket = {spread->before_layers + layer * spread->layer, spread->layer};
  update_bucket(t, GROUP_MATRICES, bucket, t->update);
}

Model *trainer_model(Trainer *t) {
  t->update.async = false;
  for (int64_t l = 1; t->update_deferred && l < t->options->model.num_hidden_layers; l++) update_layer(t, l);
  t->update_deferred = false;
  return &t->late_model;
}

// --- a step ------------------------------------------------------------------------------------------------

Batch trainer_batch(Trainer *t, int64_t first, int64_t batch, int64_t seq_len, bool masked) {
  int64_t n = batch * seq_len, counted = 0, ignored = n;
  Batch b = {.batch = batch,
             .seq_len = seq_len,
             .tokens = tensor_rows(t->tokens, 0, n),
             .targets = tensor_rows(t->targets, 0, n),
             .counted = n};
  if (masked) b.rows = tensor_rows(t->rows, 0, n);
  if (t->backend->memory.planning) return b;
  const int32_t *targets = t->host_targets + first;
  backend_to_device(t->backend, b.tokens, t->host_tokens + first);
  backend_to_device(t->backend, b.targets, targets);
  if (!masked) return b;
  for (int64_t i = 0; i < n; i++)
    t->host_rows[targets[i] != IGNORE_INDEX ? counted++ : --ignored] = (int32_t)i;
  backend_to_device(t->backend, b.rows, t->host_rows);
  b.counted = counted;
  return b;
}

// Micro-batch m of those that were loaded.
static Batch loaded_batch(Trainer *t, int64_t m, bool masked) {
  int64_t tokens = tokens_of(t);
  Batch b = trainer_batch(t, m * tokens, t->options->batch, t->options->seq_len, masked);
  b.documents = t->documents;
  if (t->options->pack && !t->backend->memory.planning)
    backend_to_device(t->backend, b.documents, t->host_documents + 2 * m * tokens);
  return b;
}

void trainer_gradient_pass(Trainer *t) {
  for (int64_t n = 0; n < tokens_of(t) && !t->backend->memory.planning; n++)
    if (t->host_targets[n] == IGNORE_INDEX) t->host_targets[n] = 0; // the maximum of work
  Batch batch = loaded_batch(t, 0, t->options->masked);
  transformer_train(t->backend, trainer_model(t), &batch, &t->transformer, 1.f / (float)tokens_of(t), false,
                    t->loss);
}

static Tensor result_slot(const Trainer *t, int pending, int which) {
  return tensor_rows(t->results, RESULTS * pending + which, 1);
}

static Tensor number_of(Tensor t, int i) {
  return tensor_exists(t) ? tensor_rows(t, i, 1) : t;
}

// Sums the statistics of the micro-batch's tokens and tiles.
static void sum_tokens(Trainer *t, int slot, bool accumulate) {
  const Tensor stats[] = {[RESULT_LOSS] = t->loss,
                          [RESULT_Z_LOSS] = t->transformer.outputs.z_loss,
                          [RESULT_CORRECT] = t->transformer.outputs.correct,
                          [RESULT_ENTROPY] = t->transformer.outputs.entropy,
                          [RESULT_MAX_LOGIT] = t->transformer.outputs.max_logit,
                          [RESULT_TILES_DROPPED] = number_of(t->transformer.sampling.stats, 0),
                          [RESULT_TILES] = number_of(t->transformer.sampling.stats, 1),
                          [RESULT_MASS_DROPPED] = number_of(t->transformer.sampling.stats, 2)};
  for (int i = RESULT_LOSS; i <= RESULT_MASS_DROPPED; i++)
    if (tensor_exists(stats[i]))
      reduce(t->backend, (Reduce){.sum = result_slot(t, slot, i), .x = stats[i], .accumulate = accumulate});
}

// The sums over all ranks, with what the ranks share.
static void sum_results(Trainer *t, int slot) {
  Tensor shared = tensor_rows(t->results, RESULTS * slot + RESULT_STOP, 2);
  Tensor summed = tensor_rows(t->results, RESULTS * slot, RESULT_NORM);
  const float values[2] = {t->stop_requested, (float)t->step_seconds};
  backend_to_device(t->backend, shared, values);
  all_reduce(t->backend, (Collective){.out = summed, .x = summed, .async = true});
}

// The step's batches of this rank, and how many targets count in those of all ranks: the mean's normaliser.
// Where some are masked every rank counts for all, which costs less than communication.
static int64_t load_step(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  const Backend *b = t->backend;
  int64_t tokens = tokens_of(t), counted = 0;
  for (int64_t m = 0; m < o->micro_steps; m++) {
    int32_t *to = t->host_tokens + m * tokens, *targets = t->host_targets + m * tokens;
    int32_t *documents = o->pack ? t->host_documents + 2 * m * tokens : NULL;
    LoaderPlace place = {.step = step, .micro_step = m, .micro_steps = o->micro_steps, .ranks = b->ranks};
    int64_t max = 0;
    for (int i = o->masked ? 1 : b->ranks; i <= b->ranks; i++) { // this rank's batch comes last, and stays
      place.rank = (b->rank + i) % b->ranks;
      int64_t here = loader_train_batch(loader, place, to, targets, documents);
      counted += here * (o->masked ? 1 : b->ranks);
      max = max_i64(max, here);
    }
    t->host_max_counted[m] = max;
  }
  return counted;
}

void trainer_step(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  int64_t counted = 0;
  if (t->pending_count == TRAINER_PENDING)
    fail("internal: the results of %d steps were not collected", TRAINER_PENDING);
  bool planning = t->backend->memory.planning;
  profile_phase(t->backend, PHASE_STEP);
  double sent = t->backend->wire_bytes;
  // All micro-batches first: the mean's normaliser is the number of targets counted in the whole step.
  if (!planning) counted = load_step(t, loader, step);
  float scale = counted ? (float)(1.0 / (double)counted) : 0;
  int slot = t->pending_count++;
  for (int64_t m = 0; m < o->micro_steps; m++) {
    Batch batch = loaded_batch(t, m, o->masked);
    // Ranks that share the head's rows compute as many tokens as the rank with the most counted ones.
    if (o->masked && t->late_model.shard.vocab_size && !planning) batch.counted = t->host_max_counted[m];
    TransformerOptions options = t->transformer;
    options.sampling.seed = random_bits(o->seed, STREAM_TILES, (uint64_t)(step * o->micro_steps + m));
    Reduction reduction;
    reduction_begin(&reduction, t->backend, &t->late_model, m == 0, m == o->micro_steps - 1, &options);
    if (sums_squares(t) && (planning || m == o->micro_steps - 1)) options.squares = t->squares;
    if (t->update_deferred) options.update_layer = update_layer, options.update_context = t;
    transformer_train(t->backend, &t->late_model, &batch, &options, scale, m > 0, t->loss);
    t->update_deferred = false;
    sum_tokens(t, slot, m > 0);
    if (planning && m == 1) break; // the rest need the same memory, and send as much
  }
  if (t->backend->ranks > 1) {
    sum_results(t, slot);
    collectives_join(t->backend, 0);
  }
  double learning_rate = schedule_rate(&o->schedule, step);
  profile_phase(t->backend, PHASE_UPDATE);
  update_weights(t, result_slot(t, slot, RESULT_NORM), learning_rate, step);
  profile_phase(t->backend, PHASE_NONE);
  t->wire_bytes = t->backend->wire_bytes - sent;
  t->pending[slot] = (StepResult){.step = step, .learning_rate = learning_rate, .counted = counted};
}

// The mean over the step's counted targets of what was summed for them.
static double mean_of(const float *of_step, int which, int64_t counted, bool reported) {
  return !reported ? NAN : counted ? (double)of_step[which] / (double)counted : 0;
}

int trainer_collect(Trainer *t, StepResult results[TRAINER_PENDING]) {
  int count = t->pending_count;
  if (!count) return 0;
  float values[RESULTS * TRAINER_PENDING];
  backend_to_host(t->backend, values, tensor_rows(t->results, 0, RESULTS * count));
  profile_collect(t->backend);
  for (int i = 0; i < count; i++) {
    const float *of_step = values + RESULTS * i;
    results[i] = t->pending[i];
    int64_t counted = results[i].counted;
    bool metrics = t->options->metrics;
    results[i].loss = mean_of(of_step, RESULT_LOSS, counted, true);
    results[i].z_loss = mean_of(of_step, RESULT_Z_LOSS, counted, t->options->z_loss > 0);
    results[i].accuracy = mean_of(of_step, RESULT_CORRECT, counted, metrics);
    results[i].entropy = mean_of(of_step, RESULT_ENTROPY, counted, metrics);
    results[i].max_logit = mean_of(of_step, RESULT_MAX_LOGIT, counted, metrics);
    bool sampling = t->transformer.sampling.full_mass > 0;
    results[i].dropped_tiles =
        mean_of(of_step, RESULT_TILES_DROPPED, (int64_t)of_step[RESULT_TILES], sampling);
    results[i].dropped_mass = mean_of(of_step, RESULT_MASS_DROPPED, counted, sampling);
    results[i].grad_norm = (double)of_step[RESULT_NORM];
    results[i].stop = of_step[RESULT_STOP] > 0;
    results[i].agreed_seconds = (double)of_step[RESULT_SECONDS] / t->backend->ranks;
  }
  t->pending_count = 0;
  return count;
}

void trainer_gather(Trainer *t, const void *mine, void *all, size_t bytes) {
  Backend *b = t->backend;
  int64_t words = (int64_t)(bytes / 4);
  MemoryMark mark = memory_mark(&b->memory);
  Tensor gathered =
      memory_push_1d(&b->memory, "words of all ranks", MEMORY_WORKSPACE, DTYPE_I32, b->ranks * words);
  Tensor local = tensor_rows(gathered, b->rank * words, words);
  backend_to_device(b, local, mine);
  all_gather(b, (Collective){.out = gathered, .x = local});
  backend_to_host(b, all, gathered);
  memory_pop_to(&b->memory, mark);
}

void trainer_store_step(const Trainer *t, Folder *folder) {
  const Parameters *p = &t->late_model.parameters;
  const TensorToStore of_tokens[] = {{.name = "tokens", .tensor = t->tokens, .dtype = DTYPE_I32},
                                     {.name = "targets", .tensor = t->targets, .dtype = DTYPE_I32},
                                     {.name = "loss", .tensor = t->loss, .dtype = DTYPE_F32}};
  enum { OF_TOKENS = sizeof of_tokens / sizeof *of_tokens };
  TensorToStore *list = host_alloc(OF_TOKENS + p->count, sizeof *list, "a list of tensors");
  for (int i = 0; i < OF_TOKENS; i++) {
    list[i] = of_tokens[i];
    list[i].tensor = tensor_reshape_2d(list[i].tensor, t->options->batch, t->options->seq_len);
  }
  for (int64_t i = 0; i < p->count; i++) {
    const Parameter *parameter = &p->items[i];
    list[OF_TOKENS + i] = parameter_to_store("grad", p, parameter, p->grad, p->grad[parameter->group].dtype);
  }
  tensor_set_write(folder, "first_step", list, OF_TOKENS + p->count, t->backend, CHECKPOINT_SHARD_BYTES);
  free(list);
}

int64_t trainer_first_lost_token(Trainer *t) {
  int64_t tokens = tokens_of(t), lost = -1;
  float *losses = host_alloc(tokens, sizeof *losses, "the losses of a batch");
  backend_to_host(t->backend, losses, t->loss);
  for (int64_t n = tokens; n-- > 0;)
    if (!isfinite(losses[n])) lost = n;
  free(losses);
  return lost;
}

// --- evaluation ---------------------------------------------------------------------------------------------

enum { VALIDATION_ROUNDS = 64 }; // batches of a rank between two reads of the device

// What is validated: targets, and the bytes of their text.
typedef struct {
  int64_t tokens, bytes;
} Counted;

// Batch `index` on the host; a plan has none.
static void load_validation(Trainer *t, const Loader *loader, int64_t index, Counted *counted) {
  if (!loader) return;
  counted->tokens +=
      loader_validation_batch(loader, index, t->host_tokens, t->host_targets, t->host_documents);
  for (int64_t n = 0; t->token_bytes && n < tokens_of(t); n++)
    if (t->host_targets[n] != IGNORE_INDEX) counted->bytes += t->token_bytes[t->host_targets[n]];
}

// Batches [first, end), dealt to the ranks in order; their losses are added in the order of the batches.
static double validate_some(Trainer *t, const Loader *loader, int64_t first, int64_t end, Counted *counted) {
  Backend *b = t->backend;
  MemoryMark mark = memory_mark(&b->memory);
  Tensor all = memory_push_1d(&b->memory, "validation losses", MEMORY_WORKSPACE, DTYPE_F32,
                              b->ranks * VALIDATION_ROUNDS);
  Tensor local = tensor_rows(all, b->rank * VALIDATION_ROUNDS, VALIDATION_ROUNDS);
  fill_zero(b, local);
  for (int64_t i = 0; i < end - first; i++) {
    load_validation(t, loader, first + i, counted); // all ranks count all batches
    if (i % b->ranks != b->rank) continue;
    Batch batch = loaded_batch(t, 0, true); // the last one may be padded
    transformer_evaluate(b, trainer_model(t), &batch, &t->transformer, t->loss);
    reduce(b, (Reduce){.sum = tensor_rows(local, i / b->ranks, 1), .x = t->loss});
  }
  all_gather(b, (Collective){.out = all, .x = local});
  float *losses = host_alloc(b->ranks * VALIDATION_ROUNDS, sizeof *losses, "the losses of a validation");
  backend_to_host(b, losses, all);
  double sum = 0;
  for (int64_t i = 0; i < end - first; i++)
    sum += (double)losses[i % b->ranks * VALIDATION_ROUNDS + i / b->ranks];
  free(losses);
  memory_pop_to(&b->memory, mark);
  return sum;
}

double trainer_validate(Trainer *t, const Loader *loader, int64_t batches) {
  if (loader && (!batches || batches > loader->validation_batches)) batches = loader->validation_batches;
  int64_t at_once = (int64_t)t->backend->ranks * VALIDATION_ROUNDS;
  Counted counted = {0};
  double sum = 0;
  Model *model = trainer_model(t);
  profile_phase(t->backend, PHASE_EVAL);
  MemoryMark mark = model_gather_head(model, t->backend);
  for (int64_t first = 0; first < batches; first += at_once)
    sum += validate_some(t, loader, first, min_i64(first + at_once, batches), &counted);
  model_drop_head(model, t->backend, mark);
  profile_phase(t->backend, PHASE_NONE);
  t->bits_per_byte = counted.bytes ? sum / log(2) / (double)counted.bytes : NAN;
  return counted.tokens ? sum / (double)counted.tokens : 0;
}

int32_t *trainer_sample(Trainer *t, const int32_t *prompt, int64_t prompt_count, uint64_t seed,
                        int64_t *count) {
  const Options *o = t->options;
  Generation generation = {.prompt = prompt,
                           .prompt_count = prompt_count,
                           .max_new_tokens = o->sample_tokens,
                           .window = o->seq_len,
                           .sampling = {.temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p},
                           .seed = seed};
  Model *model = trainer_model(t);
  MemoryMark mark = model_gather_head(model, t->backend);
  int32_t *tokens = t->backend->rank ? NULL : generate(t->backend, model, &generation, count);
  model_drop_head(model, t->backend, mark);
  return tokens;
}
