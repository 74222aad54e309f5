// Forward and backward through the transformer, as memory is pushed and popped. The residual stream x starts as the
// embedding and passes L layers, a final norm, and the head with the loss:
//
//     x = embedding(tokens)                       GPT-2 adds its positions' embedding
//     for each layer:
//       m = x + attention(norm1(x) W_qkv^T) W_out^T            causal
//       x = m + activation(norm2(m) W_up^T) W_down^T
//     loss = cross_entropy(norm(x) head^T, targets)
//
// Matmuls add the residual to their output, so no sum is a kernel of its own. The backward pass goes through the same
// lines from the bottom up with one gradient of the stream, dx, which it adds to in place.
//
// On the stack, from the bottom up: dx, then per layer what forward keeps for backward. Each layer pushes its
// output first, then what RECOMPUTE_LAYER drops, then what RECOMPUTE_MLP and RECOMPUTE_ELEMENTWISE drop: to
// drop is to pop, and to recompute is to push and compute the same again.

#include "kernels/profile.h"
#include "model/pass.h"

// --- norms -------------------------------------------------------------------------------------------------

static void push_norm_statistics(const Pass *p, Norm *norm) {
  if (p->model->config.norm == NORM_LAYER) norm->mean = push_statistic(p, "norm mean", 1);
  norm->rstd = push_statistic(p, "norm rstd", 1);
}

static void run_norm(const Pass *p, const Norm *norm, Tensor x, const WeightAndBias *w) {
  norm_forward(p->backend, (NormForward){.kind = p->model->config.norm,
                                         .out = norm->out.x,
                                         .mean = norm->mean,
                                         .rstd = norm->rstd,
                                         .x = x,
                                         .weight = w->weight.value,
                                         .bias = w->bias.value,
                                         .epsilon = (float)p->model->config.norm_epsilon});
}

// previous_dbias: the gradient of a bias that x ends with, the sum of dx as it comes, or none. A LayerNorm, which has sums
// of columns anyway, takes it with the rows.
static void run_norm_backward(const Pass *p, const Norm *norm, Tensor dx, Tensor dout, Tensor x,
                              const WeightAndBias *w, bool accumulate_dx, Tensor previous_dbias) {
  bool with_rows = p->model->config.norm == NORM_LAYER;
  if (tensor_exists(previous_dbias) && !with_rows)
    linear_backward_weight(
        p->backend, (LinearBackwardWeight){.dbias = previous_dbias, .dout = dx, .accumulate = p->accumulate});
  norm_backward(p->backend, (NormBackward){.kind = p->model->config.norm,
                                           .dx = dx,
                                           .dweight = w->weight.grad,
                                           .dbias = w->bias.grad,
                                           .dx_sum = with_rows ? previous_dbias : none,
                                           .dout = dout,
                                           .x = x,
                                           .weight = w->weight.value,
                                           .mean = norm->mean,
                                           .rstd = norm->rstd,
                                           .accumulate_dx = accumulate_dx,
                                           .accumulate = p->accumulate});
}

// --- attention ---------------------------------------------------------------------------------------------

// What RECOMPUTE_MLP keeps.
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

static Tensor positions_of(const Pass *p) {
  Tensor documents = p->batch->documents;
  return tensor_exists(documents) ? tensor_flat(tensor_rows(documents, 0, 1)) : none;
}

static void rotate(const Pass *p, Tensor qkv, bool inverse) {
  if (p->model->config.learned_positions) return;
  Tensor angles = p->model->rope_angles;
  rope(p->backend, (Rope){.qkv = qkv,
                          .cos_sin = tensor_rows(angles, p->past, angles.shape[0] - p->past),
                          .positions = positions_of(p),
                          .shape = p->heads,
                          .inverse = inverse});
}

static void make_qkv(const Pass *p, const Layer *w, const LayerState *s) {
  if (p->model->config.qk_norm) {
    int64_t q = s->q_norm.out.x.shape[1], k = s->k_norm.out.x.shape[1];
    Operand x = {.x = s->norm1.out.x}; // for v
    project_outputs(p, s->qk, s->norm1.out, &w->qkv, 0, q + k);
    project_outputs(p, tensor_columns(s->qkv, q + k, k), x, &w->qkv, q + k, k);
    run_norm(p, &s->q_norm, tensor_columns(s->qk, 0, q), &w->q_norm);
    run_norm(p, &s->k_norm, tensor_columns(s->qk, q, k), &w->k_norm);
  } else {
    project(p, s->qkv, s->norm1.out, &w->qkv, none);
  }
  rotate(p, s->qkv, false);
}

