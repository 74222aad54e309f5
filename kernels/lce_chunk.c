// How large a chunk of linear_cross_entropy is, and what it takes.
#include "base/integers.h"
#include "kernels/linear_cross_entropy.h"

int64_t lce_default_chunk(DeviceKind device, int64_t tokens) {
  return min_i64(4096, max_i64(device == ON_CUDA ? 1024 : 128, ceil_div(tokens, 8)));
}

int64_t lce_used_chunk(int64_t tokens, int64_t chunk) {
  int64_t max = min_i64(chunk, tokens), even = ceil_div(tokens, ceil_div(tokens, max));
  int64_t rounded = round_up(even, 128);
  return rounded <= max ? rounded : even;
}

size_t lce_bytes(const Backend *backend, LceMode mode, int64_t chunk, LceShape s) {
  Backend *plan = plan_backend_create(backend->device, s.dtype);
  Memory *m = &plan->memory;
  MemoryCategory other = MEMORY_ACTIVATIONS;
  plan->ranks = s.ranks > 1 ? s.ranks : 1;
  int64_t vocab_rows = ceil_div(s.vocab_size, plan->ranks);
  LinearCrossEntropy a = {.mode = mode,
                          .chunk = chunk,
                          .loss = memory_push_1d(m, "loss", other, DTYPE_F32, s.tokens),
                          .dx = memory_push_2d(m, "dx", other, s.dtype, s.tokens, s.hidden_size),
                          .dweight =
                              memory_push_2d(m, "dweight", other, DTYPE_F32, vocab_rows, s.hidden_size),
                          .x = memory_push_2d(m, "x", other, s.dtype, s.tokens, s.hidden_size),
                          .weight = memory_push_2d(m, "weight", other, s.dtype, vocab_rows, s.hidden_size),
                          .targets = memory_push_1d(m, "targets", other, DTYPE_I32, s.tokens)};
  if (s.ranks > 1) a.shard.vocab_size = s.vocab_size;
  if (s.logits) a.terms.softcap = 1;
  linear_cross_entropy(plan, a);
  size_t bytes = m->ledger.highest[MEMORY_HEAD];
  backend_destroy(plan);
  return bytes;
}

typedef struct {
  const Backend *backend;
  size_t bytes;
  LceShape shape;
} Budget;

static bool chunk_fits(const void *budget, int64_t chunk) {
  const Budget *b = budget;
  return lce_bytes(b->backend, LCE_FUSED, chunk, b->shape) <= b->bytes;
}

int64_t lce_chunk_within(const Backend *backend, size_t bytes, LceShape shape) {
  Budget budget = {backend, bytes, shape};
  return largest_that_fits(chunk_fits, &budget, shape.tokens);
}
