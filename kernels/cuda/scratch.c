// The scratch that the CUDA backend's operations need, from shapes alone: a plan counts it on machines that
// have no GPU, so this file includes no CUDA header. cuda_ops.h holds the sizes that the kernels share.
#include "kernels/cuda/cuda_ops.h"

size_t cuda_embedding_backward_scratch(const EmbeddingBackward *a) {
  return cuda_segment_bytes(a->dout.shape[0], a->dout.shape[1]);
}

size_t cuda_norm_backward_scratch(const NormBackward *a) {
  int64_t rows = a->x.shape[0], hidden_size = a->x.shape[1];
  int64_t vectors = a->kind == NORM_LAYER ? 2 : 1; // dweight, dbias
  return (size_t)(cuda_norm_teams(rows, hidden_size) * vectors * hidden_size) * sizeof(float);
}

size_t cuda_linear_backward_weight_scratch(const LinearBackwardWeight *a) {
  if (!tensor_exists(a->dbias)) return 0;
  return (size_t)(cuda_column_slices(a->dout.shape[0]) * a->dout.shape[1]) * sizeof(float);
}

// At least a tile of so many rows, and never less for more rows: a chunk of fewer rows (how many tokens count depends
// on the data) never needs more than a full one.
static size_t tile_bytes(int64_t rows, int64_t vocab_size) {
  int64_t smallest = rows * cuda_lce_tile_columns(INT32_MAX, vocab_size) * (int64_t)sizeof(float);
  int64_t whole = rows * cuda_lce_tile_columns(1, vocab_size) * (int64_t)sizeof(float);
  return memory_padded((size_t)min_i64(whole, max_i64(smallest, CUDA_LCE_TILE_BYTES)));
}

// The tiles of logits; a row's sum so far in double.
size_t cuda_lce_logits_exp_scratch(const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0];
  return CUDA_LCE_TILES * tile_bytes(rows, a->weight.shape[0]) + memory_padded((size_t)rows * sizeof(double));
}

// The lists of steps, then sums over parts of V.
size_t cuda_lce_sampled_dx_scratch(const LceSampledDx *a) {
  int64_t rows = a->exps.shape[0], vocab_size = a->exps.shape[1];
  return cuda_lce_dx_list_bytes(rows, vocab_size) + CUDA_LCE_TILES * tile_bytes(rows, vocab_size);
}

size_t cuda_lce_dweight_scratch(const LceDweight *a) {
  return tensor_exists(a->tiles) ? cuda_lce_dweight_list_bytes(a->exps.shape[0], a->exps.shape[1]) : 0;
}

size_t cuda_lce_target_gradient_scratch(const LceTargetGradient *a) {
  return cuda_segment_bytes(a->x.shape[0], a->x.shape[1]);
}

size_t cuda_weighted_column_sum_scratch(const WeightedColumnSum *a) {
  return (size_t)(cuda_column_slices(a->x.shape[0]) * a->x.shape[1]) * sizeof(float);
}

size_t cuda_reduce_scratch(const Reduce *a) {
  (void)a;
  return CUDA_REDUCE_BLOCKS * sizeof(double);
}

// Rows that start on a multiple of 128 bytes: whole cache lines, and what the fastest GEMMs need.
static int64_t logits_stride(int64_t vocab_size, Dtype dtype) {
  int64_t multiple = 128 / (int64_t)dtype_bytes(dtype);
  return ceil_div(vocab_size, multiple) * multiple;
}

const BackendScratch cuda_scratch = {.logits_stride = logits_stride,
                                     .resident_bytes = CUDA_GEMM_WORKSPACE_BYTES,
#define ENTRY(name, Arguments) .name = cuda_##name##_scratch,
                                     OPERATIONS(NO_OPERATION, ENTRY)
#undef ENTRY
};