static void attend(const Pass *p, const Layer *w, const LayerState *s) {
  if (p->attend)
    p->attend(p, w - p->model->layers, s);
  else
    attention_forward(p->backend, (AttentionForward){.out = s->attention,
                                                     .lse = s->lse,
                                                     .qkv = s->qkv,
                                                     .documents = p->batch->documents,
                                                     .shape = p->heads});
}

// m = x + attention(norm1(x) W_qkv) W_out
static void attention_block(const Pass *p, const Layer *w, const LayerState *s) {
  run_norm(p, &s->norm1, s->input, &w->norm1);
  make_qkv(p, w, s); // rotated
  attend(p, w, s);   // softmax(q k^T / sqrt(D)) v
  project(p, s->middle, (Operand){.x = s->attention}, &w->out, s->input);
}

// dx: in, the gradient of the layer's middle; out, that of its input.
static void attention_block_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dx,
                                     bool recompute_norm) {
  Memory *memory = &p->backend->memory;
  Tensor dqkv = push_gradient(p, "d qkv", s->qkv.shape[1]);
  MemoryMark after_dqkv = memory_mark(memory);
  Tensor dattention = push_gradient(p, "d attention", s->attention.shape[1]);
  Operand dout = {.x = dx}, attention = {.x = s->attention};
  project_backward(p, dattention, dout, attention, &w->out.weight, none);
  bool by_attention = p->model->config.learned_positions; // no rotation changes dqkv after it
  attention_backward(p->backend, (AttentionBackward){.dqkv = dqkv,
                                                     .dbias = by_attention ? w->qkv.bias.grad : none,
                                                     .dout = dattention,
                                                     .out = s->attention,
                                                     .lse = s->lse,
                                                     .qkv = s->qkv,
                                                     .documents = p->batch->documents,
                                                     .shape = p->heads,
                                                     .accumulate = p->accumulate});
  memory_pop_to(memory, after_dqkv);
  rotate(p, dqkv, true);
  if (p->model->config.qk_norm) {
    int64_t q = s->q_norm.out.x.shape[1], k = s->k_norm.out.x.shape[1];
    Tensor dq = tensor_columns(dqkv, 0, q), dk = tensor_columns(dqkv, q, k);
    run_norm_backward(p, &s->q_norm, dq, dq, tensor_columns(s->qk, 0, q), &w->q_norm, false, none);
    run_norm_backward(p, &s->k_norm, dk, dk, tensor_columns(s->qk, q, k), &w->k_norm, false, none);
  }
  if (recompute_norm || operands_saved(p))
    s->norm1.out.x = push_activation(p, "norm1", p->model->config.hidden_size);
  if (recompute_norm) run_norm(p, &s->norm1, s->input, &w->norm1);
  Tensor dnorm1 = s->norm1.out.x;
  project_backward(p, dnorm1, (Operand){.x = dqkv}, s->norm1.out, &w->qkv.weight,
                   by_attention ? none : w->qkv.bias.grad);
  run_norm_backward(p, &s->norm1, dx, dnorm1, s->input, &w->norm1, true, w->out.bias.grad);
}

// --- MLP ---------------------------------------------------------------------------------------------------

static void push_pre_activation(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  s->pre_activation = push_activation(p, "mlp pre-activation", (c->gated_mlp ? 2 : 1) * c->intermediate_size);
}

static void push_mlp_elementwise(const Pass *p, LayerState *s) {
  s->norm2.out.x = push_activation(p, "norm2", p->model->config.hidden_size);
  push_activation_operand(p, &s->activation);
}

// activation(norm2(m) W_up)
static void mlp_block(const Pass *p, const Layer *w, const LayerState *s) {
  run_norm(p, &s->norm2, s->middle, &w->norm2);
  project_activated(p, s->activation, s->pre_activation, s->norm2.out, &w->up);
}

// dx: in, the gradient of the layer's output; out, that of its middle. Gradients replace what is not needed any more.
static void mlp_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dx) {
  Tensor dnorm2 = s->norm2.out.x;
  Operand dpre = project_activated_backward(p, dx, s->activation, s->pre_activation, &w->down.weight);
  project_backward(p, dnorm2, dpre, s->norm2.out, &w->up.weight, w->up.bias.grad);
  run_norm_backward(p, &s->norm2, dx, dnorm2, s->middle, &w->norm2, true, w->down.bias.grad);
}

