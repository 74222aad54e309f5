// The layers' operations against tests/reference.c and its finite differences; on a GPU against the CPU, too.

#include <omp.h>

#include "tests/harness.h"

// An objective's inputs and outputs.
typedef struct {
  const void *shape;
  int32_t *tokens;
  double *x, *weight, *positions, *bias, *residual, *pre, *out, *mean, *rstd, *dout;
} Case;

typedef struct {
  int64_t batch, seq_len, hidden, vocab;
  bool positions, accumulate, popular,
      narrow; // popular: one token owns 60% of the rows; narrow: the gradients' dtype
} EmbeddingShape;

static double embedding_objective(void *context) {
  Case *c = context;
  const EmbeddingShape *s = c->shape;
  int64_t rows = s->batch * s->seq_len;
  reference_embedding(c->out, c->tokens, c->weight, c->positions, rows, s->hidden, s->seq_len);
  return reference_dot(c->out, c->dout, rows * s->hidden);
}

// A tensor to be written (NaN before) or, if `adds`, to be added to *before.
static Tensor result(Harness *h, Dtype dtype, bool adds, double **before, int64_t rows, int64_t columns) {
  *before = adds ? random_values(h, rows * columns, 1) : NULL;
  return adds ? tensor_from(h, dtype, *before, rows, columns) : poisoned(h, dtype, rows, columns);
}

static void embedding_case(Harness *h, const void *shape) {
  EmbeddingShape s = *(const EmbeddingShape *)shape;
  int64_t rows = s.batch * s.seq_len, positions = s.seq_len + 3;
  Case c = {.shape = shape, .tokens = random_ids(h, rows, s.vocab), .out = host_values(h, rows * s.hidden)};
  for (int64_t i = 0; s.popular && i < rows; i++)
    if (i % 5 < 3) c.tokens[i] = (int32_t)(s.vocab / 2);
  EmbeddingForward forward = {.out = poisoned(h, h->dtype, rows, s.hidden),
                              .tokens = ids_from(h, c.tokens, rows),
                              .token_weight = random_tensor(h, &c.weight, s.vocab, s.hidden, 1),
                              .seq_len = s.seq_len};
  if (s.positions) forward.position_weight = random_tensor(h, &c.positions, positions, s.hidden, 1);
  Dtype gradient = s.narrow ? h->dtype : DTYPE_F32;
  double *token_before, *position_before;
  EmbeddingBackward a = {.dtoken_weight = result(h, gradient, s.accumulate, &token_before, s.vocab, s.hidden),
                         .dout = random_tensor(h, &c.dout, rows, s.hidden, 1),
                         .tokens = forward.tokens,
                         .seq_len = s.seq_len,
                         .accumulate_token = s.accumulate,
                         .accumulate_position = s.accumulate};
  if (s.positions)
    a.dposition_weight = result(h, gradient, s.accumulate, &position_before, positions, s.hidden);
  embedding_forward(h->backend, forward);
  embedding_backward(h->backend, a);
  embedding_objective(&c);
  check_values(h, "embedding out", forward.out, c.out, with_size(within(1, 1), 1));
  check_gradient(h, "dtoken_weight", a.dtoken_weight, token_before, c.weight, embedding_objective, &c,
                 with_size(within(4, (double)rows), 1));
  if (s.positions)
    check_gradient(h, "dposition_weight", a.dposition_weight, position_before, c.positions,
                   embedding_objective, &c, with_size(within(4, (double)s.batch), 1));
}

HARNESS_TEST(test_embedding) {
  static const EmbeddingShape shapes[] = {
      {3, 7, 13, 11, .positions = true},
      {3, 7, 13, 11, .positions = true, .accumulate = true},
      {1, 1, 1, 1, .positions = true},
      {5, 11, 300, 3, .positions = false},   // many tokens of one row
      {2, 3, 17, 1009, .accumulate = true}}; // most rows named by no token
  // Segments that span many of the blocks' parts, and one that ends with the last row of one.
  static const EmbeddingShape mirrored[] = {
      {9, 301, 264, 997, .positions = true, .popular = true},
      {9, 301, 264, 997, .positions = true, .popular = true, .accumulate = true},
      {2, 64, 77, 3, .positions = true, .popular = true, .accumulate = true},
      {1, 32, 2056, 1, .positions = true, .popular = true, .narrow = true},
      {3, 11, 8, 70001, .positions = true, .popular = true, .narrow = true, .accumulate = true}};
  RUN_CASES(h, embedding_case, shapes);
  RUN_MIRRORED(h, embedding_case, mirrored);
}

