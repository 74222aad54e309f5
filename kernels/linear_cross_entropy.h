// The last layer: lm_head and cross-entropy as one operation, with its gradients computed in the forward
// pass.
#ifndef LCE_KERNELS_LINEAR_CROSS_ENTROPY_H
#define LCE_KERNELS_LINEAR_CROSS_ENTROPY_H

#include "kernels/kernels.h"

typedef enum {
  LCE_FUSED,       // walks the tokens in chunks and never holds more than [chunk, V]
  LCE_MATERIALIZED // holds the logits of all tokens, [N, V], as a plain trainer does
} LceMode;

const char *lce_mode_name(LceMode mode); // "fused", "materialized"

// With z = x W^T and, for each counted token n, loss[n] = logsumexp(z[n]) - z[n, targets[n]]:
//   dx      = scale * sum_n d loss[n] / d x       (rows of ignored tokens are 0)
//   dweight (+)= scale * sum_n d loss[n] / d W
// so scale = 1 / (tokens counted in the whole optimizer step) makes the gradients those of the mean. The sum
// of loss is left to the caller (reduce). The caller owns every tensor; what the layer needs beyond them is
// pushed as MEMORY_HEAD and popped before it returns. Wrong shapes fail with one sentence.
typedef struct {
  LceMode mode;
  int64_t chunk;   // LCE_FUSED: tokens per chunk, at least 1; need not divide anything
  Tensor loss;     // fp32 [N]; 0 where the target is IGNORE_INDEX
  Tensor dx;       // [N, H] of x's dtype (fused: or fp32), or absent: forward only
  Tensor dweight;  // fp32 [V, H], or absent with dx. Always fp32: sums over chunks in bf16 drift
  Tensor x;        // real [N, H]
  Tensor weight;   // real [V, H]
  Tensor targets;  // int32 [N], each in [0, V) or IGNORE_INDEX
  Tensor rows;     // int32 [N], or absent when no target is ignored: the counted tokens' positions come first
  int64_t counted; // how many; read only when rows is there
  float scale;
  bool accumulate; // add to dweight rather than write it
} LinearCrossEntropy;

void linear_cross_entropy(Backend *backend, LinearCrossEntropy a);

// The shape of a call, for the three questions below.
typedef struct {
  int64_t tokens, hidden_size, vocab_size; // N, H, V
  Dtype dtype;
  bool ignores; // some targets may be ignored: rows is given
} LceShape;

// The chunk taken when the user names none: an eighth of the tokens, but at least 128 and at most 4096. An
// eighth keeps the layer an order of magnitude below the materialized one; beyond 4096 a product gains
// nothing more.
int64_t lce_default_chunk(int64_t tokens);
// The bytes that the layer pushes at its peak, on the kind of device that `backend` is or plans for.
size_t lce_bytes(const Backend *backend, LceMode mode, int64_t chunk, LceShape shape);
// The largest chunk whose layer holds at most `bytes`; 0 when even one token's does not fit.
int64_t lce_chunk_within(const Backend *backend, size_t bytes, LceShape shape);

#endif
