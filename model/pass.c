#include "model/pass.h"

#include "kernels/fail.h"

Pass pass_begin(Backend *backend, Model *model, const Batch *batch) {
  const ModelConfig *c = &model->config;
  if (!c->learned_positions && batch->seq_len > model->rope_angles.shape[0])
    fail("a batch of sequences of %lld for a model made for %lld", (long long)batch->seq_len,
         (long long)model->rope_angles.shape[0]);
  return (Pass){.backend = backend,
                .model = model,
                .batch = batch,
                .rows = batch->batch * batch->seq_len,
                .heads = {.batch = batch->batch,
                          .seq_len = batch->seq_len,
                          .num_heads = c->num_attention_heads,
                          .num_key_value_heads = c->num_key_value_heads,
                          .head_dim = c->head_dim}};
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
