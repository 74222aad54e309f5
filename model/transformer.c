// One pass through the transformer, in the order in which memory is pushed and popped.
//
// The residual stream r starts as the embedding and passes L layers:
//     m   = r + attention(norm1(r)) W_out          r' = m + mlp(norm2(m))
// Where the heads of q and k are normalised (Qwen3), attention's q and k lie apart from the GEMM's, which the norm's
// backward pass needs.
// The additions happen in the matmuls before them (LinearForward.residual), so a layer writes two [N, H] tensors and
// no sum is a kernel of its own. Then: final norm, and linear_cross_entropy, which also returns the gradient of its
// input. The backward pass carries one gradient of the stream, dr, through the layers and adds to it in place.
//
// On the stack, from the bottom up: dr, then per layer what forward keeps for backward. Each layer pushes its
// output first, then what RECOMPUTE_LAYER drops, then what RECOMPUTE_MLP and RECOMPUTE_ELEMENTWISE drop: to
// drop is to pop, and to recompute is to push and compute the same again.
//
// What is offloaded is copied while other layers compute: a layer's weights arrive during the layer before it, and its
// gradients and its input leave during the layer after it, by way of double buffers.
#include "model/transformer.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/integers.h"
#include "kernels/profile.h"

const char *recompute_name(Recompute recompute) {
  static const char *const names[RECOMPUTE_COUNT] = {"none", "elementwise", "mlp", "layer"};
  return names[recompute];
}

static const Tensor none;        // an operand that is absent
static const Fp8 no_codes;       // likewise, and no amax
static const TileSampling exact; // no sampling

// One pass: the arguments that all functions below share.
typedef struct {
  Backend *backend;
  Model *model;
  const Batch *batch;
  Recompute recompute;
  int64_t mlp_chunk; // 0: all rows
  bool accumulate;   // the parameters' gradients
  bool fp8;          // the layers' matmuls
  int64_t rows;      // N
  AttentionShape heads;
  const KeyValueCache *cache; // of the `past` tokens before the batch's, or NULL
  int64_t past;
} Pass;

static float softcap_of(const Model *model) {
  return (float)model->config.final_logit_softcapping;
}

static Pass pass_begin(Backend *backend, Model *model, const Batch *batch) {
  const ModelConfig *c = &model->config;
  if (!c->learned_positions && batch->seq_len > model->rope_angles.shape[0])
    fail("a batch of sequences of %lld for a model made for %lld", (long long)batch->seq_len,
         (long long)model->rope_angles.shape[0]);
  return (Pass){.backend = backend,
                .model = model,
                .batch = batch,
                .rows = batch->batch * batch->seq_len,
                .heads = {.batch = batch->batch,
                          .seq_len = batch->seq_len,
                          .num_heads = c->num_attention_heads,
                          .num_key_value_heads = c->num_key_value_heads,
                          .head_dim = c->head_dim}};
}

static Tensor push(const Pass *p, const char *name, MemoryCategory category, int64_t columns) {
  return memory_push_2d(&p->backend->memory, name, category, p->backend->dtype, p->rows, columns);
}

static Tensor push_activation(const Pass *p, const char *name, int64_t columns) {
  return push(p, name, MEMORY_ACTIVATIONS, columns);
}

static Tensor push_gradient(const Pass *p, const char *name, int64_t columns) {
  return push(p, name, MEMORY_ACTIVATION_GRADIENTS, columns);
}

static Tensor push_statistic(const Pass *p, const char *name, int64_t heads) {
  return memory_push_1d(&p->backend->memory, name, MEMORY_ACTIVATIONS, DTYPE_F32, p->rows * heads);
}

// --- norms -------------------------------------------------------------------------------------------------

typedef struct {
  Tensor out, mean, rstd;
} Norm;

static void push_norm_statistics(const Pass *p, Norm *norm) {
  if (p->model->config.norm == NORM_LAYER) norm->mean = push_statistic(p, "norm mean", 1);
  norm->rstd = push_statistic(p, "norm rstd", 1);
}

static void run_norm(const Pass *p, const Norm *norm, Tensor x, const Affine *w) {
  norm_forward(p->backend, (NormForward){.kind = p->model->config.norm,
                                         .out = norm->out,
                                         .mean = norm->mean,
                                         .rstd = norm->rstd,
                                         .x = x,
                                         .weight = w->weight.value,
                                         .bias = w->bias.value,
                                         .epsilon = (float)p->model->config.norm_epsilon});
}