typedef struct {
  NormKind kind;
  int64_t rows, heads, hidden; // several heads lie in rows that hold more, and their gradient replaces dout
  bool accumulate_dx, accumulate, narrow;
  bool residual; // of an RMS norm; the gradient replaces x
} NormShape;

static double norm_objective(void *context) {
  Case *c = context;
  const NormShape *s = c->shape;
  int64_t rows = s->rows * s->heads;
  reference_norm(s->kind, c->out, c->mean, c->rstd, c->x, c->weight, c->bias, rows, s->hidden, 1e-5);
  for (int64_t i = 0; s->residual && i < rows * s->hidden; i++) c->out[i] += c->residual[i];
  return reference_dot(c->out, c->dout, rows * s->hidden);
}

static void check_amax(Harness *h, Tensor amax, Tensor of) {
  double *values = values_of(h, of), want = 0;
  for (int64_t i = 0; i < tensor_count(of); i++) want = fmax(want, fabs(values[i]));
  assert_true(*values_of(h, amax) == want);
}

static void norm_case(Harness *h, const void *shape) {
  NormShape s = *(const NormShape *)shape;
  bool layer = s.kind == NORM_LAYER, heads = s.heads > 1;
  int64_t wide = s.heads * s.hidden, count = s.rows * s.heads, apart = heads ? wide + 6 : wide;
  Case c = {.shape = shape, .out = host_values(h, count * s.hidden)};
  c.mean = host_values(h, count), c.rstd = host_values(h, count);
  NormForward forward = {.kind = s.kind,
                         .out = poisoned_strided(h, h->dtype, s.rows, wide, apart),
                         .rstd = poisoned_vector(h, DTYPE_F32, count),
                         .x = random_strided(h, &c.x, s.rows, wide, apart, 2),
                         .weight = random_vector(h, &c.weight, s.hidden, 1),
                         .amax = poisoned_vector(h, DTYPE_F32, 1),
                         .epsilon = 1e-5f};
  if (layer) forward.mean = poisoned_vector(h, DTYPE_F32, count);
  if (layer) forward.bias = random_vector(h, &c.bias, s.hidden, 1);
  if (s.residual) forward.residual = random_tensor(h, &c.residual, s.rows, wide, 3);
  double *dx_before = NULL, *before[3] = {0};
  NormBackward a = {.kind = s.kind,
                    .dout = random_strided(h, &c.dout, s.rows, wide, apart, 1),
                    .x = forward.x,
                    .weight = forward.weight,
                    .mean = forward.mean,
                    .rstd = forward.rstd,
                    .amax = poisoned_vector(h, DTYPE_F32, 1),
                    .accumulate_dx = s.accumulate_dx,
                    .accumulate = s.accumulate};
  norm_forward(h->backend, forward);
  check_amax(h, forward.amax, forward.out);
  norm_objective(&c);
  Tolerance tolerance = within(8, (double)s.hidden);
  check_values(h, "norm out", forward.out, c.out, tolerance);
  check_gaps(h, "norm out", forward.out);
  check_values(h, "rstd", forward.rstd, c.rstd, tolerance);
  if (layer) check_values(h, "mean", forward.mean, c.mean, with_size(tolerance, 2));

  a.dx = s.residual ? a.x
         : heads    ? a.dout
                    : result(h, h->dtype, s.accumulate_dx, &dx_before, s.rows, s.hidden);
  Tensor *const sums[] = {&a.dweight, &a.dbias, &a.dx_sum};
  int summed = !layer ? 1 : s.accumulate_dx ? 3 : 2;
  for (int i = 0; i < summed; i++)
    *sums[i] = tensor_flat(result(h, s.narrow ? h->dtype : DTYPE_F32, s.accumulate, &before[i], 1, s.hidden));
  norm_backward(h->backend, a);
  check_amax(h, a.amax, a.dx);
  // The statistics saved by the forward pass are fp32, so an error of theirs passes through every term.
  Tolerance gradient = with_size(within(16, (double)s.hidden), 1);
  Tolerance columns = with_size(within(8, (double)(count + s.hidden)), 1);
  check_gradient(h, "norm dx", a.dx, dx_before, c.x, norm_objective, &c, gradient);
  check_gaps(h, "norm dx", a.dx);
  check_gradient(h, "norm dweight", a.dweight, before[0], c.weight, norm_objective, &c, columns);
  if (layer) check_gradient(h, "norm dbias", a.dbias, before[1], c.bias, norm_objective, &c, columns);
  if (summed < 3) return;
  double *want = before[2] ? before[2] : host_values(h, s.hidden);
  for (int64_t i = 0; i < count * s.hidden; i++) want[i % s.hidden] += dx_before[i];
  check_values(h, "norm dx_sum", a.dx_sum, want, columns);
}

