// Gradients of log-probabilities with the head split over ranks: each draws all, takes its part and checks its results.

#include "tests/process.h"
#include "tests/pytorch/log_prob_call.h"

typedef struct {
  const char *name;
  int64_t rows, hidden, vocab, chunk; // rows of each rank
  int terms;
  bool ignores; // some tokens
  bool accumulate;
  bool apart;  // each gradient in a call of its own
  bool uneven; // V / G + 1 rows a rank, so that the last ones have fewer or none
} Case;

enum {
  ENTROPY = TERM_ENTROPY | TERM_TOKEN_WEIGHTS | TERM_TEMPERATURE | TERM_BIAS,
  ALL = ENTROPY | TERM_Z_LOSS | TERM_CLASS_WEIGHTS | TERM_MEAN | TERM_SOFTCAP
};
static const Case cases[] = {
    {"entropies", 29, 17, 101, 7, .terms = ENTROPY},
    {"log p alone", 29, 17, 101, 7, .terms = TERM_BIAS},
    {"all terms", 31, 40, 515, 16, .terms = ALL, .ignores = true, .accumulate = true},
    {"one gradient at a time", 200, 64, 2049, 128, .terms = ALL, .apart = true},
    {"uneven", 29, 17, 101, 100, .terms = ALL, .uneven = true},
    {"without rows", 5, 8, 3, 2, .terms = ENTROPY, .apart = true, .uneven = true},
};

static void check_case(Harness *h, const void *shape) {
  const Case *c = shape;
  Backend *b = h->backend;
  ReferenceLoss p = loss_problem(h, c->rows * b->ranks, c->hidden, c->vocab, 2);
  loss_problem_add(h, &p, c->terms);
  // Another third on every rank, and all of the last rank's.
  for (int64_t n = 0; n < p.rows && c->ignores; n++)
    if (n % 3 == n / c->rows % 3 || (b->ranks > 2 && n / c->rows == b->ranks - 1))
      p.targets[n] = IGNORE_INDEX;
  reference_gradients(h, &p);
  LinearCrossEntropy a =
      loss_call_of_rank(b, loss_call(h, &p, LCE_FUSED, c->chunk), c->rows,
                        c->uneven ? c->vocab / b->ranks + 1 : ceil_div(c->vocab, b->ranks));
  LossBefore before = {0};
  if (c->accumulate) loss_call_adds(h, &a, &before);
  Tensor weights = {0};
  if (p.entropy_weights) weights = vector_from(h, DTYPE_F32, p.entropy_weights + b->rank * c->rows, c->rows);
  LogProbGradients both = log_prob_call(h, &a, weights, false), x_alone = both;
  x_alone.call.dweight = x_alone.call.dbias = (Tensor){0};
  if (c->apart) both.call.dx = (Tensor){0};
  log_prob_gradients(b, both);
  if (c->apart) log_prob_gradients(b, x_alone);
  reference_loss(&p);
  char what[96];
  snprintf(what, sizeof what, "%s, rank %d of %d", c->name, b->rank, b->ranks);
  check_ignored(h, what, &a, p.targets + b->rank * c->rows);
  check_loss(h, what, &a, &p, b->rank * c->rows, before,
             with_size(within(16, (double)(c->hidden + p.vocab)), 8 + 64 * p.z_loss),
             with_size(within_stored(h, 8, 0), p.scale * (1 + 8 * p.z_loss)));
}

static void rank_cases(Harness *h) {
  RUN_CASES(h, check_case, cases);
}

TEST(split_over_ranks_it_is_as_whole) {
  check_on_ranks();
}

int main(int argc, char **argv) {
  return ran_as_rank(argc, argv, rank_cases) ? 0 : tests_run("split head", NULL, NULL);
}