// previous_dbias: the gradient of a bias that x ends with, the sum of dx as it comes, or none. A LayerNorm, which has sums
// of columns anyway, takes it with the rows.
static void run_norm_backward(const Pass *p, const Norm *norm, Tensor dx, Tensor dout, Tensor x,
                              const Affine *w, bool accumulate_dx, Tensor previous_dbias) {
  bool with_rows = p->model->config.norm == NORM_LAYER;
  if (tensor_exists(previous_dbias) && !with_rows)
    linear_backward_weight(
        p->backend, (LinearBackwardWeight){.dbias = previous_dbias, .dout = dx, .accumulate = p->accumulate});
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

// --- matmuls -----------------------------------------------------------------------------------------------

// An FP8 matrix of [rows, columns]: pushes amax where it is absent, and codes as requested.
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

static Fp8 transposed(Fp8 x) {
  return (Fp8){.codes = x.transposed, .transposed = x.codes, .amax = x.amax};
}

static void quantize_weights(const Pass *p, const Layer *w) {
  const Param *matrices[] = {&w->qkv.weight, &w->out.weight, &w->up.weight, &w->down.weight};
  for (int i = 0; i < 4; i++)
    quantize(p->backend, (Quantize){.out = matrices[i]->fp8, .x = matrices[i]->value});
}

static void project_fp8(const Pass *p, Tensor out, Tensor x, Fp8 codes, const Affine *w, Tensor residual,
                        Tensor pre_activation) {
  MemoryMark mark = memory_mark(&p->backend->memory);
  Fp8 weight = w->weight.fp8;
  bool gelu = tensor_exists(pre_activation);
  Fp8 in = push_fp8(p, codes, x.shape[1], true, false);
  quantize(p->backend, (Quantize){.out = in, .x = x});
  matmul_fp8(p->backend, (MatmulFp8){.out = gelu ? pre_activation : out,
                                     .a = in,
                                     .b = p->model->config.in_out_layout ? transposed(weight) : weight,
                                     .bias = w->bias.value,
                                     .residual = residual});
  if (gelu) gelu_forward(p->backend, (GeluForward){.out = out, .x = pre_activation});
  memory_pop_to(&p->backend->memory, mark);
}

// In FP8, x's transposed codes are written to `codes` where it has a tensor for them.
static void project(const Pass *p, Tensor out, Tensor x, Fp8 codes, const Affine *w, Tensor residual,
                    Tensor pre_activation) {
  if (p->fp8) {
    project_fp8(p, out, x, codes, w, residual, pre_activation);
    return;
  }
  linear_forward(p->backend, (LinearForward){.out = out,
                                             .x = x,
                                             .weight = w->weight.value,
                                             .in_out_layout = p->model->config.in_out_layout,
                                             .bias = w->bias.value,
                                             .residual = residual,
                                             .pre_activation = pre_activation});
}

static void project_backward_fp8(const Pass *p, Tensor dx, Tensor dout, Fp8 d, Tensor x, Fp8 in,
                                 const Param *weight, Tensor dbias, Tensor pre_activation) {
  MemoryMark mark = memory_mark(&p->backend->memory);
  bool in_out_layout = p->model->config.in_out_layout;
  d = push_fp8(p, d, dout.shape[1], true, true);
  quantize(p->backend, (Quantize){.out = d, .x = dout});
  if (!tensor_exists(in.transposed)) {
    in = push_fp8(p, in, x.shape[1], false, true);
    quantize(p->backend, (Quantize){.out = in, .x = x});
  }
  Fp8 rows = in_out_layout ? in : d, columns = in_out_layout ? d : in; // of the weight
  matmul_fp8(p->backend, (MatmulFp8){.out = weight->grad,
                                     .a = transposed(rows),
                                     .b = transposed(columns),
                                     .residual = p->accumulate ? weight->grad : none});
  if (tensor_exists(dbias))
    linear_backward_weight(p->backend,
                           (LinearBackwardWeight){.dbias = dbias, .dout = dout, .accumulate = p->accumulate});
  matmul_fp8(p->backend,
             (MatmulFp8){.out = dx, .a = d, .b = in_out_layout ? weight->fp8 : transposed(weight->fp8)});
  if (tensor_exists(pre_activation))
    gelu_backward(p->backend, (GeluBackward){.dx = dx, .dout = dx, .x = pre_activation});
  memory_pop_to(&p->backend->memory, mark);
}

// The gradients of weight and, where nobody else sums it, bias, then dx: that of the input or, where it is there, of the
// pre_activation. dx may be x itself, and with SwiGLU x is overwritten. x is not read where x_codes has its transposed
// codes.
static void project_backward(const Pass *p, Tensor dx, Tensor dout, Fp8 dout_codes, Tensor x, Fp8 x_codes,
                             const Param *weight, Tensor dbias, Tensor pre_activation) {
  bool in_out_layout = p->model->config.in_out_layout, swiglu = is_swiglu(pre_activation, x.shape[1]);
  if (p->fp8) {
    project_backward_fp8(p, dx, dout, dout_codes, x, x_codes, weight, dbias, pre_activation);
    return;
  }
  linear_backward_weight(p->backend, (LinearBackwardWeight){.dweight = weight->grad,
                                                            .dbias = dbias,
                                                            .dout = dout,
                                                            .x = x,
                                                            .in_out_layout = in_out_layout,
                                                            .accumulate = p->accumulate});
  linear_backward_input(p->backend, (LinearBackwardInput){.dx = dx,
                                                          .dout = dout,
                                                          .weight = weight->value,
                                                          .in_out_layout = in_out_layout,
                                                          .pre_activation = pre_activation,
                                                          .dactivation = swiglu ? x : none});
}

// --- one layer ---------------------------------------------------------------------------------------------

// What a layer computes. Recompute says which of these stay on the stack for the backward pass.
typedef struct {
  MemoryMark below;      // the stack before the layer; of training
  Tensor input;          // [N, H], the output of the layer below
  Tensor output;         // [N, H]
  Norm norm1, norm2;     // out [N, H]
  Tensor qkv;            // [N, (Q + 2K) D], normalised and rotated
  Tensor qk;             // [N, (Q + K) D], before the norm; with config.qk_norm
  Norm q_norm, k_norm;   // their out lies in qkv
  Tensor lse;            // fp32 [B, Q T]
  Tensor attention;      // [N, Q D]
  Tensor middle;         // [N, H]: the stream between attention and MLP
  Tensor pre_activation; // [N, F], or [N, 2F]: gate, then up
  Tensor activation;     // [N, F]
  // In FP8, of the three's outputs: at RECOMPUTE_NONE the transposed codes, kept in their place; SwiGLU's amax.
  Fp8 norm1_codes, norm2_codes, activation_codes;
} LayerState;

static void push_pre_activation(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  s->pre_activation = push_activation(p, "mlp pre-activation", (c->gated_mlp ? 2 : 1) * c->intermediate_size);
}

static bool keeps_codes(const Pass *p) {
  return p->fp8 && p->recompute == RECOMPUTE_NONE;
}

static void push_activation_codes(const Pass *p, LayerState *s, bool transposed) {
  const ModelConfig *c = &p->model->config;
  s->activation_codes =
      push_fp8(p, (Fp8){.amax_known = c->gated_mlp}, c->intermediate_size, false, transposed);
}

static void push_mlp_elementwise(const Pass *p, LayerState *s) {
  s->norm2.out = push_activation(p, "norm2", p->model->config.hidden_size);
  s->activation = push_activation(p, "mlp activation", p->model->config.intermediate_size);
  if (p->fp8 && !keeps_codes(p)) push_activation_codes(p, s, false);
}

static void push_codes(const Pass *p, LayerState *s) {
  s->norm1_codes = push_fp8(p, no_codes, p->model->config.hidden_size, false, true);
  s->norm2_codes = push_fp8(p, no_codes, p->model->config.hidden_size, false, true);
  push_activation_codes(p, s, true);
}

static void push_qk(const Pass *p, LayerState *s) {
  int64_t q = p->heads.num_heads, k = p->heads.num_key_value_heads, size = p->heads.head_dim;
  s->qk = push_activation(p, "q and k before norm", (q + k) * size);
  s->q_norm.rstd = push_statistic(p, "q norm rstd", q);
  s->k_norm.rstd = push_statistic(p, "k norm rstd", k);
  s->q_norm.out = tensor_columns(s->qkv, 0, q * size);
  s->k_norm.out = tensor_columns(s->qkv, q * size, k * size);
}

// What RECOMPUTE_MLP keeps.
static void push_kept(const Pass *p, LayerState *s) {
  const ModelConfig *c = &p->model->config;
  AttentionShape h = p->heads;
  push_norm_statistics(p, &s->norm1);
  push_norm_statistics(p, &s->norm2);
  s->qkv = push_activation(p, "qkv", (h.num_heads + 2 * h.num_key_value_heads) * h.head_dim);
  if (c->qk_norm) push_qk(p, s);
  s->lse = memory_push_2d(&p->backend->memory, "attention lse", MEMORY_ACTIVATIONS, DTYPE_F32, h.batch,
                          h.num_heads * h.seq_len);
  s->attention = push_activation(p, "attention", h.num_heads * h.head_dim);
  s->middle = push_activation(p, "residual middle", c->hidden_size);
}

static Tensor positions_of(const Pass *p) {
  Tensor documents = p->batch->documents;
  return tensor_exists(documents) ? tensor_flat(tensor_rows(documents, 0, 1)) : none;
}

static void rotate(const Pass *p, Tensor qkv, bool inverse) {
  if (p->model->config.learned_positions) return;
  Tensor angles = p->model->rope_angles;
  rope(p->backend, (Rope){.qkv = qkv,
                          .cos_sin = tensor_rows(angles, p->past, angles.shape[0] - p->past),
                          .positions = positions_of(p),
                          .shape = p->heads,
                          .inverse = inverse});
}

// The part of a projection, stored [out, in], that makes these outputs.
static Affine outputs(const Affine *w, int64_t first, int64_t count) {
  Affine part = {.weight.value = tensor_rows(w->weight.value, first, count)};
  if (tensor_exists(w->bias.value)) part.bias.value = tensor_rows(w->bias.value, first, count);
  const Fp8 *fp8 = &w->weight.fp8;
  if (tensor_exists(fp8->codes))
    part.weight.fp8 = (Fp8){.codes = tensor_rows(fp8->codes, first, count), .amax = fp8->amax};
  return part;
}

// q, k and v of attention, rotated.
static void make_qkv(const Pass *p, const Layer *w, const LayerState *s) {
  if (p->model->config.qk_norm) {
    int64_t q = s->q_norm.out.shape[1], k = s->k_norm.out.shape[1];
    Affine qk = outputs(&w->qkv, 0, q + k), v = outputs(&w->qkv, q + k, k);
    project(p, s->qk, s->norm1.out, s->norm1_codes, &qk, none, none);
    project(p, tensor_columns(s->qkv, q + k, k), s->norm1.out, no_codes, &v, none, none);
    run_norm(p, &s->q_norm, tensor_columns(s->qk, 0, q), &w->q_norm);
    run_norm(p, &s->k_norm, tensor_columns(s->qk, q, k), &w->k_norm);
  } else {
    project(p, s->qkv, s->norm1.out, s->norm1_codes, &w->qkv, none, none);
  }
  rotate(p, s->qkv, false);
}

static void attend(const Pass *p, const Layer *w, const LayerState *s) {
  if (!p->cache) {
    attention_forward(p->backend, (AttentionForward){.out = s->attention,
                                                     .lse = s->lse,
                                                     .qkv = s->qkv,
                                                     .documents = p->batch->documents,
                                                     .shape = p->heads});
    return;
  }
  int64_t heads = p->cache->batch * p->heads.num_key_value_heads, first = 2 * heads * (w - p->model->layers);
  attention_decode(p->backend, (AttentionDecode){.out = s->attention,
                                                 .keys = tensor_rows(p->cache->data, first, heads),
                                                 .values = tensor_rows(p->cache->data, first + heads, heads),
                                                 .qkv = s->qkv,
                                                 .shape = p->heads,
                                                 .past = p->past});
}

static void run_swiglu(const Pass *p, const LayerState *s) {
  swiglu_forward(
      p->backend,
      (SwigluForward){.out = s->activation, .gate_up = s->pre_activation, .amax = s->activation_codes.amax});
}

// Whether SwiGLU is an operation of its own: in FP8, which needs the maximum of its output.
static bool swiglu_is_separate(const Pass *p) {
  return p->model->config.gated_mlp && p->fp8;
}

// norm2's output to the activation.
static void mlp_up(const Pass *p, const Layer *w, const LayerState *s) {
  if (swiglu_is_separate(p)) {
    project(p, s->pre_activation, s->norm2.out, s->norm2_codes, &w->up, none, none);
    run_swiglu(p, s);
  } else {
    project(p, s->activation, s->norm2.out, s->norm2_codes, &w->up, none, s->pre_activation);
  }
}

// All but the last matmul.
static void mlp_block(const Pass *p, const Layer *w, const LayerState *s) {
  run_norm(p, &s->norm2, s->middle, &w->norm2);
  mlp_up(p, w, s);
}

// dr: in, the gradient of the layer's output; out, that of its middle. Gradients replace what is not needed any more.
static void mlp_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dr) {
  bool separate = swiglu_is_separate(p);
  Tensor dpre = p->model->config.gated_mlp ? s->pre_activation : s->activation, dnorm2 = s->norm2.out;
  project_backward(p, separate ? s->activation : dpre, dr, no_codes, s->activation, s->activation_codes,
                   &w->down.weight, none, separate ? none : s->pre_activation);
  Fp8 dpre_codes = no_codes;
  if (separate) {
    dpre_codes = push_fp8(p, (Fp8){.amax_known = true}, dpre.shape[1], false, false);
    swiglu_backward(p->backend, (SwigluBackward){.dgate_up = dpre,
                                                 .dout = s->activation,
                                                 .gate_up = s->pre_activation,
                                                 .amax = dpre_codes.amax});
  }
  project_backward(p, dnorm2, dpre, dpre_codes, s->norm2.out, s->norm2_codes, &w->up.weight, w->up.bias.grad,
                   none);
  run_norm_backward(p, &s->norm2, dr, dnorm2, s->middle, &w->norm2, true, w->down.bias.grad);
}

