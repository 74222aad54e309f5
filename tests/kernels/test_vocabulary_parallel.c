// linear_cross_entropy with its head split over ranks, against float64 on one: this program starts itself as
// 1 to 4 ranks under mpirun (with LCE_GPU_RANKS=N under tools/launch, as 2 and N ranks with a GPU each).
// Every rank draws all tokens and the whole head, takes its own, and checks what it gets.

#include "kernels/ranks/ranks.h"
#include "tests/loss_problem.h"
#include "tests/process.h"

// --- a rank ------------------------------------------------------------------------------------------------

typedef struct {
  const char *name;
  int64_t rows, hidden, vocab, chunk; // rows of each rank
  bool terms;                         // those that fit label smoothing
  bool capped;                        // those that fit a soft-cap
  bool ignores;                       // some tokens
  bool accumulate, forward_only, wide_dx;
  bool apart;   // each gradient in a call of its own
  int hopeless; // logits that beat the target's by hundreds: 1 in the target's part, 2 elsewhere, 3 both
} Case;

static const Case cases[] = {
    {"plain", 29, 17, 101, 7, .terms = false},
    {"one chunk", 12, 24, 64, 100, .terms = false},
    {"a token and a row each", 1, 3, 0, 1, .terms = false},
    {"terms", 29, 17, 101, 7, .terms = true},
    {"one gradient at a time", 29, 17, 101, 7, .terms = true, .apart = true},
    {"ignored", 23, 8, 61, 9, .terms = true, .ignores = true},
    {"forward", 19, 33, 1031, 8, .terms = true, .forward_only = true},
    {"added", 31, 40, 515, 16, .accumulate = true, .wide_dx = true},
    {"in pieces of 128", 200, 64, 2048, 128, .terms = false},
    {"ragged", 131, 72, 4611, 64, .terms = true},
    {"hopeless here", 9, 32, 300, 4, .hopeless = 1},
    {"hopeless elsewhere", 9, 32, 300, 4, .hopeless = 2},
    {"hopeless twice", 9, 32, 300, 9, .hopeless = 3},
    {"hopeless terms", 9, 32, 300, 4, .terms = true, .hopeless = 3},
    {"capped", 29, 17, 101, 7, .capped = true, .ignores = true},
    {"capped forward", 19, 33, 1031, 8, .capped = true, .forward_only = true},
};

// All ranks' tokens and the whole head, in float64.
static ReferenceLoss make_problem(Harness *h, const Case *c, int64_t vocab, int64_t part) {
  int64_t rows = c->rows * h->backend->ranks;
  ReferenceLoss p = loss_problem(h, rows, c->hidden, vocab, 2);
  if (c->terms)
    loss_problem_add(h, &p,
                     TERM_SMOOTHING | TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS |
                         TERM_TOKEN_WEIGHTS | TERM_BIAS);
  if (c->capped) loss_problem_add(h, &p, TERM_SOFTCAP | TERM_TEMPERATURE | TERM_BIAS | TERM_MEAN);
  // Another third on every rank, and all of the last rank's.
  for (int64_t n = 0; n < rows && c->ignores; n++)
    if (n % 3 == n / c->rows % 3 || (h->backend->ranks > 2 && n / c->rows == h->backend->ranks - 1))
      p.targets[n] = IGNORE_INDEX;
  for (int64_t n = 1; n < rows && c->hopeless; n += 4) {
    int64_t here = p.targets[n] / part * part, there = (here + part) % (part * h->backend->ranks);
    // Not the target itself.
    int64_t column = min_i64(here + (p.targets[n] == here), vocab - 1);
    if (c->hopeless & 1) loss_problem_lead(&p, n, column, 300);
    if (c->hopeless & 2) loss_problem_lead(&p, n, min_i64(there + 1, vocab - 1), 302);
  }
  if (!c->forward_only) reference_gradients(h, &p);
  return p;
}

static LinearCrossEntropy local_call(Harness *h, const Case *c, const ReferenceLoss *p, int64_t part) {
  LinearCrossEntropy a = loss_call(h, p, LCE_FUSED, c->chunk);
  if (c->capped || c->hopeless) loss_call_all_outputs(h, &a, p);
  return loss_call_of_rank(h->backend, a, c->rows, part);
}

static void check_case(Harness *h, const Case *c) {
  Backend *b = h->backend;
  int64_t vocab = c->vocab ? c->vocab : b->ranks, part = ceil_div(vocab, b->ranks), from = b->rank * c->rows;
  ReferenceLoss p = make_problem(h, c, vocab, part);
  ReferenceLoss *r = &p;
  LinearCrossEntropy a = local_call(h, c, &p, part);
  LossBefore before = {0};
  if (c->wide_dx) a.dx = poisoned(h, DTYPE_F32, c->rows, c->hidden);
  if (c->accumulate) loss_call_adds(h, &a, &before);
  LinearCrossEntropy of_x = a, of_weight = a;
  of_x.dweight = of_x.dbias = of_weight.dx = (Tensor){0};
  linear_cross_entropy(b, c->apart ? of_x : a);
  if (c->apart) linear_cross_entropy(b, of_weight);
  reference_loss(r);
  double size = (c->hopeless ? 300 : 8) + 64 * r->z_loss;
  char what[96];
  snprintf(what, sizeof what, "%s, rank %d of %d", c->name, b->rank, b->ranks);
  check_loss(h, what, &a, r, from, before, of_size(within(16, (double)(c->hidden + vocab)), size),
             of_size(within_stored(h, 8, 0), r->scale * (c->hopeless ? 300 : 1 + 8 * r->z_loss)));
}

