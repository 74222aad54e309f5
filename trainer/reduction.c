#include "trainer/reduction.h"

#include "model/parameters.h"

// ZeRO-2 double-buffers the layers' gradients: every micro-batch's are reduced, and accumulated in the shards.
static bool reduced_every_pass(const Parameters *p, ParameterGroup group) {
  return p->spread.zero == 2 && group != GROUP_HEAD;
}

static void reduce_bucket(const Reduction *r, ParameterGroup group, Bucket bucket) {
  const Parameters *p = &r->model->parameters;
  Collective c = {.x = shards_local_grads(p, group, bucket), .async = true};
  if (p->spread.parts == 1) {
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
  const Parameters *p = &r->model->parameters;
  if (group == GROUP_HEAD && p->spread.split_head) return; // computed from the tokens of all ranks
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
  collectives_join(r->backend, started < 64 ? started : 0);
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

void reduction_begin(Reduction *r, Backend *backend, const Model *model, bool first, bool last,
                     TransformerOptions *options) {
  if (backend->ranks == 1) return;
  const Parameters *p = &model->parameters;
  *r = (Reduction){.backend = backend, .model = model, .first = first, .last = last};
  for (int g = 0; g < GROUP_COUNT; g++) r->unreduced[g] = p->group_elements[g];
  bool zero_2 = p->spread.zero == 2, positions = tensor_exists(model->position_embedding.grad);
  if (zero_2) collectives_join(backend, 0); // this pass overwrites what the last one's reads
  bool head_first = p->spread.split_head || (last && !positions);
  options->hooks = (GradHooks){
      .context = r,
      .on_grads_ready = reduce_ready,
      .add_embedding_grads = model->config.tie_word_embeddings && head_first ? add_embedding_grads : NULL,
      .overwrite = zero_2};
}
