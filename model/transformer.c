// A step through the transformer, in the order in which memory comes and goes.
//
// The residual stream r starts as the embedding and passes L layers:
//     m   = r + attention(norm1(r)) W_out          r' = m + mlp(norm2(m))
// The additions happen inside the products before them (LinearForward.residual), so a layer writes two [N, H]
// streams and no sum is a kernel of its own. Then: final norm, and linear_cross_entropy, which hands back the
// gradient of its input. The backward pass carries one gradient of the stream, dr, through the layers and
// adds to it in place.
//
// On the stack, from the bottom up: dr, then per layer what forward keeps for backward. Each layer pushes its
// output first, then what RECOMPUTE_LAYER would drop, then what RECOMPUTE_MLP and RECOMPUTE_ELEMENTWISE would
// drop, so that forgetting is popping, and remembering again is pushing and computing the same once more.
#include "model/transformer.h"

#include <stdlib.h>

#include "base/fail.h"

const char *recompute_name(Recompute recompute) {
  static const char *const names[RECOMPUTE_COUNT] = {"none", "elementwise", "mlp", "layer"};
  return names[recompute];
}

// One pass: what every function below needs to know.
typedef struct {
  Backend *backend;
  Model *model;
  const Batch *batch;
  Recompute recompute;
  bool accumulate; // the parameters' gradients
  int64_t rows;    // N
  AttentionShape heads;
  const KeyValueCache *cache; // of the `past` tokens before the batch's, or NULL
  int64_t past;
} Pass;

static float softcap_of(const Model *model) {
  return (float)model->config.final_logit_softcapping;
}

