// The loss of the counted tokens against float64, and sampled. test_vocabulary_parallel.c splits its head.
#include "model/masked_loss.h"
#include "tests/loss_problem.h"

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
  bool outputs, accumulate, forward_only;
} Case;

static ReferenceLoss make_problem(Harness *h, const Case *c, Pattern pattern) {
  ReferenceLoss p = loss_problem(h, c->rows, c->hidden, c->vocab, 2);
  loss_problem_add(h, &p, c->terms);
  for (int64_t n = 0; n < c->rows; n++)
    if (!counts(pattern, n, c->rows)) p.targets[n] = IGNORE_INDEX;
  if (!c->forward_only) reference_gradients(h, &p);
  return p;
}

static LinearCrossEntropy make_call(Harness *h, const ReferenceLoss *p, const Case *c, LceMode mode) {
  LinearCrossEntropy a = loss_call(h, p, mode, c->chunk);
  if (c->outputs) loss_call_all_outputs(h, &a, p);
  return a;
}

// Rows of x of ignored tokens are not read.
static void check_case(Harness *h, const Case *c, Pattern pattern) {
  char what[64];
  snprintf(what, sizeof what, "%d tokens of pattern %d, terms %d", (int)c->rows, pattern, c->terms);
  ReferenceLoss p = make_problem(h, c, pattern);
  int64_t counted;
  Tensor positions = counted_positions(h, p.targets, c->rows, &counted);
  for (int64_t i = 0; i < c->rows * c->hidden && counted; i++)
    if (p.targets[i / c->hidden] == IGNORE_INDEX) p.x[i] = NAN;
  LinearCrossEntropy a = make_call(h, &p, c, LCE_FUSED);
  LossBefore before = {0};
  if (c->accumulate) loss_call_adds(h, &a, &before);
  masked_linear_cross_entropy(h->backend, a, positions, counted);
  reference_loss(&p);
  check_ignored(h, what, &a, p.targets);
  check_loss(h, what, &a, &p, 0, before,
             with_size(within(16, (double)(p.hidden + p.vocab)), 8 + 64 * p.z_loss),
             with_size(within_stored(h, 8, 0), p.scale * (1 + 8 * p.z_loss)));
}

HARNESS_TEST(test_as_with_all_tokens) {
  enum {
    SMOOTHED = TERM_SMOOTHING | TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS | TERM_BIAS | TERM_MEAN,
    CAPPED = TERM_SOFTCAP | TERM_Z_LOSS | TERM_BIAS
  };
  static const Case cases[] = {{1, 1, 3, 1, .outputs = true},
                               {29, 17, 101, 7, .terms = 0},
                               {29, 17, 101, 7, .outputs = true, .accumulate = true},
                               {29, 17, 101, 40, .terms = CAPPED, .outputs = true},
                               {67, 33, 515, 16, .terms = SMOOTHED, .outputs = true},
                               {67, 33, 515, 64, .terms = SMOOTHED, .accumulate = true},
                               {61, 24, 203, 9, .terms = CAPPED, .outputs = true, .forward_only = true},
                               {61, 24, 203, 20, .terms = SMOOTHED, .forward_only = true},
                               {300, 16, 700, 128, .accumulate = true}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
      check_case(h, &cases[i], (Pattern)pattern);
      harness_clear(h);
    }
}

// Without positions, or materialized, it is the call itself. Fused, x and dx need one type.
HARNESS_TEST(test_nothing_masked) {
  static const Case cases[] = {{29, 17, 101, 7, .outputs = true},
                               {29, 17, 101, 7, .terms = TERM_SMOOTHING | TERM_SOFTCAP, .outputs = true},
                               {29, 17, 101, 7, .accumulate = true},
                               {29, 17, 101, 7, .forward_only = true}};
  for (int i = 0; i < 8; i++) {
    const Case *c = &cases[i / 2];
    LceMode mode = i % 2 ? LCE_MATERIALIZED : LCE_FUSED;
    if (mode == LCE_FUSED && c->terms) continue;
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
      ReferenceLoss p = make_problem(h, c, (Pattern)pattern);
      LinearCrossEntropy want = make_call(h, &p, c, mode), got = make_call(h, &p, c, mode);
      LossBefore before = {0};
      int64_t counted;
      Tensor positions = counted_positions(h, p.targets, c->rows, &counted);
      if (c->accumulate) {
        loss_call_adds(h, &want, &before);
        got.accumulate = true;
        got.dweight = tensor_from(h, DTYPE_F32, before.dweight, c->vocab, c->hidden);
      }
      linear_cross_entropy(h->backend, want);
      if (mode == LCE_FUSED) positions = (Tensor){0};
      masked_linear_cross_entropy(h->backend, got, positions, counted);
      check_same_bits(h, &got, &want);
      harness_clear(h);
    }
  }
  ReferenceLoss p = make_problem(h, &cases[0], ALL);
  LinearCrossEntropy a = make_call(h, &p, &cases[0], LCE_FUSED);
  a.dx.dtype = h->dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
  assert_fails(h, "give them one type", masked_linear_cross_entropy(h->backend, a, a.targets, 3));
}

// The memory is the same however many tokens count.
HARNESS_TEST(test_memory) {
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
        LinearCrossEntropy a = make_call(h, &p, &cases[i], LCE_FUSED);
        if (sampled) a.sampling.full_mass = 1, a.outputs = (TokenOutputs){0};
        int64_t counted;
        Tensor positions = counted_positions(h, p.targets, cases[i].rows, &counted);
        size_t before = ledger->total;
        ledger_reset_peak(ledger);
        masked_linear_cross_entropy(h->backend, a, positions, counted);
        peak[pattern] = ledger->peak - before;
        assert_int_equal(ledger->total, before);
        assert_int_equal(peak[pattern], peak[ALL]);
        harness_clear(h);
      }
    }
}

// Tiles are of counted tokens alone. `size` is that of the chunks that result, all but the last.
static void check_tiles(Harness *h, int64_t rows, int64_t hidden, int64_t vocab, int64_t chunk, int64_t size,
                        bool more) {
  ReferenceLoss p = loss_problem_tiles(h, rows, hidden, vocab, size);
  for (int64_t n = 1; n < rows; n += 3) p.targets[n] = IGNORE_INDEX;
  if (more) loss_problem_add(h, &p, TERM_SMOOTHING | TERM_Z_LOSS | TERM_CLASS_WEIGHTS | TERM_MEAN);
  p.temperature = more ? 1.25 : 1;
  p.counted_alone = true;
  LinearCrossEntropy a = sampled_loss_call(h, &p, chunk);
  LossBefore before = {0};
  if (more) loss_call_adds(h, &a, &before);
  int64_t counted;
  Tensor positions = counted_positions(h, p.targets, rows, &counted);
  masked_linear_cross_entropy(h->backend, a, positions, counted);
  check_sampled(h, &a, &p, before);
  assert_some_dropped(&p);
  check_ignored(h, "sampled", &a, p.targets);
}

HARNESS_TEST(test_sampled) {
  check_tiles(h, 450, 16, 1030, 225, 150, false);
  check_tiles(h, 900, 40, 900, 500, 384, true);
}

TEST_MAIN(run_on_backends())
