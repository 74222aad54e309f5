// Shared by the files of a pass: the layers (transformer.c), their norms (norms.c), their matmuls (matmul.c)
// and FP8 operands (fp8.c), the copies around a layer (layer_door.c), sums of gradients over the ranks
// (gradient_reduction.c), decoding with a cache (decode.c).
#pragma once

#include "model/transformer.h"

// A matrix that a matmul reads. Its producer writes x, and may ignore the rest.
typedef struct {
  Tensor x;            // [N, K]
  Quantized quantized; // fp8.c's
} Operand;

typedef struct {
  Operand out; // norm1's and norm2's: the input of attention or the MLP; the stream if config.post_norm
  Tensor mean, rstd;
  Tensor x; // [N, H], with config.post_norm: the output of attention or the MLP, which the norm reads
} Norm;

// A layer's results. Recompute says which of these stay on the stack for the backward pass.
typedef struct {
  MemoryMark below;      // the stack before the layer; of training
  Tensor input;          // [N, H], the output of the layer below
  Tensor output;         // [N, H]
  Norm norm1, norm2;     // out [N, H]
  Tensor qkv;            // [N, (Q + 2K) D], normalised and rotated
  Tensor qk;             // [N, (Q + K) D], before the norm; with config.qk_norm
  Norm q_norm, k_norm;   // their out lies in qkv
  Tensor lse;            // fp32 [B, Q T]
  Operand attention;     // [N, Q D]
  Tensor middle;         // [N, H]: the stream between attention and MLP
  Tensor pre_activation; // [N, F], or [N, 2F]: gate, then up
  Operand activation;    // [N, F]
} LayerState;

// One pass over a batch, which all functions of these files read.
typedef struct Pass {
  Backend *backend;
  Model *model;
  const Batch *batch;
  TransformerOptions options;
  bool training;   // a backward pass follows
  bool first;      // of a step's micro-batches: the head's gradient is written, not added to
  bool accumulate; // the other gradients are added to; never if every pass sums them over the ranks
  int64_t rows;    // N
  AttentionShape heads;
  MemoryMark bottom;              // the stack before the pass
  LayerState *states;             // one per layer
  Recompute recompute;            // in the layer that computes
  int64_t unreduced[GROUP_COUNT]; // gradients from a group's start whose sums over the ranks have not begun
  // For decoding (decode.c), else NULL: attention over layer l's keys and values in `cache`, `past` tokens of
  // each.
  void (*attend)(const struct Pass *pass, int64_t l, const LayerState *state);
  const KeyValueCache *cache;
  int64_t past;
} Pass;

typedef enum { FORWARD, BACKWARD } Direction; // evaluation and generation go FORWARD too

static const Tensor none; // an operand that is absent

// A forward pass alone. Fails if the sequences are longer than the model was made for.
Pass pass_begin(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options);
// With a backward pass, which adds to the gradients if `accumulate`.
Pass pass_begin_training(Backend *backend, Model *model, const Batch *batch,
                         const TransformerOptions *options, bool accumulate);
// Pops all that it pushed.
void pass_end(Pass *p);
// Pushes [N, columns] of the backend's dtype.
Tensor push_activation(const Pass *p, const char *name, int64_t columns);
Tensor push_gradient(const Pass *p, const char *name, int64_t columns);
// fp32 [N heads].
Tensor push_statistic(const Pass *p, const char *name, int64_t heads);
void push_norm_statistics(const Pass *p, Norm *norm);

// layer_state.c. Pushes all that layer_forward writes but the output. Tensors that p->recompute keeps lie
// below the mark.
MemoryMark push_layer(const Pass *p, LayerState *s);
// Push parts of it in the backward pass, if the forward pass popped them: norm1's output; norm2's output and
// the activation, with RECOMPUTE_MLP the pre-activation, too.
void push_norm1_again(const Pass *p, LayerState *s);
void push_mlp_again(const Pass *p, LayerState *s);
// True if the layer's forward pass is computed again in parts.
bool recomputes_parts(const Pass *p);
// p->rows rows of a state's MLP from row `first` on, with these pushed.
LayerState push_mlp_rows(const Pass *p, const LayerState *s, int64_t first);

// norms.c
void run_norm(const Pass *p, Norm *norm, Tensor x, const WeightAndBias *w, Tensor residual);
// previous_dbias: the gradient of a bias that x ends with, the sum of dx as it comes, or none.
void run_norm_backward(const Pass *p, const Norm *norm, Operand *dx, Tensor dout, Tensor x,
                       const WeightAndBias *w, bool accumulate_dx, Tensor previous_dbias);
