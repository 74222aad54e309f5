// The scratch of the CUDA backend's operations, from shapes alone: a plan counts it on machines without a
// GPU, so this file includes no CUDA header. cuda_ops.h holds the sizes that the kernels share.
#include <math.h>

#include "kernels/cuda/cuda_ops.h"

static size_t column_bytes(Tensor x) {
  return (size_t)(cuda_column_slices(x.shape[0]) * x.shape[1]) * sizeof(float);
}

// Holds the largest element of the sampled rows, if codes are written.
static size_t sample_bytes(Quantized quantized) {
  return tensor_exists(quantized.amax) ? sizeof(float) : 0;
}

#define SCRATCH(operation, Arguments, bytes)                                                                 \
  size_t cuda_##operation##_scratch(const Arguments *a) {                                                    \
    return bytes;                                                                                            \
  }
SCRATCH(embedding_backward, EmbeddingBackward, cuda_segment_bytes(a->dout.shape[0]))
SCRATCH(activation_forward, ActivationForward, sample_bytes(a->quantized))
SCRATCH(activation_backward, ActivationBackward, sample_bytes(a->quantized))
SCRATCH(linear_backward_weight, LinearBackwardWeight, tensor_exists(a->dbias) ? column_bytes(a->dout) : 0)
SCRATCH(sum_columns, SumColumns, column_bytes(a->x))
SCRATCH(matmul_quantized, MatmulQuantized, 0)
SCRATCH(attention_forward, AttentionForward, MEMORY_ALIGNMENT) // a counter of work
SCRATCH(lce_target_gradient, LceTargetGradient, cuda_segment_bytes(a->x.shape[0]))
SCRATCH(sum_elements, SumElements, CUDA_SUM_BLOCKS * sizeof(double))
#undef SCRATCH

size_t cuda_norm_backward_scratch(const NormBackward *a) {
  int64_t rows = a->rstd.shape[0], hidden_size = a->weight.shape[0];
  int64_t vectors = 1 + tensor_exists(a->dbias) + tensor_exists(a->dx_sum);
  return (size_t)(cuda_norm_teams(rows, hidden_size) * vectors * hidden_size) * sizeof(float);
}

size_t cuda_attention_backward_scratch(const AttentionBackward *a) {
  size_t bytes = cuda_attention_statistics_bytes(a->shape) + MEMORY_ALIGNMENT;
  if (tensor_exists(a->dbias))
    bytes += (size_t)(cuda_attention_slices(a->shape) * a->dqkv.shape[1]) * sizeof(float);
  return bytes;
}

// Bounds a tile of so many rows, and never falls as rows grow, so that fewer rows never need more.
static size_t tile_bytes(int64_t rows, int64_t vocab_size) {
  int64_t smallest = rows * cuda_lce_tile_columns(INT32_MAX, vocab_size) * (int64_t)sizeof(float);
  int64_t whole = rows * cuda_lce_tile_columns(1, vocab_size) * (int64_t)sizeof(float);
  return memory_padded((size_t)min_i64(whole, max_i64(smallest, CUDA_LCE_TILE_BYTES)));
}

// Holds the tiles of logits, the rows' sums in double and largest entries; on Hopper their parts (RowParts).
size_t cuda_lce_logits_exp_scratch(const LceLogitsExp *a) {
  int64_t rows = a->x.shape[0], across = ceil_div(a->weight.shape[0], LCE_TILE_COLUMNS);
  int64_t vectors = 1 + tensor_exists(a->softmax.e_distance) + tensor_exists(a->softmax.e_squared) +
                    tensor_exists(a->softmax.max);
  size_t parts = (size_t)(rows * across * (lce_row_parts(&a->softmax) - 1)) * sizeof(float);
  size_t tiles = CUDA_LCE_TILES * tile_bytes(rows, a->weight.shape[0]) +
                 memory_padded((size_t)(rows * vectors) * sizeof(double));
  return tiles > parts ? tiles : parts;
}

// Holds dX's lists of k-steps, then sums over parts of V.
size_t cuda_lce_sampled_gradients_scratch(const LceSampledGradients *a) {
  int64_t rows = a->exps.shape[0], vocab_size = a->exps.shape[1];
  return cuda_lce_dx_list_bytes(rows, vocab_size) + CUDA_LCE_TILES * tile_bytes(rows, vocab_size);
}

