#include "tests/log_prob_call.h"

Tensor entropy_weights_of(Harness *h, const ReferenceLoss *r) {
  return r->entropy_weights ? vector_from(h, DTYPE_F32, r->entropy_weights, r->rows) : (Tensor){0};
}

LogProbGradients log_prob_call(Harness *h, LinearCrossEntropy *a, Tensor entropy_weights, bool kept) {
  int64_t rows = a->x.shape[0], vocab = a->weight.shape[0];
  LogProbGradients g = {
      .call = *a, .log_prob = poisoned_vector(h, DTYPE_F32, rows), .entropy_weights = entropy_weights};
  if (tensor_exists(entropy_weights)) g.entropy = poisoned_vector(h, DTYPE_F32, rows);
  LinearCrossEntropy forward = *a;
  forward.outputs = (TokenOutputs){.log_prob = g.log_prob, .entropy = g.entropy};
  forward.dx = forward.dweight = forward.dbias = (Tensor){0};
  if (kept) { // in rows that start aligned, and others
    int64_t stride = rows % 4 == 3 ? vocab + 1 : h->backend->scratch->logits_stride(vocab, h->dtype);
    g.kept = (Exponentials){.exps = poisoned_strided(h, h->dtype, rows, vocab, stride),
                            .row_sum = poisoned_vector(h, DTYPE_F32, rows)};
    forward.chunk = rows;
    keep_exponentials(h->backend, forward, g.kept);
  } else {
    linear_cross_entropy(h->backend, forward);
  }
  a->loss = (Tensor){0};
  a->outputs = (TokenOutputs){0};
  return g;
}
