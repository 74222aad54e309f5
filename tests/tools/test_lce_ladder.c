// Every rung of the ladder against float64, on shapes and chunks that nothing divides; on a GPU in bf16.
#include "kernels/base/integers.h"
#include "tests/loss_problem.h"
#include "tools/ladder/ladder.h"

// Totals of a rung's matmuls: flops in units of 2 N V H, and bytes of dW that each call reads and writes.
static const BackendOps *uncounted;
static double flops;
static int64_t dweight_bytes[64], dweight_calls;

static void count_forward(Backend *backend, const LinearForward *a) {
  flops += 2.0 * (double)tensor_count(a->out) * (double)a->x.shape[1];
  uncounted->linear_forward(backend, a);
}

static void count_input(Backend *backend, const LinearBackwardInput *a) {
  flops += 2.0 * (double)tensor_count(a->dout) * (double)a->dx.shape[1];
  uncounted->linear_backward_input(backend, a);
}

static void count_weight(Backend *backend, const LinearBackwardWeight *a) {
  flops += 2.0 * (double)tensor_count(a->dout) * (double)a->x.shape[1];
  int64_t bytes = tensor_count(a->dweight) * (int64_t)dtype_bytes(a->dweight.dtype);
  dweight_bytes[dweight_calls++ % 64] = a->accumulate ? 2 * bytes : bytes;
  uncounted->linear_backward_weight(backend, a);
}

// Runs it, counting matmuls. Returns the bytes that it held at the most.
static size_t run_rung(Harness *h, int rung, LinearCrossEntropy call) {
  Backend *backend = h->backend;
  Ledger *ledger = &backend->memory.ledger;
  MemoryMark tensors = memory_mark(&backend->memory);
  size_t peak = ledger->stack_peak, before = ledger->stack;
  static BackendOps counting;
  counting = *(uncounted = backend->ops);
  counting.linear_forward = count_forward, counting.linear_backward_input = count_input;
  counting.linear_backward_weight = count_weight;
  flops = 0, dweight_calls = 0, ledger->stack_peak = before;
  backend->ops = &counting;
  CATCH(ladder_run(backend, rung, call));
  backend->ops = uncounted;
  size_t held = ledger->stack_peak - before;
  if (ledger->stack_peak < peak) ledger->stack_peak = peak;
  if (caught_sentence[0])
    fail_msg("rung %s, of %lld tokens in chunks of %lld, fails: %s", ladder_names[rung - 1],
             (long long)call.x.shape[0], (long long)call.chunk, caught_sentence);
  assert_int_equal(memory_mark(&backend->memory), tensors);
  return held;
}

// Every rung on the problem; `size` is that of the logits, whose fp32 error the loss inherits.
static void check_rungs(Harness *h, ReferenceLoss *r, int64_t chunk, double size) {
  r->scale = 1.0 / (double)r->rows;
  reference_gradients(h, r);
  bool known = false;
  for (int rung = 1; rung <= RUNGS; rung++) {
    if (!ladder_has(h->backend, rung) || (rung == 6 && r->hidden % 8)) continue; // test_refusals
    MemoryMark mark = memory_mark(&h->backend->memory);
    LinearCrossEntropy call = loss_call(h, r, LCE_FUSED, chunk);
    if (!known) reference_loss(r), known = true; // of the values as the tensors have them
    run_rung(h, rung, call);
    for (int64_t i = 0; rung >= 3 && rung <= 5 && i < dweight_calls; i++)
      if (ladder_dweight_bytes(&call, i * call.chunk) != dweight_bytes[i % 64])
        fail_msg("rung %s: the chunk that begins at token %lld of %lld, of dW [%lld, %lld], reads and writes "
                 "other bytes of it than ladder_dweight_bytes says: %lld",
                 ladder_names[rung - 1], (long long)(i * call.chunk), (long long)r->rows, (long long)r->vocab,
                 (long long)r->hidden, (long long)ladder_dweight_bytes(&call, i * call.chunk));
    double terms = (double)(r->hidden + r->vocab), summed = (double)(r->hidden + r->rows);
    const struct {
      const char *name, *row;
      Tensor got;
      const double *want;
      Tolerance tolerance;
    } results[] = {{"loss", "token", call.loss, r->loss, with_size(within(8, terms), size)},
                   {"dX", "token", call.dx, r->dx, with_size(within_stored(h, 8, terms), r->scale)},
                   {"dW", "vocabulary entry", call.dweight, r->dweight,
                    with_size(within_stored(h, 8, summed), r->scale)}};
    for (int i = 0; i < 3; i++) {
      char what[96];
      snprintf(what, sizeof what, "rung %s: %s", ladder_names[rung - 1], results[i].name);
      check_by_row(h, what, results[i].row, results[i].got, results[i].want, results[i].tolerance);
    }
    memory_pop_to(&h->backend->memory, mark);
  }
}

