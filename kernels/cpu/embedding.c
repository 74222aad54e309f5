// Tokens to vectors. The backward pass sorts the tokens, and one thread sums each row's terms (rows.c), so
// that the bits do not depend on the number of threads.
#include <string.h>

#include "kernels/cpu/cpu.h"

void cpu_embedding_forward(Backend *backend, const EmbeddingForward *a) {
  int64_t hidden = a->out.shape[1];
  const int32_t *tokens = a->tokens.data, *positions = a->positions.data;
  EACH_PARALLEL (n, a->out.shape[0]) {
    float *out = cpu_row(a->out, n);
    memcpy(out, cpu_row(a->token_weight, tokens[n]), (size_t)hidden * sizeof *out);
    if (!tensor_exists(a->position_weight)) continue;
    const float *position = cpu_row(a->position_weight, positions ? positions[n] : n % a->seq_len);
    EACH_SIMD (i, hidden) out[i] += position[i];
  }
}

// A position's gradient is the sum over the sequences of the batch, or over their documents.
static void position_gradient(Backend *backend, const EmbeddingBackward *a) {
  int64_t hidden = a->dout.shape[1], batch = a->dout.shape[0] / a->seq_len;
  if (!a->accumulate_position) cpu_fill_zero(backend, &a->dposition_weight);
  if (tensor_exists(a->positions)) {
    cpu_scatter_add(a->dposition_weight, a->positions, a->dout, NULL, 1.0f, a->workspace.data);
    return;
  }
  EACH_PARALLEL (t, a->seq_len) {
    float *out = cpu_row(a->dposition_weight, t);
    for (int64_t b = 0; b < batch; b++) {
      const float *dout = cpu_row(a->dout, b * a->seq_len + t);
      EACH_SIMD (i, hidden) out[i] += dout[i];
    }
  }
}

void cpu_embedding_backward(Backend *backend, const EmbeddingBackward *a) {
  if (tensor_exists(a->dtoken_weight)) {
    if (!a->accumulate_token) cpu_fill_zero(backend, &a->dtoken_weight);
    cpu_scatter_add(a->dtoken_weight, a->tokens, a->dout, NULL, 1.0f, a->workspace.data);
  }
  if (tensor_exists(a->dposition_weight)) position_gradient(backend, a);
}
