// A pass over a batch: its settings, and tensors on the stack.
#include "model/pass.h"

#include <stdlib.h>

#include "kernels/base/alloc.h"

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
