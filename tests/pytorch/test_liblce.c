// The C interface (tools/torch/liblce/liblce.h): values against float64, wrong arguments, contexts, threads.
// Tensors are allocations of exactly their size, so that AddressSanitizer sees what lies outside.

#include <pthread.h>
#include <sys/resource.h>

#include "tests/loss_problem.h"
#include "tools/torch/liblce/liblce.h"

// A call's tensors, needed ones first: places in lce_args and ReferenceLoss, sizes as letters of N, H, V.
typedef enum { NEEDED, READ, WRITTEN } Use;
typedef struct {
  const char *name, *size;
  Use use;
  size_t at, reference;
} Field;
#define FIELD(name, size, use)                                                                               \
  { #name, size, use, offsetof(lce_args, name), offsetof(ReferenceLoss, name) }
#define OUTPUT(name, ...) FIELD(name, "N", WRITTEN),
static const Field fields[] = {FIELD(x, "NH", NEEDED),          FIELD(weight, "VH", NEEDED),
                               FIELD(targets, "N", NEEDED),     FIELD(loss, "N", WRITTEN),
                               FIELD(bias, "V", READ),          FIELD(class_weights, "V", READ),
                               FIELD(token_weights, "N", READ), FIELD(entropy_weights, "N", READ),
                               FIELD(dx, "NH", WRITTEN),        FIELD(dweight, "VH", WRITTEN),
                               FIELD(dbias, "V", WRITTEN),      TOKEN_OUTPUTS(OUTPUT){0}};

static float **in_call(lce_args *a, const Field *f) {
  return (float **)((char *)a + f->at);
}

static double *in_reference(ReferenceLoss *r, const Field *f) {
  return *(double **)((char *)r + f->reference);
}

static int64_t count_of(const lce_args *a, const Field *f) {
  int64_t first = f->size[0] == 'V' ? a->vocab_size : a->tokens;
  return f->size[1] ? first * a->hidden_size : first;
}

// Elements of 4 bytes, zeros.
static void *elements(Harness *h, int64_t count) {
  return random_ids(h, count, 1);
}

static bool is(const Field *f, const char *name) {
  return !strcmp(f->name, name);
}

// A call, and what it should give. All that is allocated is the harness's.
typedef struct {
  lce_args args;
  ReferenceLoss want;
} Problem;

typedef struct {
  int64_t tokens, hidden, vocab, chunk;
  bool terms, logits; // terms of whole rows; of single logits
  bool materialized, wide, forward_only;
} Shape;

// Fills outputs before a call: an element that the call has not written still is this float.
static const int32_t UNWRITTEN = 0x4640E6B7;

// Every third token is ignored, but never all.
static Problem make_problem(Harness *h, Shape s) {
  ReferenceLoss l = loss_problem(h, s.tokens, s.hidden, s.vocab, 1);
  if (s.terms)
    loss_problem_add(h, &l,
                     TERM_MEAN | TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS | TERM_TOKEN_WEIGHTS |
                         TERM_SMOOTHING);
  if (s.logits) loss_problem_add(h, &l, TERM_SOFTCAP | TERM_BIAS | (s.materialized ? TERM_ENTROPY : 0));
  for (int64_t i = 1; i < s.tokens; i += 3) l.targets[i] = IGNORE_INDEX;
  if (!s.forward_only) reference_gradients(h, &l);
  Problem p = {.args = {.tokens = s.tokens,
                        .hidden_size = s.hidden,
                        .vocab_size = s.vocab,
                        .chunk = s.chunk,
                        .materialized = s.materialized,
                        .targets_int64 = s.wide,
                        .mean = l.mean,
                        .label_smoothing = (float)l.label_smoothing,
                        .z_loss = (float)l.z_loss,
                        .softcap = (float)l.softcap,
                        .temperature = (float)l.temperature,
                        .scale = 0.5f},
               .want = l};
  for (const Field *f = fields; f->name; f++) {
    double *same = in_reference(&p.want, f);
    bool per_logit = f->at > offsetof(lce_args, logsumexp);
    if (!same || (per_logit && !s.logits) || is(f, "targets")) continue;
    if ((s.materialized || (s.terms && s.logits)) && is(f, "log_sum_sq_probs")) continue;
    int64_t count = count_of(&p.args, f);
    float *data = elements(h, count);
    for (int64_t i = 0; i < count; i++) {
      float value = (float)same[i];
      if (f->use != WRITTEN) same[i] = value;
      memcpy(&data[i], f->use == WRITTEN ? (void *)&UNWRITTEN : &value, sizeof *data);
    }
    *in_call(&p.args, f) = data;
  }
  int64_t *wide = elements(h, 2 * s.tokens);
  for (int64_t i = 0; i < s.tokens; i++) wide[i] = l.targets[i];
  p.args.targets = s.wide ? (void *)wide : l.targets;
  reference_loss(&p.want);
  return p;
}

static bool unwritten(const lce_args *a, const Field *f) {
  const float *data = *in_call((lce_args *)a, f);
  for (int64_t i = 0; data && i < count_of(a, f); i++)
    if (memcmp(&data[i], &UNWRITTEN, sizeof UNWRITTEN) != 0) return false;
  return true;
}

static void check_results(Problem *p) {
  lce_args *a = &p->args;
  for (const Field *f = fields; f->name; f++) {
    const float *got = *in_call(a, f);
    const double *want = in_reference(&p->want, f);
    if (f->use != WRITTEN || !got) continue;
    double largest = 0;
    int64_t count = count_of(a, f);
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < count; i++) {
      double one = is(f, "predicted") ? a->predicted[i] : (double)got[i];
      double allowed = is(f, "predicted") || is(f, "correct") ? 0 : 1e-5 * largest + 1e-7;
      if (!(fabs(one - want[i]) <= allowed))
        fail_msg("%s[%lld] is %.9g where %.9g is right", f->name, (long long)i, one, want[i]);
    }
  }
}

