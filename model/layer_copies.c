#include "model/pass.h"

// Layers that follow each other use the two halves of a double buffer in turn. Functions that begin copies return how many.

static int64_t layers_of(const Pass *p) {
  return p->model->config.num_hidden_layers;
}

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

// A layer's input, to the host's memory or back.
static int64_t copy_input(const Pass *p, int64_t l, bool back) {
  if (!p->options || l < 0) return 0;
  Tensor inputs = p->options->inputs;
  if (!tensor_exists(inputs) || l * p->rows >= inputs.shape[0]) return 0;
  Tensor here = tensor_flat(p->states[l].input),
         there = tensor_flat(tensor_rows(inputs, l * p->rows, p->rows));
  if (back)
    copy_in(p->backend, (Copy){.out = here, .x = there});
  else
    copy_out(p->backend, (Copy){.out = there, .x = here});
  return 1;
}

void copies_begin(const Pass *p) {
  fetch_weights(p, 0);
}

void copies_before_forward(const Pass *p, int64_t l) {
  const TransformerOptions *options = p->options;
  bool deferred = options && options->update_layer && l + 1 < layers_of(p);
  if (deferred) options->update_layer(options->update_context, l + 1);
  int64_t in = deferred + fetch_weights(p, l + 1);
  copies_join(p->backend, in, copy_input(p, l, false));
}

bool copies_take_input(const Pass *p) {
  return tensor_exists(p->options->inputs) && p->recompute == RECOMPUTE_LAYER;
}

void copies_turn(const Pass *p) {
  fetch_grads(p, layers_of(p) - 1);
}

int64_t copies_before_backward(const Pass *p, int64_t l) {
  int64_t begun = fetch_grads(p, l - 1);
  begun += copy_input(p, l - 1, true);
  if (l - 1 < layers_of(p) - 2) begun += fetch_weights(p, l - 1); // the last two have stayed
  copies_join(p->backend, begun, 1);
  return begun;
}

void copies_after_backward(const Pass *p, int64_t l, int64_t begun) {
  const ParameterSet *w = &p->model->parameters;
  if (tensor_exists(w->layer_grads)) {
    Tensor grads = parameters_layer_buffer(w, w->layer_grads, l);
    if (tensor_exists(p->options->squares))
      reduce(p->backend, (Reduce){.sum = p->options->squares,
                                  .x = grads,
                                  .squares = true,
                                  .accumulate = l < layers_of(p) - 1});
    copy_out(p->backend, (Copy){.out = parameters_layer(w, w->grad, l), .x = grads});
  }
  if (p->options->hooks.on_grads_ready) copies_join(p->backend, begun, 0);
}

void copies_end(const Pass *p) {
  copies_join(p->backend, 0, 0);
}
