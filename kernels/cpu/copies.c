// Copies between the device and the host's memory, which are one on the CPU: nothing is saved, and everything can be tested.
//
// As asynchronous collectives do, copies run when they are joined: a caller that reads what is still to be copied, or
// overwrites what is copied from, gets wrong results every time.
#include <stdlib.h>

#include "base/alloc.h"
#include "base/system.h"
#include "kernels/cpu/cpu.h"

typedef struct {
  bool out, is_update;
  Copy copy;
  AdamW update;
} QueuedCopy;

// In the order of the calls.
struct CpuCopies {
  QueuedCopy *queue;
  int64_t count, capacity;
};

static void enqueue(Backend *backend, QueuedCopy queued) {
  CpuState *state = backend->state;
  if (!state->copies) state->copies = host_alloc(1, sizeof *state->copies, "copies");
  struct CpuCopies *c = state->copies;
  c->queue = host_grow(c->queue, c->count, &c->capacity, sizeof *c->queue, "copies");
  c->queue[c->count++] = queued;
}

static void run(Backend *backend, const QueuedCopy *q) {
  if (q->is_update)
    cpu_adamw(backend, &q->update);
  else
    copy_bytes(q->copy.out.data, q->copy.x.data, tensor_bytes(q->copy.x));
}

void cpu_copy_in(Backend *backend, const Copy *a) {
  enqueue(backend, (QueuedCopy){.copy = *a});
}

void cpu_adamw_later(Backend *backend, AdamW a) {
  a.async = false;
  enqueue(backend, (QueuedCopy){.is_update = true, .update = a});
}

void cpu_copy_out(Backend *backend, const Copy *a) {
  enqueue(backend, (QueuedCopy){.out = true, .copy = *a});
}

void cpu_copies_join(Backend *backend, int64_t in, int64_t out) {
  struct CpuCopies *c = ((CpuState *)backend->state)->copies;
  if (!c) return;
  int64_t done = c->count; // those before it run, and with them what they wait for
  while (done && (c->queue[done - 1].out ? out-- : in--) > 0) done--;
  for (int64_t i = 0; i < done; i++) run(backend, &c->queue[i]);
  for (int64_t i = done; i < c->count; i++) c->queue[i - done] = c->queue[i];
  c->count -= done;
}

void cpu_copies_end(Backend *backend) {
  struct CpuCopies *c = ((CpuState *)backend->state)->copies;
  if (c) free(c->queue);
  free(c);
}
