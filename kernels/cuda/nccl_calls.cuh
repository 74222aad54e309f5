// Shared by the files that call NCCL.
#pragma once

#include <nccl.h>

#include "kernels/cuda/cuda_common.cuh"

static inline void nccl_check(ncclResult_t result, ncclComm_t comm, const char *doing) {
  if (result != ncclSuccess && result != ncclInProgress)
    fail("NCCL failed in %s: %s (%s); NCCL_DEBUG=WARN says more", doing, ncclGetErrorString(result),
         ncclGetLastError(comm));
}

static inline ncclDataType_t nccl_type(Dtype dtype) {
  return dtype == DTYPE_F32 ? ncclFloat32 : dtype == DTYPE_BF16 ? ncclBfloat16 : ncclInt32;
}