// The rows of the MLP's part of a state.
static LayerState mlp_rows(const LayerState *s, int64_t first, int64_t count) {
  LayerState part = {.middle = tensor_rows(s->middle, first, count),
                     .norm2.rstd = tensor_rows(s->norm2.rstd, first, count)};
  if (tensor_exists(s->norm2.mean)) part.norm2.mean = tensor_rows(s->norm2.mean, first, count);
  return part;
}

// Under RECOMPUTE_LAYER: from middle to output or, where dr is there, mlp_backward, and nothing stays on the stack.
static void mlp_in_chunks(const Pass *p, const Layer *w, const LayerState *s, Tensor dr) {
  Memory *memory = &p->backend->memory;
  int64_t chunk = p->mlp_chunk ? p->mlp_chunk : p->rows;
  for (int64_t first = 0; first < p->rows; first += chunk) {
    Pass part = *p;
    part.rows = min_i64(chunk, p->rows - first);
    part.accumulate |= first > 0;
    LayerState state = mlp_rows(s, first, part.rows);
    MemoryMark mark = memory_mark(memory);
    push_pre_activation(&part, &state);
    push_mlp_elementwise(&part, &state);
    mlp_block(&part, w, &state);
    if (tensor_exists(dr))
      mlp_backward(&part, w, &state, tensor_rows(dr, first, part.rows));
    else
      project(&part, tensor_rows(s->output, first, part.rows), state.activation, state.activation_codes,
              &w->down, state.middle, none);
    memory_pop_to(memory, mark);
  }
}

