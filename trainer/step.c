// A step: the batches of its micro-batches, gradients summed over the ranks while the backward pass computes them, then
// norm, clip factor and the optimizer at the schedule's rate.
#include <math.h>

#include "kernels/fail.h"
#include "kernels/integers.h"
#include "kernels/profile.h"
#include "kernels/random.h"
#include "trainer/trainer.h"

enum { STREAM_TILES = 8 }; // of random numbers: --lce-sample's seeds

// --- the learning rate -------------------------------------------------------------------------------------

double schedule_rate(const Schedule *s, int64_t step) {
  const double pi = 3.14159265358979323846;
  if (step < s->warmup_steps) return s->peak * (double)(step + 1) / (double)s->warmup_steps;
  int64_t span = s->total_steps - s->warmup_steps;
  double progress = span > 0 ? (double)(step - s->warmup_steps) / (double)span : 1;
  if (progress > 1) progress = 1;
  double stable = 1 - s->decay_share;
  if (s->kind == SCHEDULE_CONSTANT) return s->peak;
  if (s->kind == SCHEDULE_COSINE) progress = 0.5 * (1 - cos(pi * progress));
  if (s->kind == SCHEDULE_WSD) progress = progress > stable ? (progress - stable) / s->decay_share : 0;
  return s->peak * (1 - (1 - s->floor) * progress);
}

// --- micro-batches -----------------------------------------------------------------------------------------

Batch trainer_loaded_batch(Trainer *t, int64_t m, bool masked) {
  int64_t n = t->options->batch * t->options->seq_len, counted = 0, ignored = n;
  Batch b = {.batch = t->options->batch,
             .seq_len = t->options->seq_len,
             .tokens = t->tokens,
             .targets = t->targets,
             .documents = t->documents,
             .counted = n};
  if (masked) b.rows = t->rows;
  if (t->backend->memory.planning) return b;
  const int32_t *targets = t->host_targets + m * n;
  backend_to_device(t->backend, b.tokens, t->host_tokens + m * n);
  backend_to_device(t->backend, b.targets, targets);
  if (t->options->pack) backend_to_device(t->backend, b.documents, t->host_documents + 2 * m * n);
  if (!masked) return b;
  for (int64_t i = 0; i < n; i++) // counted positions from the front, ignored ones from the end
    t->host_rows[targets[i] != IGNORE_INDEX ? counted++ : --ignored] = (int32_t)i;
  backend_to_device(t->backend, b.rows, t->host_rows);
  b.counted = counted;
  return b;
}

