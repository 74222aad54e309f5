#include "trainer/reduction.h"

Reduction reduction_begin(Backend *backend, const Parameters *parameters) {
  Reduction r = {.backend = backend, .parameters = parameters};
  for (int g = 0; g < GROUP_COUNT; g++) r.left[g] = parameters->group_elements[g];
  return r;
}

// Buckets are cut from the end of a group, where the gradients that come first lie.
void reduction_ready(void *reduction, ParameterGroup group, int64_t first) {
  Reduction *r = reduction;
  Tensor grad = r->parameters->grad[group];
  int64_t bucket = REDUCTION_BUCKET_BYTES / (int64_t)dtype_bytes(grad.dtype);
  while (r->left[group] - first >= bucket || (first == 0 && r->left[group])) {
    int64_t count = r->left[group] < bucket ? r->left[group] : bucket;
    r->left[group] -= count;
    Tensor part = tensor_rows(grad, r->left[group], count);
    all_reduce(r->backend, (Collective){.out = part, .x = part, .beside = true});
  }
}
