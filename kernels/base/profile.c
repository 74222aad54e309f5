// A table of operations that calls the backend's own between two events, which profile_collect reads. An
// operation on a stream of its own has a third event there: it begins when the compute stream gets to the
// call and its own stream has done what it was given before.
#include "kernels/base/profile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/system.h"

// With what else takes time on the compute stream.
#define ALL(X)                                                                                               \
  OPERATIONS(X, X)                                                                                           \
  X(to_device, , COPIES) X(collectives_join, , COMMUNICATION) X(copies_join, , COPIES)

#define ENTRY(name, Arguments, group) OP_##name,
enum { ALL(ENTRY) OP_step };
#undef ENTRY
#define ENTRY(name, Arguments, group) {#name, PROFILE_##group},
static const struct {
  const char *name;
  ProfileGroup group;
} operations[] = {ALL(ENTRY){"step", PROFILE_IDLE}};
#undef ENTRY

// What an operation computes and moves.
typedef struct {
  double flops, bytes;
} Amount;

enum { BEGIN, END, OWN, MARKS }; // the first two on the compute stream

typedef struct {
  int op;
  ProfileGroup group;
  StreamKind stream;
  Amount amount;
  struct {
    void *event;
    double seconds; // where there are no events
  } marks[MARKS];
} Record;

typedef struct Profile {
  const BackendOps *wrapped;
  BackendOps ops;
  int phase;
  Record *records; // whose events are used again
  int64_t count, capacity;
  int64_t step; // the record of the step that has begun; -1: none
  ProfileTotals totals;
} Profile;

// --- operations --------------------------------------------------------------------------------------------

// False where the backend has no such stream.
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

static double gemm(Tensor rows, Tensor weight) {
  return 2.0 * (double)rows.shape[0] * (double)tensor_count(weight);
}

static double attention(AttentionShape s) { // Q K^T and P V, half of either
  return 2.0 * (double)(s.batch * s.num_heads * s.head_dim) * (double)s.seq_len * (double)s.seq_len;
}

static double bytes_of(Tensor t) {
  return tensor_exists(t) ? (double)tensor_bytes(t) : 0;
}

static double codes_bytes(Fp8 x) {
  return bytes_of(x.codes) + bytes_of(x.transposed);
}