static void run(lce_context *context, const lce_args *args) {
  if (lce_linear_cross_entropy(context, args) || lce_synchronize(context)) fail_msg("%s", lce_last_error());
}

static lce_context *context_on_cpu(void) {
  lce_context *context = lce_create("cpu", 0, "fp32");
  if (!context) fail_msg("%s", lce_last_error());
  return context;
}

// A test with a context on the CPU.
#define CONTEXT_TEST(name)                                                                                   \
  static void name##_in(Harness *h, lce_context *context);                                                   \
  HARNESS_TEST(name) {                                                                                       \
    lce_context *context = context_on_cpu();                                                                 \
    name##_in(h, context);                                                                                   \
    lce_destroy(context);                                                                                    \
  }                                                                                                          \
  static void name##_in(__attribute__((unused)) Harness *h, lce_context *context)

// Every way through the layer, with targets of both kinds, on one context whose stack grows on the way.
CONTEXT_TEST(test_values) {
  static const int64_t shapes[][4] = {{1, 1, 1, 1}, {7, 5, 3, 2}, {29, 17, 101, 8}, {33, 8, 515, 0}};
  for (int i = 0; i < 4; i++)
    for (int bits = 0; bits < 32; bits++) {
      Problem p = make_problem(h, (Shape){shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], bits & 1,
                                          bits & 2, bits & 4, bits & 8, bits & 16});
      run(context, &p.args);
      check_results(&p);
      assert_true(lce_held_bytes(context) > 0);
    }
}

