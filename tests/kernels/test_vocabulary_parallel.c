// linear_cross_entropy with its head split over ranks: each draws all, takes its part and checks its results.

#include "model/masked_loss.h"
#include "tests/loss_problem.h"
#include "tests/process.h"

typedef struct {
  const char *name;
  int64_t rows, hidden, vocab, chunk; // rows of each rank; vocab 0: as many as ranks
  int terms;
  bool ignores; // some tokens
  bool masked;  // these are left out of the call
  bool accumulate, forward_only, wide_dx;
  bool apart;   // each gradient in a call of its own
  bool uneven;  // V / G + 1 rows a rank, so that the last ones have fewer or none
  int hopeless; // logits that beat the target's by hundreds: 1 in the target's part, 2 elsewhere, 3 both
} Case;

enum {
  SMOOTHED =
      TERM_SMOOTHING | TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS | TERM_TOKEN_WEIGHTS | TERM_BIAS,
  CAPPED = TERM_SOFTCAP | TERM_TEMPERATURE | TERM_BIAS | TERM_MEAN,
  MASKED = TERM_SMOOTHING | TERM_Z_LOSS | TERM_CLASS_WEIGHTS | TERM_BIAS
};
static const Case cases[] = {
    {"plain", 29, 17, 101, 7, .terms = 0},
    {"one chunk", 12, 24, 64, 100, .terms = 0},
    {"a token and a row each", 1, 3, 0, 1, .terms = 0},
    {"terms", 29, 17, 101, 7, .terms = SMOOTHED},
    {"one gradient at a time", 29, 17, 101, 7, .terms = SMOOTHED, .apart = true},
    {"ignored", 23, 8, 61, 9, .terms = SMOOTHED, .ignores = true},
    {"forward", 19, 33, 1031, 8, .terms = SMOOTHED, .forward_only = true},
    {"added", 31, 40, 515, 16, .accumulate = true, .wide_dx = true},
    {"in pieces of 128", 200, 64, 2048, 128, .terms = 0},
    {"ragged", 131, 72, 4611, 64, .terms = SMOOTHED},
    {"hopeless here", 9, 32, 300, 4, .hopeless = 1},
    {"hopeless elsewhere", 9, 32, 300, 4, .hopeless = 2},
    {"hopeless twice", 9, 32, 300, 9, .hopeless = 3},
    {"hopeless terms", 9, 32, 300, 4, .terms = SMOOTHED, .hopeless = 3},
    {"capped", 29, 17, 101, 7, .terms = CAPPED, .ignores = true},
    {"capped forward", 19, 33, 1031, 8, .terms = CAPPED, .forward_only = true},
    {"masked", 23, 8, 61, 4, .ignores = true, .masked = true},
    {"masked terms", 23, 8, 61, 4, .terms = MASKED, .ignores = true, .masked = true},
    {"masked, added", 31, 40, 515, 16, .accumulate = true, .ignores = true, .masked = true},
    {"masked, capped", 23, 8, 61, 30, .terms = CAPPED, .ignores = true, .masked = true},
    {"masked forward", 23, 8, 61, 5, .forward_only = true, .ignores = true, .masked = true},
    {"uneven", 29, 17, 101, 7, .terms = SMOOTHED, .apart = true, .uneven = true},
    {"without rows", 5, 8, 3, 2, .terms = SMOOTHED, .ignores = true, .uneven = true},
    {"without rows, capped", 40, 8, 0, 16, .terms = CAPPED, .uneven = true},
};

static int64_t rows_of_part(const Case *c, int64_t vocab, int ranks) {
  return c->uneven ? vocab / ranks + 1 : ceil_div(vocab, ranks);
}

// All ranks' tokens and the whole head, in float64.
static ReferenceLoss make_problem(Harness *h, const Case *c) {
  int ranks = h->backend->ranks;
  int64_t rows = c->rows * ranks, vocab = c->vocab ? c->vocab : ranks, part = rows_of_part(c, vocab, ranks);
  ReferenceLoss p = loss_problem(h, rows, c->hidden, vocab, 2);
  loss_problem_add(h, &p, c->terms);
  // Another third on every rank, and all of the last rank's.
  for (int64_t n = 0; n < rows && c->ignores; n++)
    if (n % 3 == n / c->rows % 3 || (ranks > 2 && n / c->rows == ranks - 1)) p.targets[n] = IGNORE_INDEX;
  for (int64_t n = 1; n < rows && c->hopeless; n += 4) {
    int64_t here = p.targets[n] / part * part, there = (here + part) % (part * ranks);
    // Not the target itself.
    int64_t column = min_i64(here + (p.targets[n] == here), vocab - 1);
    if (c->hopeless & 1) loss_problem_lead(&p, n, column, 300);
    if (c->hopeless & 2) loss_problem_lead(&p, n, min_i64(there + 1, vocab - 1), 302);
  }
  if (c->masked && !c->terms) // one row's logits are equal, over the ranks too
    memset(p.x + p.hidden, 0, (size_t)p.hidden * sizeof *p.x);
  if (!c->forward_only) reference_gradients(h, &p);
  return p;
}

static LinearCrossEntropy local_call(Harness *h, const Case *c, const ReferenceLoss *p) {
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, c->chunk);
  if (c->terms == CAPPED || c->hopeless || c->masked) loss_call_all_outputs(h, &a, p);
  return loss_call_of_rank(h->backend, a, c->rows, rows_of_part(c, p->vocab, h->backend->ranks));
}

