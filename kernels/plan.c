// The plan: a backend that computes nothing. The entry points check and push as for any backend, onto a
// memory that only counts, so a training step through it gives exactly what the step needs. Every operation
// moves the clock of its stream by the time that it takes a GPU (cost.h), which gives the step's duration.
#include <math.h>
#include <stdio.h>

#include "kernels/cost.h"

// A stream's time, and when the last asynchronous operations on it end.
typedef struct {
  double now, ends[ASYNC_EVENTS];
  int64_t count;
} Clock;

typedef struct {
  const Card *card;
  Clock clocks[STREAMS];
} Plan;

// When the operations on a stream end, but the last `behind`.
static double end_of(const Plan *p, StreamKind stream, int64_t behind) {
  const Clock *c = &p->clocks[stream];
  return c->count > behind ? c->ends[(c->count - 1 - behind) % ASYNC_EVENTS] : 0;
}

static void wait_for(Plan *p, StreamKind stream, int64_t behind) {
  double *now = &p->clocks[STREAM_COMPUTE].now;
  *now = fmax(*now, end_of(p, stream, behind));
}

static void run(Backend *backend, int op, const void *arguments) {
  Plan *p = backend->state;
  StreamKind stream = stream_of(op, arguments);
  Clock *c = &p->clocks[stream];
  double begin = fmax(c->now, p->clocks[STREAM_COMPUTE].now);
  const Copy *copy = arguments;
  if (op == OP_copy_in && copy->after_out) begin = fmax(begin, end_of(p, STREAM_COPY_OUT, copy->behind));
  if (op == OP_adamw && stream == STREAM_COPY_OUT) begin = fmax(begin, end_of(p, STREAM_COPY_IN, 0));
  c->now = begin + cost_seconds(p->card, backend, op, arguments);
  if (stream == STREAM_COMPUTE) return;
  c->ends[c->count++ % ASYNC_EVENTS] = c->now;
  if (stream == STREAM_COLLECTIVES && !((const Collective *)arguments)->async) wait_for(p, stream, 0);
}

#define ENTRY(name, Arguments, group)                                                                        \
  static void plan_##name(Backend *backend, const Arguments *a) {                                            \
    run(backend, OP_##name, a);                                                                              \
  }
OPERATIONS(ENTRY, ENTRY)
#undef ENTRY

static void plan_collectives_join(Backend *backend, int64_t behind) {
  wait_for(backend->state, STREAM_COLLECTIVES, behind);
}

static void plan_copies_join(Backend *backend, int64_t in, int64_t out) {
  wait_for(backend->state, STREAM_COPY_IN, in);
  wait_for(backend->state, STREAM_COPY_OUT, out);
}

Backend *plan_backend_create(DeviceKind device, Dtype dtype) {
#define MEMBER(name, Arguments, group) .name = plan_##name,
  static const BackendOps ops = {OPERATIONS(MEMBER, MEMBER).collectives_join = plan_collectives_join,
                                 .copies_join = plan_copies_join};
#undef MEMBER
  Backend *backend =
      backend_begin(&ops, device == ON_CUDA ? &cuda_scratch : &cpu_scratch, device, dtype, sizeof(Plan));
  snprintf(backend->description, sizeof backend->description, "plan for %s", device_name(device));
  backend->memory = memory_create(NULL);
  if (backend->scratch->resident_bytes)
    memory_reserve(&backend->memory, "GEMM workspace", MEMORY_WORKSPACE, backend->scratch->resident_bytes);
  return backend_finish(backend);
}

void plan_join_ranks(Backend *plan, int ranks) {
  plan->ranks = ranks;
  if (ranks > 1 && plan->scratch->ranks_bytes)
    memory_reserve(&plan->memory, "shares of gradients", MEMORY_GRADIENTS, plan->scratch->ranks_bytes);
}

void plan_set_card(Backend *plan, const Card *card) {
  ((Plan *)plan->state)->card = card;
}

double plan_seconds(const Backend *plan) {
  const Plan *p = plan->state;
  return p->clocks[STREAM_COMPUTE].now;
}
