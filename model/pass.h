// What the files of one pass share: the layers (transformer.c), their matmuls (matmul.c), what comes and goes before and
// after a layer (layer_door.c), and decoding with a cache (decode.c).
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
  const TransformerOptions *options; // of training; NULL: a forward pass alone
  int64_t rows;                      // N
  AttentionShape heads;
  MemoryMark bottom;    // the stack before the pass
  Recompute recompute;  // in this layer
  int64_t mlp_chunk;    // 0: all rows
  bool accumulate;      // the parameters' gradients; false where they are reduced in every pass
  bool accumulate_head; // the head's, as requested
  bool fp8;             // the layers' matmuls
  LayerState *states;   // one a layer
  Tensor stream;        // [N, H]: of the forward pass, what is entered next reads
  Tensor spare;         // another, where the stream alternates between two
  Tensor dx;            // [N, H]: the stream's gradient; of training
  Tensor dtokens;       // the token embedding's gradient, in the embedding; absent where the door adds to it
  int64_t arriving;     // copies in that were begun when this layer was entered
  // Of decoding (decode.c): attention of layer l over the `past` tokens in the cache and the batch's; NULL: over these alone.
  void (*attend)(const struct Pass *p, int64_t l, const LayerState *s);
  const KeyValueCache *cache;
  int64_t past;
} Pass;

static const Tensor none; // an operand that is absent

// A forward pass (training NULL) or a training pass, which adds to the gradients where `accumulate`. Fails where the batch's
// sequences are longer than those that the model was made for.
Pass pass_begin(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *training,
                bool accumulate);
// Pops all that it pushed.
void pass_end(Pass *p);
// [N, columns] of the backend's dtype, on the stack.
Tensor push_activation(const Pass *p, const char *name, int64_t columns);
Tensor push_gradient(const Pass *p, const char *name, int64_t columns);
// fp32 [N heads].
Tensor push_statistic(const Pass *p, const char *name, int64_t heads);

// --- transformer.c -----------------------------------------------------------------------------------------

// From the tokens to the residual stream after all layers. Training keeps what its backward pass reads, and else nothing is.
Tensor layers_forward(Pass *p);
// Into `out`, or else on the stack.
Norm final_norm(const Pass *p, Tensor stream, Tensor out);

// --- matmul.c ----------------------------------------------------------------------------------------------

// The matmuls of a layer: in the backend's dtype by linear_forward and its gradients, or in FP8 (pass.fp8).
//
// In FP8 an operand is quantized before its GEMM, with one scale for the tensor (kernels.h), and a GEMM reads codes along
// its inner dimension alone: the backward pass needs those of the transpose. Where nothing is recomputed, the forward pass
// writes these too and they are kept in place of the operand, in half its memory. SwiGLU is then an operation of its
// own, which finds the maximum of what it writes.

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

// --- layer_door.c ------------------------------------------------------------------------------------------

typedef enum { FORWARD, BACKWARD } Direction; // evaluation and generation go FORWARD too

// What has a door, from the bottom up: the embedding, the layers 0 to L - 1, and the head, L.
enum { EMBEDDING = -1 };
int64_t head_layer(const Pass *p);

// Before layer l computes: what it reads is there, and what the next one reads is on its way. That is its weights, from the
// host (--offload), in codes (--fp8); its input, of training as the
// recomputation in p->recompute keeps it, and memory for its output; and gradients that are added to.
LayerState *layer_enter(Pass *p, int64_t l, Direction direction);
// After it: what it made may go. Its output becomes the stream, or its gradients leave to the host or are summed over the
// ranks, while the next one computes.
void layer_leave(Pass *p, int64_t l, Direction direction);