// A forward pass keeps what the gradients need, and neither call then holds anything of width V.
CONTEXT_TEST(test_kept_exponentials) {
  enum { N = 29, V = 101, ROW = 512 }; // V floats, rounded up to a multiple of 128 bytes
  Problem p = make_problem(h, (Shape){N, 17, V, .chunk = N});
  lce_args forward = p.args, backward = p.args;
  forward.dx = backward.loss = NULL, forward.dweight = NULL;
  forward.exps = backward.exps = elements(h, N * (ROW / 4 + 1));
  backward.known_log_prob = p.args.log_prob;
  backward.token_z_loss = backward.log_prob = backward.logsumexp = NULL;
  const lce_args *calls[] = {&forward, &backward};
  for (int i = 0; i < 2; i++) {
    run(context, calls[i]);
    assert_in_range(lce_held_bytes(context), 1, 4 * N * V - 1);
  }
  check_results(&p);
}

static void scale_values(double *values, int64_t count, double factor) {
  for (int64_t i = 0; values && i < count; i++) values[i] *= factor;
}

// Gradients that are added up; that a scale of 0 leaves alone, or makes 0; and one without the other.
CONTEXT_TEST(test_gradients) {
  for (int bits = 0; bits < 4; bits++) {
    Problem p =
        make_problem(h, (Shape){29, 17, 101, 8, .terms = true, .logits = bits & 1, .materialized = bits & 2});
    lce_args both = p.args, x_alone = p.args, weight_alone = p.args;
    x_alone.dweight = x_alone.dbias = NULL, weight_alone.dx = NULL;
    run(context, &x_alone);
    for (const Field *f = fields; f->name; f++)
      if (is(f, "dweight") || is(f, "dbias")) assert_true(unwritten(&both, f));
    run(context, &weight_alone);
    check_results(&p);
    for (int i = 0; i < 3; i++) {
      const double weights[] = {2, 1, 0}, xs[] = {1, 0, 0};
      p.args.accumulate = i < 2;
      if (i) p.args.scale = 0;
      run(context, &p.args);
      scale_values(p.want.dweight, 101 * 17, weights[i]);
      scale_values(p.want.dbias, 101, weights[i]);
      scale_values(p.want.dx, 29 * 17, xs[i]);
      check_results(&p);
    }
  }
}

// Losses stay the same to the bit; the seed alone decides the gradients. Below 1/32 they are exact.
CONTEXT_TEST(test_sampling) {
  enum { N = 290, H = 12, V = 700, CALLS = 5, EXACT = 4 };
  static const float masses[CALLS] = {60, 60, 60, 1e-30f};
  Problem p[CALLS] = {make_problem(h, (Shape){N, H, V, 150, .terms = true})};
  for (int i = 0; i < CALLS; i++) {
    p[i] = p[0];
    p[i].args.loss = elements(h, N);
    p[i].args.dx = elements(h, N * H);
    p[i].args.dweight = elements(h, V * H);
    p[i].args.sample = masses[i];
    p[i].args.sample_seed = i == 2 ? UINT64_C(3) << 40 : 0;
    run(context, &p[i].args);
    assert_memory_equal(p[i].args.loss, p[0].args.loss, N * sizeof(float));
  }
  static const int pairs[][3] = {{0, 1, true}, {0, 2, false}, {0, EXACT, false}, {3, EXACT, true}};
  for (int k = 0; k < 4; k++) {
    const lce_args *a = &p[pairs[k][0]].args, *b = &p[pairs[k][1]].args;
    assert_int_equal(!memcmp(a->dx, b->dx, N * H * sizeof(float)), pairs[k][2]);
    assert_int_equal(!memcmp(a->dweight, b->dweight, V * H * sizeof(float)), pairs[k][2]);
  }
  check_results(&p[EXACT]);
}