// Exercise 3: the second chunk of 3 of 7 tokens.
HARNESS_TEST(test_chunk) {
  ReferenceLoss p = loss_problem(h, 7, 5, 11, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy whole = loss_call(h, &p, LCE_FUSED, 3), c = ladder_chunk(&whole, 3);
  const char *const names[] = {"x", "dX", "loss", "targets"};
  const Tensor got[] = {c.x, c.dx, c.loss, c.targets}, all[] = {whole.x, whole.dx, whole.loss, whole.targets};
  for (int i = 0; i < 4; i++)
    if (got[i].data != tensor_rows(all[i], 3, 3).data || got[i].shape[0] != 3)
      fail_msg("ladder_chunk: %s is not tokens 3 to 5 of the call's 7: it has %lld, from token %lld on",
               names[i], (long long)got[i].shape[0],
               (long long)((char *)got[i].data - (char *)all[i].data) /
                   (long long)tensor_bytes(tensor_rows(all[i], 0, 1)));
  if (c.dweight.data != whole.dweight.data || c.dweight.shape[0] != 11)
    fail_msg("ladder_chunk: dW is not the call's, where every chunk adds its part");
  if (ladder_chunk(&whole, 0).accumulate || !c.accumulate)
    fail_msg("ladder_chunk: %s chunk adds to dW", c.accumulate ? "the first" : "no");
}

// GEMMs and memory (exercise 2), where columns are many and nothing else is.
HARNESS_TEST(test_costs) {
  enum { ROWS = 20, CHUNK = 6, VOCAB = 4096 };
  if (h->backend->device != ON_CPU) return;
  ReferenceLoss p = loss_problem(h, ROWS, 2, VOCAB, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, CHUNK);
  const double rows[] = {2 * ROWS, 2 * CHUNK, CHUNK, CHUNK, CHUNK}; // of fp32 [., V]
  for (int rung = 1; rung <= 5; rung++) {
    size_t held = run_rung(h, rung, call);
    double gemms = flops / (2.0 * ROWS * VOCAB * 2), held_rows = (double)held / (4.0 * VOCAB);
    if (gemms != ladder_gemms[rung - 1])
      fail_msg("rung %s computes %g GEMMs of 2 N V H flops; %d are right", ladder_names[rung - 1], gemms,
               ladder_gemms[rung - 1]);
    if (!(held_rows >= rows[rung - 1] && held_rows < 1.4 * rows[rung - 1]))
      fail_msg("rung %s holds %.3g rows of V floats in chunks of %d; %g are right", ladder_names[rung - 1],
               held_rows, CHUNK, rows[rung - 1]);
  }
}

// Targets that lead by 30: loss and gradients are small, and right in relation to their own size. The usual
// code (rungs 1 to 3) computes p - 1 from a p that fp32 rounds to 1: its gradients are 100% wrong.
HARNESS_TEST(test_certain_targets) {
  enum { ROWS = 6, HIDDEN = 16 };
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, 515, 0.1);
  reference_gradients(h, &p);
  for (int64_t n = 0; n < ROWS; n++) {
    p.targets[n] = (int32_t)(80 * n + 3);
    loss_problem_lead(&p, n, 514 - n, 0);
    p.weight[p.targets[n] * HIDDEN + n] += 30;
  }
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 4);
  reference_loss(&p);
  double most = 4 * dtype_epsilon(h->dtype) + 1e-4;
  for (int rung = 1; rung <= RUNGS; rung++) {
    if (!ladder_has(h->backend, rung)) continue;
    run_rung(h, rung, call);
    const double *loss = values_of(h, call.loss), *dx = values_of(h, call.dx),
                 *dw = values_of(h, call.dweight);
    for (int64_t n = 0; n < ROWS; n++) {
      int64_t x = n * HIDDEN, w = p.targets[n] * HIDDEN;
      const char *const names[] = {"loss", "dX", "the target's dW"};
      const double *const got[] = {loss + n, dx + x, dw + w}, *const right[] = {p.loss + n, p.dx + x,
                                                                                p.dweight + w};
      for (int i = 0; i < 3; i++) {
        double off = relative_distance(got[i], right[i], i ? HIDDEN : 1);
        if (rung < 4 && off < 0.5)
          fail_msg("rung %s: %s of token %d, whose target leads by 30, is right, which fp32's p - 1 cannot "
                   "make it: is this another rung's code?",
                   ladder_names[rung - 1], names[i], (int)n);
        if (rung >= 4 && !(off <= most))
          fail_msg(
              "rung %s: %s of token %d, whose target leads by 30, is off by %.2g of its size: it begins with "
              "%.9g; %.9g is right",
              ladder_names[rung - 1], names[i], (int)n, off, *got[i], *right[i]);
      }
    }
  }
}

