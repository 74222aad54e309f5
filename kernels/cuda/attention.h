// Which attention the CUDA backend runs, our own kernels or cuDNN's, and the workspace that depends on it. Without a
// CUDA header: a plan for a GPU needs it on machines without CUDA too.
#ifndef LCE_KERNELS_CUDA_ATTENTION_H
#define LCE_KERNELS_CUDA_ATTENTION_H

#include "kernels/kernels.h"

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

typedef enum { ATTENTION_AUTO, ATTENTION_OWN, ATTENTION_CUDNN } AttentionChoice;

AttentionChoice cuda_attention_choice(void);

// The parts of a backward pass's workspace, in this order.
typedef struct {
  size_t statistics; // what the backward pass needs of every query (attention_mma.cuh), or delta
  size_t counters;
  size_t dq_sums; // fp32, where cuDNN adds dq up
  size_t cudnn;   // what cuDNN needs besides
} AttentionWorkspace;

AttentionWorkspace cuda_attention_workspace(AttentionShape shape, AttentionChoice choice);

#if defined(__cplusplus)
}
#endif
#endif