CONTEXT_TEST(test_scale) {
  float x[3] = {1, -2, 4}, out[3] = {7, 7, 7}, half = 0.5f;
  assert_int_equal(lce_scale(context, out, 0, x, 0, 0, &half, NULL), 0);
  assert_true(out[0] == 7);
  assert_int_equal(lce_scale(context, out, 0, x, 0, 2, &half, NULL), 0);
  assert_true(out[0] == 0.5f && out[1] == -1 && out[2] == 7);
  assert_int_equal(lce_scale(context, x, 0, x, 0, 3, &half, NULL), 0);
  assert_true(x[0] == 0.5f && x[1] == -1 && x[2] == 2);
  const struct {
    float *out, *factor;
    int dtype;
    int64_t count;
    const char *part;
  } wrong[] = {{NULL, &half, 0, 3, "out is at"},
               {out, NULL, 0, 3, "factor is at"},
               {out, &half, 2, 3, "out has the dtype 2; 0 is fp32"},
               {out, &half, 1, 3, "bf16"}, // which the CPU does not have
               {out, &half, 0, -1, "a count of -1"}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    assert_int_equal(
        lce_scale(context, wrong[i].out, wrong[i].dtype, x, 0, wrong[i].count, wrong[i].factor, NULL), 1);
    if (!strstr(lce_last_error(), wrong[i].part)) fail_msg("%zu: %s", i, lce_last_error());
  }
  assert_int_equal(lce_scale(NULL, out, 0, x, 0, 3, &half, NULL), 1);
}

// The call gives a sentence with the part, and writes nothing.
static void refused(lce_context *context, const Problem *p, const char *part, lce_args args) {
  assert_int_equal(lce_linear_cross_entropy(context, &args), 1);
  if (!strstr(lce_last_error(), part)) fail_msg("\"%s\" says nothing of \"%s\"", lce_last_error(), part);
  for (const Field *f = fields; f->name; f++)
    if (f->use == WRITTEN && !unwritten(&p->args, f)) fail_msg("%s: %s is written", part, f->name);
}

#define REFUSED(part, change)                                                                                \
  do {                                                                                                       \
    lce_args a = p.args;                                                                                     \
    change;                                                                                                  \
    refused(context, &p, part, a);                                                                           \
  } while (0)

// A target out of range is refused; unchecked, its loss is NaN, and all else as if it were ignored.
CONTEXT_TEST(test_targets_out_of_range) {
  const int64_t wrong[] = {101, -1, -99, INT32_MAX, INT32_MIN, (1LL << 32) + 5, INT64_MIN};
  for (int bits = 0; bits < 8; bits++) {
    bool wide = bits & 4;
    Problem p = make_problem(h, (Shape){29, 17, 101, 8, .terms = true, .logits = bits & 1,
                                        .materialized = bits & 2, .wide = wide});
    int count = wide ? 7 : 5;
    for (int i = 0; i < count; i++) { // in the place of tokens that are ignored
      if (wide)
        ((int64_t *)p.args.targets)[3 * i + 1] = wrong[i];
      else
        ((int32_t *)p.args.targets)[3 * i + 1] = (int32_t)wrong[i];
    }
    for (int check = 0; check < 2; check++)
      REFUSED("targets[1] is 101, which is neither in [0, 101) nor -100", a.check_targets = check);
    p.args.check_targets = -1;
    run(context, &p.args);
    for (int i = 0; i < count; i++) {
      assert_true(isnan(p.args.loss[3 * i + 1]));
      p.args.loss[3 * i + 1] = 0;
    }
    check_results(&p);
  }
  Problem p = make_problem(h, (Shape){5000, 1, 3, .forward_only = true}); // more than are read at a time
  ((int32_t *)p.args.targets)[4998] = 3;
  REFUSED("targets[4998] is 3", a.mean = 0);
}

static Problem small_problem(Harness *h, bool all) {
  return make_problem(h, (Shape){7, 5, 3, 2, .terms = all, .logits = all, .materialized = all});
}

static void *moved(const void *address, int64_t bytes) {
  return (void *)((uintptr_t)address + (uintptr_t)bytes);
}

// An address that is never dereferenced: these calls are refused before anything is read or written.
static void *nowhere(int number) {
  return (void *)((uintptr_t)1 << 60 | (uintptr_t)number << 52);
}