static void check_case(Harness *h, const void *shape) {
  const Case *c = shape;
  Backend *b = h->backend;
  ReferenceLoss p = make_problem(h, c);
  LinearCrossEntropy a = local_call(h, c, &p);
  LossBefore before = {0};
  if (c->wide_dx) a.dx = poisoned(h, DTYPE_F32, c->rows, c->hidden);
  if (c->accumulate) loss_call_adds(h, &a, &before);
  LinearCrossEntropy x_alone = a, weight_alone = a;
  x_alone.dweight = x_alone.dbias = weight_alone.dx = (Tensor){0};
  Tensor positions = {0};
  int64_t most = 0;
  for (int rank = 0; c->masked && rank < b->ranks; rank++) {
    int64_t counted;
    Tensor of_rank = counted_positions(h, p.targets + rank * c->rows, c->rows, &counted);
    if (rank == b->rank) positions = of_rank;
    most = max_i64(most, counted);
  }
  masked_linear_cross_entropy(b, c->apart ? x_alone : a, positions, most);
  if (c->apart) linear_cross_entropy(b, weight_alone);
  reference_loss(&p);
  double size = (c->hopeless ? 300 : 8) + 64 * p.z_loss;
  char what[96];
  snprintf(what, sizeof what, "%s, rank %d of %d", c->name, b->rank, b->ranks);
  check_ignored(h, what, &a, p.targets + b->rank * c->rows);
  check_loss(h, what, &a, &p, b->rank * c->rows, before,
             with_size(within(16, (double)(c->hidden + p.vocab)), size),
             with_size(within_stored(h, 8, 0), p.scale * (c->hopeless ? 300 : 1 + 8 * p.z_loss)));
}

// A NaN in one token's x is in that token's loss and dx, and in no other's.
static void check_nan(Harness *h, const void *shape) {
  const Case *c = shape;
  ReferenceLoss p = make_problem(h, c);
  p.x[2 * c->hidden + 5] = NAN; // rank 0's
  LinearCrossEntropy a = local_call(h, c, &p);
  linear_cross_entropy(h->backend, a);
  const double *loss = values_of(h, a.loss), *dx = values_of(h, a.dx);
  for (int64_t i = 0; i < c->rows * c->hidden; i++) {
    int64_t n = i / c->hidden;
    bool lost = h->backend->rank == 0 && n == 2;
    if ((isnan(loss[n]) != 0) != lost || (isnan(dx[i]) != 0) != lost)
      fail_msg("rank %d: token %d has the loss %g and %g in dx", h->backend->rank, (int)n, loss[n], dx[i]);
  }
}

// Twice the same bits. Below 2^-5, and on a GPU with chunks this short, sampling leaves gradients exact.
static void check_repeats(Harness *h, const void *shape) {
  const Case *c = shape;
  ReferenceLoss p = make_problem(h, c);
  LinearCrossEntropy exact = local_call(h, c, &p), again = local_call(h, c, &p);
  LinearCrossEntropy kept = local_call(h, c, &p), sampled = local_call(h, c, &p);
  kept.sampling = (TileSampling){.full_mass = 0x1p-100f, .stats = poisoned_vector(h, DTYPE_F32, 3)};
  sampled.sampling = (TileSampling){.full_mass = 60, .stats = poisoned_vector(h, DTYPE_F32, 3)};
  linear_cross_entropy(h->backend, exact);
  linear_cross_entropy(h->backend, again);
  linear_cross_entropy(h->backend, kept);
  check_same_bits(h, &again, &exact);
  check_same_bits(h, &kept, &exact);
  check_values(h, "stats", kept.sampling.stats, (double[]){0, 0, 0}, within(0, 1));
  if (h->backend->device == ON_CUDA) return;
  double dropped = check_unbiased(h, linear_cross_entropy, sampled, &exact, 256);
  assert_true(dropped > 0.2 && dropped < 0.95);
}

static void rank_cases(Harness *h) {
  static const Case nan[] = {{"NaN", 8, 16, 80, 3, .terms = 0}},
                    again[] = {{"again", 45, 24, 515, 16, .terms = 0}};
  RUN_CASES(h, check_case, cases);
  RUN_CASES(h, check_nan, nan);
  RUN_CASES(h, check_repeats, again);
}

TEST(split_over_ranks_it_is_as_whole) {
  check_on_ranks();
}

TEST(what_cannot_be_split_is_refused) {
  Harness *h = harness_open("cpu");
  ReferenceLoss p = loss_problem(h, 4, 3, 5, 1);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 2);
  call.shard.vocab_size = 9;
  ASSERT_REFUSED(h, call, "5 rows from 6 on are no part of a vocabulary of 9", a.shard.first = 6);
  ASSERT_REFUSED(h, call, "supports the fused mode", a.mode = LCE_MATERIALIZED);
  ASSERT_REFUSED(h, call, "leave it out where a rank has no row",
                 (a.weight = tensor_rows(a.weight, 0, 0), a.dweight = tensor_2d(a.x.data, DTYPE_F32, 0, 3)));
  harness_close(h);
}

int main(int argc, char **argv) {
  return ran_as_rank(argc, argv, rank_cases) ? 0 : tests_run("vocabulary parallel", NULL, NULL);
}
