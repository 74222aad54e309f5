#include "trainer/machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "kernels/cuda/attention.h"
#include "kernels/ranks/ranks.h"

// The GPU of this rank: one each, in the order of the ranks on this machine. Slurm may show each rank its own
// alone.
static int ordinal(void) {
  const Launch *l = ranks_self();
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  bool own = l->launcher && !strcmp(l->launcher, "srun") && visible && *visible && !strchr(visible, ',');
  return own ? 0 : l->local_rank;
}

// What rank 0 has found is what all ranks take.
static void agree(const Backend *backend, const char *reason) {
  int32_t cuda = backend != NULL;
  ranks_share(&cuda, sizeof cuda);
  if (cuda && !backend)
    fail("rank 0 computes on a GPU and this rank has none (%s); start as many ranks on a machine as it has "
         "GPUs",
         reason);
  if (!cuda && backend)
    fail("rank 0 computes on the CPU and this rank has a GPU; give --device cpu or --device cuda");
}

Backend *machine_open(Options *o) {
  const char *reason = NULL;
  Backend *backend = NULL;
  if (o->device != DEVICE_CPU) {
    backend = cuda_backend_create(ordinal(), o->dtype == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16, &reason);
    if (!backend && o->device == DEVICE_CUDA)
      fail("--device cuda: %s%s", reason,
           o->ranks > 1 ? "; every rank on a machine needs a GPU of its own" : "");
    if (!backend) printf("no GPU is used: %s\n", reason);
    agree(backend, reason);
  }
  options_resolve_dtypes(o, backend != NULL);
  if (backend) cuda_attention_select(o->attention);
  if (!backend) backend = cpu_backend_create(o->plain_loops);
  return backend;
}

void machine_join_ranks(Backend *backend) {
  if (backend->device == ON_CUDA)
    cuda_backend_join_ranks(backend);
  else
    cpu_backend_join_ranks(backend);
}

size_t machine_usable_bytes(const Backend *backend) {
  if (backend->device_capacity <= backend->device_overhead) return backend->device_capacity;
  return backend->device_capacity - backend->device_overhead;
}