static void attention_block(const Pass *p, const Layer *w, const LayerState *s) {
  run_norm(p, &s->norm1, s->input, &w->norm1);
  make_qkv(p, w, s);
  attend(p, w, s);
  project(p, s->middle, s->attention, no_codes, &w->out, s->input, none);
}

// From s->input to s->middle.
static void push_attention_block(const Pass *p, const Layer *w, LayerState *s) {
  push_kept(p, s);
  s->norm1.out = push_activation(p, "norm1", p->model->config.hidden_size);
  attention_block(p, w, s);
}

// From s->input to s->output. What p->recompute keeps stays on the stack.
static void layer_forward(const Pass *p, const Layer *w, LayerState *s) {
  Memory *memory = &p->backend->memory;
  MemoryMark marks[RECOMPUTE_COUNT] = {[RECOMPUTE_LAYER] = memory_mark(memory)};
  if (p->recompute == RECOMPUTE_LAYER) {
    push_attention_block(p, w, s);
    mlp_in_chunks(p, w, s, none);
  } else {
    push_kept(p, s);
    marks[RECOMPUTE_MLP] = memory_mark(memory);
    push_pre_activation(p, s);
    marks[RECOMPUTE_ELEMENTWISE] = memory_mark(memory);
    if (keeps_codes(p)) push_codes(p, s);
    marks[RECOMPUTE_NONE] = memory_mark(memory);
    s->norm1.out = push_activation(p, "norm1", p->model->config.hidden_size);
    push_mlp_elementwise(p, s);
    if (!keeps_codes(p)) marks[RECOMPUTE_NONE] = memory_mark(memory);
    attention_block(p, w, s);
    mlp_block(p, w, s);
    project(p, s->output, s->activation, s->activation_codes, &w->down, s->middle, none);
  }
  memory_pop_to(memory, marks[p->recompute]);
}

