// Compiled everywhere, with no CUDA header: a plan for a GPU takes the size of attention's workspace from here.
#include "kernels/cuda/attention.h"

#include <string.h>

#include "base/fail.h"
#include "kernels/cuda/cuda_ops.h"

#ifdef HAVE_CUDA
const char *attention_cudnn_absent(void); // attention_kernels.h, which includes a CUDA header
#endif

static AttentionChoice choice = ATTENTION_AUTO;

AttentionChoice cuda_attention_choice(void) {
  return choice;
}

const char *cuda_attention_cudnn_absent(void) {
#ifdef HAVE_CUDA
  return attention_cudnn_absent();
#else
  return "the program was built without CUDA";
#endif
}

void cuda_attention_select(const char *which) {
  static const char *const names[] = {"auto", "own", "cudnn"};
  int i = 0;
  while (i < 3 && strcmp(which, names[i]) != 0) i++;
  if (i == 3) fail("--attention %s is not known; it is one of auto, own, cudnn", which);
#ifdef HAVE_CUDA
  if (i == ATTENTION_CUDNN && attention_cudnn_absent())
    fail("--attention cudnn: %s; --attention own needs nothing else", attention_cudnn_absent());
#endif
  choice = (AttentionChoice)i;
}

// cuDNN 9.19 needs 256 bytes, and for dk and dv of every query head in bf16 where heads share keys.
enum { CUDNN_BYTES = 64 << 10 };

AttentionWorkspace cuda_attention_workspace(AttentionShape s, AttentionChoice which) {
  size_t heads = (size_t)(s.batch * s.num_heads), tiles = (size_t)ceil_div(s.seq_len, 64);
  size_t elements = heads * (size_t)(s.seq_len * s.head_dim); // of q
  AttentionWorkspace w = {.statistics = memory_padded(heads * tiles * 64 * 2 * sizeof(float)),
                          .counters = MEMORY_ALIGNMENT};
  if (which == ATTENTION_CUDNN) {
    w.dq_sums = memory_padded(elements * sizeof(float));
    w.cudnn = CUDNN_BYTES + (s.num_heads == s.num_key_value_heads ? 0 : 2 * elements * 2);
  }
  return w;
}

size_t cuda_attention_forward_scratch(const AttentionForward *a) {
  (void)a;
  return choice == ATTENTION_OWN ? 0 : CUDNN_BYTES;
}

size_t cuda_attention_backward_scratch(const AttentionBackward *a) {
  AttentionWorkspace w = cuda_attention_workspace(a->shape, choice);
  return w.statistics + w.counters + w.dq_sums + w.cudnn;
}