static Pass pass_begin(Backend *backend, Model *model, const Batch *batch) {
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

static Tensor push_activation(const Pass *p, const char *name, int64_t columns) {
  return push(p, name, MEMORY_ACTIVATIONS, columns);
}

static Tensor push_gradient(const Pass *p, const char *name, int64_t columns) {
  return push(p, name, MEMORY_ACTIVATION_GRADIENTS, columns);
}

static Tensor push_statistic(const Pass *p, const char *name) {
  return memory_push_1d(&p->backend->memory, name, MEMORY_ACTIVATIONS, DTYPE_F32, p->rows);
}

// --- norms -------------------------------------------------------------------------------------------------

typedef struct {
  Tensor out, mean, rstd;
} Norm;

static void push_norm_statistics(const Pass *p, Norm *norm) {
  if (p->model->config.norm == NORM_LAYER) norm->mean = push_statistic(p, "norm mean");
  norm->rstd = push_statistic(p, "norm rstd");
}

static void run_norm(const Pass *p, const Norm *norm, Tensor x, const Param *weight, const Param *bias) {
  norm_forward(p->backend, (NormForward){.kind = p->model->config.norm,
                                         .out = norm->out,
                                         .mean = norm->mean,
                                         .rstd = norm->rstd,
                                         .x = x,
                                         .weight = weight->value,
                                         .bias = bias->value,
                                         .epsilon = (float)p->model->config.norm_epsilon});
}

static void run_norm_backward(const Pass *p, const Norm *norm, Tensor dx, Tensor dout, Tensor x,
                              const Param *weight, const Param *bias, bool accumulate_dx) {
  norm_backward(p->backend, (NormBackward){.kind = p->model->config.norm,
                                           .dx = dx,
                                           .dweight = weight->grad,
                                           .dbias = bias->grad,
                                           .dout = dout,
                                           .x = x,
                                           .weight = weight->value,
                                           .mean = norm->mean,
                                           .rstd = norm->rstd,
                                           .accumulate_dx = accumulate_dx,
                                           .accumulate = p->accumulate});
}

// --- products ----------------------------------------------------------------------------------------------

static void project(const Pass *p, Tensor out, Tensor x, const Param *weight, const Param *bias,
                    Tensor residual, Tensor pre_activation) {
  linear_forward(p->backend, (LinearForward){.out = out,
                                             .x = x,
                                             .weight = weight->value,
                                             .in_out_layout = p->model->config.in_out_layout,
                                             .bias = bias->value,
                                             .residual = residual,
                                             .pre_activation = pre_activation});
}

static void project_backward_input(const Pass *p, Tensor dx, Tensor dout, const Param *weight,
                                   Tensor pre_activation) {
  linear_backward_input(p->backend, (LinearBackwardInput){.dx = dx,
                                                          .dout = dout,
                                                          .weight = weight->value,
                                                          .in_out_layout = p->model->config.in_out_layout,
                                                          .pre_activation = pre_activation});
}

static void project_backward_weight(const Pass *p, Tensor dout, Tensor x, const Param *weight,
                                    const Param *bias) {
  linear_backward_weight(p->backend, (LinearBackwardWeight){.dweight = weight->grad,
                                                            .dbias = bias->grad,
                                                            .dout = dout,
                                                            .x = x,
                                                            .in_out_layout = p->model->config.in_out_layout,
                                                            .accumulate = p->accumulate});
}

// --- one layer ---------------------------------------------------------------------------------------------

// What a layer computes on its way. Which of these are on the stack at a time is Recompute's choice.
typedef struct {
  Tensor input;          // [N, H], the output of the layer below
  Tensor output;         // [N, H]
  Norm norm1, norm2;     // out [N, H]
  Tensor qkv;            // [N, (Q + 2K) D], rotated
  Tensor lse;            // fp32 [B, Q T]
  Tensor attention;      // [N, Q D]
  Tensor middle;         // [N, H]: the stream between the two halves
  Tensor pre_activation; // [N, F], or [N, 2F]: gate, then up
  Tensor activation;     // [N, F]
} LayerState;

static int64_t pre_activation_columns(const ModelConfig *c) {
  return c->gated_mlp ? 2 * c->intermediate_size : c->intermediate_size;
}

static void push_pre_activation(const Pass *p, LayerState *s) {
  s->pre_activation = push_activation(p, "mlp pre-activation", pre_activation_columns(&p->model->config));
}

static void push_elementwise(const Pass *p, LayerState *s) {
  s->norm1.out = push_activation(p, "norm1", p->model->config.hidden_size);
  s->norm2.out = push_activation(p, "norm2", p->model->config.hidden_size);
  s->activation = push_activation(p, "mlp activation", p->model->config.intermediate_size);
}

// The state that outlives elementwise recomputation, except the pre-activation.
static void push_kept(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  AttentionShape h = p->heads;
  push_norm_statistics(p, &s->norm1);
  push_norm_statistics(p, &s->norm2);
  s->qkv = push_activation(p, "qkv", (h.num_heads + 2 * h.num_key_value_heads) * h.head_dim);
  s->lse = memory_push_2d(&p->backend->memory, "attention lse", MEMORY_ACTIVATIONS, DTYPE_F32, h.batch,
                          h.num_heads * h.seq_len);
  s->attention = push_activation(p, "attention", h.num_heads * h.head_dim);
  s->middle = push_activation(p, "residual middle", c->hidden_size);
}

static void rotate(const Pass *p, Tensor qkv, bool inverse) {
  if (p->model->config.learned_positions) return;
  Tensor angles = p->model->rope_angles;
  rope(p->backend, (Rope){.qkv = qkv,
                          .cos_sin = tensor_rows(angles, p->past, angles.shape[0] - p->past),
                          .shape = p->heads,
                          .inverse = inverse});
}

static void attend(const Pass *p, const Layer *w, const LayerState *s) {
  if (!p->cache) {
    attention_forward(
        p->backend, (AttentionForward){.out = s->attention, .lse = s->lse, .qkv = s->qkv, .shape = p->heads});
    return;
  }
  int64_t heads = p->cache->batch * p->heads.num_key_value_heads, first = 2 * heads * (w - p->model->layers);
  attention_decode(p->backend, (AttentionDecode){.out = s->attention,
                                                 .keys = tensor_rows(p->cache->data, first, heads),
                                                 .values = tensor_rows(p->cache->data, first + heads, heads),
                                                 .qkv = s->qkv,
                                                 .shape = p->heads,
                                                 .past = p->past});
}

static void mlp_first_half(const Pass *p, const Layer *w, const LayerState *s) {
  bool gated = p->model->config.gated_mlp;
  if (gated) {
    project(p, s->pre_activation, s->norm2.out, &w->up_weight, &w->up_bias, (Tensor){0}, (Tensor){0});
    swiglu_forward(p->backend, (SwigluForward){.out = s->activation, .gate_up = s->pre_activation});
  } else {
    project(p, s->activation, s->norm2.out, &w->up_weight, &w->up_bias, (Tensor){0}, s->pre_activation);
  }
}

// Everything up to the stream's middle, and the MLP up to its activation.
static void layer_forward_inner(const Pass *p, const Layer *w, const LayerState *s) {
  run_norm(p, &s->norm1, s->input, &w->norm1_weight, &w->norm1_bias);
  project(p, s->qkv, s->norm1.out, &w->qkv_weight, &w->qkv_bias, (Tensor){0}, (Tensor){0});
  rotate(p, s->qkv, false);
  attend(p, w, s);
  project(p, s->middle, s->attention, &w->out_weight, &w->out_bias, s->input, (Tensor){0});
  run_norm(p, &s->norm2, s->middle, &w->norm2_weight, &w->norm2_bias);
  mlp_first_half(p, w, s);
}

// Pushes the whole state. marks[r] is where popping to forgets what r computes again.
static void push_state(const Pass *p, LayerState *s, MemoryMark marks[RECOMPUTE_COUNT]) {
  const Memory *memory = &p->backend->memory;
  marks[RECOMPUTE_LAYER] = memory_mark(memory);
  push_kept(p, s);
  marks[RECOMPUTE_MLP] = memory_mark(memory);
  push_pre_activation(p, s);
  marks[RECOMPUTE_ELEMENTWISE] = memory_mark(memory);
  push_elementwise(p, s);
  marks[RECOMPUTE_NONE] = memory_mark(memory);
}

// From s->input to s->output, keeping of the rest what p->recompute says.
static void layer_forward(const Pass *p, const Layer *w, LayerState *s) {
  MemoryMark marks[RECOMPUTE_COUNT];
  push_state(p, s, marks);
  layer_forward_inner(p, w, s);
  project(p, s->output, s->activation, &w->down_weight, &w->down_bias, s->middle, (Tensor){0});
  memory_pop_to(&p->backend->memory, marks[p->recompute]);
}

// The activation and norm2's output again, from the pre-activation and the middle; at RECOMPUTE_MLP the
// pre-activation too.
static void mlp_again(const Pass *p, const Layer *w, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  if (p->recompute == RECOMPUTE_NONE || p->recompute == RECOMPUTE_LAYER) return; // all there
  if (p->recompute == RECOMPUTE_MLP) push_pre_activation(p, s);
  s->norm2.out = push_activation(p, "norm2", c->hidden_size);
  s->activation = push_activation(p, "mlp activation", c->intermediate_size);
  run_norm(p, &s->norm2, s->middle, &w->norm2_weight, &w->norm2_bias);
  if (p->recompute == RECOMPUTE_MLP)
    mlp_first_half(p, w, s);
  else if (c->gated_mlp)
    swiglu_forward(p->backend, (SwigluForward){.out = s->activation, .gate_up = s->pre_activation});
  else
    gelu_forward(p->backend, (GeluForward){.out = s->activation, .x = s->pre_activation});
}

// dr holds the gradient of the layer's output and leaves holding that of its middle.
static void mlp_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dr) {
  const ModelConfig *c = &p->model->config;
  Memory *memory = &p->backend->memory;
  MemoryMark mark = memory_mark(memory);
  mlp_again(p, w, s);
  project_backward_weight(p, dr, s->activation, &w->down_weight, &w->down_bias);
  // The activation is not needed any more: its gradient takes its place.
  Tensor dactivation = s->activation, dpre;
  if (c->gated_mlp) {
    project_backward_input(p, dactivation, dr, &w->down_weight, (Tensor){0});
    dpre = s->pre_activation;
    swiglu_backward(p->backend,
                    (SwigluBackward){.dgate_up = dpre, .dout = dactivation, .gate_up = s->pre_activation});
  } else {
    project_backward_input(p, dactivation, dr, &w->down_weight, s->pre_activation);
    dpre = dactivation;
  }
  project_backward_weight(p, dpre, s->norm2.out, &w->up_weight, &w->up_bias);
  // Likewise norm2's output.
  Tensor dnorm2 = s->norm2.out;
  project_backward_input(p, dnorm2, dpre, &w->up_weight, (Tensor){0});
  run_norm_backward(p, &s->norm2, dr, dnorm2, s->middle, &w->norm2_weight, &w->norm2_bias, true);
  memory_pop_to(memory, mark);
}

