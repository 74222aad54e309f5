#include "tools/torch/liblce/liblce.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/base/text.h"
#include "tools/torch/liblce/blas/found_blas.h"
#include "tools/torch/liblce/divergence.h"
#include "tools/torch/liblce/ids.h"
#include "tools/torch/liblce/log_probs.h"
#include "tools/torch/liblce/operations.h"

#define EXPORTED __attribute__((visibility("default")))

struct lce_context {
  Backend *backend;
  BackendOps ops; // the backend's; after lce_join but for collectives, for batch_invariant but for some
  void *handed;   // between the backend's stream and the caller's
  lce_collective collective; // the caller's, on the stream of the call
  void *user, *stream;
  Backend *plan; // checks each call before the backend begins with it
  bool queued;   // the call has begun to give the device work
  size_t held_bytes;
};

// --- errors ------------------------------------------------------------------------------------------------
// fail() ends a program; within a call, and in its thread alone, the sentence is kept and the call returns.

// A call under way, on its function's stack. Its collective may call the library too, with another context.
typedef struct Frame {
  jmp_buf caller;
  FailHandler outside; // the thread's handler, which the call replaces
  lce_context *context;
  struct Frame *around; // the call whose collective made this one
  const char *name;     // of the function that was called
} Frame;

static _Thread_local Frame *frame; // the innermost
static _Thread_local char last_error[2048];

static void keep_sentence(const char *sentence) {
  snprintf(last_error, sizeof last_error, "%s", sentence);
  longjmp(frame->caller, 1);
}

static void enter(Frame *call) {
  call->around = frame;
  call->outside = fail_set_thread_handler(keep_sentence);
  frame = call;
}

static int leave(int status) {
  fail_set_thread_handler(frame->outside);
  frame = frame->around;
  return status;
}

// True where this call runs inside a collective of another call of the same context.
static bool in_use(void) {
  for (const Frame *f = frame->around; f; f = f->around)
    if (f->context == frame->context) return true;
  return false;
}

// After a failure: waits until the device is done with tensors and stack, or destroys the backend that was
// not finished. The first error stays the last one.
static int failed(void) {
  lce_context *context = frame->context;
  if (in_use()) return leave(1);
  char first[sizeof last_error];
  memcpy(first, last_error, sizeof first);
  if (!setjmp(frame->caller)) {
    backend_abandon();
    if (context->queued) backend_synchronize(context->backend);
  }
  memcpy(last_error, first, sizeof first);
  context->queued = false;
  if (context->backend) memory_pop_to(&context->backend->memory, 0);
  if (context->plan) memory_pop_to(&context->plan->memory, 0);
  return leave(1);
}

static bool is_open(const lce_context *context) {
  if (!context)
    snprintf(last_error, sizeof last_error,
             "the context is NULL: lce_create returned NULL, and lce_last_error gave the reason");
  return context;
}

// A call begins with this and ends with leave(0) or end_planned; where it fails between them it returns 1.
#define ENTER(of)                                                                                            \
  if (!is_open(of)) return 1;                                                                                \
  Frame entered = {.context = of, .name = __func__};                                                         \
  enter(&entered);                                                                                           \
  if (setjmp(entered.caller)) return failed()

// The plan to run the call on before it starts: it checks all that the backend does, and counts the bytes.
static Backend *plan_of(lce_context *context, bool fixed_order) {
  batch_invariant(context->backend, &context->ops, context->plan->fixed_order = fixed_order);
  ledger_reset_peak(&context->plan->memory.ledger);
  return context->plan;
}

// Between these the call gives the device work, in its place on the caller's stream.
static void start(lce_context *context, void *stream) {
  if (in_use())
    fail("the context is in use by the call that this collective is part of; give the collective its own");
  context->queued = true;
  context->stream = stream;
  backend_follow(context->backend, stream,
                 &context->handed); // first of all: it refuses another device's thread
}

static void end(lce_context *context) {
  backend_precede(context->backend, context->stream, &context->handed);
  context->queued = false;
}

