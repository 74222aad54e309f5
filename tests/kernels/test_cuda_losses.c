// The losses on the CUDA backend against the CPU backend, where test_linear_cross_entropy.c (float64, small shapes)
// does not look: rows wider than shared memory, several tiles, misaligned rows, and rows whose exponentials overflow.

#include "kernels/linear_cross_entropy.h"
#include "tests/pair.h"

// --- the materialized loss ---------------------------------------------------------------------------------

static void cross_entropy_case(Pair *p, int64_t rows, int64_t vocab, int64_t stride, bool forward_only) {
  int32_t *ids = random_ids(p->cuda, rows, vocab);
  ids[0] = (int32_t)(vocab - 1);
  if (rows > 2) ids[2] = IGNORE_INDEX;
  Both logits = both_strided(p, p->cuda->dtype, rows, vocab, stride, 4), targets = both_ids(p, ids, rows);
  Both loss = flat(both_poisoned(p, DTYPE_F32, 1, rows, rows));
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    Tensor gradient = on(s, logits);
    if (forward_only) gradient.data = NULL;
    cross_entropy_in_place(s.backend, (CrossEntropyInPlace){.loss = on(s, loss),
                                                            .logits = on(s, logits),
                                                            .targets = on(s, targets),
                                                            .dlogits = gradient,
                                                            .alpha = 0.25f});
  }
  check_both(p, "cross-entropy", loss, within(4, 32));
  if (!forward_only) check_both(p, "dlogits", logits, within(32, 1));
  check_gaps(p->cuda, "dlogits", logits.cuda);
  pop_pair(p);
}

TEST(test_cross_entropy) {
  Pair *p = *state;
  for (int forward_only = 0; forward_only < 2; forward_only++) {
    cross_entropy_case(p, 5, 50257, 50304, forward_only);
    cross_entropy_case(p, 3, 128256, 128256, forward_only);
    cross_entropy_case(p, 7, 1001, 1001, forward_only);
    cross_entropy_case(p, 4, 3, 8, forward_only);
    cross_entropy_case(p, 1, 1, 1, forward_only);
  }
}

// --- the LM head and loss -----------------------------------------------------------------------------------

typedef struct {
  int64_t rows, hidden, vocab, chunk;
  double scale; // of the weights
  bool wide_dx, ignores, accumulate;
} LayerShape;

// The Frobenius norm of the difference over that of the CPU's result; 0 where both are 0.
static double relative_error(Pair *p, Both b) {
  double *got = values_of(p->cuda, b.cuda), *want = values_of(p->cpu, b.cpu), difference = 0, size = 0;
  for (int64_t i = 0; i < tensor_count(b.cpu); i++) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return difference > 0 ? sqrt(difference / size) : 0;
}