HARNESS_TEST(test_ignored) {
  ReferenceLoss p = loss_problem(h, 37, 24, 301, 2);
  for (int64_t n = 0; n < p.rows; n++)
    if (n % 3 == 0 || n >= 27) p.targets[n] = IGNORE_INDEX; // the last chunks have no other
  check_rungs(h, &p, 9, 2);
}

// Logits that beat the target's by 20, 88.5 (fp32's largest exponential), hundreds; a target that beats all.
HARNESS_TEST(test_leads) {
  const double leads[] = {20, 88.5, 300, 1000, 0, 0};
  ReferenceLoss p = loss_problem(h, 6, 16, 515, 0.1);
  for (int64_t n = 0; n < p.rows; n++) {
    p.targets[n] = (int32_t)(100 * n + 3);
    loss_problem_lead(&p, n, 514 - n, leads[n]);
  }
  p.weight[p.targets[5] * p.hidden + 5] += 30;
  p.weight[300 * p.hidden + 1] = p.weight[513 * p.hidden + 1] - 0.7; // token 1: two logits lead
  check_rungs(h, &p, 4, 1);
}

// An Anchored of its own tensors for rows_cpu.c, over columns [first, first + count) of the call's head.
static Anchored anchored_part(Harness *h, LinearCrossEntropy call, int64_t first, int64_t count) {
  int64_t rows = call.x.shape[0];
  Anchored a = {.call = call, .exps = poisoned(h, DTYPE_F32, rows, count)};
  a.scaled_x = poisoned(h, DTYPE_F32, rows, call.x.shape[1]);
  Tensor *const vectors[] = {&a.target_z, &a.anchor, &a.target_e, &a.row_sum, &a.r, &a.c};
  for (int i = 0; i < 6; i++) *vectors[i] = poisoned_vector(h, DTYPE_F32, rows);
  ladder_anchors(&a); // by the whole head
  int32_t *local = random_ids(h, rows, 1), *target = call.targets.data;
  for (int64_t n = 0; n < rows; n++) {
    bool here = target[n] >= first && target[n] < first + count;
    local[n] = here ? (int32_t)(target[n] - first) : target[n] == IGNORE_INDEX ? IGNORE_INDEX : ELSEWHERE;
  }
  a.call.targets = ids_from(h, local, rows);
  a.call.weight = tensor_rows(call.weight, first, count);
  return a;
}

