// The CUDA backend against the CPU backend, where tests/kernels/test_kernels_*.c (every operation against float64,
// small shapes) does not look: vector and scalar paths, the epilogues of the GEMMs, segments that span
// many pieces, bf16 gradients, rounding at random, uploads larger than the ring, and the same bits on every
// run. The losses are test_cuda_losses.c's.
//
// Tolerances come from the harness's error model: a random walk of fp32 roundings over the terms of a sum,
// plus half a unit of the stored dtype.

#include "kernels/linear_cross_entropy.h"
#include "tests/pair.h"

// --- tokens ------------------------------------------------------------------------------------------------

// A vocabulary in which one token owns 60% of the rows and another a run that ends at a piece's last row.
static void embedding_case(Pair *p, int64_t batch, int64_t seq_len, int64_t hidden, int64_t vocab,
                           Dtype gradient, bool accumulate) {
  int64_t rows = batch * seq_len;
  int32_t *ids = random_ids(p->cuda, rows, vocab);
  for (int64_t i = 0; i < rows; i++)
    if (i % 5 < 3) ids[i] = (int32_t)(vocab / 2);
  Dtype dtype = p->cuda->dtype;
  Both tokens = both_ids(p, ids, rows), dout = both_random(p, dtype, rows, hidden, 1);
  Both token_weight = both_random(p, dtype, vocab, hidden, 1),
       out = both_poisoned(p, dtype, rows, hidden, hidden);
  Both position_weight = both_random(p, dtype, seq_len + 2, hidden, 1);
  Both dtoken = both_result(p, gradient, vocab, hidden, accumulate);
  Both dposition = both_result(p, gradient, seq_len + 2, hidden, accumulate);
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    embedding_forward(s.backend, (EmbeddingForward){.out = on(s, out),
                                                    .tokens = on(s, tokens),
                                                    .token_weight = on(s, token_weight),
                                                    .position_weight = on(s, position_weight),
                                                    .seq_len = seq_len});
    embedding_backward(s.backend, (EmbeddingBackward){.dtoken_weight = on(s, dtoken),
                                                      .dposition_weight = on(s, dposition),
                                                      .dout = on(s, dout),
                                                      .tokens = on(s, tokens),
                                                      .seq_len = seq_len,
                                                      .accumulate_token = accumulate,
                                                      .accumulate_position = accumulate});
  }
  check_both(p, "embedding out", out, within(1, 1));
  check_both(p, "dtoken_weight", dtoken, within(4, (double)rows));
  check_both(p, "dposition_weight", dposition, within(4, (double)batch));
  pop_pair(p);
}

TEST(test_embedding) {
  Pair *p = *state;
  for (int accumulate = 0; accumulate < 2; accumulate++) {
    embedding_case(p, 9, 301, 264, 997, DTYPE_F32, accumulate);
    embedding_case(p, 2, 64, 77, 3, DTYPE_F32, accumulate);
    embedding_case(p, 1, 32, 2056, 1, p->cuda->dtype, accumulate);
    embedding_case(p, 3, 11, 8, 70001, p->cuda->dtype, accumulate);
  }
}

// --- norms -------------------------------------------------------------------------------------------------

