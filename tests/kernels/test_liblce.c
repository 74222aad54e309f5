// The C interface (kernels/liblce.h) called directly: every value against float64, wrong arguments that give a
// sentence and write nothing, targets that are out of range, several contexts and threads at a time. All
// tensors are allocations of exactly their size, so that AddressSanitizer detects reads or writes outside
// them.

#include <pthread.h>

#include "base/fail.h"
#include "base/random.h"
#include "kernels/liblce.h"
#include "tests/reference.h"
#include "tests/test.h"

static _Noreturn void fail_sentence(const char *sentence) {
  fail("%s", sentence);
}

// --- problems ----------------------------------------------------------------------------------------------

enum { MAX_BLOCKS = 64 };

// A call, what it should give, and all that was allocated for both.
typedef struct {
  lce_args args;
  ReferenceLoss want;
  void *blocks[MAX_BLOCKS];
  size_t count;
} Problem;

static void *block(Problem *p, int64_t count, size_t element) {
  void *data = malloc((size_t)count * element);
  assert_non_null(data);
  assert_true(p->count < MAX_BLOCKS);
  return p->blocks[p->count++] = data;
}

static void release(Problem *p) {
  for (size_t i = 0; i < p->count; i++) free(p->blocks[i]);
  p->count = 0;
}

// Random elements for the library, and the same for the reference; positive for class weights.
static float *random_elements(Problem *p, const double **same, int64_t count, double scale, bool positive) {
  float *narrow = block(p, count, sizeof *narrow);
  double *wide = block(p, count, sizeof *wide);
  for (int64_t i = 0; i < count; i++) {
    double x = scale * random_normal(1, p->count, (uint64_t)i);
    wide[i] = narrow[i] = (float)(positive ? fabs(x) + 0.1 : x);
  }
  *same = wide;
  return narrow;
}

// What a call has not written is still this.
static const float UNWRITTEN = 12345.678f;

static float *unwritten(Problem *p, double **want, int64_t count) {
  float *data = block(p, count, sizeof *data);
  for (int64_t i = 0; i < count; i++) data[i] = UNWRITTEN;
  *want = block(p, count, sizeof **want);
  return data;
}

typedef struct {
  int64_t tokens, hidden, vocab, chunk;
  bool terms, logits; // terms of whole rows; what needs a row's logits side by side
  bool materialized, wide, forward_only;
} Case;

// Every third token is ignored, but never all.
static Problem make_problem(const Case *c) {
  int64_t n = c->tokens, h = c->hidden, v = c->vocab;
  Problem p = {.args = {.tokens = n,
                        .hidden_size = h,
                        .vocab_size = v,
                        .chunk = c->chunk,
                        .materialized = c->materialized,
                        .targets_int64 = c->wide,
                        .scale = 0.5f},
               .want = {.rows = n, .hidden = h, .vocab = v, .scale = 0.5}};
  lce_args *a = &p.args;
  ReferenceLoss *r = &p.want;
  a->x = random_elements(&p, &r->x, n * h, 1, false);
  a->weight = random_elements(&p, &r->weight, v * h, 1 / sqrt((double)h), false);
  int32_t *targets = block(&p, n, sizeof *targets);
  int64_t *wide = block(&p, n, sizeof *wide);
  for (int64_t i = 0; i < n; i++)
    wide[i] = targets[i] =
        i % 3 == 1 ? IGNORE_INDEX : (int32_t)(random_bits(2, 0, (uint64_t)i) % (uint64_t)v);
  r->targets = targets;
  a->targets = c->wide ? (void *)wide : targets;
  a->loss = unwritten(&p, &r->loss, n);
  a->log_prob = unwritten(&p, &r->log_prob, n);
  a->logsumexp = unwritten(&p, &r->logsumexp, n);
  if (!c->forward_only) {
    a->dx = unwritten(&p, &r->dx, n * h);
    a->dweight = unwritten(&p, &r->dweight, v * h);
  }
  if (c->terms) {
    a->mean = r->mean = true;
    r->label_smoothing = a->label_smoothing = 0.125f;
    r->z_loss = a->z_loss = 0.03125f;
    r->temperature = a->temperature = 1.5f;
    a->class_weights = random_elements(&p, &r->class_weights, v, 1, true);
    a->token_weights = random_elements(&p, &r->token_weights, n, 1, false);
    a->token_z_loss = unwritten(&p, &r->token_z_loss, n);
  }
  if (c->logits) {
    r->softcap = a->softcap = 3;
    a->bias = random_elements(&p, &r->bias, v, 1, false);
    a->entropy_weights = random_elements(&p, &r->entropy_weights, n, 1, false);
    a->entropy = unwritten(&p, &r->entropy, n);
    a->max_logit = unwritten(&p, &r->max_logit, n);
    a->predicted = block(&p, n, sizeof *a->predicted);
    r->predicted = block(&p, n, sizeof *r->predicted);
    if (!c->forward_only) a->dbias = unwritten(&p, &r->dbias, v);
  }
  reference_loss(r);
  return p;
}

