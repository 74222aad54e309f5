// The layers' operations against float64: forward results against tests/reference.c, gradients against finite
// differences, on shapes that nothing divides, with outputs that hold NaN beforehand; and the arguments that operations
// refuse. Runs on every backend of this build and machine. Attention has test_kernels_attention.c.

#include "tests/harness.h"
#include "tests/reference.h"

// --- tokens to vectors -------------------------------------------------------------------------------------

typedef struct {
  int64_t rows, hidden, vocab, seq_len, positions;
  const int32_t *tokens;
  double *token_weight, *position_weight, *out, *dout;
} EmbeddingCase;

static double embedding_objective(void *context) {
  EmbeddingCase *c = context;
  reference_embedding(c->out, c->tokens, c->token_weight, c->position_weight, c->rows, c->hidden, c->seq_len);
  return reference_dot(c->out, c->dout, c->rows * c->hidden);
}

static void embedding_case(Harness *h, int64_t batch, int64_t seq_len, int64_t hidden, int64_t vocab,
                           bool with_positions, bool accumulate) {
  EmbeddingCase c = {.rows = batch * seq_len,
                     .hidden = hidden,
                     .vocab = vocab,
                     .seq_len = seq_len,
                     .positions = seq_len + 3};
  c.tokens = random_ids(h, c.rows, vocab);
  c.token_weight = random_values(h, vocab * hidden, 1);
  c.position_weight = with_positions ? random_values(h, c.positions * hidden, 1) : NULL;
  c.out = host_values(h, c.rows * hidden);
  c.dout = random_values(h, c.rows * hidden, 1);
  Tensor tokens = ids_from(h, c.tokens, c.rows);
  Tensor token_weight = tensor_from(h, h->dtype, c.token_weight, vocab, hidden), position_weight = {0};
  if (with_positions) position_weight = tensor_from(h, h->dtype, c.position_weight, c.positions, hidden);
  Tensor out = poisoned(h, h->dtype, c.rows, hidden);
  embedding_forward(h->backend, (EmbeddingForward){.out = out,
                                                   .tokens = tokens,
                                                   .token_weight = token_weight,
                                                   .position_weight = position_weight,
                                                   .seq_len = seq_len});
  embedding_objective(&c);
  check_values(h, "embedding out", out, c.out, of_size(within(1, 1), 1));

  Tensor dout = tensor_from(h, h->dtype, c.dout, c.rows, hidden);
  double *token_before = random_values(h, vocab * hidden, 1);
  double *position_before = random_values(h, c.positions * hidden, 1);
  Tensor dtoken = poisoned(h, DTYPE_F32, vocab, hidden), dposition = {0};
  if (with_positions) dposition = poisoned(h, DTYPE_F32, c.positions, hidden);
  if (accumulate) {
    dtoken = tensor_from(h, DTYPE_F32, token_before, vocab, hidden);
    if (with_positions) dposition = tensor_from(h, DTYPE_F32, position_before, c.positions, hidden);
  }
  embedding_backward(h->backend, (EmbeddingBackward){.dtoken_weight = dtoken,
                                                     .dposition_weight = dposition,
                                                     .dout = dout,
                                                     .tokens = tokens,
                                                     .seq_len = seq_len,
                                                     .accumulate_token = accumulate,
                                                     .accumulate_position = accumulate});
  check_gradient(h, "dtoken_weight", dtoken, accumulate ? token_before : NULL, c.token_weight,
                 embedding_objective, &c, of_size(within(4, (double)c.rows), 1));
  if (with_positions)
    check_gradient(h, "dposition_weight", dposition, accumulate ? position_before : NULL, c.position_weight,
                   embedding_objective, &c, of_size(within(4, (double)batch), 1));
}

TEST(test_embedding) {
  embedding_case(*state, 3, 7, 13, 11, true, false);
  embedding_case(*state, 3, 7, 13, 11, true, true);
  embedding_case(*state, 1, 1, 1, 1, true, false);
  embedding_case(*state, 5, 11, 300, 3, false, false); // many tokens of one row
  embedding_case(*state, 2, 3, 17, 1009, false, true); // most rows named by no token
}

// --- normalisation -----------------------------------------------------------------------------------------

typedef struct {
  NormKind kind;
  int64_t rows, hidden;
  double *x, *weight, *bias, *out, *mean, *rstd, *dout;
} NormCase;