// norm2's output and the activation, from middle and pre-activation; at RECOMPUTE_MLP the pre-activation too.
static void recompute_mlp(const Pass *p, const Layer *w, LayerState *s) {
  if (p->recompute == RECOMPUTE_MLP) push_pre_activation(p, s);
  push_mlp_elementwise(p, s);
  run_norm(p, &s->norm2, s->middle, &w->norm2);
  if (p->recompute == RECOMPUTE_MLP)
    mlp_up(p, w, s);
  else if (p->model->config.gated_mlp)
    run_swiglu(p, s);
  else
    gelu_forward(p->backend, (GeluForward){.out = s->activation, .x = s->pre_activation});
}

// dr: in, the gradient of the layer's middle; out, that of its input.
static void attention_block_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dr,
                                     bool recompute_norm) {
  Memory *memory = &p->backend->memory;
  Tensor dqkv = push_gradient(p, "d qkv", s->qkv.shape[1]);
  MemoryMark after_dqkv = memory_mark(memory);
  Tensor dattention = push_gradient(p, "d attention", s->attention.shape[1]);
  project_backward(p, dattention, dr, no_codes, s->attention, no_codes, &w->out.weight, none, none);
  bool by_attention = p->model->config.learned_positions; // no rotation changes dqkv after it
  attention_backward(p->backend, (AttentionBackward){.dqkv = dqkv,
                                                     .dbias = by_attention ? w->qkv.bias.grad : none,
                                                     .dout = dattention,
                                                     .out = s->attention,
                                                     .lse = s->lse,
                                                     .qkv = s->qkv,
                                                     .documents = p->batch->documents,
                                                     .shape = p->heads,
                                                     .accumulate = p->accumulate});
  memory_pop_to(memory, after_dqkv);
  rotate(p, dqkv, true);
  if (p->model->config.qk_norm) {
    int64_t q = s->q_norm.out.shape[1], k = s->k_norm.out.shape[1];
    Tensor dq = tensor_columns(dqkv, 0, q), dk = tensor_columns(dqkv, q, k);
    run_norm_backward(p, &s->q_norm, dq, dq, tensor_columns(s->qk, 0, q), &w->q_norm, false, none);
    run_norm_backward(p, &s->k_norm, dk, dk, tensor_columns(s->qk, q, k), &w->k_norm, false, none);
  }
  if (recompute_norm || keeps_codes(p))
    s->norm1.out = push_activation(p, "norm1", p->model->config.hidden_size);
  if (recompute_norm) run_norm(p, &s->norm1, s->input, &w->norm1);
  Tensor dnorm1 = s->norm1.out;
  project_backward(p, dnorm1, dqkv, no_codes, s->norm1.out, s->norm1_codes, &w->qkv.weight,
                   by_attention ? none : w->qkv.bias.grad, none);
  run_norm_backward(p, &s->norm1, dr, dnorm1, s->input, &w->norm1, true, w->out.bias.grad);
}

// dr: in, the gradient of the layer's output; out, that of its input.
static void layer_backward(const Pass *p, const Layer *w, LayerState *s, Tensor dr) {
  Memory *memory = &p->backend->memory;
  bool recompute_parts = p->recompute == RECOMPUTE_ELEMENTWISE || p->recompute == RECOMPUTE_MLP;
  MemoryMark mark = memory_mark(memory);
  if (p->recompute == RECOMPUTE_LAYER) {
    push_attention_block(p, w, s);
    mlp_in_chunks(p, w, s, dr);
  } else {
    if (recompute_parts) recompute_mlp(p, w, s);
    if (keeps_codes(p)) push_mlp_elementwise(p, s); // for their gradients
    mlp_backward(p, w, s, dr);
    memory_pop_to(memory, mark);
  }
  attention_block_backward(p, w, s, dr, recompute_parts);
  memory_pop_to(memory, mark);
}

// --- before and after the layers ----------------------------------------------------------------------------

static Tensor embed(const Pass *p) {
  Tensor out = push_activation(p, "residual", p->model->config.hidden_size);
  Tensor positions = p->model->position_embedding.value;
  if (tensor_exists(positions)) positions = tensor_rows(positions, p->past, positions.shape[0] - p->past);
  embedding_forward(p->backend, (EmbeddingForward){.out = out,
                                                   .tokens = p->batch->tokens,
                                                   .token_weight = p->model->token_embedding.value,
                                                   .position_weight = positions,
                                                   .positions = positions_of(p),
                                                   .seq_len = p->batch->seq_len});
  return out;
}