// dr holds the gradient of the layer's middle and leaves holding that of its input.
static void attention_half_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dr) {
  const ModelConfig *c = &p->model->config;
  Memory *memory = &p->backend->memory;
  MemoryMark mark = memory_mark(memory);
  project_backward_weight(p, dr, s->attention, &w->out_weight, &w->out_bias);
  Tensor dqkv = push_gradient(p, "d qkv", s->qkv.shape[1]);
  MemoryMark after_dqkv = memory_mark(memory);
  Tensor dattention = push_gradient(p, "d attention", s->attention.shape[1]);
  project_backward_input(p, dattention, dr, &w->out_weight, (Tensor){0});
  attention_backward(p->backend, (AttentionBackward){.dqkv = dqkv,
                                                     .dout = dattention,
                                                     .out = s->attention,
                                                     .lse = s->lse,
                                                     .qkv = s->qkv,
                                                     .shape = p->heads});
  memory_pop_to(memory, after_dqkv);
  rotate(p, dqkv, true);
  if (p->recompute == RECOMPUTE_ELEMENTWISE || p->recompute == RECOMPUTE_MLP) {
    s->norm1.out = push_activation(p, "norm1", c->hidden_size);
    run_norm(p, &s->norm1, s->input, &w->norm1_weight, &w->norm1_bias);
  }
  project_backward_weight(p, dqkv, s->norm1.out, &w->qkv_weight, &w->qkv_bias);
  Tensor dnorm1 = s->norm1.out;
  project_backward_input(p, dnorm1, dqkv, &w->qkv_weight, (Tensor){0});
  run_norm_backward(p, &s->norm1, dr, dnorm1, s->input, &w->norm1_weight, &w->norm1_bias, true);
  memory_pop_to(memory, mark);
}

