// Forward and backward pass of a transformer, for all families alike.
#pragma once

#include "model/model.h"

// Recomputation in the backward pass (activation checkpointing; Chen et al. 2016); each level includes those
// before. Bytes per token and layer, bf16 Llama: none 2 (6 H + 2 K D + 3 F), layer 2 H.
typedef enum {
  RECOMPUTE_NONE,
  RECOMPUTE_ELEMENTWISE, // norms and activation functions: cheap to repeat, a third of the memory
  RECOMPUTE_MLP,         // and the MLP's first matmul: the widest tensor of the layer
  RECOMPUTE_LAYER,       // everything but the layer's input
  RECOMPUTE_COUNT
} Recompute;

// The tokens of one micro-batch, on the device; row n = b * seq_len + t.
typedef struct {
  int64_t batch, seq_len;
  Tensor tokens;    // int32 [N]
  Tensor targets;   // int32 [N]; IGNORE_INDEX: nothing is predicted
  Tensor indices;   // int32 [N], or absent if no target is ignored: see masked_loss.h
  int64_t counted;  // how many targets count; read if indices is given
  Tensor documents; // int32 [2, N], or absent: see AttentionForward. Positions then count within documents
} Batch;

// LOSS_TERMS with the digits of the command line.
typedef struct {
#define MEMBER(name, ...) double name;
  LOSS_TERMS(MEMBER)
#undef MEMBER
} LossNumbers;

typedef struct {
  LceMode mode;
  int64_t chunk;
  Recompute recompute;
  int64_t recompute_layers; // first layers with this level, the others one less; 0: all have it
  int64_t mlp_chunk;        // tokens of the MLP at a time, under RECOMPUTE_LAYER and in evaluation; 0: all
  LossNumbers terms;        // of training; the soft-cap is the model's
  TileSampling sampling;    // of training in the fused mode
  TokenOutputs outputs;     // of training: any of them, fp32 [N] each
  // For training: [(R - 1) N, H] on the host, for the inputs of the R layers under RECOMPUTE_LAYER but the
  // last; absent: all stay on the device.
  Tensor inputs;
  bool last; // of a step's micro-batches: its gradients are final, and summed over the ranks
} TransformerOptions;

// One micro-batch: forward, loss, backward. loss (fp32 [N]) receives each token's loss; the parameters'
// gradients of the losses' sum, times scale, are written or, with accumulate, added.
void transformer_train(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options,
                       float scale, bool accumulate, Tensor loss);

// The losses alone.
void transformer_evaluate(Backend *backend, Model *model, const Batch *batch,
                          const TransformerOptions *options, Tensor loss);

// The final norm's output (fp32/bf16 [N, H], the caller's), which the head reads. Targets are not read.
void transformer_last_hidden_state(Backend *backend, Model *model, const Batch *batch, Tensor out);

// decode.c: the keys and values of a text's tokens so far, of every layer.
typedef struct {
  int64_t capacity; // P tokens of each of B sequences
  Tensor data;      // fp32/bf16 [2 L B K, P D]: layer by layer the keys, then the values
} KeyValueCache;

// A cache on top of the backend's stack, uninitialised.
KeyValueCache key_value_cache_push(Backend *backend, const ModelConfig *config, int64_t batch,
                                   int64_t capacity);

// The logits (fp32 [R, V], the caller's) of the batch's tokens `indices` (int32 [R]). With a cache the
// batch's tokens follow `past` others in it and are added; indices and logits may then both be absent.
void transformer_logits(Backend *backend, Model *model, const Batch *batch, const KeyValueCache *cache,
                        int64_t past, Tensor indices, Tensor logits);
