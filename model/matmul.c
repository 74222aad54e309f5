// The matmuls of a layer and their gradients, in the backend's dtype; fp8.c has the FP8 ones.
#include "model/fp8.h"

static LinearForward linear_of(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w) {
  return (LinearForward){.out = out,
                         .x = x->x,
                         .weight = w->weight.value,
                         .in_out_layout = p->model->config.in_out_layout,
                         .bias = w->bias.value};
}

void project(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w, Tensor residual) {
  if (fp8_used(p)) {
    fp8_project(p, out, x, w, 0, residual);
    return;
  }
  LinearForward linear = linear_of(p, out, x, w);
  linear.residual = residual;
  linear_forward(p->backend, linear);
}

void project_outputs(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w, int64_t first) {
  if (fp8_used(p)) {
    fp8_project(p, out, x, w, first, none);
    return;
  }
  LinearForward linear = linear_of(p, out, x, w);
  linear.weight = tensor_rows(linear.weight, first, out.shape[1]);
  linear.bias = tensor_rows(linear.bias, first, out.shape[1]);
  linear_forward(p->backend, linear);
}

void activate(const Pass *p, Operand out, Tensor pre_activation) {
  if (fp8_used(p)) {
    fp8_activate(p, out, pre_activation);
    return;
  }
  activation_forward(
      p->backend,
      (ActivationForward){.activation = p->model->config.activation, .out = out.x, .x = pre_activation});
}

void project_activated(const Pass *p, Operand out, Tensor pre_activation, Operand *x,
                       const WeightAndBias *w) {
  if (fp8_used(p)) {
    fp8_project(p, pre_activation, x, w, 0, none);
    fp8_activate(p, out, pre_activation);
    return;
  }
  LinearForward linear = linear_of(p, out.x, x, w);
  linear.activation = p->model->config.activation;
  linear.pre_activation = pre_activation;
  linear_forward(p->backend, linear);
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
  if (fp8_used(p)) {
    fp8_project_backward(p, dx, dout, x, weight, dbias, accumulate_dx);
    return;
  }
  LinearBackwardInput input = {.dx = dx, .dout = dout.x, .accumulate = accumulate_dx};
  linear_backward(p, input, x.x, weight, dbias);
}

Operand project_activated_backward(const Pass *p, Operand dout, Operand x, Tensor pre_activation,
                                   const Weight *weight) {
  if (fp8_used(p)) return fp8_project_activated_backward(p, dout, x, pre_activation, weight);
  bool gated = is_gated(p->model->config.activation);
  Operand dpre = {.x = gated ? pre_activation : x.x};
  LinearBackwardInput input = {.dx = dpre.x,
                               .dout = dout.x,
                               .activation = p->model->config.activation,
                               .pre_activation = pre_activation,
                               .dactivation = gated ? x.x : none};
  linear_backward(p, input, x.x, weight, none);
  return dpre;
}
