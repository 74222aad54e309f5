// Forward and backward through the transformer. The residual stream x starts as the embedding and passes L
// layers, a final norm, and the head with the loss:
//
//     x = embedding(tokens)                       GPT-2 adds its positions' embedding
//     for each layer:
//       m = x + attention(norm1(x) W_qkv^T) W_out^T            causal
//       x = m + activation(norm2(m) W_up^T) W_down^T
//     loss = cross_entropy(norm(x) head^T, targets)
//
// Matmuls add the residual to their output, so no sum is a kernel of its own. The backward pass goes through
// these lines from the bottom up with one gradient of the stream, dx, which it adds to in place.
// layer_state.c has a layer's state for it, matmul.c the matmuls, norms.c the norms and the sums (some
// models' norms come after attention and the MLP), and layer_door.c the copies around a layer.
#include "kernels/base/profile.h"
#include "model/masked_loss.h"
#include "model/pass.h"

// --- forward -----------------------------------------------------------------------------------------------

static Tensor positions_of(const Pass *p) {
  return tensor_flat(tensor_rows(p->batch->documents, 0, 1));
}

static Tensor embed(const Pass *p) {
  Tensor out = push_activation(p, "residual", p->model->config.hidden_size);
  Tensor positions = p->model->position_embedding.value;
  positions = tensor_rows(positions, p->past, positions.shape[0] - p->past);
  embedding_forward(p->backend, (EmbeddingForward){.out = out,
                                                   .tokens = p->batch->tokens,
                                                   .token_weight = p->model->token_embedding.value,
                                                   .position_weight = positions,
                                                   .positions = positions_of(p),
                                                   .seq_len = p->batch->seq_len});
  return out;
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

static void make_qkv(const Pass *p, const Layer *w, LayerState *s) {
  if (p->model->config.qk_norm) {
    int64_t q = s->q_norm.out.x.shape[1], k = s->k_norm.out.x.shape[1];
    project_outputs(p, s->qk, &s->norm1.out, &w->qkv, 0);
    project_outputs(p, tensor_columns(s->qkv, q + k, k), &s->norm1.out, &w->qkv, q + k); // v
    run_norm(p, &s->q_norm, tensor_columns(s->qk, 0, q), &w->q_norm, none);
    run_norm(p, &s->k_norm, tensor_columns(s->qk, q, k), &w->k_norm, none);
  } else {
    project(p, s->qkv, &s->norm1.out, &w->qkv, none);
  }
  rotate(p, s->qkv, false);
}

static void attend(const Pass *p, const Layer *w, const LayerState *s) {
  if (p->attend) {
    p->attend(p, w - p->model->layers, s);
    return;
  }
  attention_forward(p->backend, (AttentionForward){.out = s->attention.x,
                                                   .lse = s->lse,
                                                   .qkv = s->qkv,
                                                   .documents = p->batch->documents,
                                                   .shape = p->heads});
}

// m = x + attention(norm1(x) W_qkv) W_out
static void attention_block(const Pass *p, const Layer *w, LayerState *s) {
  run_norm(p, &s->norm1, s->input, &w->norm1, none);
  make_qkv(p, w, s); // rotated
  attend(p, w, s);   // softmax(q k^T / sqrt(D)) v
  add_block(p, s->middle, s->input, &s->attention, &w->out, &s->norm1, &w->norm1);
}

// activation(norm2(m) W_up)
static void mlp_up(const Pass *p, const Layer *w, LayerState *s) {
  run_norm(p, &s->norm2, s->middle, &w->norm2, none);
  project_activated(p, s->activation, s->pre_activation, &s->norm2.out, &w->up);
}

// x = m + that W_down
static void mlp_down(const Pass *p, const Layer *w, LayerState *s) {
  add_block(p, s->output, s->middle, &s->activation, &w->down, &s->norm2, &w->norm2);
}

static void mlp_backward(const Pass *p, const Layer *w, LayerState *s, Operand *dx); // below

// From middle to output, some tokens at a time, and nothing is kept; with dx, mlp_up again and mlp_backward.
static void mlp_in_chunks(const Pass *p, const Layer *w, const LayerState *s, Operand *dx) {
  Memory *memory = &p->backend->memory;
  int64_t chunk = p->options.mlp_chunk ? p->options.mlp_chunk : p->rows;
  for (int64_t first = 0; first < p->rows; first += chunk) {
    MemoryMark mark = memory_mark(memory);
    Pass part = *p;
    part.rows = min_i64(chunk, p->rows - first);
    part.accumulate |= first > 0;
    LayerState rows = push_mlp_rows(&part, s, first);
    mlp_up(&part, w, &rows);
    bool again = dx && tensor_exists(rows.norm2.x); // mlp_backward needs what this norm reads
    if (again) rows.output = push_activation(&part, "mlp output again", rows.middle.shape[1]);
    if (again || !dx) mlp_down(&part, w, &rows);
    if (dx) {
      Operand dx_rows = operand_rows(dx, first, part.rows);
      mlp_backward(&part, w, &rows, &dx_rows);
    }
    memory_pop_to(memory, mark);
  }
}

// From s->input to s->output.
static void layer_forward(const Pass *p, const Layer *w, LayerState *s) {
  MemoryMark kept = push_layer(p, s);
  attention_block(p, w, s);
  if (p->recompute == RECOMPUTE_LAYER) {
    mlp_in_chunks(p, w, s, NULL);
  } else {
    mlp_up(p, w, s);
    mlp_down(p, w, s);
  }
  memory_pop_to(&p->backend->memory, kept);
}

static Recompute recompute_of(const Pass *p, int64_t l) {
  const TransformerOptions *o = &p->options;
  if (!p->training) return RECOMPUTE_LAYER; // keep nothing
  bool less = o->recompute_layers && l >= o->recompute_layers;
  return o->recompute - (less && o->recompute > RECOMPUTE_NONE);
}

Tensor layers_forward(Pass *p) {
  Tensor x = embed(p);
  for (int64_t l = 0; l < p->model->config.num_hidden_layers; l++) {
    LayerState *s = &p->states[l];
    s->input = x;
    p->recompute = recompute_of(p, l);
    layer_enter(p, l, FORWARD);
    layer_forward(p, &p->model->layers[l], s);
    layer_leave(p, l, FORWARD);
    x = s->output;
  }
  return x;
}

Norm final_norm(const Pass *p, Tensor stream, Tensor out) {
  Norm norm = {.out.x = out};
  push_norm_statistics(p, &norm);
  if (!tensor_exists(out)) norm.out.x = push_activation(p, "final norm", p->model->config.hidden_size);
  run_norm(p, &norm, stream, &p->model->final_norm, none);
  return norm;
}

// --- the loss, and backward --------------------------------------------------------------------------------

// dx receives the gradient of the stream.
static void head_and_loss(Pass *p, Tensor stream, Operand *dx, float scale, Tensor loss) {
  const TransformerOptions *o = &p->options;
  Model *model = p->model;
  Memory *memory = &p->backend->memory;
  MemoryMark top = memory_mark(memory);
  LossTerms terms = {0};
#define COPY(name, ...) terms.name = (float)o->terms.name;
  LOSS_TERMS(COPY)
#undef COPY
  terms.softcap = (float)model->config.final_logit_softcapping;
  Norm norm = final_norm(p, stream, none);
  Tensor dnorm = push_gradient(p, "d final norm", model->config.hidden_size);
  profile_phase(p->backend, PHASE_LOSS);
  LinearCrossEntropy call = {.mode = o->mode,
                             .chunk = o->chunk,
                             .loss = loss,
                             .outputs = o->outputs,
                             .terms = terms,
                             .sampling = o->mode == LCE_FUSED ? o->sampling : (TileSampling){0},
                             .dx = dnorm,
                             .dweight = model->head.grad,
                             .x = norm.out.x,
                             .weight = model_head_shard(model),
                             .shard = model->shard,
                             .targets = p->batch->targets,
                             .scale = scale,
                             .accumulate = !p->first};
  head_enter(p, &call);
  masked_linear_cross_entropy(p->backend, call, p->batch->indices, p->batch->counted);
  profile_phase(p->backend, PHASE_BACKWARD);
  head_leave(p);
  run_norm_backward(p, &norm, dx, dnorm, stream, &model->final_norm, false, none);
  memory_pop_to(memory, top);
}

// dx: in, the gradient of the layer's output; out, its middle's. Gradients replace tensors that are not
// needed any more.
static void mlp_backward(const Pass *p, const Layer *w, LayerState *s, Operand *dx) {
  Tensor dbias = w->down.bias.grad;
  Operand dout = add_block_backward(p, dx, dbias, &s->norm2, &w->norm2);
  MemoryMark before_dpre = memory_mark(&p->backend->memory);
  Operand dpre = project_activated_backward(p, dout, s->activation, s->pre_activation, &w->down.weight);
  block_input_backward(p, dx, dpre, before_dpre, &w->up.weight, w->up.bias.grad, &s->norm2, s->middle,
                       &w->norm2, dbias);
}

// dx: in, the gradient of the layer's middle; out, its input's.
static void attention_block_backward(const Pass *p, const Layer *w, LayerState *s, Operand *dx) {
  Memory *memory = &p->backend->memory;
  Tensor dqkv = push_gradient(p, "d qkv", s->qkv.shape[1]);
  MemoryMark after_dqkv = memory_mark(memory);
  Tensor dattention = push_gradient(p, "d attention", s->attention.x.shape[1]);
  Tensor out_dbias = w->out.bias.grad;
  Operand dout = add_block_backward(p, dx, out_dbias, &s->norm1, &w->norm1);
  project_backward(p, dattention, dout, s->attention, &w->out.weight, none, false);
  bool by_attention = p->model->config.learned_positions; // no rotation changes dqkv after it
  attention_backward(p->backend, (AttentionBackward){.dqkv = dqkv,
                                                     .dbias = by_attention ? w->qkv.bias.grad : none,
                                                     .dout = dattention,
                                                     .out = s->attention.x,
                                                     .lse = s->lse,
                                                     .qkv = s->qkv,
                                                     .documents = p->batch->documents,
                                                     .shape = p->heads,
                                                     .accumulate = p->accumulate});
  memory_pop_to(memory, after_dqkv);
  rotate(p, dqkv, true);
  if (p->model->config.qk_norm) {
    int64_t q = s->q_norm.out.x.shape[1], k = s->k_norm.out.x.shape[1];
    Operand dq = {.x = tensor_columns(dqkv, 0, q)}, dk = {.x = tensor_columns(dqkv, q, k)};
    run_norm_backward(p, &s->q_norm, &dq, dq.x, tensor_columns(s->qk, 0, q), &w->q_norm, false, none);
    run_norm_backward(p, &s->k_norm, &dk, dk.x, tensor_columns(s->qk, q, k), &w->k_norm, false, none);
  }
  push_norm1_again(p, s);
  if (recomputes_parts(p)) run_norm(p, &s->norm1, s->input, &w->norm1, none);
  block_input_backward(p, dx, (Operand){.x = dqkv}, memory_mark(memory), &w->qkv.weight,
                       by_attention ? none : w->qkv.bias.grad, &s->norm1, s->input, &w->norm1, out_dbias);
}

// norm2's output and the activation, from middle and pre-activation; at RECOMPUTE_MLP the pre-activation too.
static void recompute_mlp(const Pass *p, const Layer *w, LayerState *s) {
  if (p->recompute == RECOMPUTE_MLP) {
    mlp_up(p, w, s);
  } else {
    run_norm(p, &s->norm2, s->middle, &w->norm2, none);
    activate(p, s->activation, s->pre_activation);
  }
}

// dx: in, the gradient of the layer's output; out, its input's.
static void layer_backward(const Pass *p, const Layer *w, LayerState *s, Operand *dx) {
  Memory *memory = &p->backend->memory;
  MemoryMark mark = memory_mark(memory);
  if (p->recompute == RECOMPUTE_LAYER) {
    push_layer(p, s);
    attention_block(p, w, s);
    mlp_in_chunks(p, w, s, dx);
  } else {
    push_mlp_again(p, s);
    if (recomputes_parts(p)) recompute_mlp(p, w, s);
    mlp_backward(p, w, s, dx);
    memory_pop_to(memory, mark);
  }
  attention_block_backward(p, w, s, dx);
  memory_pop_to(memory, mark);
}

// dx: in, the gradient of the stream after all layers; out, the embedding's.
static void layers_backward(Pass *p, Operand *dx) {
  for (int64_t l = p->model->config.num_hidden_layers; l-- > 0;) {
    p->recompute = recompute_of(p, l);
    layer_enter(p, l, BACKWARD);
    layer_backward(p, &p->model->layers[l], &p->states[l], dx);
    layer_leave(p, l, BACKWARD);
  }
}

static void embed_backward(Pass *p, Tensor dx) {
  bool tied = p->model->config.tie_word_embeddings; // then the head's gradient is there
  // embedding_backward, after which the last gradients may go.
  embedding_leave(p, (EmbeddingBackward){.dtoken_weight = p->model->token_embedding.grad,
                                         .dposition_weight = p->model->position_embedding.grad,
                                         .dout = dx,
                                         .tokens = p->batch->tokens,
                                         .positions = positions_of(p),
                                         .seq_len = p->batch->seq_len,
                                         .accumulate_token = p->accumulate || tied,
                                         .accumulate_position = p->accumulate});
}

// --- passes ------------------------------------------------------------------------------------------------

void transformer_train(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options,
                       float scale, bool accumulate, Tensor loss) {
  Pass p = pass_begin_training(backend, model, batch, options, accumulate);
  profile_phase(backend, PHASE_FORWARD);
  Operand dx = {0};
  place_operand(&p, &dx, push_gradient(&p, "d residual", model->config.hidden_size));
  Tensor x = layers_forward(&p);
  head_and_loss(&p, x, &dx, scale, loss);
  layers_backward(&p, &dx);
  embed_backward(&p, dx.x);
  pass_end(&p);
}

void transformer_evaluate(Backend *backend, Model *model, const Batch *batch,
                          const TransformerOptions *options, Tensor loss) {
  Pass p = pass_begin(backend, model, batch, options);
  Norm norm = final_norm(&p, layers_forward(&p), none);
  masked_linear_cross_entropy(
      backend,
      (LinearCrossEntropy){.mode = options->mode,
                           .chunk = options->chunk,
                           .loss = loss,
                           .terms = {.softcap = (float)model->config.final_logit_softcapping},
                           .x = norm.out.x,
                           .weight = model->head.value,
                           .targets = batch->targets},
      batch->indices, batch->counted);
  pass_end(&p);
}

void transformer_last_hidden_state(Backend *backend, Model *model, const Batch *batch, Tensor out) {
  Pass p = pass_begin(backend, model, batch, &(TransformerOptions){0});
  final_norm(&p, layers_forward(&p), out);
  pass_end(&p);
}