static void layer_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dr) {
  if (p->recompute == RECOMPUTE_LAYER) {
    MemoryMark marks[RECOMPUTE_COUNT];
    push_state(p, s, marks);
    layer_forward_inner(p, w, s);
  }
  mlp_backward(p, w, s, dr);
  attention_half_backward(p, w, s, dr);
}

// --- the whole step ----------------------------------------------------------------------------------------

static Tensor embed(const Pass *p) {
  Tensor out = push_activation(p, "residual", p->model->config.hidden_size);
  Tensor positions = p->model->position_embedding.value;
  if (tensor_exists(positions)) positions = tensor_rows(positions, p->past, positions.shape[0] - p->past);
  embedding_forward(p->backend, (EmbeddingForward){.out = out,
                                                   .tokens = p->batch->tokens,
                                                   .token_weight = p->model->token_embedding.value,
                                                   .position_weight = positions,
                                                   .seq_len = p->batch->seq_len});
  return out;
}

static Norm final_norm(const Pass *p, Tensor stream) {
  Norm norm = {0};
  push_norm_statistics(p, &norm);
  norm.out = push_activation(p, "final norm", p->model->config.hidden_size);
  run_norm(p, &norm, stream, &p->model->final_norm_weight, &p->model->final_norm_bias);
  return norm;
}

// Where a matrix begins within its group.
static int64_t place_in_group(const Model *model, const Param *matrix) {
  const Tensor group = model->parameters.value[GROUP_MATRICES];
  return ((char *)matrix->value.data - (char *)group.data) / (int64_t)dtype_bytes(group.dtype);
}

static void say_ready(const TransformerOptions *options, ParameterGroup group, int64_t first) {
  if (options->ready) options->ready(options->ready_context, group, first);
}

