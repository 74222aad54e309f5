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

// columns.cu sums a matrix's columns in slices of rows; each slice leaves one fp32 row of partial sums.
static inline int64_t cuda_column_slices(int64_t rows) {
  return max_i64(1, min_i64(256, ceil_div(rows, 64)));
}

// norm.cu's backward pass: teams of threads, each of which leaves a row of partial sums for dweight (and
// dbias). Enough to fill a large GPU, and about 8 MiB for either vector at any hidden size.
static inline int64_t cuda_norm_teams(int64_t rows, int64_t hidden_size) {
  return max_i64(1, min_i64(rows, 2112 / ceil_div(hidden_size, 1024)));
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
  size_t sums =
      memory_padded((size_t)(ceil_div(rows, cuda_segment_piece(rows)) * 2 * hidden_size) * sizeof(float));
  return 3 * ids + sums + cuda_segment_sort_bytes(rows);
}

// linear_cross_entropy.cu: the logits of `rows` tokens are made this many vocabulary entries at a time, in an
// fp32 tile that stays in the L2 cache between the GEMM that writes it and the kernel that reads it. Its
// rows are whole cache lines.
enum { CUDA_LCE_TILE_BYTES = 20 << 20, CUDA_LCE_TILES = 3 };

static inline int64_t cuda_lce_tile_columns(int64_t rows, int64_t vocab_size) {
  int64_t columns = CUDA_LCE_TILE_BYTES / (int64_t)sizeof(float) / max_i64(1, rows) / 256 * 256;
  return min_i64(max_i64(columns, 256), ceil_div(vocab_size, 64) * 64);
}

// All of these tiles; on Hopper the partial sums of split-K go there.
static inline size_t cuda_lce_tiles_bytes(int64_t rows, int64_t vocab_size) {
  int64_t columns = cuda_lce_tile_columns(rows, vocab_size);
  return CUDA_LCE_TILES * memory_padded((size_t)(rows * columns) * sizeof(float));
}

// hopper_gemm.cu walks lists of the k-steps that a sampled GEMM has, each of 64 and with its length first: for dX one for
// a tile's rows, for dW one for a tile's columns, and a list of those that are not empty.
static inline size_t cuda_lce_dx_list_bytes(int64_t rows, int64_t vocab_size) {
  int64_t lists = ceil_div(rows, LCE_TILE_ROWS), longest = 1 + ceil_div(vocab_size, 64);
  return memory_padded((size_t)(lists * longest) * sizeof(int32_t));
}

static inline size_t cuda_lce_dweight_list_bytes(int64_t rows, int64_t vocab_size) {
  int64_t lists = ceil_div(vocab_size, LCE_TILE_COLUMNS), longest = 1 + ceil_div(rows, 64);
  return memory_padded((size_t)(1 + lists + lists * longest) * sizeof(int32_t));
}

// optimizer.cu's reduce: one double a block.
enum { CUDA_REDUCE_BLOCKS = 1056 };

// --- the operations, as kernels.h describes them -----------------------------------------------------------

#define DECLARE(name, Arguments) void cuda_##name(Backend *backend, const Arguments *a);
OPERATIONS(DECLARE, DECLARE)
#undef DECLARE
#define DECLARE(name, Arguments) size_t cuda_##name##_scratch(const Arguments *a);
OPERATIONS(NO_OPERATION, DECLARE) // scratch.c, attention_scratch.c
#undef DECLARE
void cuda_collectives_join(Backend *backend, int64_t behind);
void cuda_collectives_end(Backend *backend); // collectives.cu: when the backend goes

#if defined(__cplusplus)
}
#endif
#endif
