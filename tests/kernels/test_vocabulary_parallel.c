// linear_cross_entropy with its head split over ranks, against float64 on one: this program starts itself as 1 to 4
// ranks under mpirun (with LCE_GPU_RANKS=N under tools/launch, as 2 and N ranks with a GPU each). Every rank draws
// all tokens and the whole head, takes its own, and checks what it gets.

#include "kernels/ranks/ranks.h"
#include "tests/loss_problem.h"
#include "tests/process.h"

// --- a rank ------------------------------------------------------------------------------------------------

typedef struct {
  const char *name;
  int64_t rows, hidden, vocab, chunk; // rows of each rank
  bool terms;                         // all that act on whole rows
  bool ignores, named;                // some tokens; and the counted ones are named
  bool accumulate, forward_only, wide_dx;
  bool apart;   // each gradient in a call of its own
  int hopeless; // logits that beat the target's by hundreds: 1 in the target's part, 2 elsewhere, 3 both
} SplitCase;

static const SplitCase cases[] = {
    {.name = "plain", .rows = 29, .hidden = 17, .vocab = 101, .chunk = 7},
    {.name = "one chunk", .rows = 12, .hidden = 24, .vocab = 64, .chunk = 100},
    {.name = "a token and a row each", .rows = 1, .hidden = 3, .vocab = 0, .chunk = 1},
    {.name = "terms", .rows = 29, .hidden = 17, .vocab = 101, .chunk = 7, .terms = true},
    {.name = "one gradient at a time",
     .rows = 29,
     .hidden = 17,
     .vocab = 101,
     .chunk = 7,
     .terms = true,
     .apart = true},
    {.name = "ignored", .rows = 23, .hidden = 8, .vocab = 61, .chunk = 9, .terms = true, .ignores = true},
    {.name = "named",
     .rows = 23,
     .hidden = 8,
     .vocab = 61,
     .chunk = 4,
     .terms = true,
     .ignores = true,
     .named = true},
    {.name = "named forward",
     .rows = 23,
     .hidden = 8,
     .vocab = 61,
     .chunk = 5,
     .ignores = true,
     .named = true,
     .forward_only = true},
    {.name = "forward",
     .rows = 19,
     .hidden = 33,
     .vocab = 1031,
     .chunk = 8,
     .terms = true,
     .forward_only = true},
    {.name = "added",
     .rows = 31,
     .hidden = 40,
     .vocab = 515,
     .chunk = 16,
     .accumulate = true,
     .wide_dx = true},
    {.name = "in pieces of 128", .rows = 200, .hidden = 64, .vocab = 2048, .chunk = 128},
    {.name = "ragged", .rows = 131, .hidden = 72, .vocab = 4611, .chunk = 64, .terms = true},
    {.name = "hopeless here", .rows = 9, .hidden = 32, .vocab = 300, .chunk = 4, .hopeless = 1},
    {.name = "hopeless elsewhere", .rows = 9, .hidden = 32, .vocab = 300, .chunk = 4, .hopeless = 2},
    {.name = "hopeless twice", .rows = 9, .hidden = 32, .vocab = 300, .chunk = 9, .hopeless = 3},
    {.name = "hopeless terms",
     .rows = 9,
     .hidden = 32,
     .vocab = 300,
     .chunk = 4,
     .terms = true,
     .hopeless = 3},
};

// All ranks' tokens and the whole head, in float64.
static LossProblem make_problem(Harness *h, const SplitCase *c, int64_t vocab, int64_t part) {
  int64_t rows = c->rows * h->backend->ranks;
  LossProblem p = loss_problem(h, rows, c->hidden, vocab, 2);
  if (c->terms)
    loss_problem_add(
        h, &p, TERM_SMOOTHING | TERM_Z_LOSS | TERM_TEMPERATURE | TERM_CLASS_WEIGHTS | TERM_TOKEN_WEIGHTS);
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
  if (!c->forward_only) reference_gradients(h, &p.r);
  return p;
}

