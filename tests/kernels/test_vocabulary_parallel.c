// The last layer with its head split over ranks, against float64 on one: this program starts itself as 1 to 4
// ranks under mpirun (with LCE_GPU_RANKS=N under tools/launch, as 2 and N ranks with a GPU each). Every rank draws
// all tokens and the whole head, takes its own, and checks what it gets.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/linear_cross_entropy.h"
#include "kernels/ranks/ranks.h"
#include "tests/harness.h"
#include "tests/process.h"
#include "tests/reference.h"

// --- a rank ------------------------------------------------------------------------------------------------

typedef struct {
  const char *name;
  int64_t rows, hidden, vocab, chunk; // rows of each rank
  bool terms;                         // all that act on whole rows
  bool ignores, named;                // some tokens; and the counted ones are named
  bool accumulate, forward_only, wide_dx;
  int hopeless; // logits that beat the target's by hundreds: 1 in the target's part, 2 elsewhere, 3 both
} Case;

static const Case cases[] = {
    {.name = "plain", .rows = 29, .hidden = 17, .vocab = 101, .chunk = 7},
    {.name = "one chunk", .rows = 12, .hidden = 24, .vocab = 64, .chunk = 100},
    {.name = "a token and a row each", .rows = 1, .hidden = 3, .vocab = 0, .chunk = 1},
    {.name = "terms", .rows = 29, .hidden = 17, .vocab = 101, .chunk = 7, .terms = true},
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
};

static int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// All ranks' tokens and the whole head, in float64.
typedef struct {
  ReferenceLoss r;
  double *x, *weight;
  int32_t *targets;
} Problem;

static double *positive_values(Harness *h, int64_t count) {
  double *values = random_values(h, count, 1);
  for (int64_t i = 0; i < count; i++) values[i] = 0.25 + fabs(values[i]);
  return values;
}

// Turns row n of x into a unit vector of its own axis, so that W[column] alone decides about that logit.
static void set_lead(Problem *p, int64_t n, int64_t column, double lead) {
  int64_t hidden = p->r.hidden, axis = n % hidden;
  for (int64_t i = 0; i < hidden; i++) p->x[n * hidden + i] = i == axis;
  p->weight[column * hidden + axis] = p->weight[p->targets[n] * hidden + axis] + lead;
}

static Problem make_problem(Harness *h, const Case *c, int64_t vocab, int64_t part) {
  int64_t rows = c->rows * h->backend->ranks;
  Problem p = {.x = random_values(h, rows * c->hidden, 1),
               .weight = random_values(h, vocab * c->hidden, 2 / sqrt((double)c->hidden)),
               .targets = random_ids(h, rows, vocab)};
  p.r = (ReferenceLoss){.rows = rows, .hidden = c->hidden, .vocab = vocab, .scale = 0.5};
  if (c->terms) {
    p.r.label_smoothing = (float)0.1;
    p.r.z_loss = (float)0.02;
    p.r.temperature = 1.5;
    p.r.class_weights = positive_values(h, vocab);
    p.r.token_weights = random_values(h, rows, 1);
  }
  // Another third on every rank, and all of the last rank's.
  for (int64_t n = 0; n < rows && c->ignores; n++)
    if (n % 3 == n / c->rows % 3 || (h->backend->ranks > 2 && n / c->rows == h->backend->ranks - 1))
      p.targets[n] = IGNORE_INDEX;
  for (int64_t n = 1; n < rows && c->hopeless; n += 4) {
    int64_t here = p.targets[n] / part * part, there = (here + part) % (part * h->backend->ranks);
    // Not the target itself.
    int64_t column = least(here + (p.targets[n] == here), vocab - 1);
    if (c->hopeless & 1) set_lead(&p, n, column, 300);
    if (c->hopeless & 2) set_lead(&p, n, least(there + 1, vocab - 1), 500);
  }
  p.r.x = p.x, p.r.weight = p.weight, p.r.targets = p.targets;
  double **const per_token[] = {&p.r.loss, &p.r.token_z_loss, &p.r.log_prob, &p.r.logsumexp};
  for (size_t i = 0; i < sizeof per_token / sizeof *per_token; i++) *per_token[i] = host_values(h, rows);
  if (c->forward_only) return p;
  p.r.dx = host_values(h, rows * c->hidden);
  p.r.dweight = host_values(h, vocab * c->hidden);
  return p;
}

