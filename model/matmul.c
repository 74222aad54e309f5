#include "model/pass.h"

static Fp8 transposed(Fp8 x) {
  return (Fp8){.codes = x.transposed, .transposed = x.codes, .amax = x.amax};
}

// Of a matrix of [rows, columns]: pushes amax where it is absent, and codes as requested.
static Fp8 push_fp8(const Pass *p, Fp8 fp8, int64_t columns, bool codes, bool transposed) {
  Memory *memory = &p->backend->memory;
  if (!tensor_exists(fp8.amax))
    fp8.amax = memory_push_1d(memory, "FP8 maximum", MEMORY_ACTIVATIONS, DTYPE_F32, 1);
  if (codes)
    fp8.codes = memory_push_2d(memory, "FP8 codes", MEMORY_ACTIVATIONS, DTYPE_E4M3, p->rows, columns);
  if (transposed)
    fp8.transposed =
        memory_push_2d(memory, "FP8 codes, transposed", MEMORY_ACTIVATIONS, DTYPE_E4M3, columns, p->rows);
  return fp8;
}

// The same, with the codes of x.
static Fp8 quantized(const Pass *p, Operand x, bool codes, bool transposed) {
  Fp8 fp8 = push_fp8(p, x.fp8, x.x.shape[1], codes, transposed);
  quantize(p->backend, (Quantize){.out = fp8, .x = x.x});
  return fp8;
}

bool operands_saved(const Pass *p) {
  return p->fp8 && p->recompute == RECOMPUTE_NONE;
}

void push_saved_operand(const Pass *p, Operand *operand, int64_t columns) {
  bool by_norm = !p->model->config.post_norm;
  if (operands_saved(p)) operand->fp8 = push_fp8(p, (Fp8){.amax_known = by_norm}, columns, false, true);
}

void push_maximum(const Pass *p, Operand *operand) {
  if (p->fp8) operand->fp8 = push_fp8(p, (Fp8){.amax_known = true}, 0, false, false);
}

// The codes take half of the tensor's memory or less, the transposed ones, where they are not saved, as much.
void push_activation_operand(const Pass *p, Operand *operand) {
  int64_t columns = p->model->config.intermediate_size;
  operand->x = push_activation(p, "mlp activation", columns);
  if (!p->fp8) return;
  uint8_t *bytes = operand->x.data;
  if (!operands_saved(p)) {
    push_maximum(p, operand);
    operand->fp8.transposed = tensor_2d(bytes + p->rows * columns, DTYPE_E4M3, columns, p->rows);
  }
  operand->fp8.codes = tensor_2d(bytes, DTYPE_E4M3, p->rows, columns);
}

static void project_fp8(const Pass *p, Tensor out, Operand x, const WeightAndBias *w, Tensor residual) {
  MemoryMark mark = memory_mark(&p->backend->memory);
  Fp8 weight = w->weight.fp8;
  Fp8 in = tensor_exists(x.fp8.codes) ? x.fp8 : quantized(p, x, true, false);
  matmul_fp8(p->backend, (MatmulFp8){.out = out,
                                     .a = in,
                                     .b = p->model->config.in_out_layout ? transposed(weight) : weight,
                                     .bias = w->bias.value,
                                     .residual = residual});
  memory_pop_to(&p->backend->memory, mark);
}

static LinearForward linear_of(const Pass *p, Tensor out, Tensor x, const WeightAndBias *w) {
  return (LinearForward){.out = out,
                         .x = x,
                         .weight = w->weight.value,
                         .in_out_layout = p->model->config.in_out_layout,
                         .bias = w->bias.value};
}

void project(const Pass *p, Tensor out, Operand x, const WeightAndBias *w, Tensor residual) {
  if (p->fp8) {
    project_fp8(p, out, x, w, residual);
    return;
  }
  LinearForward linear = linear_of(p, out, x.x, w);
  linear.residual = residual;
  linear_forward(p->backend, linear);
}

void project_outputs(const Pass *p, Tensor out, Operand x, const WeightAndBias *w, int64_t first,
                     int64_t count) {
  const Fp8 *fp8 = &w->weight.fp8;
  WeightAndBias part = {.weight.value = tensor_rows(w->weight.value, first, count),
                        .weight.fp8 = {.codes = tensor_rows(fp8->codes, first, count), .amax = fp8->amax},
                        .bias.value = tensor_rows(w->bias.value, first, count)};
  project(p, out, x, &part, none);
}

