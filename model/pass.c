// A pass, and its memory. On the stack, from the bottom up: dx, then for each layer what the backward pass
// reads. A layer pushes its output first, then what RECOMPUTE_LAYER, RECOMPUTE_MLP and RECOMPUTE_ELEMENTWISE
// drop: to drop is to pop, and to recompute is to push and compute the same again.
#include "model/pass.h"

#include <stdlib.h>

#include "kernels/alloc.h"

Pass pass_begin(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options) {
  const ModelConfig *c = &model->config;
  if (!c->learned_positions && batch->seq_len > model->rope_angles.shape[0])
    fail("a batch of sequences of %lld for a model made for %lld", (long long)batch->seq_len,
         (long long)model->rope_angles.shape[0]);
  return (Pass){.backend = backend,
                .model = model,
                .batch = batch,
                .options = *options,
                .rows = batch->batch * batch->seq_len,
                .bottom = memory_mark(&backend->memory),
                .states = host_alloc(c->num_hidden_layers, sizeof(LayerState), "the layers' states"),
                .heads = {.batch = batch->batch,
                          .seq_len = batch->seq_len,
                          .num_heads = c->num_attention_heads,
                          .num_key_value_heads = c->num_key_value_heads,
                          .head_dim = c->head_dim}};
}

Pass pass_begin_training(Backend *backend, Model *model, const Batch *batch,
                         const TransformerOptions *options, bool accumulate) {
  Pass p = pass_begin(backend, model, batch, options);
  p.training = true;
  p.first = !accumulate;
  p.fp8 = tensor_exists(model->layers->qkv.weight.fp8.codes);
  reduction_begin(&p);
  return p;
}

void pass_end(Pass *p) {
  memory_pop_to(&p->backend->memory, p->bottom);
  free(p->states);
}

static Tensor push(const Pass *p, const char *name, MemoryCategory category, int64_t columns) {
  return memory_push_2d(&p->backend->memory, name, category, p->backend->dtype, p->rows, columns);
}

Tensor push_activation(const Pass *p, const char *name, int64_t columns) {
  return push(p, name, MEMORY_ACTIVATIONS, columns);
}

Tensor push_gradient(const Pass *p, const char *name, int64_t columns) {
  return push(p, name, MEMORY_ACTIVATION_GRADIENTS, columns);
}

Tensor push_statistic(const Pass *p, const char *name, int64_t heads) {
  return memory_push_1d(&p->backend->memory, name, MEMORY_ACTIVATIONS, DTYPE_F32, p->rows * heads);
}

void push_norm_statistics(const Pass *p, Norm *norm) {
  if (p->model->config.norm == NORM_LAYER) norm->mean = push_statistic(p, "norm mean", 1);
  norm->rstd = push_statistic(p, "norm rstd", 1);
}

// All that attention computes but its norm's output.
static void push_kept(const Pass *p, LayerState *s) {
  const AttentionShape *h = &p->heads;
  int64_t q = h->num_heads, k = h->num_key_value_heads, size = h->head_dim;
  push_norm_statistics(p, &s->norm1);
  push_norm_statistics(p, &s->norm2);
  s->qkv = push_activation(p, "qkv", (q + 2 * k) * size);
  if (p->model->config.qk_norm) { // q and k before it lie apart, since its backward pass needs them
    s->qk = push_activation(p, "q and k before norm", (q + k) * size);
    s->q_norm.rstd = push_statistic(p, "q norm rstd", q);
    s->k_norm.rstd = push_statistic(p, "k norm rstd", k);
    s->q_norm.out.x = tensor_columns(s->qkv, 0, q * size);
    s->k_norm.out.x = tensor_columns(s->qkv, q * size, k * size);
  }
  s->lse = memory_push_2d(&p->backend->memory, "attention lse", MEMORY_ACTIVATIONS, DTYPE_F32, h->batch,
                          q * h->seq_len);
  s->attention = push_activation(p, "attention", q * size);
  s->middle = push_activation(p, "residual middle", p->model->config.hidden_size);
}

void push_pre_activation(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  s->pre_activation = push_activation(p, "mlp pre-activation", (c->gated_mlp ? 2 : 1) * c->intermediate_size);
}

void push_mlp(const Pass *p, LayerState *s) {
  s->norm2.out.x = push_activation(p, "norm2", p->model->config.hidden_size);
  push_activation_operand(p, &s->activation);
}

MemoryMark push_layer(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  const Memory *memory = &p->backend->memory;
  MemoryMark marks[RECOMPUTE_COUNT] = {[RECOMPUTE_LAYER] = memory_mark(memory)};
  bool whole = p->recompute < RECOMPUTE_LAYER; // else the MLP's are pushed in chunks
  push_kept(p, s);
  marks[RECOMPUTE_MLP] = memory_mark(memory);
  if (whole) push_pre_activation(p, s);
  marks[RECOMPUTE_ELEMENTWISE] = memory_mark(memory);
  push_saved_operand(p, &s->norm1.out, c->hidden_size, false);
  push_saved_operand(p, &s->norm2.out, c->hidden_size, false);
  push_saved_operand(p, &s->activation, c->intermediate_size, true);
  marks[RECOMPUTE_NONE] = memory_mark(memory);
  s->norm1.out.x = push_activation(p, "norm1", c->hidden_size);
  if (whole) push_mlp(p, s);
  if (!operands_saved(p)) marks[RECOMPUTE_NONE] = memory_mark(memory);
  return marks[p->recompute];
}

LayerState push_mlp_rows(const Pass *p, const LayerState *s, int64_t first) {
  LayerState rows = {.middle = tensor_rows(s->middle, first, p->rows),
                     .output = tensor_rows(s->output, first, p->rows),
                     .norm2.rstd = tensor_rows(s->norm2.rstd, first, p->rows)};
  if (tensor_exists(s->norm2.mean)) rows.norm2.mean = tensor_rows(s->norm2.mean, first, p->rows);
  push_pre_activation(p, &rows);
  push_mlp(p, &rows);
  return rows;
}
