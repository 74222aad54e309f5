// What the files of the CPU backend share: the operations' names, and the matrix product they all use.
#ifndef LCE_KERNELS_CPU_CPU_H
#define LCE_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"

// backend->state.
typedef struct {
  bool plain_loops;                   // loops in place of CBLAS
  struct CpuCollectives *collectives; // NULL while there is one rank
} CpuState;

static inline bool cpu_plain_loops(const Backend *backend) {
  return ((const CpuState *)backend->state)->plain_loops;
}

// Row i of a tensor of rank 1 or 2, as fp32.
static inline float *cpu_row(Tensor t, int64_t i) {
  return (float *)t.data + i * t.stride;
}

static inline int64_t cpu_min(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static inline int64_t cpu_ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// --- products.c --------------------------------------------------------------------------------------------

// An operand: element (i, j) lies at data[i * stride + j], or at data[j * stride + i] when transposed.
typedef struct {
  const float *data;
  int64_t stride;
  bool transposed;
} CpuMatrix;

// out[m, n] = beta * out + alpha * a[m, k] b[k, n]; with beta 0 the old contents are not read. At most one
// operand is transposed. Inside an OpenMP region it runs on the calling thread alone.
void cpu_gemm(bool plain, int64_t m, int64_t n, int64_t k, float alpha, CpuMatrix a, CpuMatrix b, float beta,
              float *out, int64_t out_stride);

// --- rows.c ------------------------------------------------------------------------------------------------

// out[ids[n]] += alpha * coefficients[n] * x[n] (coefficients NULL: all 1) for n < count, where several n may
// name the same row, and IGNORE_INDEX none: sorted by id, then each row's terms are summed in the order of n,
// in double. `keys` is scratch for `count` numbers.
void cpu_scatter_add(Tensor out, const int32_t *ids, int64_t count, Tensor x, const float *coefficients,
                     float alpha, uint64_t *keys);

// --- what the kernels and scratch.c must agree on ----------------------------------------------------------

enum { CPU_REDUCE_BLOCK = 32768 }; // optimizer.c: numbers to one partial sum
size_t cpu_linear_backward_weight_scratch(const LinearBackwardWeight *a); // linear.c
size_t cpu_lce_logits_exp_scratch(const LceLogitsExp *a);                 // linear_cross_entropy.c

// --- the operations, as kernels.h describes them -----------------------------------------------------------

void cpu_embedding_forward(Backend *backend, const EmbeddingForward *a);
void cpu_embedding_backward(Backend *backend, const EmbeddingBackward *a);
void cpu_norm_forward(Backend *backend, const NormForward *a);
void cpu_norm_backward(Backend *backend, const NormBackward *a);
void cpu_linear_forward(Backend *backend, const LinearForward *a);
void cpu_linear_backward_input(Backend *backend, const LinearBackwardInput *a);
void cpu_linear_backward_weight(Backend *backend, const LinearBackwardWeight *a);
void cpu_gelu_forward(Backend *backend, const GeluForward *a);
void cpu_swiglu_forward(Backend *backend, const SwigluForward *a);
void cpu_swiglu_backward(Backend *backend, const SwigluBackward *a);
void cpu_rope(Backend *backend, const Rope *a);
void cpu_attention_forward(Backend *backend, const AttentionForward *a);
void cpu_attention_backward(Backend *backend, const AttentionBackward *a);
void cpu_attention_decode(Backend *backend, const AttentionDecode *a);
void cpu_shard_indices(Backend *backend, const ShardIndices *a);
void cpu_lce_target_logits(Backend *backend, const LceTargetLogits *a);
void cpu_lce_logits_exp(Backend *backend, const LceLogitsExp *a);
void cpu_lce_combine(Backend *backend, const LceCombine *a);
void cpu_lce_rows(Backend *backend, const LceRows *a);
void cpu_lce_filter(Backend *backend, const LceFilter *a);
void cpu_lce_filtered_gemms(Backend *backend, const LceFilteredGemms *a);
void cpu_lce_input_gradient(Backend *backend, const LceInputGradient *a);
void cpu_lce_target_gradient(Backend *backend, const LceTargetGradient *a);
void cpu_cross_entropy_in_place(Backend *backend, const CrossEntropyInPlace *a);
void cpu_loss_factor(Backend *backend, const LossFactor *a);
void cpu_read_targets(Backend *backend, const ReadTargets *a);
void cpu_weighted_column_sum(Backend *backend, const WeightedColumnSum *a);
void cpu_add_outer(Backend *backend, const AddOuter *a);
void cpu_gather_rows(Backend *backend, const MoveRows *a);
void cpu_scatter_rows(Backend *backend, const MoveRows *a);
void cpu_adamw(Backend *backend, const AdamW *a);
void cpu_reduce(Backend *backend, const Reduce *a);
void cpu_clip_scale(Backend *backend, const ClipScale *a);
void cpu_all_reduce(Backend *backend, const Collective *a);
void cpu_reduce_scatter(Backend *backend, const Collective *a);
void cpu_all_gather(Backend *backend, const Collective *a);
void cpu_broadcast(Backend *backend, const Collective *a);
void cpu_collectives_join(Backend *backend, int64_t behind);
void cpu_collectives_end(Backend *backend); // collectives.c: when the backend goes

#endif
