// The attention kernels that attention.cu chooses from. Operands as in kernels.h; packed rows are read as
// they lie. Bitwise repeatable: one warp sums each output element, in one order, without atomics.
#pragma once

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "kernels/kernels.h"

__BEGIN_DECLS

// Any head_dim up to 256, fp32 or bf16; fails with a sentence beyond that.
void attention_generic_forward(const AttentionForward *a, cudaStream_t stream);
void attention_generic_backward(const AttentionBackward *a, cudaStream_t stream);

// bf16, head_dim 64 or 128, rows that start on multiples of 16 bytes; sm_80 and later. The backward pass
// reads the statistics at the start of its workspace.
void attention_tensor_core_forward(const AttentionForward *a, cudaStream_t stream);
void attention_tensor_core_backward(const AttentionBackward *a, cudaStream_t stream);

// The same on Hopper, faster. Returns false, with nothing done, unless hopper_runs() (hopper_gemm.h). The
// forward pass sets its counter to 0 itself.
bool attention_hopper_forward(Backend *backend, const AttentionForward *a, int *counter);
bool attention_hopper_backward(Backend *backend, const AttentionBackward *a, int *counters, float *partials);

// Writes the tensor-core backward passes' statistics (attention_mma.cuh), and sets the counters to 0.
enum { ATTENTION_COUNTERS = 2 };
void attention_statistics(const AttentionBackward *a, int *counters, cudaStream_t stream);

__END_DECLS
