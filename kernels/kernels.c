// The doors: every operation checks here, once, that its tensors fit together, pushes the scratch that the
// backend asks for, and calls the backend. A backend therefore checks nothing, and a plan, whose operations
// are all NULL, checks and counts exactly what a real run does.
#include "kernels/kernels.h"

#include <stdlib.h>

#include "base/fail.h"
#include "kernels/ranks/ranks.h"

// --- what is checked ---------------------------------------------------------------------------------------

typedef const char *Op; // the operation's name, for messages

static void need(Op op, const char *field, Tensor t) {
  if (!tensor_exists(t)) fail("%s: %s is missing", op, field);
}

static void absent(Op op, const char *field, Tensor t, const char *why) {
  if (tensor_exists(t)) fail("%s: %s is %s, but %s", op, field, tensor_text(t).text, why);
}

static void is_2d(Op op, const char *field, Tensor t, int64_t rows, int64_t columns) {
  need(op, field, t);
  if (t.rank != 2 || t.shape[0] != rows || t.shape[1] != columns)
    fail("%s: %s is %s where [%lld, %lld] is needed", op, field, tensor_text(t).text, (long long)rows,
         (long long)columns);
}

static void is_1d(Op op, const char *field, Tensor t, int64_t count) {
  need(op, field, t);
  if (t.rank != 1 || t.shape[0] != count)
    fail("%s: %s is %s where [%lld] is needed", op, field, tensor_text(t).text, (long long)count);
}

static void is_type(Op op, const char *field, Tensor t, Dtype dtype) {
  if (t.dtype != dtype)
    fail("%s: %s is %s where %s is needed", op, field, tensor_text(t).text, dtype_name(dtype));
}

static void is_dense(Op op, const char *field, Tensor t) {
  if (!tensor_is_dense(t)) fail("%s: %s is %s with gaps between its rows", op, field, tensor_text(t).text);
}

static void is_float(Op op, const char *field, Tensor t) {
  if (t.dtype != DTYPE_F32 && t.dtype != DTYPE_BF16)
    fail("%s: %s is %s where fp32 or bf16 is needed", op, field, tensor_text(t).text);
}

// A dense matrix or vector of one type: the three checks that nearly every field needs.
static void matrix(Op op, const char *field, Tensor t, Dtype dtype, int64_t rows, int64_t columns) {
  is_2d(op, field, t, rows, columns);
  is_type(op, field, t, dtype);
  is_dense(op, field, t);
}

static void vector(Op op, const char *field, Tensor t, Dtype dtype, int64_t count) {
  is_1d(op, field, t, count);
  is_type(op, field, t, dtype);
}

// The gradient of a weight: its shape, fp32 or bf16.
static void gradient_matrix(Op op, const char *field, Tensor t, int64_t rows, int64_t columns) {
  is_2d(op, field, t, rows, columns);
  is_float(op, field, t);
  is_dense(op, field, t);
}

static void gradient_vector(Op op, const char *field, Tensor t, int64_t count) {
  is_1d(op, field, t, count);
  is_float(op, field, t);
}

static void two_axes(Op op, const char *field, Tensor t) {
  need(op, field, t);
  is_float(op, field, t);
  if (t.rank != 2) fail("%s: %s is %s where a matrix is needed", op, field, tensor_text(t).text);
}

// --- how an operation is called ----------------------------------------------------------------------------

static Tensor push_scratch(Backend *backend, Op op, MemoryCategory category, size_t bytes) {
  if (!bytes) return (Tensor){0};
  return memory_push_1d(&backend->memory, op, category, DTYPE_I32, (int64_t)((bytes + 3) / 4));
}

#define CALL(op)                                                                                             \
  do {                                                                                                       \
    ranks_alive();                                                                                           \
    if (backend->ops->op) backend->ops->op(backend, &a);                                                     \
  } while (0)

