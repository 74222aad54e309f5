// Attention's choice and its workspace: shared by the kernels and by the scratch table, which is compiled on
// machines without CUDA too.
#ifndef LCE_KERNELS_CUDA_ATTENTION_SCRATCH_H
#define LCE_KERNELS_CUDA_ATTENTION_SCRATCH_H

#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

typedef enum { ATTENTION_AUTO, ATTENTION_OWN, ATTENTION_CUDNN } AttentionChoice;

AttentionChoice cuda_attention_choice(void);

// The parts of a backward pass's workspace, in this order.
typedef struct {
  size_t statistics; // attention_statistics.cuh, or delta
  size_t counters;
  size_t dq_sums; // cuDNN adds dq up here, fp32
  size_t cudnn;   // what it asks for beside that
} AttentionWorkspace;

AttentionWorkspace cuda_attention_workspace(AttentionShape shape, AttentionChoice choice);

#if defined(__cplusplus)
}
#endif
#endif
