// CPU operations must first refuse a test's call with a tensor missing, wider, or of a wrong type or rank.
#include "kernels/kernels.h"
#include "tests/harness.h"

enum { MISSING, TYPE, RANK, WIDER, CALLS = 200 };
static const char *const change_names[REFUSALS] = {"missing", "of a wrong type", "of a wrong rank", "wider"};

static bool trying;
static jmp_buf refused;
static char sentence[512];

static void keep_sentence(const char *text) {
  snprintf(sentence, sizeof sentence, "%s", text);
  longjmp(refused, 1);
}

// True if the entry point accepts the arguments. While it is tried, operations do nothing.
static bool accepts(Backend *backend, void (*enter)(Backend *, const void *), const void *a, const char *op) {
  MemoryMark mark = memory_mark(&backend->memory);
  FailHandler outside = fail_set_thread_handler(keep_sentence);
  trying = true;
  sentence[0] = 0;
  if (!setjmp(refused)) enter(backend, a);
  trying = false;
  fail_set_thread_handler(outside);
  memory_pop_to(&backend->memory, mark);
  if (sentence[0] && strncmp(sentence, op, strlen(op)) != 0) fail_msg("%s is refused with: %s", op, sentence);
  return !sentence[0];
}

static bool is_tensor(const Memory *m, const Tensor *t) {
  uintptr_t at = (uintptr_t)t->data, base = (uintptr_t)m->stack_base;
  return at >= base && at < base + m->stack_capacity && t->dtype < DTYPE_COUNT &&
         (t->rank == 1 || t->rank == 2);
}

void refusals_try(Backend *backend, Refusals *r, const void *a) {
  _Alignas(16) char copy[8 * REFUSAL_WORDS];
  if (r->calls++ >= CALLS || backend->ranks > 1) return;
  for (size_t at = 0; at + sizeof(Tensor) <= r->bytes; at += 8) {
    Tensor given, *t = (Tensor *)(copy + at);
    memcpy(&given, (const char *)a + at, sizeof given);
    r->absent[at / 8] |= !given.data;
    if (at == r->workspace || !is_tensor(&backend->memory, &given)) continue;
    for (int change = 0; change < REFUSALS; change++) {
      memcpy(copy, a, r->bytes);
      if (change == MISSING) *t = (Tensor){0};
      if (change == TYPE) t->dtype = given.dtype == DTYPE_E4M3 ? DTYPE_I64 : DTYPE_E4M3;
      if (change == RANK)
        *t = given.rank == 2 ? tensor_1d(given.data, given.dtype, tensor_count(given))
                             : tensor_2d(given.data, given.dtype, 1, given.shape[0]);
      if (change == WIDER) t->shape[given.rank - 1]++, t->stride++;
      if (accepts(backend, r->enter, copy, r->name)) r->accepted[at / 8] |= 1u << change;
    }
  }
}

int refusals_missed(const Refusals *r, const int allowed[REFUSALS]) {
  int missed = 0;
  for (int change = 0; r->calls && change < REFUSALS; change++) {
    int count = -allowed[change];
    for (int word = 0; word < REFUSAL_WORDS; word++)
      count += r->accepted[word] >> change & 1 && !(change == MISSING && r->absent[word]);
    if (count <= 0) continue;
    print_error("%s accepts %d tensors too many that are %s\n", r->name, count, change_names[change]);
    missed++;
  }
  return missed;
}

// --- the core's operations ---------------------------------------------------------------------------------

static const BackendOps *real; // the CPU's
static BackendOps watching;

#define INDEX(name, Arguments, group) OF_##name,
enum { OPERATIONS(INDEX, INDEX) OPERATION_COUNT };
#define ENTER(name, Arguments, group)                                                                        \
  static void enter_##name(Backend *backend, const void *a) {                                                \
    name(backend, *(const Arguments *)a);                                                                    \
  }
OPERATIONS(ENTER, ENTER)
static Refusals watched[] = {OPERATIONS(REFUSALS_PLAIN, REFUSALS_SCRATCH)};

#define WATCH(name, Arguments, group)                                                                        \
  static void watch_##name(Backend *backend, const Arguments *a) {                                           \
    if (trying) return;                                                                                      \
    refusals_try(backend, &watched[OF_##name], a);                                                           \
    real->name(backend, a);                                                                                  \
  }
OPERATIONS(WATCH, WATCH)

void refusals_watch(Backend *backend) {
  real = backend->ops;
  watching = *real;
#define REPLACE(name, Arguments, group) watching.name = watch_##name;
  OPERATIONS(REPLACE, REPLACE)
  backend->ops = &watching;
}

// How many tensors may be so: optional ones that no call leaves out, any type, sizes without a second tensor.
static const struct {
  const char *name;
  int allowed[REFUSALS];
} free_tensors[] = {
    {"embedding_forward", {1}},
    {"embedding_backward", {2}},
    {"norm_forward", {1}},
    {"norm_backward", {1}},
    {"attention_backward", {1}},
    {"matmul_quantized", {2, 2, 2, 2}}, // a.transposed and b.transposed, which it does not read
    {"lce_logits_exp", {3}},
    {"lce_row_losses", {5, 0, 0, 1}},
    {"lce_sampled_gradients", {4}},
    {"lce_input_gradient", {4}},
    {"lce_target_gradient", {1}},
    {"cross_entropy_in_place", {4, 0, 0, 1}},
    {"loss_factor", {1, 0, 0, 2}},
    {"sum_columns", {1}},
    {"add_outer", {1}},
    {"gather_rows", {0, 0, 0, 1}},
    {"scatter_rows", {0, 0, 0, 1}},
    {"sum_elements", {0, 0, 1, 1}},
    {"all_reduce", {0, 0, 2}},
    {"reduce_scatter", {0, 0, 2}},
    {"all_gather", {0, 0, 2}},
    {"broadcast_rank_0", {0, 0, 2}},
    {"fill_zero", {0, 1, 1, 1}}};

int refusals_missed_by_the_core(void) {
  int missed = 0;
  for (const Refusals *r = watched; r < watched + OPERATION_COUNT; r++) {
    const int *allowed = (const int[REFUSALS]){0};
    for (size_t i = 0; i < sizeof free_tensors / sizeof *free_tensors; i++)
      if (!strcmp(free_tensors[i].name, r->name)) allowed = free_tensors[i].allowed;
    missed += refusals_missed(r, allowed);
  }
  return missed;
}