// This rank's part of the call: its tokens, and its rows of the head.
static LinearCrossEntropy local_call(Harness *h, const SplitCase *c, const LossProblem *p, int64_t part) {
  Backend *b = h->backend;
  int64_t first = b->rank * part, from = b->rank * c->rows;
  LinearCrossEntropy a = loss_call(h, &p->r, LCE_FUSED, c->chunk);
  Tensor *const of_tokens[] = {&a.x,
                               &a.targets,
                               &a.loss,
                               &a.dx,
                               &a.outputs.z_loss,
                               &a.outputs.log_prob,
                               &a.outputs.logsumexp,
                               &a.token_weights};
  for (size_t i = 0; i < sizeof of_tokens / sizeof *of_tokens; i++)
    if (tensor_exists(*of_tokens[i])) *of_tokens[i] = tensor_rows(*of_tokens[i], from, c->rows);
  a.shard = (VocabShard){.first = first, .vocab_size = p->r.vocab};
  a.weight = tensor_rows(a.weight, first, min_i64(part, p->r.vocab - first));
  if (tensor_exists(a.dweight)) a.dweight = tensor_rows(a.dweight, first, a.weight.shape[0]);
  return a;
}

// The most tokens that count on any rank.
static int64_t max_counted(const LossProblem *p, int64_t rows, int ranks) {
  int64_t max = 0;
  for (int r = 0; r < ranks; r++) {
    int64_t counted = 0;
    for (int64_t n = 0; n < rows; n++) counted += p->targets[r * rows + n] != IGNORE_INDEX;
    max = max_i64(max, counted);
  }
  return max;
}

static void check_case(Harness *h, const SplitCase *c) {
  Backend *b = h->backend;
  int64_t vocab = c->vocab ? c->vocab : b->ranks, part = ceil_div(vocab, b->ranks);
  int64_t first = b->rank * part, from = b->rank * c->rows;
  LossProblem p = make_problem(h, c, vocab, part);
  ReferenceLoss *r = &p.r;
  LinearCrossEntropy a = local_call(h, c, &p, part);
  int64_t local = a.weight.shape[0];
  if (c->named) {
    a.rows = ids_from(h, counted_positions(h, p.targets + from, c->rows, &a.counted), c->rows);
    a.counted = max_counted(&p, c->rows, b->ranks);
  }
  double *before = host_values(h, local * c->hidden);
  if (c->wide_dx) a.dx = poisoned(h, DTYPE_F32, c->rows, c->hidden);
  if (c->accumulate) {
    a.accumulate = true;
    a.dweight = tensor_from(h, DTYPE_F32, before = random_values(h, local * c->hidden, 1), local, c->hidden);
  }
  LinearCrossEntropy of_x = a, of_weight = a;
  of_x.dweight = of_weight.dx = (Tensor){0};
  linear_cross_entropy(b, c->apart ? of_x : a);
  if (c->apart) linear_cross_entropy(b, of_weight);
  reference_loss(r);

  double terms = (double)(c->hidden + vocab), size = (c->hopeless ? 300 : 8) + 64 * r->z_loss;
  char what[96];
  snprintf(what, sizeof what, "%s, rank %d of %d", c->name, b->rank, b->ranks);
  check_outputs(h, what, &a, r, from, of_size(within(16, terms), size));
  if (c->forward_only) return;
  double gradient_size = r->scale * (c->hopeless ? 300 : 1 + 8 * r->z_loss);
  for (int64_t i = 0; i < local * c->hidden; i++) r->dweight[first * c->hidden + i] += before[i];
  snprintf(what, sizeof what, "dx (%s, rank %d of %d)", c->name, b->rank, b->ranks);
  check_values(h, what, a.dx, r->dx + from * c->hidden, of_size(within_stored(h, 8, terms), gradient_size));
  snprintf(what, sizeof what, "dweight (%s, rank %d of %d)", c->name, b->rank, b->ranks);
  check_values(h, what, a.dweight, r->dweight + first * c->hidden,
               of_size(within_stored(h, 8, (double)(c->hidden + r->rows)), gradient_size));
}