void activate(const Pass *p, Operand out, Tensor pre_activation) {
  activation_forward(p->backend, (ActivationForward){.activation = p->model->config.activation,
                                                     .out = p->fp8 ? none : out.x,
                                                     .x = pre_activation,
                                                     .fp8 = out.fp8});
}

void project_activated(const Pass *p, Operand out, Tensor pre_activation, Operand x, const WeightAndBias *w) {
  if (p->fp8) {
    project_fp8(p, pre_activation, x, w, none);
    activate(p, out, pre_activation);
    return;
  }
  LinearForward linear = linear_of(p, out.x, x.x, w);
  linear.activation = p->model->config.activation;
  linear.pre_activation = pre_activation;
  linear_forward(p->backend, linear);
}

static void project_backward_fp8(const Pass *p, Tensor dx, Operand dout, Operand x, const Weight *weight,
                                 Tensor dbias, bool accumulate_dx) {
  MemoryMark mark = memory_mark(&p->backend->memory);
  bool in_out_layout = p->model->config.in_out_layout;
  Fp8 d = tensor_exists(dout.fp8.codes) ? dout.fp8 : quantized(p, dout, true, true);
  Fp8 in = tensor_exists(x.fp8.transposed) ? x.fp8 : quantized(p, x, false, true);
  Fp8 rows = in_out_layout ? in : d, columns = in_out_layout ? d : in; // of the weight
  matmul_fp8(p->backend, (MatmulFp8){.out = weight->grad,
                                     .a = transposed(rows),
                                     .b = transposed(columns),
                                     .residual = p->accumulate ? weight->grad : none});
  if (tensor_exists(dbias))
    sum_columns(p->backend, (SumColumns){.sum = dbias, .x = dout.x, .accumulate = p->accumulate});
  matmul_fp8(p->backend, (MatmulFp8){.out = dx,
                                     .a = d,
                                     .b = in_out_layout ? weight->fp8 : transposed(weight->fp8),
                                     .residual = accumulate_dx ? dx : none});
  memory_pop_to(&p->backend->memory, mark);
}

// The gradients of weight, bias and input; `input` has all but the weight.
static void linear_backward(const Pass *p, LinearBackwardInput input, Tensor x, const Weight *weight,
                            Tensor dbias) {
  input.weight = weight->value;
  input.in_out_layout = p->model->config.in_out_layout;
  linear_backward_weight(p->backend, (LinearBackwardWeight){.dweight = weight->grad,
                                                            .dbias = dbias,
                                                            .dout = input.dout,
                                                            .x = x,
                                                            .in_out_layout = input.in_out_layout,
                                                            .accumulate = p->accumulate});
  linear_backward_input(p->backend, input);
}

void project_backward(const Pass *p, Tensor dx, Operand dout, Operand x, const Weight *weight, Tensor dbias,
                      bool accumulate_dx) {
  if (p->fp8) {
    project_backward_fp8(p, dx, dout, x, weight, dbias, accumulate_dx);
    return;
  }
  LinearBackwardInput input = {.dx = dx, .dout = dout.x, .accumulate = accumulate_dx};
  linear_backward(p, input, x.x, weight, dbias);
}

Operand project_activated_backward(const Pass *p, Operand dout, Operand x, Tensor pre_activation,
                                   const Weight *weight) {
  bool gated = is_gated(p->model->config.activation);
  Operand dpre = {.x = gated ? pre_activation : x.x};
  if (!p->fp8) {
    LinearBackwardInput input = {.dx = dpre.x,
                                 .dout = dout.x,
                                 .activation = p->model->config.activation,
                                 .pre_activation = pre_activation,
                                 .dactivation = gated ? x.x : none};
    linear_backward(p, input, x.x, weight, none);
    return dpre;
  }
  project_backward_fp8(p, x.x, dout, x, weight, none, false);
  if (gated) dpre.x = none; // GELU's is for the bias
  dpre.fp8 = push_fp8(p, dpre.fp8, pre_activation.shape[1], true, true);
  activation_backward(p->backend, (ActivationBackward){.activation = p->model->config.activation,
                                                       .dx = dpre.x,
                                                       .dout = x.x,
                                                       .x = pre_activation,
                                                       .fp8 = dpre.fp8});
  return dpre;
}
