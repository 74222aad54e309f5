// Every term of the loss against float64: alone, in pairs, and all at once, in the fused mode (several
// chunks) and the materialized one, with and without ignored targets, on shapes that nothing divides.

#include "tests/loss_problem.h"

// --- terms, each of which may be on ------------------------------------------------------------------------

enum {
  TERM_IGNORED = 512, // some targets are
  TERM_ROWS = 1024,   // and the counted ones are named
  TERMS = 11
};

static const char *const term_names[TERMS] = {"smoothing",     "z-loss",        "soft-cap", "temperature",
                                              "class weights", "token weights", "entropy",  "bias",
                                              "mean",          "ignored",       "rows"};

static const char *name_of(int terms) {
  static char name[256];
  name[0] = 0;
  for (int i = 0; i < TERMS; i++)
    if (terms >> i & 1) strcat(strcat(name, name[0] ? " + " : ""), term_names[i]);
  return name[0] ? name : "plain";
}

static LossProblem make_problem(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab) {
  LossProblem p = loss_problem(h, rows, hidden, vocab, 2);
  loss_problem_add(h, &p, terms);
  for (int64_t n = 1; n < rows && terms & (TERM_IGNORED | TERM_ROWS); n += 3) p.targets[n] = IGNORE_INDEX;
  return p;
}

// --- the reference itself ----------------------------------------------------------------------------------

// The float64 gradients are the derivatives of the float64 objective, for all terms at once.
TEST(test_reference) {
  Harness *h = *state;
  for (int all = 0; all < 2; all++) {
    int terms = all ? (1 << TERMS) - 1 : 0;
    LossProblem p = make_problem(h, terms, 5, 7, 11);
    reference_gradients(h, &p.r);
    reference_loss(&p.r);
    Tolerance close = of_size(within(4, 16), p.r.scale);
    Tensor dx = tensor_from(h, DTYPE_F32, p.r.dx, 5, 7),
           dweight = tensor_from(h, DTYPE_F32, p.r.dweight, 11, 7);
    check_gradient(h, "reference dx", dx, NULL, p.x, reference_objective, &p.r, close);
    check_gradient(h, "reference dweight", dweight, NULL, p.weight, reference_objective, &p.r, close);
    if (!all) continue;
    Tensor dbias = vector_from(h, DTYPE_F32, p.r.dbias, 11);
    check_gradient(h, "reference dbias", dbias, NULL, p.bias, reference_objective, &p.r, close);
  }
}

// --- the layer ---------------------------------------------------------------------------------------------

typedef struct {
  LceMode mode;
  int64_t chunk;
  bool forward_only, accumulate, outputs;
  bool apart; // each gradient in a call of its own
} Way;

static void check_case(Harness *h, int terms, int64_t rows, int64_t hidden, int64_t vocab, Way way) {
  LossProblem p = make_problem(h, terms, rows, hidden, vocab);
  ReferenceLoss *r = &p.r;
  if (!way.forward_only) reference_gradients(h, r);
  LinearCrossEntropy a = loss_call(h, r, way.mode, way.chunk);
  if (terms & TERM_ROWS) a.rows = ids_from(h, counted_positions(h, p.targets, rows, &a.counted), rows);
  if (way.outputs) loss_call_all_outputs(h, &a, r);
  LossBefore before = {0};
  if (way.accumulate && !way.forward_only) loss_call_adds(h, &a, &before);
  LinearCrossEntropy of_x = a, of_weight = a;
  of_x.dweight = of_x.dbias = of_weight.dx = (Tensor){0};
  linear_cross_entropy(h->backend, way.apart ? of_x : a);
  if (way.apart) linear_cross_entropy(h->backend, of_weight);
  reference_loss(r);
  // Where logits are stored their rounding shows; the anchored mode and fp32 have none.
  Tolerance outputs =
      way.mode == LCE_FUSED ? within(16, (double)(hidden + vocab)) : within_stored(h, 16, (double)hidden);
  char what[320];
  snprintf(what, sizeof what, "%s, %s", name_of(terms), lce_mode_name(way.mode));
  check_loss(h, what, &a, r, 0, before, of_size(outputs, 8 + 64 * r->z_loss),
             of_size(within_stored(h, 8, 0), r->scale * (1 + 8 * r->z_loss)));
}

static void check_both_modes(void **state, int terms, int64_t rows, int64_t hidden, int64_t vocab, Way way) {
  for (int mode = 0; mode < 2; mode++) {
    way.mode = mode ? LCE_MATERIALIZED : LCE_FUSED;
    check_case(*state, terms, rows, hidden, vocab, way);
    harness_pop(state);
  }
}

// The named rows are the fused mode's way to ignore; without it ignored targets pass through the operations.
TEST(test_alone_and_in_pairs) {
  check_both_modes(state, 0, 29, 17, 101, (Way){.chunk = 7});
  check_both_modes(state, 0, 29, 17, 101, (Way){.chunk = 7, .apart = true});
  for (int i = 0; i < TERMS; i++)
    for (int j = i; j < TERMS; j++)
      check_both_modes(state, 1 << i | 1 << j, 29, 17, 101, (Way){.chunk = 7, .outputs = (i + j) % 2});
}

TEST(test_all_at_once) {
  const int64_t shapes[][4] = {
      {1, 1, 1, 1}, {7, 13, 1, 5}, {5, 3, 1031, 2}, {131, 40, 515, 37}, {67, 33, 2053, 64}};
  const int everything = (1 << TERMS) - 1;
  const int anchored = everything & ~(TERM_SOFTCAP | TERM_ENTROPY | TERM_BIAS);
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int variant = 0; variant < 4; variant++) {
      Way way = {.chunk = shapes[i][3], .accumulate = variant & 1};
      int terms = variant & 2 ? anchored : everything;
      way.outputs = terms == everything;
      way.apart = i % 2;
      check_both_modes(state, terms, shapes[i][0], shapes[i][1], shapes[i][2], way);
    }
}

TEST(test_forward_only) {
  const int terms[] = {0, TERM_SMOOTHING | TERM_Z_LOSS | TERM_ROWS, TERM_SOFTCAP | TERM_IGNORED,
                       TERM_BIAS | TERM_SMOOTHING | TERM_CLASS_WEIGHTS | TERM_TEMPERATURE};
  for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
    for (int outputs = 0; outputs < 2; outputs++)
      check_both_modes(state, terms[i], 31, 19, 203,
                       (Way){.chunk = 8, .forward_only = true, .outputs = outputs});
}

// No token counts, named or not: nothing is divided by the sum of no weights.
TEST(test_nothing_counts) {
  Harness *h = *state;
  double *zeros = host_values(h, 10 * 6);
  for (int way = 0; way < 4; way++) {
    LossProblem p = loss_problem(h, 4, 6, 10, 1);
    loss_problem_add(h, &p, TERM_SMOOTHING | TERM_Z_LOSS | TERM_MEAN | (way & 2 ? TERM_BIAS : 0));
    for (int n = 0; n < 4; n++) p.targets[n] = IGNORE_INDEX;
    reference_gradients(h, &p.r);
    LinearCrossEntropy a = loss_call(h, &p.r, way & 1 ? LCE_MATERIALIZED : LCE_FUSED, 3);
    if (way & 2) a.rows = ids_from(h, p.targets, 4); // not read
    linear_cross_entropy(h->backend, a);
    const Tensor results[] = {a.loss, a.dx, a.dweight, a.dbias};
    for (int i = 0; i < (way & 2 ? 4 : 3); i++)
      check_values(h, "result of nothing", results[i], zeros, within(0, 1));
  }
}

int main(void) {
  return run_on_backends();
}
