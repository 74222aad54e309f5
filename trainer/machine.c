#include "trainer/machine.h"

#include <stdio.h>

#include "base/fail.h"
#include "kernels/cuda/attention.h"

Backend *machine_open(Options *o) {
  const char *reason = NULL;
  Backend *backend = NULL;
  if (o->device != DEVICE_CPU) {
    backend = cuda_backend_create(0, o->dtype == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16, &reason);
    if (!backend && o->device == DEVICE_CUDA) fail("--device cuda: %s", reason);
    if (!backend) printf("no GPU is used: %s\n", reason);
  }
  options_settle_dtypes(o, backend != NULL);
  if (backend) cuda_attention_select(o->attention);
  return backend ? backend : cpu_backend_create(o->plain_products);
}

const char *machine_kind(const Backend *backend) {
  return backend->scratch == &cuda_scratch ? "cuda" : "cpu";
}

size_t machine_usable_bytes(const Backend *backend) {
  if (backend->device_capacity <= backend->device_overhead) return backend->device_capacity;
  return backend->device_capacity - backend->device_overhead;
}
