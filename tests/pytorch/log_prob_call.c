#include "tests/pytorch/log_prob_call.h"

LogProbGradients log_prob_call(Harness *h, LinearCrossEntropy *a, Tensor entropy_weights, bool kept) {
  int64_t rows = a->x.shape[0], vocab = a->weight.shape[0];
  TokenOutputs *outputs = &a->outputs;
  bool entropies = tensor_exists(entropy_weights);
  if (!tensor_exists(outputs->log_prob)) outputs->log_prob = poisoned_vector(h, DTYPE_F32, rows);
  if (!tensor_exists(outputs->entropy) && entropies) outputs->entropy = poisoned_vector(h, DTYPE_F32, rows);
  LogProbGradients g = {.call = *a,
                        .log_prob = outputs->log_prob,
                        .entropy = entropies ? outputs->entropy : (Tensor){0},
                        .entropy_weights = entropy_weights};
  g.call.loss = (Tensor){0};
  g.call.outputs = (TokenOutputs){0};
  LinearCrossEntropy forward = *a;
  forward.dx = forward.dweight = forward.dbias = (Tensor){0};
  if (kept) { // in rows that start aligned, and others
    int64_t stride = rows % 4 == 3 ? vocab + 1 : h->backend->scratch->logits_stride(vocab, h->dtype);
    g.kept = (Exponentials){.exps = poisoned_strided(h, h->dtype, rows, vocab, stride),
                            .row_sum = poisoned_vector(h, DTYPE_F32, rows)};
    forward.chunk = rows;
    keep_exponentials(h->backend, forward, g.kept);
    bool aligned = stride * (int64_t)dtype_bytes(h->dtype) % 16 == 0;
    check_gaps(h, "E", aligned ? in_pieces(g.kept.exps) : g.kept.exps);
  } else {
    linear_cross_entropy(h->backend, forward);
  }
  return g;
}