// A NaN in one token's x is in that token's loss and dx, and in no other's; the sums of dweight cannot help it.
static void check_nan(Harness *h) {
  const SplitCase c = {.name = "NaN", .rows = 8, .hidden = 16, .vocab = 80, .chunk = 3};
  Backend *b = h->backend;
  int64_t part = ceil_div(c.vocab, b->ranks);
  LossProblem p = make_problem(h, &c, c.vocab, part);
  p.x[2 * c.hidden + 5] = NAN; // rank 0's
  LinearCrossEntropy a = local_call(h, &c, &p, part);
  linear_cross_entropy(b, a);
  const double *loss = values_of(h, a.loss), *dx = values_of(h, a.dx);
  for (int64_t n = 0; n < c.rows; n++) {
    bool lost = b->rank == 0 && n == 2;
    if ((isnan(loss[n]) != 0) != lost)
      fail_msg("rank %d: the loss of token %d is %g", b->rank, (int)n, loss[n]);
    for (int64_t i = 0; i < c.hidden; i++)
      if ((isnan(dx[n * c.hidden + i]) != 0) != lost) fail_msg("rank %d: dx of token %d", b->rank, (int)n);
  }
}

// Twice the same bits.
static void check_repeats(Harness *h) {
  const SplitCase c = {.name = "again", .rows = 45, .hidden = 24, .vocab = 515, .chunk = 16};
  Backend *b = h->backend;
  int64_t part = ceil_div(c.vocab, b->ranks);
  LossProblem p = make_problem(h, &c, c.vocab, part);
  LinearCrossEntropy once = local_call(h, &c, &p, part), again = local_call(h, &c, &p, part);
  linear_cross_entropy(b, once);
  linear_cross_entropy(b, again);
  check_bitwise_equal(h, "dx again", once.dx, again.dx);
  check_bitwise_equal(h, "dweight again", once.dweight, again.dweight);
  check_bitwise_equal(h, "loss again", once.loss, again.loss);
}

// The mean of a sampled gradient over SEEDS seeds is off by what one is off, over the root of SEEDS.
enum { SEEDS = 256 };
typedef struct {
  const char *name;
  Tensor tensor;
  double *exact, *mean, squares; // squares: the mean of the squared distances
} Sampled;

static void add_seed(Harness *h, Sampled *s) {
  int64_t count = tensor_count(s->tensor);
  const double *values = values_of(h, s->tensor);
  for (int64_t i = 0; i < count; i++) s->mean[i] += values[i] / SEEDS;
  double off = euclidean_distance(values, s->exact, count);
  s->squares += off * off / SEEDS;
}

static void check_mean(Harness *h, const Sampled *s) {
  int64_t count = tensor_count(s->tensor);
  double size = euclidean_distance(s->exact, host_values(h, count), count), one = sqrt(s->squares);
  double off = euclidean_distance(s->mean, s->exact, count), rounding = dtype_epsilon(h->dtype) * size;
  if (!(one > 0.05 * size && off < 2 * one / sqrt(SEEDS) + rounding))
    fail_msg("%s of norm %g: one seed is off by %g, the mean of %d by %g", s->name, size, one, SEEDS, off);
}

// Sampling: every rank draws for its rows. With all tiles kept the gradients are as without it.
static void check_sampling(Harness *h) {
  const SplitCase c = {.name = "sampled", .rows = 45, .hidden = 24, .vocab = 515, .chunk = 16};
  Backend *b = h->backend;
  int64_t part = ceil_div(c.vocab, b->ranks);
  LossProblem p = make_problem(h, &c, c.vocab, part);
  LinearCrossEntropy exact = local_call(h, &c, &p, part), kept = local_call(h, &c, &p, part);
  LinearCrossEntropy sampled = local_call(h, &c, &p, part);
  kept.sampling = (TileSampling){.full_mass = 0x1p-100f, .stats = poisoned_vector(h, DTYPE_F32, 3)};
  sampled.sampling = (TileSampling){.full_mass = 60, .stats = poisoned_vector(h, DTYPE_F32, 3)};
  linear_cross_entropy(b, exact);
  linear_cross_entropy(b, kept);
  double *exact_dx = values_of(h, exact.dx), *exact_dweight = values_of(h, exact.dweight);
  const double *none = values_of(h, kept.sampling.stats);
  assert_true(none[0] == 0 && none[1] > 0 && none[2] == 0);
  double terms = (double)(c.hidden + c.vocab);
  check_values(h, "dx with all tiles kept", kept.dx, exact_dx, of_size(within_stored(h, 16, terms), 0.5));
  check_values(h, "dweight with all tiles kept", kept.dweight, exact_dweight,
               of_size(within_stored(h, 16, terms), 0.5));
  if (b->device == ON_CPU) {
    check_bitwise_equal(h, "dx with all tiles kept", kept.dx, exact.dx);
    check_bitwise_equal(h, "dweight with all tiles kept", kept.dweight, exact.dweight);
  }
  Sampled gradients[] = {
      {"dx", sampled.dx, exact_dx, host_values(h, tensor_count(exact.dx)), 0},
      {"dweight", sampled.dweight, exact_dweight, host_values(h, tensor_count(exact.dweight)), 0}};
  double dropped = 0;
  for (int seed = 0; seed < SEEDS; seed++) {
    sampled.sampling.seed = (uint64_t)seed;
    linear_cross_entropy(b, sampled);
    const double *stats = values_of(h, sampled.sampling.stats);
    assert_true(stats[1] == none[1] && stats[0] <= stats[1] && (stats[0] > 0) == (stats[2] > 0));
    dropped += stats[0] / stats[1] / SEEDS;
    for (int i = 0; i < 2; i++) add_seed(h, &gradients[i]);
  }
  check_bitwise_equal(h, "loss with sampling", sampled.loss, exact.loss);
  assert_true(dropped > 0.2 && dropped < 0.95);
  for (int i = 0; i < 2; i++) check_mean(h, &gradients[i]);
}