static void close_to(const char *what, const float *got, const double *want, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
  for (int64_t i = 0; i < count; i++)
    if (!(fabs(got[i] - want[i]) <= 1e-5 * largest + 1e-7))
      fail_msg("%s[%lld] is %.9g where %.9g is right", what, (long long)i, (double)got[i], want[i]);
}

static void check_results(const Problem *p) {
  const lce_args *a = &p->args;
  const ReferenceLoss *r = &p->want;
  int64_t n = r->rows, gradients = a->dx != NULL;
  const struct {
    const char *name;
    const float *got;
    const double *want;
    int64_t count;
  } results[] = {{"loss", a->loss, r->loss, n},
                 {"z_loss", a->token_z_loss, r->token_z_loss, n},
                 {"log_prob", a->log_prob, r->log_prob, n},
                 {"logsumexp", a->logsumexp, r->logsumexp, n},
                 {"entropy", a->entropy, r->entropy, n},
                 {"max_logit", a->max_logit, r->max_logit, n},
                 {"dx", a->dx, r->dx, gradients * n * r->hidden},
                 {"dweight", a->dweight, r->dweight, gradients * r->vocab * r->hidden},
                 {"dbias", a->dbias, r->dbias, r->vocab}};
  for (size_t i = 0; i < sizeof results / sizeof *results; i++)
    if (results[i].got) close_to(results[i].name, results[i].got, results[i].want, results[i].count);
  for (int64_t i = 0; a->predicted && i < n; i++) assert_true(a->predicted[i] == r->predicted[i]);
}

static void run(lce_context *context, const lce_args *args) {
  if (lce_linear_cross_entropy(context, args) || lce_synchronize(context)) fail_msg("%s", lce_last_error());
}

static lce_context *context_on_cpu(void) {
  lce_context *context = lce_create("cpu", 0, "fp32");
  if (!context) fail_msg("%s", lce_last_error());
  return context;
}

// --- tests -------------------------------------------------------------------------------------------------

// Every way through the layer, with targets of both kinds, on one context whose stack grows on the way.
TEST(test_values) {
  const int64_t shapes[][4] = {{1, 1, 1, 1}, {7, 5, 3, 2}, {29, 17, 101, 8}, {33, 8, 515, 0}};
  lce_context *context = context_on_cpu();
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
    for (int bits = 0; bits < 32; bits++) {
      Problem p = make_problem(&(Case){shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], bits & 1,
                                       bits & 2, bits & 4, bits & 8, bits & 16});
      run(context, &p.args);
      check_results(&p);
      assert_true(lce_held_bytes(context) > 0);
      release(&p);
    }
  lce_destroy(context);
}