CONTEXT_TEST(test_wrong_arguments) {
  Problem p = small_problem(h, false);
  static const struct {
    const char *name;
    size_t at;
    float wrong;
  } numbers[] = {{"scale", offsetof(lce_args, scale), NAN},
                 {"z_loss", offsetof(lce_args, z_loss), -1},
                 {"softcap", offsetof(lce_args, softcap), -1},
                 {"label_smoothing", offsetof(lce_args, label_smoothing), 7},
                 {"temperature", offsetof(lce_args, temperature), -1},
                 {"temperature", offsetof(lce_args, temperature), 1e-7f},
                 {"full_mass", offsetof(lce_args, sample), -1}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    const float wrong[] = {numbers[i].wrong, NAN, INFINITY, -INFINITY};
    char part[64];
    for (int k = 0; k < 4; k++) {
      snprintf(part, sizeof part, "%s is %g", numbers[i].name, (double)wrong[k]);
      REFUSED(part, memcpy((char *)&a + numbers[i].at, &wrong[k], sizeof *wrong));
    }
  }
  REFUSED("a chunk of -1 tokens; give 1 or more, or 0", a.chunk = -1);
  REFUSED("pass dx as well", (a.dx = NULL, a.sample = 1, a.scale = 0));
  float exps[7 * 33], a_row[7] = {0};
  REFUSED("exps are kept by a call without gradients, in one chunk", (a.exps = exps, a.chunk = 7));
  REFUSED("exps are kept by a call without gradients, in one chunk",
          (a.exps = exps, a.dx = NULL, a.dweight = NULL));
  lce_args gradients = p.args;
  gradients.known_log_prob = a_row, gradients.loss = NULL;
  gradients.token_z_loss = gradients.log_prob = gradients.logsumexp = NULL;
  REFUSED("leave out loss and outputs", a.known_log_prob = a_row);
  REFUSED("leave out loss and outputs", (a = gradients, a.predicted = elements(h, 7)));
  REFUSED("there is no label smoothing, sampling", (a = gradients, a.label_smoothing = 0.1f));
  REFUSED("there is no label smoothing, sampling", (a = gradients, a.materialized = 1));
  REFUSED("there is no label smoothing, sampling", (a = gradients, a.sample = 1));
  REFUSED("belong together", (a = gradients, a.known_entropy = a_row));
  REFUSED("known_entropy is there without known_log_prob", a.known_entropy = a_row);
  REFUSED("the end of exps and dx share memory", (a.dx = nowhere(1), a.exps = moved(a.dx, -7 * 128)));
  REFUSED("batch_invariant is there for a whole head, without sample, materialized and exps",
          (a.exps = exps, a.chunk = 7, a.dx = NULL, a.dweight = NULL, a.batch_invariant = 1));
  REFUSED("weight is 2 rows of 3, and no other rank", a.rows = 2);
  REFUSED("weight is 0 rows of 3, and no other rank", a.first_row = 3);
  REFUSED("rows is -1", a.rows = -1);
  REFUSED("label smoothing under a softcap excludes",
          (a.softcap = 3, a.label_smoothing = 0.1f, a.batch_invariant = 1));
  REFUSED("label smoothing under a softcap excludes",
          (a.softcap = 3, a.label_smoothing = 0.1f, a.log_sum_sq_probs = elements(h, 7)));
  REFUSED("3 rows from 1 on are no part of a vocabulary of 3", (a.first_row = 1, a.rows = 3));
  REFUSED("3 rows from -1 on", (a.first_row = -1, a.rows = 3));
  REFUSED("3 rows from 9223372036854775807 on", (a.first_row = INT64_MAX, a.rows = 3));
  REFUSED("the materialized mode has no log_sum_sq_probs",
          (a.materialized = 1, a.log_sum_sq_probs = elements(h, 7)));
  REFUSED("entropy_weights need known_log_prob", (a.sample = 1, a.entropy_weights = a.x));
  assert_int_equal(lce_held_bytes(context), 0);
  assert_int_equal(lce_linear_cross_entropy(context, NULL), 1);
  assert_non_null(strstr(lce_last_error(), "args must be there"));
  struct rusage usage[2];
  for (int turn = 0; turn < 2; turn++) { // the first is what the allocator grows by
    for (int i = 0; i < 2000; i++) refused(context, &p, "softcap", (p.args.softcap = -1, p.args));
    getrusage(RUSAGE_SELF, &usage[turn]);
  }
#ifndef __SANITIZE_ADDRESS__ // which keeps freed memory, and reports leaks itself
  assert_in_range(usage[1].ru_maxrss - usage[0].ru_maxrss, 0, 1023); // KiB
#endif
  p.args.softcap = 0;
  run(context, &p.args); // and the context still works, and holds no more than another
  check_results(&p);
  lce_context *fresh = context_on_cpu();
  run(fresh, &p.args);
  assert_int_equal(lce_held_bytes(context), lce_held_bytes(fresh));
  lce_destroy(fresh);
}