// A failed check ends this process, and with it the job.
static int be_a_rank(const char *backend_name) {
  ranks_begin();
  ranks_set_timeout(60);
  Harness *h = harness_open(backend_name);
  if (!h) fail_msg("there is no %s here", backend_name);
  harness_join_ranks(h);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    check_case(h, &cases[i]);
    memory_pop_to(&h->backend->memory, 0);
  }
  check_nan(h);
  memory_pop_to(&h->backend->memory, 0);
  check_repeats(h);
  memory_pop_to(&h->backend->memory, 0);
  check_sampling(h);
  printf("all cases hold\n");
  harness_close(h);
  return 0;
}

// --- the job -----------------------------------------------------------------------------------------------

static void check_ranks(int ranks, const char *backend_name) {
  Output output = launch_self(ranks, "rank %s", backend_name);
  if (output.status)
    fail_msg("%d ranks on %s: exit status %d: %s%s", ranks, backend_name, output.status, output.out,
             output.err);
  assert_says(output.out, "all cases hold");
  output_free(&output);
}

TEST(split_over_ranks_it_is_as_whole) {
  if (!can_launch()) skip();
  const char *gpus = getenv("LCE_GPU_RANKS");
  int most = gpus ? atoi(gpus) : 4;
  for (int ranks = 1; ranks <= most; ranks++) {
    if (gpus && ranks != 2 && ranks != most) continue;
    check_ranks(ranks, gpus ? "cuda-fp32" : "cpu");
    check_ranks(ranks, gpus ? "cuda" : "cpu-plain");
  }
}

TEST(what_cannot_be_split_is_refused) {
  Harness *h = harness_open("cpu");
  Tensor x = poisoned(h, DTYPE_F32, 4, 3), weight = poisoned(h, DTYPE_F32, 5, 3);
  Tensor loss = poisoned_vector(h, DTYPE_F32, 4), targets = ids_from(h, (int32_t[4]){0}, 4);
  LinearCrossEntropy a = {.mode = LCE_FUSED,
                          .chunk = 2,
                          .loss = loss,
                          .x = x,
                          .weight = weight,
                          .targets = targets,
                          .shard = {.first = 0, .vocab_size = 9}};
  LinearCrossEntropy beyond = a, whole = a, capped = a, mean = a;
  beyond.shard.first = 6;
  whole.mode = LCE_MATERIALIZED;
  capped.terms.softcap = 30;
  mean.mean = true;
  assert_fails(h, "5 rows from 6 on are no part of a vocabulary of 9",
               linear_cross_entropy(h->backend, beyond));
  assert_fails(h, "supports the fused mode", linear_cross_entropy(h->backend, whole));
  assert_fails(h, "no bias, soft-cap", linear_cross_entropy(h->backend, capped));
  assert_fails(h, "predictions or mean", linear_cross_entropy(h->backend, mean));
  harness_close(h);
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "rank")) return be_a_rank(argv[2]);
  return tests_run("vocabulary parallel", NULL, NULL);
}