// Gradients are added to what is there when that is asked for.
TEST(test_accumulate) {
  lce_context *context = context_on_cpu();
  Problem p = make_problem(&(Case){29, 17, 101, 8, .terms = true, .logits = true});
  run(context, &p.args);
  p.args.accumulate = true;
  run(context, &p.args);
  for (int64_t i = 0; i < 101 * 17; i++) p.want.dweight[i] *= 2;
  for (int64_t i = 0; i < 101; i++) p.want.dbias[i] *= 2;
  check_results(&p);
  release(&p);
  lce_destroy(context);
}

// The mean of what `count` seeds gave, and the mean of the squared distances from the exact gradient.
typedef struct {
  double *mean, squares;
} Draws;

static void add_draw(Draws *d, const float *got, const float *exact, int64_t count, int seeds) {
  for (int64_t i = 0; i < count; i++) {
    double apart = (double)got[i] - (double)exact[i];
    d->mean[i] += (double)got[i] / seeds;
    d->squares += apart * apart / seeds;
  }
}

static void check_draws(const Draws *d, const float *exact, int64_t count, int seeds) {
  double off = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    off += (d->mean[i] - (double)exact[i]) * (d->mean[i] - (double)exact[i]);
    size += (double)exact[i] * (double)exact[i];
  }
  if (!(d->squares > 0.01 * size && off < 4 * d->squares / seeds))
    fail_msg("squared norm %g: one seed is off by %g, the mean of %d by %g", size, d->squares, seeds, off);
}

// With sampling losses stay the same to the bit, and gradients keep their expectation; each seed gives its own. Below
// 1/32 they are the exact ones.
TEST(test_sampling) {
  enum { N = 290, H = 12, V = 700, SEEDS = 256 };
  lce_context *context = context_on_cpu();
  const Case c = {N, H, V, 150, .terms = true};
  Problem exact = make_problem(&c), p = make_problem(&c), again = make_problem(&c);
  run(context, &exact.args);
  Draws dx = {.mean = calloc(N * H, sizeof(double))}, dweight = {.mean = calloc(V * H, sizeof(double))};
  p.args.sample = 60;
  for (int seed = 0; seed < SEEDS; seed++) {
    p.args.sample_seed = (uint64_t)seed << 40;
    run(context, &p.args);
    assert_memory_equal(p.args.loss, exact.args.loss, N * sizeof(float));
    assert_memory_equal(p.args.logsumexp, exact.args.logsumexp, N * sizeof(float));
    add_draw(&dx, p.args.dx, exact.args.dx, N * H, SEEDS);
    add_draw(&dweight, p.args.dweight, exact.args.dweight, V * H, SEEDS);
  }
  check_draws(&dx, exact.args.dx, N * H, SEEDS);
  check_draws(&dweight, exact.args.dweight, V * H, SEEDS);
  again.args.sample = 60, again.args.sample_seed = p.args.sample_seed;
  run(context, &again.args);
  assert_memory_equal(again.args.dweight, p.args.dweight, V * H * sizeof(float));
  again.args.sample_seed++;
  run(context, &again.args);
  assert_memory_not_equal(again.args.dweight, p.args.dweight, V * H * sizeof(float));
  again.args.sample = 1e-30f;
  run(context, &again.args);
  check_results(&again);
  assert_memory_equal(again.args.dx, exact.args.dx, N * H * sizeof(float));
  assert_memory_equal(again.args.dweight, exact.args.dweight, V * H * sizeof(float));
  free(dx.mean);
  free(dweight.mean);
  release(&exact);
  release(&p);
  release(&again);
  lce_destroy(context);
}

static void all_unwritten(const float *data, int64_t count) {
  for (int64_t i = 0; data && i < count; i++) assert_true(data[i] == UNWRITTEN);
}