// A row of tiles has a mass m of at most LCE_TILE_ROWS in all, since a row's probabilities add up to at most
// 1. q is at most sqrt(2) m / full_mass, and sum q tiles are kept, within one. NaNs may exceed this.
static int64_t kept_capacity(int64_t rows, int64_t vocab_size, float full_mass) {
  int64_t across = ceil_div(vocab_size, LCE_TILE_COLUMNS);
  double kept = ceil(sqrt(2) * LCE_TILE_ROWS / (double)full_mass) + 1;
  return ceil_div(rows, LCE_TILE_ROWS) * (int64_t)fmin(kept, (double)across);
}

static void *part(void *base, size_t *offset, int64_t count, size_t size) {
  void *at = base ? (char *)base + *offset : NULL;
  *offset += memory_padded((size_t)count * size);
  return at;
}

KeptTiles cuda_kept_tiles(void *base, int64_t rows, int64_t vocab_size, int64_t hidden_size,
                          float full_mass) {
  KeptTiles k = {.capacity = kept_capacity(rows, vocab_size, full_mass),
                 .chunk_rows = ceil_div(rows, LCE_TILE_ROWS) * LCE_TILE_ROWS};
  int64_t across = ceil_div(vocab_size, LCE_TILE_COLUMNS), tiles = k.chunk_rows / LCE_TILE_ROWS * across;
  int64_t panel_rows = k.capacity * CUDA_TILE_PANELS * LCE_TILE_ROWS,
          x_rows = CUDA_KEPT_CHUNKS * k.chunk_rows;
  void *panels = part(base, &k.bytes, panel_rows * CUDA_PANEL_COLUMNS, sizeof(uint16_t));
  void *x = part(base, &k.bytes, x_rows * hidden_size, sizeof(uint16_t));
  k.panels = tensor_2d(panels, DTYPE_BF16, panel_rows, CUDA_PANEL_COLUMNS);
  k.x = tensor_2d(x, DTYPE_BF16, x_rows, hidden_size);
  k.slots = part(base, &k.bytes, tiles, sizeof *k.slots);
  k.x_begin = part(base, &k.bytes, k.capacity, sizeof *k.x_begin);
  k.starts = part(base, &k.bytes, CUDA_KEPT_CHUNKS * (across + 1), sizeof *k.starts);
  k.columns = part(base, &k.bytes, 1 + across, sizeof *k.columns);
  k.lists = part(base, &k.bytes, across, sizeof *k.lists);
  k.steps = part(base, &k.bytes, k.capacity * (LCE_TILE_ROWS / 64) + across, sizeof *k.steps);
  k.state = part(base, &k.bytes, 1, sizeof *k.state);
  return k;
}

// The Hopper kernels are for bf16, rows that TMA takes, and chunks of at least a tile's rows.
static size_t lce_kept_bytes(Tensor weight, Tensor dx, Tensor dweight, int64_t rows, float full_mass) {
  if (weight.dtype != DTYPE_BF16 || rows < LCE_TILE_ROWS || !rows_start_aligned(weight, 16) ||
      !rows_start_aligned(dx, 16) || !rows_start_aligned(dweight, 16))
    return 0;
  return cuda_kept_tiles(NULL, rows, weight.shape[0], weight.shape[1], full_mass).bytes;
}

// Rows that start on a multiple of 128 bytes: whole cache lines, and what the fastest GEMMs need.
static int64_t logits_stride(int64_t vocab_size, Dtype dtype) {
  int64_t multiple = 128 / (int64_t)dtype_bytes(dtype);
  return ceil_div(vocab_size, multiple) * multiple;
}

const BackendScratch cuda_scratch = {.logits_stride = logits_stride,
                                     .lce_kept_bytes = lce_kept_bytes,
                                     .resident_bytes = CUDA_GEMM_WORKSPACE_BYTES,
                                     .ranks_bytes = BUCKET_BYTES,
#define ENTRY(name, Arguments, group) .name = cuda_##name##_scratch,
                                     OPERATIONS(NO_OPERATION, ENTRY)
#undef ENTRY
};
