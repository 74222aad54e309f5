// What the CPU's operations need beside their tensors, from shapes alone: nothing here depends on the machine
// or its number of threads, so a plan made anywhere holds everywhere.
#include "kernels/cpu/cpu.h"

static size_t embedding_backward_bytes(const EmbeddingBackward *a) {
  return (size_t)a->dout.shape[0] * sizeof(uint64_t); // sort keys
}

static size_t lce_target_gradient_bytes(const LceTargetGradient *a) {
  return (size_t)a->x.shape[0] * sizeof(uint64_t); // sort keys
}

static size_t reduce_bytes(const Reduce *a) {
  return (size_t)ceil_div(tensor_count(a->x), CPU_REDUCE_BLOCK) * sizeof(double);
}

// Rows start on a cache line, and not all in the same few sets of the cache: a row length that is a multiple
// of 4096 bytes would put every row of a column there.
static int64_t logits_stride(int64_t vocab_size, Dtype dtype) {
  int64_t line = 64 / (int64_t)dtype_bytes(dtype);
  return (ceil_div(vocab_size, line) | 1) * line;
}

const BackendScratch cpu_scratch = {.embedding_backward = embedding_backward_bytes,
                                    .linear_backward_weight = cpu_linear_backward_weight_scratch,
                                    .lce_logits_exp = cpu_lce_logits_exp_scratch,
                                    .lce_target_gradient = lce_target_gradient_bytes,
                                    .reduce = reduce_bytes,
                                    .logits_stride = logits_stride};