// A target out of range is refused; unchecked, it makes that token's loss NaN, and all else is as if it were ignored.
TEST(test_targets_out_of_range) {
  const int64_t wrong[] = {101, -1, -99, INT32_MAX, INT32_MIN, (1LL << 32) + 5, INT64_MIN};
  enum { WRONG = sizeof wrong / sizeof *wrong };
  lce_context *context = context_on_cpu();
  for (int bits = 0; bits < 8; bits++) {
    bool wide = bits & 4;
    int count = wide ? WRONG : WRONG - 2;
    Case c = {29, 17, 101, 8, .terms = true, .logits = bits & 1, .materialized = bits & 2, .wide = wide};
    Problem p = make_problem(&c);
    for (int i = 0; i < count; i++) { // in the place of tokens that are ignored
      if (wide)
        ((int64_t *)p.args.targets)[3 * i + 1] = wrong[i];
      else
        ((int32_t *)p.args.targets)[3 * i + 1] = (int32_t)wrong[i];
    }
    for (int check = 0; check < 2; check++) {
      p.args.check_targets = check;
      assert_int_equal(lce_linear_cross_entropy(context, &p.args), 1);
      assert_non_null(strstr(lce_last_error(), "targets[1] is 101, which is neither in [0, 101) nor -100"));
      all_unwritten(p.args.loss, p.args.tokens);
      all_unwritten(p.args.dweight, p.args.vocab_size * p.args.hidden_size);
    }
    p.args.check_targets = -1;
    run(context, &p.args);
    for (int i = 0; i < count; i++) {
      assert_true(isnan(p.args.loss[3 * i + 1]));
      p.args.loss[3 * i + 1] = 0;
    }
    check_results(&p);
    release(&p);
  }
  lce_destroy(context);
}

static void refused(lce_context *context, const Problem *p, const char *part, lce_args args) {
  assert_int_equal(lce_linear_cross_entropy(context, &args), 1);
  if (!strstr(lce_last_error(), part)) fail_msg("\"%s\" says nothing of \"%s\"", lce_last_error(), part);
  const lce_args *a = &p->args;
  all_unwritten(a->loss, a->tokens);
  all_unwritten(a->log_prob, a->tokens);
  all_unwritten(a->logsumexp, a->tokens);
  all_unwritten(a->dx, a->tokens * a->hidden_size);
  all_unwritten(a->dweight, a->vocab_size * a->hidden_size);
}

#define REFUSED(part, change)                                                                                \
  do {                                                                                                       \
    lce_args a = p.args;                                                                                     \
    change;                                                                                                  \
    refused(context, &p, part, a);                                                                           \
  } while (0)

TEST(test_wrong_arguments) {
  lce_context *context = context_on_cpu();
  Problem p = make_problem(&(Case){7, 5, 3, 2, .terms = false});
  REFUSED("must be 1 or more", a.tokens = 0);
  REFUSED("must be 1 or more", a.hidden_size = -1);
  REFUSED("must be 1 or more", a.vocab_size = 0);
  REFUSED("x is NULL", a.x = NULL);
  REFUSED("weight is NULL", a.weight = NULL);
  REFUSED("targets is NULL", a.targets = NULL);
  REFUSED("loss is NULL", a.loss = NULL);
  REFUSED("a chunk of -1 tokens; give 1 or more, or 0", a.chunk = -1);
  REFUSED("give dx, too", (a.dx = NULL, a.sample = 1));
  REFUSED("a bias has a gradient where weight has one", a.bias = a.x);
  REFUSED("weight is 2 rows of 3, and no other rank", a.rows = 2);
  REFUSED("rows is -1", a.rows = -1);
  REFUSED("3 rows from 1 on are no part of a vocabulary of 3", (a.first_row = 1, a.rows = 3));
  REFUSED("3 rows from 9223372036854775807 on", (a.first_row = INT64_MAX, a.rows = 3));
  REFUSED("label_smoothing is 7", a.label_smoothing = 7);
  REFUSED("softcap is -1", a.softcap = -1);
  REFUSED("temperature is -1", a.temperature = -1);
  const float never[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 3; i++) {
    REFUSED("scale is ", a.scale = never[i]);
    REFUSED("z_loss is ", a.z_loss = never[i]);
    REFUSED("softcap is ", a.softcap = never[i]);
    REFUSED("label_smoothing is ", a.label_smoothing = never[i]);
    REFUSED("temperature is ", a.temperature = never[i]);
    REFUSED("full_mass is ", a.sample = never[i]);
  }
  REFUSED("temperature is 1e-07, which is neither 0 (none) nor a finite number from 1e-06 on",
          a.temperature = 1e-7f);
  REFUSED("full_mass is -1", a.sample = -1);
  REFUSED("full_mass is nan", a.sample = NAN);
  REFUSED("sampling acts on exponentials", (a.sample = 1, a.materialized = 1));
  REFUSED("sampling acts on exponentials", (a.sample = 1, a.softcap = 30));
  REFUSED("sampling acts on exponentials", (a.sample = 1, a.entropy_weights = a.x));
  REFUSED("give dx, too", (a.dx = NULL, a.sample = 1, a.scale = 0));
  assert_int_equal(lce_held_bytes(context), 0);
  assert_int_equal(lce_linear_cross_entropy(context, NULL), 1);
  assert_non_null(strstr(lce_last_error(), "args must be there"));
  run(context, &p.args); // and the context still works
  check_results(&p);
  release(&p);
  lce_destroy(context);
}

