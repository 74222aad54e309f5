#include "library/lce.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "kernels/linear_cross_entropy.h"

#define EXPORTED __attribute__((visibility("default")))

struct lce_context {
  Backend *backend;
  Backend *plan; // of the call being checked: a call that is refused leaves it behind
  size_t held_bytes;
};

// --- errors ------------------------------------------------------------------------------------------------
// fail() ends a program; here its sentence is kept, and the call that met it returns.

static _Thread_local char last_error[1024];
static _Thread_local jmp_buf caller;

static void keep_sentence(const char *sentence) {
  snprintf(last_error, sizeof last_error, "%s", sentence);
  longjmp(caller, 1);
}

static bool failed(const char *sentence) {
  snprintf(last_error, sizeof last_error, "%s", sentence);
  return false;
}

EXPORTED const char *lce_last_error(void) {
  return last_error;
}

// --- contexts ----------------------------------------------------------------------------------------------

static Backend *open_backend(const char *device, int ordinal, const char *dtype) {
  if (!device || !dtype) return failed("lce_create: device and dtype must be there"), NULL;
  bool fp32 = !strcmp(dtype, "fp32");
  if (!fp32 && strcmp(dtype, "bf16") != 0) return failed("dtype is neither \"bf16\" nor \"fp32\""), NULL;
  if (!strcmp(device, "cpu")) {
    if (!fp32) return failed("the CPU computes in fp32 only"), NULL;
    return cpu_backend_create(false);
  }
  if (strcmp(device, "cuda") != 0) return failed("device is neither \"cpu\" nor \"cuda\""), NULL;
  const char *reason = NULL;
  Backend *backend = cuda_backend_create(ordinal, fp32 ? DTYPE_F32 : DTYPE_BF16, &reason);
  if (!backend) failed(reason);
  return backend;
}

EXPORTED lce_context *lce_create(const char *device, int ordinal, const char *dtype) {
  fail_set_handler(keep_sentence);
  if (setjmp(caller)) return NULL;
  Backend *backend = open_backend(device, ordinal, dtype);
  if (!backend) return NULL;
  lce_context *context = calloc(1, sizeof *context);
  if (!context) fail("out of host memory for a context");
  context->backend = backend;
  return context;
}

EXPORTED void lce_destroy(lce_context *context) {
  if (!context) return;
  if (!setjmp(caller)) backend_destroy(context->backend);
  free(context);
}

static bool there(const lce_context *context) {
  return context || failed("the context is NULL: lce_create found none, and lce_last_error said why");
}

EXPORTED int lce_synchronize(lce_context *context) {
  if (!there(context)) return 1;
  if (setjmp(caller)) return 1;
  backend_synchronize(context->backend);
  return 0;
}

EXPORTED int64_t lce_held_bytes(const lce_context *context) {
  return context ? (int64_t)context->held_bytes : 0;
}

// --- the layer ---------------------------------------------------------------------------------------------

static Tensor vector(const void *data, Dtype dtype, int64_t count) {
  return data ? tensor_1d((void *)data, dtype, count) : (Tensor){0};
}

static Tensor matrix(const void *data, Dtype dtype, int64_t rows, int64_t columns) {
  return data ? tensor_2d((void *)data, dtype, rows, columns) : (Tensor){0};
}

static void check(const lce_args *a) {
  if (!a) fail("lce_linear_cross_entropy: args must be there");
  if (a->tokens < 1 || a->hidden_size < 1 || a->vocab_size < 1)
    fail("lce_linear_cross_entropy: tokens %lld, hidden_size %lld, vocab_size %lld; all must be 1 or more",
         (long long)a->tokens, (long long)a->hidden_size, (long long)a->vocab_size);
  if (!a->x || !a->weight || !a->targets || !a->loss)
    fail("lce_linear_cross_entropy: x, weight, targets and loss must be there");
  if (a->chunk < 0) fail("lce_linear_cross_entropy: a chunk of %lld tokens", (long long)a->chunk);
}

