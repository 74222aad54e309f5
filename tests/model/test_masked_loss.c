// The loss of the counted tokens alone against the call for all tokens, some of whose targets are ignored;
// sampled, against float64; and with a head split over ranks, for which this program starts itself as 1 to 4
// ranks under mpirun (with LCE_GPU_RANKS=N under tools/launch, as 2 and N ranks with a GPU each).
#include "kernels/ranks/ranks.h"
#include "model/masked_loss.h"
#include "tests/loss_problem.h"
#include "tests/process.h"

typedef enum { ALL, NONE, ONE, LAST, ALL_BUT_ONE, TWO_THIRDS, ODD, PATTERNS } Pattern;

static bool counts(Pattern pattern, int64_t n, int64_t rows) {
  const bool table[PATTERNS] = {[ALL] = true,
                                [ONE] = n == rows / 2,
                                [LAST] = n == rows - 1,
                                [ALL_BUT_ONE] = n != rows / 2,
                                [TWO_THIRDS] = n % 3 != 1,
                                [ODD] = n * n % 7 < 3};
  return table[pattern];
}

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  int terms;
  bool outputs, accumulate, forward_only, materialized;
} Case;

static Tensor positions(Harness *h, const int32_t *targets, int64_t rows, int64_t *counted) {
  return ids_from(h, counted_positions(h, targets, rows, counted), rows);
}

// What a call gives.
enum {
  OUTPUTS = sizeof((TokenOutputs){0}).all / sizeof(Tensor),
  RESULTS = OUTPUTS + 4,
  OF_TOKENS = OUTPUTS + 2
};
typedef struct {
  Tensor of[RESULTS];
} Results;

static Results results(const LinearCrossEntropy *a) {
  Results r = {{a->loss, a->dx}};
  memcpy(r.of + 2, a->outputs.all, sizeof a->outputs.all);
  r.of[OF_TOKENS] = a->dweight, r.of[OF_TOKENS + 1] = a->dbias;
  return r;
}

// Of the ignored tokens everything is 0.
static void check_zeros(const char *what, Harness *h, const LinearCrossEntropy *a, const int32_t *targets) {
  Results r = results(a);
  for (int i = 0; i < OF_TOKENS; i++) {
    if (!tensor_exists(r.of[i])) continue;
    const double *values = values_of(h, r.of[i]);
    int64_t width = tensor_count(r.of[i]) / r.of[i].shape[0];
    for (int64_t k = 0; k < tensor_count(r.of[i]); k++)
      if (targets[k / width] == IGNORE_INDEX && values[k] != 0)
        fail_msg("%s: result %d of the ignored token %d is %g", what, i, (int)(k / width), values[k]);
  }
}

static void check_same(const char *what, Harness *h, const LinearCrossEntropy *got,
                       const LinearCrossEntropy *want, double size) {
  Results a = results(got), b = results(want);
  for (int i = 0; i < RESULTS; i++) {
    char text[160];
    snprintf(text, sizeof text, "%s, result %d", what, i);
    assert_int_equal(tensor_exists(a.of[i]), tensor_exists(b.of[i]));
    if (!tensor_exists(a.of[i])) continue;
    bool gradient = i == 1 || i >= OF_TOKENS;
    double terms = (double)(got->x.shape[0] + got->x.shape[1] + got->weight.shape[0]);
    Tolerance t =
        gradient ? of_size(within_stored(h, 8, terms), got->scale) : of_size(within(16, terms), size);
    if (a.of[i].dtype == DTYPE_I32 || got->mode == LCE_MATERIALIZED)
      check_bitwise_equal(h, text, a.of[i], b.of[i]);
    else
      check_values(h, text, a.of[i], values_of(h, b.of[i]), t);
  }
}

static LinearCrossEntropy call_of(Harness *h, const ReferenceLoss *p, const Case *c) {
  LinearCrossEntropy a = loss_call(h, p, c->materialized ? LCE_MATERIALIZED : LCE_FUSED, c->chunk);
  if (c->outputs) loss_call_all_outputs(h, &a, p);
  return a;
}