// An address that is never dereferenced: these calls are refused before anything is read or written.
static void *nowhere(int number) {
  return (void *)((uintptr_t)1 << 60 | (uintptr_t)number << 52);
}

// Sizes that no tensor can have, or whose product overflows 64 bits.
TEST(test_impossible_sizes) {
  lce_context *context = context_on_cpu();
  Problem p = make_problem(&(Case){7, 5, 3, 2, .terms = false});
  const int64_t too_many[] = {INT32_MAX, INT64_C(1) << 31, INT64_C(1) << 32, (INT64_C(1) << 32) + 3,
                              INT64_MAX};
  for (size_t i = 0; i < sizeof too_many / sizeof *too_many; i++) {
    REFUSED("tokens is", a.tokens = too_many[i]);
    REFUSED("hidden_size is", a.hidden_size = too_many[i]);
    REFUSED("vocab_size is", a.vocab_size = too_many[i]);
  }
  REFUSED("tokens is -9223372036854775808", a.tokens = INT64_MIN);
  const int64_t most = INT32_MAX - 65535;
  REFUSED("x of 2147418112 by 2147418112", a.tokens = a.hidden_size = most);
  REFUSED("weight of 2147418112 by 2147418112", a.vocab_size = a.hidden_size = most);
  REFUSED("x of 2147418112 by 65536", (a.tokens = most, a.hidden_size = 65536));
  lce_args large = {.tokens = most,
                    .hidden_size = 1,
                    .vocab_size = most,
                    .x = nowhere(0),
                    .weight = nowhere(1),
                    .targets = nowhere(2),
                    .loss = nowhere(3),
                    .scale = 1};
  large.chunk = most;
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
  release(&p);
  lce_destroy(context);
}

// The address so many bytes further on.
static void *moved(const void *address, intptr_t bytes) {
  return (void *)((uintptr_t)address + (uintptr_t)bytes);
}