static double norm_objective(void *context) {
  NormCase *c = context;
  reference_norm(c->kind, c->out, c->mean, c->rstd, c->x, c->weight, c->bias, c->rows, c->hidden, 1e-5);
  return reference_dot(c->out, c->dout, c->rows * c->hidden);
}

static void norm_case(Harness *h, NormKind kind, int64_t rows, int64_t hidden, bool accumulate_dx,
                      bool accumulate) {
  bool layer = kind == NORM_LAYER;
  NormCase c = {.kind = kind, .rows = rows, .hidden = hidden};
  c.x = random_values(h, rows * hidden, 2);
  c.weight = random_values(h, hidden, 1);
  c.bias = random_values(h, hidden, 1);
  c.dout = random_values(h, rows * hidden, 1);
  c.out = host_values(h, rows * hidden);
  c.mean = host_values(h, rows);
  c.rstd = host_values(h, rows);
  Tensor x = tensor_from(h, h->dtype, c.x, rows, hidden), weight = vector_from(h, h->dtype, c.weight, hidden);
  Tensor out = poisoned(h, h->dtype, rows, hidden), rstd = poisoned_vector(h, DTYPE_F32, rows);
  Tensor mean = layer ? poisoned_vector(h, DTYPE_F32, rows) : (Tensor){0};
  Tensor bias = layer ? vector_from(h, h->dtype, c.bias, hidden) : (Tensor){0};
  norm_forward(h->backend, (NormForward){.kind = kind,
                                         .out = out,
                                         .mean = mean,
                                         .rstd = rstd,
                                         .x = x,
                                         .weight = weight,
                                         .bias = bias,
                                         .epsilon = 1e-5f});
  norm_objective(&c);
  Tolerance tolerance = within(8, (double)hidden);
  check_values(h, "norm out", out, c.out, tolerance);
  check_values(h, "rstd", rstd, c.rstd, tolerance);
  if (layer) check_values(h, "mean", mean, c.mean, of_size(tolerance, 2));

  Tensor dout = tensor_from(h, h->dtype, c.dout, rows, hidden);
  double *dx_before = random_values(h, rows * hidden, 1);
  Tensor dx =
      accumulate_dx ? tensor_from(h, h->dtype, dx_before, rows, hidden) : poisoned(h, h->dtype, rows, hidden);
  enum { DWEIGHT, DBIAS, DX_SUM, VECTORS };
  Tensor vectors[VECTORS] = {0};
  double *before[VECTORS];
  int count = layer ? accumulate_dx ? VECTORS : DX_SUM : DBIAS;
  for (int i = 0; i < count; i++) {
    before[i] = accumulate ? random_values(h, hidden, 1) : NULL;
    vectors[i] =
        accumulate ? vector_from(h, DTYPE_F32, before[i], hidden) : poisoned_vector(h, DTYPE_F32, hidden);
  }
  norm_backward(h->backend, (NormBackward){.kind = kind,
                                           .dx = dx,
                                           .dweight = vectors[DWEIGHT],
                                           .dbias = vectors[DBIAS],
                                           .dx_sum = vectors[DX_SUM],
                                           .dout = dout,
                                           .x = x,
                                           .weight = weight,
                                           .mean = mean,
                                           .rstd = rstd,
                                           .accumulate_dx = accumulate_dx,
                                           .accumulate = accumulate});
  // The statistics saved by the forward pass are fp32, so an error of theirs passes through every term.
  Tolerance gradient = of_size(within(16, (double)hidden), 1);
  Tolerance sums = of_size(within(8, (double)(rows + hidden)), 1);
  check_gradient(h, "norm dx", dx, accumulate_dx ? dx_before : NULL, c.x, norm_objective, &c, gradient);
  check_gradient(h, "norm dweight", vectors[DWEIGHT], before[DWEIGHT], c.weight, norm_objective, &c, sums);
  if (layer) check_gradient(h, "norm dbias", vectors[DBIAS], before[DBIAS], c.bias, norm_objective, &c, sums);
  if (count > DX_SUM) {
    double *want = before[DX_SUM] ? before[DX_SUM] : host_values(h, hidden);
    for (int64_t i = 0; i < rows * hidden; i++) want[i % hidden] += dx_before[i];
    check_values(h, "norm dx_sum", vectors[DX_SUM], want, sums);
  }
}

