// The matmuls of a layer: in the backend's dtype by linear_forward and its gradients, or in FP8 (pass.fp8).
//
// In FP8 an operand is quantized before its GEMM, with one scale for the tensor (kernels.h), and a GEMM reads codes along
// its inner dimension alone: the backward pass needs those of the transpose. Where nothing is recomputed, the forward pass
// writes these too and they are kept in place of the operand, in half its memory. SwiGLU is then an operation of its
// own, which finds the maximum of what it writes.
#pragma once

#include "model/pass.h"

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
void project(const Pass *p, Tensor out, Operand x, const Affine *w, Tensor residual);
// The same for the weight's outputs [first, first + count), where the layout is [out, in].
void project_outputs(const Pass *p, Tensor out, Operand x, const Affine *w, int64_t first, int64_t count);
// pre_activation = x W^T + bias, out = GELU or SwiGLU of it.
void project_activated(const Pass *p, Operand out, Tensor pre_activation, Operand x, const Affine *w);
// The activation function alone.
void activate(const Pass *p, Operand out, Tensor pre_activation);

// The gradients of weight and, where nobody else sums it, bias (absent else), then dx, which may be x itself. x is not
// read where its codes are kept.
void project_backward(const Pass *p, Tensor dx, Operand dout, Operand x, const Param *weight, Tensor dbias);
// The same through the activation function before the matmul: x is its output, and returns the gradient of the
// pre-activation, which replaces x (GELU) or the pre-activation (SwiGLU); of x nothing is left.
Operand project_activated_backward(const Pass *p, Tensor dout, Operand x, Tensor pre_activation,
                                   const Param *weight);
