// Our own attention: tensor cores for bf16 heads of 64 and 128, plain loops for everything else. Every result
// is bitwise repeatable: each output number is summed by one warp, in one order, without atomics.
#ifndef LCE_KERNELS_CUDA_ATTENTION_OWN_H
#define LCE_KERNELS_CUDA_ATTENTION_OWN_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Any head_dim up to 256, fp32 or bf16; fails with a sentence beyond that. delta: fp32 [B, Q, T], scratch.
void attention_generic_forward(const AttentionForward *a, cudaStream_t stream);
void attention_generic_backward(const AttentionBackward *a, float *delta, cudaStream_t stream);

// bf16, head_dim 64 or 128, rows that start on multiples of 16 bytes; sm_80 and later.
void attention_tensor_core_forward(const AttentionForward *a, cudaStream_t stream);
void attention_tensor_core_backward(const AttentionBackward *a, float *statistics, cudaStream_t stream);

// The same on Hopper (sm_90a), faster. False, with nothing done, on other devices or where the program holds
// no code for it.
bool attention_hopper_backward(const AttentionBackward *a, const float *statistics, int *counters,
                               cudaStream_t stream);

// Makes what both tensor-core backward passes read (attention_statistics.cuh), and sets the counters to 0.
enum { ATTENTION_COUNTERS = 2 };
void attention_statistics(const AttentionBackward *a, float *statistics, int *counters, cudaStream_t stream);

#if defined(__cplusplus)
}
#endif
#endif