// A NaN in one token's x is in that token's loss and dx, and in no other's; the sums of dweight cannot help
// it.
static void check_nan(Harness *h, const Case *c, ReferenceLoss *p, int64_t part) {
  p->x[2 * c->hidden + 5] = NAN; // rank 0's
  LinearCrossEntropy a = local_call(h, c, p, part);
  linear_cross_entropy(h->backend, a);
  const double *loss = values_of(h, a.loss), *dx = values_of(h, a.dx);
  for (int64_t i = 0; i < c->rows * c->hidden; i++) {
    int64_t n = i / c->hidden;
    bool lost = h->backend->rank == 0 && n == 2;
    if ((isnan(loss[n]) != 0) != lost || (isnan(dx[i]) != 0) != lost)
      fail_msg("rank %d: token %d has the loss %g and %g in dx", h->backend->rank, (int)n, loss[n], dx[i]);
  }
}

// Twice the same bits. With sampling every rank draws for its rows; below 2^-5, and on a GPU with chunks this
// short, gradients are exact.
static void check_repeats(Harness *h, const Case *c, ReferenceLoss *p, int64_t part) {
  Backend *b = h->backend;
  LinearCrossEntropy exact = local_call(h, c, p, part), again = local_call(h, c, p, part);
  LinearCrossEntropy kept = local_call(h, c, p, part), sampled = local_call(h, c, p, part);
  kept.sampling = (TileSampling){.full_mass = 0x1p-100f, .stats = poisoned_vector(h, DTYPE_F32, 3)};
  sampled.sampling = (TileSampling){.full_mass = 60, .stats = poisoned_vector(h, DTYPE_F32, 3)};
  linear_cross_entropy(b, exact);
  linear_cross_entropy(b, again);
  linear_cross_entropy(b, kept);
  const LinearCrossEntropy *same[] = {&again, &kept};
  for (int i = 0; i < 2; i++) {
    check_bitwise_equal(h, "loss again", same[i]->loss, exact.loss);
    check_bitwise_equal(h, "dx again", same[i]->dx, exact.dx);
    check_bitwise_equal(h, "dweight again", same[i]->dweight, exact.dweight);
  }
  check_values(h, "stats", kept.sampling.stats, (double[]){0, 0, 0}, within(0, 1));
  if (b->device == ON_CUDA) return;
  double dropped = check_unbiased(h, linear_cross_entropy, sampled, &exact, 256);
  assert_true(dropped > 0.2 && dropped < 0.95);
}

static void run_all(const char *backend_name) {
  Harness *h = harness_open(backend_name);
  if (!h) fail("there is no %s here", backend_name);
  harness_join_ranks(h);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    check_case(h, &cases[i]);
    memory_pop_to(&h->backend->memory, 0);
  }
  const Case nan = {"NaN", 8, 16, 80, 3, .terms = false}, again = {"again", 45, 24, 515, 16, .terms = false};
  for (int i = 0; i < 2; i++) {
    const Case *c = i ? &again : &nan;
    int64_t part = ceil_div(c->vocab, h->backend->ranks);
    ReferenceLoss p = make_problem(h, c, c->vocab, part);
    (i ? check_repeats : check_nan)(h, c, &p, part);
    memory_pop_to(&h->backend->memory, 0);
  }
  harness_close(h);
}

// A failed check ends this process, and with it the job.
static int be_a_rank(bool gpus) {
  ranks_begin();
  ranks_set_timeout(60);
  run_all(gpus ? "cuda-fp32" : "cpu");
  run_all(gpus ? "cuda" : "cpu-plain");
  printf("all cases hold\n");
  return 0;
}

// --- the job -----------------------------------------------------------------------------------------------

TEST(split_over_ranks_it_is_as_whole) {
  if (!can_launch()) skip();
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

TEST(what_cannot_be_split_is_refused) {
  Harness *h = harness_open("cpu");
  ReferenceLoss p = loss_problem(h, 4, 3, 5, 1);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 2);
  call.shard.vocab_size = 9;
  ASSERT_REFUSED(h, call, "5 rows from 6 on are no part of a vocabulary of 9", a.shard.first = 6);
  ASSERT_REFUSED(h, call, "supports the fused mode", a.mode = LCE_MATERIALIZED);
  harness_close(h);
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "rank")) return be_a_rank(!strcmp(argv[2], "gpus"));
  return tests_run("vocabulary parallel", NULL, NULL);
}
