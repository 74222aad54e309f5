// The door of a layer: what comes before it computes, and what goes after it has.
//
// transformer.c computes as if all weights, inputs and gradients were on the device. It calls layer_enter before each layer
// and layer_leave after it, in both directions. Without any of the options below they only push the layer's output and pop
// its state.
//
// --offload: what lies in the host's memory is copied a layer ahead, on two streams of their own, in and out, while the
// layers' operations run on the compute stream. Weights and gradients of two layers are on the device, in the halves of a
// double buffer, which layers use in turn.
//
//   forward    entering l        the weights of l + 1 come, the input of l goes to the host
//                                wait for the weights of l, and until the input of l - 1 has gone: l writes its output there
//              leaving the last  its gradients come, of the micro-batches before
//   backward   entering l        gradients, input and weights of l - 1 come
//                                wait for those of l, and until the gradients of l + 2 have gone, whose half l writes
//              leaving l         its gradients are summed in squares, for the norm, and go
//
// --fp8: when a layer's weights are there, its matrices are quantized.
// Several ranks: when a layer's gradients are final, their sum over the ranks begins (gradient_reduction.c).
#include "model/pass.h"

// Functions that begin copies return how many; they do nothing for what stays on the device, or for a layer that is not there.
static int64_t fetch_weights(const Pass *p, int64_t l);
static int64_t fetch_grads(const Pass *p, int64_t l);
static int64_t fetch_input(const Pass *p, int64_t l);
static int64_t send_input(const Pass *p, int64_t l);
static void send_grads(const Pass *p, int64_t l);
static void push_output(const Pass *p, int64_t l);
static void quantize_weights(const Pass *p, int64_t l, Direction direction);

static int64_t layers_of(const Pass *p) {
  return p->model->config.num_hidden_layers;
}

void layer_enter(Pass *p, int64_t l, Direction direction) {
  int64_t arriving = 0; // copies that the layer does not wait for
  if (direction == FORWARD) {
    push_output(p, l);
    if (l == 0) fetch_weights(p, 0);
    arriving += fetch_weights(p, l + 1);
    copies_join(p->backend, arriving, send_input(p, l));
  } else {
    arriving += fetch_grads(p, l - 1);
    arriving += fetch_input(p, l - 1);
    if (l < layers_of(p) - 1) arriving += fetch_weights(p, l - 1); // the last two have stayed
    copies_join(p->backend, arriving, 1);
  }
  quantize_weights(p, l, direction);
}

void layer_leave(Pass *p, int64_t l, Direction direction) {
  if (direction == FORWARD) {
    if (l == layers_of(p) - 1) fetch_grads(p, l);
    return;
  }
  memory_pop_to(&p->backend->memory,
                p->states[l].below); // its output too: its input is the output of the layer below
  send_grads(p, l);
  reduce_ready(p, GROUP_MATRICES, l * p->model->parameters.sharding.layer);
  if (l == 0) copies_join(p->backend, 0, 0);
}

// --- weights -----------------------------------------------------------------------------------------------

static int64_t fetch_weights(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_values) || l < 0 || l >= layers_of(p)) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_values, l),
                             .x = parameters_layer(w, w->value, l)});
  return 1;
}

// Where every layer has memory for its codes they are made in a step's first forward pass. Where all layers share that of
// one, they are made again in every pass, but for the last layer, which the backward pass begins with.
static void quantize_weights(const Pass *p, int64_t l, Direction direction) {
  bool shared = p->model->parameters.fp8_by_layer, turning = direction == BACKWARD && l == layers_of(p) - 1;
  bool needed = shared ? !turning : p->first && direction == FORWARD;
  if (!p->fp8 || !needed) return;
  const Layer *w = &p->model->layers[l];
  const Weight *matrices[] = {&w->qkv.weight, &w->out.weight, &w->up.weight, &w->down.weight};
  for (int i = 0; i < 4; i++)
    quantize(p->backend, (Quantize){.out = matrices[i]->fp8, .x = matrices[i]->value});
}

// --- gradients ---------------------------------------------------------------------------------------------

// Those that are added to.
static int64_t fetch_grads(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads) || l < 0 || !p->accumulate) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_grads, l),
                             .x = parameters_layer(w, w->grad, l),
                             .after_out = true}); // of the layer that had the buffer before
  return 1;
}

// Squares are summed here while the gradients are on the device, where these are not yet to be summed over ranks.
static void send_grads(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads)) return;
  Tensor grads = parameters_layer_buffer(w, w->layer_grads, l);
  if (p->options.last && p->backend->ranks == 1)
    reduce(p->backend,
           (Reduce){.sum = w->squares, .x = grads, .squares = true, .accumulate = l < layers_of(p) - 1});
  copy_out(p->backend, (Copy){.out = parameters_layer(w, w->grad, l), .x = grads});
  if (p->backend->ranks > 1)
    copies_join(p->backend, ASYNC_EVENTS - 1, 0); // only for those out: they are summed from there
}

// --- inputs and outputs ------------------------------------------------------------------------------------

// Where layer l's input goes between the passes, as one row; absent: it stays.
static Tensor input_on_host(const Pass *p, int64_t l) {
  Tensor inputs = p->options.inputs;
  if (!p->training || !tensor_exists(inputs) || l < 0 || l * p->rows >= inputs.shape[0]) return none;
  return tensor_flat(tensor_rows(inputs, l * p->rows, p->rows));
}

static int64_t send_input(const Pass *p, int64_t l) {
  Tensor there = input_on_host(p, l);
  if (!tensor_exists(there)) return 0;
  copy_out(p->backend, (Copy){.out = there, .x = tensor_flat(p->states[l].input)});
  return 1;
}

static int64_t fetch_input(const Pass *p, int64_t l) {
  Tensor there = input_on_host(p, l);
  if (!tensor_exists(there)) return 0;
  copy_in(p->backend, (Copy){.out = tensor_flat(p->states[l].input), .x = there});
  return 1;
}

// Inputs that do not stay, since they go to the host or no backward pass follows, need two tensors, which are input and
// output in turn.
static void push_output(const Pass *p, int64_t l) {
  LayerState *s = &p->states[l];
  bool in_turn = (!p->training || tensor_exists(p->options.inputs)) && p->recompute == RECOMPUTE_LAYER;
  if (in_turn) s->output = l ? p->states[l - 1].input : push_activation(p, "residual", s->input.shape[1]);
  s->below = memory_mark(&p->backend->memory);
  if (!in_turn) s->output = push_activation(p, "residual", s->input.shape[1]);
}

// --- the head's and the embedding's gradients --------------------------------------------------------------

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
