// The package's operations (tools/torch/liblce/operations.h): those that no other test has, and what all refuse.

#include "tests/harness.h"
#include "tools/torch/liblce/operations.h"

HARNESS_TEST(test_read_targets) {
  enum { TOKENS = 300, VOCAB = 7 };
  // Two of the wide ones are wrong only above their lower 32 bits.
  const int64_t few[] = {0, 6, -100, 7, -1, -99, INT32_MAX, INT32_MIN, 1LL << 32, (1LL << 33) + 3};
  enum { FEW = sizeof few / sizeof *few };
  for (int wide = 0; wide < 2; wide++) {
    int64_t ids[TOKENS];
    int32_t narrow[TOKENS];
    for (int n = 0; n < TOKENS; n++) narrow[n] = (int32_t)(ids[n] = few[n % (wide ? FEW : FEW - 2)]);
    Tensor given =
        memory_push_1d(&h->backend->memory, "ids", MEMORY_TABLES, wide ? DTYPE_I64 : DTYPE_I32, TOKENS);
    backend_to_device(h->backend, given, wide ? (void *)ids : narrow);
    double *ones = host_values(h, TOKENS);
    for (int n = 0; n < TOKENS; n++) ones[n] = 1;
    Tensor targets = poisoned_vector(h, DTYPE_I32, TOKENS), loss = vector_from(h, DTYPE_F32, ones, TOKENS);
    read_targets(h->backend, (ReadTargets){.targets = targets, .ids = given, .vocab_size = VOCAB});
    read_targets(h->backend, (ReadTargets){.loss = loss, .ids = given, .vocab_size = VOCAB});
    double *got = values_of(h, targets), *losses = values_of(h, loss);
    for (int n = 0; n < TOKENS; n++) {
      bool counts = ids[n] >= 0 && ids[n] < VOCAB;
      assert_true(got[n] == (counts ? (double)ids[n] : IGNORE_INDEX));
      assert_true(counts || ids[n] == IGNORE_INDEX ? losses[n] == 1 : isnan(losses[n]));
    }
  }
}

// From every dtype to every other, in place too, in pieces of 8 elements and one by one.
HARNESS_TEST(test_scale_by) {
  const Dtype dtypes[] = {DTYPE_F32, h->dtype};
  for (int i = 0; i < 32; i++) {
    int64_t count = i & 1 ? 1013 : 1024;
    Dtype from = dtypes[i >> 1 & 1], to = dtypes[i >> 2 & 1];
    bool in_place = i & 8;
    double factor = i & 16 ? -0.75 : 1, *values = random_values(h, count, 1);
    if (in_place && from != to) continue;
    Tensor x = vector_from(h, from, values, count), out = in_place ? x : poisoned_vector(h, to, count);
    Tensor by = vector_from(h, DTYPE_F32, &factor, 1);
    scale_by(h->backend, (ScaleBy){.out = out, .x = x, .factor = by});
    for (int64_t n = 0; n < count; n++) values[n] *= factor;
    check_values(h, "scale_by", out, values, within(1, 1));
  }
}

// --- refusals ----------------------------------------------------------------------------------------------

#define ENTER(name, Arguments)                                                                               \
  static void enter_##name(Backend *backend, const void *a) {                                                \
    name(backend, *(const Arguments *)a);                                                                    \
  }
TORCH_OPERATIONS(ENTER, ENTER)
#define INDEX(name, Arguments) OF_##name,
enum { TORCH_OPERATIONS(INDEX, INDEX) OPERATION_COUNT };

