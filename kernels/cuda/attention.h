// Which attention the CUDA backend runs: our own kernels or cuDNN's. Both read and write packed rows as they
// lie.
#ifndef LCE_KERNELS_CUDA_ATTENTION_H
#define LCE_KERNELS_CUDA_ATTENTION_H

#if defined(__cplusplus)
extern "C" {
#endif

// To be called before the plan is made: the workspace depends on it, not on what is installed.
//   "auto"   the default: forward by cuDNN where it is there and takes the shape, else by our own kernels;
//            backward by our own. Bitwise repeatable.
//   "own"    our own kernels alone. Bitwise repeatable.
//   "cudnn"  cuDNN forward and backward. Its backward pass adds dq up with atomics: the last bits of dq
//            change from run to run. Needs workspace for fp32 sums of dq.
// Fails with a sentence for any other name and, in a program built with CUDA, for "cudnn" where cuDNN was not
// found at build time or is too old.
void cuda_attention_select(const char *which);

// Why "cudnn" cannot be selected, or NULL when it can.
const char *cuda_attention_cudnn_absent(void);

#if defined(__cplusplus)
}
#endif
#endif