// The head's gradient, which is the embedding's too, takes longest to sum over the ranks: [V, H] in fp32. So
// that it may go while the layers' backward passes run, the embedding's part comes after the sum. It has N
// rows at most: every rank gets those of all ranks and adds them, in the same order. Where the head is split it
// adds those that are its own.
static void embedding_of_all_ranks(Pass *p, Tensor dr) {
  const VocabShard *shard = &p->model->shard;
  Backend *backend = p->backend;
  Memory *memory = &backend->memory;
  int64_t rows = p->rows * backend->ranks, hidden_size = p->model->config.hidden_size;
  MemoryMark mark = memory_mark(memory);
  Tensor tokens = memory_push_1d(memory, "tokens of all ranks", MEMORY_ACTIVATION_GRADIENTS, DTYPE_I32, rows);
  Tensor dout = memory_push_2d(memory, "d residual of all ranks", MEMORY_ACTIVATION_GRADIENTS, dr.dtype, rows,
                               hidden_size);
  all_gather(backend, (Collective){.out = tokens, .x = p->batch->tokens});
  all_gather(backend, (Collective){.out = dout, .x = dr});
  if (shard->vocab_size)
    shard_indices(backend, (ShardIndices){.out = tokens,
                                          .indices = tokens,
                                          .first = shard->first,
                                          .count = p->model->head.grad.shape[0]});
  else
    collectives_join(backend, 0); // the head's sum among them
  embedding_backward(backend, (EmbeddingBackward){.dtoken_weight = p->model->token_embedding.grad,
                                                  .dout = dout,
                                                  .tokens = tokens,
                                                  .seq_len = p->batch->seq_len,
                                                  .accumulate_token = true});
  memory_pop_to(memory, mark);
}

// The rows of the head that this rank computes with.
static Tensor own_head(const Model *model) {
  if (!model->shard.vocab_size || model->parameters.spread.split_head_weights) return model->head.value;
  return tensor_rows(model->head.value, model->shard.first, model->head.grad.shape[0]);
}

void transformer_train(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options,
                       float scale, bool accumulate, Tensor loss) {
  Pass p = pass_begin(backend, model, batch);
  p.recompute = options->recompute;
  p.accumulate = accumulate && !options->fresh;
  Memory *memory = &backend->memory;
  int64_t hidden_size = model->config.hidden_size, layers = model->config.num_hidden_layers;
  LayerState *states = calloc((size_t)layers, sizeof *states);
  MemoryMark *marks = calloc((size_t)layers, sizeof *marks); // the stack below each layer
  if (!states || !marks) fail("out of host memory for a pass through %lld layers", (long long)layers);

  MemoryMark bottom = memory_mark(memory);
  Tensor dr = push_gradient(&p, "d residual", hidden_size);
  Tensor stream = embed(&p);
  for (int64_t l = 0; l < layers; l++) {
    marks[l] = memory_mark(memory);
    states[l].input = stream;
    states[l].output = push_activation(&p, "residual", hidden_size);
    layer_forward(&p, &model->layers[l], &states[l]);
    stream = states[l].output;
  }

  MemoryMark top = memory_mark(memory);
  Norm norm = final_norm(&p, stream);
  Tensor dnorm = push_gradient(&p, "d final norm", hidden_size);
  bool filter = options->mode == LCE_FUSED && options->filter > 0;
  linear_cross_entropy(backend, (LinearCrossEntropy){.mode = options->mode,
                                                     .chunk = options->chunk,
                                                     .loss = loss,
                                                     .outputs = options->outputs,
                                                     .terms = {.label_smoothing = options->label_smoothing,
                                                               .z_loss = options->z_loss,
                                                               .softcap = softcap_of(model),
                                                               .filter = filter ? options->filter : 0},
                                                     .filtered = filter ? options->filtered : (Tensor){0},
                                                     .dx = dnorm,
                                                     .dweight = model->head.grad,
                                                     .x = norm.out,
                                                     .weight = own_head(model),
                                                     .shard = model->shard,
                                                     .targets = batch->targets,
                                                     .rows = batch->rows,
                                                     .counted = batch->counted,
                                                     .scale = scale,
                                                     .accumulate = accumulate});
  bool tied = model->config.tie_word_embeddings, split = model->shard.vocab_size > 0;
  Tensor dpositions = model->position_embedding.grad;
  bool head_first = !tied || split || (options->sums_head && !tensor_exists(dpositions));
  if (head_first) say_ready(options, GROUP_HEAD, 0);
  run_norm_backward(&p, &norm, dr, dnorm, stream, &model->final_norm_weight, &model->final_norm_bias, false);
  memory_pop_to(memory, top);

  for (int64_t l = layers; l-- > 0;) {
    layer_backward(&p, &model->layers[l], &states[l], dr);
    memory_pop_to(memory, marks[l]); // the layer's output too: its input is the one below
    say_ready(options, GROUP_MATRICES, place_in_group(model, &model->layers[l].qkv_weight));
  }
  bool of_all = tied && head_first;
  Tensor none = {0};
  if (of_all) embedding_of_all_ranks(&p, dr);
  if (!of_all || tensor_exists(dpositions)) // a tied embedding already holds the head's gradient
    embedding_backward(backend,
                       (EmbeddingBackward){.dtoken_weight = of_all ? none : model->token_embedding.grad,
                                           .dposition_weight = dpositions,
                                           .dout = dr,
                                           .tokens = batch->tokens,
                                           .seq_len = batch->seq_len,
                                           .accumulate_token = p.accumulate || tied,
                                           .accumulate_position = p.accumulate});
  memory_pop_to(memory, bottom);
  say_ready(options, GROUP_MATRICES, 0);
  say_ready(options, GROUP_VECTORS, 0);
  if (!head_first) say_ready(options, GROUP_HEAD, 0);
  free(states);
  free(marks);
}