// Rows of `heads` heads each; several lie in rows that hold more, and their gradient replaces dout.
static void norm_case(Pair *p, NormKind kind, int64_t rows, int64_t heads, int64_t hidden, Dtype gradient,
                      bool accumulate) {
  bool layer = kind == NORM_LAYER;
  Dtype dtype = p->cuda->dtype;
  int64_t wide = heads * hidden, count = rows * heads, more = heads > 1 ? wide + 16 : wide;
  Both none = {{0}, {0}};
  Both x = both_strided(p, dtype, rows, wide, more, 2), dout = both_strided(p, dtype, rows, wide, more, 1);
  Both weight = flat(both_random(p, dtype, 1, hidden, 1));
  Both bias = layer ? flat(both_random(p, dtype, 1, hidden, 1)) : none;
  Both out = both_poisoned(p, dtype, rows, wide, more);
  Both rstd = flat(both_poisoned(p, DTYPE_F32, 1, count, count));
  Both mean = layer ? flat(both_poisoned(p, DTYPE_F32, 1, count, count)) : none;
  Both dx = heads > 1 ? dout : both_result(p, dtype, rows, hidden, accumulate);
  Both dweight = flat(both_result(p, gradient, 1, hidden, accumulate));
  Both dbias = layer ? flat(both_result(p, gradient, 1, hidden, accumulate)) : none;
  bool sums_dx = layer && heads == 1 && accumulate;
  Both dx_sum = sums_dx ? flat(both_result(p, gradient, 1, hidden, accumulate)) : none;
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    norm_forward(s.backend, (NormForward){.kind = kind,
                                          .out = on(s, out),
                                          .mean = on(s, mean),
                                          .rstd = on(s, rstd),
                                          .x = on(s, x),
                                          .weight = on(s, weight),
                                          .bias = on(s, bias),
                                          .epsilon = 1e-5f});
    norm_backward(s.backend, (NormBackward){.kind = kind,
                                            .dx = on(s, dx),
                                            .dweight = on(s, dweight),
                                            .dbias = on(s, dbias),
                                            .dx_sum = on(s, dx_sum),
                                            .dout = on(s, dout),
                                            .x = on(s, x),
                                            .weight = on(s, weight),
                                            .mean = on(s, mean),
                                            .rstd = on(s, rstd),
                                            .accumulate_dx = accumulate,
                                            .accumulate = accumulate});
  }
  Tolerance row = within(8, (double)hidden), column = within(8, (double)(count + hidden));
  check_both(p, "norm out", out, row);
  check_both(p, "rstd", rstd, row);
  check_both(p, "norm dx", dx, row);
  check_both(p, "norm dweight", dweight, column);
  if (layer) check_both(p, "norm dbias", dbias, column);
  if (sums_dx) check_both(p, "norm dx_sum", dx_sum, column);
  pop_pair(p);
}

TEST(test_norm) {
  Pair *p = *state;
  for (int kind = NORM_LAYER; kind <= NORM_RMS; kind++) {
    norm_case(p, kind, 3001, 1, 768, DTYPE_F32, true); // more rows than teams that run at once
    norm_case(p, kind, 1201, 1, 1600, DTYPE_F32, false);
    norm_case(p, kind, 37, 1, 2048, p->cuda->dtype, false);
    norm_case(p, kind, 5, 1, 8200, DTYPE_F32, true);   // sums of a layer norm outgrow 48 KiB
    norm_case(p, kind, 3, 1, 13001, DTYPE_F32, false); // both kinds' do, and nothing is aligned
    norm_case(p, kind, 301, 16, 128, DTYPE_F32, false);
    norm_case(p, kind, 7, 3, 10, DTYPE_F32, false);
  }
}

// --- GEMMs -------------------------------------------------------------------------------------------------

typedef struct {
  int64_t rows, inputs, outputs, pad;
  bool in_out_layout;
} Shape;

static const Shape shapes[] = {
    {128, 256, 384, 0, false}, {128, 256, 384, 0, true}, {96, 64, 320, 64, false}, {96, 64, 320, 64, true},
    {37, 53, 71, 0, false},    {37, 53, 71, 3, true},    {65, 72, 1001, 1, false}, {8, 40, 24, 8, true},
};

static Both both_weight(Pair *p, Dtype dtype, Shape s) {
  return s.in_out_layout ? both_random(p, dtype, s.inputs, s.outputs, 0.2)
                         : both_random(p, dtype, s.outputs, s.inputs, 0.2);
}

// A bf16 sum in place: the GEMM may be rounded before it is added, and again after.
static Tolerance in_place(Pair *p, Dtype dtype, double terms) {
  if (dtype == DTYPE_F32 || p->cuda->dtype == DTYPE_F32) return within(4, terms);
  return (Tolerance){.units = 1, .terms = 1, .operations = dtype_epsilon(DTYPE_BF16)};
}

// With bf16 operands cuBLASLt takes a fast tanh, good to about 2^-11, and may round the GEMM before it.
static Tolerance fast_tanh(Pair *p, Tolerance fp32) {
  return p->cuda->dtype == DTYPE_BF16 ? (Tolerance){.units = 1, .terms = 1, .operations = 0x1p-8} : fp32;
}

