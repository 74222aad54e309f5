// Norms, and the sums of the residual stream. A layer adds two blocks to it: attention and the MLP. With f
// all of a block before its last matmul:
//
//     x + f(norm(x)) W^T      the GEMM adds x
//     x + norm(f(x) W^T)      with config.post_norm: the norm adds x
//
// The gradient of x is a sum, too. There the norm adds f's part to the stream's, here f's first matmul does.
#include "model/pass.h"

static void normalize(const Pass *p, Tensor out, const Norm *norm, Tensor x, const WeightAndBias *w,
                      Tensor residual) {
  norm_forward(p->backend, (NormForward){.kind = p->model->config.norm,
                                         .out = out,
                                         .mean = norm->mean,
                                         .rstd = norm->rstd,
                                         .x = x,
                                         .weight = w->weight.value,
                                         .bias = w->bias.value,
                                         .residual = residual,
                                         .epsilon = (float)p->model->config.norm_epsilon});
}

void run_norm(const Pass *p, const Norm *norm, Tensor x, const WeightAndBias *w) {
  normalize(p, norm->out.x, norm, x, w, none);
}

// A LayerNorm, which has sums of columns anyway, takes previous_dbias with the rows.
void run_norm_backward(const Pass *p, const Norm *norm, Tensor dx, Tensor dout, Tensor x,
                       const WeightAndBias *w, bool accumulate_dx, Tensor previous_dbias) {
  bool with_rows = p->model->config.norm == NORM_LAYER;
  if (tensor_exists(previous_dbias) && !with_rows)
    sum_columns(p->backend, (SumColumns){.sum = previous_dbias, .x = dx, .accumulate = p->accumulate});
  norm_backward(p->backend, (NormBackward){.kind = p->model->config.norm,
                                           .dx = dx,
                                           .dweight = w->weight.grad,
                                           .dbias = w->bias.grad,
                                           .dx_sum = with_rows ? previous_dbias : none,
                                           .dout = dout,
                                           .x = x,
                                           .weight = w->weight.value,
                                           .mean = norm->mean,
                                           .rstd = norm->rstd,
                                           .accumulate_dx = accumulate_dx,
                                           .accumulate = p->accumulate});
}

void push_block_input(const Pass *p, const char *name, Norm *norm, Tensor x) {
  norm->out.x = p->model->config.post_norm ? x : push_activation(p, name, x.shape[1]);
}

void push_block_output(const Pass *p, const char *name, Norm *norm) {
  if (p->model->config.post_norm) norm->x = push_activation(p, name, p->model->config.hidden_size);
}

void block_input(const Pass *p, const Norm *norm, Tensor x, const WeightAndBias *w) {
  if (!p->model->config.post_norm) run_norm(p, norm, x, w);
}

void add_block(const Pass *p, Tensor out, Tensor x, Operand f, const WeightAndBias *last, const Norm *norm,
               const WeightAndBias *w) {
  if (!p->model->config.post_norm) return project(p, out, f, last, x);
  project(p, norm->x, f, last, none);
  normalize(p, out, norm, norm->x, w, x);
}

void recompute_block(const Pass *p, Tensor x, Operand f, const WeightAndBias *last, const Norm *norm,
                     const WeightAndBias *w) {
  if (!p->model->config.post_norm) return;
  MemoryMark mark = memory_mark(&p->backend->memory);
  add_block(p, push_activation(p, "recomputed norm", x.shape[1]), x, f, last, norm, w);
  memory_pop_to(&p->backend->memory, mark);
}

Tensor add_block_backward(const Pass *p, Tensor dx, Tensor dbias, const Norm *norm, const WeightAndBias *w) {
  if (!p->model->config.post_norm) return dx;
  run_norm_backward(p, norm, norm->x, dx, norm->x, w, false, none);
  if (tensor_exists(dbias))
    sum_columns(p->backend, (SumColumns){.sum = dbias, .x = norm->x, .accumulate = p->accumulate});
  return norm->x;
}

void block_input_backward(const Pass *p, Tensor dx, Operand dout, const Weight *first, Tensor dbias,
                          const Norm *norm, Tensor x, const WeightAndBias *w, Tensor previous_dbias) {
  bool post_norm = p->model->config.post_norm;
  Tensor dinput = post_norm ? dx : norm->out.x; // else in the place of the norm's output
  project_backward(p, dinput, dout, norm->out, first, dbias, post_norm);
  if (!post_norm) run_norm_backward(p, norm, dx, dinput, x, w, true, previous_dbias);
}