// Heads within rows that lie apart are normalised as rows of their own, and their gradient may replace dout: every bit.
static void norm_heads_case(Harness *h, NormKind kind, int64_t rows, int64_t heads, int64_t size) {
  bool layer = kind == NORM_LAYER;
  int64_t wide = heads * size, count = rows * heads, apart = wide + 6;
  double *x_values = random_values(h, count * size, 2), *dout_values = random_values(h, count * size, 1);
  Tensor x = strided_from(h, h->dtype, x_values, rows, wide, apart);
  Tensor dout = strided_from(h, h->dtype, dout_values, rows, wide, apart);
  Tensor out = poisoned_strided(h, h->dtype, rows, wide, apart);
  Tensor weight = vector_from(h, h->dtype, random_values(h, size, 1), size);
  Tensor bias = layer ? vector_from(h, h->dtype, random_values(h, size, 1), size) : (Tensor){0};
  Tensor one_x = tensor_from(h, h->dtype, x_values, count, size);
  Tensor one_dout = tensor_from(h, h->dtype, dout_values, count, size);
  Tensor results[2][6]; // out, rstd, mean, dx, dweight, dbias; of heads, and of rows
  for (int one = 0; one < 2; one++) {
    Tensor *r = results[one];
    r[0] = one ? poisoned(h, h->dtype, count, size) : out;
    r[1] = poisoned_vector(h, DTYPE_F32, count);
    r[2] = layer ? poisoned_vector(h, DTYPE_F32, count) : (Tensor){0};
    r[3] = one ? poisoned(h, h->dtype, count, size) : dout;
    r[4] = poisoned_vector(h, DTYPE_F32, size);
    r[5] = layer ? poisoned_vector(h, DTYPE_F32, size) : (Tensor){0};
    norm_forward(h->backend, (NormForward){.kind = kind,
                                           .out = r[0],
                                           .rstd = r[1],
                                           .mean = r[2],
                                           .x = one ? one_x : x,
                                           .weight = weight,
                                           .bias = bias,
                                           .epsilon = 1e-5f});
    norm_backward(h->backend, (NormBackward){.kind = kind,
                                             .dx = r[3],
                                             .dweight = r[4],
                                             .dbias = r[5],
                                             .dout = one ? one_dout : dout,
                                             .x = one ? one_x : x,
                                             .weight = weight,
                                             .rstd = r[1],
                                             .mean = r[2]});
  }
  for (int i = 0; i < 6; i++) {
    if (!tensor_exists(results[0][i])) continue;
    if (results[0][i].rank == 2) check_gaps(h, "heads", results[0][i]);
    assert_memory_equal(values_of(h, results[0][i]), values_of(h, results[1][i]),
                        (size_t)tensor_count(results[0][i]) * sizeof(double));
  }
}

TEST(test_norm) {
  for (int kind = NORM_LAYER; kind <= NORM_RMS; kind++) {
    norm_case(*state, kind, 7, 13, false, false);
    norm_case(*state, kind, 7, 13, true, true);
    norm_case(*state, kind, 1, 5, false, true);
    norm_case(*state, kind, 131, 257, true, false);
    norm_case(*state, kind, 3, 1031, false, false);
    norm_heads_case(*state, kind, 5, 3, 11);
  }
}

// --- GEMMs -------------------------------------------------------------------------------------------------

typedef struct {
  int64_t rows, inputs, outputs, pad; // pad: what strided tensors leave between rows
  bool in_out_layout, bias, gelu, residual, in_place, accumulate;
  double alpha;
} LinearShape;

typedef struct {
  LinearShape s;
  double *x, *weight, *bias, *residual, *pre, *out, *dout;
} LinearCase;

static double linear_objective(void *context) {
  LinearCase *c = context;
  LinearShape s = c->s;
  reference_linear(c->pre, c->x, c->weight, s.in_out_layout, c->bias, c->residual, s.rows, s.inputs,
                   s.outputs);
  for (int64_t i = 0; i < s.rows * s.outputs; i++) c->out[i] = s.gelu ? reference_gelu(c->pre[i]) : c->pre[i];
  return s.alpha * reference_dot(c->out, c->dout, s.rows * s.outputs);
}

static Tensor weight_from(Harness *h, Dtype dtype, double *values, LinearShape s) {
  return s.in_out_layout ? tensor_from(h, dtype, values, s.inputs, s.outputs)
                         : tensor_from(h, dtype, values, s.outputs, s.inputs);
}