static void layer_case(Pair *p, LayerShape l, LceMode mode) {
  Dtype dtype = p->cuda->dtype;
  int32_t *ids = random_ids(p->cuda, l.rows, l.vocab), *counted = random_ids(p->cuda, l.rows, 1), count = 0;
  for (int32_t i = 0; i < l.rows; i++) {
    if (l.ignores && i % 3 == 1) ids[i] = IGNORE_INDEX;
    if (ids[i] != IGNORE_INDEX) counted[count++] = i;
  }
  Both none = {{0}, {0}}, x = both_random(p, dtype, l.rows, l.hidden, 1);
  Both weight = both_random(p, dtype, l.vocab, l.hidden, l.scale), targets = both_ids(p, ids, l.rows);
  Both rows = l.ignores ? both_ids(p, counted, l.rows) : none;
  Both dx = both_poisoned(p, l.wide_dx ? DTYPE_F32 : dtype, l.rows, l.hidden, l.hidden);
  Both dweight = both_result(p, DTYPE_F32, l.vocab, l.hidden, l.accumulate);
  Both loss = flat(both_poisoned(p, DTYPE_F32, 1, l.rows, l.rows)),
       forward = flat(both_poisoned(p, DTYPE_F32, 1, l.rows, l.rows));
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    LinearCrossEntropy a = {.mode = mode,
                            .chunk = l.chunk,
                            .loss = on(s, loss),
                            .dx = on(s, dx),
                            .dweight = on(s, dweight),
                            .x = on(s, x),
                            .weight = on(s, weight),
                            .targets = on(s, targets),
                            .rows = on(s, rows),
                            .counted = count,
                            .scale = 1.0f / (float)count,
                            .accumulate = l.accumulate};
    linear_cross_entropy(s.backend, a);
    a.loss = on(s, forward);
    a.dx = a.dweight = (Tensor){0};
    linear_cross_entropy(s.backend, a);
  }
  // Logits reach about four deviations, and their error multiplies the exponential. Fused, that is the error
  // of a sum of `hidden` products in fp32; materialized, half a unit of the dtype in which they are stored. E
  // (or the gradient of the logits) and r x are stored too: a unit more, of the terms, which outgrow their
  // sums where the distribution is sharp.
  bool fused = mode == LCE_FUSED;
  double size = 4 * l.scale * sqrt((double)l.hidden);
  Tolerance exact = within(8 * (1 + size), (double)l.hidden);
  Tolerance rounded = within_stored(p->cuda, 1 + size / 2, 1);
  bool fp32 = p->cuda->dtype == DTYPE_F32;
  check_both(p, "layer loss", loss, fused || fp32 ? exact : rounded);
  check_bitwise_equal(p->cuda, "loss of the forward pass alone", loss.cuda, forward.cuda);
  check_both(p, "layer dx", dx, fp32 ? exact : rounded);
  check_both(p, "layer dweight", dweight, of_size(fp32 ? exact : rounded, 1 / (double)count));
  // As a whole, dweight is off by the roundings of E and r x: 2^-9 each at most, a good half of that on
  // average.
  double off = relative_error(p, dweight), allowed = fp32 ? 1e-5 * (1 + size) : 0x1p-9 * 1.5;
  if (fused && !(off < allowed)) fail_msg("dweight is off by %g as a whole, allowed %g", off, allowed);
  pop_pair(p);
}

TEST(test_layer) {
  const LayerShape cases[] = {
      {.rows = 96, .hidden = 64, .vocab = 1024, .chunk = 32, .scale = 0.1},
      {.rows = 101, .hidden = 72, .vocab = 1003, .chunk = 37, .scale = 0.1, .ignores = true},
      {.rows = 70,
       .hidden = 37,
       .vocab = 501,
       .chunk = 64,
       .scale = 0.1,
       .wide_dx = true,
       .accumulate = true},
      {.rows = 300,
       .hidden = 128,
       .vocab = 50257,
       .chunk = 256,
       .scale = 0.2,
       .ignores = true},                                                  // several tiles
      {.rows = 64, .hidden = 64, .vocab = 4096, .chunk = 64, .scale = 1}, // sharp
      {.rows = 1, .hidden = 8, .vocab = 1, .chunk = 5, .scale = 1},
      {.rows = 3, .hidden = 8, .vocab = 255, .chunk = 5, .scale = 1, .accumulate = true},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    if (small_shapes() && cases[i].rows * cases[i].vocab > 110000) continue;
    layer_case(*state, cases[i], LCE_FUSED);
    layer_case(*state, cases[i], LCE_MATERIALIZED);
  }
}

typedef struct {
  Tensor exps, dx_raw;
  LossRows rows;
} LogitsExp;

static LogitsExp logits_exp(Harness *h, Tensor x, Tensor weight, Tensor targets) {
  int64_t rows = x.shape[0], vocab = weight.shape[0];
  int64_t stride = h->backend->scratch->logits_stride(vocab, h->dtype);
  LogitsExp s = {.exps = poisoned_strided(h, h->dtype, rows, vocab, stride),
                 .dx_raw = poisoned(h, DTYPE_F32, rows, x.shape[1]),
                 .rows = {.target_z = poisoned_vector(h, DTYPE_F32, rows),
                          .anchor = poisoned_vector(h, DTYPE_F32, rows),
                          .row_sum = poisoned_vector(h, DTYPE_F32, rows),
                          .target_e = poisoned_vector(h, DTYPE_F32, rows)}};
  lce_target_logits(
      h->backend,
      (LceTargetLogits){.target_z = s.rows.target_z, .x = x, .weight = weight, .targets = targets});
  lce_logits_exp(
      h->backend,
      (LceLogitsExp){
          .exps = s.exps, .dx_raw = s.dx_raw, .rows = s.rows, .x = x, .weight = weight, .targets = targets});
  return s;
}

