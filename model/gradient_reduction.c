// Gradients are summed over the ranks in buckets, from a group's end, as soon as the backward pass has
// computed them, on a stream of their own: all-reduced or, if the optimizer is sharded (ZeRO 1 and 2),
// reduce-scattered. A step's last micro-batch sums them; with ZeRO-2 each does, and accumulates in the
// shards.
#include <string.h>

#include "model/pass.h"
#include "model/shards.h"

static bool reduced_every_pass(const Pass *p, ParameterGroup group) {
  return p->model->parameters.sharding.zero == 2 && group != GROUP_HEAD;
}

void reduction_begin(Pass *p) {
  const ParameterSet *w = &p->model->parameters;
  memcpy(p->unreduced, w->group_elements, sizeof p->unreduced);
  if (w->sharding.zero == 2)
    collectives_join(p->backend, 0); // this pass overwrites what the last one's reads
  p->accumulate = !p->first && w->sharding.zero < 2;
}

static void reduce_bucket(const Pass *p, ParameterGroup group, Range bucket) {
  const ParameterSet *w = &p->model->parameters;
  Collective c = {.out = shards_rows(w, w->grad_sum, group, shards_slice(w, bucket)),
                  .x = shards_rows(w, w->grad, group, bucket),
                  .accumulate = reduced_every_pass(p, group) && !p->first,
                  .async = true};
  (w->sharding.parts == 1 ? all_reduce : reduce_scatter)(p->backend, c);
}

void reduce_ready(Pass *p, ParameterGroup group, int64_t first) {
  const ParameterSet *w = &p->model->parameters;
  if (p->backend->ranks == 1) return;
  if (group == GROUP_HEAD && w->sharding.split_head) return; // computed from the tokens of all ranks
  if (!p->options.last && !reduced_every_pass(p, group)) return;
  int64_t started = 0;
  const Range ready = {first, p->unreduced[group] - first};
  for (Range b = {0}; shards_next(w, group, ready, &b) && b.offset >= first; started++) {
    reduce_bucket(p, group, b);
    p->unreduced[group] = b.offset;
  }
  if (!grads_double_buffered(w, group)) return;
  // The layer below writes into the buffer of the one above, whose reduction must be done.
  collectives_join(p->backend, started < ASYNC_EVENTS ? started : 0);
}

// --- the head and the embedding ----------------------------------------------------------------------------

// A tied head's gradient, [V, H] in fp32, takes longest to reduce. So it begins before the layers' backward
// passes, and every rank adds the embedding's part of all ranks, of N rows each, afterwards, in the same
// order. With a split head a rank adds only its own rows.
static bool embedding_added_last(const Pass *p) {
  bool positions = tensor_exists(p->model->position_embedding.grad);
  bool head_first = p->model->parameters.sharding.split_head || (p->options.last && !positions);
  return p->backend->ranks > 1 && p->model->config.tie_word_embeddings && head_first;
}

// dout [N, H]: the gradient of the embedding's output on this rank.
static void add_embedding_grads(const Pass *p, Tensor dout) {
  const Model *model = p->model;
  Backend *backend = p->backend;
  Memory *memory = &backend->memory;
  MemoryMark mark = memory_mark(memory);
  int64_t rows = dout.shape[0] * backend->ranks;
  Tensor tokens = memory_push_1d(memory, "tokens of all ranks", MEMORY_ACTIVATION_GRADIENTS, DTYPE_I32, rows);
  Tensor all = memory_push_2d(memory, "d residual of all ranks", MEMORY_ACTIVATION_GRADIENTS, dout.dtype,
                              rows, dout.shape[1]);
  all_gather(backend, (Collective){.out = tokens, .x = p->batch->tokens});
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
                                                  .seq_len = p->batch->seq_len,
                                                  .accumulate_token = true});
  memory_pop_to(memory, mark);
}

void head_leave(Pass *p) {
  if (!p->model->config.tie_word_embeddings || embedding_added_last(p)) reduce_ready(p, GROUP_HEAD, 0);
}

void embedding_leave(Pass *p, EmbeddingBackward a) {
  bool last = embedding_added_last(p);
  if (last) {
    add_embedding_grads(p, a.dout);
    a.dtoken_weight = none;
  }
  if (tensor_exists(a.dtoken_weight) || tensor_exists(a.dposition_weight)) embedding_backward(p->backend, a);
  reduce_ready(p, GROUP_EMBEDDINGS, 0);
  reduce_ready(p, GROUP_VECTORS, 0);
  if (p->model->config.tie_word_embeddings && !last) reduce_ready(p, GROUP_HEAD, 0);
}
