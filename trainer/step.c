// The parts of train.c's step: gradients summed over the ranks while the backward pass computes them, and the ranges
// that the optimizer updates.
#include <string.h>

#include "kernels/profile.h"
#include "kernels/random.h"
#include "trainer/trainer.h"

enum { STREAM_TILES = 8 }; // of random numbers: --lce-sample's seeds

// --- gradients of all ranks: all-reduced or reduce-scattered (ZeRO 1 and 2) in buckets ---------------------

// ZeRO-2 double-buffers the layers' gradients: every micro-batch's are reduced, and accumulated in the shards.
static bool reduced_every_pass(const ParameterSet *p, ParameterGroup group) {
  return p->sharding.zero == 2 && group != GROUP_HEAD;
}

static void reduce_bucket(const Trainer *t, ParameterGroup group, Bucket bucket) {
  const ParameterSet *p = &t->model.parameters;
  Collective c = {.x = shards_local_grads(p, group, bucket), .async = true};
  if (p->sharding.parts == 1) {
    c.out = c.x;
    all_reduce(t->backend, c);
    return;
  }
  c.out = shards_reduced_grads(p, group, bucket);
  c.accumulate = reduced_every_pass(p, group) && !t->reduction.first;
  reduce_scatter(t->backend, c);
}

// LayerDoor.grads_ready: reduces the buckets that are complete.
static void reduce_ready(void *trainer, ParameterGroup group, int64_t first) {
  Trainer *t = trainer;
  Reduction *r = &t->reduction;
  const ParameterSet *p = &t->model.parameters;
  if (group == GROUP_HEAD && p->sharding.split_head) return; // computed from the tokens of all ranks
  if (!r->last && !reduced_every_pass(p, group)) return;
  int64_t started = 0;
  while (r->unreduced[group] > first) {
    Bucket bucket = shards_bucket(p, group, r->unreduced[group]);
    if (bucket.first < first) break;
    reduce_bucket(t, group, bucket);
    r->unreduced[group] = bucket.first;
    started++;
  }
  if (!shards_double_buffered(p, group)) return;
  // The layer below writes into the buffer of the one above, whose reduction must be done.
  collectives_join(t->backend, started < ASYNC_EVENTS ? started : 0);
}

// A tied head's gradient, [V, H] in fp32, takes longest to reduce. So that this overlaps with the layers' backward
// passes, the embedding's part, of N rows at most, is added afterwards: every rank gathers those of all ranks and adds
// them in the same order. Where the head is split a rank adds those of its own rows of the head.
static void add_embedding_grads(void *trainer, const Batch *batch, Tensor dout) {
  Trainer *t = trainer;
  const Model *model = &t->model;
  Backend *backend = t->backend;
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

// The layer door for the backward pass of a micro-batch; unchanged with one rank. Where gradients are accumulated over
// the micro-batches only the last one's pass reduces them.
static void reduction_begin(Trainer *t, bool first, bool last, LayerDoor *door) {
  if (t->backend->ranks == 1) return;
  const ParameterSet *p = &t->model.parameters;
  t->reduction.first = first;
  t->reduction.last = last;
  memcpy(t->reduction.unreduced, p->group_elements, sizeof t->reduction.unreduced);
  bool zero_2 = p->sharding.zero == 2, positions = tensor_exists(t->model.position_embedding.grad);
  if (zero_2) collectives_join(t->backend, 0); // this pass overwrites what the last one's reads
  bool head_first = p->sharding.split_head || (last && !positions);
  door->context = t;
  door->grads_ready = reduce_ready;
  if (t->model.config.tie_word_embeddings && head_first) door->add_embedding_grads = add_embedding_grads;
  door->overwrite = zero_2;
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

void trainer_sum_squares(Trainer *t) {
  const ParameterSet *p = &t->model.parameters;
  profile_phase(t->backend, PHASE_UPDATE);
  bool started = false;
  for (UpdateRange range = {0}; next_range(p, &range); started = true) {
    if (range.layer >= 0 && sums_squares(t)) continue; // done layer by layer, in the backward pass
    reduce(t->backend, (Reduce){.sum = t->squares,
                                .x = shards_reduced_grads(p, range.group, range.bucket),
                                .squares = true,
                                .accumulate = started});
  }
  if (p->sharding.parts > 1) all_reduce(t->backend, (Collective){.out = t->squares, .x = t->squares});
}

void trainer_update(Trainer *t, Update settings) {
  const ParameterSet *p = &t->model.parameters;
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

// LayerDoor.update_layer, with one rank.
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

// --- a pass ------------------------------------------------------------------------------------------------

TransformerOptions trainer_pass(Trainer *t, int64_t step, int64_t m) {
  const Options *o = t->options;
  TransformerOptions pass = t->transformer;
  bool last = m == o->micro_steps - 1;
  pass.sampling.seed = random_bits(o->seed, STREAM_TILES, (uint64_t)(step * o->micro_steps + m));
  reduction_begin(t, m == 0, last, &pass.door);
  if (sums_squares(t) && (t->backend->memory.planning || last)) pass.door.squares = t->squares;
  if (t->update_deferred) pass.door.update_layer = update_layer, pass.door.context = t;
  t->update_deferred = false; // this pass makes it
  return pass;
}
