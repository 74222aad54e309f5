// Copies and collectives, asynchronous on a GPU, wait in a queue on the CPU until they are joined.
#include "kernels/base/alloc.h"
#include "kernels/base/system.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ranks/ranks.h"

void cpu_defer(Backend *backend, Deferred deferred) {
  CpuState *state = backend->state;
  state->queue =
      host_grow(state->queue, state->queued, &state->capacity, sizeof *state->queue, "what is to be joined");
  state->queue[state->queued++] = deferred;
}

void cpu_join(Backend *backend, StreamKind stream, int64_t behind, StreamKind other, int64_t other_behind) {
  CpuState *state = backend->state;
  int64_t left[STREAMS] = {0}, end = state->queued, kept = 0;
  left[other] = other_behind, left[stream] = behind;
  for (; end > 0; end--) {
    StreamKind of = state->queue[end - 1].stream;
    if ((of == stream || of == other) && left[of]-- <= 0) break;
  }
  for (int64_t i = 0; i < state->queued; i++) {
    Deferred *d = &state->queue[i];
    if (i < end && (d->stream == stream || d->stream == other)) {
      ranks_enter(d->name);
      d->run(backend, d);
      ranks_leave();
    } else {
      state->queue[kept++] = *d;
    }
  }
  state->queued = kept;
}

static void run_copy(Backend *backend, const Deferred *d) {
  copy_bytes(d->copy.out.data, d->copy.x.data, tensor_bytes(d->copy.x));
}

void cpu_copy_in(Backend *backend, const Copy *a) {
  cpu_defer(backend, (Deferred){"copy_in", STREAM_COPY_IN, run_copy, .copy = *a});
}

void cpu_copy_out(Backend *backend, const Copy *a) {
  cpu_defer(backend, (Deferred){"copy_out", STREAM_COPY_OUT, run_copy, .copy = *a});
}

void cpu_copies_join(Backend *backend, int64_t in, int64_t out) {
  cpu_join(backend, STREAM_COPY_IN, in, STREAM_COPY_OUT, out);
}
