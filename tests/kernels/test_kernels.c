// Every operation against float64: forward results against tests/reference.c, gradients against finite
// differences, on shapes that nothing divides, with outputs that hold NaN beforehand. Runs on every
// backend of this build and machine.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness.h"
#include "tests/reference.h"

static double *copy_of(Harness *h, const double *values, int64_t count) {
  double *copy = host_values(h, count);
  memcpy(copy, values, (size_t)count * sizeof *copy);
  return copy;
}

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

static void test_embedding(void **state) {
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

static void norm_case(Harness *h, NormKind kind, int64_t rows, int64_t hidden, bool accumulate) {
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
  double *dx_before = random_values(h, rows * hidden, 1), *before = random_values(h, 2 * hidden, 1);
  Tensor dx = poisoned(h, h->dtype, rows, hidden), dweight = poisoned_vector(h, DTYPE_F32, hidden),
         dbias = {0};
  if (layer) dbias = poisoned_vector(h, DTYPE_F32, hidden);
  if (accumulate) {
    dx = tensor_from(h, h->dtype, dx_before, rows, hidden);
    dweight = vector_from(h, DTYPE_F32, before, hidden);
    if (layer) dbias = vector_from(h, DTYPE_F32, before + hidden, hidden);
  }
  norm_backward(h->backend, (NormBackward){.kind = kind,
                                           .dx = dx,
                                           .dweight = dweight,
                                           .dbias = dbias,
                                           .dout = dout,
                                           .x = x,
                                           .weight = weight,
                                           .mean = mean,
                                           .rstd = rstd,
                                           .accumulate_dx = accumulate,
                                           .accumulate = accumulate});
  // The statistics saved by the forward pass are fp32, so an error of theirs passes through every term.
  Tolerance gradient = of_size(within(16, (double)hidden), 1);
  Tolerance sums = of_size(within(8, (double)(rows + hidden)), 1);
  check_gradient(h, "norm dx", dx, accumulate ? dx_before : NULL, c.x, norm_objective, &c, gradient);
  check_gradient(h, "norm dweight", dweight, accumulate ? before : NULL, c.weight, norm_objective, &c, sums);
  if (layer)
    check_gradient(h, "norm dbias", dbias, accumulate ? before + hidden : NULL, c.bias, norm_objective, &c,
                   sums);
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

static void test_norm(void **state) {
  for (int kind = NORM_LAYER; kind <= NORM_RMS; kind++) {
    norm_case(*state, kind, 7, 13, false);
    norm_case(*state, kind, 7, 13, true);
    norm_case(*state, kind, 1, 5, false);
    norm_case(*state, kind, 131, 257, true);
    norm_case(*state, kind, 3, 1031, false);
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

static void test_linear_forward(void **state) {
  each_linear_shape(*state, linear_forward_variants);
}

static void test_linear_backward(void **state) {
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

static void test_gelu(void **state) {
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
  gelu_forward(h->backend, (GeluForward){.out = activated, .x = pre});
  linear_backward_input(
      h->backend, (LinearBackwardInput){.dx = dx, .dout = dout, .weight = weight, .pre_activation = pre});
  Tensor apart = poisoned(h, h->dtype, c.rows, c.inputs);
  linear_backward_input(h->backend, (LinearBackwardInput){.dx = apart, .dout = dout, .weight = weight});
  gelu_backward(h->backend, (GeluBackward){.dx = apart, .dout = apart, .x = pre});
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
  swiglu_forward(h->backend, (SwigluForward){.out = out, .gate_up = gate_up, .amax = amax});
  swiglu_backward(h->backend,
                  (SwigluBackward){.dgate_up = dgate_up, .dout = dout, .gate_up = gate_up, .amax = damax});
  check_amax(h, amax, out);
  check_amax(h, damax, dgate_up);
  swiglu_objective(&c);
  check_values(h, "swiglu", out, c.out, within(4, 1));
  check_gradient(h, "dgate_up", dgate_up, NULL, c.gate_up, swiglu_objective, &c, of_size(within(8, 1), 1));
}

static void test_swiglu(void **state) {
  swiglu_case(*state, 5, 37, false);
  swiglu_case(*state, 5, 37, true);
  swiglu_case(*state, 1, 1, false);
}

// --- attention ---------------------------------------------------------------------------------------------

static int64_t qkv_width(AttentionShape s) {
  return (s.num_heads + 2 * s.num_key_value_heads) * s.head_dim;
}

static void rope_case(Harness *h, AttentionShape s) {
  int64_t rows = s.batch * s.seq_len, count = rows * qkv_width(s), table_rows = s.seq_len + 2;
  double *qkv = random_values(h, count, 1), *table = host_values(h, table_rows * s.head_dim);
  for (int64_t t = 0; t < table_rows; t++)
    for (int64_t i = 0; i < s.head_dim / 2; i++) {
      double angle = (double)t * pow(10000, -2.0 * (double)i / (double)s.head_dim);
      table[t * s.head_dim + i] = cos(angle);
      table[t * s.head_dim + s.head_dim / 2 + i] = sin(angle);
    }
  Tensor cos_sin = tensor_from(h, DTYPE_F32, table, table_rows, s.head_dim);
  Tensor turned = tensor_from(h, h->dtype, qkv, rows, qkv_width(s));
  double *original = copy_of(h, qkv, count);
  rope(h->backend, (Rope){.qkv = turned, .cos_sin = cos_sin, .shape = s});
  reference_rope(qkv, table, s, false);
  check_values(h, "rope", turned, qkv, of_size(within(2, 2), 1));
  // A rotation's gradient is the rotation back, so the way back is all that the backward pass has to be.
  rope(h->backend, (Rope){.qkv = turned, .cos_sin = cos_sin, .shape = s, .inverse = true});
  check_values(h, "rope and back", turned, original, of_size(within_stored(h, 2, 4), 1));
}

static void test_rope(void **state) {
  rope_case(*state, (AttentionShape){2, 7, 4, 2, 6});
  rope_case(*state, (AttentionShape){1, 1, 1, 1, 2});
  rope_case(*state, (AttentionShape){1, 5, 3, 1, 64});
}

typedef struct {
  AttentionShape shape;
  double *qkv, *out, *lse, *dout;
} AttentionCase;

static double attention_objective(void *context) {
  AttentionCase *c = context;
  reference_attention(c->out, c->lse, c->qkv, c->shape);
  AttentionShape s = c->shape;
  return reference_dot(c->out, c->dout, s.batch * s.seq_len * s.num_heads * s.head_dim);
}

static void attention_case(Harness *h, AttentionShape s) {
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim;
  AttentionCase c = {.shape = s};
  c.qkv = random_values(h, rows * qkv_width(s), 1.5);
  c.out = host_values(h, rows * width);
  c.lse = host_values(h, s.batch * s.num_heads * s.seq_len);
  c.dout = random_values(h, rows * width, 1);
  Tensor qkv = tensor_from(h, h->dtype, c.qkv, rows, qkv_width(s));
  Tensor dout = tensor_from(h, h->dtype, c.dout, rows, width);
  Tensor out = poisoned(h, h->dtype, rows, width), dqkv = poisoned(h, h->dtype, rows, qkv_width(s));
  Tensor lse = poisoned(h, DTYPE_F32, s.batch, s.num_heads * s.seq_len);
  attention_forward(h->backend, (AttentionForward){.out = out, .lse = lse, .qkv = qkv, .shape = s});
  attention_backward(
      h->backend,
      (AttentionBackward){.dqkv = dqkv, .dout = dout, .out = out, .lse = lse, .qkv = qkv, .shape = s});
  attention_objective(&c);
  // Scores are sums of D terms, and their error multiplies the exponentials; then T of those are summed.
  double terms = (double)(s.head_dim + s.seq_len);
  check_values(h, "attention out", out, c.out, of_size(within_stored(h, 8, terms), 1));
  check_values(h, "attention lse", lse, c.lse, of_size(within(8, terms), 1));
  check_gradient(h, "dqkv", dqkv, NULL, c.qkv, attention_objective, &c,
                 of_size(within_stored(h, 16, terms), 1));
}

static void test_attention(void **state) {
  const AttentionShape shapes[] = {
      {1, 1, 1, 1, 1},  {2, 7, 2, 2, 6},   {1, 1, 3, 1, 64},   {3, 5, 4, 2, 2},    {1, 64, 2, 1, 10},
      {1, 65, 1, 1, 2}, {2, 67, 6, 2, 10}, {1, 131, 2, 1, 64}, {1, 70, 1, 1, 128},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    attention_case(*state, shapes[i]);
    harness_pop(state);
  }
}

// Decoding in pieces of any length gives the rows that attending to the whole sequence gives.
static void decode_case(Harness *h, AttentionShape s, int64_t capacity, const int64_t *pieces) {
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim, packed = qkv_width(s);
  double *qkv = random_values(h, rows * packed, 1.5), *want = host_values(h, rows * width);
  tensor_from(h, h->dtype, qkv, rows, packed); // rounds the values
  reference_attention(want, NULL, qkv, s);
  Tensor keys = poisoned(h, h->dtype, s.batch * s.num_key_value_heads, capacity * s.head_dim);
  Tensor values = poisoned(h, h->dtype, s.batch * s.num_key_value_heads, capacity * s.head_dim);
  for (int64_t past = 0; past < s.seq_len; past += *pieces++) {
    int64_t count = *pieces;
    double *part = host_values(h, s.batch * count * packed),
           *want_part = host_values(h, s.batch * count * width);
    for (int64_t b = 0; b < s.batch; b++) {
      int64_t first = b * s.seq_len + past;
      memcpy(part + b * count * packed, qkv + first * packed, (size_t)(count * packed) * sizeof *part);
      memcpy(want_part + b * count * width, want + first * width, (size_t)(count * width) * sizeof *part);
    }
    AttentionShape step = s;
    step.seq_len = count;
    Tensor out = poisoned(h, h->dtype, s.batch * count, width);
    attention_decode(h->backend,
                     (AttentionDecode){.out = out,
                                       .keys = keys,
                                       .values = values,
                                       .qkv = tensor_from(h, h->dtype, part, s.batch * count, packed),
                                       .shape = step,
                                       .past = past});
    check_values(h, "decoded attention", out, want_part,
                 of_size(within_stored(h, 8, (double)(s.head_dim + s.seq_len)), 1));
  }
}

static void test_attention_decode(void **state) {
  decode_case(*state, (AttentionShape){1, 1, 1, 1, 2}, 1, (const int64_t[]){1});
  decode_case(*state, (AttentionShape){2, 9, 4, 2, 6}, 11, (const int64_t[]){5, 1, 1, 2});
  decode_case(*state, (AttentionShape){3, 131, 6, 3, 64}, 131, (const int64_t[]){67, 1, 63});
}

// --- packed documents --------------------------------------------------------------------------------------

// Sequences that are cut into documents of these lengths, up to 0, give what their documents alone give.
static void documents_case(Harness *h, AttentionShape s, const int64_t *lengths) {
  enum { HIDDEN = 8 };
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim, qkv_columns = qkv_width(s), first = 0;
  int32_t *before_and_after = random_ids(h, 2 * rows, 1);
  for (int64_t b = 0; b < s.batch; b++)
    for (const int64_t *length = lengths; *length; first += *length++)
      for (int64_t i = 0; i < *length; i++) {
        before_and_after[first + i] = (int32_t)i;
        before_and_after[rows + first + i] = (int32_t)(*length - 1 - i);
      }
  assert_int_equal(first, rows);
  Tensor documents = tensor_reshape_2d(ids_from(h, before_and_after, 2 * rows), 2, rows);
  Tensor positions = tensor_flat(tensor_rows(documents, 0, 1));
  double *qkv_values = random_values(h, rows * qkv_columns, 1.5);
  Tensor cos_sin =
      tensor_from(h, DTYPE_F32, random_values(h, s.seq_len * s.head_dim, 1), s.seq_len, s.head_dim);
  Tensor dout = tensor_from(h, h->dtype, random_values(h, rows * width, 1), rows, width);
  Tensor tokens = ids_from(h, random_ids(h, rows, 5), rows);
  Tensor table = tensor_from(h, h->dtype, random_values(h, 5 * HIDDEN, 1), 5, HIDDEN);
  Tensor table2 = tensor_from(h, h->dtype, random_values(h, s.seq_len * HIDDEN, 1), s.seq_len, HIDDEN);
  Tensor dstream = tensor_from(h, h->dtype, random_values(h, rows * HIDDEN, 1), rows, HIDDEN);
  Tensor qkv[2], out[2], dqkv[2], stream[2], dpositions[2], dtable = poisoned(h, DTYPE_F32, 5, HIDDEN);
  for (int alone = 0; alone < 2; alone++) {
    qkv[alone] = tensor_from(h, h->dtype, qkv_values, rows, qkv_columns);
    out[alone] = poisoned(h, h->dtype, rows, width);
    dqkv[alone] = poisoned(h, h->dtype, rows, qkv_columns);
    stream[alone] = poisoned(h, h->dtype, rows, HIDDEN);
    dpositions[alone] = poisoned(h, DTYPE_F32, s.seq_len, HIDDEN);
    const int64_t *length = alone ? lengths : &rows;
    for (int64_t at = 0; at < rows; at += *length++) {
      if (!*length) length = lengths;
      AttentionShape shape = s;
      if (alone) shape.batch = 1, shape.seq_len = *length;
      Tensor part = tensor_rows(qkv[alone], at, *length), part_out = tensor_rows(out[alone], at, *length);
      Tensor lse = poisoned(h, DTYPE_F32, shape.batch, s.num_heads * shape.seq_len), none = {0};
      Tensor places = alone ? none : positions, cuts = alone ? none : documents;
      rope(h->backend, (Rope){.qkv = part, .cos_sin = cos_sin, .positions = places, .shape = shape});
      attention_forward(
          h->backend,
          (AttentionForward){.out = part_out, .lse = lse, .qkv = part, .documents = cuts, .shape = shape});
      attention_backward(h->backend, (AttentionBackward){.dqkv = tensor_rows(dqkv[alone], at, *length),
                                                         .dout = tensor_rows(dout, at, *length),
                                                         .out = part_out,
                                                         .lse = lse,
                                                         .qkv = part,
                                                         .documents = cuts,
                                                         .shape = shape});
      embedding_forward(h->backend, (EmbeddingForward){.out = tensor_rows(stream[alone], at, *length),
                                                       .tokens = tensor_rows(tokens, at, *length),
                                                       .token_weight = table,
                                                       .position_weight = table2,
                                                       .positions = places,
                                                       .seq_len = shape.seq_len});
      embedding_backward(h->backend, (EmbeddingBackward){.dtoken_weight = dtable,
                                                         .dposition_weight = dpositions[alone],
                                                         .dout = tensor_rows(dstream, at, *length),
                                                         .tokens = tensor_rows(tokens, at, *length),
                                                         .positions = places,
                                                         .seq_len = shape.seq_len,
                                                         .accumulate_position = at > 0});
    }
  }
  check_bitwise_equal(h, "rope of documents", qkv[0], qkv[1]);
  check_bitwise_equal(h, "embeddings of documents", stream[0], stream[1]);
  Tolerance tolerance = of_size(within_stored(h, 16, (double)(s.head_dim + s.seq_len)), 1);
  check_values(h, "attention of documents", out[0], values_of(h, out[1]), tolerance);
  check_values(h, "dqkv of documents", dqkv[0], values_of(h, dqkv[1]), tolerance);
  check_values(h, "dposition_weight of documents", dpositions[0], values_of(h, dpositions[1]),
               of_size(within(4, (double)rows), 1));
  harness_pop((void **)&h);
}

static void test_documents(void **state) {
  documents_case(*state, (AttentionShape){2, 7, 2, 1, 6}, (const int64_t[]){1, 4, 2, 0});
  documents_case(*state, (AttentionShape){1, 9, 1, 1, 2}, (const int64_t[]){9, 0});
  documents_case(*state, (AttentionShape){3, 200, 4, 2, 64}, (const int64_t[]){64, 1, 63, 1, 1, 70, 0});
  documents_case(*state, (AttentionShape){1, 333, 2, 2, 128}, (const int64_t[]){1, 65, 128, 100, 39, 0});
}

// --- rows --------------------------------------------------------------------------------------------------

static void test_rows(void **state) {
  Harness *h = *state;
  const int32_t picks[] = {10, 0, 7, 3};
  double *x = random_values(h, 11 * 5, 1), *want = host_values(h, 4 * 5),
         *spread = random_values(h, 11 * 5, 1);
  for (int i = 0; i < 4; i++) memcpy(want + i * 5, x + picks[i] * 5, 5 * sizeof *want);
  Tensor rows = ids_from(h, picks, 4), source = tensor_from(h, h->dtype, x, 11, 5);
  Tensor out = poisoned(h, h->dtype, 4, 5), target = tensor_from(h, h->dtype, spread, 11, 5);
  gather_rows(h->backend, (MoveRows){.out = out, .x = source, .rows = rows});
  // x was rounded when it went to the device, want was copied before
  for (int i = 0; i < 4; i++) memcpy(want + i * 5, x + picks[i] * 5, 5 * sizeof *want);
  check_values(h, "gather", out, want, within(0, 1));
  scatter_rows(h->backend, (MoveRows){.out = target, .x = out, .rows = rows});
  for (int i = 0; i < 4; i++) memcpy(spread + picks[i] * 5, x + picks[i] * 5, 5 * sizeof *want);
  check_values(h, "scatter", target, spread, within(0, 1));

  int32_t *ids = random_ids(h, 11, 1000);
  Tensor all = ids_from(h, ids, 11), few = poisoned_vector(h, DTYPE_I32, 4);
  gather_rows(h->backend, (MoveRows){.out = few, .x = all, .rows = rows});
  double *got = values_of(h, few);
  for (int i = 0; i < 4; i++) assert_true(got[i] == ids[picks[i]]);
}

static void test_read_targets(void **state) {
  Harness *h = *state;
  enum { TOKENS = 300, VOCAB = 7 };
  // Of the wide ones two are wrong only above their lower 32 bits.
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

// --- the optimizer -----------------------------------------------------------------------------------------

static void adamw_case(Harness *h, int64_t count, bool with_master) {
  double *weight = random_values(h, count, 1), *m = random_values(h, count, 0.1);
  double *v = random_values(h, count, 0.1), *grad = random_values(h, count, 1), scale[] = {0.5};
  for (int64_t i = 0; i < count; i++) v[i] *= v[i];
  grad[0] = m[0] = v[0] = 0; // 0 / (sqrt(0) + epsilon)
  Tensor master = with_master ? vector_from(h, DTYPE_F32, weight, count) : (Tensor){0};
  // Without a master the weight is the only copy: compare in fp32, where nothing is rounded at random.
  Dtype weight_dtype = with_master ? h->dtype : DTYPE_F32;
  double *rounded = copy_of(h, weight, count);
  AdamW a = {.weight = vector_from(h, weight_dtype, rounded, count),
             .master = master,
             .m = vector_from(h, DTYPE_F32, m, count),
             .v = vector_from(h, DTYPE_F32, v, count),
             .grad = vector_from(h, DTYPE_F32, grad, count),
             .grad_scale = vector_from(h, DTYPE_F32, scale, 1),
             .lr = 1e-2f,
             .beta1 = 0.9f,
             .beta2 = 0.95f,
             .epsilon = 1e-8f,
             .weight_decay = 0.1f,
             .seed = 1};
  if (!with_master) weight = rounded;
  for (int step = 1; step <= 3; step++) {
    a.step = step;
    adamw(h->backend, a);
    reference_adamw(weight, m, v, grad, count, scale[0], 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step);
  }
  check_values(h, "adamw m", a.m, m, of_size(within(4, 3), 1));
  check_values(h, "adamw v", a.v, v, of_size(within(4, 3), 1));
  check_values(h, "adamw weight", a.weight, weight, of_size(within(16, 3), 1));
  if (with_master) check_values(h, "adamw master", a.master, weight, of_size(within(16, 3), 1));
}

static void test_adamw(void **state) {
  adamw_case(*state, 1, false);
  adamw_case(*state, 1013, false);
  adamw_case(*state, 1013, true);
}

static double scalar(Harness *h, Tensor t) {
  return values_of(h, t)[0];
}

static void reduce_case(Harness *h, int64_t count, bool squares) {
  double *x = random_values(h, count, 1), start[] = {3.5}, want = 0, size = 0;
  Tensor data = vector_from(h, h->dtype, x, count), sum = poisoned_vector(h, DTYPE_F32, 1);
  for (int64_t i = 0; i < count; i++) {
    double term = squares ? x[i] * x[i] : x[i];
    want += term;
    size += fabs(term);
  }
  reduce(h->backend, (Reduce){.sum = sum, .x = data, .squares = squares});
  double tolerance =
      4 * dtype_epsilon(DTYPE_F32) * sqrt((double)count) / (double)count * size + 1e-7 * fabs(want);
  assert_true(fabs(scalar(h, sum) - want) <= tolerance);
  Tensor added = vector_from(h, DTYPE_F32, start, 1);
  reduce(h->backend, (Reduce){.sum = added, .x = data, .squares = squares, .accumulate = true});
  assert_true(fabs(scalar(h, added) - (want + 3.5)) <= tolerance + 1e-6);
}

static void test_reduce(void **state) {
  const int64_t counts[] = {1, 2, 1009, 32768, 100003};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    for (int squares = 0; squares < 2; squares++) reduce_case(*state, counts[i], squares);
}

static void clip_case(Harness *h, double square, float max_norm, double norm, double scale) {
  ClipScale a = {.norm = poisoned_vector(h, DTYPE_F32, 1),
                 .scale = poisoned_vector(h, DTYPE_F32, 1),
                 .sum_of_squares = vector_from(h, DTYPE_F32, &square, 1),
                 .max_norm = max_norm};
  clip_scale(h->backend, a);
  check_values(h, "norm", a.norm, &norm, within(2, 1));
  check_values(h, "clip scale", a.scale, &scale, within(2, 1));
}

// From every dtype to every other, in place too, in pieces of 8 elements and one by one.
static void test_scale_by(void **state) {
  Harness *h = *state;
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

static void test_clip_scale(void **state) {
  clip_case(*state, 16, 1, 4, 0.25);
  clip_case(*state, 16, 8, 4, 1);
  clip_case(*state, 16, 0, 4, 1);
  clip_case(*state, 0, 1, 0, 1);
  clip_case(*state, (double)INFINITY, 1, (double)INFINITY, (double)NAN);
  clip_case(*state, (double)NAN, 1, (double)NAN, (double)NAN);
}

// --- copies, collectives of one rank, what the system says -------------------------------------------------

static void test_copies(void **state) {
  Harness *h = *state;
  double *x = random_values(h, 1009, 1), *zeros = host_values(h, 1009);
  Tensor a = vector_from(h, DTYPE_F32, x, 1009), b = poisoned_vector(h, DTYPE_F32, 1009);
  void (*const collectives[])(Backend *, Collective) = {all_reduce, reduce_scatter, all_gather, broadcast};
  for (int i = 0; i < 4 && h->backend->ranks == 1; i++) {
    collectives[i](h->backend, (Collective){.out = b, .x = a});
    check_bitwise_equal(h, "collective of one rank", a, b);
    collectives[i](h->backend, (Collective){.out = a, .x = a});
    check_bitwise_equal(h, "collective in place", a, b);
    fill_zero(h->backend, b);
    check_values(h, "fill_zero", b, zeros, within(0, 1));
  }
}

static void test_system_memory(void **state) {
  Harness *h = *state;
  Backend *backend = h->backend;
  if (strcmp(backend->name, "cpu")) return;
  enum { BYTES = 64 << 20 };
  backend->ops->device_peak_reset(backend);
  size_t before = backend->ops->device_bytes_now(backend);
  const MemorySource *source = &backend->memory.source;
  char *block = source->allocate(source->context, BYTES);
  for (size_t i = 0; i < BYTES; i++) assert_true(block[i] == 0);
  memset(block, 1, BYTES);
  assert_true(backend->ops->device_bytes_now(backend) >= before + BYTES / 2);
  source->release(source->context, block, BYTES);
  assert_true(backend->ops->device_bytes_now(backend) < before + BYTES / 2);
  assert_true(backend->ops->device_bytes_peak(backend) >= before + BYTES / 2);
  assert_true(backend->device_overhead > 0 && backend->device_capacity > backend->device_overhead);
}

// --- arguments that are refused ----------------------------------------------------------------------------

static void test_refusals(void **state) {
  Harness *h = *state;
  Backend *backend = h->backend;
  Dtype dtype = h->dtype;
  Tensor m34 = poisoned(h, dtype, 3, 4), m35 = poisoned(h, dtype, 3, 5), m54 = poisoned(h, dtype, 5, 4);
  Tensor v3 = poisoned_vector(h, DTYPE_F32, 3), v4 = poisoned_vector(h, dtype, 4),
         ids3 = poisoned_vector(h, DTYPE_I32, 3);
  Tensor gaps = poisoned_strided(h, dtype, 3, 4, 6), none = {0};
  // something is missing, has the wrong shape, type or layout, or must not be there
  assert_fails(h, "linear_forward: x is missing",
               linear_forward(backend, (LinearForward){.out = m35, .weight = m54}));
  assert_fails(h, "x is fp32 [3] where [3, I] is needed",
               linear_forward(backend, (LinearForward){.out = m35, .x = v3, .weight = m54}));
  assert_fails(h, "where [5, 4] is needed",
               linear_forward(backend, (LinearForward){.out = m35, .x = m34, .weight = m35}));
  assert_fails(h, "int32 [3] where [5] is needed",
               linear_forward(backend, (LinearForward){.out = m35, .x = m34, .weight = m54, .bias = ids3}));
  assert_fails(
      h, "do not go together",
      linear_forward(
          backend,
          (LinearForward){.out = m35, .x = m34, .weight = m54, .pre_activation = m35, .residual = m35}));
  assert_fails(
      h, "cannot be accumulated",
      linear_backward_input(
          backend, (LinearBackwardInput){
                       .dx = m34, .dout = m35, .weight = m54, .pre_activation = m34, .accumulate = true}));
  assert_fails(
      h, "dweight",
      linear_backward_weight(backend, (LinearBackwardWeight){.dweight = m34, .dout = m35, .x = m34}));
  assert_fails(h, "gaps between its rows", gelu_forward(backend, (GeluForward){.out = m34, .x = gaps}));
  assert_fails(h, "does not split in two",
               swiglu_forward(backend, (SwigluForward){.out = m34, .gate_up = m35}));
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

// --- the same bits again, and CBLAS against loops ----------------------------------------------------------

static void test_bitwise_repeatable(void **state) {
  Harness *h = *state;
  AttentionShape s = {2, 97, 4, 2, 16};
  int64_t rows = s.batch * s.seq_len, width = s.num_heads * s.head_dim;
  Tensor qkv = tensor_from(h, h->dtype, random_values(h, rows * qkv_width(s), 1), rows, qkv_width(s));
  Tensor dout = tensor_from(h, h->dtype, random_values(h, rows * width, 1), rows, width);
  Tensor out[2], lse[2], dqkv[2], dweight[2], dtoken[2];
  Tensor tokens = ids_from(h, random_ids(h, rows, 5), rows);
  for (int i = 0; i < 2; i++) {
    out[i] = poisoned(h, h->dtype, rows, width);
    lse[i] = poisoned(h, DTYPE_F32, s.batch, s.num_heads * s.seq_len);
    dqkv[i] = poisoned(h, h->dtype, rows, qkv_width(s));
    dweight[i] = poisoned(h, DTYPE_F32, qkv_width(s), width);
    dtoken[i] = poisoned(h, DTYPE_F32, 5, width);
    attention_forward(h->backend, (AttentionForward){.out = out[i], .lse = lse[i], .qkv = qkv, .shape = s});
    attention_backward(
        h->backend, (AttentionBackward){
                        .dqkv = dqkv[i], .dout = dout, .out = out[i], .lse = lse[i], .qkv = qkv, .shape = s});
    linear_backward_weight(h->backend,
                           (LinearBackwardWeight){.dweight = dweight[i], .dout = qkv, .x = out[i]});
    embedding_backward(h->backend,
                       (EmbeddingBackward){
                           .dtoken_weight = dtoken[i], .dout = dout, .tokens = tokens, .seq_len = s.seq_len});
  }
  check_bitwise_equal(h, "attention out", out[0], out[1]);
  check_bitwise_equal(h, "dqkv", dqkv[0], dqkv[1]);
  check_bitwise_equal(h, "dweight", dweight[0], dweight[1]);
  check_bitwise_equal(h, "dtoken_weight", dtoken[0], dtoken[1]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_embedding, harness_pop),
      cmocka_unit_test_teardown(test_norm, harness_pop),
      cmocka_unit_test_teardown(test_linear_forward, harness_pop),
      cmocka_unit_test_teardown(test_linear_backward, harness_pop),
      cmocka_unit_test_teardown(test_gelu, harness_pop),
      cmocka_unit_test_teardown(test_swiglu, harness_pop),
      cmocka_unit_test_teardown(test_rope, harness_pop),
      cmocka_unit_test_teardown(test_attention, harness_pop),
      cmocka_unit_test_teardown(test_attention_decode, harness_pop),
      cmocka_unit_test_teardown(test_documents, harness_pop),
      cmocka_unit_test_teardown(test_rows, harness_pop),
      cmocka_unit_test_teardown(test_read_targets, harness_pop),
      cmocka_unit_test_teardown(test_adamw, harness_pop),
      cmocka_unit_test_teardown(test_reduce, harness_pop),
      cmocka_unit_test_teardown(test_scale_by, harness_pop),
      cmocka_unit_test_teardown(test_clip_scale, harness_pop),
      cmocka_unit_test_teardown(test_copies, harness_pop),
      cmocka_unit_test_teardown(test_system_memory, harness_pop),
      cmocka_unit_test_teardown(test_refusals, harness_pop),
      cmocka_unit_test_teardown(test_bitwise_repeatable, harness_pop),
  };
  return run_on_backends(tests, sizeof tests / sizeof *tests);
}
