// The host's memory, and copies between it and the device's beside the kernels.
//
// Pages are pinned and have one address for the host and the device. So what is touched once in a step (AdamW's state, an
// embedding's rows) needs no copy: kernels access it over PCIe. What is read more often is copied by the copy engines, of
// which there is one for each direction, with a stream for each. The host never waits.
#include "kernels/cuda/cuda_common.cuh"

void *cuda_allocate_host(void *context, size_t bytes) {
  void *data = memory_pages.allocate(nullptr, bytes);
  if (data && bytes && cudaHostRegister(data, bytes, cudaHostRegisterDefault) != cudaSuccess) {
    cudaGetLastError(); // the system may limit pinned memory
    memory_pages.release(nullptr, data, bytes);
    return nullptr;
  }
  return data;
}

void cuda_release_host(void *context, void *data, size_t bytes) {
  backend_synchronize(static_cast<Backend *>(context));
  if (bytes) cuda_check(cudaHostUnregister(data), "unpinning host memory");
  memory_pages.release(nullptr, data, bytes);
}

static void copy(Backend *backend, StreamKind kind, const Copy *a) {
  cudaStream_t stream = side_begin(backend, kind);
  if (a->after_out) side_join(backend, STREAM_COPY_OUT, stream, 0);
  cuda_check(cudaMemcpyAsync(a->out.data, a->x.data, tensor_bytes(a->x), cudaMemcpyDefault, stream),
             "copying between the host and the device");
  side_end(backend, kind);
}

void cuda_copy_in(Backend *backend, const Copy *a) {
  copy(backend, STREAM_COPY_IN, a);
}

void cuda_copy_out(Backend *backend, const Copy *a) {
  copy(backend, STREAM_COPY_OUT, a);
}