// The residual stream after all layers, keeping nothing on the way: two streams take turns.
static Tensor forward_only(Pass *p) {
  p->recompute = RECOMPUTE_LAYER;
  Tensor stream = embed(p), spare = push_activation(p, "residual", p->model->config.hidden_size);
  for (int64_t l = 0; l < p->model->config.num_hidden_layers; l++) {
    LayerState s = {.input = stream, .output = spare};
    layer_forward(p, &p->model->layers[l], &s);
    spare = stream;
    stream = s.output;
  }
  return stream;
}

void transformer_evaluate(Backend *backend, Model *model, const Batch *batch,
                          const TransformerOptions *options, Tensor loss) {
  Pass p = pass_begin(backend, model, batch);
  MemoryMark bottom = memory_mark(&backend->memory);
  Norm norm = final_norm(&p, forward_only(&p));
  linear_cross_entropy(backend, (LinearCrossEntropy){.mode = options->mode,
                                                     .chunk = options->chunk,
                                                     .loss = loss,
                                                     .terms = {.softcap = softcap_of(model)},
                                                     .x = norm.out,
                                                     .weight = model->head.value,
                                                     .targets = batch->targets,
                                                     .rows = batch->rows,
                                                     .counted = batch->counted});
  memory_pop_to(&backend->memory, bottom);
}

static void logits_of_rows(Pass *p, Tensor rows, Tensor logits) {
  Backend *backend = p->backend;
  MemoryMark bottom = memory_mark(&backend->memory);
  Tensor stream = forward_only(p);
  if (tensor_exists(logits)) {
    Norm norm = final_norm(p, stream);
    Tensor picked = memory_push_2d(&backend->memory, "rows to predict from", MEMORY_ACTIVATIONS,
                                   backend->dtype, rows.shape[0], p->model->config.hidden_size);
    gather_rows(backend, (MoveRows){.out = picked, .x = norm.out, .rows = rows});
    linear_forward(backend, (LinearForward){.out = logits, .x = picked, .weight = p->model->head.value});
  }
  memory_pop_to(&backend->memory, bottom);
}

void transformer_logits(Backend *backend, Model *model, const Batch *batch, Tensor rows, Tensor logits) {
  Pass p = pass_begin(backend, model, batch);
  logits_of_rows(&p, rows, logits);
}

KeyValueCache key_value_cache_push(Backend *backend, const ModelConfig *c, int64_t batch, int64_t capacity) {
  int64_t rows = 2 * c->num_hidden_layers * batch * c->num_key_value_heads;
  return (KeyValueCache){.batch = batch,
                         .capacity = capacity,
                         .data = memory_push_2d(&backend->memory, "key/value cache", MEMORY_ACTIVATIONS,
                                                backend->dtype, rows, capacity * c->head_dim)};
}

void transformer_continue(Backend *backend, Model *model, const Batch *batch, const KeyValueCache *cache,
                          int64_t past, Tensor rows, Tensor logits) {
  if (batch->batch != cache->batch || past < 0 || past + batch->seq_len > cache->capacity)
    fail("%lld sequences of %lld tokens after %lld do not fit into a cache for %lld of %lld",
         (long long)batch->batch, (long long)batch->seq_len, (long long)past, (long long)cache->batch,
         (long long)cache->capacity);
  Pass p = pass_begin(backend, model, batch);
  p.cache = cache;
  p.past = past;
  logits_of_rows(&p, rows, logits);
}
