// Attention: chooses between our own kernels and cuDNN's (attention.h says how), and among our own.
#include "kernels/cuda/attention.h"

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_own.h"
#include "kernels/cuda/attention_scratch.h"
#include "kernels/cuda/cuda_common.cuh"

// Whether the tensor-core kernels take this shape.
static bool takes(AttentionShape s, Tensor qkv, Tensor out) {
  return qkv.dtype == DTYPE_BF16 && (s.head_dim == 64 || s.head_dim == 128) && rows_align(qkv, 8) &&
         rows_align(out, 8);
}

// Says once that cuDNN was asked for and would not.
static void tell(const char *op, const char *reason) {
  static bool told = false;
  if (!told) warn("%s runs on our own kernels rather than cuDNN's: %s", op, reason);
  told = true;
}

void cuda_attention_forward(Backend *backend, const AttentionForward *a) {
  cudaStream_t stream = cuda_stream(backend);
  AttentionChoice choice = cuda_attention_choice();
  if (choice != ATTENTION_OWN) {
    const char *reason = NULL;
    if (attention_cudnn_forward(a, stream, &reason)) return;
    if (choice == ATTENTION_CUDNN) tell("attention_forward", reason);
  }
  if (takes(a->shape, a->qkv, a->out))
    attention_tensor_core_forward(a, stream);
  else
    attention_generic_forward(a, stream);
}

void cuda_attention_backward(Backend *backend, const AttentionBackward *a) {
  cudaStream_t stream = cuda_stream(backend);
  AttentionChoice choice = cuda_attention_choice();
  if (choice == ATTENTION_CUDNN) {
    const char *reason = NULL;
    if (attention_cudnn_backward(a, stream, &reason)) return;
    tell("attention_backward", reason);
  }
  float *statistics = data_of<float>(a->workspace);
  if (takes(a->shape, a->qkv, a->out) && rows_align(a->dout, 8) && rows_align(a->dqkv, 8)) {
    size_t offset = cuda_attention_workspace(a->shape, choice).statistics;
    int *counters = reinterpret_cast<int *>(data_of<char>(a->workspace) + offset);
    attention_statistics(a, statistics, counters, stream);
    if (!attention_hopper_backward(a, statistics, counters, stream))
      attention_tensor_core_backward(a, statistics, stream);
  } else {
    attention_generic_backward(a, statistics, stream);
  }
}
