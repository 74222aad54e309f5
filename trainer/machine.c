#include "trainer/machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/ranks/ranks.h"

// The GPU of this rank: one each, in the ranks' order on this machine. Slurm may make only one visible to each.
static int ordinal(void) {
  const Launch *l = ranks_self();
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  bool one_visible =
      l->launcher && !strcmp(l->launcher, "srun") && visible && *visible && !strchr(visible, ',');
  return one_visible ? 0 : l->local_rank;
}

// All ranks compute where rank 0 does. Without MPI a rank on the CPU fails as soon as it joins the others.
static void require_same_device(const Backend *cuda, const char *reason) {
  int32_t first = cuda != NULL;
  ranks_broadcast(&first, sizeof first);
  if (first && !cuda)
    fail("rank 0 computes on a GPU and this rank does not (%s); start as many ranks on a machine as it has "
         "GPUs",
         reason);
  if (!first && cuda)
    fail("rank 0 computes on the CPU and this rank has a GPU; give --device cpu or --device cuda");
}

Backend *machine_open(Options *o) {
  const char *reason = "--device cpu";
  Backend *backend = NULL;
  if (o->device != DEVICE_CPU) {
    backend = cuda_backend_create(ordinal(), o->dtype == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16, &reason);
    if (!backend && o->device == DEVICE_CUDA)
      fail("--device cuda: %s%s", reason,
           o->fit         ? "; to plan for a GPU that is not here, give --device-memory GIB"
           : o->ranks > 1 ? "; every rank on a machine needs a GPU of its own"
                          : "; leave it out to compute on the CPU");
    if (!backend && options_given(o, "device")) printf("no GPU is used: %s\n", reason);
  }
  require_same_device(backend, reason);
  options_resolve_dtypes(o, backend != NULL);
  if (backend && o->dtypes.fp8 && backend->no_fp8)
    fail("--fp8 needs a GPU of compute capability 8.9 (Ada) or later, and this is %s; %s",
         backend->description, o->resumed_from ? "resume with --no-fp8" : "leave it out");
  if (!backend) backend = cpu_backend_create(false);
  o->no_sampling = backend->no_sampling;
  size_t given = bytes_from_gib(o->device_memory);
  if (given && given < machine_usable_bytes(backend)) {
    backend->device_capacity = backend->device_overhead + given;
    backend->memory.limit = given;
  }
  return backend;
}

void machine_join_ranks(Backend *backend) {
  if (backend->device == ON_CUDA)
    cuda_backend_join_ranks(backend);
  else
    cpu_backend_join_ranks(backend);
}

void machine_broadcast(Backend *backend, void *bytes, size_t count) {
  if (backend->ranks == 1) return;
  Memory *memory = &backend->memory;
  if (memory->stack_capacity < memory_padded(count)) memory_set_stack(memory, memory_padded(count));
  MemoryMark mark = memory_mark(memory);
  Tensor words = memory_push_1d(memory, "broadcast", MEMORY_WORKSPACE, DTYPE_I32, (int64_t)count / 4);
  backend_to_device(backend, words, bytes);
  broadcast(backend, (Collective){.out = words, .x = words});
  backend_to_host(backend, bytes, words);
  memory_pop_to(memory, mark);
}

size_t machine_usable_bytes(const Backend *backend) {
  if (backend->device_capacity <= backend->device_overhead) return backend->device_capacity;
  return backend->device_capacity - backend->device_overhead;
}