// Into `out`, or else on the stack.
static Norm final_norm(const Pass *p, Tensor stream, Tensor out) {
  Norm norm = {.out = out};
  push_norm_statistics(p, &norm);
  if (!tensor_exists(out)) norm.out = push_activation(p, "final norm", p->model->config.hidden_size);
  run_norm(p, &norm, stream, &p->model->final_norm);
  return norm;
}

// --- offloading --------------------------------------------------------------------------------------------

// These begin copies, where the tensors are offloaded and there is a layer l, and return how many. Layers that follow each
// other use the two halves of a double buffer in turn.

static int64_t fetch_weights(const Pass *p, int64_t l) {
  const Parameters *w = &p->model->parameters;
  if (!tensor_exists(w->layer_values) || l < 0 || l >= p->model->config.num_hidden_layers) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_values, l),
                             .x = parameters_layer(w, w->value, l)});
  return 1;
}

// For the forward pass of training: a deferred update comes first.
static int64_t prepare_layer(const Pass *p, const TransformerOptions *options, int64_t l) {
  bool deferred = options->update_layer && l < p->model->config.num_hidden_layers;
  if (deferred) options->update_layer(options->update_context, l);
  return deferred + fetch_weights(p, l);
}

// What is added to.
static int64_t fetch_grads(const Pass *p, int64_t l) {
  const Parameters *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads) || l < 0 || !p->accumulate) return 0;
  copy_in(p->backend, (Copy){.out = parameters_layer_buffer(w, w->layer_grads, l),
                             .x = parameters_layer(w, w->grad, l),
                             .after_out = true}); // of the layer that had the buffer before
  return 1;
}

// While they are on the device; from the last layer down.
static void sum_squares(const Pass *p, Tensor squares, int64_t l) {
  const Parameters *w = &p->model->parameters;
  if (!tensor_exists(squares) || !tensor_exists(w->layer_grads)) return;
  reduce(p->backend, (Reduce){.sum = squares,
                              .x = parameters_layer_buffer(w, w->layer_grads, l),
                              .squares = true,
                              .accumulate = l < p->model->config.num_hidden_layers - 1});
}

static void send_grads(const Pass *p, int64_t l) {
  const Parameters *w = &p->model->parameters;
  if (!tensor_exists(w->layer_grads)) return;
  copy_out(p->backend, (Copy){.out = parameters_layer(w, w->grad, l),
                              .x = parameters_layer_buffer(w, w->layer_grads, l)});
}

// Space for the rows of an offloaded head or of its gradients, on the stack until the caller pops it, with their values
// where `read`; others as they are.
static Tensor fetch_head(const Pass *p, Tensor head, MemoryCategory category, bool read) {
  if (!p->model->parameters.head_on_host) return head;
  const char *name = category == MEMORY_WEIGHTS ? "head on the device" : "head's gradients on the device";
  Tensor here = memory_push_2d(&p->backend->memory, name, category, head.dtype, head.shape[0], head.shape[1]);
  if (read) copy_in(p->backend, (Copy){.out = tensor_flat(here), .x = tensor_flat(head)});
  copies_join(p->backend, 0, 0);
  return here;
}

static void send_head_grad(const Pass *p, Tensor here) {
  if (!p->model->parameters.head_on_host) return;
  copy_out(p->backend, (Copy){.out = tensor_flat(p->model->head.grad), .x = tensor_flat(here)});
  copies_join(p->backend, 0, 0); // its place on the stack is needed
}

// A layer's input, to the host's memory or back.
static int64_t copy_input(const Pass *p, Tensor inputs, int64_t l, Tensor input, bool back) {
  if (!tensor_exists(inputs) || l * p->rows >= inputs.shape[0]) return 0;
  Tensor here = tensor_flat(input), there = tensor_flat(tensor_rows(inputs, l * p->rows, p->rows));
  if (back)
    copy_in(p->backend, (Copy){.out = here, .x = there});
  else
    copy_out(p->backend, (Copy){.out = there, .x = here});
  return 1;
}

// --- the whole step ----------------------------------------------------------------------------------------

static Recompute recompute_of(const TransformerOptions *options, int64_t l) {
  bool less = options->recompute_layers && l >= options->recompute_layers;
  return options->recompute - (less && options->recompute > RECOMPUTE_NONE);
}

static void grads_ready(const GradHooks *hooks, ParameterGroup group, int64_t first) {
  if (hooks->on_grads_ready) hooks->on_grads_ready(hooks->context, group, first);
}

// What the parts of a training pass share.
typedef struct {
  Pass pass;
  const TransformerOptions *options;
  bool accumulate; // as requested; pass.accumulate is false where a hook reduces gradients in every pass
  bool by_hook;    // hooks.add_embedding_grads adds to a tied head's gradient
  LayerState *states;
} TrainingPass;