#define NORM(type, n, m, width, ...)                                                                         \
  { .kind = type, .rows = n, .heads = m, .hidden = width, __VA_ARGS__ }
#define BOTH_NORMS(...) NORM(NORM_LAYER, __VA_ARGS__), NORM(NORM_RMS, __VA_ARGS__)
#define POST_NORM(...)  NORM(NORM_RMS, __VA_ARGS__, .residual = true)
#define ADDS            .accumulate_dx = true, .accumulate = true

HARNESS_TEST(test_norm) {
  static const NormShape shapes[] = {BOTH_NORMS(7, 1, 13),
                                     BOTH_NORMS(7, 1, 13, ADDS),
                                     BOTH_NORMS(1, 1, 5, .accumulate = true),
                                     BOTH_NORMS(131, 1, 257, .accumulate_dx = true),
                                     BOTH_NORMS(3, 1, 1031),
                                     BOTH_NORMS(5, 3, 11),
                                     POST_NORM(7, 1, 13, .accumulate = true),
                                     POST_NORM(131, 1, 257),
                                     POST_NORM(9, 1, 64),
                                     POST_NORM(5, 3, 11)};
  static const NormShape mirrored[] = {
      BOTH_NORMS(3001, 1, 768, ADDS), // more rows than teams that run at once
      BOTH_NORMS(1201, 1, 1600),      BOTH_NORMS(37, 1, 2048, .narrow = true),
      BOTH_NORMS(5, 1, 8200, ADDS), // sums of a layer norm outgrow 48 KiB
      BOTH_NORMS(3, 1, 13001),      // both kinds' do, and nothing is aligned
      BOTH_NORMS(301, 16, 128),       BOTH_NORMS(7, 3, 10),
      POST_NORM(301, 1, 768),         POST_NORM(37, 1, 2048, .narrow = true),
      POST_NORM(5, 1, 8200),          POST_NORM(3, 1, 13001),
      POST_NORM(67, 16, 128)};
  RUN_CASES(h, norm_case, shapes);
  RUN_MIRRORED(h, norm_case, mirrored);
}

// Four threads work long enough to overlap, on two busy cores, too. Two of them raise max |out| with each
// element, and a third has the largest.
HARNESS_TEST(test_norm_on_threads) {
  enum { ROWS = 16000, HIDDEN = 256, HALF = ROWS / 2 * HIDDEN, ROUNDS = 10 };
  if (h->backend->device != ON_CPU) skip();
  double *x = host_values(h, 2 * HALF), *residual = host_values(h, 2 * HALF), *zeros = host_values(h, HIDDEN);
  for (int64_t i = 0; i < 2 * HALF; i++) x[i] = (double)(i % 1001) - 500;
  for (int64_t i = 0; i < HALF; i++) residual[i] = (double)i;
  residual[HALF + HALF / 4] = HALF;
  NormForward forward = {.kind = NORM_RMS,
                         .out = poisoned(h, DTYPE_F32, ROWS, HIDDEN),
                         .rstd = poisoned_vector(h, DTYPE_F32, ROWS),
                         .x = tensor_from(h, DTYPE_F32, x, ROWS, HIDDEN),
                         .residual = tensor_from(h, DTYPE_F32, residual, ROWS, HIDDEN),
                         .weight = vector_from(h, DTYPE_F32, zeros, HIDDEN),
                         .amax = poisoned_vector(h, DTYPE_F32, 1)};
  NormBackward backward = {.kind = NORM_RMS,
                           .dx = poisoned(h, DTYPE_F32, ROWS, HIDDEN),
                           .dout = forward.residual,
                           .x = forward.x,
                           .weight = forward.weight,
                           .rstd = forward.rstd};
  int own = omp_get_max_threads();
  Tensor dweight[2];
  for (int i = 0; i < ROUNDS; i++) {
    omp_set_num_threads(i ? 4 : 1);
    norm_forward(h->backend, forward);
    assert_true(*values_of(h, forward.amax) == HALF);
    backward.dweight = dweight[i > 0] = poisoned_vector(h, DTYPE_F32, HIDDEN);
    norm_backward(h->backend, backward);
    check_bitwise_equal(h, "dweight", dweight[i > 0], dweight[0]);
  }
  omp_set_num_threads(own);
}