// The rows of the MLP's part of a state.
static LayerState mlp_rows(const LayerState *s, int64_t first, int64_t count) {
  LayerState part = {.middle = tensor_rows(s->middle, first, count),
                     .norm2.rstd = tensor_rows(s->norm2.rstd, first, count)};
  if (tensor_exists(s->norm2.mean)) part.norm2.mean = tensor_rows(s->norm2.mean, first, count);
  return part;
}

// Under RECOMPUTE_LAYER: from middle to output or, where dx is there, mlp_backward, and nothing stays on the stack.
static void mlp_in_chunks(const Pass *p, const Layer *w, const LayerState *s, Tensor dx) {
  Memory *memory = &p->backend->memory;
  int64_t chunk = p->mlp_chunk ? p->mlp_chunk : p->rows;
  for (int64_t first = 0; first < p->rows; first += chunk) {
    Pass part = *p;
    part.rows = min_i64(chunk, p->rows - first);
    part.accumulate |= first > 0;
    LayerState state = mlp_rows(s, first, part.rows);
    MemoryMark mark = memory_mark(memory);
    push_pre_activation(&part, &state);
    push_mlp_elementwise(&part, &state);
    mlp_block(&part, w, &state);
    if (tensor_exists(dx))
      mlp_backward(&part, w, &state, tensor_rows(dx, first, part.rows));
    else
      project(&part, tensor_rows(s->output, first, part.rows), state.activation, &w->down, state.middle);
    memory_pop_to(memory, mark);
  }
}

// --- one layer ---------------------------------------------------------------------------------------------

// From s->input to s->middle.
static void push_attention_block(const Pass *p, const Layer *w, LayerState *s) {
  push_kept(p, s);
  s->norm1.out.x = push_activation(p, "norm1", p->model->config.hidden_size);
  attention_block(p, w, s);
}

// From s->input to s->output. What p->recompute keeps stays on the stack.
static void layer_forward(const Pass *p, const Layer *w, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  Memory *memory = &p->backend->memory;
  MemoryMark marks[RECOMPUTE_COUNT] = {[RECOMPUTE_LAYER] = memory_mark(memory)};
  if (p->recompute == RECOMPUTE_LAYER) {
    push_attention_block(p, w, s);
    mlp_in_chunks(p, w, s, none);
  } else {
    push_kept(p, s);
    marks[RECOMPUTE_MLP] = memory_mark(memory);
    push_pre_activation(p, s);
    marks[RECOMPUTE_ELEMENTWISE] = memory_mark(memory);
    push_saved_operand(p, &s->norm1.out, c->hidden_size, false);
    push_saved_operand(p, &s->norm2.out, c->hidden_size, false);
    push_saved_operand(p, &s->activation, c->intermediate_size, true);
    marks[RECOMPUTE_NONE] = memory_mark(memory);
    s->norm1.out.x = push_activation(p, "norm1", c->hidden_size);
    push_mlp_elementwise(p, s);
    if (!operands_saved(p)) marks[RECOMPUTE_NONE] = memory_mark(memory);
    attention_block(p, w, s);
    mlp_block(p, w, s);
    project(p, s->output, s->activation, &w->down, s->middle);
  }
  memory_pop_to(memory, marks[p->recompute]);
}

// norm2's output and the activation, from middle and pre-activation; at RECOMPUTE_MLP the pre-activation too.
static void recompute_mlp(const Pass *p, const Layer *w, LayerState *s) {
  bool all = p->recompute == RECOMPUTE_MLP;
  if (all) push_pre_activation(p, s);
  push_mlp_elementwise(p, s);
  if (all) {
    mlp_block(p, w, s);
  } else {
    run_norm(p, &s->norm2, s->middle, &w->norm2);
    activate(p, s->activation, s->pre_activation);
  }
}

// dx: in, the gradient of the layer's output; out, that of its input.
static void layer_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dx) {
  Memory *memory = &p->backend->memory;
  bool recompute_parts = p->recompute == RECOMPUTE_ELEMENTWISE || p->recompute == RECOMPUTE_MLP;
  MemoryMark mark = memory_mark(memory);
  if (p->recompute == RECOMPUTE_LAYER) {
    push_attention_block(p, w, s);
    mlp_in_chunks(p, w, s, dx);
  } else {
    if (recompute_parts) recompute_mlp(p, w, s);
    if (operands_saved(p)) push_mlp_elementwise(p, s); // for their gradients
    mlp_backward(p, w, s, dx);
    memory_pop_to(memory, mark);
  }
  attention_block_backward(p, w, s, dx, recompute_parts);
  memory_pop_to(memory, mark);
}

