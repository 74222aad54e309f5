// AdamW of offloaded layers, beside the next forward pass.
//
// Gradients and states on the host, and weights that are there, cross the bus for an update, while the GPU
// has nothing to compute: a second for 8B parameters. The update waits for the norm of all gradients, so it
// cannot begin in the backward pass. But the next step reads a layer's weights only when its forward pass
// gets there. So the layer is updated while the one below computes. The bits are those of an update at once.
//
// A layer comes in parts, each as large as half of the gradients' double buffer has room for. A forward pass
// has no other use for that buffer, so this takes no memory. Its halves are in turn:
//
//   copies in    | part 0 | part 1 |        | part 2, when part 0 has left | ...
//   copies out            | AdamW of part 0, which leaves | AdamW of part 1, which leaves | ...
#include "model/shards.h"

enum { UNIT = MEMORY_ALIGNMENT / 2 }; // elements; every part begins at a multiple

// Elements of a part, whose gradients, states and master weights fill half of the buffer.
static int64_t part_size(const ParameterSet *p) {
  const Tensor *const roles[] = {p->state[0], p->state[1], p->master};
  size_t bytes = dtype_bytes(p->layer_grads.dtype), half = tensor_bytes(p->layer_grads) / 2;
  for (int i = 0; i < 3; i++)
    if (tensor_exists(roles[i][GROUP_MATRICES])) bytes += dtype_bytes(roles[i][GROUP_MATRICES].dtype);
  return (int64_t)(half / bytes) / UNIT * UNIT;
}

bool updates_deferred(const ParameterSet *p, const Backend *backend) {
  bool buffered = p->states_offloaded && tensor_exists(p->layer_grads);
  bool by_adamw = tensor_exists(p->state[1][GROUP_MATRICES]); // has second moments
  return buffered && by_adamw && backend->ranks == 1 && part_size(p) > 0;
}

static void update_part(Backend *backend, const ParameterSet *p, int64_t l, Range part, bool second_half,
                        CopyCount *begun) {
  enum { GRAD, WEIGHT = 4, TENSORS };
  Range elements = {l * p->sharding.layer + part.offset, part.size};
  const Update host = shards_update(p, GROUP_MATRICES, elements, p->deferred);
  Update here = host;
  here.after_copies = true;
  const Tensor from[TENSORS] = {host.grad, host.m, host.v, host.master, host.weight};
  Tensor *const to[TENSORS] = {&here.grad, &here.m, &here.v, &here.master, &here.weight};
  bool moves[TENSORS] = {true, true, true, tensor_exists(host.master), tensor_exists(p->layer_values)};
  int64_t leave = 1; // AdamW counts
  for (int i = GRAD + 1; i < TENSORS; i++) leave += moves[i];
  uintptr_t at = (uintptr_t)p->layer_grads.data + second_half * tensor_bytes(p->layer_grads) / 2;
  for (int i = 0; i < TENSORS; i++) {
    if (!moves[i]) continue;
    *to[i] = i == WEIGHT ? tensor_rows(parameters_layer_buffer(p, p->layer_values, l), part.offset, part.size)
                         : tensor_1d((void *)at, from[i].dtype, part.size);
    at += tensor_bytes(from[i]);
    if (i == WEIGHT && tensor_exists(host.master)) continue; // is written alone
    copy_in(backend, (Copy){.out = *to[i], .x = from[i], .after_out = true, .behind = leave});
    begun->in++;
  }
  adamw(backend, here);
  for (int i = GRAD + 1; i < TENSORS; i++)
    if (moves[i]) copy_out(backend, (Copy){.out = from[i], .x = *to[i]});
  begun->out += leave;
}

CopyCount update_deferred_layer(Backend *backend, const ParameterSet *p, int64_t l) {
  CopyCount begun = {0};
  int64_t layer = p->sharding.layer, size = part_size(p), parts = ceil_div(layer, size);
  for (int64_t i = 0; i < parts; i++)
    update_part(backend, p, l, (Range){i * size, min_i64(size, layer - i * size)}, (l * parts + i) % 2,
                &begun);
  return begun;
}

void end_deferred_update(Backend *backend, ParameterSet *p) {
  if (!p->deferred.step) return;
  fill_zero(backend, p->layer_grads); // its padding must be
  p->deferred.step = 0;
}

void parameters_finish_update(Backend *backend, ParameterSet *p) {
  int64_t layer = p->sharding.layer;
  for (int64_t end = p->group_elements[GROUP_MATRICES]; p->deferred.step && end > 0; end -= layer)
    adamw(backend, shards_update(p, GROUP_MATRICES, (Range){end - layer, layer}, p->deferred));
  p->deferred.step = 0;
}