#define CALL_WITH_SCRATCH(op, category)                                                                      \
  do {                                                                                                       \
    MemoryMark mark = memory_mark(&backend->memory);                                                         \
    a.workspace = push_scratch(backend, #op, category, SCRATCH_BYTES(backend, op, &a));                      \
    CALL(op);                                                                                                \
    memory_pop_to(&backend->memory, mark);                                                                   \
  } while (0)

// --- tokens to vectors -------------------------------------------------------------------------------------

static void whole_sequences(Op op, int64_t rows, int64_t seq_len) {
  if (seq_len < 1 || rows % seq_len)
    fail("%s: %lld rows are not whole sequences of %lld", op, (long long)rows, (long long)seq_len);
}

static void positions(Op op, const char *field, Tensor t, int64_t seq_len, int64_t hidden_size) {
  if (!tensor_exists(t)) return;
  gradient_matrix(op, field, t, t.shape[0], hidden_size);
  if (t.shape[0] < seq_len)
    fail("%s: %s is %s, too few positions for sequences of %lld", op, field, tensor_text(t).text,
         (long long)seq_len);
}

void embedding_forward(Backend *backend, EmbeddingForward a) {
  const Op op = "embedding_forward";
  two_axes(op, "token_weight", a.token_weight);
  int64_t hidden_size = a.token_weight.shape[1];
  Dtype dtype = a.token_weight.dtype;
  need(op, "tokens", a.tokens);
  vector(op, "tokens", a.tokens, DTYPE_I32, a.tokens.shape[0]);
  matrix(op, "token_weight", a.token_weight, dtype, a.token_weight.shape[0], hidden_size);
  matrix(op, "out", a.out, dtype, a.tokens.shape[0], hidden_size);
  whole_sequences(op, a.tokens.shape[0], a.seq_len);
  positions(op, "position_weight", a.position_weight, a.seq_len, hidden_size);
  if (tensor_exists(a.position_weight)) is_type(op, "position_weight", a.position_weight, dtype);
  CALL(embedding_forward);
}

void embedding_backward(Backend *backend, EmbeddingBackward a) {
  const Op op = "embedding_backward";
  two_axes(op, "dout", a.dout);
  is_dense(op, "dout", a.dout);
  int64_t rows = a.dout.shape[0], hidden_size = a.dout.shape[1];
  vector(op, "tokens", a.tokens, DTYPE_I32, rows);
  if (!tensor_exists(a.dposition_weight)) need(op, "dtoken_weight", a.dtoken_weight);
  if (tensor_exists(a.dtoken_weight))
    gradient_matrix(op, "dtoken_weight", a.dtoken_weight, a.dtoken_weight.shape[0], hidden_size);
  whole_sequences(op, rows, a.seq_len);
  positions(op, "dposition_weight", a.dposition_weight, a.seq_len, hidden_size);
  CALL_WITH_SCRATCH(embedding_backward, MEMORY_WORKSPACE);
}

// --- normalisation -----------------------------------------------------------------------------------------

static void norm_operands(Op op, NormKind kind, Tensor x, Tensor weight, Tensor mean, Tensor rstd) {
  two_axes(op, "x", x);
  is_dense(op, "x", x);
  vector(op, "weight", weight, x.dtype, x.shape[1]);
  vector(op, "rstd", rstd, DTYPE_F32, x.shape[0]);
  if (kind == NORM_LAYER)
    vector(op, "mean", mean, DTYPE_F32, x.shape[0]);
  else
    absent(op, "mean", mean, "an RMS norm has no mean");
}

void norm_forward(Backend *backend, NormForward a) {
  const Op op = "norm_forward";
  norm_operands(op, a.kind, a.x, a.weight, a.mean, a.rstd);
  matrix(op, "out", a.out, a.x.dtype, a.x.shape[0], a.x.shape[1]);
  if (a.kind == NORM_LAYER)
    vector(op, "bias", a.bias, a.x.dtype, a.x.shape[1]);
  else
    absent(op, "bias", a.bias, "an RMS norm has no bias");
  CALL(norm_forward);
}

void norm_backward(Backend *backend, NormBackward a) {
  const Op op = "norm_backward";
  norm_operands(op, a.kind, a.x, a.weight, a.mean, a.rstd);
  matrix(op, "dout", a.dout, a.x.dtype, a.x.shape[0], a.x.shape[1]);
  matrix(op, "dx", a.dx, a.x.dtype, a.x.shape[0], a.x.shape[1]);
  if (a.dx.data == a.dout.data) fail("%s: dx and dout are the same tensor", op);
  gradient_vector(op, "dweight", a.dweight, a.x.shape[1]);
  if (a.kind == NORM_LAYER)
    gradient_vector(op, "dbias", a.dbias, a.x.shape[1]);
  else
    absent(op, "dbias", a.dbias, "an RMS norm has no bias");
  CALL_WITH_SCRATCH(norm_backward, MEMORY_WORKSPACE);
}

// --- matrix products ---------------------------------------------------------------------------------------

// The weight of a layer from `inputs` to `outputs`, in either layout.
static void linear_weight(Op op, const char *field, Tensor t, bool in_out_layout, int64_t outputs,
                          int64_t inputs) {
  gradient_matrix(op, field, t, in_out_layout ? inputs : outputs, in_out_layout ? outputs : inputs);
}

void linear_forward(Backend *backend, LinearForward a) {
  const Op op = "linear_forward";
  two_axes(op, "x", a.x);
  two_axes(op, "out", a.out);
  int64_t rows = a.x.shape[0], inputs = a.x.shape[1], outputs = a.out.shape[1];
  is_2d(op, "out", a.out, rows, outputs);
  linear_weight(op, "weight", a.weight, a.in_out_layout, outputs, inputs);
  is_type(op, "weight", a.weight, a.x.dtype);
  if (a.out.dtype != DTYPE_F32) is_type(op, "out", a.out, a.x.dtype);
  if (tensor_exists(a.bias)) vector(op, "bias", a.bias, a.x.dtype, outputs);
  if (tensor_exists(a.pre_activation)) {
    matrix(op, "pre_activation", a.pre_activation, a.x.dtype, rows, outputs);
    absent(op, "residual", a.residual, "an activation and a residual do not go together");
  }
  if (tensor_exists(a.residual)) {
    is_2d(op, "residual", a.residual, rows, outputs);
    is_type(op, "residual", a.residual, a.out.dtype);
  }
  CALL(linear_forward);
}

void linear_backward_input(Backend *backend, LinearBackwardInput a) {
  const Op op = "linear_backward_input";
  two_axes(op, "dout", a.dout);
  two_axes(op, "dx", a.dx);
  int64_t rows = a.dout.shape[0], inputs = a.dx.shape[1], outputs = a.dout.shape[1];
  is_2d(op, "dx", a.dx, rows, inputs);
  if (a.dx.dtype != DTYPE_F32) is_type(op, "dx", a.dx, a.dout.dtype);
  linear_weight(op, "weight", a.weight, a.in_out_layout, outputs, inputs);
  is_type(op, "weight", a.weight, a.dout.dtype);
  if (tensor_exists(a.pre_activation)) {
    matrix(op, "pre_activation", a.pre_activation, a.dout.dtype, rows, inputs);
    if (a.accumulate) fail("%s: an activation's gradient cannot be accumulated", op);
  }
  CALL(linear_backward_input);
}

void linear_backward_weight(Backend *backend, LinearBackwardWeight a) {
  const Op op = "linear_backward_weight";
  two_axes(op, "dout", a.dout);
  two_axes(op, "x", a.x);
  int64_t rows = a.dout.shape[0], inputs = a.x.shape[1], outputs = a.dout.shape[1];
  is_2d(op, "x", a.x, rows, inputs);
  is_type(op, "x", a.x, a.dout.dtype);
  linear_weight(op, "dweight", a.dweight, a.in_out_layout, outputs, inputs);
  if (tensor_exists(a.dbias)) gradient_vector(op, "dbias", a.dbias, outputs);
  if (a.alpha == 0) a.alpha = 1;
  CALL_WITH_SCRATCH(linear_backward_weight, MEMORY_WORKSPACE);
}

// --- activations -------------------------------------------------------------------------------------------

void gelu_forward(Backend *backend, GeluForward a) {
  const Op op = "gelu_forward";
  two_axes(op, "x", a.x);
  is_dense(op, "x", a.x);
  matrix(op, "out", a.out, a.x.dtype, a.x.shape[0], a.x.shape[1]);
  CALL(gelu_forward);
}

static void gate_up_halves(Op op, Tensor gate_up, const char *field, Tensor half) {
  two_axes(op, "gate_up", gate_up);
  is_dense(op, "gate_up", gate_up);
  if (gate_up.shape[1] % 2)
    fail("%s: gate_up is %s, and its row does not split in two", op, tensor_text(gate_up).text);
  matrix(op, field, half, gate_up.dtype, gate_up.shape[0], gate_up.shape[1] / 2);
}

void swiglu_forward(Backend *backend, SwigluForward a) {
  gate_up_halves("swiglu_forward", a.gate_up, "out", a.out);
  CALL(swiglu_forward);
}

void swiglu_backward(Backend *backend, SwigluBackward a) {
  const Op op = "swiglu_backward";
  gate_up_halves(op, a.gate_up, "dout", a.dout);
  matrix(op, "dgate_up", a.dgate_up, a.gate_up.dtype, a.gate_up.shape[0], a.gate_up.shape[1]);
  CALL(swiglu_backward);
}

// --- attention ---------------------------------------------------------------------------------------------

static void attention_heads(Op op, AttentionShape s, Tensor qkv) {
  if (s.batch < 1 || s.seq_len < 1 || s.num_heads < 1 || s.num_key_value_heads < 1 || s.head_dim < 1 ||
      s.num_heads % s.num_key_value_heads)
    fail("%s: batch %lld, seq_len %lld, num_heads %lld, num_key_value_heads %lld, head_dim %lld do not "
         "describe an "
         "attention",
         op, (long long)s.batch, (long long)s.seq_len, (long long)s.num_heads,
         (long long)s.num_key_value_heads, (long long)s.head_dim);
  two_axes(op, "qkv", qkv);
  matrix(op, "qkv", qkv, qkv.dtype, s.batch * s.seq_len,
         (s.num_heads + 2 * s.num_key_value_heads) * s.head_dim);
}

static void attention_results(Op op, AttentionShape s, Tensor qkv, Tensor out, Tensor lse) {
  attention_heads(op, s, qkv);
  matrix(op, "out", out, qkv.dtype, s.batch * s.seq_len, s.num_heads * s.head_dim);
  matrix(op, "lse", lse, DTYPE_F32, s.batch, s.num_heads * s.seq_len);
}

void rope(Backend *backend, Rope a) {
  const Op op = "rope";
  attention_heads(op, a.shape, a.qkv);
  if (a.shape.head_dim % 2) fail("%s: head_dim %lld is odd", op, (long long)a.shape.head_dim);
  two_axes(op, "cos_sin", a.cos_sin);
  matrix(op, "cos_sin", a.cos_sin, DTYPE_F32, a.cos_sin.shape[0], a.shape.head_dim);
  if (a.cos_sin.shape[0] < a.shape.seq_len)
    fail("%s: cos_sin is %s, too few positions for sequences of %lld", op, tensor_text(a.cos_sin).text,
         (long long)a.shape.seq_len);
  CALL(rope);
}

void attention_forward(Backend *backend, AttentionForward a) {
  attention_results("attention_forward", a.shape, a.qkv, a.out, a.lse);
  CALL_WITH_SCRATCH(attention_forward, MEMORY_WORKSPACE);
}

void attention_backward(Backend *backend, AttentionBackward a) {
  const Op op = "attention_backward";
  attention_results(op, a.shape, a.qkv, a.out, a.lse);
  matrix(op, "dqkv", a.dqkv, a.qkv.dtype, a.qkv.shape[0], a.qkv.shape[1]);
  matrix(op, "dout", a.dout, a.qkv.dtype, a.out.shape[0], a.out.shape[1]);
  if (a.dqkv.data == a.qkv.data) fail("%s: dqkv and qkv are the same tensor", op);
  CALL_WITH_SCRATCH(attention_backward, MEMORY_WORKSPACE);
}

void attention_decode(Backend *backend, AttentionDecode a) {
  const Op op = "attention_decode";
  AttentionShape s = a.shape;
  attention_heads(op, s, a.qkv);
  matrix(op, "out", a.out, a.qkv.dtype, s.batch * s.seq_len, s.num_heads * s.head_dim);
  two_axes(op, "keys", a.keys);
  matrix(op, "keys", a.keys, a.qkv.dtype, s.batch * s.num_key_value_heads, a.keys.shape[1]);
  matrix(op, "values", a.values, a.qkv.dtype, a.keys.shape[0], a.keys.shape[1]);
  if (a.past < 0 || a.past > a.keys.shape[1] / s.head_dim - s.seq_len)
    fail("%s: %lld tokens after %lld do not fit into keys, which is %s", op, (long long)s.seq_len,
         (long long)a.past, tensor_text(a.keys).text);
  CALL(attention_decode);
}

// --- the last layer's pieces -------------------------------------------------------------------------------

static void raw_gradient(Op op, Tensor dx_raw, Dtype dtype, int64_t rows, int64_t hidden_size) {
  gradient_matrix(op, "dx_raw", dx_raw, rows, hidden_size);
  if (dx_raw.dtype != DTYPE_F32) is_type(op, "dx_raw", dx_raw, dtype);
}

static void optional_vector(Op op, const char *field, Tensor t, Dtype dtype, int64_t count) {
  if (tensor_exists(t)) vector(op, field, t, dtype, count);
}

LossRows loss_rows_range(const LossRows *rows, int64_t first, int64_t count) {
  LossRows range = *rows;
  for (size_t i = 0; i < sizeof range.all / sizeof *range.all; i++)
    if (tensor_exists(range.all[i])) range.all[i] = tensor_rows(range.all[i], first, count);
  return range;
}

enum { ROW_SUMS = 4 }; // target_z, anchor, row_sum, target_e: what a row's loss needs

// Vectors that are there have `count` elements, and the first `needed` are there.
static void loss_rows(Op op, const LossRows *rows, int64_t count, size_t needed) {
  static const char *const names[] = {"target_z", "anchor",           "row_sum",      "target_e",
                                      "rescale",  "scale_non_target", "scale_target", "scale_uniform"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (i < needed || tensor_exists(rows->all[i])) vector(op, names[i], rows->all[i], DTYPE_F32, count);
}

void shard_indices(Backend *backend, ShardIndices a) {
  const Op op = "shard_indices";
  need(op, "indices", a.indices);
  vector(op, "indices", a.indices, DTYPE_I32, a.indices.shape[0]);
  vector(op, "out", a.out, DTYPE_I32, a.indices.shape[0]);
  if (a.first < 0 || a.count < 0)
    fail("%s: a part of %lld entries from %lld on", op, (long long)a.count, (long long)a.first);
  CALL(shard_indices);
}

void lce_target_logits(Backend *backend, LceTargetLogits a) {
  const Op op = "lce_target_logits";
  two_axes(op, "x", a.x);
  two_axes(op, "weight", a.weight);
  matrix(op, "x", a.x, a.x.dtype, a.x.shape[0], a.x.shape[1]);
  matrix(op, "weight", a.weight, a.x.dtype, a.weight.shape[0], a.x.shape[1]);
  vector(op, "targets", a.targets, DTYPE_I32, a.x.shape[0]);
  vector(op, "target_z", a.target_z, DTYPE_F32, a.x.shape[0]);
  CALL(lce_target_logits);
}

void lce_logits_exp(Backend *backend, LceLogitsExp a) {
  const Op op = "lce_logits_exp";
  two_axes(op, "x", a.x);
  two_axes(op, "weight", a.weight);
  int64_t rows = a.x.shape[0], hidden_size = a.x.shape[1], vocab_size = a.weight.shape[0];
  Dtype dtype = a.x.dtype;
  matrix(op, "x", a.x, dtype, rows, hidden_size);
  matrix(op, "weight", a.weight, dtype, vocab_size, hidden_size);
  vector(op, "targets", a.targets, DTYPE_I32, rows);
  loss_rows(op, &a.rows, rows, ROW_SUMS);
  if (tensor_exists(a.exps)) {
    is_2d(op, "exps", a.exps, rows, vocab_size);
    is_type(op, "exps", a.exps, dtype);
    if (tensor_exists(a.dx_raw)) raw_gradient(op, a.dx_raw, dtype, rows, hidden_size);
  } else {
    absent(op, "dx_raw", a.dx_raw, "exps is absent, so this is the forward pass alone");
  }
  CALL_WITH_SCRATCH(lce_logits_exp, MEMORY_HEAD);
}

void lce_combine(Backend *backend, LceCombine a) {
  const Op op = "lce_combine";
  need(op, "targets", a.targets);
  int64_t rows = a.targets.shape[0];
  vector(op, "targets", a.targets, DTYPE_I32, rows);
  loss_rows(op, &a.rows, rows, ROW_SUMS);
  need(op, "rescale", a.rows.rescale);
  vector(op, "parts", a.parts, DTYPE_F32, 2 * rows * backend->ranks);
  CALL(lce_combine);
}

static void loss_terms(Op op, const LossTerms *terms, int64_t vocab_size) {
  if (!(terms->label_smoothing >= 0 && terms->label_smoothing <= 1))
    fail("%s: label_smoothing is %g, which is not in [0, 1]", op, (double)terms->label_smoothing);
  if (!(terms->z_loss >= 0)) fail("%s: z_loss is %g, which is not 0 or more", op, (double)terms->z_loss);
  if (!(terms->softcap >= 0)) fail("%s: softcap is %g, which is not 0 or more", op, (double)terms->softcap);
  if (!(terms->temperature >= 0))
    fail("%s: temperature is %g, which is not 0 or more", op, (double)terms->temperature);
  optional_vector(op, "class_weights", terms->class_weights, DTYPE_F32, vocab_size);
  if (tensor_exists(terms->class_weights) && terms->label_smoothing > 0)
    vector(op, "class_weight_sum", terms->class_weight_sum, DTYPE_F32, 1);
}

static void token_outputs(Op op, const TokenOutputs *outputs, int64_t tokens) {
  optional_vector(op, "z_loss", outputs->z_loss, DTYPE_F32, tokens);
  optional_vector(op, "log_prob", outputs->log_prob, DTYPE_F32, tokens);
  optional_vector(op, "logsumexp", outputs->logsumexp, DTYPE_F32, tokens);
  optional_vector(op, "entropy", outputs->entropy, DTYPE_F32, tokens);
  optional_vector(op, "max_logit", outputs->max_logit, DTYPE_F32, tokens);
  optional_vector(op, "predicted", outputs->predicted, DTYPE_I32, tokens);
  optional_vector(op, "correct", outputs->correct, DTYPE_F32, tokens);
}

void lce_rows(Backend *backend, LceRows a) {
  const Op op = "lce_rows";
  need(op, "targets", a.targets);
  int64_t rows = a.targets.shape[0];
  vector(op, "targets", a.targets, DTYPE_I32, rows);
  loss_rows(op, &a.rows, rows, ROW_SUMS);
  if (tensor_exists(a.loss) || !tensor_exists(a.scaled_x)) vector(op, "loss", a.loss, DTYPE_F32, rows);
  loss_terms(op, &a.terms, a.vocab_size);
  if (a.terms.softcap > 0) fail("%s: a soft-cap does not act on whole rows", op);
  token_outputs(op, &a.outputs, rows);
  const char *why = "it is not told by row sums alone";
  absent(op, "entropy", a.outputs.entropy, why);
  absent(op, "max_logit", a.outputs.max_logit, why);
  absent(op, "predicted", a.outputs.predicted, why);
  absent(op, "correct", a.outputs.correct, why);
  optional_vector(op, "token_weights", a.token_weights, DTYPE_F32, rows);
  optional_vector(op, "factor", a.factor, DTYPE_F32, 1);
  two_axes(op, "x", a.x);
  matrix(op, "x", a.x, a.x.dtype, rows, a.x.shape[1]);
  bool smoothing = a.terms.label_smoothing > 0;
  if (smoothing) vector(op, "smoothing_row", a.smoothing_row, DTYPE_F32, a.x.shape[1]);
  if (tensor_exists(a.scaled_x)) {
    matrix(op, "scaled_x", a.scaled_x, a.x.dtype, rows, a.x.shape[1]);
    need(op, "scale_non_target", a.rows.scale_non_target);
    need(op, "scale_target", a.rows.scale_target);
    if (smoothing) need(op, "scale_uniform", a.rows.scale_uniform);
  }
  CALL(lce_rows);
}

static void filter_tiles(Op op, Tensor tiles, Tensor exps) {
  two_axes(op, "exps", exps);
  matrix(op, "tiles", tiles, DTYPE_F32, ceil_div(exps.shape[0], LCE_FILTER_ROWS),
         ceil_div(exps.shape[1], LCE_FILTER_COLUMNS));
}

void lce_filter(Backend *backend, LceFilter a) {
  const Op op = "lce_filter";
  filter_tiles(op, a.tiles, a.exps);
  vector(op, "stats", a.stats, DTYPE_F32, 3);
  loss_rows(op, &a.rows, a.exps.shape[0], 0);
  need(op, "row_sum", a.rows.row_sum);
  need(op, "target_e", a.rows.target_e);
  if (!(a.epsilon > 0 && a.epsilon < 1))
    fail("%s: epsilon is %g, which is not in (0, 1)", op, (double)a.epsilon);
  CALL(lce_filter);
}

void lce_filtered_gemms(Backend *backend, LceFilteredGemms a) {
  const Op op = "lce_filtered_gemms";
  filter_tiles(op, a.tiles, a.exps);
  two_axes(op, "weight", a.weight);
  int64_t rows = a.exps.shape[0], vocab_size = a.exps.shape[1], hidden_size = a.weight.shape[1];
  Dtype dtype = a.exps.dtype;
  matrix(op, "weight", a.weight, dtype, vocab_size, hidden_size);
  matrix(op, "scaled_x", a.scaled_x, dtype, rows, hidden_size);
  raw_gradient(op, a.dx_raw, dtype, rows, hidden_size);
  matrix(op, "dweight", a.dweight, DTYPE_F32, vocab_size, hidden_size);
  if (a.alpha == 0) a.alpha = 1;
  CALL_WITH_SCRATCH(lce_filtered_gemms, MEMORY_HEAD);
}

void lce_input_gradient(Backend *backend, LceInputGradient a) {
  const Op op = "lce_input_gradient";
  two_axes(op, "weight", a.weight);
  two_axes(op, "dx", a.dx);
  int64_t rows = a.dx.shape[0];
  gradient_matrix(op, "dx", a.dx, rows, a.weight.shape[1]);
  loss_rows(op, &a.rows, rows, 0);
  need(op, "scale_non_target", a.rows.scale_non_target);
  need(op, "scale_target", a.rows.scale_target);
  vector(op, "targets", a.targets, DTYPE_I32, rows);
  if (tensor_exists(a.smoothing_row) || tensor_exists(a.rows.scale_uniform)) {
    vector(op, "smoothing_row", a.smoothing_row, DTYPE_F32, a.weight.shape[1]);
    need(op, "scale_uniform", a.rows.scale_uniform);
  }
  CALL(lce_input_gradient);
}

void lce_target_gradient(Backend *backend, LceTargetGradient a) {
  const Op op = "lce_target_gradient";
  two_axes(op, "x", a.x);
  is_dense(op, "x", a.x);
  int64_t rows = a.x.shape[0];
  need(op, "dweight", a.dweight);
  gradient_matrix(op, "dweight", a.dweight, a.dweight.shape[0], a.x.shape[1]);
  vector(op, "scale_target", a.scale_target, DTYPE_F32, rows);
  vector(op, "targets", a.targets, DTYPE_I32, rows);
  CALL_WITH_SCRATCH(lce_target_gradient, MEMORY_HEAD);
}

void cross_entropy_in_place(Backend *backend, CrossEntropyInPlace a) {
  const Op op = "cross_entropy_in_place";
  two_axes(op, "logits", a.logits);
  int64_t tokens = a.logits.shape[0], vocab_size = a.logits.shape[1];
  vector(op, "targets", a.targets, DTYPE_I32, tokens);
  vector(op, "loss", a.loss, DTYPE_F32, tokens);
  token_outputs(op, &a.outputs, tokens);
  optional_vector(op, "token_weights", a.token_weights, DTYPE_F32, tokens);
  optional_vector(op, "entropy_weights", a.entropy_weights, DTYPE_F32, tokens);
  optional_vector(op, "factor", a.factor, DTYPE_F32, 1);
  if (tensor_exists(a.bias)) gradient_vector(op, "bias", a.bias, vocab_size);
  loss_terms(op, &a.terms, vocab_size);
  if (tensor_exists(a.dlogits)) {
    is_2d(op, "dlogits", a.dlogits, tokens, vocab_size);
    is_float(op, "dlogits", a.dlogits);
    size_t row = (size_t)a.logits.stride * dtype_bytes(a.logits.dtype);
    if (a.dlogits.data != a.logits.data || (size_t)a.dlogits.stride * dtype_bytes(a.dlogits.dtype) != row ||
        dtype_bytes(a.dlogits.dtype) > dtype_bytes(a.logits.dtype))
      fail("%s: dlogits is %s and does not lie in the place of logits, %s", op, tensor_text(a.dlogits).text,
           tensor_text(a.logits).text);
  }
  CALL(cross_entropy_in_place);
}

void loss_factor(Backend *backend, LossFactor a) {
  const Op op = "loss_factor";
  need(op, "targets", a.targets);
  vector(op, "targets", a.targets, DTYPE_I32, a.targets.shape[0]);
  vector(op, "factor", a.factor, DTYPE_F32, 1);
  if (tensor_exists(a.class_weights))
    vector(op, "class_weights", a.class_weights, DTYPE_F32, a.class_weights.shape[0]);
  CALL(loss_factor);
}

void read_targets(Backend *backend, ReadTargets a) {
  const Op op = "read_targets";
  need(op, "ids", a.ids);
  int64_t tokens = a.ids.shape[0];
  is_1d(op, "ids", a.ids, tokens);
  if (a.ids.dtype != DTYPE_I32) is_type(op, "ids", a.ids, DTYPE_I64);
  optional_vector(op, "targets", a.targets, DTYPE_I32, tokens);
  optional_vector(op, "loss", a.loss, DTYPE_F32, tokens);
  CALL(read_targets);
}

void weighted_column_sum(Backend *backend, WeightedColumnSum a) {
  const Op op = "weighted_column_sum";
  two_axes(op, "x", a.x);
  vector(op, "out", a.out, DTYPE_F32, a.x.shape[1]);
  optional_vector(op, "coefficients", a.coefficients, DTYPE_F32, a.x.shape[0]);
  CALL_WITH_SCRATCH(weighted_column_sum, MEMORY_HEAD);
}

void add_outer(Backend *backend, AddOuter a) {
  const Op op = "add_outer";
  two_axes(op, "out", a.out);
  matrix(op, "out", a.out, DTYPE_F32, a.out.shape[0], a.out.shape[1]);
  optional_vector(op, "rows", a.rows, DTYPE_F32, a.out.shape[0]);
  vector(op, "columns", a.columns, DTYPE_F32, a.out.shape[1]);
  CALL(add_outer);
}

// Row i of `few` and row rows[i] of `many` change places; vectors count as matrices of one column.
static void moved_rows(Op op, Tensor rows, const char *few_field, Tensor few, const char *many_field,
                       Tensor many) {
  need(op, few_field, few);
  need(op, many_field, many);
  vector(op, "rows", rows, DTYPE_I32, few.shape[0]);
  is_type(op, few_field, few, many.dtype);
  if (few.rank != many.rank || few.rank > 2 || (few.rank == 2 && few.shape[1] != many.shape[1]))
    fail("%s: %s is %s and %s is %s; their rows differ", op, few_field, tensor_text(few).text, many_field,
         tensor_text(many).text);
  is_dense(op, few_field, few);
  is_dense(op, many_field, many);
}

void gather_rows(Backend *backend, MoveRows a) {
  moved_rows("gather_rows", a.rows, "out", a.out, "x", a.x);
  CALL(gather_rows);
}

void scatter_rows(Backend *backend, MoveRows a) {
  moved_rows("scatter_rows", a.rows, "x", a.x, "out", a.out);
  CALL(scatter_rows);
}

// --- the optimizer -----------------------------------------------------------------------------------------

void adamw(Backend *backend, AdamW a) {
  const Op op = "adamw";
  need(op, "weight", a.weight);
  int64_t count = a.weight.shape[0];
  gradient_vector(op, "weight", a.weight, count);
  if (tensor_exists(a.master)) vector(op, "master", a.master, DTYPE_F32, count);
  gradient_vector(op, "m", a.m, count);
  gradient_vector(op, "v", a.v, count);
  gradient_vector(op, "grad", a.grad, count);
  vector(op, "grad_scale", a.grad_scale, DTYPE_F32, 1);
  if (a.step < 1) fail("%s: step %lld, but steps count from 1", op, (long long)a.step);
  CALL(adamw);
}

void reduce(Backend *backend, Reduce a) {
  const Op op = "reduce";
  need(op, "x", a.x);
  is_float(op, "x", a.x);
  is_dense(op, "x", a.x);
  vector(op, "sum", a.sum, DTYPE_F32, 1);
  CALL_WITH_SCRATCH(reduce, MEMORY_WORKSPACE);
}

void clip_scale(Backend *backend, ClipScale a) {
  const Op op = "clip_scale";
  vector(op, "norm", a.norm, DTYPE_F32, 1);
  vector(op, "scale", a.scale, DTYPE_F32, 1);
  vector(op, "sum_of_squares", a.sum_of_squares, DTYPE_F32, 1);
  CALL(clip_scale);
}

void fill_zero(Backend *backend, Tensor a) {
  need("fill_zero", "t", a);
  is_dense("fill_zero", "t", a);
  CALL(fill_zero);
}

// --- collectives -------------------------------------------------------------------------------------------

// `rounds` is how often a ring of the ranks passes the larger of the two tensors around.
static void collective(Op op, Backend *backend, Collective a, int64_t out_parts, int64_t x_parts,
                       int rounds) {
  need(op, "x", a.x);
  need(op, "out", a.out);
  is_type(op, "out", a.out, a.x.dtype);
  is_dense(op, "x", a.x);
  is_dense(op, "out", a.out);
  if (tensor_count(a.out) * out_parts != tensor_count(a.x) * x_parts)
    fail("%s over %d ranks: out is %s and x is %s", op, backend->ranks, tensor_text(a.out).text,
         tensor_text(a.x).text);
  double bytes = (double)tensor_bytes(tensor_count(a.out) > tensor_count(a.x) ? a.out : a.x);
  backend->wire_bytes += rounds * bytes * (backend->ranks - 1) / backend->ranks;
}

// The watchdog says where a rank waits.
#define CALL_COLLECTIVE(op)                                                                                  \
  do {                                                                                                       \
    ranks_enter(#op);                                                                                        \
    CALL(op);                                                                                                \
    ranks_leave();                                                                                           \
  } while (0)

void all_reduce(Backend *backend, Collective a) {
  collective("all_reduce", backend, a, 1, 1, 2);
  CALL_COLLECTIVE(all_reduce);
}

void reduce_scatter(Backend *backend, Collective a) {
  collective("reduce_scatter", backend, a, backend->ranks, 1, 1);
  if (a.accumulate) is_float("reduce_scatter", "out", a.out);
  CALL_COLLECTIVE(reduce_scatter);
}

void all_gather(Backend *backend, Collective a) {
  collective("all_gather", backend, a, 1, backend->ranks, 1);
  CALL_COLLECTIVE(all_gather);
}

void broadcast(Backend *backend, Collective a) {
  collective("broadcast", backend, a, 1, 1, 1);
  CALL_COLLECTIVE(broadcast);
}

void collectives_join(Backend *backend, int64_t behind) {
  if (backend->ops->collectives_join) backend->ops->collectives_join(backend, behind);
}

// --- copies and life ---------------------------------------------------------------------------------------

void backend_to_device(Backend *backend, Tensor destination, const void *host) {
  need("backend_to_device", "destination", destination);
  is_dense("backend_to_device", "destination", destination);
  if (backend->ops->to_device) backend->ops->to_device(backend, destination, host);
}

void backend_to_host(Backend *backend, void *host, Tensor source) {
  need("backend_to_host", "source", source);
  is_dense("backend_to_host", "source", source);
  ranks_enter("a device synchronization");
  if (backend->ops->to_host) backend->ops->to_host(backend, host, source);
  ranks_leave();
}

void backend_synchronize(Backend *backend) {
  ranks_enter("a device synchronization");
  if (backend->ops->synchronize) backend->ops->synchronize(backend);
  ranks_leave();
}

void backend_follow(Backend *backend, void *stream) {
  if (backend->ops->follow) backend->ops->follow(backend, stream);
}

void backend_precede(Backend *backend, void *stream) {
  if (backend->ops->precede) backend->ops->precede(backend, stream);
}

void backend_destroy(Backend *backend) {
  if (!backend) return;
  backend_synchronize(backend);
  memory_destroy(&backend->memory);
  if (backend->ops->destroy) backend->ops->destroy(backend);
  free(backend);
}
