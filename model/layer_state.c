// A layer's state for its backward pass. On the stack, from the bottom up: dx, then for each layer its
// output, then the tensors that RECOMPUTE_LAYER, RECOMPUTE_MLP and RECOMPUTE_ELEMENTWISE drop: to drop is to
// pop, and to recompute is to push and compute the same again.
#include "model/pass.h"

// Pushes all results of attention but its norm's output.
static void push_kept(const Pass *p, LayerState *s) {
  const AttentionShape *h = &p->heads;
  int64_t q = h->num_heads, k = h->num_key_value_heads, size = h->head_dim;
  push_norm_statistics(p, &s->norm1);
  push_norm_statistics(p, &s->norm2);
  if (p->model->config.post_norm) {
    s->norm1.x = push_activation(p, "attention output", p->model->config.hidden_size);
    s->norm2.x = push_activation(p, "mlp output", p->model->config.hidden_size);
  }
  s->qkv = push_activation(p, "qkv", (q + 2 * k) * size);
  if (p->model->config.qk_norm) { // q and k before it lie apart, since its backward pass needs them
    s->qk = push_activation(p, "q and k before norm", (q + k) * size);
    const Layer *w = p->model->layers; // whose norms take a head, or all heads at once
    s->q_norm.rstd = push_statistic(p, "q norm rstd", q * size / w->q_norm.weight.value.shape[0]);
    s->k_norm.rstd = push_statistic(p, "k norm rstd", k * size / w->k_norm.weight.value.shape[0]);
    s->q_norm.out.x = tensor_columns(s->qkv, 0, q * size);
    s->k_norm.out.x = tensor_columns(s->qkv, q * size, k * size);
  }
  s->lse = memory_push_2d(&p->backend->memory, "attention lse", MEMORY_ACTIVATIONS, DTYPE_F32, h->batch,
                          q * h->seq_len);
  place_operand(p, &s->attention, push_activation(p, "attention", q * size));
  s->middle = push_activation(p, "residual middle", p->model->config.hidden_size);
}

static void push_pre_activation(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  s->pre_activation =
      push_activation(p, "mlp pre-activation", (is_gated(c->activation) ? 2 : 1) * c->intermediate_size);
}

static void push_mlp(const Pass *p, LayerState *s) {
  push_block_input(p, "norm2", &s->norm2, s->middle);
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
  push_stand_in(p, &s->norm1.out, c->hidden_size);
  push_stand_in(p, &s->norm2.out, c->hidden_size);
  push_stand_in(p, &s->activation, c->intermediate_size);
  marks[RECOMPUTE_NONE] = memory_mark(memory);
  push_block_input(p, "norm1", &s->norm1, s->input);
  if (whole) push_mlp(p, s);
  if (!has_stand_ins(p)) marks[RECOMPUTE_NONE] = memory_mark(memory);
  return marks[p->recompute];
}

bool recomputes_parts(const Pass *p) {
  return p->recompute == RECOMPUTE_ELEMENTWISE || p->recompute == RECOMPUTE_MLP;
}

void push_norm1_again(const Pass *p, LayerState *s) {
  if (recomputes_parts(p) || has_stand_ins(p)) push_block_input(p, "norm1", &s->norm1, s->input);
}

void push_mlp_again(const Pass *p, LayerState *s) {
  if (p->recompute == RECOMPUTE_MLP) push_pre_activation(p, s);
  if (recomputes_parts(p) || has_stand_ins(p)) push_mlp(p, s);
}

LayerState push_mlp_rows(const Pass *p, const LayerState *s, int64_t first) {
  LayerState rows = {.middle = tensor_rows(s->middle, first, p->rows),
                     .output = tensor_rows(s->output, first, p->rows),
                     .norm2.mean = tensor_rows(s->norm2.mean, first, p->rows),
                     .norm2.rstd = tensor_rows(s->norm2.rstd, first, p->rows),
                     .norm2.x = tensor_rows(s->norm2.x, first, p->rows)};
  push_pre_activation(p, &rows);
  push_mlp(p, &rows);
  return rows;
}
