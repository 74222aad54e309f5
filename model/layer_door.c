// What comes and goes while layers compute. Layers that follow each other use the two halves of a double buffer on the
// device in turn (--offload): a layer's weights arrive during the layer before it, and its gradients and its input leave
// during the layer after it. Each function does nothing for what stays on the device; those that begin copies return how many.
#include "model/pass.h"

static int64_t layers_of(const Pass *p) {
  return p->model->config.num_hidden_layers;
}

int64_t head_layer(const Pass *p) {
  return layers_of(p);
}

// --- copies ------------------------------------------------------------------------------------------------

static int64_t fetch_weights(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_values) || l < 0 || l >= layers_of(p)) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_values, l),
                             .x = parameters_layer(w, w->value, l)});
  return 1;
}

// What is added to.
static int64_t fetch_grads(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads) || l < 0 || !p->accumulate) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_grads, l),
                             .x = parameters_layer(w, w->grad, l),
                             .after_out = true}); // of the layer that had the buffer before
  return 1;
}

// After the sum of their squares.
static void send_grads(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads)) return;
  Tensor grads = parameters_layer_buffer(w, w->layer_grads, l), squares = p->options->door.squares;
  if (tensor_exists(squares))
    reduce(p->backend,
           (Reduce){.sum = squares, .x = grads, .squares = true, .accumulate = l < layers_of(p) - 1});
  copy_out(p->backend, (Copy){.out = parameters_layer(w, w->grad, l), .x = grads});
}

// A layer's input, to the host's memory or back.
static int64_t copy_input(const Pass *p, int64_t l, Direction direction) {
  if (!p->options || l < 0) return 0;
  Tensor inputs = p->options->door.inputs;
  if (!tensor_exists(inputs) || l * p->rows >= inputs.shape[0]) return 0;
  Tensor here = tensor_flat(p->states[l].input),
         there = tensor_flat(tensor_rows(inputs, l * p->rows, p->rows));
  if (direction == BACKWARD)
    copy_in(p->backend, (Copy){.out = here, .x = there});
  else
    copy_out(p->backend, (Copy){.out = there, .x = here});
  return 1;
}

// The codes of layer l's matrices (--fp8), where they are not there from an earlier pass.
static void quantize_weights(const Pass *p, int64_t l, Direction direction) {
  bool shared = p->model->parameters.fp8_by_layer; // one layer's memory serves all
  // The forward pass's last layer is the backward pass's first.
  bool there = direction == BACKWARD ? !shared || l == layers_of(p) - 1 : !shared && p->accumulate_head;
  if (!p->fp8 || there) return;
  const Layer *w = &p->model->layers[l];
  const Weight *matrices[] = {&w->qkv.weight, &w->out.weight, &w->up.weight, &w->down.weight};
  for (int i = 0; i < 4; i++)
    quantize(p->backend, (Quantize){.out = matrices[i]->fp8, .x = matrices[i]->value});
}

// --- the embedding's and the head's gradients --------------------------------------------------------------

// Those of `group` from element `first` on are final.
static void grads_ready(const Pass *p, ParameterGroup group, int64_t first) {
  const LayerDoor *door = &p->options->door;
  if (door->grads_ready) door->grads_ready(door->context, group, first);
}

// Whether the embedding's part of a tied head's gradient is added here, at its door, so that the rest may go first.
static bool adds_embedding(const Pass *p) {
  return p->model->config.tie_word_embeddings && p->options->door.add_embedding_grads;
}

static void enter_embedding_backward(Pass *p) {
  const LayerDoor *door = &p->options->door;
  if (adds_embedding(p))
    door->add_embedding_grads(door->context, p->batch, p->dx);
  else
    p->dtokens = p->model->token_embedding.grad;
}

static bool head_ready_last(const Pass *p) {
  return p->model->config.tie_word_embeddings && !adds_embedding(p);
}

static void leave_embedding_backward(const Pass *p) {
  grads_ready(p, GROUP_EMBEDDINGS, 0);
  grads_ready(p, GROUP_VECTORS, 0);
  if (head_ready_last(p)) grads_ready(p, GROUP_HEAD, 0);
}

// --- the stream --------------------------------------------------------------------------------------------

// Whether the stream alternates between two tensors in layers whose input does not stay on the device: those of a forward
// pass alone, and those whose input goes to the host.
static bool alternates(const Pass *p) {
  return !p->options || tensor_exists(p->options->door.inputs);
}

// Layer l's input, and the memory of its output.
static void take_stream(Pass *p, int64_t l) {
  int64_t hidden_size = p->model->config.hidden_size;
  if (l == 0 && alternates(p)) p->spare = push_activation(p, "residual", hidden_size);
  LayerState *s = &p->states[l];
  *s = (LayerState){.below = memory_mark(&p->backend->memory), .input = p->stream};
  bool in_spare = alternates(p) && p->recompute == RECOMPUTE_LAYER;
  s->output = in_spare ? p->spare : push_activation(p, "residual", hidden_size);
}

// --- the door ----------------------------------------------------------------------------------------------

static void enter_forward(Pass *p, int64_t l) {
  take_stream(p, l);
  if (l == 0) fetch_weights(p, 0);
  p->arriving = fetch_weights(p, l + 1);
  copies_join(p->backend, p->arriving, copy_input(p, l, FORWARD));
}

static void enter_backward(Pass *p, int64_t l) {
  p->arriving = fetch_grads(p, l - 1);
  p->arriving += copy_input(p, l - 1, BACKWARD);
  if (l - 1 < layers_of(p) - 2) p->arriving += fetch_weights(p, l - 1); // the last two have stayed
  copies_join(p->backend, p->arriving, 1);
}

LayerState *layer_enter(Pass *p, int64_t l, Direction direction) {
  if (l == EMBEDDING) {
    if (direction == BACKWARD) enter_embedding_backward(p);
    return NULL;
  }
  if (l == head_layer(p)) return NULL;
  if (direction == FORWARD)
    enter_forward(p, l);
  else
    enter_backward(p, l);
  quantize_weights(p, l, direction);
  return &p->states[l];
}

static void leave_forward(Pass *p, int64_t l) {
  p->spare = p->stream;
  p->stream = p->states[l].output;
  if (l == layers_of(p) - 1) fetch_grads(p, l); // for the way back
}

static void leave_backward(const Pass *p, int64_t l) {
  memory_pop_to(&p->backend->memory,
                p->states[l].below); // the layer's output too: its input is the one below
  send_grads(p, l);
  if (p->options->door.grads_ready) copies_join(p->backend, p->arriving, 0); // they are sent on at once
  grads_ready(p, GROUP_MATRICES, l * p->model->parameters.sharding.layer);
  if (l == 0) copies_join(p->backend, 0, 0);
}

void layer_leave(Pass *p, int64_t l, Direction direction) {
  if (l == EMBEDDING) {
    if (direction == BACKWARD) leave_embedding_backward(p);
  } else if (l == head_layer(p)) {
    if (direction == BACKWARD && !head_ready_last(p)) grads_ready(p, GROUP_HEAD, 0);
  } else if (direction == FORWARD) {
    leave_forward(p, l);
  } else {
    leave_backward(p, l);
  }
}