// Checks the results of ladder_anchors, ladder_repair and ladder_join: the target's logit, and by the row's
// anchor its E, which is too small to be seen in a loss or gradient. `right` [N] are the targets' logits.
static void check_anchored(Harness *h, const char *step, Anchored a, const double *right) {
  const double *anchor = values_of(h, a.anchor), *z = values_of(h, a.target_z), *e = values_of(h, a.target_e);
  const int32_t *target = a.call.targets.data;
  for (int64_t n = 0; n < a.exps.shape[0]; n++) {
    double want = exp(right[n] - anchor[n]);
    if (target[n] == IGNORE_INDEX) continue;
    if (!(fabs(z[n] - right[n]) <= 1e-5) || (anchor[n] != z[n] && strcmp(step, "ladder_anchors") == 0))
      fail_msg("%s: target_z of token %d is %.9g, its anchor %.9g; both are %.9g", step, (int)n, z[n],
               anchor[n], right[n]);
    if (!(fabs(e[n] - want) <= 1e-4 * want + 1e-37)) // fp32 ends there
      fail_msg("%s: target_e of token %d is %.9g; %.9g is right", step, (int)n, e[n], want);
    if (anchor[n] == z[n]) continue; // not repaired
    const float *exps = (const float *)a.exps.data + n * a.exps.stride;
    double most = 0;
    for (int64_t j = 0; j < a.exps.shape[1]; j++) most = fmax(most, exps[j]);
    if (strcmp(step, "ladder_repair") == 0 && most != 1)
      fail_msg("%s: the largest E of token %d is %.9g; 1 is right", step, (int)n, most);
    if (target[n] >= 0 && exps[target[n]] != 0)
      fail_msg("%s: E of token %d's target is %.9g; 0 is right", step, (int)n, (double)exps[target[n]]);
  }
}

// Exercise 7: a head in two parts. The largest logit is in the first, in the second, or neither leads.
HARNESS_TEST(test_two_ranks) {
  enum { ROWS = 10, HIDDEN = 16, VOCAB = 515, PARTS = 2 };
  if (h->backend->device != ON_CPU) return;
  ReferenceLoss p = loss_problem(h, ROWS, HIDDEN, VOCAB, 0.5);
  reference_gradients(h, &p);
  for (int64_t n = 0; n < ROWS; n++) {
    p.targets[n] = (int32_t)(50 * n + 3);
    if (n < 6) loss_problem_lead(&p, n, n % 2 ? 100 + n : 500 - n, n < 4 ? 70 + 100 * (double)(n / 2) : 20);
  }
  p.weight[490 * HIDDEN + 1] = p.weight[101 * HIDDEN + 1] - 0.7; // token 1: both parts are repaired
  p.targets[9] = IGNORE_INDEX;
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, ROWS);
  reference_loss(&p);
  const int64_t first[] = {0, 257, VOCAB};
  Anchored ranks[PARTS];
  Tensor rescale = poisoned(h, DTYPE_F32, PARTS, ROWS);
  double z[ROWS] = {0};
  for (int64_t k = 0; k < (int64_t)ROWS * HIDDEN; k++)
    if (p.targets[k / HIDDEN] != IGNORE_INDEX)
      z[k / HIDDEN] += p.x[k] * p.weight[p.targets[k / HIDDEN] * HIDDEN + k % HIDDEN];
  for (int i = 0; i < PARTS; i++) {
    ranks[i] = anchored_part(h, call, first[i], first[i + 1] - first[i]);
    linear_forward(h->backend,
                   (LinearForward){.out = ranks[i].exps, .x = call.x, .weight = ranks[i].call.weight});
    check_anchored(h, "ladder_anchors", ranks[i], z);
    ladder_exponentials(&ranks[i]);
    ladder_repair(&ranks[i]);
    check_anchored(h, "ladder_repair", ranks[i], z);
  }
  ladder_join(ranks, rescale);
  check_anchored(h, "ladder_join", ranks[1], z);
  ladder_finish(&ranks[1]);
  check_by_row(h, "two ranks: loss", "token", call.loss, p.loss, with_size(within(8, VOCAB), 300));
  double *dx = values_of(h, call.dx);
  const double *r = values_of(h, ranks[1].r), *c = values_of(h, ranks[1].c), *factor = values_of(h, rescale);
  for (int64_t k = 0; k < (int64_t)ROWS * HIDDEN; k++) {
    int64_t n = k / HIDDEN, i = k % HIDDEN, y = p.targets[n];
    dx[k] = y == IGNORE_INDEX ? 0 : c[n] * p.weight[y * HIDDEN + i];
    for (int64_t j = 0; j < VOCAB; j++) {
      int part = j >= first[1];
      double e =
          (double)((const float *)ranks[part].exps.data)[n * ranks[part].exps.stride + j - first[part]];
      dx[k] += r[n] * factor[part * ROWS + n] * e * p.weight[j * HIDDEN + i];
    }
    dx[k] *= p.scale;
  }
  check_by_row(h, "two ranks: dX", "token", tensor_from(h, DTYPE_F32, dx, ROWS, HIDDEN), p.dx,
               with_size(within(8, VOCAB), 1));
}