static LinearCase linear_values(Harness *h, LinearShape s) {
  LinearCase c = {.s = s};
  c.x = random_values(h, s.rows * s.inputs, 1);
  c.weight = random_values(h, s.inputs * s.outputs, 0.5);
  c.bias = s.bias ? random_values(h, s.outputs, 1) : NULL;
  c.residual = s.residual ? random_values(h, s.rows * s.outputs, 1) : NULL;
  c.dout = random_values(h, s.rows * s.outputs, 1);
  c.pre = host_values(h, s.rows * s.outputs);
  c.out = host_values(h, s.rows * s.outputs);
  return c;
}

static void linear_forward_case(Harness *h, LinearShape s) {
  LinearCase c = linear_values(h, s);
  Tensor x = strided_from(h, h->dtype, c.x, s.rows, s.inputs, s.inputs + s.pad);
  Tensor weight = weight_from(h, h->dtype, c.weight, s), bias = {0}, residual = {0}, pre = {0};
  if (s.bias) bias = vector_from(h, h->dtype, c.bias, s.outputs);
  if (s.gelu) pre = poisoned(h, h->dtype, s.rows, s.outputs);
  Tensor out = poisoned_strided(h, h->dtype, s.rows, s.outputs, s.outputs + s.pad);
  if (s.residual) residual = strided_from(h, h->dtype, c.residual, s.rows, s.outputs, s.outputs + s.pad);
  if (s.in_place) out = residual;
  linear_forward(h->backend, (LinearForward){.out = out,
                                             .x = x,
                                             .weight = weight,
                                             .in_out_layout = s.in_out_layout,
                                             .bias = bias,
                                             .activation = s.gelu ? ACTIVATION_GELU : ACTIVATION_NONE,
                                             .pre_activation = pre,
                                             .residual = residual});
  linear_objective(&c);
  if (s.gelu) check_values(h, "linear pre_activation", pre, c.pre, of_size(within(4, (double)s.inputs), 1));
  check_values(h, "linear out", out, c.out,
               of_size(s.gelu ? within_stored(h, 4, (double)s.inputs) : within(4, (double)s.inputs), 1));
  check_gaps(h, "linear out", out);
}

static void linear_backward_case(Harness *h, LinearShape s) {
  s.gelu = s.residual = false;
  LinearCase c = linear_values(h, s);
  Tensor x = strided_from(h, h->dtype, c.x, s.rows, s.inputs, s.inputs + s.pad);
  Tensor weight = weight_from(h, h->dtype, c.weight, s);
  Tensor dout = strided_from(h, h->dtype, c.dout, s.rows, s.outputs, s.outputs + s.pad);
  double *dx_before = random_values(h, s.rows * s.inputs, 1);
  double *weight_before = random_values(h, s.inputs * s.outputs, 1);
  double *bias_before = random_values(h, s.outputs, 1);
  Tensor dx = poisoned_strided(h, h->dtype, s.rows, s.inputs, s.inputs + s.pad), dbias = {0};
  Tensor dweight = s.in_out_layout ? poisoned(h, DTYPE_F32, s.inputs, s.outputs)
                                   : poisoned(h, DTYPE_F32, s.outputs, s.inputs);
  if (s.bias) dbias = poisoned_vector(h, DTYPE_F32, s.outputs);
  if (s.accumulate) {
    dx = strided_from(h, h->dtype, dx_before, s.rows, s.inputs, s.inputs + s.pad);
    dweight = weight_from(h, DTYPE_F32, weight_before, s);
    if (s.bias) dbias = vector_from(h, DTYPE_F32, bias_before, s.outputs);
  }
  linear_backward_input(h->backend, (LinearBackwardInput){.dx = dx,
                                                          .dout = dout,
                                                          .weight = weight,
                                                          .in_out_layout = s.in_out_layout,
                                                          .accumulate = s.accumulate});
  linear_backward_weight(h->backend, (LinearBackwardWeight){.dweight = dweight,
                                                            .dbias = dbias,
                                                            .dout = dout,
                                                            .x = x,
                                                            .in_out_layout = s.in_out_layout,
                                                            .alpha = (float)s.alpha,
                                                            .accumulate = s.accumulate});
  if (s.alpha == 0) c.s.alpha = 1;
  Tolerance over_rows = of_size(within(4, (double)s.rows), 1);
  check_gradient(h, "dweight", dweight, s.accumulate ? weight_before : NULL, c.weight, linear_objective, &c,
                 over_rows);
  if (s.bias) {
    check_gradient(h, "dbias", dbias, s.accumulate ? bias_before : NULL, c.bias, linear_objective, &c,
                   over_rows);
    Tensor alone = poisoned_vector(h, DTYPE_F32, s.outputs);
    linear_backward_weight(h->backend,
                           (LinearBackwardWeight){.dbias = alone, .dout = dout, .alpha = (float)s.alpha});
    check_gradient(h, "dbias alone", alone, NULL, c.bias, linear_objective, &c, over_rows);
  }
  c.s.alpha = 1;
  check_gradient(h, "linear dx", dx, s.accumulate ? dx_before : NULL, c.x, linear_objective, &c,
                 of_size(within(4, (double)s.outputs), 1));
  check_gaps(h, "linear dx", dx);
}

