// What the files of the CUDA backend share that needs no CUDA header: the operations' names, and the sizes on
// which the scratch table (compiled everywhere) and the kernels (compiled by nvcc) must agree.
#ifndef LCE_KERNELS_CUDA_CUDA_OPS_H
#define LCE_KERNELS_CUDA_CUDA_OPS_H

#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

// --- sizes -------------------------------------------------------------------------------------------------

// cuBLASLt's workspace; 32 MiB is what NVIDIA recommends for Hopper.
enum { CUDA_GEMM_WORKSPACE_BYTES = 32 << 20 };

static inline int64_t cuda_ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

static inline int64_t cuda_min(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static inline int64_t cuda_max(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// columns.cu sums a matrix's columns in slices of rows; each slice leaves one fp32 row of partial sums.
static inline int64_t cuda_column_slices(int64_t rows) {
  return cuda_max(1, cuda_min(256, cuda_ceil_div(rows, 64)));
}

// norm.cu's backward pass: teams of threads, each of which leaves a row of partial sums for dweight (and
// dbias). Enough to fill a large GPU, and about 8 MiB for either vector at any hidden size.
static inline int64_t cuda_norm_teams(int64_t rows, int64_t hidden_size) {
  return cuda_max(1, cuda_min(rows, 2112 / cuda_ceil_div(hidden_size, 1024)));
}

// segments.cu adds rows that share an index. It cuts the sorted rows into pieces, and a piece leaves at most
// two partial sums. Its scratch: ids and positions before and after the sort, the sums, the sort's own.
// The rows of a piece are added one after the other, so few rows are cut into short pieces: more at a time.
static inline int64_t cuda_segment_piece(int64_t rows) {
  return rows <= 1024 ? 4 : rows <= 4096 ? 8 : 32;
}

static inline size_t cuda_segment_sort_bytes(int64_t rows) {
  return memory_padded((size_t)(65536 + 12 * rows));
}

static inline size_t cuda_segment_bytes(int64_t rows, int64_t hidden_size) {
  size_t ids = memory_padded((size_t)rows * sizeof(int32_t));
  size_t sums = memory_padded((size_t)(cuda_ceil_div(rows, cuda_segment_piece(rows)) * 2 * hidden_size) *
                              sizeof(float));
  return 3 * ids + sums + cuda_segment_sort_bytes(rows);
}

// linear_cross_entropy.cu: the logits of `rows` tokens are made this many vocabulary entries at a time, in an
// fp32 tile that stays in the L2 cache between the product that writes it and the kernel that reads it. Its
// rows are whole cache lines.
enum { CUDA_LCE_TILE_BYTES = 20 << 20, CUDA_LCE_TILES = 3 };

static inline int64_t cuda_lce_tile_columns(int64_t rows, int64_t vocab_size) {
  int64_t columns = CUDA_LCE_TILE_BYTES / (int64_t)sizeof(float) / cuda_max(1, rows) / 256 * 256;
  return cuda_min(cuda_max(columns, 256), cuda_ceil_div(vocab_size, 64) * 64);
}

// hopper_gemm.cu goes through the steps of a filtered product that count: for each 256 rows a list, its
// length first, of steps of 64 vocabulary entries.
static inline size_t cuda_lce_list_bytes(int64_t rows, int64_t vocab_size) {
  int64_t lists = cuda_ceil_div(rows, 256), longest = 1 + cuda_ceil_div(vocab_size, 64);
  return memory_padded((size_t)(lists * longest) * sizeof(int32_t));
}

// optimizer.cu's reduce: one double a block.
enum { CUDA_REDUCE_BLOCKS = 1056 };

// --- the operations, as kernels.h describes them -----------------------------------------------------------

void cuda_embedding_forward(Backend *backend, const EmbeddingForward *a);
void cuda_embedding_backward(Backend *backend, const EmbeddingBackward *a);
void cuda_norm_forward(Backend *backend, const NormForward *a);
void cuda_norm_backward(Backend *backend, const NormBackward *a);
void cuda_linear_forward(Backend *backend, const LinearForward *a);
void cuda_linear_backward_input(Backend *backend, const LinearBackwardInput *a);
void cuda_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a);
void cuda_gelu_forward(Backend *backend, const GeluForward *a);
void cuda_swiglu_forward(Backend *backend, const SwigluForward *a);
void cuda_swiglu_backward(Backend *backend, const SwigluBackward *a);
void cuda_rope(Backend *backend, const Rope *a);
void cuda_attention_forward(Backend *backend, const AttentionForward *a);
void cuda_attention_backward(Backend *backend, const AttentionBackward *a);
void cuda_attention_decode(Backend *backend, const AttentionDecode *a);
void cuda_shard_indices(Backend *backend, const ShardIndices *a);
void cuda_lce_target_logits(Backend *backend, const LceTargetLogits *a);
void cuda_lce_logits_exp(Backend *backend, const LceLogitsExp *a);
void cuda_lce_combine(Backend *backend, const LceCombine *a);
void cuda_lce_rows(Backend *backend, const LceRows *a);
void cuda_lce_filter(Backend *backend, const LceFilter *a);
void cuda_lce_filtered_gemms(Backend *backend, const LceFilteredGemms *a);
void cuda_lce_input_gradient(Backend *backend, const LceInputGradient *a);
void cuda_lce_target_gradient(Backend *backend, const LceTargetGradient *a);
void cuda_cross_entropy_in_place(Backend *backend, const CrossEntropyInPlace *a);
void cuda_loss_factor(Backend *backend, const LossFactor *a);
void cuda_read_targets(Backend *backend, const ReadTargets *a);
void cuda_weighted_column_sum(Backend *backend, const WeightedColumnSum *a);
void cuda_add_outer(Backend *backend, const AddOuter *a);
void cuda_gather_rows(Backend *backend, const MoveRows *a);
void cuda_scatter_rows(Backend *backend, const MoveRows *a);
void cuda_adamw(Backend *backend, const AdamW *a);
void cuda_reduce(Backend *backend, const Reduce *a);
void cuda_clip_scale(Backend *backend, const ClipScale *a);
void cuda_fill_zero(Backend *backend, Tensor t);
void cuda_all_reduce(Backend *backend, const Collective *a);
void cuda_reduce_scatter(Backend *backend, const Collective *a);
void cuda_all_gather(Backend *backend, const Collective *a);
void cuda_broadcast(Backend *backend, const Collective *a);
void cuda_collectives_join(Backend *backend, int64_t behind);
void cuda_collectives_end(Backend *backend); // collectives.cu: when the backend goes

// attention_scratch.c; the rest of the table is in scratch.c.
size_t cuda_attention_forward_scratch(const AttentionForward *a);
size_t cuda_attention_backward_scratch(const AttentionBackward *a);

#if defined(__cplusplus)
}
#endif
#endif