// Every operation refuses its calls with a tensor missing, of a wrong type or rank, or wider: one call with all that
// it may be given, and one without what may be absent.
HARNESS_TEST(test_refusals) {
  if (strcmp(harness_backend(), "cpu") != 0) skip(); // the checks are the host's
  enum { N = 3, H = 4, V = 5, M = 6 };
  Tensor x = poisoned(h, h->dtype, N, H), weight = poisoned(h, h->dtype, V, H);
  Tensor logits = poisoned(h, h->dtype, N, V), bias = poisoned_vector(h, h->dtype, V);
  Tensor one = poisoned_vector(h, DTYPE_F32, 1), of_n = poisoned_vector(h, DTYPE_F32, N);
  Tensor of_m = poisoned_vector(h, DTYPE_F32, M), of_v = poisoned_vector(h, DTYPE_F32, V);
  Tensor targets = poisoned_vector(h, DTYPE_I32, N), ids = poisoned_vector(h, DTYPE_I32, M);
  Tensor offsets = poisoned_vector(h, DTYPE_I64, N + 1);
  GradientFactors factors = {{of_n, of_n, of_n, of_n}};
  Refusals tried[] = {TORCH_OPERATIONS(REFUSALS_PLAIN, REFUSALS_SCRATCH)};
#define TRY(operation, Arguments, ...)                                                                       \
  refusals_try(h->backend, &tried[OF_##operation], &(Arguments){__VA_ARGS__})
  h->backend->memory.planning = true; // what is accepted does not run
  for (int all = 0; all < 2; all++) {
    const Tensor none = {0};
#define MAYBE(tensor) (all ? (tensor) : none)
    TRY(lce_gradient_factors, LceGradientFactors, .factors = factors, .target_z = of_n, .log_prob = of_n,
        .targets = targets, .row_sum = MAYBE(of_n), .entropy = MAYBE(of_n), .token_weights = MAYBE(of_n),
        .entropy_weights = MAYBE(of_n), .factor = MAYBE(one), .terms.class_weights = MAYBE(of_v),
        .vocab_size = V);
    TRY(lce_logits_gradient, LceLogitsGradient, .dlogits = logits, .factors = factors, .targets = targets,
        .x = MAYBE(x), .weight = MAYBE(weight), .anchor = MAYBE(of_n), .bias = MAYBE(bias));
    LceIdLogProbs values = {.log_probs = of_m,
                            .anchors = targets,
                            .anchor_nll = of_n,
                            .x = x,
                            .weight = weight,
                            .bias = MAYBE(bias),
                            .ids = ids,
                            .offsets = MAYBE(offsets)};
    refusals_try(h->backend, &tried[OF_lce_id_logits], &values);
    refusals_try(h->backend, &tried[OF_lce_id_log_probs], &values);
    LceIdGradients gradients = {.factors = factors,
                                .anchors = targets,
                                .targets = targets,
                                .log_probs = of_m,
                                .lse = of_n,
                                .dlog_probs = of_m,
                                .dlse = MAYBE(of_n),
                                .entropy = MAYBE(of_n),
                                .dentropy = MAYBE(of_n),
                                .ids = ids,
                                .offsets = MAYBE(offsets)};
    refusals_try(h->backend, &tried[OF_lce_id_factors], &gradients);
    gradients.dlogits = logits;
    refusals_try(h->backend, &tried[OF_lce_id_gradients], &gradients);
    TRY(read_targets, ReadTargets, .ids = targets, .targets = MAYBE(targets), .loss = all ? none : of_n);
    TRY(scale_by, ScaleBy, .out = of_n, .x = of_n, .factor = MAYBE(one));
  }
  h->backend->memory.planning = false;
  static const int allowed[OPERATION_COUNT][REFUSALS] = {
      [OF_lce_logits_gradient] = {0, 0, 0, 1}, // exponentials of any width,
      [OF_lce_id_gradients] = {0, 0, 0, 1}};   // and the gradient of any block
  for (int i = 0; i < OPERATION_COUNT; i++) {
    assert_true(tried[i].calls > 0);
    assert_int_equal(refusals_missed(&tried[i], allowed[i]), 0);
  }
  assert_fails(h, "ids is fp32 [3] where int32 or int64",
               read_targets(h->backend, (ReadTargets){.targets = targets, .ids = of_n, .vocab_size = V}));
}

TEST_MAIN(run_on_backends())