static const LinearShape linear_shapes[] = {
    {.rows = 1, .inputs = 1, .outputs = 1, .alpha = 1},
    {.rows = 1, .inputs = 67, .outputs = 1, .bias = true, .alpha = 1},
    {.rows = 7, .inputs = 1, .outputs = 13, .bias = true, .alpha = 2},
    {.rows = 5, .inputs = 11, .outputs = 131, .pad = 3, .bias = true, .alpha = 0},
    {.rows = 67, .inputs = 31, .outputs = 29, .pad = 5, .alpha = 0.25},
    {.rows = 3, .inputs = 2, .outputs = 4099, .pad = 1, .alpha = 1}, // a vocabulary's weight
};

static void each_linear_shape(Harness *h, void (*run)(Harness *, LinearShape)) {
  for (size_t i = 0; i < sizeof linear_shapes / sizeof *linear_shapes; i++)
    for (int variant = 0; variant < 4; variant++) {
      LinearShape s = linear_shapes[i];
      s.in_out_layout = variant & 1;
      s.accumulate = variant & 2;
      run(h, s);
      harness_pop((void **)&h);
    }
}

static void linear_forward_variants(Harness *h, LinearShape s) {
  linear_forward_case(h, s);
  s.residual = true;
  linear_forward_case(h, s);
  s.in_place = true;
  linear_forward_case(h, s);
  s.residual = s.in_place = false;
  s.gelu = true;
  linear_forward_case(h, s);
}

TEST(test_linear_forward) {
  each_linear_shape(*state, linear_forward_variants);
}

TEST(test_linear_backward) {
  each_linear_shape(*state, linear_backward_case);
}

// dx through gelu: (dout W) * gelu'(pre).
typedef struct {
  int64_t rows, inputs, outputs;
  double *pre, *activated, *weight, *out, *dout;
} GeluCase;

static double gelu_objective(void *context) {
  GeluCase *c = context;
  for (int64_t i = 0; i < c->rows * c->inputs; i++) c->activated[i] = reference_gelu(c->pre[i]);
  reference_linear(c->out, c->activated, c->weight, false, NULL, NULL, c->rows, c->inputs, c->outputs);
  return reference_dot(c->out, c->dout, c->rows * c->outputs);
}

