// Streams beside the one of the kernels: for collectives, and for copies in each direction.
#include "kernels/cuda/cuda_common.cuh"

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  return event;
}

cudaStream_t new_stream(bool urgent) {
  cudaStream_t stream = nullptr;
  int lowest = 0, highest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "querying the priorities of streams");
  cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, urgent ? highest : lowest),
             "creating a stream");
  return stream;
}

static void let_wait(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
  cuda_check(cudaEventRecord(event, earlier), "recording an event");
  cuda_check(cudaStreamWaitEvent(later, event, 0), "letting a stream wait");
}

cudaStream_t side_begin(Backend *backend, StreamKind kind) {
  SideStream *side = &cuda_state(backend)->concurrent[kind];
  if (!side->stream) {
    side->stream = new_stream(kind == STREAM_COLLECTIVES);
    side->before = new_event();
    for (cudaEvent_t &event : side->done) event = new_event();
  }
  let_wait(side->stream, cuda_stream(backend), side->before);
  return side->stream;
}

void side_end(Backend *backend, StreamKind kind) {
  SideStream *side = &cuda_state(backend)->concurrent[kind];
  cuda_check(cudaEventRecord(side->done[side->count % ASYNC_EVENTS], side->stream), "recording an event");
  side->count++;
}

void side_join(Backend *backend, StreamKind kind, cudaStream_t later, int64_t behind) {
  const SideStream *side = &cuda_state(backend)->concurrent[kind];
  if (side->count <= behind) return;
  cudaEvent_t done = side->done[(side->count - 1 - behind) % ASYNC_EVENTS];
  cuda_check(cudaStreamWaitEvent(later, done, 0), "letting a stream wait");
}

void side_destroy(SideStream *side) {
  if (!side->stream) return;
  for (cudaEvent_t event : side->done) cudaEventDestroy(event);
  cudaEventDestroy(side->before);
  cudaStreamDestroy(side->stream);
}

// Copies beside the kernels: each direction has a copy engine and a stream.
static void copy(Backend *backend, StreamKind kind, const Copy *a) {
  cudaStream_t stream = side_begin(backend, kind);
  if (a->after_out) side_join(backend, STREAM_COPY_OUT, stream, a->behind);
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

void cuda_fill_zero(Backend *backend, const Tensor *t) {
  cuda_check(cudaMemsetAsync(t->data, 0, tensor_bytes(*t), cuda_stream(backend)), "filling with zero");
}
