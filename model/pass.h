// What the files of one pass share: the layers (transformer.c), their matmuls (matmul.c), copies between host and device
// while layers compute (layer_copies.c), and decoding with a cache (decode.c).
#pragma once

#include "model/transformer.h"

// A matrix that a matmul reads: x [N, K] and, in FP8, its codes, which may be kept in its place (matmul.c).
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

// --- transformer.c -----------------------------------------------------------------------------------------

// The residual stream after all layers; nothing is kept.
Tensor forward_only(Pass *p);
// Into `out`, or else on the stack.
Norm final_norm(const Pass *p, Tensor stream, Tensor out);

// --- matmul.c ----------------------------------------------------------------------------------------------

// The matmuls of a layer: in the backend's dtype by linear_forward and its gradients, or in FP8 (pass.fp8).
//
// In FP8 an operand is quantized before its GEMM, with one scale for the tensor (kernels.h), and a GEMM reads codes along
// its inner dimension alone: the backward pass needs those of the transpose. Where nothing is recomputed, the forward pass
// writes these too and they are kept in place of the operand, in half its memory. SwiGLU is then an operation of its
// own, which finds the maximum of what it writes.

// Before training passes: in FP8 where the layers' matrices have codes.
void matmuls_begin(Pass *p);
// The weights' codes of layer l, where they are not there from an earlier pass.
void prepare_weights(const Pass *p, int64_t l, bool backward);

// Whether operands are saved as codes, and not themselves.
bool operands_saved(const Pass *p);
// Pushes those codes, if so. `activation`: of an activation function's output, which brings its maximum.
void push_saved_operand(const Pass *p, Operand *operand, int64_t columns, bool activation);
// Pushes the activation's tensor.
void push_activation_operand(const Pass *p, Operand *operand);

// out = x W^T + bias + residual; bias and residual may be absent.
void project(const Pass *p, Tensor out, Operand x, const WeightAndBias *w, Tensor residual);
// The same for the weight's outputs [first, first + count), where the layout is [out, in].
void project_outputs(const Pass *p, Tensor out, Operand x, const WeightAndBias *w, int64_t first,
                     int64_t count);
// pre_activation = x W^T + bias, out = GELU or SwiGLU of it.
void project_activated(const Pass *p, Operand out, Tensor pre_activation, Operand x, const WeightAndBias *w);
// The activation function alone.
void activate(const Pass *p, Operand out, Tensor pre_activation);

// The gradients of weight and, where nobody else sums it, bias (absent else), then dx, which may be x itself. x is not
// read where its codes are kept.
void project_backward(const Pass *p, Tensor dx, Operand dout, Operand x, const Weight *weight, Tensor dbias);
// The same through the activation function before the matmul: x is its output, and returns the gradient of the
// pre-activation, which replaces x (GELU) or the pre-activation (SwiGLU); of x nothing is left.
Operand project_activated_backward(const Pass *p, Tensor dout, Operand x, Tensor pre_activation,
                                   const Weight *weight);

// --- layer_copies.c ----------------------------------------------------------------------------------------

// Copies between the host's memory and the device's (--offload) while other layers compute: a layer's weights arrive during
// the layer before it, and its gradients and its input leave during the layer after it, by way of double buffers.
// Each function does nothing for what stays on the device.

// Before any layer's forward pass: the first layer's weights.
void copies_begin(const Pass *p);
// Before layer l's forward pass: the next one's weights, updated where that was deferred; in training also l's input.
void copies_before_forward(const Pass *p, int64_t l);
// Whether layer l's input leaves the device, so that its memory is free after the layer.
bool copies_take_input(const Pass *p);
// Between the passes: gradients that are added to.
void copies_turn(const Pass *p);
// Before layer l's backward pass: what the layer below reads.
int64_t copies_before_backward(const Pass *p, int64_t l);
// After it: its gradients leave, after their squares were summed. `begun`: what copies_before_backward returned.
void copies_after_backward(const Pass *p, int64_t l, int64_t begun);
// After all layers.
void copies_end(const Pass *p);