// SwiGLU multiplies two results of a GEMM, which are rounded to bf16 before.
static Tolerance gated(Pair *p, double terms) {
  bool bf16 = p->cuda->dtype == DTYPE_BF16;
  return bf16 ? (Tolerance){.units = 4, .terms = 1, .operations = dtype_epsilon(DTYPE_BF16)}
              : within(16, terms);
}

typedef enum {
  PLAIN,
  BIAS,
  RESIDUAL,
  BIAS_RESIDUAL,
  IN_PLACE,
  GELU,
  BIAS_GELU,
  SWIGLU,
  BIAS_SWIGLU,
  WIDE_OUT,
  FORWARD_VARIANTS
} Forward;

static void linear_forward_case(Pair *p, Shape s, Forward variant) {
  Dtype dtype = p->cuda->dtype;
  Both none = {{0}, {0}}, bias = none, residual = none, pre = none;
  bool activation = variant >= GELU && variant <= BIAS_SWIGLU;
  Shape made = s; // what the GEMM computes
  if (variant == SWIGLU || variant == BIAS_SWIGLU) made.outputs *= 2;
  Both x = both_strided(p, dtype, s.rows, s.inputs, s.inputs + s.pad, 1),
       weight = both_weight(p, dtype, made);
  Both out = both_poisoned(p, variant == WIDE_OUT ? DTYPE_F32 : dtype, s.rows, s.outputs,
                           s.outputs + (made.outputs > s.outputs ? 0 : s.pad));
  if (variant != PLAIN && variant != RESIDUAL && variant != GELU && variant != SWIGLU)
    bias = flat(both_random(p, dtype, 1, made.outputs, 1));
  if (variant == RESIDUAL || variant == BIAS_RESIDUAL || variant == IN_PLACE)
    residual = both_strided(p, dtype, s.rows, s.outputs, s.outputs + s.pad, 1);
  if (variant == IN_PLACE) out = residual;
  if (activation) pre = both_poisoned(p, dtype, s.rows, made.outputs, made.outputs);
  for (int i = 0; i < 2; i++) {
    Side side = side_of(p, i);
    linear_forward(side.backend, (LinearForward){.out = on(side, out),
                                                 .x = on(side, x),
                                                 .weight = on(side, weight),
                                                 .in_out_layout = s.in_out_layout,
                                                 .bias = on(side, bias),
                                                 .activation = !activation                ? ACTIVATION_NONE
                                                               : made.outputs > s.outputs ? ACTIVATION_SWIGLU
                                                                                          : ACTIVATION_GELU,
                                                 .pre_activation = on(side, pre),
                                                 .residual = on(side, residual)});
  }
  Tolerance tolerance =
      variant == IN_PLACE ? in_place(p, dtype, (double)s.inputs) : within(4, (double)s.inputs);
  char what[128];
  snprintf(what, sizeof what, "linear out, variant %d of %lld x %lld -> %lld", (int)variant,
           (long long)s.rows, (long long)s.inputs, (long long)s.outputs);
  if (activation) check_both(p, "pre_activation", pre, tolerance);
  if (activation) tolerance = made.outputs > s.outputs ? gated(p, (double)s.inputs) : fast_tanh(p, tolerance);
  check_both(p, what, out, tolerance);
  check_gaps(p->cuda, "linear out", out.cuda);
  pop_pair(p);
}

TEST(test_linear_forward) {
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int variant = 0; variant < FORWARD_VARIANTS; variant++)
      linear_forward_case(*state, shapes[i], variant);
}

typedef enum {
  WRITE,
  ADD,
  THROUGH_GELU,
  THROUGH_SWIGLU,
  SWIGLU_IN_PLACE,
  WIDE_DX,
  BACKWARD_VARIANTS
} Backward;