TEST(test_impossible_addresses) {
  lce_context *context = context_on_cpu();
  Problem p = make_problem(&(Case){7, 5, 3, 2, .terms = true, .logits = true});
  REFUSED("x lies at", a.x = moved(a.x, 1));
  REFUSED("weight lies at", a.weight = moved(a.weight, 2));
  REFUSED("bias lies at", a.bias = moved(a.bias, 3));
  REFUSED("targets lies at", a.targets = moved(a.targets, 2));
  REFUSED("targets lies at", (a.targets = moved(nowhere(1), 4), a.targets_int64 = true));
  REFUSED("class_weights lies at", a.class_weights = moved(a.class_weights, 1));
  REFUSED("token_weights lies at", a.token_weights = moved(a.token_weights, 1));
  REFUSED("entropy_weights lies at", a.entropy_weights = moved(a.entropy_weights, 1));
  REFUSED("loss lies at", a.loss = moved(a.loss, -1));
  REFUSED("dx lies at", a.dx = moved(a.dx, 2));
  REFUSED("dweight lies at", a.dweight = moved(a.dweight, 2));
  REFUSED("dbias lies at", a.dbias = moved(a.dbias, 2));
  REFUSED("token_z_loss lies at", a.token_z_loss = moved(a.token_z_loss, 2));
  REFUSED("log_prob lies at", a.log_prob = moved(a.log_prob, 2));
  REFUSED("logsumexp lies at", a.logsumexp = moved(a.logsumexp, 2));
  REFUSED("entropy lies at", a.entropy = moved(a.entropy, 2));
  REFUSED("max_logit lies at", a.max_logit = moved(a.max_logit, 2));
  REFUSED("correct lies at", a.correct = moved(nowhere(1), 2));
  REFUSED("predicted lies at", a.predicted = moved(a.predicted, 2));
  REFUSED("beyond the last address", a.x = (void *)(UINTPTR_MAX - 7));
  REFUSED("beyond the last address", a.dweight = (void *)(UINTPTR_MAX - 3));
  REFUSED("x and dx share memory", a.dx = (void *)a.x);
  REFUSED("weight and dweight share memory", a.dweight = moved(a.weight, 4 * 14));
  REFUSED("loss and log_prob share memory", a.log_prob = moved(a.loss, 4 * 6));
  REFUSED("token_weights and loss share memory", a.token_weights = a.loss);
  // Neighbours share nothing, and what is only read may be read twice.
  float *both = block(&p, 14, sizeof *both);
  p.args.log_prob = both, p.args.logsumexp = both + 7;
  p.args.entropy_weights = p.args.token_weights;
  p.want.entropy_weights = p.want.token_weights;
  reference_loss(&p.want);
  run(context, &p.args);
  check_results(&p);
  release(&p);
  lce_destroy(context);
}

// Gradients that a scale of 0 makes 0, or leaves alone; the losses are what they are.
TEST(test_scale_of_zero) {
  lce_context *context = context_on_cpu();
  for (int bits = 0; bits < 4; bits++) {
    Case c = {29, 17, 101, 8, .terms = true, .logits = bits & 1, .materialized = bits & 2};
    Problem p = make_problem(&c);
    run(context, &p.args);
    p.args.scale = 0, p.args.accumulate = true;
    run(context, &p.args);
    for (int64_t i = 0; i < 29 * 17; i++) p.want.dx[i] = 0;
    check_results(&p);
    p.args.accumulate = false;
    run(context, &p.args);
    for (int64_t i = 0; i < 101 * 17; i++) p.want.dweight[i] = 0;
    for (int64_t i = 0; p.want.dbias && i < 101; i++) p.want.dbias[i] = 0;
    check_results(&p);
    release(&p);
  }
  lce_destroy(context);
}