static Amount amount_of(int op, const void *arguments) {
#define OF(name, Arguments, flops, bytes)                                                                    \
  case OP_##name: {                                                                                          \
    const Arguments *a = arguments;                                                                          \
    return (Amount){flops, bytes};                                                                           \
  }
  switch (op) {
    OF(linear_forward, LinearForward, gemm(a->x, a->weight), 0)
    OF(linear_backward_input, LinearBackwardInput, gemm(a->dout, a->weight), 0)
    OF(linear_backward_weight, LinearBackwardWeight, gemm(a->dout, a->dweight), 0)
    OF(sum_columns, SumColumns, 0, bytes_of(a->x))
    OF(matmul_fp8, MatmulFp8, gemm(a->a.codes, a->b.codes), 0)
    OF(lce_logits_exp, LceLogitsExp, gemm(a->x, a->weight) * (1 + tensor_exists(a->dx_raw)), 0)
    OF(lce_sampled_gradients, LceSampledGradients, gemm(a->exps, a->weight) * (1 + tensor_exists(a->dweight)),
       0)
    OF(attention_forward, AttentionForward, attention(a->shape), 0)
    OF(attention_backward, AttentionBackward, 2.5 * attention(a->shape), 0)
    OF(norm_forward, NormForward, 0, bytes_of(a->x) + bytes_of(a->out) + bytes_of(a->residual))
    OF(norm_backward, NormBackward, 0,
       bytes_of(a->dx) * (1 + a->accumulate_dx) + bytes_of(a->dout) + bytes_of(a->x))
    OF(activation_forward, ActivationForward, 0, bytes_of(a->x) + bytes_of(a->out) + codes_bytes(a->fp8))
    OF(activation_backward, ActivationBackward, 0,
       bytes_of(a->x) + bytes_of(a->dx) + bytes_of(a->dout) + codes_bytes(a->fp8))
    OF(rope, Rope, 0, 2 * bytes_of(a->qkv))
    OF(quantize, Quantize, 0, bytes_of(a->x) * (1 + !a->out.amax_known) + codes_bytes(a->out))
    OF(quantize_rows, QuantizeRows, 0, bytes_of(a->x) + bytes_of(a->out.codes))
    OF(adamw, Update, 0,
       bytes_of(a->grad) + 2 * (bytes_of(a->weight) + bytes_of(a->master) + bytes_of(a->m) + bytes_of(a->v)))
    OF(nesterov, Update, 0, bytes_of(a->grad) + 2 * bytes_of(a->m) + bytes_of(a->weight))
    OF(batched_gemm, BatchedGemm,
       (double)a->count * gemm(a->out.first, a->left_transposed ? a->left.first : a->right.first), 0)
    OF(sgd, Update, 0, bytes_of(a->grad) + 2 * (bytes_of(a->weight) + bytes_of(a->master)))
    OF(sum_elements, SumElements, 0, bytes_of(a->x))
    OF(fill_zero, Tensor, 0, bytes_of(*a))
    OF(all_reduce, Collective, 0, bytes_of(a->x))
    OF(reduce_scatter, Collective, 0, bytes_of(a->x))
    OF(all_gather, Collective, 0, bytes_of(a->out))
    OF(broadcast_rank_0, Collective, 0, bytes_of(a->x))
    OF(copy_in, Copy, 0, bytes_of(a->x))
    OF(copy_out, Copy, 0, bytes_of(a->x))
  default:
    return (Amount){0};
  }
#undef OF
}

static StreamKind stream_of(int op) {
  if (op == OP_copy_in) return STREAM_COPY_IN;
  if (op == OP_copy_out) return STREAM_COPY_OUT;
  return operations[op].group == PROFILE_COMMUNICATION ? STREAM_COLLECTIVES : STREAM_COMPUTE;
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
  PROFILED(name, stream_of(OP_##name), a, (backend, a), const Arguments *a)
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
      const Record *before = last[r->stream];
      own = between(p->wrapped, r, BEGIN, r, OWN);
      if (before) own = fmin(own, between(p->wrapped, before, OWN, r, OWN));
      last[r->stream] = r;
    }
    bool step = r->op == OP_step;
    t->steps += step;
    t->step_seconds += step ? seconds : 0;
    t->groups[PROFILE_IDLE].seconds += step ? seconds : -seconds;
    if (step) continue;
    t->groups[r->group].calls += r->op < OP_collectives_join; // to wait is no call
    t->groups[r->group].seconds += seconds;
    t->groups[r->group].own_seconds += own;
    t->groups[r->group].flops += r->amount.flops;
    t->groups[r->group].bytes += r->amount.bytes;
  }
  p->count = 0;
  return t;
}

double gpu_peak_flops(const char *name) {
  // Without sparsity, from NVIDIA's data sheets of A100, L40S, H100, H200, HGX B200 and GB200 NVL72, and its
  // whitepaper on Ada. The first row that is part of the name counts.
  static const struct {
    const char *part;
    double teraflops;
  } peaks[] = {{"MIG", NAN},       {"Laptop", NAN},   {"4090 D", NAN},   {"H100 PCIe", 756},
               {"H800 PCIe", 756}, {"H100 NVL", 835}, {"H200 NVL", 835}, {"H100", 989},
               {"H200", 989},      {"H800", 989},     {"GB200", 2500},   {"B200", 2250},
               {"A100", 312},      {"A800", 312},     {"L40S", 362},     {"RTX 4090", 165}};
  for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
    if (strstr(name, peaks[i].part)) return 1e12 * peaks[i].teraflops;
  return NAN;
}