// Sizes that no tensor can have, or whose product overflows 64 bits.
CONTEXT_TEST(test_impossible_sizes) {
  Problem p = small_problem(h, false);
  const int64_t impossible[] = {
      0, -1, INT64_MIN, INT32_MAX, INT64_C(1) << 31, INT64_C(1) << 32, (INT64_C(1) << 32) + 3, INT64_MAX};
  for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++) {
    const char *why = impossible[i] < 1 ? "must be 1 or more" : "counted in 32 bits";
    REFUSED(why, a.tokens = impossible[i]);
    REFUSED(why, a.hidden_size = impossible[i]);
    REFUSED(why, a.vocab_size = impossible[i]);
  }
  REFUSED("hidden_size is -9223372036854775808", a.hidden_size = INT64_MIN);
  const int64_t most = INT32_MAX - 65535;
  REFUSED("x of 2147418112 by 2147418112", a.tokens = a.hidden_size = most);
  REFUSED("weight of 2147418112 by 2147418112", a.vocab_size = a.hidden_size = most);
  REFUSED("x of 2147418112 by 65536", (a.tokens = most, a.hidden_size = 65536));
  lce_args large = {.tokens = most, .hidden_size = 1, .vocab_size = most, .scale = 1, .chunk = most};
  large.x = nowhere(0), large.weight = nowhere(1), large.targets = nowhere(2), large.loss = nowhere(3);
  refused(context, &p, "the logits of 2147418112 by 2147418112 elements", large);
  refused(context, &p, "a smaller chunk", large);
  large.chunk = 0, large.materialized = true;
  refused(context, &p, "materialized = 0", large);
  large.materialized = false, large.chunk = INT64_MAX;
  refused(context, &p, "a smaller chunk", large);
  large.chunk = 1 << 14, large.dx = nowhere(4), large.dweight = nowhere(5); // nearly all addresses there are
  refused(context, &p, "out of memory", large);
  refused(context, &p, "a smaller chunk, or fewer tokens in one call", large);
  assert_int_equal(lce_held_bytes(context), 0);
  run(context, &p.args);
  check_results(&p);
}