static void linear_backward_input_case(Pair *p, Shape s, Backward variant) {
  Dtype dtype = p->cuda->dtype;
  bool swiglu = variant == THROUGH_SWIGLU || variant == SWIGLU_IN_PLACE;
  Both none = {{0}, {0}}, pre = none, dactivation = none;
  Both dout = both_strided(p, dtype, s.rows, s.outputs, s.outputs + s.pad, 1),
       weight = both_weight(p, dtype, s);
  Both dx = both_poisoned(p, variant == WIDE_DX ? DTYPE_F32 : dtype, s.rows, s.inputs, s.inputs + s.pad);
  if (swiglu) {
    pre = both_random(p, dtype, s.rows, 2 * s.inputs, 2);
    dactivation = both_poisoned(p, dtype, s.rows, s.inputs, s.inputs);
    dx = variant == SWIGLU_IN_PLACE ? pre : both_poisoned(p, dtype, s.rows, 2 * s.inputs, 2 * s.inputs);
  }
  if (variant == ADD) dx = both_strided(p, dtype, s.rows, s.inputs, s.inputs + s.pad, 1);
  if (variant == THROUGH_GELU) pre = both_random(p, dtype, s.rows, s.inputs, 2);
  for (int i = 0; i < 2; i++) {
    Side side = side_of(p, i);
    linear_backward_input(side.backend,
                          (LinearBackwardInput){.dx = on(side, dx),
                                                .dout = on(side, dout),
                                                .weight = on(side, weight),
                                                .in_out_layout = s.in_out_layout,
                                                .activation = swiglu                    ? ACTIVATION_SWIGLU
                                                              : variant == THROUGH_GELU ? ACTIVATION_GELU
                                                                                        : ACTIVATION_NONE,
                                                .pre_activation = on(side, pre),
                                                .dactivation = on(side, dactivation),
                                                .accumulate = variant == ADD});
  }
  Tolerance tolerance = variant == ADD ? in_place(p, dtype, (double)s.outputs) : within(4, (double)s.outputs);
  char what[128];
  snprintf(what, sizeof what, "linear dx, variant %d of %lld x %lld -> %lld", (int)variant, (long long)s.rows,
           (long long)s.inputs, (long long)s.outputs);
  if (swiglu) tolerance = gated(p, (double)s.outputs);
  if (variant == THROUGH_GELU) tolerance = fast_tanh(p, tolerance);
  check_both(p, what, dx, tolerance);
  check_gaps(p->cuda, "linear dx", dx.cuda);
  pop_pair(p);
}

static void linear_backward_weight_case(Pair *p, Shape s, Dtype gradient, bool accumulate) {
  Dtype dtype = p->cuda->dtype;
  Both dout = both_strided(p, dtype, s.rows, s.outputs, s.outputs + s.pad, 1);
  Both x = both_strided(p, dtype, s.rows, s.inputs, s.inputs + s.pad, 1);
  Both dweight = s.in_out_layout ? both_result(p, gradient, s.inputs, s.outputs, accumulate)
                                 : both_result(p, gradient, s.outputs, s.inputs, accumulate);
  Both dbias = flat(both_result(p, gradient, 1, s.outputs, accumulate));
  for (int i = 0; i < 2; i++) {
    Side side = side_of(p, i);
    linear_backward_weight(side.backend, (LinearBackwardWeight){.dweight = on(side, dweight),
                                                                .dbias = on(side, dbias),
                                                                .dout = on(side, dout),
                                                                .x = on(side, x),
                                                                .in_out_layout = s.in_out_layout,
                                                                .alpha = 0.375f,
                                                                .accumulate = accumulate});
  }
  Tolerance tolerance = within(4, (double)s.rows);
  check_both(p, "dweight", dweight, accumulate ? in_place(p, gradient, (double)s.rows) : tolerance);
  check_both(p, "dbias", dbias, tolerance);
  pop_pair(p);
}

TEST(test_linear_backward) {
  Pair *p = *state;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    for (int variant = 0; variant < BACKWARD_VARIANTS; variant++)
      linear_backward_input_case(p, shapes[i], variant);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      linear_backward_weight_case(p, shapes[i], DTYPE_F32, accumulate);
      linear_backward_weight_case(p, shapes[i], p->cuda->dtype, accumulate);
    }
  }
}

TEST(test_no_rows) {
  Pair *p = *state;
  Dtype dtype = p->cuda->dtype;
  double *zeros = host_values(p->cuda, 6 * 8);
  Tensor x = poisoned(p->cuda, dtype, 0, 8), dout = poisoned(p->cuda, dtype, 0, 6);
  Tensor dweight = poisoned(p->cuda, DTYPE_F32, 6, 8), dbias = poisoned_vector(p->cuda, DTYPE_F32, 6);
  linear_forward(p->cuda->backend,
                 (LinearForward){.out = dout, .x = x, .weight = poisoned(p->cuda, dtype, 6, 8)});
  linear_backward_weight(p->cuda->backend,
                         (LinearBackwardWeight){.dweight = dweight, .dbias = dbias, .dout = dout, .x = x});
  check_values(p->cuda, "dweight of no rows", dweight, zeros, within(0, 1));
  check_values(p->cuda, "dbias of no rows", dbias, zeros, within(0, 1));
}