// From the tokens to the stream after all layers.
static Tensor layers_forward(TrainingPass *t) {
  Pass *p = &t->pass;
  Backend *backend = p->backend;
  const TransformerOptions *options = t->options;
  int64_t hidden_size = p->model->config.hidden_size;
  Tensor stream = embed(p), inputs = options->inputs, spare = none;
  if (tensor_exists(inputs)) spare = push_activation(p, "residual", hidden_size);
  fetch_weights(p, 0);
  for (int64_t l = 0; l < p->model->config.num_hidden_layers; l++) {
    const Layer *w = &p->model->layers[l];
    LayerState *s = &t->states[l];
    s->below = memory_mark(&backend->memory);
    s->input = stream;
    p->recompute = recompute_of(options, l);
    bool alternates = tensor_exists(inputs) && p->recompute == RECOMPUTE_LAYER;
    s->output = alternates ? spare : push_activation(p, "residual", hidden_size);
    int64_t copies_in = prepare_layer(p, options, l + 1),
            copies_out = copy_input(p, inputs, l, stream, false);
    copies_join(backend, copies_in, copies_out);
    bool by_layer = p->model->parameters.fp8_by_layer;
    if (p->fp8 && (by_layer || !t->accumulate)) quantize_weights(p, w); // else the codes are there
    layer_forward(p, w, s);
    spare = stream;
    stream = s->output;
  }
  fetch_grads(p, p->model->config.num_hidden_layers - 1);
  return stream;
}

// dr receives the gradient of the stream.
static void head_and_loss(const TrainingPass *t, Tensor stream, Tensor dr, float scale, Tensor loss) {
  const Pass *p = &t->pass;
  const TransformerOptions *options = t->options;
  Model *model = p->model;
  Memory *memory = &p->backend->memory;
  MemoryMark top = memory_mark(memory);
  Norm norm = final_norm(p, stream, none);
  Tensor dnorm = push_gradient(p, "d final norm", model->config.hidden_size);
  MemoryMark below_head = memory_mark(memory);
  profile_phase(p->backend, PHASE_LOSS);
  Tensor head = fetch_head(p, model_head_shard(model), MEMORY_WEIGHTS, true);
  Tensor dhead = fetch_head(p, model->head.grad, MEMORY_GRADIENTS, t->accumulate);
  linear_cross_entropy(
      p->backend, (LinearCrossEntropy){.mode = options->mode,
                                       .chunk = options->chunk,
                                       .loss = loss,
                                       .outputs = options->outputs,
                                       .terms = {.label_smoothing = options->label_smoothing,
                                                 .z_loss = options->z_loss,
                                                 .softcap = softcap_of(model)},
                                       .sampling = options->mode == LCE_FUSED ? options->sampling : exact,
                                       .dx = dnorm,
                                       .dweight = dhead,
                                       .x = norm.out,
                                       .weight = head,
                                       .shard = model->shard,
                                       .targets = p->batch->targets,
                                       .rows = p->batch->rows,
                                       .counted = p->batch->counted,
                                       .scale = scale,
                                       .accumulate = t->accumulate});
  send_head_grad(p, dhead);
  profile_phase(p->backend, PHASE_BACKWARD);
  memory_pop_to(memory, below_head);
  if (!model->config.tie_word_embeddings || t->by_hook) grads_ready(&options->hooks, GROUP_HEAD, 0);
  run_norm_backward(p, &norm, dr, dnorm, stream, &model->final_norm, false, none);
  memory_pop_to(memory, top);
}

// dr: in, the gradient of the stream after all layers; out, of the embedding.
static void layers_backward(TrainingPass *t, Tensor dr) {
  Pass *p = &t->pass;
  Backend *backend = p->backend;
  const TransformerOptions *options = t->options;
  const Spread *spread = &p->model->parameters.spread;
  int64_t layers = p->model->config.num_hidden_layers;
  for (int64_t l = layers; l-- > 0;) {
    const Layer *w = &p->model->layers[l];
    LayerState *s = &t->states[l];
    int64_t copies_in = fetch_grads(p, l - 1);
    if (l > 0) copies_in += copy_input(p, options->inputs, l - 1, t->states[l - 1].input, true);
    if (l - 1 < layers - 2) copies_in += fetch_weights(p, l - 1); // the last two have stayed
    copies_join(backend, copies_in, 1);
    p->recompute = recompute_of(options, l);
    if (p->model->parameters.fp8_by_layer && l < layers - 1)
      quantize_weights(p, w); // the last one's have stayed
    layer_backward(p, w, s, dr);
    memory_pop_to(&backend->memory, s->below); // the layer's output too: its input is the one below
    sum_squares(p, options->squares, l);
    send_grads(p, l);
    if (options->hooks.on_grads_ready) copies_join(backend, copies_in, 0);
    grads_ready(&options->hooks, GROUP_MATRICES, spread->before_layers + l * spread->layer);
  }
  copies_join(backend, 0, 0);
}

static void embed_backward(const TrainingPass *t, Tensor dr) {
  const Pass *p = &t->pass;
  const GradHooks *hooks = &t->options->hooks;
  Tensor dtokens = t->by_hook ? none : p->model->token_embedding.grad;
  Tensor dpositions = p->model->position_embedding.grad;
  if (t->by_hook) hooks->add_embedding_grads(hooks->context, p->batch, dr);
  if (!tensor_exists(dtokens) && !tensor_exists(dpositions)) return;
  bool tied = p->model->config.tie_word_embeddings; // then the head's gradient is there
  embedding_backward(p->backend, (EmbeddingBackward){.dtoken_weight = dtokens,
                                                     .dposition_weight = dpositions,
                                                     .dout = dr,
                                                     .tokens = p->batch->tokens,
                                                     .positions = positions_of(p),
                                                     .seq_len = p->batch->seq_len,
                                                     .accumulate_token = p->accumulate || tied,
                                                     .accumulate_position = p->accumulate});
}