// --- before and after the layers ----------------------------------------------------------------------------

static Tensor embed(const Pass *p) {
  Tensor out = push_activation(p, "residual", p->model->config.hidden_size);
  Tensor positions = p->model->position_embedding.value;
  if (tensor_exists(positions)) positions = tensor_rows(positions, p->past, positions.shape[0] - p->past);
  embedding_forward(p->backend, (EmbeddingForward){.out = out,
                                                   .tokens = p->batch->tokens,
                                                   .token_weight = p->model->token_embedding.value,
                                                   .position_weight = positions,
                                                   .positions = positions_of(p),
                                                   .seq_len = p->batch->seq_len});
  return out;
}

static void embed_backward(Pass *p) {
  bool tied = p->model->config.tie_word_embeddings; // then the head's gradient is there
  Tensor dpositions = p->model->position_embedding.grad;
  layer_enter(p, EMBEDDING, BACKWARD);
  if (tensor_exists(p->dtokens) || tensor_exists(dpositions))
    embedding_backward(p->backend, (EmbeddingBackward){.dtoken_weight = p->dtokens,
                                                       .dposition_weight = dpositions,
                                                       .dout = p->dx,
                                                       .tokens = p->batch->tokens,
                                                       .positions = positions_of(p),
                                                       .seq_len = p->batch->seq_len,
                                                       .accumulate_token = p->accumulate || tied,
                                                       .accumulate_position = p->accumulate});
  layer_leave(p, EMBEDDING, BACKWARD);
}

Norm final_norm(const Pass *p, Tensor stream, Tensor out) {
  Norm norm = {.out.x = out};
  push_norm_statistics(p, &norm);
  if (!tensor_exists(out)) norm.out.x = push_activation(p, "final norm", p->model->config.hidden_size);
  run_norm(p, &norm, stream, &p->model->final_norm);
  return norm;
}

// The call for all tokens or, where some targets are ignored, for the counted ones alone, in memory of their own: dx's serves x, and
// x's dx. Loss, outputs and dx of the others are 0.
static void loss_of_counted(const Pass *p, LinearCrossEntropy a) {
  const Batch *batch = p->batch;
  Backend *backend = p->backend;
  if (!tensor_exists(batch->rows)) return linear_cross_entropy(backend, a);
  LinearCrossEntropy c = a;
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor rows = tensor_rows(batch->rows, 0, batch->counted);
  Tensor x = tensor_exists(a.dx) ? a.dx : push_activation(p, "counted rows", a.x.shape[1]), dx = a.x;
  c.x = tensor_rows(x, 0, batch->counted);
  if (tensor_exists(a.dx)) c.dx = tensor_rows(dx, 0, batch->counted);
  Tensor targets = memory_push_1d(&backend->memory, "counted targets", MEMORY_HEAD, DTYPE_I32, p->rows);
  c.targets = tensor_rows(targets, 0, batch->counted);
  gather_rows(backend, (MoveRows){.out = c.x, .x = a.x, .rows = rows});
  gather_rows(backend, (MoveRows){.out = c.targets, .x = a.targets, .rows = rows});
  Tensor *const few[] = {
      &c.dx, &c.loss, &c.outputs.z_loss, &c.outputs.correct, &c.outputs.entropy, &c.outputs.max_logit};
  const Tensor many[] = {
      a.dx, a.loss, a.outputs.z_loss, a.outputs.correct, a.outputs.entropy, a.outputs.max_logit};
  enum { WRITTEN = sizeof many / sizeof *many };
  for (int i = 1; i < WRITTEN; i++)
    if (tensor_exists(many[i]))
      *few[i] = tensor_rows(push_statistic(p, "counted outputs", 1), 0, batch->counted);
  // The ledger first counts all tokens, on a backend that runs nothing: what it says does not depend on the data.
  static const BackendOps nothing;
  Backend plan = *backend;
  plan.ops = &nothing;
  linear_cross_entropy(&plan, a);
  backend->memory = plan.memory;
  if (batch->counted)
    linear_cross_entropy(backend, c);
  else if (tensor_exists(a.dweight) && !a.accumulate)
    fill_zero(backend, a.dweight);
  for (int i = 0; i < WRITTEN; i++) {
    if (!tensor_exists(many[i])) continue;
    fill_zero(backend, many[i]);
    scatter_rows(backend, (MoveRows){.out = many[i], .x = *few[i], .rows = rows});
  }
  memory_pop_to(&backend->memory, mark);
}

