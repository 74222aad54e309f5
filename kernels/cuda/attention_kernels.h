// The attention kernels that attention.cu chooses from: our own and cuDNN's. Operands as in kernels.h; all read and
// write packed rows as they lie.
#ifndef LCE_KERNELS_CUDA_ATTENTION_KERNELS_H
#define LCE_KERNELS_CUDA_ATTENTION_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Our own. Bitwise repeatable: each output element is summed by one warp, in one order, without atomics.

// Any head_dim up to 256, fp32 or bf16; fails with a sentence beyond that. delta: fp32 [B, Q, T], scratch.
void attention_generic_forward(const AttentionForward *a, cudaStream_t stream);
void attention_generic_backward(const AttentionBackward *a, float *delta, cudaStream_t stream);

// bf16, head_dim 64 or 128, rows that start on multiples of 16 bytes; sm_80 and later.
void attention_tensor_core_forward(const AttentionForward *a, cudaStream_t stream);
void attention_tensor_core_backward(const AttentionBackward *a, float *statistics, cudaStream_t stream);

// The same on Hopper (sm_90a), faster. False, with nothing done, on other devices or where the program holds no code
// for it.
bool attention_hopper_backward(const AttentionBackward *a, const float *statistics, int *counters,
                               cudaStream_t stream);

// Writes what both tensor-core backward passes read (attention_mma.cuh), and sets the counters to 0.
enum { ATTENTION_COUNTERS = 2 };
void attention_statistics(const AttentionBackward *a, float *statistics, int *counters, cudaStream_t stream);

// cuDNN's, where cuDNN 9 was found at build time.

// Why cuDNN's attention cannot be used at all (not built in, too old), or NULL when it can.
const char *attention_cudnn_absent(void);

// False, with nothing done and a sentence fragment in *reason, when cuDNN does not take the shape or needs more
// workspace than there is.
bool attention_cudnn_forward(const AttentionForward *a, cudaStream_t stream, const char **reason);
bool attention_cudnn_backward(const AttentionBackward *a, cudaStream_t stream, const char **reason);

#if defined(__cplusplus)
}
#endif
#endif
