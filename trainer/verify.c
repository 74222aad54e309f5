// --verify-every: the same pass over the same tokens has the same bits, so a second one that differs shows a
// device that computes wrongly. Gradients and losses are compared by their CRC-32, on the host, and so take no
// memory of the device. Each rank compares its own; at zero 2 the layers' are its shard of all ranks' sums.
#include <stdlib.h>

#include "data/file.h"
#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "trainer/trainer.h"

// An output of a pass: a parameter's gradient, the shard of the layers', the losses. Absent: another has it.
static Tensor output_of_pass(const Trainer *t, int64_t i) {
  const ParameterSet *p = &t->model.parameters;
  bool sharded = grads_double_buffered(p, GROUP_MATRICES);
  if (i == p->count + 1) return t->loss;
  if (i == p->count) return sharded ? p->grad_sum[GROUP_MATRICES] : (Tensor){0};
  const Parameter *one = &p->items[i];
  if (one->group != GROUP_MATRICES) return one->grad;
  if (sharded) return (Tensor){0};
  return tensor_rows(p->grad[one->group], one->offset, parameter_elements(one));
}

static uint32_t *checksums_of_pass(const Trainer *t) {
  enum { AT_ONCE = 1 << 22 }; // elements on their way to the host
  int64_t outputs = t->model.parameters.count + 2;
  uint32_t *sums = host_alloc(outputs, sizeof *sums, "checksums of gradients");
  void *buffer = host_alloc(AT_ONCE, sizeof(float), "gradients on their way");
  collectives_join(t->backend, 0);
  for (int64_t i = 0; i < outputs; i++) {
    Tensor x = output_of_pass(t, i);
    for (int64_t first = 0, count; tensor_exists(x) && first < tensor_count(x); first += count) {
      count = min_i64(tensor_count(x) - first, AT_ONCE);
      Tensor part = tensor_rows(tensor_flat(x), first, count);
      backend_to_host(t->backend, buffer, part);
      sums[i] = checksum(sums[i], buffer, tensor_bytes(part));
    }
  }
  free(buffer);
  return sums;
}

void trainer_verify(Trainer *t, int64_t step, const Batch *batch, const TransformerOptions *pass,
                    float scale) {
  const ParameterSet *p = &t->model.parameters;
  const char *const others[] = {"the layers", ""}; // and the losses
  int64_t every = t->options->verify_every;
  if (!every || (step + 1) % every || t->backend->memory.planning) return;
  uint32_t *first = checksums_of_pass(t);
  transformer_train(t->backend, &t->model, batch, pass, scale, false, t->loss);
  uint32_t *second = checksums_of_pass(t);
  for (int64_t i = 0; i < p->count + 2; i++)
    if (first[i] != second[i])
      fail("in step %lld rank %d computed the %s%s twice, with different bits, on %s; test or replace this "
           "device, and resume from an earlier checkpoint",
           (long long)step + 1, t->backend->rank, i > p->count ? "losses" : "gradients of ",
           i < p->count ? p->items[i].name : others[i - p->count], t->backend->description);
  free(first);
  free(second);
}