TEST(test_gelu) {
  Harness *h = *state;
  GeluCase c = {.rows = 7, .inputs = 37, .outputs = 11};
  int64_t count = c.rows * c.inputs;
  c.pre = random_values(h, count, 3);
  c.pre[0] = -30, c.pre[1] = 30, c.pre[2] = 0, c.pre[3] = -9;
  c.weight = random_values(h, c.inputs * c.outputs, 0.5);
  c.dout = random_values(h, c.rows * c.outputs, 1);
  c.activated = host_values(h, count);
  c.out = host_values(h, c.rows * c.outputs);
  Tensor pre = tensor_from(h, h->dtype, c.pre, c.rows, c.inputs);
  Tensor weight = tensor_from(h, h->dtype, c.weight, c.outputs, c.inputs);
  Tensor dout = tensor_from(h, h->dtype, c.dout, c.rows, c.outputs);
  Tensor activated = poisoned(h, h->dtype, c.rows, c.inputs), dx = poisoned(h, h->dtype, c.rows, c.inputs);
  activation_forward(h->backend, (ActivationForward){ACTIVATION_GELU, .out = activated, .x = pre});
  linear_backward_input(
      h->backend,
      (LinearBackwardInput){
          .dx = dx, .dout = dout, .weight = weight, .activation = ACTIVATION_GELU, .pre_activation = pre});
  Tensor apart = poisoned(h, h->dtype, c.rows, c.inputs);
  linear_backward_input(h->backend, (LinearBackwardInput){.dx = apart, .dout = dout, .weight = weight});
  activation_backward(h->backend,
                      (ActivationBackward){ACTIVATION_GELU, .dx = apart, .dout = apart, .x = pre});
  gelu_objective(&c);
  check_values(h, "gelu", activated, c.activated, within(4, 1));
  check_gradient(h, "gelu dx", dx, NULL, c.pre, gelu_objective, &c,
                 of_size(within_stored(h, 4, (double)c.outputs), 1));
  check_gradient(h, "gelu dx, apart", apart, NULL, c.pre, gelu_objective, &c,
                 of_size(within_stored(h, 4, (double)c.outputs), 1));
}

// --- activations -------------------------------------------------------------------------------------------

typedef struct {
  int64_t rows, width;
  double *gate_up, *out, *dout;
} SwigluCase;

static double swiglu_objective(void *context) {
  SwigluCase *c = context;
  reference_swiglu(c->out, c->gate_up, c->rows, c->width);
  return reference_dot(c->out, c->dout, c->rows * c->width);
}

static void check_amax(Harness *h, Tensor amax, Tensor of) {
  double *values = values_of(h, of), want = 0;
  for (int64_t i = 0; i < tensor_count(of); i++) want = fmax(want, fabs(values[i]));
  assert_true(*values_of(h, amax) == want);
}

static void swiglu_case(Harness *h, int64_t rows, int64_t width, bool in_place) {
  SwigluCase c = {.rows = rows, .width = width};
  c.gate_up = random_values(h, rows * 2 * width, 3);
  c.gate_up[0] = -100; // silu underflows to 0
  c.dout = random_values(h, rows * width, 1);
  c.out = host_values(h, rows * width);
  Tensor gate_up = tensor_from(h, h->dtype, c.gate_up, rows, 2 * width);
  Tensor dout = tensor_from(h, h->dtype, c.dout, rows, width), out = poisoned(h, h->dtype, rows, width);
  Tensor dgate_up = in_place ? gate_up : poisoned(h, h->dtype, rows, 2 * width);
  Tensor amax = poisoned_vector(h, DTYPE_F32, 1), damax = poisoned_vector(h, DTYPE_F32, 1);
  activation_forward(h->backend,
                     (ActivationForward){ACTIVATION_SWIGLU, .out = out, .x = gate_up, .amax = amax});
  activation_backward(h->backend, (ActivationBackward){ACTIVATION_SWIGLU, .dx = dgate_up, .dout = dout,
                                                       .x = gate_up, .amax = damax});
  check_amax(h, amax, out);
  check_amax(h, damax, dgate_up);
  swiglu_objective(&c);
  check_values(h, "swiglu", out, c.out, within(4, 1));
  check_gradient(h, "dgate_up", dgate_up, NULL, c.gate_up, swiglu_objective, &c, of_size(within(8, 1), 1));
}

// The layers before and after SwiGLU, with it as part of their matmuls.
typedef struct {
  int64_t rows, inputs, width, outputs;
  double *x, *up, *bias, *pre, *activated, *down, *out, *dout;
} GatedCase;

static double gated_objective(void *context) {
  GatedCase *c = context;
  reference_swiglu(c->activated, c->pre, c->rows, c->width);
  reference_linear(c->out, c->activated, c->down, false, NULL, NULL, c->rows, c->width, c->outputs);
  return reference_dot(c->out, c->dout, c->rows * c->outputs);
}