// Exercise 5: six tiles of given masses, in which rows and columns differ. Those above M0 stay as they are;
// others stay with the probability m / M0, or that rounded to a power of two, and count for as much on
// average as if all stayed.
HARNESS_TEST(test_tiles) {
  enum { ROWS = LCE_TILE_ROWS + 72, VOCAB = 2 * LCE_TILE_COLUMNS + 116, DRAWS = 400, FULL = 30 };
  const double masses[] = {60, 31, 15, 8, 3, 33};
  if (h->backend->device != ON_CPU) return;
  Anchored a = {.exps = poisoned(h, DTYPE_F32, ROWS, VOCAB), .r = poisoned_vector(h, DTYPE_F32, ROWS)};
  double sum[6] = {0};
  int kept[6] = {0}, together = 0; // tiles of mass 15 and 8
  a.call.sampling.full_mass = FULL;
  for (int64_t n = 0; n < ROWS; n++) ((float *)a.r.data)[n] = n % 2 ? 0.75f : 0.25f;
  for (int draw = 0; draw <= DRAWS; draw++)
    for (int step = 0; step < 2; step++) {
      a.call.sampling.seed = (uint64_t)draw;
      if (step) ladder_sample(&a);
      for (int tile = 0; tile < 6; tile++) {
        int64_t top = tile / 3 * LCE_TILE_ROWS, left = tile % 3 * LCE_TILE_COLUMNS;
        int64_t bottom = min_i64(top + LCE_TILE_ROWS, ROWS), right = min_i64(left + LCE_TILE_COLUMNS, VOCAB);
        float *corner = (float *)a.exps.data + top * a.exps.stride + left;
        float e = (float)(masses[tile] / 0.5 / (double)((bottom - top) * (right - left)));
        for (int64_t n = top; n < bottom; n++)
          for (int64_t j = left; j < right; j++) {
            float *entry = (float *)a.exps.data + n * a.exps.stride + j, unlike = j % 2 ? 3 : 1;
            if (!step) *entry = e * unlike / 2;
            if (step && fabsf(*entry - *corner * unlike) > 1e-6f * *entry)
              fail_msg("entry [%d, %d] of E has another factor than the rest of its tile", (int)n, (int)j);
          }
        if (step) kept[tile] += *corner != 0, sum[tile] += (double)(2 * *corner / e);
      }
      const float *e = a.exps.data;
      together += step && e[2 * LCE_TILE_COLUMNS] != 0 && e[LCE_TILE_ROWS * a.exps.stride] != 0;
    }
  for (int tile = 0; tile < 6; tile++) {
    double share = (double)kept[tile] / (DRAWS + 1), mean = sum[tile] / (DRAWS + 1), q = masses[tile] / FULL;
    double low = q < 1 ? q / sqrt(2) : 1, high = q < 1 ? q * sqrt(2) : 1, spread = 5 / sqrt(DRAWS);
    if (!(share >= low - spread * sqrt(low * (1 - low)) &&
          share <= high + spread * sqrt(high * fabs(1 - high))))
      fail_msg("a tile of mass %g, where M0 is %d, stays in %.0f%% of the draws; about %.0f%% is right",
               masses[tile], FULL, 100 * share, 100 * fmin(q, 1));
    if (!(fabs(mean - 1) <= (q < 1 ? spread * sqrt(1 / low - 1) : 1e-6)))
      fail_msg("a tile of mass %g, where M0 is %d, counts %.2f times on average; once is right", masses[tile],
               FULL, mean);
  }
  if (together > 0.2 * DRAWS)
    fail_msg(
        "tiles of mass 15 and 8 stay together in %.0f%% of the draws; 13%% is right of draws of their own",
        100.0 * together / DRAWS);
}

