// If targets are ignored (instruction tuning; the last token of each packed document), the other tokens are
// gathered before the loss, and its results are scattered:
//
//     x'[i] = x[indices[i]],  y'[i] = y[indices[i]]                 the counted tokens, one after the other
//     loss', dx', dW = linear_cross_entropy(x', W, y')
//     loss[indices[i]] = loss'[i],  dx[indices[i]] = dx'[i]         0 elsewhere
//
// In training x' lies where dx will be, and dx' where x was.
#include "model/masked_loss.h"

#include "kernels/base/fail.h"

// The ledger must not depend on the data: it sees the call for all tokens, on a backend that runs nothing.
static void plan_all_tokens(Backend *backend, LinearCrossEntropy a) {
  static const BackendOps nothing;
  Backend plan = *backend;
  plan.ops = &nothing;
  linear_cross_entropy(&plan, a);
  backend->memory = plan.memory;
}

// Memory as for all tokens; absent if t is.
static Tensor push_counted(Backend *backend, Tensor t, int64_t counted) {
  if (!tensor_exists(t)) return t;
  return tensor_rows(memory_push_1d(&backend->memory, "of counted tokens", MEMORY_HEAD, t.dtype, t.shape[0]),
                     0, counted);
}

static void scatter(Backend *backend, Tensor out, Tensor x, Tensor indices) {
  if (!tensor_exists(out)) return;
  fill_zero(backend, out);
  scatter_rows(backend, (MoveRows){.out = out, .x = x, .indices = indices});
}

void masked_linear_cross_entropy(Backend *backend, LinearCrossEntropy a, Tensor indices, int64_t counted) {
  if (!tensor_exists(indices) || a.mode == LCE_MATERIALIZED) {
    linear_cross_entropy(backend, a);
    return;
  }
  if (tensor_exists(a.dx) && a.dx.dtype != a.x.dtype)
    fail("masked_linear_cross_entropy: dx is %s and x is %s; give them one type", tensor_text(a.dx).text,
         tensor_text(a.x).text);
  enum { OUTPUTS = sizeof a.outputs.all / sizeof *a.outputs.all };
  Memory *memory = &backend->memory;
  MemoryMark mark = memory_mark(memory);
  counted = max_i64(counted, 1); // if none does, an ignored token, which gives zeros
  indices = tensor_rows(indices, 0, counted);
  LinearCrossEntropy few = a;
  few.chunk = lce_used_chunk(a.x.shape[0], a.chunk); // no larger than a chunk of all tokens
  few.x = tensor_exists(a.dx) ? a.dx
                              : memory_push_2d(memory, "x of counted tokens", MEMORY_ACTIVATIONS, a.x.dtype,
                                               a.x.shape[0], a.x.shape[1]);
  few.x = tensor_rows(few.x, 0, counted);
  if (tensor_exists(a.dx)) few.dx = tensor_rows(a.x, 0, counted);
  few.targets = push_counted(backend, a.targets, counted);
  few.loss = push_counted(backend, a.loss, counted);
  for (int i = 0; i < OUTPUTS; i++) few.outputs.all[i] = push_counted(backend, a.outputs.all[i], counted);
  plan_all_tokens(backend, a);
  gather_rows(backend, (MoveRows){.out = few.x, .x = a.x, .indices = indices});
  gather_rows(backend, (MoveRows){.out = few.targets, .x = a.targets, .indices = indices});
  linear_cross_entropy(backend, few);
  scatter(backend, a.dx, few.dx, indices);
  scatter(backend, a.loss, few.loss, indices);
  for (int i = 0; i < OUTPUTS; i++) scatter(backend, a.outputs.all[i], few.outputs.all[i], indices);
  memory_pop_to(memory, mark);
}