TEST(test_gated_layers) {
  Harness *h = *state;
  GatedCase c = {.rows = 7, .inputs = 19, .width = 37, .outputs = 11};
  int64_t wide = 2 * c.width;
  c.x = random_values(h, c.rows * c.inputs, 1);
  c.up = random_values(h, wide * c.inputs, 0.5);
  c.bias = random_values(h, wide, 1);
  c.down = random_values(h, c.outputs * c.width, 0.5);
  c.dout = random_values(h, c.rows * c.outputs, 1);
  c.pre = host_values(h, c.rows * wide);
  c.activated = host_values(h, c.rows * c.width);
  c.out = host_values(h, c.rows * c.outputs);
  Tensor pre = poisoned(h, h->dtype, c.rows, wide), out = poisoned(h, h->dtype, c.rows, c.width);
  linear_forward(h->backend, (LinearForward){.out = out,
                                             .x = tensor_from(h, h->dtype, c.x, c.rows, c.inputs),
                                             .weight = tensor_from(h, h->dtype, c.up, wide, c.inputs),
                                             .bias = vector_from(h, h->dtype, c.bias, wide),
                                             .activation = ACTIVATION_SWIGLU,
                                             .pre_activation = pre});
  reference_linear(c.pre, c.x, c.up, false, c.bias, NULL, c.rows, c.inputs, wide);
  check_values(h, "gate and up", pre, c.pre, of_size(within(4, (double)c.inputs), 1));
  c.pre = values_of(h, pre); // as stored
  gated_objective(&c);
  check_values(h, "activation", out, c.activated, within(4, 1));
  for (int in_place = 0; in_place < 2; in_place++) {
    Tensor dx = in_place ? pre : poisoned(h, h->dtype, c.rows, wide);
    linear_backward_input(
        h->backend, (LinearBackwardInput){.dx = dx,
                                          .dout = tensor_from(h, h->dtype, c.dout, c.rows, c.outputs),
                                          .weight = tensor_from(h, h->dtype, c.down, c.outputs, c.width),
                                          .activation = ACTIVATION_SWIGLU,
                                          .pre_activation = pre,
                                          .dactivation = poisoned(h, h->dtype, c.rows, c.width)});
    check_gradient(h, "dx through SwiGLU", dx, NULL, c.pre, gated_objective, &c,
                   of_size(within_stored(h, 4, (double)c.outputs), 1));
  }
}

TEST(test_swiglu) {
  swiglu_case(*state, 5, 37, false);
  swiglu_case(*state, 5, 37, true);
  swiglu_case(*state, 1, 1, false);
}

// --- arguments that are refused ----------------------------------------------------------------------------