// The same for a call that has been planned; returns the bytes that it holds.
static size_t start_planned(lce_context *context, void *stream) {
  Backend *backend = context->backend;
  size_t bytes = context->plan->memory.ledger.stack_peak;
  start(context, stream);
  if (bytes > backend->memory.stack_capacity) {
    backend_synchronize(backend); // earlier calls may still use the stack that goes
    memory_set_stack(&backend->memory, bytes);
  }
  return bytes;
}

static int end_planned(lce_context *context, size_t bytes) {
  end(context);
  context->held_bytes = bytes;
  return leave(0);
}

EXPORTED const char *lce_last_error(void) {
  return last_error;
}

// --- contexts ----------------------------------------------------------------------------------------------

static Backend *open_backend(const char *device, int ordinal, const char *dtype) {
  if (!device || !dtype)
    fail("lce_create: device or dtype is NULL; give \"cpu\" and \"fp32\", or \"cuda\" and \"bf16\" or "
         "\"fp32\"");
  bool fp32 = !strcmp(dtype, "fp32");
  if (!fp32 && strcmp(dtype, "bf16") != 0)
    fail("lce_create: dtype is \"%.40s\", which is neither \"bf16\" nor \"fp32\"", dtype);
  if (!strcmp(device, "cpu")) {
    if (!fp32) fail("lce_create: the CPU computes in fp32 only; give \"fp32\" as its dtype");
#ifdef FOUND_BLAS
    return cpu_backend_create(!found_blas());
#else
    return cpu_backend_create(false);
#endif
  }
  if (strcmp(device, "cuda") != 0)
    fail("lce_create: device is \"%.40s\", which is neither \"cpu\" nor \"cuda\"", device);
  const char *reason = NULL;
  Backend *backend = cuda_backend_create(ordinal, fp32 ? DTYPE_F32 : DTYPE_BF16, &reason);
  if (!backend) fail("lce_create: there is no CUDA device to use: %s", reason);
  return backend;
}

static int open_context(lce_context *context, const char *device, int ordinal, const char *dtype) {
  ENTER(context);
  Backend *backend = context->backend = open_backend(device, ordinal, dtype);
  context->ops = *backend->ops;
  backend->ops = &context->ops;
  context->plan = plan_backend_create(backend->device, backend->dtype);
  context->plan->no_sampling = backend->no_sampling;
  memory_set_advice("a smaller chunk, or fewer tokens in one call, needs less");
  return leave(0);
}

EXPORTED lce_context *lce_create(const char *device, int ordinal, const char *dtype) {
  lce_context *context = calloc(1, sizeof *context);
  if (!context) {
    snprintf(last_error, sizeof last_error, "lce_create: out of host memory for a context");
    return NULL;
  }
  if (open_context(context, device, ordinal, dtype) == 0) return context;
  free(context);
  return NULL;
}

static int close_backend(lce_context *context) {
  ENTER(context);
  Backend *backend = context->backend;
  context->backend = NULL;
  hand_over_end(backend, &context->handed);
  backend_destroy(backend);
  return leave(0);
}

EXPORTED void lce_destroy(lce_context *context) {
  if (!context) return;
  close_backend(context);
  backend_destroy(context->plan);
  free(context);
}

EXPORTED int lce_synchronize(lce_context *context) {
  ENTER(context);
  backend_synchronize(context->backend);
  return leave(0);
}

EXPORTED int64_t lce_held_bytes(const lce_context *context) {
  return context ? (int64_t)context->held_bytes : 0;
}

// --- ranks -------------------------------------------------------------------------------------------------

static void exchange(Backend *backend, const Collective *a, lce_collective_kind kind) {
  lce_context *c = frame->context;
  int dtype = a->x.dtype == DTYPE_F32 ? 0 : a->x.dtype == DTYPE_BF16 ? 1 : 2;
  backend_precede(backend, c->stream, &c->handed);
  if (c->collective(c->user, (int)kind, a->out.data, a->x.data, tensor_count(a->x), dtype))
    fail("lce_linear_cross_entropy: the caller's collective failed on rank %d of %d", backend->rank,
         backend->ranks);
  backend_follow(backend, c->stream, &c->handed);
}

