// The host's memory, and copies between it and the device's beside the kernels.
//
// Pages are pinned and have one address for the host and the device. So what is touched once in a step (AdamW's state, an
// embedding's rows) needs no copy: kernels access it over PCIe. What is read more often is copied by the copy engines, of
// which there is one for each direction, with a stream for each. The host never waits.
#include "kernels/cuda/cuda_common.cuh"

struct CudaCopies {
  enum { EVENTS = 64 };
  struct Queue {
    cudaStream_t stream;
    cudaEvent_t done[EVENTS]; // done[i % EVENTS]: copy i
    int64_t count;
  } in, out;
  cudaEvent_t before; // what was queued before the latest copy
};

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

static void create(CudaState *state) {
  CudaCopies *c = state->copies = new CudaCopies();
  cuda_check(cudaEventCreateWithFlags(&c->before, cudaEventDisableTiming), "creating an event");
  for (CudaCopies::Queue *queue : {&c->in, &c->out}) {
    cuda_check(cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking), "creating a stream");
    for (cudaEvent_t &event : queue->done)
      cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  }
  state->concurrent[STREAM_COPY_IN] = c->in.stream;
  state->concurrent[STREAM_COPY_OUT] = c->out.stream;
}

// `later` waits for all copies of the queue but the last `behind`.
static void wait_for(cudaStream_t later, CudaCopies::Queue *queue, int64_t behind) {
  if (queue->count <= behind) return;
  cudaEvent_t done = queue->done[(queue->count - 1 - behind) % CudaCopies::EVENTS];
  cuda_check(cudaStreamWaitEvent(later, done, 0), "queueing a wait");
}

// What is queued next waits for the operations before it.
static void begin(CudaState *state, CudaCopies::Queue *queue) {
  cudaEvent_t before = state->copies->before;
  cuda_check(cudaEventRecord(before, state->stream), "recording an event");
  cuda_check(cudaStreamWaitEvent(queue->stream, before, 0), "queueing a wait");
}

static void end(CudaCopies::Queue *queue) {
  cuda_check(cudaEventRecord(queue->done[queue->count++ % CudaCopies::EVENTS], queue->stream),
             "recording an event");
}

static void copy(CudaState *state, CudaCopies::Queue *queue, const Copy *a) {
  begin(state, queue);
  if (a->after_out) wait_for(queue->stream, &state->copies->out, 0);
  cuda_check(cudaMemcpyAsync(a->out.data, a->x.data, tensor_bytes(a->x), cudaMemcpyDefault, queue->stream),
             "copying between the host and the device");
  end(queue);
}

static CudaCopies *copies_of(Backend *backend) {
  CudaState *state = cuda_state(backend);
  if (!state->copies) create(state);
  return state->copies;
}

void cuda_copy_in(Backend *backend, const Copy *a) {
  copy(cuda_state(backend), &copies_of(backend)->in, a);
}

void cuda_copy_out(Backend *backend, const Copy *a) {
  copy(cuda_state(backend), &copies_of(backend)->out, a);
}

cudaStream_t copy_in_begin(Backend *backend) {
  CudaCopies *c = copies_of(backend);
  begin(cuda_state(backend), &c->in);
  return c->in.stream;
}

void copy_in_end(Backend *backend) {
  end(&copies_of(backend)->in);
}

void cuda_copies_join(Backend *backend, int64_t in, int64_t out) {
  CudaState *state = cuda_state(backend);
  if (!state->copies) return;
  wait_for(state->stream, &state->copies->in, in);
  wait_for(state->stream, &state->copies->out, out);
}

void cuda_copies_end(Backend *backend) {
  CudaCopies *c = cuda_state(backend)->copies;
  if (!c) return;
  for (CudaCopies::Queue *queue : {&c->in, &c->out}) {
    for (cudaEvent_t event : queue->done) cudaEventDestroy(event);
    cudaStreamDestroy(queue->stream);
  }
  cudaEventDestroy(c->before);
  delete c;
}