TEST(test_refusals) {
  Harness *h = *state;
  Backend *backend = h->backend;
  Dtype dtype = h->dtype;
  Tensor m34 = poisoned(h, dtype, 3, 4), m35 = poisoned(h, dtype, 3, 5), m54 = poisoned(h, dtype, 5, 4);
  Tensor v3 = poisoned_vector(h, DTYPE_F32, 3), v4 = poisoned_vector(h, dtype, 4),
         ids3 = poisoned_vector(h, DTYPE_I32, 3);
  Tensor gaps = poisoned_strided(h, dtype, 3, 4, 6), m38 = poisoned(h, dtype, 3, 8), none = {0};
  // something is missing, has the wrong shape, type or layout, or must not be there
  assert_fails(h, "linear_forward: x is missing",
               linear_forward(backend, (LinearForward){.out = m35, .weight = m54}));
  assert_fails(h, "x is fp32 [3] where [3, I] is needed",
               linear_forward(backend, (LinearForward){.out = m35, .x = v3, .weight = m54}));
  assert_fails(h, "where [5, 4] is needed",
               linear_forward(backend, (LinearForward){.out = m35, .x = m34, .weight = m35}));
  assert_fails(h, "int32 [3] where [5] is needed",
               linear_forward(backend, (LinearForward){.out = m35, .x = m34, .weight = m54, .bias = ids3}));
  assert_fails(h, "do not go together",
               linear_forward(backend, (LinearForward){.out = m35,
                                                       .x = m34,
                                                       .weight = m54,
                                                       .activation = ACTIVATION_GELU,
                                                       .pre_activation = m35,
                                                       .residual = m35}));
  assert_fails(h, "cannot be accumulated",
               linear_backward_input(backend, (LinearBackwardInput){.dx = m34,
                                                                    .dout = m35,
                                                                    .weight = m54,
                                                                    .activation = ACTIVATION_GELU,
                                                                    .pre_activation = m34,
                                                                    .accumulate = true}));
  assert_fails(h, "it is for a gated activation",
               linear_backward_input(backend, (LinearBackwardInput){.dx = m34,
                                                                    .dout = m35,
                                                                    .weight = m54,
                                                                    .activation = ACTIVATION_GELU,
                                                                    .pre_activation = m34,
                                                                    .dactivation = m34}));
  assert_fails(h, "dactivation is missing",
               linear_backward_input(backend, (LinearBackwardInput){.dx = m38,
                                                                    .dout = m35,
                                                                    .weight = m54,
                                                                    .activation = ACTIVATION_SWIGLU,
                                                                    .pre_activation = m38}));
  assert_fails(
      h, "dweight",
      linear_backward_weight(backend, (LinearBackwardWeight){.dweight = m34, .dout = m35, .x = m34}));
  assert_fails(h, "gaps between its rows",
               activation_forward(backend, (ActivationForward){ACTIVATION_GELU, .out = m34, .x = gaps}));
  assert_fails(h, "where [3, 8] is needed",
               activation_forward(backend, (ActivationForward){ACTIVATION_SWIGLU, .out = m34, .x = m35}));
  assert_fails(
      h, "pre_activation is missing",
      linear_forward(backend,
                     (LinearForward){.out = m35, .x = m34, .weight = m54, .activation = ACTIVATION_GELU}));
  assert_fails(
      h, "not whole sequences of 2",
      embedding_forward(backend,
                        (EmbeddingForward){.out = m34, .tokens = ids3, .token_weight = m54, .seq_len = 2}));
  assert_fails(h, "too few positions",
               embedding_forward(backend, (EmbeddingForward){.out = m34,
                                                             .tokens = ids3,
                                                             .token_weight = m54,
                                                             .position_weight = tensor_rows(m54, 0, 2),
                                                             .seq_len = 3}));
  assert_fails(
      h, "an RMS norm has no mean",
      norm_forward(
          backend,
          (NormForward){.kind = NORM_RMS, .out = m34, .mean = v3, .rstd = v3, .x = m34, .weight = v4}));
  assert_fails(h, "the same tensor",
               norm_backward(backend, (NormBackward){.kind = NORM_RMS,
                                                     .dx = m34,
                                                     .dweight = v4,
                                                     .dout = m34,
                                                     .x = m34,
                                                     .weight = v4,
                                                     .rstd = v3,
                                                     .accumulate_dx = true}));
  assert_fails(
      h, "[3, 5] where [3, 4] is needed",
      norm_forward(backend, (NormForward){.kind = NORM_RMS, .out = m35, .rstd = v3, .x = m35, .weight = v4}));
  assert_fails(h, "do not describe an attention",
               attention_forward(backend, (AttentionForward){
                                              .out = m34, .lse = m34, .qkv = m34, .shape = {1, 3, 3, 2, 1}}));
  assert_fails(h, "head_dim 1 is odd",
               rope(backend, (Rope){.qkv = m35, .cos_sin = m34, .shape = {1, 3, 3, 1, 1}}));
  assert_fails(
      h, "this is the forward pass alone",
      lce_logits_exp(backend,
                     (LceLogitsExp){.dx_raw = m34,
                                    .rows = {.row_sum = v3, .target_e = v3, .target_z = v3, .anchor = v3},
                                    .x = m34,
                                    .weight = m54,
                                    .targets = ids3}));
  assert_fails(h, "int64", read_targets(backend, (ReadTargets){.targets = ids3, .ids = v3, .vocab_size = 5}));
  assert_fails(h, "targets",
               read_targets(backend, (ReadTargets){.targets = v3, .ids = ids3, .vocab_size = 5}));
  assert_fails(h, "loss", read_targets(backend, (ReadTargets){.loss = v4, .ids = ids3, .vocab_size = 5}));
  assert_fails(h, "their rows differ", gather_rows(backend, (MoveRows){.out = m34, .x = m35, .rows = ids3}));
  assert_fails(
      h, "steps count from 1",
      adamw(backend,
            (AdamW){.weight = v3, .m = v3, .v = v3, .grad = v3, .grad_scale = tensor_rows(v3, 0, 1)}));
  assert_fails(h, "where fp32 or bf16 is needed",
               reduce(backend, (Reduce){.sum = tensor_rows(v3, 0, 1), .x = ids3}));
  assert_fails(h, "ranks: out is", all_reduce(backend, (Collective){.out = v4, .x = tensor_rows(v4, 0, 3)}));
  assert_fails(h, "t is missing", fill_zero(backend, none));
}

int main(void) {
  return run_on_backends();
}