#define COLLECTIVE(name, kind)                                                                               \
  static void name##_by_caller(Backend *backend, const Collective *a) {                                      \
    exchange(backend, a, kind);                                                                              \
  }
COLLECTIVE(all_reduce, LCE_ALL_REDUCE)
COLLECTIVE(reduce_scatter, LCE_REDUCE_SCATTER)
COLLECTIVE(all_gather, LCE_ALL_GATHER)

EXPORTED int lce_join(lce_context *context, int rank, int ranks, lce_collective collective, void *user) {
  ENTER(context);
  if (rank < 0 || rank >= ranks || !collective)
    fail("lce_join: rank %d of %d%s; ranks count from 0", rank, ranks,
         collective ? "" : ", and collective is NULL");
  Backend *backend = context->backend;
  context->collective = collective;
  context->user = user;
  context->ops.collectives_join = NULL; // nothing is left running
  context->ops.all_reduce = all_reduce_by_caller;
  context->ops.reduce_scatter = reduce_scatter_by_caller;
  context->ops.all_gather = all_gather_by_caller;
  backend->rank = rank;
  backend->ranks = context->plan->ranks = ranks;
  return leave(0);
}

// --- what a call may request  ------------------------------------------------------------------------------

#define CALL "lce_linear_cross_entropy"

// Targets and the kernels count in 32 bits, a little beyond the end of a row too.
static const int64_t MAX_SIZE = INT32_MAX - 65535;
// More than the addresses of a machine reach; sums and small multiples of it still fit into 64 bits.
static const int64_t MAX_BYTES = INT64_C(1) << 47;

// A tensor of the call, and where it goes.
typedef struct {
  const char *name;
  const void *data;      // NULL: absent
  int64_t rows, columns; // columns 0: a vector
  Dtype dtype;
  bool written;
  Tensor *tensor;
} Argument;

static int64_t bytes_of(const Argument *t) {
  return t->rows * max_i64(t->columns, 1) * (int64_t)dtype_bytes(t->dtype);
}

static void check_size(const char *name, int64_t size) {
  if (size < 1)
    fail("%s: %s is %lld, but tokens, hidden_size and vocab_size must be 1 or more", frame->name, name,
         (long long)size);
  if (size > MAX_SIZE)
    fail("%s: %s is %lld, and sizes are counted in 32 bits; at most %lld can be", frame->name, name,
         (long long)size, (long long)MAX_SIZE);
}

static void check_bytes(const char *name, int64_t rows, int64_t columns, Dtype dtype, const char *remedy) {
  if (rows > MAX_BYTES / ((int64_t)dtype_bytes(dtype) * columns))
    fail("%s: %s of %lld by %lld elements of %zu bytes would take more than the %s that a machine can "
         "address; %s",
         frame->name, name, (long long)rows, (long long)columns, dtype_bytes(dtype),
         text_bytes((uint64_t)MAX_BYTES).text, remedy);
}

// The tensor has possible sizes and address, and shares nothing that is written with those `before` it.
static void check_argument(const Argument *t, const Argument *before) {
  check_bytes(t->name, t->rows, max_i64(t->columns, 1), t->dtype, "check the sizes of the call");
  uintptr_t at = (uintptr_t)t->data, bytes = (uintptr_t)bytes_of(t);
  if (at % dtype_bytes(t->dtype))
    fail("%s: %s lies at %p, which is no multiple of the %zu bytes of its elements; give an aligned copy",
         frame->name, t->name, t->data, dtype_bytes(t->dtype));
  if (bytes > UINTPTR_MAX - at)
    fail("%s: %s at %p would end beyond the last address; it is no pointer to %s", frame->name, t->name,
         t->data, text_bytes(bytes).text);
  for (const Argument *u = before; u < t; u++)
    if (u->data && (t->written || u->written) && at < (uintptr_t)u->data + (uintptr_t)bytes_of(u) &&
        (uintptr_t)u->data < at + bytes)
      fail("%s: %s and %s share memory, and at least one of them is written; give each its own", frame->name,
           u->name, t->name);
}