typedef struct {
  int64_t rows, inputs, outputs, pad; // pad: what strided tensors leave between rows
  bool bias, residual, in_place, in_out_layout, accumulate;
  Activation activation; // after the forward pass, before the backward pass
  bool wide, narrow;     // out and dx in fp32; the weights' gradients in the operands' dtype
  double alpha;          // 0: not given
} LinearShape;

static void activate(Activation kind, double *out, const double *pre, int64_t rows, int64_t columns) {
  int64_t count = rows * columns;
  switch (kind) {
  case ACTIVATION_NONE:
    memcpy(out, pre, (size_t)count * sizeof *out);
    break;
  case ACTIVATION_GELU:
    for (int64_t i = 0; i < count; i++) out[i] = reference_gelu(pre[i]);
    break;
  case ACTIVATION_SWIGLU:
    reference_swiglu(out, pre, rows, columns);
    break;
  }
}

static int64_t made(LinearShape s) { // by the GEMM
  return s.activation == ACTIVATION_SWIGLU ? 2 * s.outputs : s.outputs;
}

static double linear_objective(void *context) {
  Case *c = context;
  LinearShape s = *(const LinearShape *)c->shape;
  reference_linear(c->pre, c->x, c->weight, s.in_out_layout, c->bias, c->residual, s.rows, s.inputs, made(s));
  activate(s.activation, c->out, c->pre, s.rows, s.outputs);
  return (s.alpha == 0 ? 1 : s.alpha) * reference_dot(c->out, c->dout, s.rows * s.outputs);
}

static Tensor weight_of(Harness *h, double **values, LinearShape s) {
  int64_t rows = s.in_out_layout ? s.inputs : made(s), columns = s.in_out_layout ? made(s) : s.inputs;
  return random_tensor(h, values, rows, columns, 0.5);
}

// A bf16 sum in place: the GEMM may be rounded before it is added, and again after.
static Tolerance in_place(const Harness *h, Dtype dtype, double terms) {
  if (dtype == DTYPE_F32 || h->dtype == DTYPE_F32) return with_size(within(4, terms), 1);
  return (Tolerance){.units = 1, .terms = 1, .operations = dtype_epsilon(DTYPE_BF16), .size = 1};
}

// With bf16 operands cuBLASLt takes a fast tanh, good to about 2^-11, and the GEMM may be rounded before an
// activation; SwiGLU multiplies two of its results.
static Tolerance through(const Harness *h, Activation activation, double terms) {
  double bf16 = dtype_epsilon(DTYPE_BF16);
  if (activation == ACTIVATION_NONE) return with_size(within(4, terms), 1);
  if (h->dtype == DTYPE_F32) return with_size(within(activation == ACTIVATION_GELU ? 4 : 16, terms), 1);
  return (Tolerance){
      .units = activation == ACTIVATION_GELU ? 1 : 4, .terms = 1, .operations = bf16, .size = 1};
}

static void linear_forward_case(Harness *h, const void *shape) {
  LinearShape s = *(const LinearShape *)shape;
  Case c = {.shape = shape,
            .dout = host_values(h, s.rows * s.outputs),
            .pre = host_values(h, s.rows * made(s)),
            .out = host_values(h, s.rows * s.outputs)};
  int64_t apart = s.outputs + (s.activation == ACTIVATION_SWIGLU ? 0 : s.pad);
  LinearForward a = {.x = random_strided(h, &c.x, s.rows, s.inputs, s.inputs + s.pad, 1),
                     .weight = weight_of(h, &c.weight, s),
                     .in_out_layout = s.in_out_layout,
                     .activation = s.activation};
  if (s.bias) a.bias = random_vector(h, &c.bias, made(s), 1);
  if (s.activation) a.pre_activation = poisoned(h, h->dtype, s.rows, made(s));
  if (s.residual || s.in_place) a.residual = random_strided(h, &c.residual, s.rows, s.outputs, apart, 1);
  a.out =
      s.in_place ? a.residual : poisoned_strided(h, s.wide ? DTYPE_F32 : h->dtype, s.rows, s.outputs, apart);
  linear_forward(h->backend, a);
  linear_objective(&c);
  double terms = (double)s.inputs;
  if (s.activation) {
    check_values(h, "linear pre_activation", a.pre_activation, c.pre, with_size(within(4, terms), 1));
    activate(s.activation, c.out, values_of(h, a.pre_activation), s.rows, s.outputs); // of what was stored
  }
  check_values(h, "linear out", a.out, c.out,
               s.in_place ? in_place(h, a.out.dtype, terms) : through(h, s.activation, terms));
  check_gaps(h, "linear out", a.out);
}