// --- activations and rotary positions ----------------------------------------------------------------------

static void swiglu_case(Pair *p, int64_t rows, int64_t width) {
  Dtype dtype = p->cuda->dtype;
  Both gate_up = both_random(p, dtype, rows, 2 * width, 3), dout = both_random(p, dtype, rows, width, 1);
  Both out = both_poisoned(p, dtype, rows, width, width);
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    activation_forward(s.backend,
                       (ActivationForward){ACTIVATION_SWIGLU, .out = on(s, out), .x = on(s, gate_up)});
    activation_backward(s.backend, (ActivationBackward){ACTIVATION_SWIGLU, .dx = on(s, gate_up),
                                                        .dout = on(s, dout), .x = on(s, gate_up)});
  }
  check_both(p, "swiglu", out, within(16, 1));
  check_both(p, "dgate_up, in place", gate_up, within(16, 1));
  pop_pair(p);
}

static void gelu_case(Pair *p, int64_t rows, int64_t width) {
  Dtype dtype = p->cuda->dtype;
  Both x = both_random(p, dtype, rows, width, 3), out = both_poisoned(p, dtype, rows, width, width);
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    activation_forward(s.backend, (ActivationForward){ACTIVATION_GELU, .out = on(s, out), .x = on(s, x)});
  }
  check_both(p, "gelu", out, within(16, 1));
  pop_pair(p);
}

static void rope_case(Pair *p, AttentionShape shape) {
  int64_t rows = shape.batch * shape.seq_len;
  int64_t width = (shape.num_heads + 2 * shape.num_key_value_heads) * shape.head_dim;
  Both qkv = both_random(p, p->cuda->dtype, rows, width, 1);
  double *angles = random_values(p->cuda, shape.seq_len * shape.head_dim, 2);
  for (int64_t i = 0; i < shape.seq_len * shape.head_dim; i++) angles[i] = cos(angles[i]);
  Both table = both_of(p, DTYPE_F32, angles, shape.seq_len, shape.head_dim, shape.head_dim);
  for (int inverse = 0; inverse < 2; inverse++) {
    for (int i = 0; i < 2; i++) {
      Side s = side_of(p, i);
      rope(s.backend, (Rope){.qkv = on(s, qkv), .cos_sin = on(s, table), .shape = shape, .inverse = inverse});
    }
    check_both(p, "rope", qkv, inverse ? within_stored(p->cuda, 4, 2) : within(4, 2));
  }
  pop_pair(p);
}

TEST(test_elementwise) {
  Pair *p = *state;
  swiglu_case(p, 33, 1408);
  swiglu_case(p, 5, 333);
  gelu_case(p, 33, 3072);
  gelu_case(p, 5, 333);
  rope_case(p, (AttentionShape){2, 9, 12, 4, 64});
  rope_case(p, (AttentionShape){3, 5, 2, 1, 10});
}

// --- the optimizer -----------------------------------------------------------------------------------------

typedef struct {
  int64_t count, offset; // offset: the tensors start there, so that nothing is aligned
  Dtype weight, moments, grad;
  bool master;
} UpdateShape;

static Both tail_of(Both b, int64_t offset, int64_t count) {
  return (Both){tensor_rows(flat(b).cuda, offset, count), tensor_rows(flat(b).cpu, offset, count)};
}

