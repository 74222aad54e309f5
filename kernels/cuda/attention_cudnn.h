// cuDNN's attention, where cuDNN 9 was found at build time. Without it these functions are there and decline.
#ifndef LCE_KERNELS_CUDA_ATTENTION_CUDNN_H
#define LCE_KERNELS_CUDA_ATTENTION_CUDNN_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Why cuDNN's attention cannot be used at all (not built in, too old), or NULL when it can.
const char *attention_cudnn_absent(void);

// AttentionForward and AttentionBackward as in kernels.h. False, with nothing done and a sentence fragment in
// *reason, when cuDNN does not take the shape or wants more workspace than the door pushed.
bool attention_cudnn_forward(const AttentionForward *a, cudaStream_t stream, const char **reason);
bool attention_cudnn_backward(const AttentionBackward *a, cudaStream_t stream, const char **reason);

#if defined(__cplusplus)
}
#endif
#endif