// Fills in the tensors that are given, of which the first `needed` must be.
static void take_arguments(const Argument *tensors, size_t count, int needed, const char *names) {
  for (const Argument *t = tensors; t < tensors + count; t++) {
    if (!t->data && t < tensors + needed)
      fail("%s: %s must be there, and %s is NULL", frame->name, names, t->name);
    if (!t->data) continue;
    check_argument(t, tensors);
    void *data = (void *)t->data;
    *t->tensor =
        t->columns ? tensor_2d(data, t->dtype, t->rows, t->columns) : tensor_1d(data, t->dtype, t->rows);
  }
}

static void check_sizes(int64_t tokens, int64_t hidden_size, int64_t vocab_size, int64_t chunk) {
  check_size("tokens", tokens);
  check_size("hidden_size", hidden_size);
  check_size("vocab_size", vocab_size);
  if (chunk < 0)
    fail("%s: a chunk of %lld tokens; give 1 or more, or 0 for one that the library chooses", frame->name,
         (long long)chunk);
}

// lce_args can name more at once than there is a function for.
static void check_combination(const lce_args *a, const LinearCrossEntropy *c) {
  bool capped_smoothing = a->softcap != 0 && a->label_smoothing != 0;
  if (capped_smoothing &&
      (a->sample != 0 || a->batch_invariant || a->rows || a->first_row || a->log_sum_sq_probs))
    fail(CALL ": label smoothing under a softcap excludes sample, batch_invariant, log_sum_sq_probs and a "
              "split head; "
              "leave one of them out");
  bool beyond = a->materialized || a->sample != 0 || a->label_smoothing != 0;
  bool outputs = tensor_exists(c->loss);
  for (size_t i = 0; i < sizeof c->outputs.all / sizeof *c->outputs.all; i++)
    outputs |= tensor_exists(c->outputs.all[i]);
  if (a->known_log_prob && outputs)
    fail(CALL ": with known_log_prob there are gradients alone; leave out loss and outputs");
  if (a->known_log_prob && beyond)
    fail(CALL ": with known_log_prob there is no label smoothing, sampling or materialized mode");
  if (a->known_log_prob && !a->entropy_weights != !a->known_entropy)
    fail(CALL
         ": with known_log_prob, entropy_weights and known_entropy belong together; give both or neither");
  if (a->known_entropy && !a->known_log_prob) fail(CALL ": known_entropy is there without known_log_prob");
  if (a->entropy_weights && !a->known_log_prob && !a->materialized)
    fail(CALL ": entropy_weights need known_log_prob and known_entropy, of a call without gradients, or the "
              "materialized mode");
}