// A block (attention, MLP) from the stream x to out: f is its last matmul's input, dout the gradient of its
// first one's output. Its input (norm->out) is pushed unless it is x.
void push_block_input(const Pass *p, const char *name, Norm *norm, Tensor x);
void add_block(const Pass *p, Tensor out, Tensor x, Operand *f, const WeightAndBias *last, const Norm *norm,
               const WeightAndBias *w);
// From dx, the gradient of out: the gradients of the last matmul's output and, if given, of its bias.
Operand add_block_backward(const Pass *p, const Operand *dx, Tensor dbias, const Norm *norm,
                           const WeightAndBias *w);
// Adds the block's part to dx, which then is the gradient of x. After its matmuls it pops to `kept`.
void block_input_backward(const Pass *p, Operand *dx, Operand dout, MemoryMark kept, const Weight *first,
                          Tensor dbias, const Norm *norm, Tensor x, const WeightAndBias *w,
                          Tensor previous_dbias);

// transformer.c: from the tokens to the residual stream after all layers. Training keeps its backward pass's
// inputs.
Tensor layers_forward(Pass *p);
// Into `out`, or else on the stack.
Norm final_norm(const Pass *p, Tensor stream, Tensor out);

// fp8.c: a matmul in the backend's dtype reads an operand's x. One in FP8 reads more, which these prepare.

// x becomes the operand's matrix.
void place_operand(const Pass *p, Operand *operand, Tensor x);
// Pushes the activation function's output.
void push_activation_operand(const Pass *p, Operand *operand);
// True if the backward pass reads stand-ins of norms' outputs and activations, popped after a layer.
bool has_stand_ins(const Pass *p);
// Pushes the operand's stand-in, if so.
void push_stand_in(const Pass *p, Operand *operand, int64_t columns);
// Returns rows of an operand that the caller then changes.
Operand operand_rows(Operand *operand, int64_t first, int64_t count);
// norm_forward to `out`, and norm_backward to `dx`.
void norm_forward_to(const Pass *p, Operand *out, NormForward a);
void norm_backward_to(const Pass *p, Operand *dx, NormBackward a);
// Comes before layer l's matmuls, after its weights.
void matmuls_enter(const Pass *p, int64_t l, Direction direction);
// Comes before a training pass's loss, and may add to its arguments.
void head_enter(const Pass *p, LinearCrossEntropy *loss);

// matmul.c: the matmuls of a layer.

// out = x W^T + bias + residual; bias and residual may be absent.
void project(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w, Tensor residual);
// The same for as many of the weight's outputs as out has, from `first` on; the layout is [out, in].
void project_outputs(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w, int64_t first);
// pre_activation = x W^T + bias, out = GELU or SwiGLU of it.
void project_activated(const Pass *p, Operand out, Tensor pre_activation, Operand *x, const WeightAndBias *w);
// The activation function alone.
void activate(const Pass *p, Operand out, Tensor pre_activation);

// The gradients of weight, bias (or absent) and input (dx, may be x).
void project_backward(const Pass *p, Tensor dx, Operand dout, Operand x, const Weight *weight, Tensor dbias,
                      bool accumulate_dx);
// The same through the activation function, whose output is x: returns the gradient of the pre-activation,
// which replaces x (GELU) or the pre-activation (SwiGLU). In each case x is overwritten.
Operand project_activated_backward(const Pass *p, Operand dout, Operand x, Tensor pre_activation,
                                   const Weight *weight);

// layer_door.c

// Before layer l: waits for its tensors, begins to fetch the next layer's; FORWARD pushes its output.
void layer_enter(Pass *p, int64_t l, Direction direction);
// After it: begins to send its results, while the next layer computes.
void layer_leave(Pass *p, int64_t l, Direction direction);

// gradient_reduction.c. Before a training pass: decides whether it accumulates.
void reduction_begin(Pass *p);
// The gradients of `group` from element `first` on are final: begins their sums over the ranks.
void reduce_ready(Pass *p, ParameterGroup group, int64_t first);
// The same for the head's gradient, unless the embedding's is added to it before it is summed.
void head_leave(Pass *p);
// embedding_backward, and the same for all remaining gradients.
void embedding_leave(Pass *p, EmbeddingBackward a);