// dx through the activation before the matmul; pre is [rows, inputs] or, of SwiGLU, [rows, 2 inputs].
static double activated_objective(void *context) {
  Case *c = context;
  LinearShape s = *(const LinearShape *)c->shape;
  activate(s.activation, c->x, c->pre, s.rows, s.inputs);
  reference_linear(c->out, c->x, c->weight, s.in_out_layout, NULL, NULL, s.rows, s.inputs, s.outputs);
  return reference_dot(c->out, c->dout, s.rows * s.outputs);
}

static void linear_backward_input_case(Harness *h, const void *shape) {
  LinearShape s = *(const LinearShape *)shape;
  bool swiglu = s.activation == ACTIVATION_SWIGLU;
  int64_t columns = swiglu ? 2 * s.inputs : s.inputs, apart = columns + (s.activation ? 0 : s.pad);
  Case c = {.shape = shape,
            .pre = random_values(h, s.rows * columns, 2),
            .x = host_values(h, s.rows * s.inputs),
            .out = host_values(h, s.rows * s.outputs)};
  if (s.rows * columns > 3) c.pre[0] = -30, c.pre[1] = 30, c.pre[2] = 0, c.pre[3] = -9;
  double *before = NULL, terms = (double)s.outputs;
  LinearShape plain = s;
  plain.activation = ACTIVATION_NONE; // the weight is [outputs, inputs]
  LinearBackwardInput a = {.dout = random_strided(h, &c.dout, s.rows, s.outputs, s.outputs + s.pad, 1),
                           .weight = weight_of(h, &c.weight, plain),
                           .in_out_layout = s.in_out_layout,
                           .activation = s.activation,
                           .accumulate = s.accumulate};
  if (s.activation) a.pre_activation = tensor_from(h, h->dtype, c.pre, s.rows, columns);
  if (swiglu) a.dactivation = poisoned(h, h->dtype, s.rows, s.inputs);
  a.dx = s.in_place     ? a.pre_activation
         : s.accumulate ? random_strided(h, &before, s.rows, columns, apart, 1)
                        : poisoned_strided(h, s.wide ? DTYPE_F32 : h->dtype, s.rows, columns, apart);
  linear_backward_input(h->backend, a);
  check_gradient(h, "linear dx", a.dx, before, c.pre, activated_objective, &c,
                 before ? in_place(h, a.dx.dtype, terms) : through(h, s.activation, terms));
  check_gaps(h, "linear dx", a.dx);
}

static void linear_backward_weight_case(Harness *h, const void *shape) {
  LinearShape s = *(const LinearShape *)shape;
  Case c = {.shape = shape,
            .bias = random_values(h, s.outputs, 1),
            .pre = host_values(h, s.rows * s.outputs),
            .out = host_values(h, s.rows * s.outputs)};
  double *weight_before, *bias_before;
  Dtype gradient = s.narrow ? h->dtype : DTYPE_F32;
  Tensor like = weight_of(h, &c.weight, s);
  LinearBackwardWeight a = {
      .dweight = result(h, gradient, s.accumulate, &weight_before, like.shape[0], like.shape[1]),
      .dout = random_strided(h, &c.dout, s.rows, s.outputs, s.outputs + s.pad, 1),
      .x = random_strided(h, &c.x, s.rows, s.inputs, s.inputs + s.pad, 1),
      .in_out_layout = s.in_out_layout,
      .alpha = (float)s.alpha,
      .accumulate = s.accumulate};
  if (s.bias) a.dbias = tensor_flat(result(h, gradient, s.accumulate, &bias_before, 1, s.outputs));
  linear_backward_weight(h->backend, a);
  Tolerance over_rows = with_size(within(4, (double)s.rows), 1);
  check_gradient(h, "dweight", a.dweight, weight_before, c.weight, linear_objective, &c,
                 weight_before ? in_place(h, gradient, (double)s.rows) : over_rows);
  if (!s.bias) return;
  check_gradient(h, "dbias", a.dbias, bias_before, c.bias, linear_objective, &c, over_rows);
}