// The call, checked but for what the functions that run() calls check. Its targets are the caller's ids.
// Without log_prob it is `call` alone, or with entropy_weights or kept.
static LogProbGradients checked_request(const lce_args *a, const Backend *backend) {
  Dtype dtype = backend->dtype;
  if (!a) fail(CALL ": args must be there");
  check_sizes(a->tokens, a->hidden_size, a->vocab_size, a->chunk);
  bool split = a->rows || a->first_row;
  if (a->rows) check_size("rows", a->rows);
  if (split && a->rows != a->vocab_size && backend->ranks == 1)
    fail(CALL ": weight is %lld rows of %lld, and no other rank has the rest; call lce_join first",
         (long long)a->rows, (long long)a->vocab_size);
  if (a->batch_invariant && (a->sample != 0 || a->materialized || split || a->exps))
    fail(CALL ": batch_invariant is there for a whole head, without sample, materialized and exps");
  if (!isfinite(a->scale)) fail(CALL ": scale is %g, which is not finite", (double)a->scale);
  LogProbGradients r = {0};
  LinearCrossEntropy *c = &r.call;
  *c = (LinearCrossEntropy){.mode = a->materialized ? LCE_MATERIALIZED : LCE_FUSED,
                            .chunk = a->chunk ? a->chunk : lce_default_chunk(backend->device, a->tokens),
                            .terms = {.label_smoothing = a->label_smoothing,
                                      .z_loss = a->z_loss,
                                      .softcap = a->softcap,
                                      .temperature = a->temperature},
                            .sampling = {.full_mass = a->sample, .seed = a->sample_seed},
                            .scale = a->scale,
                            .mean = a->mean,
                            .accumulate = a->accumulate};
  int64_t n = a->tokens, h = a->hidden_size, v = a->vocab_size, rows_of_head = split ? a->rows : v;
  if (split) c->shard = (VocabShard){.first = a->first_row, .vocab_size = v};
  const int needed = a->known_log_prob ? 3 : 4;                    // the first
  int64_t stride = round_up(v, 128 / (int64_t)dtype_bytes(dtype)); // of exps, which R follows
  uintptr_t sums = (uintptr_t)a->exps + (uintptr_t)n * (uintptr_t)stride * dtype_bytes(dtype);
  const Argument tensors[] = {
      {"x", a->x, n, h, dtype, false, &c->x},
      {"weight", a->weight, rows_of_head, h, dtype, false, &c->weight},
      {"targets", a->targets, n, 0, a->targets_int64 ? DTYPE_I64 : DTYPE_I32, false, &c->targets},
      {"loss", a->loss, n, 0, DTYPE_F32, true, &c->loss},
      {"bias", a->bias, rows_of_head, 0, dtype, false, &c->bias},
      {"class_weights", a->class_weights, v, 0, DTYPE_F32, false, &c->terms.class_weights},
      {"token_weights", a->token_weights, n, 0, DTYPE_F32, false, &c->token_weights},
      {"entropy_weights", a->entropy_weights, n, 0, DTYPE_F32, false, &r.entropy_weights},
      {"known_log_prob", a->known_log_prob, n, 0, DTYPE_F32, false, &r.log_prob},
      {"known_entropy", a->known_entropy, n, 0, DTYPE_F32, false, &r.entropy},
      {"exps", a->exps, n, stride, dtype, true, &r.kept.exps},
      {"the end of exps", a->exps ? (void *)sums : NULL, n, 0, DTYPE_F32, true, &r.kept.row_sum},
      {"dx", a->dx, n, h, dtype, true, &c->dx},
      {"dweight", a->dweight, rows_of_head, h, a->narrow_dweight ? dtype : DTYPE_F32, true, &c->dweight},
      {"dbias", a->dbias, rows_of_head, 0, DTYPE_F32, true, &c->dbias},
#define OUTPUT(name, type, ...) {#name, a->name, n, 0, DTYPE_##type, true, &c->outputs.name},
      TOKEN_OUTPUTS(OUTPUT)};
#undef OUTPUT
  take_arguments(tensors, sizeof tensors / sizeof *tensors, needed, "x, weight, targets and loss");
  if (a->exps) r.kept.exps = tensor_columns(r.kept.exps, 0, v);
  check_combination(a, c);
  check_bytes("the logits", a->materialized ? n : min_i64(c->chunk, n), v, DTYPE_F32,
              a->materialized ? "materialized = 0 holds a chunk of them" : "a smaller chunk holds less");
  return r;
}

// Fails at the first id neither in [0, V) nor IGNORE_INDEX. On CUDA waits for the caller's stream.
static void check_ids(Backend *backend, const char *name, Tensor ids, int64_t vocab_size) {
  enum { PART = 4096 };
  union {
    int64_t wide[PART];
    int32_t narrow[PART];
  } part;
  for (int64_t n = 0; n < ids.shape[0]; n++) {
    if (n % PART == 0) backend_to_host(backend, &part, tensor_rows(ids, n, min_i64(PART, ids.shape[0] - n)));
    int64_t id = ids.dtype == DTYPE_I64 ? part.wide[n % PART] : part.narrow[n % PART];
    if (id != IGNORE_INDEX && (id < 0 || id >= vocab_size))
      fail("%s: %s[%lld] is %lld, which is neither in [0, %lld) nor %d, which does not count", frame->name,
           name, (long long)n, (long long)id, (long long)vocab_size, IGNORE_INDEX);
  }
}

