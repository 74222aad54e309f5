// linear_cross_entropy of the counted tokens alone: a chunk's are gathered into buffers, and what is computed of them is
// scattered back.
#include "kernels/lce_call.h"

// Buffers for `count` tokens, of what the caller gave.
Tokens lce_counted_buffers(const Call *c, int64_t count) {
  static const char *const names[] = {"counted rows of x", "counted targets", "counted token weights",
                                      "counted losses", "counted rows of dx"};
  Tokens t = c->tokens;
  for (int i = 0; i < TOKENS_ALL; i++) {
    const char *name = i < (int)(sizeof names / sizeof *names) ? names[i] : "counted outputs";
    Tensor *like = &t.all[i];
    if (!tensor_exists(*like)) continue;
    *like = like->rank == 2 ? push_matrix(c, name, like->dtype, count, like->shape[1])
                            : push_vector(c, name, like->dtype, count);
  }
  return t;
}

// Zeros for tokens that do not count. How many do depends on the data, and with it the size of the operations' scratch. So
// the ledger first counts a full chunk, on a backend that runs nothing, and what it says does not depend on the data.
void lce_counted_begin(const Call *c, const Chunk *buffers, int64_t size) {
  static const BackendOps nothing;
  Backend plan = *c->backend;
  Call counting = *c;
  plan.ops = &nothing;
  counting.backend = &plan;
  lce_chunks(&counting, buffers, size, size);
  c->backend->memory = plan.memory;
  for (int i = TOKENS_READ; i < TOKENS_ALL; i++)
    if (tensor_exists(c->tokens.all[i])) fill_zero(c->backend, c->tokens.all[i]);
}

void lce_counted_gather(const Call *c, Chunk *k, int64_t first, int64_t count) {
  k->positions = tensor_rows(c->a->rows, first, count);
  for (int i = 0; i < TOKENS_READ; i++)
    if (tensor_exists(c->tokens.all[i]))
      gather_rows(c->backend,
                  (MoveRows){.out = k->local.all[i], .x = c->tokens.all[i], .rows = k->positions});
}

void lce_counted_scatter(const Call *c, const Chunk *k) {
  for (int i = TOKENS_READ; i < TOKENS_ALL; i++)
    if (tensor_exists(c->tokens.all[i]))
      scatter_rows(c->backend,
                   (MoveRows){.out = c->tokens.all[i], .x = k->local.all[i], .rows = k->positions});
}