static void sum_columns_case(Harness *h, const void *shape) {
  LinearShape s = *(const LinearShape *)shape;
  double alpha = s.alpha > 0 ? s.alpha : 1, *before, *x, *coefficients;
  Dtype dtype = s.narrow ? h->dtype : DTYPE_F32;
  for (int weighted = 0; weighted < 2; weighted++) {
    SumColumns a = {.sum = tensor_flat(result(h, dtype, s.accumulate, &before, 1, s.outputs)),
                    .x = random_strided(h, &x, s.rows, s.outputs, s.outputs + s.pad, 1),
                    .alpha = (float)s.alpha,
                    .accumulate = s.accumulate};
    coefficients = random_values(h, s.rows, 1);
    if (weighted) a.coefficients = vector_from(h, DTYPE_F32, coefficients, s.rows);
    sum_columns(h->backend, a);
    double *want = host_values(h, s.outputs);
    for (int64_t i = 0; i < s.outputs; i++) {
      if (s.accumulate) want[i] = before[i];
      for (int64_t n = 0; n < s.rows; n++)
        want[i] += alpha * (weighted ? coefficients[n] : 1) * x[n * s.outputs + i];
    }
    check_values(h, "column sums", a.sum, want, with_size(within(4, (double)s.rows), alpha));
  }
}

// Every size in every variant, against float64; from `mirrored` on, on a GPU against the CPU.
static const LinearShape linear_sizes[] = {
    {.rows = 1, .inputs = 1, .outputs = 1, .alpha = 1},
    {.rows = 1, .inputs = 67, .outputs = 1, .alpha = 1},
    {.rows = 7, .inputs = 1, .outputs = 13, .alpha = 2},
    {.rows = 5, .inputs = 11, .outputs = 131, .pad = 3},
    {.rows = 67, .inputs = 31, .outputs = 29, .pad = 5, .alpha = 0.25},
    {.rows = 3, .inputs = 2, .outputs = 4099, .pad = 1, .alpha = 1}, // a vocabulary's weight
    {.rows = 128, .inputs = 256, .outputs = 384, .alpha = 0.375},
    {.rows = 96, .inputs = 64, .outputs = 320, .pad = 64, .alpha = 0.375},
    {.rows = 37, .inputs = 53, .outputs = 71, .pad = 3, .alpha = 0.375},
    {.rows = 65, .inputs = 72, .outputs = 1001, .pad = 1, .alpha = 0.375},
    {.rows = 8, .inputs = 40, .outputs = 24, .pad = 8, .alpha = 0.375},
};
enum { LINEAR_SIZES = sizeof linear_sizes / sizeof *linear_sizes, FIRST_MIRRORED = 6 };

static void each_linear(Harness *h, TestCase run, const LinearShape *variants, size_t count) {
  for (size_t i = 0; i < LINEAR_SIZES; i++)
    for (size_t k = 0; k < 2 * count; k++) {
      LinearShape shape[] = {variants[k / 2]};
      shape->rows = linear_sizes[i].rows, shape->inputs = linear_sizes[i].inputs;
      shape->outputs = linear_sizes[i].outputs, shape->pad = linear_sizes[i].pad;
      shape->alpha = linear_sizes[i].alpha, shape->in_out_layout = k % 2;
      if (i < FIRST_MIRRORED)
        RUN_CASES(h, run, shape);
      else
        RUN_MIRRORED(h, run, shape);
    }
}
#define EACH_LINEAR(h, run, variants) each_linear(h, run, variants, sizeof variants / sizeof *(variants))

HARNESS_TEST(test_linear_forward) {
  static const LinearShape variants[] = {{.bias = false},
                                         {.bias = true},
                                         {.residual = true},
                                         {.bias = true, .residual = true},
                                         {.bias = true, .in_place = true},
                                         {.activation = ACTIVATION_GELU},
                                         {.bias = true, .activation = ACTIVATION_GELU},
                                         {.activation = ACTIVATION_SWIGLU},
                                         {.bias = true, .activation = ACTIVATION_SWIGLU},
                                         {.bias = true, .wide = true}};
  EACH_LINEAR(h, linear_forward_case, variants);
}