static LinearCrossEntropy call_of(const lce_args *a, Dtype real) {
  int64_t n = a->tokens, h = a->hidden_size, v = a->vocab_size;
  return (LinearCrossEntropy){.mode = a->materialized ? LCE_MATERIALIZED : LCE_FUSED,
                              .chunk = a->chunk ? a->chunk : lce_default_chunk(n),
                              .loss = vector(a->loss, DTYPE_F32, n),
                              .outputs = {.z_loss = vector(a->token_z_loss, DTYPE_F32, n),
                                          .log_prob = vector(a->log_prob, DTYPE_F32, n),
                                          .logsumexp = vector(a->logsumexp, DTYPE_F32, n),
                                          .entropy = vector(a->entropy, DTYPE_F32, n),
                                          .max_logit = vector(a->max_logit, DTYPE_F32, n),
                                          .predicted = vector(a->predicted, DTYPE_I32, n),
                                          .correct = vector(a->correct, DTYPE_F32, n)},
                              .dx = matrix(a->dx, real, n, h),
                              .dweight = matrix(a->dweight, DTYPE_F32, v, h),
                              .dbias = vector(a->dbias, DTYPE_F32, v),
                              .x = matrix(a->x, real, n, h),
                              .weight = matrix(a->weight, real, v, h),
                              .bias = vector(a->bias, real, v),
                              .token_weights = vector(a->token_weights, DTYPE_F32, n),
                              .entropy_weights = vector(a->entropy_weights, DTYPE_F32, n),
                              .terms = {.label_smoothing = a->label_smoothing,
                                        .z_loss = a->z_loss,
                                        .softcap = a->softcap,
                                        .temperature = a->temperature,
                                        .class_weights = vector(a->class_weights, DTYPE_F32, v)},
                              .scale = a->scale,
                              .mean = a->mean,
                              .accumulate = a->accumulate};
}

static void forget_plan(lce_context *context) {
  Backend *plan = context->plan;
  context->plan = NULL;
  backend_destroy(plan);
}

static void run(Backend *backend, const lce_args *args) {
  LinearCrossEntropy call = call_of(args, backend->dtype);
  Tensor ids = vector(args->targets, args->targets_int64 ? DTYPE_I64 : DTYPE_I32, args->tokens);
  MemoryMark mark = memory_mark(&backend->memory);
  call.targets = memory_push_1d(&backend->memory, "targets", MEMORY_HEAD, DTYPE_I32, args->tokens);
  read_targets(backend, (ReadTargets){.targets = call.targets, .ids = ids, .vocab_size = args->vocab_size});
  linear_cross_entropy(backend, call);
  read_targets(backend, (ReadTargets){.loss = call.loss, .ids = ids, .vocab_size = args->vocab_size});
  memory_pop_to(&backend->memory, mark);
}

// What the call will push, by a backend that runs nothing.
static size_t planned_bytes(lce_context *context, const lce_args *args) {
  const Backend *backend = context->backend;
  context->plan = plan_backend_create(backend->scratch == &cuda_scratch ? "cuda" : "cpu", backend->dtype);
  run(context->plan, args);
  size_t bytes = context->plan->memory.ledger.stack_peak;
  forget_plan(context);
  return bytes;
}

EXPORTED int lce_linear_cross_entropy(lce_context *context, const lce_args *args) {
  if (!there(context)) return 1;
  Backend *backend = context->backend;
  if (setjmp(caller)) {
    memory_pop_to(&backend->memory, 0);
    forget_plan(context);
    return 1;
  }
  check(args);
  size_t bytes = planned_bytes(context, args);
  if (bytes > backend->memory.stack_capacity) {
    backend_synchronize(backend); // earlier calls may still use the stack that goes
    memory_set_stack(&backend->memory, bytes);
  }
  backend_follow(backend, args->stream);
  run(backend, args);
  backend_precede(backend, args->stream);
  context->held_bytes = bytes;
  return 0;
}