// Each tensor absent, misaligned, beyond the last address, or overlapping another if one of them is written.
CONTEXT_TEST(test_impossible_addresses) {
  Problem p = small_problem(h, true);
  // Addresses are refused before it is for the materialized mode.
  p.args.log_sum_sq_probs = make_problem(h, (Shape){7, 5, 3, 2, .logits = true}).args.log_sum_sq_probs;
  char part[64];
  for (const Field *f = fields; f->name; f++) {
    float *place = *in_call(&p.args, f);
    int64_t bytes = 4 * count_of(&p.args, f);
    snprintf(part, sizeof part, "%s is NULL", f->name);
    if (f->use == NEEDED || is(f, "loss")) REFUSED(part, *in_call(&a, f) = NULL);
    for (int by = -1; by < 4; by++) {
      snprintf(part, sizeof part, "%s lies at", f->name);
      if (by) REFUSED(part, *in_call(&a, f) = moved(place, by));
    }
    snprintf(part, sizeof part, "%s at 0xfffffffffffffff8 would end beyond the last address", f->name);
    REFUSED(part, *in_call(&a, f) = moved(NULL, -8));
    for (const Field *g = fields; g < f; g++) {
      if (f->use != WRITTEN && g->use != WRITTEN) continue;
      float *other = *in_call(&p.args, g);
      snprintf(part, sizeof part, "and %s share memory", f->name);
      REFUSED(part, *in_call(&a, f) = other);
      REFUSED(part, *in_call(&a, f) = moved(other, 4 * count_of(&p.args, g) - 4));
      REFUSED(part, *in_call(&a, f) = moved(other, 4 - bytes));
    }
  }
  REFUSED("targets lies at", (a.targets = moved(nowhere(1), 4), a.targets_int64 = true));
  // Neighbours share nothing, and what is only read may be read twice.
  p.args.log_prob = elements(h, 14), p.args.logsumexp = p.args.log_prob + 7;
  p.args.log_sum_sq_probs = NULL;
  p.args.entropy_weights = p.args.token_weights;
  p.want.entropy_weights = p.want.token_weights;
  reference_loss(&p.want);
  run(context, &p.args);
  check_results(&p);
}

HARNESS_TEST(test_wrong_contexts) {
  const struct {
    const char *device, *dtype, *part;
  } wrong[] = {{"abacus", "fp32", "neither"},
               {"cpu", "bf16", "fp32 only"},
               {"cpu", "int3", "dtype is \"int3\", which is neither"},
               {NULL, "fp32", "is NULL"},
               {"cpu", NULL, "is NULL"}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    assert_null(lce_create(wrong[i].device, 0, wrong[i].dtype));
    assert_non_null(strstr(lce_last_error(), wrong[i].part));
  }
  assert_null(lce_create("cuda", 1 << 20, "bf16")); // there is no such GPU, or none at all
  assert_true(strlen(lce_last_error()) > 0);
  lce_args args = {0};
  assert_int_equal(lce_linear_cross_entropy(NULL, &args), 1);
  assert_non_null(strstr(lce_last_error(), "NULL"));
  assert_int_equal(lce_synchronize(NULL), 1);
  assert_int_equal(lce_held_bytes(NULL), 0);
  lce_destroy(NULL);
}

// The only rank's collectives, which call the library themselves, and one of which fails.
typedef struct {
  lce_context *context, *other;
  const lce_args *args;
  int calls, failing, mistakes;
} Rank;

static int copy_and_call(void *user, int kind, void *out, const void *x, int64_t count, int dtype) {
  Rank *r = user;
  r->mistakes += !lce_linear_cross_entropy(r->other, NULL) || !strstr(lce_last_error(), "args must be there");
  r->mistakes += !lce_linear_cross_entropy(r->context, r->args) || !strstr(lce_last_error(), "is in use");
  r->mistakes += lce_linear_cross_entropy(r->other, r->args) || lce_synchronize(r->context);
  memmove(out, x, (size_t)count * 4);
  return ++r->calls == r->failing;
}