HARNESS_TEST(test_linear_backward) {
  static const LinearShape input_variants[] = {{.bias = false},
                                               {.accumulate = true},
                                               {.activation = ACTIVATION_GELU},
                                               {.activation = ACTIVATION_SWIGLU},
                                               {.activation = ACTIVATION_SWIGLU, .in_place = true},
                                               {.wide = true}};
  static const LinearShape weight_variants[] = {{.bias = false},
                                                {.bias = true},
                                                {.bias = true, .accumulate = true},
                                                {.bias = true, .narrow = true},
                                                {.bias = true, .narrow = true, .accumulate = true}};
  EACH_LINEAR(h, linear_backward_input_case, input_variants);
  EACH_LINEAR(h, linear_backward_weight_case, weight_variants);
  static const LinearShape column_variants[] = {
      {.bias = true}, {.accumulate = true}, {.narrow = true}, {.narrow = true, .accumulate = true}};
  EACH_LINEAR(h, sum_columns_case, column_variants);
}

HARNESS_TEST(test_no_rows) {
  double *zeros = host_values(h, 6 * 8);
  Tensor x = poisoned(h, h->dtype, 0, 8), dout = poisoned(h, h->dtype, 0, 6);
  Tensor dweight = poisoned(h, DTYPE_F32, 6, 8), dbias = poisoned_vector(h, DTYPE_F32, 6),
         sums = poisoned_vector(h, DTYPE_F32, 6);
  linear_forward(h->backend, (LinearForward){.out = dout, .x = x, .weight = poisoned(h, h->dtype, 6, 8)});
  linear_backward_weight(h->backend,
                         (LinearBackwardWeight){.dweight = dweight, .dbias = dbias, .dout = dout, .x = x});
  check_values(h, "dweight of no rows", dweight, zeros, within(0, 1));
  check_values(h, "dbias of no rows", dbias, zeros, within(0, 1));
  sum_columns(h->backend, (SumColumns){.sum = sums, .x = dout});
  check_values(h, "column sums of no rows", sums, zeros, within(0, 1));
  linear_backward_weight(h->backend, (LinearBackwardWeight){.dweight = poisoned(h, DTYPE_F32, 0, 8),
                                                            .dout = poisoned(h, h->dtype, 5, 0),
                                                            .x = poisoned(h, h->dtype, 5, 8)});
}

typedef struct {
  int64_t rows, width;
  Activation activation;
  bool in_place;
} ActivationShape;

static double activation_objective(void *context) {
  Case *c = context;
  const ActivationShape *s = c->shape;
  activate(s->activation, c->out, c->x, s->rows, s->width);
  return reference_dot(c->out, c->dout, s->rows * s->width);
}

static void activation_case(Harness *h, const void *shape) {
  ActivationShape s = *(const ActivationShape *)shape;
  bool swiglu = s.activation == ACTIVATION_SWIGLU;
  int64_t columns = swiglu ? 2 * s.width : s.width;
  Case c = {
      .shape = shape, .x = random_values(h, s.rows * columns, 3), .out = host_values(h, s.rows * s.width)};
  c.x[0] = -100; // silu and gelu underflow to 0
  Tensor x = tensor_from(h, h->dtype, c.x, s.rows, columns), out = poisoned(h, h->dtype, s.rows, s.width);
  Tensor dout = random_tensor(h, &c.dout, s.rows, s.width, 1);
  Tensor dx = !s.in_place ? poisoned(h, h->dtype, s.rows, columns) : swiglu ? x : dout;
  activation_forward(h->backend, (ActivationForward){s.activation, .out = out, .x = x});
  activation_backward(h->backend, (ActivationBackward){s.activation, .dx = dx, .dout = dout, .x = x});
  activation_objective(&c);
  check_values(h, "activation", out, c.out, within(16, 1));
  check_gradient(h, "its gradient", dx, NULL, c.x, activation_objective, &c, with_size(within(16, 1), 1));
}

HARNESS_TEST(test_activations) {
  static const ActivationShape shapes[] = {
      {5, 37, ACTIVATION_SWIGLU, false}, {5, 37, ACTIVATION_SWIGLU, true}, {1, 1, ACTIVATION_SWIGLU, false},
      {7, 37, ACTIVATION_GELU, false},   {7, 37, ACTIVATION_GELU, true},   {1, 1, ACTIVATION_GELU, false}};
  static const ActivationShape mirrored[] = {{33, 1408, ACTIVATION_SWIGLU, true},
                                             {5, 333, ACTIVATION_SWIGLU, true},
                                             {33, 3072, ACTIVATION_GELU, true},
                                             {5, 333, ACTIVATION_GELU, false}};
  RUN_CASES(h, activation_case, shapes);
  RUN_MIRRORED(h, activation_case, mirrored);
}

#define REFUSED(part, operation, Arguments, ...)                                                             \
  assert_fails(h, part, operation(h->backend, (Arguments){__VA_ARGS__}))