// p->dx receives the gradient of the stream.
static void head_and_loss(Pass *p, Tensor stream, float scale, Tensor loss) {
  const TransformerOptions *o = p->options;
  Model *model = p->model;
  Memory *memory = &p->backend->memory;
  MemoryMark top = memory_mark(memory);
  Norm norm = final_norm(p, stream, none);
  Tensor dnorm = push_gradient(p, "d final norm", model->config.hidden_size);
  profile_phase(p->backend, PHASE_LOSS);
  loss_of_counted(p, (LinearCrossEntropy){.mode = o->mode,
                                          .chunk = o->chunk,
                                          .loss = loss,
                                          .outputs = o->outputs,
                                          .terms = {.label_smoothing = (float)o->label_smoothing,
                                                    .z_loss = (float)o->z_loss,
                                                    .softcap = (float)model->config.final_logit_softcapping},
                                          .sampling = o->mode == LCE_FUSED ? o->sampling : (TileSampling){0},
                                          .dx = dnorm,
                                          .dweight = model->head.grad,
                                          .x = norm.out.x,
                                          .weight = model_head_shard(model),
                                          .shard = model->shard,
                                          .targets = p->batch->targets,
                                          .scale = scale,
                                          .accumulate = p->accumulate_head});
  profile_phase(p->backend, PHASE_BACKWARD);
  layer_leave(p, head_layer(p), BACKWARD);
  run_norm_backward(p, &norm, p->dx, dnorm, stream, &model->final_norm, false, none);
  memory_pop_to(memory, top);
}

// --- the whole step ----------------------------------------------------------------------------------------

static Recompute recompute_of(const TransformerOptions *options, int64_t l) {
  if (!options) return RECOMPUTE_LAYER; // nothing is kept
  bool less = options->recompute_layers && l >= options->recompute_layers;
  return options->recompute - (less && options->recompute > RECOMPUTE_NONE);
}

Tensor layers_forward(Pass *p) {
  p->stream = embed(p);
  for (int64_t l = 0; l < p->model->config.num_hidden_layers; l++) {
    p->recompute = recompute_of(p->options, l);
    LayerState *s = layer_enter(p, l, FORWARD);
    layer_forward(p, &p->model->layers[l], s);
    layer_leave(p, l, FORWARD);
  }
  return p->stream;
}

// p->dx: in, the gradient of the stream after all layers; out, of the embedding.
static void layers_backward(Pass *p) {
  for (int64_t l = p->model->config.num_hidden_layers; l-- > 0;) {
    p->recompute = recompute_of(p->options, l);
    LayerState *s = layer_enter(p, l, BACKWARD);
    layer_backward(p, &p->model->layers[l], s, p->dx);
    layer_leave(p, l, BACKWARD);
  }
}

void transformer_train(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options,
                       float scale, bool accumulate, Tensor loss) {
  Pass p = pass_begin(backend, model, batch, options, accumulate);
  profile_phase(backend, PHASE_FORWARD);
  p.dx = push_gradient(&p, "d residual", model->config.hidden_size);
  head_and_loss(&p, layers_forward(&p), scale, loss);
  layers_backward(&p);
  embed_backward(&p);
  pass_end(&p);
}

void transformer_evaluate(Backend *backend, Model *model, const Batch *batch,
                          const TransformerOptions *options, Tensor loss) {
  Pass p = pass_begin(backend, model, batch, NULL, false);
  p.mlp_chunk = options->mlp_chunk;
  Norm norm = final_norm(&p, layers_forward(&p), none);
  loss_of_counted(&p, (LinearCrossEntropy){.mode = options->mode,
                                           .chunk = options->chunk,
                                           .loss = loss,
                                           .terms = {.softcap = (float)model->config.final_logit_softcapping},
                                           .x = norm.out.x,
                                           .weight = model->head.value,
                                           .targets = batch->targets});
  pass_end(&p);
}

void transformer_last_hidden_state(Backend *backend, Model *model, const Batch *batch, Tensor out) {
  Pass p = pass_begin(backend, model, batch, NULL, false);
  final_norm(&p, layers_forward(&p), out);
  pass_end(&p);
}