void transformer_train(Backend *backend, Model *model, const Batch *batch, const TransformerOptions *options,
                       float scale, bool accumulate, Tensor loss) {
  const GradHooks *hooks = &options->hooks;
  int64_t layers = model->config.num_hidden_layers;
  bool tied = model->config.tie_word_embeddings;
  TrainingPass t = {.pass = pass_begin(backend, model, batch),
                    .options = options,
                    .accumulate = accumulate,
                    .by_hook = tied && hooks->add_embedding_grads,
                    .states = host_alloc(layers, sizeof *t.states, "the layers' states")};
  t.pass.mlp_chunk = options->mlp_chunk;
  t.pass.accumulate = accumulate && !hooks->overwrite;
  t.pass.fp8 = tensor_exists(model->layers->qkv.weight.fp8.codes);
  if (tied && model->shard.vocab_size && !t.by_hook) fail("internal: a split, tied head needs GradHooks");

  MemoryMark bottom = memory_mark(&backend->memory);
  profile_phase(backend, PHASE_FORWARD);
  Tensor dr = push_gradient(&t.pass, "d residual", model->config.hidden_size);
  Tensor stream = layers_forward(&t);
  head_and_loss(&t, stream, dr, scale, loss);
  layers_backward(&t, dr);
  embed_backward(&t, dr);
  memory_pop_to(&backend->memory, bottom);
  grads_ready(hooks, GROUP_MATRICES, 0);
  grads_ready(hooks, GROUP_VECTORS, 0);
  if (tied && !t.by_hook) grads_ready(hooks, GROUP_HEAD, 0);
  free(t.states);
}

// The residual stream after all layers; nothing is kept, and two tensors alternate as the stream.
static Tensor forward_only(Pass *p) {
  p->recompute = RECOMPUTE_LAYER;
  Tensor stream = embed(p), spare = push_activation(p, "residual", p->model->config.hidden_size);
  fetch_weights(p, 0);
  for (int64_t l = 0; l < p->model->config.num_hidden_layers; l++) {
    LayerState s = {.input = stream, .output = spare};
    copies_join(p->backend, fetch_weights(p, l + 1), 0);
    layer_forward(p, &p->model->layers[l], &s);
    spare = stream;
    stream = s.output;
  }
  return stream;
}

void transformer_evaluate(Backend *backend, Model *model, const Batch *batch,
                          const TransformerOptions *options, Tensor loss) {
  Pass p = pass_begin(backend, model, batch);
  p.mlp_chunk = options->mlp_chunk;
  MemoryMark bottom = memory_mark(&backend->memory);
  Norm norm = final_norm(&p, forward_only(&p), none);
  linear_cross_entropy(backend,
                       (LinearCrossEntropy){.mode = options->mode,
                                            .chunk = options->chunk,
                                            .loss = loss,
                                            .terms = {.softcap = softcap_of(model)},
                                            .x = norm.out,
                                            .weight = fetch_head(&p, model->head.value, MEMORY_WEIGHTS, true),
                                            .targets = batch->targets,
                                            .rows = batch->rows,
                                            .counted = batch->counted});
  memory_pop_to(&backend->memory, bottom);
}

void transformer_last_hidden_state(Backend *backend, Model *model, const Batch *batch, Tensor out) {
  Pass p = pass_begin(backend, model, batch);
  MemoryMark bottom = memory_mark(&backend->memory);
  final_norm(&p, forward_only(&p), out);
  memory_pop_to(&backend->memory, bottom);
}

KeyValueCache key_value_cache_push(Backend *backend, const ModelConfig *c, int64_t batch, int64_t capacity) {
  int64_t rows = 2 * c->num_hidden_layers * batch * c->num_key_value_heads;
  return (KeyValueCache){.batch = batch,
                         .capacity = capacity,
                         .data = memory_push_2d(&backend->memory, "key/value cache", MEMORY_ACTIVATIONS,
                                                backend->dtype, rows, capacity * c->head_dim)};
}

void transformer_logits(Backend *backend, Model *model, const Batch *batch, const KeyValueCache *cache,
                        int64_t past, Tensor rows, Tensor logits) {
  if (cache && (batch->batch != cache->batch || past < 0 || past + batch->seq_len > cache->capacity))
    fail("%lld sequences of %lld tokens after %lld do not fit into a cache for %lld of %lld",
         (long long)batch->batch, (long long)batch->seq_len, (long long)past, (long long)cache->batch,
         (long long)cache->capacity);
  Pass p = pass_begin(backend, model, batch);
  p.cache = cache;
  p.past = past;
  MemoryMark bottom = memory_mark(&backend->memory);
  Tensor stream = forward_only(&p);
  if (tensor_exists(logits)) {
    Norm norm = final_norm(&p, stream, none);
    Tensor picked = memory_push_2d(&backend->memory, "rows to predict from", MEMORY_ACTIVATIONS,
                                   backend->dtype, rows.shape[0], model->config.hidden_size);
    gather_rows(backend, (MoveRows){.out = picked, .x = norm.out, .rows = rows});
    Tensor head = fetch_head(&p, model->head.value, MEMORY_WEIGHTS, true);
    linear_forward(backend, (LinearForward){.out = logits, .x = picked, .weight = head});
  }
  memory_pop_to(&backend->memory, bottom);
}