// Refusals by several tensors together, or by contents; tests/refusals.c tries the rest in every operation.
HARNESS_TEST(test_refusals) {
  Dtype dtype = h->dtype;
  Tensor m34 = poisoned(h, dtype, 3, 4), other = poisoned(h, dtype, 3, 4), m35 = poisoned(h, dtype, 3, 5),
         m54 = poisoned(h, dtype, 5, 4);
  Tensor v3 = poisoned_vector(h, DTYPE_F32, 3), v4 = poisoned_vector(h, dtype, 4),
         ids = poisoned_vector(h, DTYPE_I32, 3);
  Tensor gaps = poisoned_strided(h, dtype, 3, 4, 6), one = tensor_rows(v3, 0, 1);
  const Activation gelu = ACTIVATION_GELU;
  REFUSED("do not go together", linear_forward, LinearForward, m35, m34, m54, .activation = gelu,
          .pre_activation = m35, .residual = m35);
  REFUSED("cannot be accumulated", linear_backward_input, LinearBackwardInput, m34, m35, m54,
          .activation = gelu, .pre_activation = m34, .accumulate = true);
  REFUSED("it is for a gated activation", linear_backward_input, LinearBackwardInput, m34, m35, m54,
          .activation = gelu, .pre_activation = m34, .dactivation = m34);
  REFUSED("gaps between its rows", activation_forward, ActivationForward, gelu, .out = m34, .x = gaps);
  REFUSED("no activation is named", activation_forward, ActivationForward, .out = m34, .x = m34);
  REFUSED("where [3, 8] is needed", activation_forward, ActivationForward, ACTIVATION_SWIGLU, .out = m34,
          .x = m35);
  REFUSED("not whole sequences of 2", embedding_forward, EmbeddingForward, .out = m34, .tokens = ids,
          .token_weight = m54, .seq_len = 2);
  REFUSED("too few positions", embedding_forward, EmbeddingForward, .out = m34, .tokens = ids,
          .token_weight = m54, .position_weight = tensor_rows(m54, 0, 2), .seq_len = 3);
  REFUSED("an RMS norm has no mean", norm_forward, NormForward, .kind = NORM_RMS, .out = m34, .mean = v3,
          .rstd = v3, .x = m34, .weight = v4);
  REFUSED("it is for an RMS norm", norm_forward, NormForward, .kind = NORM_LAYER, .out = m34, .mean = v3,
          .rstd = v3, .x = m34, .weight = v4, .bias = v4, .residual = m34);
  REFUSED("[3, 5] where [3, 4] is needed", norm_forward, NormForward, .kind = NORM_RMS, .out = m35,
          .rstd = v3, .x = m35, .weight = v4);
  REFUSED("the same tensor", norm_backward, NormBackward, .kind = NORM_RMS, .dx = m34, .dweight = v4,
          .dout = m34, .x = other, .weight = v4, .rstd = v3, .accumulate_dx = true);
  REFUSED("the same tensor", norm_backward, NormBackward, .kind = NORM_RMS, .dx = m34, .dweight = v4,
          .dout = other, .x = m34, .weight = v4, .rstd = v3, .accumulate_dx = true);
  REFUSED("do not describe an attention", attention_forward, AttentionForward, .out = m34, .lse = m34,
          .qkv = m34, .shape = {1, 3, 3, 2, 1});
  REFUSED("head_dim 1 is odd", rope, Rope, .qkv = m35, .cos_sin = m34, .shape = {1, 3, 3, 1, 1});
  REFUSED("this is the forward pass alone", lce_logits_exp, LceLogitsExp, .dx_raw = m34,
          .softmax = {.row_sum = v3, .target_e = v3, .target_z = v3, .anchor = v3}, .x = m34, .weight = m54,
          .targets = ids);
  REFUSED("the rows of out and x differ", gather_rows, MoveRows, .out = m34, .x = m35, .indices = ids);
  REFUSED("steps count from 1", adamw, Update, .weight = v3, .m = v3, .v = v3, .grad = v3, .grad_scale = one);
  REFUSED("lie 12 elements apart", aol_scale, AolScale, .out = {m34, 12}, .x = {m34, 12}, .count = 2);
  REFUSED("gram.first is", aol_scale, AolScale, .out = {.first = m34}, .x = {.first = m34},
          .gram = {.first = m34}, .s = m34, .count = 1);
  REFUSED("ranks: out is", all_reduce, Collective, .out = v4, .x = tensor_rows(v4, 0, 3));
}

TEST_MAIN(run_on_backends())
