// Norms, and the sums of the residual stream x, to which a layer adds attention and the MLP: two blocks, f is
// the block up to its last matmul, W:
//     x + f(norm(x)) W^T      the GEMM adds x; backward, the norm adds to x's gradient
//     x + norm(f(x) W^T)      with config.post_norm: the norm adds x; backward, f's first matmul adds
#include "model/pass.h"

void run_norm(const Pass *p, Norm *norm, Tensor x, const WeightAndBias *w, Tensor residual) {
  if (norm->out.x.data == x.data) return; // with post_norm, a block reads the stream itself
  norm_forward_to(p, &norm->out,
                  (NormForward){.kind = p->model->config.norm,
                                .mean = norm->mean,
                                .rstd = norm->rstd,
                                .x = x,
                                .weight = w->weight.value,
                                .bias = w->bias.value,
                                .residual = residual,
                                .epsilon = (float)p->model->config.norm_epsilon});
}

// A LayerNorm, which has sums of columns anyway, takes previous_dbias with the rows.
void run_norm_backward(const Pass *p, const Norm *norm, Operand *dx, Tensor dout, Tensor x,
                       const WeightAndBias *w, bool accumulate_dx, Tensor previous_dbias) {
  bool with_rows = p->model->config.norm == NORM_LAYER;
  if (tensor_exists(previous_dbias) && !with_rows)
    sum_columns(p->backend, (SumColumns){.sum = previous_dbias, .x = dx->x, .accumulate = p->accumulate});
  norm_backward_to(p, dx,
                   (NormBackward){.kind = p->model->config.norm,
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
  if (p->model->config.post_norm)
    norm->out.x = x;
  else
    place_operand(p, &norm->out, push_activation(p, name, x.shape[1]));
}

void add_block(const Pass *p, Tensor out, Tensor x, Operand *f, const WeightAndBias *last, const Norm *norm,
               const WeightAndBias *w) {
  bool post_norm = p->model->config.post_norm;
  Norm sum = *norm;
  sum.out = (Operand){.x = out};
  project(p, post_norm ? norm->x : out, f, last, post_norm ? none : x);
  if (post_norm) run_norm(p, &sum, norm->x, w, x);
}

Operand add_block_backward(const Pass *p, const Operand *dx, Tensor dbias, const Norm *norm,
                           const WeightAndBias *w) {
  if (!p->model->config.post_norm) return *dx;
  Operand out = {0};
  place_operand(p, &out, norm->x);
  run_norm_backward(p, norm, &out, dx->x, norm->x, w, false, none);
  if (tensor_exists(dbias))
    sum_columns(p->backend, (SumColumns){.sum = dbias, .x = norm->x, .accumulate = p->accumulate});
  return out;
}

void block_input_backward(const Pass *p, Operand *dx, Operand dout, MemoryMark kept, const Weight *first,
                          Tensor dbias, const Norm *norm, Tensor x, const WeightAndBias *w,
                          Tensor previous_dbias) {
  bool post_norm = p->model->config.post_norm;
  Tensor dinput = post_norm ? dx->x : norm->out.x; // else in place of the norm's output
  project_backward(p, dinput, dout, norm->out, first, dbias, post_norm);
  memory_pop_to(&p->backend->memory, kept);
  if (!post_norm) run_norm_backward(p, norm, dx, dinput, x, w, true, previous_dbias);
}