// The own counted positions, then the ignored ones; returns the most that count on any rank.
static int64_t name_rows(const Problem *p, int64_t rows, int rank, int ranks, int32_t *names) {
  int64_t most = 0, count = 0;
  for (int r = 0; r < ranks; r++) {
    int64_t counted = 0;
    for (int64_t n = 0; n < rows; n++) counted += p->targets[r * rows + n] != IGNORE_INDEX;
    if (counted > most) most = counted;
  }
  for (int ignored = 0; ignored < 2; ignored++)
    for (int64_t n = 0; n < rows; n++)
      if ((p->targets[rank * rows + n] == IGNORE_INDEX) == ignored) names[count++] = (int32_t)n;
  return most;
}

static void check_case(Harness *h, const Case *c) {
  Backend *b = h->backend;
  int64_t vocab = c->vocab ? c->vocab : b->ranks, part = (vocab + b->ranks - 1) / b->ranks;
  int64_t first = b->rank * part, own = least(part, vocab - first), from = b->rank * c->rows;
  Problem p = make_problem(h, c, vocab, part);
  ReferenceLoss *r = &p.r;
  // The reference computes with what the device's dtype holds of x and W: of all of them.
  Tensor all_x = tensor_from(h, h->dtype, p.x, r->rows, c->hidden);
  Tensor all_weight = tensor_from(h, h->dtype, p.weight, vocab, c->hidden);
  LinearCrossEntropy a = {.mode = LCE_FUSED,
                          .chunk = c->chunk,
                          .loss = poisoned_vector(h, DTYPE_F32, c->rows),
                          .x = tensor_rows(all_x, from, c->rows),
                          .weight = tensor_rows(all_weight, first, own),
                          .targets = ids_from(h, p.targets + from, c->rows),
                          .shard = {.first = first, .vocab_size = vocab},
                          .terms = {.label_smoothing = (float)r->label_smoothing,
                                    .z_loss = (float)r->z_loss,
                                    .temperature = (float)r->temperature},
                          .scale = (float)r->scale,
                          .accumulate = c->accumulate};
  if (c->terms) {
    a.terms.class_weights = vector_from(h, DTYPE_F32, (double *)r->class_weights, vocab);
    a.token_weights =
        tensor_rows(vector_from(h, DTYPE_F32, (double *)r->token_weights, r->rows), from, c->rows);
  }
  if (c->named) {
    int32_t *names = random_ids(h, c->rows, 1);
    a.counted = name_rows(&p, c->rows, b->rank, b->ranks, names);
    a.rows = ids_from(h, names, c->rows);
  }
  a.outputs.z_loss = poisoned_vector(h, DTYPE_F32, c->rows);
  a.outputs.log_prob = poisoned_vector(h, DTYPE_F32, c->rows);
  a.outputs.logsumexp = poisoned_vector(h, DTYPE_F32, c->rows);
  double *before = host_values(h, own * c->hidden);
  if (!c->forward_only) {
    if (c->accumulate) before = random_values(h, own * c->hidden, 1);
    a.dx = poisoned(h, c->wide_dx ? DTYPE_F32 : h->dtype, c->rows, c->hidden);
    a.dweight = c->accumulate ? tensor_from(h, DTYPE_F32, before, own, c->hidden)
                              : poisoned(h, DTYPE_F32, own, c->hidden);
  }
  linear_cross_entropy(b, a);
  reference_loss(r);

  double terms = (double)(c->hidden + vocab), size = (c->hopeless ? 500 : 8) + 64 * r->z_loss;
  Tolerance told = of_size(within(16, terms), size);
  const struct {
    const char *name;
    Tensor got;
    const double *want;
  } outputs[] = {{"loss", a.loss, r->loss},
                 {"z_loss", a.outputs.z_loss, r->token_z_loss},
                 {"log_prob", a.outputs.log_prob, r->log_prob},
                 {"logsumexp", a.outputs.logsumexp, r->logsumexp}};
  char what[96];
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
    snprintf(what, sizeof what, "%s (%s, rank %d of %d)", outputs[i].name, c->name, b->rank, b->ranks);
    check_values(h, what, outputs[i].got, outputs[i].want + from, told);
  }
  if (c->forward_only) return;
  double gradient_size = r->scale * (c->hopeless ? 300 : 1 + 8 * r->z_loss);
  for (int64_t i = 0; i < own * c->hidden; i++) r->dweight[first * c->hidden + i] += before[i];
  snprintf(what, sizeof what, "dx (%s, rank %d of %d)", c->name, b->rank, b->ranks);
  check_values(h, what, a.dx, r->dx + from * c->hidden, of_size(within_stored(h, 8, terms), gradient_size));
  snprintf(what, sizeof what, "dweight (%s, rank %d of %d)", c->name, b->rank, b->ranks);
  check_values(h, what, a.dweight, r->dweight + first * c->hidden,
               of_size(within_stored(h, 8, (double)(c->hidden + r->rows)), gradient_size));
}