static ReferenceLoss make_problem(Harness *h, const Case *c, Pattern pattern) {
  ReferenceLoss p = loss_problem(h, c->rows, c->hidden, c->vocab, 2);
  loss_problem_add(h, &p, c->terms);
  for (int64_t n = 0; n < c->rows; n++)
    if (!counts(pattern, n, c->rows)) p.targets[n] = IGNORE_INDEX;
  if (!c->forward_only) reference_gradients(h, &p);
  return p;
}

// What x holds of ignored tokens is not read.
static void check_case(Harness *h, const Case *c, Pattern pattern) {
  char what[64];
  snprintf(what, sizeof what, "%d tokens of pattern %d, terms %d", (int)c->rows, pattern, c->terms);
  ReferenceLoss p = make_problem(h, c, pattern);
  LinearCrossEntropy want = call_of(h, &p, c);
  int64_t counted;
  Tensor rows = positions(h, p.targets, c->rows, &counted);
  for (int64_t i = 0; i < c->rows * c->hidden && !c->materialized && counted; i++)
    if (p.targets[i / c->hidden] == IGNORE_INDEX) p.x[i] = NAN;
  LinearCrossEntropy got = call_of(h, &p, c);
  if (c->accumulate) {
    LossBefore before = {0};
    loss_call_adds(h, &want, &before);
    got.accumulate = true;
    got.dweight = tensor_from(h, DTYPE_F32, before.dweight, c->vocab, c->hidden);
    if (tensor_exists(got.dbias)) got.dbias = vector_from(h, DTYPE_F32, before.dbias, c->vocab);
  }
  linear_cross_entropy(h->backend, want);
  masked_linear_cross_entropy(h->backend, got, rows, counted);
  check_zeros(what, h, &got, p.targets);
  check_same(what, h, &got, &want, 8 + 64 * p.z_loss);
}

TEST(test_as_with_all_tokens) {
  enum {
    SMOOTHED = TERM_SMOOTHING | TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS | TERM_BIAS | TERM_MEAN
  };
  enum { CAPPED = TERM_SOFTCAP | TERM_Z_LOSS | TERM_BIAS };
  static const Case cases[] = {
      {1, 1, 3, 1, .outputs = true},
      {29, 17, 101, 7, .terms = 0},
      {29, 17, 101, 7, .outputs = true, .accumulate = true},
      {29, 17, 101, 40, .terms = CAPPED, .outputs = true},
      {67, 33, 515, 16, .terms = SMOOTHED, .outputs = true},
      {67, 33, 515, 64, .terms = SMOOTHED, .accumulate = true},
      {61, 24, 203, 9, .terms = CAPPED, .outputs = true, .forward_only = true},
      {61, 24, 203, 20, .terms = SMOOTHED, .forward_only = true},
      {300, 16, 700, 128, .accumulate = true},
      {29, 17, 101, 7, .terms = SMOOTHED | TERM_SOFTCAP, .outputs = true, .materialized = true},
      {29, 17, 101, 7, .accumulate = true, .materialized = true},
      {29, 17, 101, 7, .forward_only = true, .materialized = true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
      check_case(*state, &cases[i], (Pattern)pattern);
      harness_pop(state);
    }
}

// Without a list of rows it is the call itself. With one, x and dx change places and have one type.
TEST(test_nothing_masked) {
  Harness *h = *state;
  const Case c = {29, 17, 101, 7, .outputs = true};
  ReferenceLoss p = make_problem(h, &c, TWO_THIRDS);
  LinearCrossEntropy want = call_of(h, &p, &c), got = call_of(h, &p, &c);
  linear_cross_entropy(h->backend, want);
  masked_linear_cross_entropy(h->backend, got, (Tensor){0}, 0);
  Results a = results(&got), b = results(&want);
  for (int i = 0; i < RESULTS; i++)
    if (tensor_exists(a.of[i])) check_bitwise_equal(h, "a result", a.of[i], b.of[i]);
  got.dx.dtype = h->dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
  assert_fails(h, "give them one type", masked_linear_cross_entropy(h->backend, got, got.targets, 3));
}

// The memory is the same however many tokens count.
TEST(test_memory) {
  Harness *h = *state;
  if (!strcmp(harness_backend(), "cpu")) skip(); // where operations are watched, and push more (refusals.c)
  Ledger *ledger = &h->backend->memory.ledger;
  const Case cases[] = {{300, 16, 700, 128, .outputs = true},
                        {144, 16, 700, 112, .terms = TERM_SMOOTHING},
                        {300, 16, 700, 128, .forward_only = true}};
  for (int i = 0; i < 3; i++)
    for (int sampled = 0; sampled < (i ? 1 : 2); sampled++) {
      size_t peak[PATTERNS];
      for (int pattern = 0; pattern < PATTERNS; pattern++) {
        ReferenceLoss p = make_problem(h, &cases[i], (Pattern)pattern);
        LinearCrossEntropy a = call_of(h, &p, &cases[i]);
        if (sampled) a.sampling.full_mass = 1, a.outputs = (TokenOutputs){0};
        int64_t counted;
        Tensor rows = positions(h, p.targets, cases[i].rows, &counted);
        size_t before = ledger->total;
        ledger_reset_peak(ledger);
        masked_linear_cross_entropy(h->backend, a, rows, counted);
        peak[pattern] = ledger->peak - before;
        assert_int_equal(ledger->total, before);
        assert_int_equal(peak[pattern], peak[ALL]);
        harness_pop(state);
      }
    }
}

// --- sampled -----------------------------------------------------------------------------------------------

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  int64_t size; // of the chunks that result, all but the last
  bool terms, accumulate;
} SampledCase;

