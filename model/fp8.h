// The matmuls of a layer in FP8, which matmul.c calls in place of its own.
#pragma once

#include "model/pass.h"

// False with the reason if these sizes allow no GEMMs of codes.
bool fp8_possible(const ModelConfig *config, int64_t seq_len, int64_t mlp_chunk, Reason *reason);

// True if the pass trains with --fp8.
bool fp8_used(const Pass *p);

// As project_outputs, with a residual.
void fp8_project(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w, int64_t first,
                 Tensor residual);
void fp8_activate(const Pass *p, Operand out, Tensor pre_activation);
void fp8_project_backward(const Pass *p, Tensor dx, Operand dout, Operand x, const Weight *weight,
                          Tensor dbias, bool accumulate_dx);
Operand fp8_project_activated_backward(const Pass *p, Operand dout, Operand x, Tensor pre_activation,
                                       const Weight *weight);