// The step's batches of this rank, and how many targets count in those of all ranks: the mean's normaliser.
// Where some are masked every rank reads the other ranks' batches, too, and counts: that costs less than communication.
static int64_t load_step(Trainer *t, const Loader *loader, int64_t step) {
  const Options *o = t->options;
  const Backend *b = t->backend;
  int64_t tokens = o->batch * o->seq_len, counted = 0;
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

// --- gradients of all ranks: all-reduced or reduce-scattered (ZeRO 1 and 2) in buckets ---------------------

typedef struct {
  Backend *backend;
  const Model *model;
  bool first, last;               // micro-batch of the step
  int64_t unreduced[GROUP_COUNT]; // elements of each group, from its start
} Reduction;

// ZeRO-2 double-buffers the layers' gradients: every micro-batch's are reduced, and accumulated in the shards.
static bool reduced_every_pass(const ParameterSet *p, ParameterGroup group) {
  return p->sharding.zero == 2 && group != GROUP_HEAD;
}

static void reduce_bucket(const Reduction *r, ParameterGroup group, Bucket bucket) {
  const ParameterSet *p = &r->model->parameters;
  Collective c = {.x = shards_local_grads(p, group, bucket), .async = true};
  if (p->sharding.parts == 1) {
    c.out = c.x;
    all_reduce(r->backend, c);
    return;
  }
  c.out = shards_reduced_grads(p, group, bucket);
  c.accumulate = reduced_every_pass(p, group) && !r->first;
  reduce_scatter(r->backend, c);
}

// on_grads_ready: reduces the buckets that are complete.
static void reduce_ready(void *reduction, ParameterGroup group, int64_t first) {
  Reduction *r = reduction;
  const ParameterSet *p = &r->model->parameters;
  if (group == GROUP_HEAD && p->sharding.split_head) return; // computed from the tokens of all ranks
  if (!r->last && !reduced_every_pass(p, group)) return;
  int64_t started = 0;
  while (r->unreduced[group] > first) {
    Bucket bucket = shards_bucket(p, group, r->unreduced[group]);
    if (bucket.first < first) break;
    reduce_bucket(r, group, bucket);
    r->unreduced[group] = bucket.first;
    started++;
  }
  if (!shards_double_buffered(p, group)) return;
  // The layer below writes into the buffer of the one above, whose reduction must be done.
  collectives_join(r->backend, started < ASYNC_EVENTS ? started : 0);
}

// A tied head's gradient, [V, H] in fp32, takes longest to reduce. So that this overlaps with the layers' backward
// passes, the embedding's part, of N rows at most, is added afterwards: every rank gathers those of all ranks and adds
// them in the same order. Where the head is split a rank adds those of its own rows of the head.
static void add_embedding_grads(void *reduction, const Batch *batch, Tensor dout) {
  const Reduction *r = reduction;
  const Model *model = r->model;
  Backend *backend = r->backend;
  Memory *memory = &backend->memory;
  MemoryMark mark = memory_mark(memory);
  int64_t rows = dout.shape[0] * backend->ranks;
  Tensor tokens = memory_push_1d(memory, "tokens of all ranks", MEMORY_ACTIVATION_GRADIENTS, DTYPE_I32, rows);
  Tensor all = memory_push_2d(memory, "d residual of all ranks", MEMORY_ACTIVATION_GRADIENTS, dout.dtype,
                              rows, dout.shape[1]);
  all_gather(backend, (Collective){.out = tokens, .x = batch->tokens});
  all_gather(backend, (Collective){.out = all, .x = dout});
  if (model->shard.vocab_size)
    shard_indices(backend, (ShardIndices){.out = tokens,
                                          .indices = tokens,
                                          .first = model->shard.first,
                                          .count = model->head.grad.shape[0]});
  else
    collectives_join(backend, 0); // the head's reduction among them
  embedding_backward(backend, (EmbeddingBackward){.dtoken_weight = model->token_embedding.grad,
                                                  .dout = all,
                                                  .tokens = tokens,
                                                  .seq_len = batch->seq_len,
                                                  .accumulate_token = true});
  memory_pop_to(memory, mark);
}

// Sets the hooks for the backward pass of a micro-batch; nothing with one rank. Where gradients are accumulated over the
// micro-batches only the last one's pass reduces them. The Reduction stays where it is until the pass is over.
static void reduction_begin(Reduction *r, Backend *backend, const Model *model, bool first, bool last,
                            TransformerOptions *options) {
  if (backend->ranks == 1) return;
  const ParameterSet *p = &model->parameters;
  *r = (Reduction){.backend = backend, .model = model, .first = first, .last = last};
  for (int g = 0; g < GROUP_COUNT; g++) r->unreduced[g] = p->group_elements[g];
  bool zero_2 = p->sharding.zero == 2, positions = tensor_exists(model->position_embedding.grad);
  if (zero_2) collectives_join(backend, 0); // this pass overwrites what the last one's reads
  bool head_first = p->sharding.split_head || (last && !positions);
  options->hooks = (GradHooks){
      .context = r,
      .on_grads_ready = reduce_ready,
      .add_embedding_grads = model->config.tie_word_embeddings && head_first ? add_embedding_grads : NULL,
      .overwrite = zero_2};
}

// --- the update --------------------------------------------------------------------------------------------

// What is updated in one call: this rank's slice of a bucket; where nothing is sharded a layer's matrices, or the rest of a
// group.
typedef struct {
  int place; // of the group, in the order of the updates
  ParameterGroup group;
  Bucket bucket;
  int64_t layer; // -1: none
} UpdateRange;

// Steps to the next range, from {0} to the first; false after the last. A group's last elements come first.
static bool next_range(const ParameterSet *p, UpdateRange *range) {
  static const ParameterGroup order[GROUP_COUNT] = {GROUP_MATRICES, GROUP_EMBEDDINGS, GROUP_HEAD,
                                                    GROUP_VECTORS};
  int64_t end = range->bucket.count ? range->bucket.first : p->group_elements[order[range->place]];
  while (end == 0 && ++range->place < GROUP_COUNT) end = p->group_elements[order[range->place]];
  if (range->place == GROUP_COUNT) return false;
  range->group = order[range->place];
  bool whole = p->sharding.parts == 1, of_layer = whole && range->group == GROUP_MATRICES;
  range->layer = of_layer ? end / p->sharding.layer - 1 : -1;
  int64_t count = of_layer ? p->sharding.layer : end;
  range->bucket = whole ? (Bucket){end - count, count} : shards_bucket(p, range->group, end);
  return true;
}

// Whether the backward pass sums the squares of the layers' gradients.
static bool sums_squares(const Trainer *t) {
  return t->backend->ranks == 1 && tensor_exists(t->model.parameters.layer_grads);
}

// The norm over all gradients (fp32 [1], written), the clip factor, and the optimizer. Each rank updates its part of what is
// sharded, and the new weights are gathered. step counts from 0.
static void update_weights(Trainer *t, Tensor norm, double learning_rate, int64_t step) {
  const Options *o = t->options;
  const ParameterSet *p = &t->model.parameters;
  bool started = false;
  for (UpdateRange range = {0}; next_range(p, &range); started = true) {
    if (range.layer >= 0 && sums_squares(t)) continue; // done layer by layer, in the backward pass
    reduce(t->backend, (Reduce){.sum = t->squares,
                                .x = shards_reduced_grads(p, range.group, range.bucket),
                                .squares = true,
                                .accumulate = started});
  }
  if (p->sharding.parts > 1) all_reduce(t->backend, (Collective){.out = t->squares, .x = t->squares});
  clip_scale(t->backend, (ClipScale){.norm = norm,
                                     .scale = t->scale,
                                     .sum_of_squares = t->squares,
                                     .max_norm = (float)o->max_grad_norm});
  Update settings = {.grad_scale = t->scale,
                     .lr = (float)learning_rate,
                     .beta1 = (float)o->beta1,
                     .beta2 = (float)o->beta2,
                     .epsilon = (float)o->epsilon,
                     .momentum = (float)o->momentum,
                     .weight_decay = (float)o->weight_decay,
                     .step = step + 1,
                     .seed = o->seed};
  bool layers_apart = p->optimizer->update_layers != NULL;
  t->update_deferred = t->backend->ranks == 1 && !layers_apart;
  t->update = settings;
  t->update.async = true;
  if (layers_apart) p->optimizer->update_layers(t->backend, p, settings);
  for (UpdateRange range = {0}; next_range(p, &range);) {
    if (layers_apart && range.group == GROUP_MATRICES) continue;
    if (range.layer <= 0 || !t->update_deferred) // what the forward pass begins with
      p->optimizer->update(t->backend, p, range.group, range.bucket, settings);
  }
  collectives_join(t->backend, 0);
}

// TransformerOptions.update_layer.
static void update_layer(void *trainer, int64_t layer) {
  Trainer *t = trainer;
  const ParameterSet *p = &t->model.parameters;
  Bucket bucket = {layer * p->sharding.layer, p->sharding.layer};
  p->optimizer->update(t->backend, p, GROUP_MATRICES, bucket, t->update);
}

Model *trainer_model(Trainer *t) {
  t->update.async = false;
  for (int64_t l = 1; t->update_deferred && l < t->options->model.num_hidden_layers; l++) update_layer(t, l);
  t->update_deferred = false;
  return &t->model;
}

// --- the step ----------------------------------------------------------------------------------------------

static Tensor result_slot(const Trainer *t, int pending, int which) {
  return tensor_rows(t->results, RESULTS * pending + which, 1);
}

// Sums the statistics of the micro-batch's tokens and tiles.
static void sum_tokens(Trainer *t, int slot, bool accumulate) {
  for (int i = 0; i < RESULT_STATISTICS; i++)
    if (tensor_exists(t->statistics[i]))
      reduce(t->backend,
             (Reduce){.sum = result_slot(t, slot, i), .x = t->statistics[i], .accumulate = accumulate});
}

// The sums over all ranks, with what the ranks share.
static void sum_results(Trainer *t, int slot) {
  Tensor shared = tensor_rows(t->results, RESULTS * slot + RESULT_STOP, 2);
  Tensor summed = tensor_rows(t->results, RESULTS * slot, RESULT_NORM);
  const float values[2] = {t->stop && *t->stop, (float)t->step_seconds};
  backend_to_device(t->backend, shared, values);
  all_reduce(t->backend, (Collective){.out = summed, .x = summed, .async = true});
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
    Batch batch = trainer_loaded_batch(t, m, o->masked);
    // Ranks that share the head's rows compute as many tokens as the rank with the most counted ones.
    if (o->masked && t->model.shard.vocab_size && !planning) batch.counted = t->host_max_counted[m];
    TransformerOptions options = t->transformer;
    options.sampling.seed = random_bits(o->seed, STREAM_TILES, (uint64_t)(step * o->micro_steps + m));
    Reduction reduction;
    reduction_begin(&reduction, t->backend, &t->model, m == 0, m == o->micro_steps - 1, &options);
    if (sums_squares(t) && (planning || m == o->micro_steps - 1)) options.squares = t->squares;
    if (t->update_deferred) options.update_layer = update_layer, options.update_context = t;
    transformer_train(t->backend, &t->model, &batch, &options, scale, m > 0, t->loss);
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