// A NaN in one token's x is in that token's loss and dx, and in no other's; the sums of dweight cannot help it.
static void check_nan(Harness *h) {
  const Case c = {.name = "NaN", .rows = 8, .hidden = 16, .vocab = 80, .chunk = 3};
  Backend *b = h->backend;
  Problem p = make_problem(h, &c, c.vocab, c.vocab / b->ranks);
  p.x[2 * c.hidden + 5] = NAN; // rank 0's
  int64_t part = (c.vocab + b->ranks - 1) / b->ranks, first = b->rank * part, from = b->rank * c.rows;
  int64_t own = least(part, c.vocab - first);
  LinearCrossEntropy a = {.mode = LCE_FUSED,
                          .chunk = c.chunk,
                          .loss = poisoned_vector(h, DTYPE_F32, c.rows),
                          .dx = poisoned(h, h->dtype, c.rows, c.hidden),
                          .dweight = poisoned(h, DTYPE_F32, own, c.hidden),
                          .x = tensor_rows(tensor_from(h, h->dtype, p.x, p.r.rows, c.hidden), from, c.rows),
                          .weight =
                              tensor_rows(tensor_from(h, h->dtype, p.weight, c.vocab, c.hidden), first, own),
                          .targets = ids_from(h, p.targets + from, c.rows),
                          .shard = {.first = first, .vocab_size = c.vocab},
                          .scale = 1};
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
  const Case c = {.name = "again", .rows = 45, .hidden = 24, .vocab = 515, .chunk = 16};
  Backend *b = h->backend;
  int64_t part = (c.vocab + b->ranks - 1) / b->ranks, first = b->rank * part;
  int64_t own = least(part, c.vocab - first);
  Problem p = make_problem(h, &c, c.vocab, part);
  Tensor dx[2], dweight[2], loss[2];
  for (int i = 0; i < 2; i++) {
    dx[i] = poisoned(h, h->dtype, c.rows, c.hidden);
    dweight[i] = poisoned(h, DTYPE_F32, own, c.hidden);
    loss[i] = poisoned_vector(h, DTYPE_F32, c.rows);
    Tensor x = tensor_from(h, h->dtype, p.x, p.r.rows, c.hidden);
    Tensor weight = tensor_from(h, h->dtype, p.weight, c.vocab, c.hidden);
    linear_cross_entropy(b, (LinearCrossEntropy){.mode = LCE_FUSED,
                                                 .chunk = c.chunk,
                                                 .loss = loss[i],
                                                 .dx = dx[i],
                                                 .dweight = dweight[i],
                                                 .x = tensor_rows(x, b->rank * c.rows, c.rows),
                                                 .weight = tensor_rows(weight, first, own),
                                                 .targets = ids_from(h, p.targets + b->rank * c.rows, c.rows),
                                                 .shard = {.first = first, .vocab_size = c.vocab},
                                                 .scale = 1});
  }
  check_bitwise_equal(h, "dx again", dx[0], dx[1]);
  check_bitwise_equal(h, "dweight again", dweight[0], dweight[1]);
  check_bitwise_equal(h, "loss again", loss[0], loss[1]);
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

static void split_over_ranks_it_is_as_whole(void **state) {
  (void)state;
  if (!can_launch()) skip();
  const char *gpus = getenv("LCE_GPU_RANKS");
  int most = gpus ? atoi(gpus) : 4;
  for (int ranks = 1; ranks <= most; ranks++) {
    if (gpus && ranks != 2 && ranks != most) continue;
    check_ranks(ranks, gpus ? "cuda-fp32" : "cpu");
    check_ranks(ranks, gpus ? "cuda" : "cpu-plain");
  }
}

static void what_cannot_be_split_is_refused(void **state) {
  (void)state;
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
  LinearCrossEntropy beyond = a, whole = a, capped = a, filtered = a, mean = a;
  beyond.shard.first = 6;
  whole.mode = LCE_MATERIALIZED;
  capped.terms.softcap = 30;
  filtered.terms.filter = 0.1f;
  mean.mean = true;
  assert_fails(h, "5 rows from 6 on are no part of a vocabulary of 9",
               linear_cross_entropy(h->backend, beyond));
  assert_fails(h, "knows the fused mode", linear_cross_entropy(h->backend, whole));
  assert_fails(h, "no bias, soft-cap", linear_cross_entropy(h->backend, capped));
  assert_fails(h, "filter or mean", linear_cross_entropy(h->backend, filtered));
  assert_fails(h, "filter or mean", linear_cross_entropy(h->backend, mean));
  harness_close(h);
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "rank")) return be_a_rank(argv[2]);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(split_over_ranks_it_is_as_whole),
      cmocka_unit_test(what_cannot_be_split_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
