// Shared by the tests of the operations: a backend to run on, tensors made from float64 values, comparisons
// whose tolerance follows from the arithmetic, and a way to catch fail().
//
// Host values are float64 arrays that live until harness_close. A tensor made from them writes them back as
// its dtype rounds them, so that the reference computes from what the device has.
#pragma once

#include "kernels/kernels.h"
#include "tests/reference.h"
#include "tests/test.h"

typedef struct Harness {
  Backend *backend;
  Dtype dtype; // of operands: the backend's
  uint64_t draws;
  void **blocks; // host values
  int64_t block_count, block_capacity;
  // For run_mirrored: the CPU beside this backend, and a case's results, recorded instead of checked.
  struct Harness *mirror;
  bool recording;
  struct Record *records;
  int64_t record_count, record_capacity;
} Harness;

float bf16_to_f32(uint16_t bits);

// "cpu", "cpu-plain" (without CBLAS), "cuda" (bf16), "cuda-fp32"; NULL if absent. Pushes are filled with NaN.
Harness *harness_open(const char *backend);
void harness_close(Harness *h);

// LCE_SMALL_SHAPES is set: a sanitizer or the emulator slows kernels a thousandfold.
bool small_shapes(void);
// Runs the program's tests, whose state is a Harness, on a backend by name; nothing where there is none. What
// a test has pushed is popped after it. Returns the failures.
int run_on_backend(const char *backend);
// The same on "cpu", "cpu-plain", "cuda-fp32" and "cuda", each a group.
int run_on_backends(void);
const char *harness_backend(void); // the name of the group's
void harness_clear(Harness *h);    // pops what a test has pushed so far

// TEST of such a program: h is the group's.
#define HARNESS_TEST(name)                                                                                   \
  static void name##_on(Harness *h);                                                                         \
  TEST(name) {                                                                                               \
    name##_on(*state);                                                                                       \
  }                                                                                                          \
  static void name##_on(__attribute__((unused)) Harness *h)

// Runs a case on every shape of a table. RUN_MIRRORED is for kernels that only a GPU has: it compares what
// the case checks with that of a run on the CPU, and with that of a second run bit for bit.
typedef void (*TestCase)(Harness *h, const void *shape);
#define RUN_CASES(h, run, shapes)                                                                            \
  run_cases(h, run, shapes, sizeof *(shapes), sizeof(shapes) / sizeof *(shapes))
#define RUN_MIRRORED(h, run, shapes)                                                                         \
  run_mirrored(h, run, shapes, sizeof *(shapes), sizeof(shapes) / sizeof *(shapes))
void run_cases(Harness *h, TestCase run, const void *shapes, size_t size, size_t count);
void run_mirrored(Harness *h, TestCase run, const void *shapes, size_t size, size_t count);

// --- values and tensors ------------------------------------------------------------------------------------

double *host_values(Harness *h, int64_t count); // zeros
double *copied_values(Harness *h, const double *values, int64_t count);
double *random_values(Harness *h, int64_t count, double scale); // normal, a new draw each time
int32_t *random_ids(Harness *h, int64_t count, int64_t below);

Tensor tensor_from(Harness *h, Dtype dtype, double *values, int64_t rows, int64_t columns);
Tensor vector_from(Harness *h, Dtype dtype, double *values, int64_t count);
// Tensors of random values of the operands' dtype, which are kept in *values.
Tensor random_strided(Harness *h, double **values, int64_t rows, int64_t columns, int64_t stride,
                      double scale);
Tensor random_tensor(Harness *h, double **values, int64_t rows, int64_t columns, double scale);
Tensor random_vector(Harness *h, double **values, int64_t count, double scale);
// The same with rows `stride` apart; the gaps between them are NaN and must stay untouched (check_gaps).
Tensor strided_from(Harness *h, Dtype dtype, double *values, int64_t rows, int64_t columns, int64_t stride);
Tensor ids_from(Harness *h, const int32_t *ids, int64_t count);
// Uninitialised memory, full of NaN.
Tensor poisoned(Harness *h, Dtype dtype, int64_t rows, int64_t columns);
Tensor poisoned_vector(Harness *h, Dtype dtype, int64_t count);
Tensor poisoned_strided(Harness *h, Dtype dtype, int64_t rows, int64_t columns, int64_t stride);

