// Stands in for the CUDA backend where the program was built without nvcc.
#include "kernels/kernels.h"

Backend *cuda_backend_create(int ordinal, Dtype dtype, const char **reason) {
  *reason = "the program was built without CUDA (make finds nvcc on the PATH or in /usr/local/cuda/bin)";
  return NULL;
}
