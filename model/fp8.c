// Matmuls in FP8 (--fp8): an operand is quantized before its GEMM, with one scale for the tensor. A GEMM
// reads codes along its inner dimension alone, so the backward pass needs the transpose's codes; if nothing
// is recomputed, these are kept instead of the operand, in half its memory. Activation functions are then
// operations of their own, which write codes and not values; norms compute their output's maximum.
#include "model/fp8.h"

bool fp8_possible(const ModelConfig *c, int64_t seq_len, int64_t mlp_chunk, Reason *reason) {
  const struct {
    const char *name;
    int64_t size;
  } sizes[] = {{"hidden size", c->hidden_size},
               {"attention heads x head size", c->num_attention_heads * c->head_dim},
               {"key/value heads x head size", c->num_key_value_heads * c->head_dim},
               {"intermediate size", c->intermediate_size},
               {"--seq-len", seq_len},
               {"--mlp-chunk", mlp_chunk}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (sizes[i].size % 16)
      return refuse(reason, "--fp8 takes multiples of 16, and %s is %lld", sizes[i].name,
                    (long long)sizes[i].size);
  return true;
}

bool fp8_used(const Pass *p) {
  return p->training && tensor_exists(p->model->layers->qkv.weight.quantized.codes);
}

static Quantized transposed(Quantized x) {
  return (Quantized){.codes = x.transposed, .transposed = x.codes, .amax = x.amax};
}

// For a matrix of [rows, columns]: pushes amax if absent, and codes as requested.
static Quantized push_fp8(const Pass *p, Quantized fp8, int64_t columns, bool codes, bool transposed) {
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
static Quantized quantized(const Pass *p, Operand x, bool codes, bool transposed) {
  Quantized fp8 = push_fp8(p, x.quantized, x.x.shape[1], codes, transposed);
  quantize(p->backend, (Quantize){.out = fp8, .x = x.x});
  return fp8;
}

// --- operands ----------------------------------------------------------------------------------------------

void place_operand(const Pass *p, Operand *operand, Tensor x) {
  operand->x = x;
  bool stands_in = tensor_exists(operand->quantized.transposed);
  if (fp8_used(p) && !stands_in) operand->quantized = push_fp8(p, (Quantized){0}, 0, false, false);
}

bool has_stand_ins(const Pass *p) {
  return fp8_used(p) && p->recompute == RECOMPUTE_NONE;
}

void push_stand_in(const Pass *p, Operand *operand, int64_t columns) {
  if (has_stand_ins(p)) operand->quantized = push_fp8(p, (Quantized){0}, columns, false, true);
}

// Codes take half of the tensor's memory or less; transposed ones, unless they stand in, as much.
void push_activation_operand(const Pass *p, Operand *operand) {
  int64_t columns = p->model->config.intermediate_size;
  operand->x = push_activation(p, "mlp activation", columns);
  if (!fp8_used(p)) return;
  uint8_t *bytes = operand->x.data;
  if (!has_stand_ins(p)) {
    operand->quantized = push_fp8(p, (Quantized){0}, 0, false, false);
    operand->quantized.transposed = tensor_2d(bytes + p->rows * columns, DTYPE_E4M3, columns, p->rows);
  }
  operand->quantized.codes = tensor_2d(bytes, DTYPE_E4M3, p->rows, columns);
}

Operand operand_rows(Operand *operand, int64_t first, int64_t count) {
  operand->quantized.amax_known = false;
  return (Operand){.x = tensor_rows(operand->x, first, count)};
}

void norm_forward_to(const Pass *p, Operand *out, NormForward a) {
  a.out = out->x;
  a.amax = out->quantized.amax;
  norm_forward(p->backend, a);
  out->quantized.amax_known = tensor_exists(a.amax);
}

void norm_backward_to(const Pass *p, Operand *dx, NormBackward a) {
  a.dx = dx->x;
  a.amax = dx->quantized.amax;
  norm_backward(p->backend, a);
  dx->quantized.amax_known = tensor_exists(a.amax);
}

// --- weights -----------------------------------------------------------------------------------------------

enum { MATRICES = 4 }; // of a layer

static Weight *matrix_of(Layer *w, int i) {
  Weight *const all[MATRICES] = {&w->qkv.weight, &w->out.weight, &w->up.weight, &w->down.weight};
  return all[i];
}

static Tensor reserve_codes(Memory *memory, const char *name, int64_t rows, int64_t columns) {
  Tensor codes = memory_reserve_1d(memory, name, MEMORY_WEIGHTS, DTYPE_E4M3, rows * columns);
  return tensor_reshape_2d(codes, rows, columns);
}

// All layers share the memory of one layer's codes, and each has its maxima.
void matmuls_reserve(Model *m, Memory *memory, ParameterDtypes dtypes) {
  for (int i = 0; dtypes.fp8 && i < MATRICES; i++) {
    Tensor value = matrix_of(m->layers, i)->value;
    Quantized fp8 = {.codes = reserve_codes(memory, "FP8 weights", value.shape[0], value.shape[1]),
                     .transposed =
                         reserve_codes(memory, "FP8 weights, transposed", value.shape[1], value.shape[0])};
    for (int64_t l = 0; l < m->config.num_hidden_layers; l++) {
      fp8.amax = memory_reserve_1d(memory, "FP8 maximum", MEMORY_WEIGHTS, DTYPE_F32, 1);
      matrix_of(&m->layers[l], i)->quantized = fp8;
    }
  }
  if (dtypes.fp8 != FP8_ALL) return;
  Tensor head = m->head.grad; // of the rows that the loss reads
  m->head_codes =
      (QuantizedRows){.codes = reserve_codes(memory, "FP8 head", head.shape[0], head.shape[1]),
                      .scale = memory_reserve_1d(memory, "FP8 scale", MEMORY_WEIGHTS, DTYPE_F32, 1)};
}

// The forward pass reads codes along one dimension of a matrix and the backward pass along the other; one that
// computes matmuls again needs both, and so does the last layer, which the backward pass does not enter again.
// Maxima are those of the step's first pass.
void matmuls_enter(const Pass *p, int64_t l, Direction direction) {
  Model *model = p->model;
  bool forward = direction == FORWARD, last = l == model->config.num_hidden_layers - 1;
  bool for_forward = forward || p->recompute >= RECOMPUTE_MLP, for_backward = !forward || last;
  if (!fp8_used(p) || (last && !forward)) return;
  for (int i = 0; i < MATRICES; i++) {
    const Weight *w = matrix_of(&model->layers[l], i);
    Quantized all = w->quantized, out = {.amax = all.amax, .amax_known = !p->first || !forward};
    bool in_out_layout = model->config.in_out_layout; // whose forward pass reads the transposed ones
    if (in_out_layout ? for_backward : for_forward) out.codes = all.codes;
    if (in_out_layout ? for_forward : for_backward) out.transposed = all.transposed;
    quantize(p->backend, (Quantize){.out = out, .x = w->value});
  }
}

void head_enter(const Pass *p, LinearCrossEntropy *loss) {
  QuantizedRows codes = p->model->head_codes;
  if (!tensor_exists(codes.codes) || loss->mode == LCE_MATERIALIZED) return;
  if (p->first) quantize_rows(p->backend, (QuantizeRows){.out = codes, .x = loss->weight});
  loss->weight_codes = codes;
}

// --- matmuls -----------------------------------------------------------------------------------------------

void fp8_project(const Pass *p, Tensor out, Operand *x, const WeightAndBias *w, int64_t first,
                 Tensor residual) {
  MemoryMark mark = memory_mark(&p->backend->memory);
  int64_t outputs = out.shape[1];
  Quantized weight = p->model->config.in_out_layout ? transposed(w->weight.quantized) : w->weight.quantized;
  weight.codes = tensor_rows(weight.codes, first, outputs);
  Operand in = *x;
  if (first) in.quantized.transposed = none; // made with the first outputs
  if (!tensor_exists(in.quantized.codes)) in.quantized = quantized(p, in, true, false);
  x->quantized.amax_known = tensor_exists(x->quantized.amax);
  matmul_quantized(p->backend, (MatmulQuantized){.out = out,
                                                 .a = in.quantized,
                                                 .b = weight,
                                                 .bias = tensor_rows(w->bias.value, first, outputs),
                                                 .residual = residual});
  memory_pop_to(&p->backend->memory, mark);
}

void fp8_activate(const Pass *p, Operand out, Tensor pre_activation) {
  activation_forward(p->backend, (ActivationForward){.activation = p->model->config.activation,
                                                     .x = pre_activation,
                                                     .quantized = out.quantized});
}

void fp8_project_backward(const Pass *p, Tensor dx, Operand dout, Operand x, const Weight *weight,
                          Tensor dbias, bool accumulate_dx) {
  MemoryMark mark = memory_mark(&p->backend->memory);
  bool in_out_layout = p->model->config.in_out_layout;
  Quantized d = tensor_exists(dout.quantized.codes) ? dout.quantized : quantized(p, dout, true, true);
  Quantized in = tensor_exists(x.quantized.transposed) ? x.quantized : quantized(p, x, false, true);
  Quantized rows = in_out_layout ? in : d, columns = in_out_layout ? d : in; // of the weight
  matmul_quantized(p->backend, (MatmulQuantized){.out = weight->grad,
                                                 .a = transposed(rows),
                                                 .b = transposed(columns),
                                                 .residual = p->accumulate ? weight->grad : none});
  if (tensor_exists(dbias))
    sum_columns(p->backend, (SumColumns){.sum = dbias, .x = dout.x, .accumulate = p->accumulate});
  matmul_quantized(p->backend,
                   (MatmulQuantized){.out = dx,
                                     .a = d,
                                     .b = in_out_layout ? weight->quantized : transposed(weight->quantized),
                                     .residual = accumulate_dx ? dx : none});
  memory_pop_to(&p->backend->memory, mark);
}

Operand fp8_project_activated_backward(const Pass *p, Operand dout, Operand x, Tensor pre_activation,
                                       const Weight *weight) {
  fp8_project_backward(p, x.x, dout, x, weight, none, false);
  Operand dpre = {.x = is_gated(p->model->config.activation) ? none : x.x}; // GELU's is for the bias
  dpre.quantized = push_fp8(p, dpre.quantized, pre_activation.shape[1], true, true);
  activation_backward(p->backend, (ActivationBackward){.activation = p->model->config.activation,
                                                       .dx = dpre.x,
                                                       .dout = x.x,
                                                       .x = pre_activation,
                                                       .quantized = dpre.quantized});
  return dpre;
}