// The tensor's elements (rank 1 or 2, any stride), row after row.
double *values_of(Harness *h, Tensor t);

// --- comparisons -------------------------------------------------------------------------------------------

// The distance from 1 to the next value: 2^-23 for fp32, 2^-7 for bf16.
double dtype_epsilon(Dtype dtype);

// How far a result may be off. Rounding errors of a sum of `terms` values add up like a random walk, so an
// element is allowed units * epsilon * sqrt(terms) * (|want| + rms(want) + size), plus half an epsilon of
// |want| for storing it in the tensor's dtype, plus the smallest normal value, below which results may
// become 0. `size` is that of the values that were summed, for results in which they cancel. `operations` is
// the epsilon that the arithmetic runs in: fp32's, but bf16's where an intermediate is stored in bf16.
typedef struct {
  double units, terms, operations, size;
} Tolerance;

Tolerance within(double units, double terms);                          // fp32 arithmetic
Tolerance within_stored(const Harness *h, double units, double terms); // intermediates in the operands' dtype
Tolerance with_size(Tolerance tolerance, double size);

void check_values(Harness *h, const char *what, Tensor got, const double *want, Tolerance tolerance);
// The same, whose message counts rows: "WHAT of ROW 5, column 0, is ...".
void check_by_row(Harness *h, const char *what, const char *row, Tensor got, const double *want, Tolerance t);
void check_bitwise_equal(Harness *h, const char *what, Tensor a, Tensor b);
// NaN still lies between the rows of a strided tensor.
void check_gaps(Harness *h, const char *what, Tensor t);
// The tensor with its columns up to the end of a piece of 16 bytes, which a row's stores may fill.
Tensor in_pieces(Tensor t);

// Compares got (+ nothing) with before + d objective / d x, by central differences in float64, at up to 48
// places of x. `before` may be NULL (zeros). The objective reads x, which is perturbed and restored.
typedef double (*Objective)(void *context);
void check_gradient(Harness *h, const char *what, Tensor got, const double *before, double *x,
                    Objective objective, void *context, Tolerance tolerance);

// --- refusals ----------------------------------------------------------------------------------------------

// Changes of one tensor that an operation accepts in a test's calls. For each 8-byte word of its arguments:
// whether a tensor there was ever absent, and which changes passed (bits).
enum { REFUSALS = 4, REFUSAL_WORDS = 160 };
typedef struct {
  const char *name;
  void (*enter)(Backend *backend, const void *a); // the operation, which must not run if it accepts
  size_t bytes, workspace;                        // of the arguments; where its scratch is among them
  int calls;
  bool absent[REFUSAL_WORDS];
  unsigned accepted[REFUSAL_WORDS];
} Refusals;
// Rows of a table of operations; enter_NAME calls the operation NAME.
#define REFUSALS_ROW(operation, Arguments, scratch)                                                          \
  {.name = #operation, .enter = enter_##operation, .bytes = sizeof(Arguments), .workspace = scratch},
#define REFUSALS_PLAIN(name, Arguments, ...)   REFUSALS_ROW(name, Arguments, SIZE_MAX)
#define REFUSALS_SCRATCH(name, Arguments, ...) REFUSALS_ROW(name, Arguments, offsetof(Arguments, workspace))

// Calls the operation with each tensor missing, of a wrong type or rank, and wider.
void refusals_try(Backend *backend, Refusals *r, const void *a);
// Prints and counts the changes that more tensors were accepted with than are allowed.
int refusals_missed(const Refusals *r, const int allowed[REFUSALS]);

// From now on tries so every operation of the backend before it runs.
void refusals_watch(Backend *backend);
int refusals_missed_by_the_core(void);

// --- fail() ------------------------------------------------------------------------------------------------

// The statement must fail() with a sentence that holds the part. What it had pushed is popped.
#define assert_fails(h, part, statement)                                                                     \
  do {                                                                                                       \
    MemoryMark mark_ = memory_mark(&(h)->backend->memory);                                                   \
    CATCH(statement);                                                                                        \
    memory_pop_to(&(h)->backend->memory, mark_);                                                             \
    if (!strstr(caught_sentence, part)) fail_msg("\"%s\" does not say \"%s\"", caught_sentence, part);       \
  } while (0)