// --- the layer ---------------------------------------------------------------------------------------------

// The GEMMs read a factor of 0 as 1, so gradients that it makes 0 are written and not computed.
static void drop_gradients(Backend *backend, LinearCrossEntropy *call) {
  if (tensor_exists(call->dx)) fill_zero(backend, call->dx);
  if (tensor_exists(call->dweight) && !call->accumulate) fill_zero(backend, call->dweight);
  if (tensor_exists(call->dbias) && !call->accumulate) fill_zero(backend, call->dbias);
  call->dx = call->dweight = call->dbias = (Tensor){0};
}

static void run(Backend *backend, LogProbGradients r) {
  LinearCrossEntropy *a = &r.call;
  Tensor ids = a->targets;
  int64_t vocab_size = a->shard.vocab_size ? a->shard.vocab_size : a->weight.shape[0];
  MemoryMark mark = memory_mark(&backend->memory);
  a->targets = memory_push_1d(&backend->memory, "targets", MEMORY_HEAD, DTYPE_I32, ids.shape[0]);
  read_targets(backend, (ReadTargets){.targets = a->targets, .ids = ids, .vocab_size = vocab_size});
  if (a->scale == 0) drop_gradients(backend, a);
  if (tensor_exists(r.log_prob))
    log_prob_gradients(backend, r);
  else if (tensor_exists(r.kept.exps))
    keep_exponentials(backend, *a, r.kept);
  else if (tensor_exists(r.entropy_weights) || (a->terms.softcap > 0 && a->terms.label_smoothing > 0))
    loss_of_logits(backend, *a, r.entropy_weights);
  else
    linear_cross_entropy(backend, *a);
  if (tensor_exists(a->loss))
    read_targets(backend, (ReadTargets){.loss = a->loss, .ids = ids, .vocab_size = vocab_size});
  memory_pop_to(&backend->memory, mark);
}

static Tensor scaled_tensor(const char *name, const void *data, int dtype, int64_t count) {
  if (!data || (uintptr_t)data % (dtype ? 2 : 4))
    fail("lce_scale: %s is at %p, which is no address of its elements", name, data);
  if (dtype != 0 && dtype != 1) fail("lce_scale: %s has the dtype %d; 0 is fp32, 1 is bf16", name, dtype);
  return tensor_1d((void *)data, dtype ? DTYPE_BF16 : DTYPE_F32, count);
}

EXPORTED int lce_scale(lce_context *context, void *out, int out_dtype, const void *x, int x_dtype,
                       int64_t count, const float *factor, void *stream) {
  ENTER(context);
  if (count == 0) return leave(0);
  if (count < 0 || count > MAX_BYTES / 4) fail("lce_scale: a count of %lld elements", (long long)count);
  ScaleBy call = {.out = scaled_tensor("out", out, out_dtype, count),
                  .x = scaled_tensor("x", x, x_dtype, count),
                  .factor = scaled_tensor("factor", factor, 0, 1)};
  start(context, stream);
  scale_by(context->backend, call);
  end(context);
  return leave(0);
}

EXPORTED int lce_linear_cross_entropy(lce_context *context, const lce_args *args) {
  ENTER(context);
  Backend *backend = context->backend;
  const LogProbGradients request = checked_request(args, backend);
  LogProbGradients checked = request;
  if (request.call.scale == 0) checked.call.scale = 1; // checks the tensors of dropped gradients too
  run(plan_of(context, args->batch_invariant), checked);
  run(plan_of(context, args->batch_invariant), request);
  size_t bytes = start_planned(context, args->stream);
  if (args->check_targets > 0 || (args->check_targets == 0 && backend->device == ON_CPU))
    check_ids(backend, "targets", request.call.targets, args->vocab_size);
  run(backend, request);
  return end_planned(context, bytes);
}