static void adamw_case(Pair *p, UpdateShape u) {
  int64_t whole = u.offset + u.count;
  double *second = random_values(p->cuda, whole, 0.1), half = 0.5;
  for (int64_t i = 0; i < whole; i++) second[i] = second[i] * second[i] + 1e-4;
  Both weight = tail_of(both_random(p, u.weight, 1, whole, 1), u.offset, u.count);
  Both m = tail_of(both_random(p, u.moments, 1, whole, 0.1), u.offset, u.count);
  Both v = tail_of(both_of(p, u.moments, second, 1, whole, whole), u.offset, u.count);
  Both grad = tail_of(both_random(p, u.grad, 1, whole, 1), u.offset, u.count);
  Both scale = flat(both_of(p, DTYPE_F32, &half, 1, 1, 1)), master = {{0}, {0}};
  if (u.master) master = tail_of(both_random(p, DTYPE_F32, 1, whole, 1), u.offset, u.count);
  for (int i = 0; i < 2; i++) {
    Side s = side_of(p, i);
    adamw(s.backend, (AdamW){.weight = on(s, weight),
                             .master = on(s, master),
                             .m = on(s, m),
                             .v = on(s, v),
                             .grad = on(s, grad),
                             .grad_scale = on(s, scale),
                             .lr = 1e-2f,
                             .beta1 = 0.9f,
                             .beta2 = 0.95f,
                             .epsilon = 1e-8f,
                             .weight_decay = 0.1f,
                             .step = 7,
                             .seed = 5});
  }
  // Rounded at random, a number is off by up to a whole unit, twice what rounding to nearest allows.
  Tolerance fp32 = within(16, 1);
  Tolerance random = {.units = 0.51, .terms = 1, .operations = dtype_epsilon(DTYPE_BF16)};
  check_both(p, "adamw m", m, u.moments == DTYPE_BF16 ? random : fp32);
  check_both(p, "adamw v", v, u.moments == DTYPE_BF16 ? random : fp32);
  check_both(p, "adamw weight", weight, u.weight == DTYPE_BF16 && !u.master ? random : fp32);
  if (u.master) check_both(p, "adamw master", master, fp32);
  pop_pair(p);
}

TEST(test_adamw) {
  const int64_t counts[] = {1, 4, 1003, 100000};
  for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
    for (int variant = 0; variant < 32; variant++)
      adamw_case(*state, (UpdateShape){.count = counts[c],
                                       .offset = variant & 16 ? 3 : 0,
                                       .weight = variant & 1 ? DTYPE_BF16 : DTYPE_F32,
                                       .moments = variant & 2 ? DTYPE_BF16 : DTYPE_F32,
                                       .grad = variant & 4 ? DTYPE_BF16 : DTYPE_F32,
                                       .master = variant & 8});
}

// A step of a sixteenth of bf16's last bit: to nearest, nothing would ever move. At random, one number in 16
// moves, and the mean is right.
TEST(test_random_rounding) {
  Harness *h = ((Pair *)*state)->cuda;
  enum { COUNT = 1 << 20 };
  double *values = host_values(h, COUNT), one = 1;
  Tensor m = vector_from(h, DTYPE_F32, values, COUNT), v = vector_from(h, DTYPE_F32, values, COUNT);
  for (int64_t i = 0; i < COUNT; i++) values[i] = 1.5;
  Tensor weight = vector_from(h, DTYPE_BF16, values, COUNT), grad = vector_from(h, DTYPE_F32, values, COUNT);
  // The first step moves every weight by the learning rate.
  AdamW a = {.weight = weight,
             .m = m,
             .v = v,
             .grad = grad,
             .grad_scale = vector_from(h, DTYPE_F32, &one, 1),
             .lr = 0x1p-11f,
             .beta1 = 0.9f,
             .beta2 = 0.95f,
             .epsilon = 1e-12f,
             .step = 1,
             .seed = 3};
  adamw(h->backend, a);
  double *got = values_of(h, weight), sum = 0;
  for (int64_t i = 0; i < COUNT; i++) {
    assert_true(got[i] == 1.5 || got[i] == 1.5 - 0x1p-7);
    sum += got[i] - 1.5;
  }
  double deviation = 0x1p-7 * sqrt(COUNT / 16.0 * 15 / 16); // of a binomial count
  assert_true(fabs(sum + COUNT * 0x1p-11) < 5 * deviation);
}

static void reduce_case(Pair *p, int64_t count, int64_t offset, Dtype dtype) {
  Both x = tail_of(both_random(p, dtype, 1, count + offset, 1), offset, count);
  Both sum = flat(both_poisoned(p, DTYPE_F32, 1, 1, 1));
  for (int step = 0; step < 2; step++) {
    for (int i = 0; i < 2; i++) {
      Side s = side_of(p, i);
      reduce(s.backend, (Reduce){.sum = on(s, sum), .x = on(s, x), .squares = true, .accumulate = step > 0});
    }
    check_both(p, "sum of squares", sum, within(4, 8));
  }
  pop_pair(p);
}