HARNESS_TEST(test_collectives) {
  Rank rank = {.context = context_on_cpu(), .other = context_on_cpu()};
  assert_int_equal(lce_join(rank.context, 0, 1, copy_and_call, &rank), 0);
  Problem inner = small_problem(h, true);
  rank.args = &inner.args;
  for (rank.failing = 1;; rank.failing++) { // until all have failed once
    Problem p = make_problem(h, (Shape){20 + rank.failing, 17, 101, .chunk = 8}); // needs more each time
    p.args.rows = 101;
    rank.calls = 0;
    if (!lce_linear_cross_entropy(rank.context, &p.args)) break;
    assert_non_null(strstr(lce_last_error(), "the caller's collective failed on rank 0 of 1"));
    assert_int_equal(rank.calls, rank.failing);
  }
  rank.failing = 0;
  Problem p = make_problem(h, (Shape){100, 17, 101, .chunk = 8});
  p.args.rows = 101;
  run(rank.context, &p.args);
  check_results(&p);
  assert_true(rank.calls > 4 && rank.mistakes == 0);
  assert_true(lce_held_bytes(rank.context) > lce_held_bytes(rank.other));
  lce_destroy(rank.context);
  run(rank.other, &inner.args); // the other is still in use
  check_results(&inner);
  lce_destroy(rank.other);
}

typedef struct {
  Problem problem;
  lce_context *context; // made by another thread, or NULL
  const char *dtype;    // that a context is asked for, and is not there
  int failures;
} Worker;

// Right and wrong calls and contexts alternate; an error must be reported to this thread alone.
static void *work(void *given) {
  Worker *w = given;
  if (!w->context) w->context = lce_create("cpu", 0, "fp32");
  for (int i = 1; i <= 30; i++) {
    lce_args wrong = w->problem.args;
    wrong.tokens = -i * w->problem.args.hidden_size;
    char part[64];
    snprintf(part, sizeof part, "tokens is %lld,", (long long)wrong.tokens);
    w->failures += !lce_linear_cross_entropy(w->context, &wrong) || !strstr(lce_last_error(), part);
    w->failures += lce_create("cpu", 0, w->dtype) != NULL || !strstr(lce_last_error(), w->dtype);
    w->failures += lce_linear_cross_entropy(w->context, &w->problem.args) || lce_synchronize(w->context);
  }
  return NULL;
}

static void *destroy(void *context) {
  lce_destroy(context);
  return NULL;
}

static jmp_buf caught;
static pthread_t catcher;
static int sentences; // that came to the program's own handler, in the thread that failed

static void catch_sentence(const char *sentence) {
  if (strcmp(sentence, "the program's own") || !pthread_equal(pthread_self(), catcher)) abort();
  sentences++;
  longjmp(caught, 1);
}

// Threads with errors of their own beside the program's fail handler. Contexts begin and end in any thread.
HARNESS_TEST(test_threads) {
  enum { WORKERS = 4, FAILURES = 200 };
  const char *dtypes[] = {"int1", "int2", "int3", "int4"};
  Worker workers[WORKERS];
  for (int i = 0; i < WORKERS; i++) {
    Shape s = {29 + i, 17 - i, 101, 8, .terms = i & 1, .logits = i & 2};
    workers[i] = (Worker){make_problem(h, s), i % 2 ? context_on_cpu() : NULL, dtypes[i], 0};
  }
  lce_context *context = context_on_cpu(); // which must leave nothing behind in this thread
  catcher = pthread_self();
  fail_set_handler(catch_sentence);
  pthread_t threads[WORKERS], last;
  for (int i = 0; i < WORKERS; i++) assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  for (sentences = 0; sentences < FAILURES;) {
    assert_int_equal(lce_linear_cross_entropy(context, NULL), 1);
    if (!setjmp(caught)) fail("the program's own");
  }
  for (int i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
  fail_set_handler(NULL);
  assert_int_equal(sentences, FAILURES);
  lce_destroy(context);
  for (int i = 0; i < WORKERS; i++) {
    assert_int_equal(pthread_create(&last, NULL, destroy, workers[i].context), 0);
    pthread_join(last, NULL);
    assert_int_equal(workers[i].failures, 0);
    check_results(&workers[i].problem);
  }
}

TEST_MAIN(run_on_backend("cpu"))
