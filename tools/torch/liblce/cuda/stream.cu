// Handing over between a caller's stream and the backend's.
#include "kernels/cuda/cuda_common.cuh"
#include "tools/torch/liblce/operations.h"

static void let_wait(cudaStream_t later, cudaStream_t earlier, void **event) {
  if (!*event)
    cuda_check(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t *>(event), cudaEventDisableTiming),
               "creating an event");
  cuda_check(cudaEventRecord(static_cast<cudaEvent_t>(*event), earlier),
             "recording an event on a stream, which must be of the context's device");
  cuda_check(cudaStreamWaitEvent(later, static_cast<cudaEvent_t>(*event), 0), "letting a stream wait");
}

void cuda_follow(Backend *backend, void *stream, void **event) {
  int current = -1, ordinal = cuda_state(backend)->ordinal;
  cuda_check(cudaGetDevice(&current), "querying the thread's current device");
  if (current != ordinal)
    fail("the calling thread's current CUDA device is %d, and that of the backend is %d; call "
         "cudaSetDevice(%d) first",
         current, ordinal, ordinal);
  // An error that the caller's calls left behind (cudaErrorNotReady, say) would look like a failed launch.
  cudaGetLastError();
  let_wait(cuda_stream(backend), static_cast<cudaStream_t>(stream), event);
}

void cuda_precede(Backend *backend, void *stream, void **event) {
  let_wait(static_cast<cudaStream_t>(stream), cuda_stream(backend), event);
}

void cuda_hand_over_end(void **event) {
  if (*event) cudaEventDestroy(static_cast<cudaEvent_t>(*event));
  *event = nullptr;
}