TEST(test_reduce) {
  const int64_t counts[] = {1, 7, 2048, 1000003, 9000001};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (int64_t offset = 0; offset < 2; offset++) {
      reduce_case(*state, counts[i], offset, DTYPE_F32);
      reduce_case(*state, counts[i], offset, DTYPE_BF16);
    }
}

// --- rows --------------------------------------------------------------------------------------------------

TEST(test_rows) {
  Pair *p = *state;
  const int64_t widths[] = {1, 3, 6, 64, 2056};
  for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
    int64_t width = widths[i];
    int32_t picks[67];
    for (int k = 0; k < 67; k++) picks[k] = (k * 29 + 5) % 101;
    Both x = both_random(p, p->cuda->dtype, 101, width, 1), rows = both_ids(p, picks, 67);
    Both few = both_poisoned(p, p->cuda->dtype, 67, width, width),
         back = both_random(p, p->cuda->dtype, 101, width, 1);
    for (int k = 0; k < 2; k++) {
      Side s = side_of(p, k);
      gather_rows(s.backend, (MoveRows){.out = on(s, few), .x = on(s, x), .rows = on(s, rows)});
      scatter_rows(s.backend, (MoveRows){.out = on(s, back), .x = on(s, few), .rows = on(s, rows)});
    }
    check_both(p, "gather", few, within(0, 1));
    check_both(p, "scatter", back, within(0, 1));
    pop_pair(p);
  }
}

// --- copies ------------------------------------------------------------------------------------------------

// More bytes than the ring of pinned memory holds, and more uploads than it has places; the host's buffer is
// overwritten as soon as each call returns.
TEST(test_uploads) {
  Harness *h = ((Pair *)*state)->cuda;
  enum { LARGE = 11 << 20, SMALL = 1003, UPLOADS = 300 };
  int32_t *host = malloc(LARGE * sizeof *host), *back = malloc(LARGE * sizeof *back);
  Tensor large = memory_push_1d(&h->backend->memory, "large", MEMORY_TABLES, DTYPE_I32, LARGE);
  for (int i = 0; i < LARGE; i++) host[i] = i;
  backend_to_device(h->backend, large, host);
  memset(host, 0, LARGE * sizeof *host);
  backend_to_host(h->backend, back, large);
  for (int i = 0; i < LARGE; i++) assert_int_equal(back[i], i);
  for (int u = 0; u < UPLOADS; u++) {
    for (int i = 0; i < SMALL; i++) host[i] = u * SMALL + i;
    backend_to_device(h->backend, tensor_rows(large, u * SMALL, SMALL), host);
  }
  memset(host, 0, LARGE * sizeof *host);
  backend_to_host(h->backend, back, large);
  for (int i = 0; i < UPLOADS * SMALL; i++) assert_int_equal(back[i], i);
  free(host);
  free(back);
}

TEST(test_device_memory) {
  Backend *backend = ((Pair *)*state)->cuda->backend;
  enum { BYTES = 256 << 20 };
  backend->ops->device_peak_reset(backend);
  size_t before = backend->ops->device_bytes_now(backend);
  const MemorySource *source = &backend->memory.source;
  uint32_t *block = source->allocate(source->context, BYTES);
  uint32_t words[4] = {1, 1, 1, 1};
  backend_to_host(backend, words, tensor_1d(block + 1000, DTYPE_I32, 4));
  for (int i = 0; i < 4; i++) assert_int_equal(words[i], 0);
  assert_true(backend->ops->device_bytes_now(backend) >= before + BYTES);
  source->release(source->context, block, BYTES);
  assert_true(backend->ops->device_bytes_now(backend) < before + BYTES);
  assert_true(backend->ops->device_bytes_peak(backend) >= before + BYTES);
  assert_true(backend->device_overhead > 0 && backend->device_capacity > backend->device_overhead);
}

// --- the same bits -----------------------------------------------------------------------------------------

enum { REPEAT_TOKENS = 1000, REPEAT_HIDDEN = 256, REPEAT_VOCAB = 2000 };

