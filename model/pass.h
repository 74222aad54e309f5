// What the files of one pass share: the layers (transformer.c), their matmuls (matmul.c), copies between host and device
// while layers compute (layer_copies.c), and decoding with a cache (decode.c).
#pragma once

#include "model/decode.h"
#include "model/transformer.h"

// A matrix that a matmul reads: x [N, K] and, in FP8, its codes, which may be kept in its place (matmul.h).
typedef struct {
  Tensor x;
  Fp8 fp8;
} Operand;

typedef struct {
  Operand out;
  Tensor mean, rstd;
} Norm;

// What a layer computes. Recompute says which of these stay on the stack for the backward pass.
typedef struct {
  MemoryMark below;      // the stack before the layer; of training
  Tensor input;          // [N, H], the output of the layer below
  Tensor output;         // [N, H]
  Norm norm1, norm2;     // out [N, H]
  Tensor qkv;            // [N, (Q + 2K) D], normalised and rotated
  Tensor qk;             // [N, (Q + K) D], before the norm; with config.qk_norm
  Norm q_norm, k_norm;   // their out lies in qkv
  Tensor lse;            // fp32 [B, Q T]
  Tensor attention;      // [N, Q D]
  Tensor middle;         // [N, H]: the stream between attention and MLP
  Tensor pre_activation; // [N, F], or [N, 2F]: gate, then up
  Operand activation;    // [N, F]
} LayerState;

// The arguments of all functions of a pass.
typedef struct Pass {
  Backend *backend;
  Model *model;
  const Batch *batch;
  const TransformerOptions *options; // of training
  int64_t rows;                      // N
  AttentionShape heads;
  Recompute recompute;  // in this layer
  int64_t mlp_chunk;    // 0: all rows
  bool accumulate;      // the parameters' gradients; false where a hook reduces them in every pass
  bool accumulate_head; // the head's, as requested
  bool hook_adds;       // hooks.add_embedding_grads adds to a tied head's gradient
  bool fp8;             // the layers' matmuls
  LayerState *states;   // of training, one a layer
  // Of decoding (decode.c): attention of layer l over the `past` tokens in the cache and the batch's; NULL: over these alone.
  void (*attend)(const struct Pass *p, int64_t l, const LayerState *s);
  const KeyValueCache *cache;
  int64_t past;
} Pass;

static const Tensor none; // an operand that is absent

// Fails where the batch's sequences are longer than those that the model was made for.
Pass pass_begin(Backend *backend, Model *model, const Batch *batch);
// [N, columns] of the backend's dtype, on the stack.
Tensor push_activation(const Pass *p, const char *name, int64_t columns);
Tensor push_gradient(const Pass *p, const char *name, int64_t columns);
// fp32 [N heads].
Tensor push_statistic(const Pass *p, const char *name, int64_t heads);

// transformer.c's:

// The residual stream after all layers; nothing is kept.
Tensor forward_only(Pass *p);
// Into `out`, or else on the stack.
Norm final_norm(const Pass *p, Tensor stream, Tensor out);
