// Every CPU operation first must refuse a test's call with a tensor missing, wider, of a wrong type or rank.
#include "kernels/kernels.h"
#include "tests/harness.h"

enum { MISSING, TYPE, RANK, WIDER, CHANGES, WORDS = 160, CALLS = 200 };
static const char *const change_names[CHANGES] = {"missing", "of a wrong type", "of a wrong rank", "wider"};

// By a tensor's place in the arguments, in words of 8 bytes: was it ever absent, which changes passed (bits).
typedef struct {
  const char *name;
  int calls;
  bool absent[WORDS];
  unsigned accepted[WORDS];
} Watched;

#define INDEX(name, Arguments, group) OF_##name,
enum { OPERATIONS(INDEX, INDEX) OPERATION_COUNT };
static Watched watched[OPERATION_COUNT];

static const BackendOps *real; // the CPU's
static BackendOps watching;
static bool trying;
static jmp_buf refused;
static char sentence[512];

static void keep_sentence(const char *text) {
  snprintf(sentence, sizeof sentence, "%s", text);
  longjmp(refused, 1);
}

// Whether the entry point accepts the arguments. While it is tried, operations do nothing.
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

static void try_changes(Backend *backend, Watched *w, void (*enter)(Backend *, const void *), const void *a,
                        size_t bytes, size_t workspace) {
  _Alignas(16) char copy[8 * WORDS];
  if (w->calls++ >= CALLS || backend->ranks > 1) return;
  for (size_t at = 0; at + sizeof(Tensor) <= bytes; at += 8) {
    Tensor given, *t = (Tensor *)(copy + at);
    memcpy(&given, (const char *)a + at, sizeof given);
    w->absent[at / 8] |= !given.data;
    if (at == workspace || !is_tensor(&backend->memory, &given)) continue;
    for (int change = 0; change < CHANGES; change++) {
      memcpy(copy, a, bytes);
      if (change == MISSING) *t = (Tensor){0};
      if (change == TYPE) t->dtype = given.dtype == DTYPE_E4M3 ? DTYPE_I64 : DTYPE_E4M3;
      if (change == RANK)
        *t = given.rank == 2 ? tensor_1d(given.data, given.dtype, tensor_count(given))
                             : tensor_2d(given.data, given.dtype, 1, given.shape[0]);
      if (change == WIDER) t->shape[given.rank - 1]++, t->stride++;
      if (accepts(backend, enter, copy, w->name)) w->accepted[at / 8] |= 1u << change;
    }
  }
}

#define WATCH(operation, Arguments, workspace)                                                               \
  static void enter_##operation(Backend *backend, const void *a) {                                           \
    operation(backend, *(const Arguments *)a);                                                               \
  }                                                                                                          \
  static void watch_##operation(Backend *backend, const Arguments *a) {                                      \
    if (trying) return;                                                                                      \
    watched[OF_##operation].name = #operation;                                                               \
    try_changes(backend, &watched[OF_##operation], enter_##operation, a, sizeof *a, workspace);              \
    real->operation(backend, a);                                                                             \
  }
#define WATCH_PLAIN(operation, Arguments, group)   WATCH(operation, Arguments, SIZE_MAX)
#define WATCH_SCRATCH(operation, Arguments, group) WATCH(operation, Arguments, offsetof(Arguments, workspace))
OPERATIONS(WATCH_PLAIN, WATCH_SCRATCH)

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
  int accepted[CHANGES];
} free_tensors[] = {{"embedding_forward", {1}},
                    {"embedding_backward", {2}},
                    {"norm_forward", {1}},
                    {"norm_backward", {1}},
                    {"attention_backward", {1}},
                    {"matmul_fp8", {2, 2, 2, 2}}, // a.transposed and b.transposed, which it does not read
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

int refusals_missed(void) {
  int missed = 0;
  for (const Watched *w = watched; w < watched + OPERATION_COUNT; w++)
    for (int change = 0; w->name && change < CHANGES; change++) {
      int count = 0;
      for (size_t i = 0; i < sizeof free_tensors / sizeof *free_tensors; i++)
        if (!strcmp(free_tensors[i].name, w->name)) count -= free_tensors[i].accepted[change];
      for (int word = 0; word < WORDS; word++)
        count += w->accepted[word] >> change & 1 && !(change == MISSING && w->absent[word]);
      if (count <= 0) continue;
      print_error("%s accepts %d tensors too many that are %s\n", w->name, count, change_names[change]);
      missed++;
    }
  return missed;
}