typedef struct {
  Tensor loss, dx, dweight, dbias, dtoken, out;
} Repeated;

static Repeated repeat_once(Harness *h, Tensor x, Tensor weight, Tensor targets) {
  Repeated r = {.loss = poisoned_vector(h, DTYPE_F32, REPEAT_TOKENS),
                .dx = poisoned(h, h->dtype, REPEAT_TOKENS, REPEAT_HIDDEN),
                .dweight = poisoned(h, DTYPE_F32, REPEAT_VOCAB, REPEAT_HIDDEN),
                .dbias = poisoned_vector(h, DTYPE_F32, REPEAT_VOCAB),
                .dtoken = poisoned(h, DTYPE_F32, REPEAT_VOCAB, REPEAT_HIDDEN),
                .out = poisoned(h, h->dtype, REPEAT_TOKENS, REPEAT_VOCAB)};
  MemoryMark mark = memory_mark(&h->backend->memory);
  Tensor dweight = poisoned(h, DTYPE_F32, REPEAT_VOCAB, REPEAT_HIDDEN);
  linear_cross_entropy(h->backend, (LinearCrossEntropy){.mode = LCE_FUSED,
                                                        .chunk = 384,
                                                        .loss = r.loss,
                                                        .dx = r.dx,
                                                        .dweight = r.dweight,
                                                        .x = x,
                                                        .weight = weight,
                                                        .targets = targets,
                                                        .scale = 1e-3f});
  linear_forward(h->backend, (LinearForward){.out = r.out, .x = x, .weight = weight});
  linear_backward_weight(h->backend,
                         (LinearBackwardWeight){.dweight = dweight, .dbias = r.dbias, .dout = r.out, .x = x});
  embedding_backward(
      h->backend,
      (EmbeddingBackward){.dtoken_weight = r.dtoken, .dout = x, .tokens = targets, .seq_len = REPEAT_TOKENS});
  memory_pop_to(&h->backend->memory, mark);
  return r;
}

TEST(test_repeatable) {
  Harness *h = ((Pair *)*state)->cuda;
  Tensor x = tensor_from(h, h->dtype, random_values(h, REPEAT_TOKENS * REPEAT_HIDDEN, 1), REPEAT_TOKENS,
                         REPEAT_HIDDEN);
  Tensor weight = tensor_from(h, h->dtype, random_values(h, REPEAT_VOCAB * REPEAT_HIDDEN, 0.1), REPEAT_VOCAB,
                              REPEAT_HIDDEN);
  Tensor targets = ids_from(h, random_ids(h, REPEAT_TOKENS, 7), REPEAT_TOKENS);
  Repeated a = repeat_once(h, x, weight, targets), b = repeat_once(h, x, weight, targets);
  check_bitwise_equal(h, "loss", a.loss, b.loss);
  check_bitwise_equal(h, "dx", a.dx, b.dx);
  check_bitwise_equal(h, "dweight", a.dweight, b.dweight);
  check_bitwise_equal(h, "dbias", a.dbias, b.dbias);
  check_bitwise_equal(h, "dtoken_weight", a.dtoken, b.dtoken);
  check_bitwise_equal(h, "out", a.out, b.out);
}

// Measuring the GEMMs' algorithms must not change a bit: a backend that takes the library's first choice
// computes the same.
TEST(test_measuring_keeps_bits) {
  Harness *measured = ((Pair *)*state)->cuda;
  setenv("LCE_MATMUL_TUNE", "0", 1);
  Harness *first = harness_open(pair_backend());
  unsetenv("LCE_MATMUL_TUNE");
  double *x = random_values(measured, 512 * 1024, 1), *weight = random_values(measured, 768 * 1024, 1);
  Tensor out[2];
  for (int i = 0; i < 2; i++) {
    Harness *h = i ? first : measured;
    out[i] = poisoned(h, h->dtype, 512, 768);
    linear_forward(h->backend, (LinearForward){.out = out[i],
                                               .x = tensor_from(h, h->dtype, x, 512, 1024),
                                               .weight = tensor_from(h, h->dtype, weight, 768, 1024)});
  }
  check_values(measured, "measured GEMM", out[0], values_of(first, out[1]), within(0, 1));
  harness_close(first);
}

int main(int count, char **arguments) {
  return pair_main(count, arguments);
}