// --- log-probabilities of given ids ------------------------------------------------------------------------

// The call, checked but for what run_ids checks. Its ids are the caller's; with dlog_probs it is the backward
// pass.
static IdLogProbs checked_ids(const lce_ids_args *a, const Backend *backend) {
  if (!a) fail("%s: args must be there", frame->name);
  check_sizes(a->tokens, a->hidden_size, a->vocab_size, a->chunk);
  int64_t n = a->tokens, h = a->hidden_size, v = a->vocab_size, m = a->id_count;
  if (m < 1 || m > MAX_BYTES / 8 || (!a->offsets && m % n))
    fail("%s: id_count is %lld for %lld tokens; give a multiple of tokens, or with offsets 1 or more",
         frame->name, (long long)m, (long long)n);
  bool backward = a->dlog_probs;
  if (!backward && (a->dlse || a->dentropy || a->dx || a->dweight || a->dbias))
    fail("%s: gradients need dlog_probs; give zeros where only dlse or dentropy is there", frame->name);
  Dtype dtype = backend->dtype;
  IdLogProbs r = {.call = {.chunk = a->chunk ? a->chunk : lce_default_chunk(backend->device, n),
                           .terms = {.softcap = a->softcap, .temperature = a->temperature},
                           .scale = 1}};
  const Argument tensors[] = {
      {"x", a->x, n, h, dtype, false, &r.call.x},
      {"weight", a->weight, v, h, dtype, false, &r.call.weight},
      {"ids", a->ids, m, 0, a->ids_int64 ? DTYPE_I64 : DTYPE_I32, false, &r.ids},
      {"log_probs", a->log_probs, m, 0, DTYPE_F32, !backward, &r.log_probs},
      {"lse", a->lse, n, 0, DTYPE_F32, !backward, &r.lse},
      {"entropy", a->entropy, n, 0, DTYPE_F32, !backward, &r.entropy},
      {"bias", a->bias, v, 0, dtype, false, &r.call.bias},
      {"offsets", a->offsets, n + 1, 0, DTYPE_I64, false, &r.offsets},
      {"dlog_probs", a->dlog_probs, m, 0, DTYPE_F32, false, &r.dlog_probs},
      {"dlse", a->dlse, n, 0, DTYPE_F32, false, &r.dlse},
      {"dentropy", a->dentropy, n, 0, DTYPE_F32, false, &r.dentropy},
      {"dx", a->dx, n, h, dtype, true, &r.call.dx},
      {"dweight", a->dweight, v, h, a->narrow_dweight ? dtype : DTYPE_F32, true, &r.call.dweight},
      {"dbias", a->dbias, v, 0, DTYPE_F32, true, &r.call.dbias}};
  take_arguments(tensors, sizeof tensors / sizeof *tensors, 5, "x, weight, ids, log_probs and lse");
  check_bytes("the logits", min_i64(r.call.chunk, n), v, DTYPE_F32, "a smaller chunk holds less");
  return r;
}

static void check_offsets(Backend *backend, Tensor offsets, int64_t count) {
  int64_t before = 0, last = offsets.shape[0] - 1;
  for (int64_t n = 0; n <= last; n++) {
    int64_t offset;
    backend_to_host(backend, &offset, tensor_rows(offsets, n, 1));
    if (offset < before || (n == 0 && offset) || (n == last && offset != count))
      fail("%s: offsets[%lld] is %lld; they must rise from 0 to id_count, which is %lld", frame->name,
           (long long)n, (long long)offset, (long long)count);
    before = offset;
  }
}

static void run_ids(Backend *backend, IdLogProbs r) {
  Tensor ids = r.ids;
  MemoryMark mark = memory_mark(&backend->memory);
  r.ids = memory_push_1d(&backend->memory, "ids", MEMORY_HEAD, DTYPE_I32, ids.shape[0]);
  ReadTargets read = {.targets = r.ids, .ids = ids, .vocab_size = r.call.weight.shape[0]};
  read_targets(backend, read);
  if (tensor_exists(r.dlog_probs)) {
    id_log_prob_gradients(backend, r);
  } else {
    id_log_probs(backend, r);
    read.targets = (Tensor){0}, read.loss = r.log_probs;
    read_targets(backend, read);
  }
  memory_pop_to(&backend->memory, mark);
}

