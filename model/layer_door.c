// Fetches a layer's tensors before it computes, and sends them away after it. By default layer_enter pushes
// the layer's output and layer_leave pops its state, and that is all.
//
// With --offload, copies between host and device begin a layer ahead, on two streams of their own, one for
// each way; the compute stream waits at copies_join. The device has the weights and gradients of two layers,
// in the halves of a double buffer.
//
//   forward   entering l        begin: the weights of l + 1 come, and are updated on the way where the step
//                               before has left that (deferred_update.c); the input of l leaves
//                               wait: the weights of l have come; the input of l - 1, where l writes, has
//                               left
//             leaving the last  begin: its gradients come, which the backward pass adds to
//   backward  entering l        begin: gradients, input and weights of l - 1 come
//                               wait: those of l have come; the gradients of l + 2, where l writes, have left
//             leaving l         begin: its gradients leave, after the sum of their squares
//
// With several ranks, layer_leave begins the sum of the layer's gradients over the ranks, on a third stream
// (gradient_reduction.c).
#include "model/pass.h"

static int64_t layers_of(const Pass *p) {
  return p->model->config.num_hidden_layers;
}

// Each returns the number of copies it started: 0 if the data stays on the device, or without such a layer.
static int64_t fetch_weights(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_values) || l < 0 || l >= layers_of(p)) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_values, l),
                             .x = parameters_layer(w, w->value, l)});
  return 1;
}

static CopyCount fetch_updated_weights(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (w->deferred.step && l < layers_of(p)) return update_deferred_layer(p->backend, w, l);
  return (CopyCount){.in = fetch_weights(p, l)};
}

static int64_t fetch_grads(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads) || l < 0 || !p->accumulate) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_grads, l),
                             .x = parameters_layer(w, w->grad, l),
                             .after_out = true}); // of the layer that had the buffer before
  return 1;
}

// Sums the squares of final gradients while these are on the device. Several ranks sum gradients first: they
// wait for this copy, and for none that comes in.
static void send_grads(const Pass *p, int64_t l) {
  const ParameterSet *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads)) return;
  Tensor grads = parameters_layer_buffer(w, w->layer_grads, l);
  if (p->options.last && squares_summed_by_layer(w, p->backend))
    sum_elements(
        p->backend,
        (SumElements){.sum = w->squares, .x = grads, .squares = true, .accumulate = l < layers_of(p) - 1});
  copy_out(p->backend, (Copy){.out = parameters_layer(w, w->grad, l), .x = grads});
  if (p->backend->ranks > 1) copies_join(p->backend, ASYNC_EVENTS - 1, 0);
}

// Layer l's input to the host, where it lies between the passes, FORWARD, and back.
static int64_t move_input(const Pass *p, int64_t l, Direction direction) {
  Tensor inputs = p->options.inputs;
  if (!p->training || !tensor_exists(inputs) || l < 0 || l * p->rows >= inputs.shape[0]) return 0;
  Tensor there = tensor_flat(tensor_rows(inputs, l * p->rows, p->rows)),
         here = tensor_flat(p->states[l].input);
  if (direction == FORWARD)
    copy_out(p->backend, (Copy){.out = there, .x = here});
  else
    copy_in(p->backend, (Copy){.out = here, .x = there});
  return 1;
}

// If inputs do not stay on the device, two tensors are input and output in turn.
static void push_output(const Pass *p, int64_t l) {
  LayerState *s = &p->states[l];
  bool in_turn = (!p->training || tensor_exists(p->options.inputs)) && p->recompute == RECOMPUTE_LAYER;
  if (in_turn) s->output = l ? p->states[l - 1].input : push_activation(p, "residual", s->input.shape[1]);
  s->below = memory_mark(&p->backend->memory);
  if (!in_turn) s->output = push_activation(p, "residual", s->input.shape[1]);
}

void layer_enter(Pass *p, int64_t l, Direction direction) {
  if (direction == FORWARD) {
    push_output(p, l);
    if (l == 0) fetch_updated_weights(p, 0);
    CopyCount next = fetch_updated_weights(p, l + 1);
    copies_join(p->backend, next.in, next.out + move_input(p, l, FORWARD));
  } else {
    int64_t coming = fetch_grads(p, l - 1); // for the next layer, which this one does not wait for
    coming += move_input(p, l - 1, BACKWARD);
    if (l < layers_of(p) - 1) coming += fetch_weights(p, l - 1); // the last two have stayed
    copies_join(p->backend, coming, 1);
  }
  matmuls_enter(p, l, direction);
}

void layer_leave(Pass *p, int64_t l, Direction direction) {
  if (direction == FORWARD) {
    if (l < layers_of(p) - 1) return;
    end_deferred_update(p->backend, &p->model->parameters);
    fetch_grads(p, l);
    return;
  }
  memory_pop_to(&p->backend->memory, p->states[l].below); // the output too: the layer below is next
  send_grads(p, l);
  reduce_ready(p, GROUP_MATRICES, l * p->model->parameters.sharding.layer);
  if (l == 0) copies_join(p->backend, 0, 0);
}
