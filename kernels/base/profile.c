// A table of operations that calls the backend's own between two events, which profile_collect reads. An
// operation on a stream of its own has a third event there: it begins when the compute stream gets to the
// call and its own stream has done what it was given before; AdamW there, when the copies in have, too.
#include "kernels/base/profile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/system.h"

// The operations, and all else that takes time on the compute stream.
#define ALL(X)                                                                                               \
  OPERATIONS(X, X)                                                                                           \
  X(to_device, , COPIES) X(collectives_join, , COMMUNICATION) X(copies_join, , COPIES)

enum { OP_to_device = OPERATION_COUNT, OP_collectives_join, OP_copies_join, OP_step };
#define ENTRY(name, Arguments, group) {#name, PROFILE_##group},
static const struct {
  const char *name;
  ProfileGroup group;
} operations[] = {ALL(ENTRY){"step", PROFILE_IDLE}};
#undef ENTRY

enum { BEGIN, END, OWN, MARKS }; // the first two on the compute stream

typedef struct {
  int op;
  ProfileGroup group;
  StreamKind stream;
  Amount amount;
  struct {
    void *event;
    double seconds; // without events
  } marks[MARKS];
} Record;

typedef struct Profile {
  const BackendOps *wrapped;
  BackendOps ops;
  int phase;
  Record *records; // their events are reused
  int64_t count, capacity;
  int64_t step; // the record of the step that has begun; -1: none
  ProfileTotals totals;
} Profile;

// --- operations --------------------------------------------------------------------------------------------

// False if the backend has no such stream.
static bool mark(Backend *backend, Record *r, int which, StreamKind stream) {
  const BackendOps *ops = backend->profile->wrapped;
  if (ops->event_record) return ops->event_record(backend, &r->marks[which].event, stream);
  r->marks[which].seconds = now_seconds();
  return stream == STREAM_COMPUTE;
}

static double between(const BackendOps *ops, const Record *from, int begin, const Record *to, int end) {
  return ops->event_seconds ? ops->event_seconds(from->marks[begin].event, to->marks[end].event)
                            : to->marks[end].seconds - from->marks[begin].seconds;
}

static void range(const Profile *p, const char *name) {
  if (p->wrapped->range) p->wrapped->range(name);
}

static const BackendOps *enter(Backend *backend, int op, const void *arguments) {
  Profile *p = backend->profile;
  range(p, operations[op].name);
  if (op != OP_step && p->step < 0) return p->wrapped;
  int64_t old = p->capacity;
  p->records = host_grow(p->records, p->count, &p->capacity, sizeof *p->records, "the profile");
  memset(p->records + old, 0, (size_t)(p->capacity - old) * sizeof *p->records);
  Record *r = &p->records[p->count++];
  bool in_loss = p->phase == PHASE_LOSS && operations[op].group < PROFILE_COMMUNICATION;
  r->op = op, r->group = in_loss ? PROFILE_HEAD_LOSS : operations[op].group, r->stream = STREAM_COMPUTE;
  r->amount = amount_of(op, arguments);
  mark(backend, r, BEGIN, STREAM_COMPUTE);
  return p->wrapped;
}

static void leave(Backend *backend, StreamKind stream) {
  Profile *p = backend->profile;
  range(p, NULL);
  if (p->step < 0) return;
  Record *r = &p->records[p->count - 1];
  if (stream != STREAM_COMPUTE && mark(backend, r, OWN, stream)) r->stream = stream;
  mark(backend, r, END, STREAM_COMPUTE);
}

#define PROFILED(name, stream, structure, arguments, ...)                                                    \
  static void profiled_##name(Backend *backend, __VA_ARGS__) {                                               \
    enter(backend, OP_##name, structure)->name arguments;                                                    \
    leave(backend, stream);                                                                                  \
  }
#define ENTRY(name, Arguments, group)                                                                        \
  PROFILED(name, stream_of(OP_##name, a), a, (backend, a), const Arguments *a)
OPERATIONS(ENTRY, ENTRY)
#undef ENTRY
PROFILED(to_device, STREAM_COMPUTE, NULL, (backend, to, host), Tensor to, const void *host)
PROFILED(collectives_join, STREAM_COMPUTE, NULL, (backend, behind), int64_t behind)
PROFILED(copies_join, STREAM_COMPUTE, NULL, (backend, in, out), int64_t in, int64_t out)

// --- life --------------------------------------------------------------------------------------------------

void profile_begin(Backend *backend) {
  Profile *p = backend->profile = host_alloc(1, sizeof *p, "the profile");
  p->wrapped = backend->ops;
  p->step = -1;
  p->ops = *backend->ops;
#define ENTRY(name, Arguments, group) p->ops.name = profiled_##name;
  ALL(ENTRY)
#undef ENTRY
#define GROUP(group, text) p->totals.groups[PROFILE_##group].name = text;
  PROFILE_GROUPS(GROUP)
#undef GROUP
  backend->ops = &p->ops;
}

void profile_end(Backend *backend) {
  Profile *p = backend->profile;
  if (!p) return;
  for (int64_t i = 0; i < p->capacity * MARKS; i++) {
    void *event = p->records[i / MARKS].marks[i % MARKS].event;
    if (event) p->wrapped->event_destroy(event);
  }
  backend->ops = p->wrapped;
  backend->profile = NULL;
  free(p->records);
  free(p);
}

void profile_phase(Backend *backend, int phase) {
  static const char *const names[] = {NULL, "validation", NULL, "forward", "loss", "backward", "update"};
  Profile *p = backend->profile;
  if (!p || (phase > PHASE_STEP && p->step < 0)) return;
  if (names[p->phase]) range(p, NULL);
  if (names[phase]) range(p, names[phase]);
  p->phase = phase;
  if (phase == PHASE_STEP) {
    enter(backend, OP_step, NULL);
    p->step = p->count - 1;
  } else if (phase == PHASE_NONE && p->step >= 0) {
    range(p, NULL);
    mark(backend, &p->records[p->step], END, STREAM_COMPUTE);
    p->step = -1;
  }
}

const ProfileTotals *profile_collect(Backend *backend) {
  Profile *p = backend->profile;
  if (!p) return NULL;
  ProfileTotals *t = &p->totals;
  const Record *last[STREAMS] = {0};
  for (const Record *r = p->records; r < p->records + p->count; r++) {
    double seconds = between(p->wrapped, r, BEGIN, r, END), own = 0;
    if (r->stream != STREAM_COMPUTE) {
      const Record *before = last[r->stream], *copied = r->op == OP_adamw ? last[STREAM_COPY_IN] : NULL;
      own = between(p->wrapped, r, BEGIN, r, OWN);
      if (before) own = fmin(own, between(p->wrapped, before, OWN, r, OWN));
      if (copied) own = fmin(own, between(p->wrapped, copied, OWN, r, OWN));
      last[r->stream] = r;
    }
    bool step = r->op == OP_step;
    t->steps += step;
    t->step_seconds += step ? seconds : 0;
    t->groups[PROFILE_IDLE].seconds += step ? seconds : -seconds;
    if (step) continue;
    t->groups[r->group].calls += r->op < OP_collectives_join; // waiting is no call
    t->groups[r->group].seconds += seconds;
    t->groups[r->group].own_seconds += own;
    t->groups[r->group].flops += r->amount.flops;
    t->groups[r->group].bytes += r->amount.bytes;
  }
  p->count = 0;
  return t;
}