// Tiles are of counted tokens alone.
static void sampled_case(Harness *h, const void *shape) {
  SampledCase c = *(const SampledCase *)shape;
  bool gpu = h->backend->device == ON_CUDA;
  h->draws = 700; // whatever was drawn before: with these, masses keep away from where q changes
  ReferenceLoss p = loss_problem(h, c.rows, c.hidden, c.vocab, 0.02 * sqrt((double)c.hidden));
  loss_problem_tiles(&p, 150);
  for (int64_t n = 1; n < c.rows; n += 3) p.targets[n] = IGNORE_INDEX;
  if (c.terms) loss_problem_add(h, &p, TERM_SMOOTHING | TERM_Z_LOSS | TERM_CLASS_WEIGHTS | TERM_MEAN);
  p.temperature = c.terms ? 1.25 : 1;
  p.full_mass = 50, p.seed = 7, p.chunk = c.size, p.counted_alone = true;
  reference_gradients(h, &p);
  LinearCrossEntropy a = loss_call(h, &p, LCE_FUSED, c.chunk);
  LossBefore before = {0};
  a.outputs = (TokenOutputs){0};
  a.sampling.stats = poisoned_vector(h, DTYPE_F32, 3);
  if (c.accumulate) loss_call_adds(h, &a, &before);
  if (gpu && (h->backend->no_sampling || h->dtype != DTYPE_BF16 || c.hidden % 8)) p.full_mass = 0;
  reference_loss(&p);
  int64_t counted;
  Tensor rows = positions(h, p.targets, c.rows, &counted);
  masked_linear_cross_entropy(h->backend, a, rows, counted);
  const double *stats = values_of(h, a.sampling.stats), *want = p.sampled;
  if (!(stats[0] == want[0] && stats[1] == want[1] && fabs(stats[2] - want[2]) <= 0.01 * want[2]))
    fail_msg("%g of %g tiles and a mass of %.9g are dropped, not %g of %g and %.9g", stats[0], stats[1],
             stats[2], want[0], want[1], want[2]);
  if (p.full_mass > 0 && !(want[0] > 0 && want[0] < want[1] && p.margin > 0.002))
    fail_msg("%g of %g tiles are dropped, and a mass is within %g of where q changes", want[0], want[1],
             p.margin);
  check_zeros("sampled", h, &a, p.targets);
  check_loss(h, "sampled", &a, &p, 0, before, of_size(within(16, (double)(c.hidden + c.vocab)), 8),
             of_size(within_stored(h, 8, 0), p.scale));
}

