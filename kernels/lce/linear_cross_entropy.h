// LM head and cross-entropy as one operation, with its gradients computed in the forward pass.
#pragma once

#include "kernels/kernels.h"

typedef enum {
  LCE_FUSED,       // works in chunks of tokens and never stores more than [chunk, V]
  LCE_MATERIALIZED // stores the full logits, [N, V], as a plain trainer does
} LceMode;

const char *lce_mode_name(LceMode mode); // "fused", "materialized"

// `weight` is rows [first, first + weight.shape[0]) of a head's vocab_size, split over ranks. {0}: all.
typedef struct {
  int64_t first, vocab_size;
} VocabShard;

// Selects tiles of the softmax gradient (LceSampledGradients).
typedef struct {
  double full_mass; // the probability mass from which a tile is always kept; 0: every tile counts
  uint64_t seed;    // of the draws: change it from call to call; chunks and ranks draw separately
  Tensor stats;     // fp32 [3], or absent: {tiles dropped, all tiles, mass dropped}; zeros without gradients
} TileSampling;

// The loss of every token, and the gradients of
//
//   scale * factor * sum_n token_weights[n] (loss[n] + z_loss[n])
//
// with respect to x, W and bias; kernels.h ("the loss") defines the terms. factor is 1, or with `mean` 1 over
// the sum of the counted tokens' class weights, found on the device. So `scale = 1 / (tokens counted in the
// optimizer step)` gives the gradients of a mean over several calls, `mean` of one call's mean (PyTorch's
// reduction="mean"), token_weights of reduction="none" with any upstream gradient. Loss and outputs are per
// token and before scale, factor and token weights; their sums are the caller's.
//
// Label smoothing costs one pass over W and one over dweight, a bias one over the exponentials.
//
// `sampling` keeps a random part of the softmax gradient's tiles and scales it so that dx and dweight keep
// their expectation; losses and outputs stay the same, bit for bit. Only the fused mode supports it, without
// a bias, a soft-cap, entropies, squares, largest logits and predictions, and not for dweight without dx. If
// it would save no time (sampling.c), the gradients are exact.
//
// With a shard every rank gives its local tokens, as many as any other rank, and its rows of the head. It
// gets the losses and dx of its tokens, and dweight of its rows summed over all ranks' tokens. scale, terms
// and chunk (tokens of each rank) are the same on all ranks; `mean` is over all ranks' tokens. There is no
// materialized mode.
//
// The caller owns every tensor; scratch is pushed as MEMORY_HEAD and popped before the return. Wrong shapes
// fail with one sentence. NaN in a token's x makes that token's loss NaN and no other's. A bias of minus
// infinity at its target makes the loss infinite; gradients are finite, with p[y] = 0.
typedef struct {
  LceMode mode;
  int64_t chunk;        // LCE_FUSED: tokens per chunk, at least 1; need not divide anything
  Tensor loss;          // fp32 [N]; 0 where the target is IGNORE_INDEX
  TokenOutputs outputs; // any of them
  Tensor dx;            // [N, H] of x's dtype (fused: or fp32), or absent: its GEMM is left out
  // fp32 [V, H], or absent, likewise: sums over chunks drift in bf16. Of W's dtype, too, if it is written
  // once: by one chunk, without sampling, label smoothing, shard or accumulate.
  Tensor dweight;
  Tensor dbias;               // fp32 [V]; given when bias and dweight are
  Tensor x;                   // fp32/bf16 [N, H]
  Tensor weight;              // fp32/bf16 [V, H]
  QuantizedRows weight_codes; // of weight, or absent: LceLogitsExp then multiplies codes; LCE_FUSED alone
  Tensor bias;                // [V] of W's dtype, or absent
  Tensor targets;        // int32 [N], each in [0, V) or IGNORE_INDEX; with a shard, V is the whole head's
  Tensor token_weights;  // fp32 [N], or absent
  LossTerms terms;       // without class_weight_sum; class_weights cover the whole vocabulary
  TileSampling sampling; // of the gradients; {0}: they are exact
  VocabShard shard;      // this rank's rows of the head, or {0}: all of them are here
  float scale;           // not 0 where gradients are computed: GEMMs read 0 as 1
  bool mean;
  bool accumulate; // add to dweight and dbias rather than write them
} LinearCrossEntropy;

void linear_cross_entropy(Backend *backend, LinearCrossEntropy args);

// Says why a loss in this mode with this soft-cap has no label smoothing; NULL: it may have some.
const char *lce_excludes_smoothing(LceMode mode, double softcap);

// The chunk taken when the user names none: on a GPU an eighth of the tokens, but at least 1024 (below,
// reading W for each chunk is the bound); on a CPU a ninth, but at least 112; and at most 4096.
int64_t lce_default_chunk(DeviceKind device, int64_t tokens);
// The chunk used if `chunk` is requested: the fewest chunks, nearly equal, a multiple of 128 if that fits.
int64_t lce_used_chunk(int64_t tokens, int64_t chunk);