// Row 1's logits beat its target's by hundreds, row 3 holds a NaN; the other rows must not change.
static void hopeless_rows_case(Pair *p, int64_t rows, int64_t hidden, int64_t vocab) {
  Dtype dtype = p->cuda->dtype;
  double *x = random_values(p->cuda, rows * hidden, 1), *weight = random_values(p->cuda, vocab * hidden, 0.1);
  int32_t *ids = random_ids(p->cuda, rows, vocab - 1);
  for (int64_t i = 0; i < hidden; i++) {
    x[1 * hidden + i] *= 20;
    weight[(vocab - 1) * hidden + i] = x[1 * hidden + i] * 500 / (400.0 * (double)hidden);
  }
  Both weights = both_of(p, dtype, weight, vocab, hidden, hidden), targets = both_ids(p, ids, rows);
  Both without = both_of(p, dtype, x, rows, hidden, hidden);
  x[3 * hidden] = NAN;
  Both with = both_of(p, dtype, x, rows, hidden, hidden);
  LogitsExp clean = logits_exp(p->cuda, without.cuda, weights.cuda, targets.cuda);
  LogitsExp cuda = logits_exp(p->cuda, with.cuda, weights.cuda, targets.cuda);
  LogitsExp cpu = logits_exp(p->cpu, with.cpu, weights.cpu, targets.cpu);

  double *anchor = values_of(p->cuda, cuda.rows.anchor), *target_z = values_of(p->cuda, cuda.rows.target_z);
  double *sums = values_of(p->cuda, cuda.rows.row_sum);
  assert_true(anchor[1] - target_z[1] > 150 && isfinite(sums[1])); // it was redone
  assert_true(isnan(sums[3]));
  Tolerance logits = within(8, (double)hidden * 500);
  for (int64_t row = 0; row < rows; row++) { // each row by itself: their sizes differ by far
    Both row_sum = {tensor_rows(cuda.rows.row_sum, row, 1), tensor_rows(cpu.rows.row_sum, row, 1)};
    Both target_e = {tensor_rows(cuda.rows.target_e, row, 1), tensor_rows(cpu.rows.target_e, row, 1)};
    if (row == 3) continue;
    check_both(p, "row_sum", row_sum, logits);
    check_both(p, "target_e", target_e, logits);
    Both exps = {tensor_rows(cuda.exps, row, 1), tensor_rows(cpu.exps, row, 1)};
    Both dx_raw = {tensor_rows(cuda.dx_raw, row, 1), tensor_rows(cpu.dx_raw, row, 1)};
    check_both(p, "exps", exps, logits);
    check_both(p, "dx_raw", dx_raw, p->cuda->dtype == DTYPE_F32 ? logits : within_stored(p->cuda, 1, 1));
    check_bitwise_equal(p->cuda, "exps next to a NaN", exps.cuda, tensor_rows(clean.exps, row, 1));
    check_bitwise_equal(p->cuda, "dx_raw next to a NaN", dx_raw.cuda, tensor_rows(clean.dx_raw, row, 1));
  }
  check_gaps(p->cuda, "exps", in_pieces(cuda.exps));
  pop_pair(p);
}

TEST(test_hopeless_rows) {
  hopeless_rows_case(*state, 5, 64, 1000);
  hopeless_rows_case(*state, 7, 33, 777);
  if (!small_shapes()) hopeless_rows_case(*state, 40, 128, 30011);
}

int main(int count, char **arguments) {
  return pair_main(count, arguments);
}