TEST(test_sampled) {
  static const SampledCase cases[] = {{450, 16, 1030, 225, 150, .terms = false},
                                      {900, 40, 900, 500, 384, .terms = true, .accumulate = true}};
  RUN_CASES(*state, sampled_case, cases);
}

// --- a split head ------------------------------------------------------------------------------------------

// On every rank another part of the tokens is ignored, and all of the last rank's; rows names ignored tokens
// after the counted ones, as many as count on the rank that has most.
static void split_case(Harness *h, const Case *c) {
  Backend *b = h->backend;
  ReferenceLoss p = loss_problem(h, c->rows * b->ranks, c->hidden, c->vocab, 2);
  loss_problem_add(h, &p, c->terms);
  int64_t most = 0, own = 0, part = ceil_div(c->vocab, b->ranks);
  for (int rank = 0; rank < b->ranks; rank++) {
    own = 0;
    for (int64_t i = 0; i < c->rows; i++) {
      bool ignored = i % (rank + 2) == 1 || (b->ranks > 2 && rank == b->ranks - 1);
      if (ignored) p.targets[rank * c->rows + i] = IGNORE_INDEX;
      own += !ignored;
    }
    most = max_i64(most, own);
  }
  if (!c->forward_only) reference_gradients(h, &p);
  LinearCrossEntropy want = loss_call_of_rank(b, call_of(h, &p, c), c->rows, part);
  LinearCrossEntropy got = loss_call_of_rank(b, call_of(h, &p, c), c->rows, part);
  if (c->accumulate) {
    LossBefore before = {0};
    loss_call_adds(h, &want, &before);
    got.accumulate = true;
    got.dweight = tensor_from(h, DTYPE_F32, before.dweight, got.weight.shape[0], c->hidden);
  }
  const int32_t *targets = p.targets + b->rank * c->rows;
  Tensor rows = positions(h, targets, c->rows, &own);
  linear_cross_entropy(b, want);
  masked_linear_cross_entropy(b, got, rows, most);
  char what[64];
  snprintf(what, sizeof what, "terms %d, rank %d of %d", c->terms, b->rank, b->ranks);
  check_zeros(what, h, &got, targets);
  check_same(what, h, &got, &want, 8 + 64 * p.z_loss);
}

static void split_cases(const char *backend_name) {
  enum { SMOOTHED = TERM_SMOOTHING | TERM_Z_LOSS | TERM_CLASS_WEIGHTS | TERM_BIAS };
  static const Case cases[] = {{23, 8, 61, 4, .outputs = true},
                               {23, 8, 61, 4, .terms = SMOOTHED},
                               {31, 40, 515, 16, .accumulate = true},
                               {23, 8, 61, 30, .terms = TERM_SOFTCAP | TERM_MEAN, .outputs = true},
                               {23, 8, 61, 5, .outputs = true, .forward_only = true}};
  Harness *h = harness_open(backend_name);
  if (!h) fail("there is no %s here", backend_name);
  harness_join_ranks(h);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    split_case(h, &cases[i]);
    memory_pop_to(&h->backend->memory, 0);
  }
  harness_close(h);
}

// A failed check ends this process, and with it the job.
static int be_a_rank(bool gpus) {
  ranks_begin();
  ranks_set_timeout(60);
  split_cases(gpus ? "cuda-fp32" : "cpu");
  split_cases(gpus ? "cuda" : "cpu-plain");
  printf("all cases hold\n");
  return 0;
}

TEST(test_split_head) {
  if (strcmp(harness_backend(), "cpu") != 0 || !can_launch()) skip();
  const char *gpus = getenv("LCE_GPU_RANKS");
  int most = gpus ? atoi(gpus) : 4;
  for (int ranks = 1; ranks <= most; ranks++) {
    if (gpus && ranks != 2 && ranks != most) continue;
    Output output = launch_self(ranks, gpus ? "rank gpus" : "rank cpus");
    if (output.status || !strstr(output.text, "all cases hold"))
      fail_msg("%d ranks: exit status %d: %s", ranks, output.status, output.text);
    free(output.text);
  }
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "rank")) return be_a_rank(!strcmp(argv[2], "gpus"));
  return run_on_backends();
}
