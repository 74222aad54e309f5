// Shared by the CUDA backend's files without a CUDA header: the operations' names, and the sizes on which the
// scratch table (compiled everywhere) and the kernels (compiled by nvcc) must agree.
#pragma once

#include "kernels/kernels.h"

__BEGIN_DECLS

// --- sizes -------------------------------------------------------------------------------------------------

// cuBLASLt's workspace; 32 MiB is what NVIDIA recommends for Hopper.
enum { CUDA_GEMM_WORKSPACE_BYTES = 32 << 20 };

// columns.cu sums a matrix's columns in slices of rows; each slice leaves one fp32 row of partial sums.
static inline int64_t cuda_column_slices(int64_t rows) {
  return max_i64(1, min_i64(256, ceil_div(rows, 64)));
}

// norm.cu's backward pass: each team of threads leaves a row of partial sums for dweight (and dbias). Enough
// to fill a large GPU with 16 warps per SM, each with up to 1024 of a row's elements; about 8 MiB per vector.
static inline int64_t cuda_norm_teams(int64_t rows, int64_t elements) {
  return max_i64(1, min_i64(rows, 2112 / ceil_div(elements, 1024)));
}

// segments.cu's scratch: ids and positions before and after the sort, and the sort's own.
static inline size_t cuda_segment_id_bytes(int64_t rows) {
  return memory_padded((size_t)rows * sizeof(int32_t));
}

static inline size_t cuda_segment_sort_bytes(int64_t rows) {
  return memory_padded((size_t)(65536 + 12 * rows));
}

static inline size_t cuda_segment_bytes(int64_t rows) {
  return 3 * cuda_segment_id_bytes(rows) + cuda_segment_sort_bytes(rows);
}

// linear_cross_entropy.cu: computes the logits of `rows` tokens this many vocabulary entries at a time, in an
// fp32 tile of whole cache lines that stays in L2 between its GEMM and the kernel that reads it.
enum { CUDA_LCE_TILE_BYTES = 30 << 20, CUDA_LCE_TILES = 2 };

static inline int64_t cuda_lce_tile_columns(int64_t rows, int64_t vocab_size) {
  int64_t columns = CUDA_LCE_TILE_BYTES / (int64_t)sizeof(float) / max_i64(1, rows) / 256 * 256;
  return min_i64(max_i64(columns, 256), ceil_div(vocab_size, 64) * 64);
}

// The scratch has room for CUDA_LCE_TILES tiles; parts of row sums and, on Hopper, split-K's partials share
// it.
static inline size_t cuda_lce_tiles_bytes(int64_t rows, int64_t vocab_size) {
  int64_t columns = cuda_lce_tile_columns(rows, vocab_size);
  return CUDA_LCE_TILES * memory_padded((size_t)(rows * columns) * sizeof(float));
}

// tile_sampling.cu: kept tiles of E go to a buffer, scaled and one after the other, as panels of
// LCE_TILE_ROWS rows by 64 columns, of which a k-step of dX reads one and one of dW half of three.
enum {
  CUDA_PANEL_COLUMNS = 64,
  CUDA_TILE_PANELS = LCE_TILE_COLUMNS / CUDA_PANEL_COLUMNS,
  CUDA_KEPT_CHUNKS = 4
};

// The first rows of a k-step's A and B; and the range of k-steps for a tile of the result.
typedef struct {
  int32_t a_row, b_row;
} KStep;
typedef struct {
  int32_t first, count;
} KList;

// State of tile_sampling.cu between kernels, known on the device alone.
typedef struct {
  int32_t kept, chunks; // tiles in the buffer, and from how many chunks
  int32_t begun;        // dweight holds something to add to
  int32_t accumulate;   // the next dW adds to dweight
} KeptState;

// The parts of LceSampledGradients.kept.
typedef struct {
  int64_t capacity;   // in tiles
  int64_t chunk_rows; // rows that a chunk of x takes: C, rounded up to whole tiles
  Tensor panels;      // bf16 [capacity * CUDA_TILE_PANELS * LCE_TILE_ROWS, CUDA_PANEL_COLUMNS]
  Tensor x;           // bf16 [CUDA_KEPT_CHUNKS * chunk_rows, H]: the chunks' scaled x
  int32_t *slots;     // [A, B]: the place of each of the chunk's tiles in the buffer, or -1
  int32_t *x_begin;   // [capacity]: each tile's first row in x
  int32_t *starts;    // [CUDA_KEPT_CHUNKS, B + 1]: the first slot of each column of tiles
  int32_t *columns;   // [1 + B]: the number of columns of tiles in the next dW, then their indices
  KList *lists;       // [B], of these columns
  KStep *steps;       // [capacity * LCE_TILE_ROWS / 64 + B]
  KeptState *state;
  size_t bytes;
} KeptTiles;

// Lays out the parts from `base` on; with NULL it only counts the bytes.
KeptTiles cuda_kept_tiles(void *base, int64_t rows, int64_t vocab_size, int64_t hidden_size, float full_mass);

// dX's lists of k-steps, one for a tile's rows.
static inline size_t cuda_lce_dx_list_bytes(int64_t rows, int64_t vocab_size) {
  int64_t lists = ceil_div(rows, LCE_TILE_ROWS), longest = ceil_div(vocab_size, 64);
  return memory_padded((size_t)lists * (sizeof(KList) + (size_t)longest * sizeof(KStep)));
}

// Attention's backward pass: its statistics of every query (attention_mma.cuh), before the counters of work.
static inline size_t cuda_attention_statistics_bytes(AttentionShape s) {
  return memory_padded((size_t)(s.batch * s.num_heads * ceil_div(s.seq_len, 64) * 64 * 2) * sizeof(float));
}

// The rows of partial sums that it leaves for dbias, one for each 64 tokens: at least cuda_column_slices.
static inline int64_t cuda_attention_slices(AttentionShape s) {
  return s.batch * ceil_div(s.seq_len, 64);
}

// optimizer.cu: partial sums of sum_elements, in double.
enum { CUDA_SUM_BLOCKS = 1056 };

// True if every row starts where `width` elements, or 16 bytes of them, may be read at once.
static inline bool rows_start_aligned(Tensor t, int64_t width) {
  uintptr_t bytes = (uintptr_t)min_i64(16, width * (int64_t)dtype_bytes(t.dtype));
  return (uintptr_t)t.data % bytes == 0 &&
         (t.rank == 1 || (uintptr_t)t.stride * dtype_bytes(t.dtype) % bytes == 0);
}

// --- the operations, as kernels.h describes them -----------------------------------------------------------

#define DECLARE(name, Arguments, group) void cuda_##name(Backend *backend, const Arguments *a);
OPERATIONS(DECLARE, DECLARE)
#undef DECLARE
#define DECLARE(name, Arguments, group) size_t cuda_##name##_scratch(const Arguments *a);
OPERATIONS(NO_OPERATION, DECLARE) // scratch.c
#undef DECLARE
void cuda_join_ranks(Backend *backend);      // collectives.cu
void cuda_collectives_end(Backend *backend); // at the backend's end

__END_DECLS