TEST(test_wrong_contexts) {
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

TEST(test_scale) {
  lce_context *context = context_on_cpu();
  float x[3] = {1, -2, 4}, out[3] = {UNWRITTEN, UNWRITTEN, UNWRITTEN}, half = 0.5f;
  assert_int_equal(lce_scale(context, out, 0, x, 0, 0, &half, NULL), 0);
  assert_true(out[0] == UNWRITTEN);
  assert_int_equal(lce_scale(context, out, 0, x, 0, 2, &half, NULL), 0);
  assert_true(out[0] == 0.5f && out[1] == -1 && out[2] == UNWRITTEN);
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
  lce_destroy(context);
}

// Calls of two contexts in turn; the first goes while the second is still in use.
TEST(test_two_contexts) {
  lce_context *first = context_on_cpu(), *second = context_on_cpu();
  Problem a = make_problem(&(Case){29, 17, 101, 8, .terms = true}),
          b = make_problem(&(Case){33, 8, 515, 4, .logits = true});
  run(first, &a.args);
  run(second, &b.args);
  int64_t held = lce_held_bytes(first);
  assert_true(held != lce_held_bytes(second));
  check_results(&a);
  a.args.loss[0] = UNWRITTEN;
  run(first, &a.args);
  assert_int_equal(lce_held_bytes(first), held);
  check_results(&a);
  lce_destroy(first);
  b.args.loss[0] = UNWRITTEN;
  run(second, &b.args);
  check_results(&b);
  lce_destroy(second);
  release(&a);
  release(&b);
}

typedef struct {
  Problem problem;
  const char *dtype; // that a context is asked for, and is not there
  int failures;
} Worker;

// Right and wrong calls and contexts alternate; an error must be reported to this thread alone.
static void *work(void *given) {
  Worker *w = given;
  lce_context *context = lce_create("cpu", 0, "fp32");
  for (int i = 1; i <= 30; i++) {
    lce_args wrong = w->problem.args;
    wrong.tokens = -i * w->problem.args.hidden_size;
    char part[64];
    snprintf(part, sizeof part, "tokens is %lld,", (long long)wrong.tokens);
    w->failures += !lce_linear_cross_entropy(context, &wrong) || !strstr(lce_last_error(), part);
    w->failures += lce_create("cpu", 0, w->dtype) != NULL || !strstr(lce_last_error(), w->dtype);
    w->failures += lce_linear_cross_entropy(context, &w->problem.args) || lce_synchronize(context);
  }
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

// Threads that each have a context and errors of their own, in a program that has its own fail handler.
TEST(test_threads) {
  enum { WORKERS = 4, FAILURES = 200 };
  const char *dtypes[] = {"int1", "int2", "int3", "int4"};
  Worker workers[WORKERS];
  for (int i = 0; i < WORKERS; i++)
    workers[i] =
        (Worker){.problem = make_problem(&(Case){29 + i, 17 - i, 101, 8, .terms = i & 1, .logits = i & 2}),
                 .dtype = dtypes[i]};
  lce_context *context = context_on_cpu(); // which must leave nothing behind in this thread
  catcher = pthread_self();
  fail_set_handler(catch_sentence);
  pthread_t threads[WORKERS];
  for (int i = 0; i < WORKERS; i++) assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  for (sentences = 0; sentences < FAILURES;) {
    assert_int_equal(lce_linear_cross_entropy(context, NULL), 1);
    if (!setjmp(caught)) fail_sentence("the program's own");
  }
  for (int i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
  fail_set_handler(NULL);
  assert_int_equal(sentences, FAILURES);
  lce_destroy(context);
  for (int i = 0; i < WORKERS; i++) {
    assert_int_equal(workers[i].failures, 0);
    check_results(&workers[i].problem);
    release(&workers[i].problem);
  }
}

// A context made in one thread, used in a second that has never made one, and gone in a third.
static void *use(void *given) {
  Problem *p = ((void **)given)[1];
  lce_context *context = ((void **)given)[0];
  lce_args wrong = p->args;
  wrong.tokens = 0;
  bool right = lce_linear_cross_entropy(context, &wrong) == 1 && strstr(lce_last_error(), "tokens is 0") &&
               lce_linear_cross_entropy(context, &p->args) == 0;
  return right ? given : NULL;
}

static void *destroy(void *context) {
  lce_destroy(context);
  return NULL;
}

TEST(test_context_of_another_thread) {
  Problem p = make_problem(&(Case){29, 17, 101, 8, .terms = true});
  void *given[] = {context_on_cpu(), &p}, *right;
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, use, given), 0);
  pthread_join(thread, &right);
  assert_non_null(right);
  check_results(&p);
  assert_int_equal(pthread_create(&thread, NULL, destroy, given[0]), 0);
  pthread_join(thread, NULL);
  release(&p);
}

int main(void) {
  return tests_run("the C interface", NULL, NULL);
}