EXPORTED int lce_ids_log_probs(lce_context *context, const lce_ids_args *args) {
  ENTER(context);
  Backend *backend = context->backend;
  const IdLogProbs request = checked_ids(args, backend);
  run_ids(plan_of(context, args->batch_invariant), request);
  size_t bytes = start_planned(context, args->stream);
  if (args->check_ids > 0 || (args->check_ids == 0 && backend->device == ON_CPU)) {
    check_ids(backend, "ids", request.ids, args->vocab_size);
    if (args->offsets) check_offsets(backend, request.offsets, args->id_count);
  }
  run_ids(backend, request);
  return end_planned(context, bytes);
}

// --- divergences -------------------------------------------------------------------------------------------

static LinearDivergence checked_divergence(const lce_divergence_args *a, const Backend *backend) {
  if (!a) fail("%s: args must be there", frame->name);
  check_sizes(a->tokens, a->hidden_size, a->vocab_size, a->chunk);
  check_size("teacher_hidden_size", a->teacher_hidden_size);
  if (a->kind < FORWARD_KL || a->kind > JSD)
    fail("%s: kind is %d; 0 is KL(teacher || student), 1 its reverse, 2 the JSD", frame->name, a->kind);
  Dtype dtype = backend->dtype;
  int64_t n = a->tokens, v = a->vocab_size, h = a->hidden_size, th = a->teacher_hidden_size;
  LinearDivergence r = {.kind = (DivergenceKind)a->kind,
                        .beta = a->beta,
                        .student = {.softcap = a->softcap, .temperature = a->temperature},
                        .teacher = {.softcap = a->teacher_softcap, .temperature = a->teacher_temperature},
                        .chunk = a->chunk ? a->chunk : divergence_chunk(backend, n)};
  const Argument tensors[] = {
      {"x", a->x, n, h, dtype, false, &r.student.x},
      {"weight", a->weight, v, h, dtype, false, &r.student.weight},
      {"teacher_x", a->teacher_x, n, th, dtype, false, &r.teacher.x},
      {"teacher_weight", a->teacher_weight, v, th, dtype, false, &r.teacher.weight},
      {"loss", a->loss, n, 0, DTYPE_F32, true, &r.loss},
      {"entropy", a->entropy, n, 0, DTYPE_F32, true, &r.entropy},
      {"bias", a->bias, v, 0, dtype, false, &r.student.bias},
      {"teacher_bias", a->teacher_bias, v, 0, dtype, false, &r.teacher.bias},
      {"mask", a->mask, n, 0, DTYPE_I32, false, &r.mask},
      {"token_weights", a->token_weights, n, 0, DTYPE_F32, false, &r.token_weights},
      {"dx", a->dx, n, h, dtype, true, &r.dx},
      {"dweight", a->dweight, v, h, a->narrow_dweight ? dtype : DTYPE_F32, true, &r.dweight},
      {"dbias", a->dbias, v, 0, DTYPE_F32, true, &r.dbias}};
  take_arguments(tensors, sizeof tensors / sizeof *tensors, 5,
                 "x, weight, teacher_x, teacher_weight and loss");
  check_bytes("the logits", 2 * min_i64(r.chunk, n), v, DTYPE_F32, "a smaller chunk holds less");
  return r;
}

EXPORTED int lce_linear_divergence(lce_context *context, const lce_divergence_args *args) {
  ENTER(context);
  const LinearDivergence request = checked_divergence(args, context->backend);
  linear_divergence(plan_of(context, false), request);
  size_t bytes = start_planned(context, args->stream);
  linear_divergence(context->backend, request);
  return end_planned(context, bytes);
}