// For test_ladder_page.py: x, W, targets (int32), then each rung's loss, dX and dW, in fp32.
HARNESS_TEST(test_written) {
  const char *path = getenv("LADDER_FILE");
  if (!path || h->backend->device != ON_CPU) return;
  ReferenceLoss p = loss_problem(h, 37, 24, 1301, 2);
  reference_gradients(h, &p);
  loss_problem_lead(&p, 5, 900, 0); // token 5: certain
  p.weight[p.targets[5] * p.hidden + 5] += 30;
  p.scale = 1;
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 9);
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  for (int rung = 0; rung <= RUNGS; rung++) {
    if (rung && !ladder_has(h->backend, rung)) continue;
    if (rung) run_rung(h, rung, call);
    const Tensor problem[] = {call.x, call.weight, call.targets},
                 results[] = {call.loss, call.dx, call.dweight};
    for (int i = 0; i < 3; i++) {
      Tensor t = (rung ? results : problem)[i];
      assert_int_equal(fwrite(t.data, 4, (size_t)tensor_count(t), file), tensor_count(t));
    }
  }
  assert_int_equal(fclose(file), 0);
}

HARNESS_TEST(test_shapes) {
  const int64_t shapes[][4] = {{1, 1, 1, 1},        {7, 13, 1, 3},       {5, 3, 1031, 2},
                               {130, 7, 33, 64},    {131, 40, 29, 99},   {33, 8, 4100, 1},
                               {3, 72, 2053, 4096}, {127, 64, 1283, 50}, {300, 200, 500, 300}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    ReferenceLoss p = loss_problem(h, shapes[i][0], shapes[i][1], shapes[i][2], 2);
    check_rungs(h, &p, shapes[i][3], 2);
  }
}

// Rung 0: Z = X W^T, dX = Z W, dW = Z^T X.
HARNESS_TEST(test_matmuls) {
  ReferenceLoss p = loss_problem(h, 37, 24, 301, 2);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 9);
  ladder_run(h->backend, 0, call);
  double *z = host_values(h, p.rows * p.vocab), *dx = host_values(h, p.rows * p.hidden),
         *dweight = host_values(h, p.vocab * p.hidden);
  reference_linear(z, p.x, p.weight, false, NULL, NULL, p.rows, p.hidden, p.vocab);
  reference_linear(dx, z, p.weight, true, NULL, NULL, p.rows, p.vocab, p.hidden);
  for (int64_t n = 0; n < p.rows; n++)
    for (int64_t k = 0; k < p.vocab * p.hidden; k++)
      dweight[k] += z[n * p.vocab + k / p.hidden] * p.x[n * p.hidden + k % p.hidden];
  check_values(h, "dx", call.dx, dx, with_size(within_stored(h, 8, 301), 30));
  check_values(h, "dweight", call.dweight, dweight, with_size(within_stored(h, 8, 37), 30));
}

static void sampled_rung(Backend *backend, LinearCrossEntropy call) {
  ladder_run(backend, 4, call);
}

// Rung 4 with tiles of E dropped: its gradients are right on average, its losses bit for bit.
HARNESS_TEST(test_sampling) {
  if (h->backend->device != ON_CPU) return;
  ReferenceLoss p = loss_problem(h, 140, 6, 1000, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy exact = loss_call(h, &p, LCE_FUSED, 70), sampled = loss_call(h, &p, LCE_FUSED, 70);
  sampled_rung(h->backend, exact);
  sampled.sampling.full_mass = 30;
  check_unbiased(h, sampled_rung, sampled, &exact, 256);
}

HARNESS_TEST(test_refusals) {
  ReferenceLoss p = loss_problem(h, 3, 12, 5, 1);
  reference_gradients(h, &p);
  LinearCrossEntropy call = loss_call(h, &p, LCE_FUSED, 2);
  if (h->backend->device == ON_CUDA)
    assert_fails(h, "rung 5 is for the CPU alone", ladder_run(h->backend, 5, call));
  if (ladder_has(h->backend, 6))
    assert_fails(h, "a hidden size of 12 is no multiple", ladder_run(h->backend, 6, call));
  else
    assert_fails(h, "rung 6 is for Hopper GPUs alone", ladder_run(h->backend, 6, call));
}

// Rung 6 takes bf16 alone. An exercise is checked by one BLAS.
TEST_MAIN(run_on_backend("cpu") + (getenv("EXERCISE") ? 0 : run_on_backend("cpu-plain")) +
          run_on_backend("cuda"))
