// The plan: a backend that runs nothing. The entry points check and push as for any backend, onto a memory
// that only counts: a training step through it gives what the step needs, to the byte.
#include <stdio.h>

#include "kernels/kernels.h"

Backend *plan_backend_create(DeviceKind device, Dtype dtype) {
  static const BackendOps nothing;
  Backend *backend = backend_begin(&nothing, device, dtype, 0);
  snprintf(backend->description, sizeof backend->description, "plan for %s", device_name(device));
  backend->memory = memory_create(NULL);
  if (backend->scratch->resident_bytes)
    memory_reserve(&backend->memory, "GEMM workspace", MEMORY_WORKSPACE, backend->scratch->resident_bytes);
  return backend_finish(backend);
}

void plan_join_ranks(Backend *plan, int ranks) {
  plan->ranks = ranks;
  if (ranks > 1 && plan->scratch->ranks_bytes)
    memory_reserve(&plan->memory, "shares of gradients", MEMORY_GRADIENTS, plan->scratch->ranks_bytes);
}
