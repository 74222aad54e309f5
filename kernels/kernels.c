// The checked entry points: every operation checks here, once, that its tensors fit together, pushes the scratch that
// the backend needs, and calls the backend. A backend therefore checks nothing, and a plan, whose operations are all
// NULL, checks and counts exactly what a run does.
#include "kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/alloc.h"
#include "kernels/fail.h"
#include "kernels/profile.h"
#include "kernels/ranks/ranks.h"

// --- what is checked ---------------------------------------------------------------------------------------

// A field of an operation and the form it must have, in the notation of kernels.h:
//
//   "fp32 [N, H]"    its type and shape. A letter is one size in all fields of a call: the first field's, or SIZE's
//   "fp32|bf16 [3]"  one of several types. "T": fp32 or bf16, the same in all fields; "any [...]": any type, any shape
//   "... strided"    its rows may lie apart; without this word it is dense
//   "... or absent"  it may be left out
//   "absent: why"    it must be left out
typedef struct {
  const char *name;
  Tensor tensor;
  const char *form;
  int64_t size; // of the letter `name`, where form is NULL
} Field;

#define NAMED(text, value, needed)                                                                           \
  { .name = text, .tensor = value, .form = needed }
#define FIELD(field, needed) NAMED(#field, a->field, needed)
#define SIZE(letter, count)                                                                                  \
  { .name = #letter, .size = count }
#define CHECK(...) check_fields(op, (const Field[]){__VA_ARGS__, {0}})

typedef const char *Op; // the operation's name, for messages

enum { LETTERS = 32 }; // sizes[letter % LETTERS]; -1: not known yet

// Compares the axes of a form, from its '[' on; a size that is not known yet becomes the tensor's.
static bool shape_fits(Tensor t, const char *axes, int64_t *sizes) {
  if (axes[1] == '.') return true;
  int rank = 0;
  for (const char *axis = axes + 1; axis[-1] != ']'; axis += axis[1] == ']' ? 2 : 3, rank++) {
    if (rank == t.rank) return false;
    int64_t digit = *axis - '0', *size = *axis <= '9' ? &digit : &sizes[*axis % LETTERS];
    if (*size < 0) *size = t.shape[rank];
    if (*size != t.shape[rank]) return false;
  }
  return rank == t.rank;
}

static void fail_shape(Op op, const Field *f, const char *axes, const int64_t *sizes) {
  char needed[96] = "";
  for (size_t length = 0; axes[-1] != ']'; axes++, length = strlen(needed))
    if (*axes >= 'A' && *axes <= 'Z' && sizes[*axes % LETTERS] >= 0)
      snprintf(needed + length, sizeof needed - length, "%lld", (long long)sizes[*axes % LETTERS]);
    else
      snprintf(needed + length, sizeof needed - length, "%c", *axes);
  fail("%s: %s is %s where %s is needed", op, f->name, tensor_text(f->tensor).text, needed);
}

// The types that a form allows, as bits, with `operand` for T.
static unsigned types_of(const char *form, Dtype operand) {
  const unsigned fp32 = 1u << DTYPE_F32, bf16 = 1u << DTYPE_BF16;
  unsigned types = 0;
  for (const char *at = form; *at != ' '; at++) {
    if (at != form && at[-1] != '|') continue; // within a name
    if (*at == 'T') types |= operand == DTYPE_COUNT ? fp32 | bf16 : 1u << operand;
    if (*at == 'f') types |= fp32;
    if (*at == 'b') types |= bf16;
    if (*at == 'e') types |= 1u << DTYPE_E4M3;
    if (*at == 'i') types |= 1u << (at[3] == '3' ? DTYPE_I32 : DTYPE_I64);
    if (*at == 'a') types = ~0u; // any
  }
  return types;
}

static void fail_type(Op op, const Field *f, unsigned types) {
  char needed[64] = "";
  for (int d = 0; d < DTYPE_COUNT; d++) {
    size_t length = strlen(needed);
    if (types >> d & 1)
      snprintf(needed + length, sizeof needed - length, "%s%s", length ? " or " : "", dtype_name((Dtype)d));
  }
  fail("%s: %s is %s where %s is needed", op, f->name, tensor_text(f->tensor).text, needed);
}

// Called for every operation of every step, so it only walks short strings.
static void check_fields(Op op, const Field *fields) {
  int64_t sizes[LETTERS];
  memset(sizes, -1, sizeof sizes);
  Dtype operand = DTYPE_COUNT; // T; not known yet
  for (const Field *f = fields; f->name; f++) {
    const Tensor *t = &f->tensor;
    const char *axes = f->form ? strchr(f->form, '[') : NULL;
    if (!f->form) {
      sizes[*f->name % LETTERS] = f->size;
    } else if (!axes) {
      if (tensor_exists(*t)) fail("%s: %s is %s, but %s", op, f->name, tensor_text(*t).text, f->form + 8);
    } else if (tensor_exists(*t)) {
      if (!shape_fits(*t, axes, sizes)) fail_shape(op, f, axes, sizes);
      unsigned types = types_of(f->form, operand);
      if (!(types >> t->dtype & 1)) fail_type(op, f, types);
      if (f->form[0] == 'T' && operand == DTYPE_COUNT) operand = t->dtype;
      if (t->rank > 1 && !tensor_is_dense(*t) && !strstr(axes, "strided"))
        fail("%s: %s is %s with gaps between its rows", op, f->name, tensor_text(*t).text);
    } else if (!strstr(axes, "absent")) {
      fail("%s: %s is missing", op, f->name);
    }
  }
}

// --- what each operation needs: check_NAME of every operation, in the order of kernels.h --------------------

// An operation of which nothing but its fields is checked.
#define CHECK_FIELDS(operation, Arguments, ...)                                                              \
  static void check_##operation(Op op, Backend *backend, Arguments *a) {                                     \
    CHECK(__VA_ARGS__);                                                                                      \
  }

// --- tokens to vectors -------------------------------------------------------------------------------------

static void whole_sequences(Op op, int64_t rows, int64_t seq_len) {
  if (seq_len < 1 || rows % seq_len)
    fail("%s: %lld rows are not whole sequences of %lld", op, (long long)rows, (long long)seq_len);
}

static void enough_positions(Op op, const char *field, Tensor t, int64_t seq_len) {
  if (tensor_exists(t) && t.shape[0] < seq_len)
    fail("%s: %s is %s, too few positions for sequences of %lld", op, field, tensor_text(t).text,
         (long long)seq_len);
}

static void check_embedding_forward(Op op, Backend *backend, EmbeddingForward *a) {
  CHECK(FIELD(token_weight, "T [V, H]"), FIELD(tokens, "int32 [N]"), FIELD(out, "T [N, H]"),
        FIELD(position_weight, "T [P, H] or absent"), FIELD(positions, "int32 [N] or absent"));
  whole_sequences(op, a->tokens.shape[0], a->seq_len);
  enough_positions(op, "position_weight", a->position_weight, a->seq_len);
}

static void check_embedding_backward(Op op, Backend *backend, EmbeddingBackward *a) {
  CHECK(FIELD(dout, "T [N, H]"), FIELD(tokens, "int32 [N]"), FIELD(positions, "int32 [N] or absent"),
        FIELD(dposition_weight, "fp32|bf16 [P, H] or absent"),
        FIELD(dtoken_weight,
              tensor_exists(a->dposition_weight) ? "fp32|bf16 [V, H] or absent" : "fp32|bf16 [V, H]"));
  whole_sequences(op, a->tokens.shape[0], a->seq_len);
  enough_positions(op, "dposition_weight", a->dposition_weight, a->seq_len);
}

// --- normalisation -----------------------------------------------------------------------------------------

static const char NO_MEAN[] = "absent: an RMS norm has no mean",
                  NO_BIAS[] = "absent: an RMS norm has no bias";

// N rows of width W = M H, and their M heads (R of all rows); one that M H does not divide is no row of heads.
static int64_t heads_of(Tensor x, Tensor weight) {
  int64_t size = weight.shape[0];
  return size && x.shape[1] > size && x.shape[1] % size == 0 ? x.shape[1] / size : 1;
}

#define NORM_SIZES                                                                                           \
  SIZE(W, (heads_of(a->x, a->weight) * a->weight.shape[0])),                                                 \
      SIZE(R, (heads_of(a->x, a->weight) * a->x.shape[0]))

static void check_norm_forward(Op op, Backend *backend, NormForward *a) {
  bool layer = a->kind == NORM_LAYER;
  CHECK(FIELD(weight, "T [H]"), NORM_SIZES, FIELD(x, "T [N, W] strided"), FIELD(rstd, "fp32 [R]"),
        FIELD(mean, layer ? "fp32 [R]" : NO_MEAN), FIELD(out, "T [N, W] strided"),
        FIELD(bias, layer ? "T [H]" : NO_BIAS));
}

static void check_norm_backward(Op op, Backend *backend, NormBackward *a) {
  bool layer = a->kind == NORM_LAYER;
  CHECK(FIELD(weight, "T [H]"), NORM_SIZES, FIELD(x, "T [N, W] strided"), FIELD(rstd, "fp32 [R]"),
        FIELD(mean, layer ? "fp32 [R]" : NO_MEAN), FIELD(dout, "T [N, W] strided"),
        FIELD(dx, "T [N, W] strided"));
  if (a->dx.data == a->dout.data && a->accumulate_dx) fail("%s: dx and dout are the same tensor", op);
  CHECK(SIZE(H, a->weight.shape[0]), FIELD(dweight, "fp32|bf16 [H]"),
        FIELD(dbias, layer ? "fp32|bf16 [H]" : NO_BIAS),
        FIELD(dx_sum, layer && a->accumulate_dx && a->x.shape[1] == a->weight.shape[0]
                          ? "fp32|bf16 [H] or absent"
                          : "absent: it is for a LayerNorm of whole rows that adds to dx"));
}

// --- linear layers -----------------------------------------------------------------------------------------

static void check_linear_forward(Op op, Backend *backend, LinearForward *a) {
  bool activation = a->activation != ACTIVATION_NONE, gated = is_gated(a->activation);
  CHECK(FIELD(x, "T [N, I] strided"), FIELD(out, gated ? "T [N, O]" : "T|fp32 [N, O] strided"),
        SIZE(P, (gated ? 2 : 1) * a->out.shape[1]), FIELD(weight, a->in_out_layout ? "T [I, P]" : "T [P, I]"),
        FIELD(bias, "T [P] or absent"),
        FIELD(pre_activation, activation ? "T [N, P]" : "absent: it is for an activation"),
        FIELD(residual, activation ? "absent: an activation and a residual do not go together"
                        : a->out.dtype == DTYPE_F32 ? "fp32 [N, O] strided or absent"
                                                    : "T [N, O] strided or absent"));
}

static void check_linear_backward_input(Op op, Backend *backend, LinearBackwardInput *a) {
  int64_t inputs = a->weight.shape[a->in_out_layout ? 0 : 1];
  bool activation = a->activation != ACTIVATION_NONE, gated = is_gated(a->activation);
  CHECK(FIELD(dout, "T [N, O] strided"), FIELD(weight, a->in_out_layout ? "T [I, O]" : "T [O, I]"),
        SIZE(P, (gated ? 2 : 1) * inputs), FIELD(dx, gated ? "T [N, P]" : "T|fp32 [N, P] strided"),
        FIELD(pre_activation, activation ? "T [N, P]" : "absent: it is for an activation"),
        FIELD(dactivation, gated ? "T [N, I]" : "absent: it is for a gated activation"));
  if (activation && a->accumulate) fail("%s: an activation's gradient cannot be accumulated", op);
}

static void check_linear_backward_weight(Op op, Backend *backend, LinearBackwardWeight *a) {
  bool dweight = tensor_exists(a->dweight);
  CHECK(FIELD(dout, "T [N, O] strided"),
        FIELD(x, dweight ? "T [N, I] strided" : "absent: it is for dweight alone"),
        FIELD(dweight, a->in_out_layout ? "fp32|bf16 [I, O] or absent" : "fp32|bf16 [O, I] or absent"),
        FIELD(dbias, dweight ? "fp32|bf16 [O] or absent" : "fp32|bf16 [O]"),
        FIELD(coefficients, dweight ? "absent: they are for dbias alone" : "fp32 [N] or absent"));
  if (a->alpha == 0) a->alpha = 1;
}

// --- FP8 ---------------------------------------------------------------------------------------------------

// A plan may ask what any size would need.
static void multiples_of_16(Op op, const Backend *backend, Tensor t) {
  if (!backend->memory.planning && (t.shape[0] % 16 || t.shape[1] % 16))
    fail("%s: FP8 takes multiples of 16 rows and columns, and not %s", op, tensor_text(t).text);
}

static void check_quantize(Op op, Backend *backend, Quantize *a) {
  CHECK(FIELD(x, "T [N, K]"), FIELD(out.codes, "e4m3 [N, K] or absent"),
        FIELD(out.transposed, "e4m3 [K, N] or absent"), FIELD(out.amax, "fp32 [1]"));
  multiples_of_16(op, backend, a->x);
}

static void check_matmul_fp8(Op op, Backend *backend, MatmulFp8 *a) {
  bool fp32 = a->out.dtype == DTYPE_F32;
  CHECK(FIELD(a.codes, "e4m3 [N, K]"), FIELD(b.codes, "e4m3 [O, K]"), FIELD(out, "T [N, O] strided"),
        FIELD(a.amax, "fp32 [1]"), FIELD(b.amax, "fp32 [1]"), FIELD(residual, "T [N, O] strided or absent"),
        FIELD(bias, backend->device == ON_CUDA && fp32 ? "bf16 [O] or absent" : "T [O] or absent"));
  multiples_of_16(op, backend, a->a.codes);
  multiples_of_16(op, backend, a->b.codes);
}

// --- activations -------------------------------------------------------------------------------------------

static void activation_named(Op op, Activation activation) {
  if (activation == ACTIVATION_NONE) fail("%s: no activation is named", op);
}

static void check_activation_forward(Op op, Backend *backend, ActivationForward *a) {
  activation_named(op, a->activation);
  CHECK(FIELD(out, "T [N, F]"), SIZE(P, (is_gated(a->activation) ? 2 : 1) * a->out.shape[1]),
        FIELD(x, "T [N, P]"), FIELD(amax, "fp32 [1] or absent"));
}

static void check_activation_backward(Op op, Backend *backend, ActivationBackward *a) {
  activation_named(op, a->activation);
  CHECK(FIELD(dout, "T [N, F]"), SIZE(P, (is_gated(a->activation) ? 2 : 1) * a->dout.shape[1]),
        FIELD(x, "T [N, P]"), FIELD(dx, "T [N, P]"), FIELD(amax, "fp32 [1] or absent"));
}

// --- attention ---------------------------------------------------------------------------------------------

// N rows of the packed q, k and v (P) and of the output (O); lse is [B, L].
#define ATTENTION_SIZES                                                                                      \
  SIZE(N, (s.batch * s.seq_len)), SIZE(P, (s.num_heads + 2 * s.num_key_value_heads) * s.head_dim),           \
      SIZE(O, (s.num_heads * s.head_dim)), SIZE(B, s.batch), SIZE(L, (s.num_heads * s.seq_len))

static void attention_heads(Op op, AttentionShape s) {
  if (s.batch < 1 || s.seq_len < 1 || s.num_heads < 1 || s.num_key_value_heads < 1 || s.head_dim < 1 ||
      s.num_heads % s.num_key_value_heads)
    fail("%s: batch %lld, seq_len %lld, num_heads %lld, num_key_value_heads %lld, head_dim %lld do not "
         "describe an attention",
         op, (long long)s.batch, (long long)s.seq_len, (long long)s.num_heads,
         (long long)s.num_key_value_heads, (long long)s.head_dim);
}

static void check_rope(Op op, Backend *backend, Rope *a) {
  AttentionShape s = a->shape;
  attention_heads(op, s);
  CHECK(ATTENTION_SIZES, FIELD(qkv, "T [N, P]"), FIELD(positions, "int32 [N] or absent"));
  if (s.head_dim % 2) fail("%s: head_dim %lld is odd", op, (long long)s.head_dim);
  CHECK(SIZE(D, s.head_dim), FIELD(cos_sin, "fp32 [R, D]"));
  enough_positions(op, "cos_sin", a->cos_sin, s.seq_len);
}

static void check_attention_forward(Op op, Backend *backend, AttentionForward *a) {
  AttentionShape s = a->shape;
  attention_heads(op, s);
  CHECK(ATTENTION_SIZES, FIELD(qkv, "T [N, P]"), FIELD(out, "T [N, O]"), FIELD(lse, "fp32 [B, L]"),
        FIELD(documents, "int32 [2, N] or absent"));
}

static void check_attention_backward(Op op, Backend *backend, AttentionBackward *a) {
  AttentionShape s = a->shape;
  attention_heads(op, s);
  CHECK(ATTENTION_SIZES, FIELD(qkv, "T [N, P]"), FIELD(out, "T [N, O]"), FIELD(lse, "fp32 [B, L]"),
        FIELD(dqkv, "T [N, P]"), FIELD(dout, "T [N, O]"), FIELD(documents, "int32 [2, N] or absent"),
        FIELD(dbias, "fp32|bf16 [P] or absent"));
  if (a->dqkv.data == a->qkv.data) fail("%s: dqkv and qkv are the same tensor", op);
}

static void check_attention_decode(Op op, Backend *backend, AttentionDecode *a) {
  AttentionShape s = a->shape;
  attention_heads(op, s);
  CHECK(ATTENTION_SIZES, FIELD(qkv, "T [N, P]"), FIELD(out, "T [N, O]"),
        SIZE(R, s.batch * s.num_key_value_heads), FIELD(keys, "T [R, C]"), FIELD(values, "T [R, C]"));
  if (a->past < 0 || a->past > a->keys.shape[1] / s.head_dim - s.seq_len)
    fail("%s: %lld tokens after %lld do not fit into keys, which is %s", op, (long long)s.seq_len,
         (long long)a->past, tensor_text(a->keys).text);
}

// --- the LM head and its loss ------------------------------------------------------------------------------

LossRows loss_rows_range(const LossRows *rows, int64_t first, int64_t count) {
  LossRows range = *rows;
  for (size_t i = 0; i < sizeof range.all / sizeof *range.all; i++)
    if (tensor_exists(range.all[i])) range.all[i] = tensor_rows(range.all[i], first, count);
  return range;
}

// Vectors that are there have `count` elements, and those named in `needed` are there.
static void loss_rows(Op op, const LossRows *rows, int64_t count, const char *needed) {
  static const char *const names[] = {"target_z", "anchor",           "row_sum",      "target_e",
                                      "rescale",  "scale_non_target", "scale_target", "scale_uniform"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    CHECK(SIZE(C, count),
          NAMED(names[i], rows->all[i], strstr(needed, names[i]) ? "fp32 [C]" : "fp32 [C] or absent"));
}

#define ROW_SUMS "target_z, anchor, row_sum, target_e" // what a row's loss needs

static void check_shard_indices(Op op, Backend *backend, ShardIndices *a) {
  CHECK(FIELD(indices, "int32 [N]"), FIELD(out, "int32 [N]"));
  if (a->first < 0 || a->count < 0)
    fail("%s: a part of %lld entries from %lld on", op, (long long)a->count, (long long)a->first);
}

CHECK_FIELDS(lce_target_logits, LceTargetLogits, FIELD(x, "T [C, H]"), FIELD(weight, "T [V, H]"),
             FIELD(targets, "int32 [C]"), FIELD(target_z, "fp32 [C]"))

#define FORWARD_ONLY "absent: exps is absent, so this is the forward pass alone"

static void check_lce_logits_exp(Op op, Backend *backend, LceLogitsExp *a) {
  CHECK(FIELD(x, "T [C, H]"), FIELD(weight, "T [V, H]"), FIELD(targets, "int32 [C]"),
        FIELD(exps, "T [C, V] strided or absent"),
        FIELD(dx_raw, tensor_exists(a->exps) ? "T|fp32 [C, H] or absent" : FORWARD_ONLY),
        SIZE(B, ceil_div(a->weight.shape[0], LCE_TILE_COLUMNS)),
        FIELD(tile_sums, tensor_exists(a->exps) ? "fp32 [C, B] or absent" : FORWARD_ONLY));
  loss_rows(op, &a->rows, a->x.shape[0], ROW_SUMS);
}

static void check_lce_combine(Op op, Backend *backend, LceCombine *a) {
  CHECK(FIELD(targets, "int32 [C]"), SIZE(P, 2 * a->targets.shape[0] * backend->ranks),
        FIELD(parts, "fp32 [P]"));
  loss_rows(op, &a->rows, a->targets.shape[0], ROW_SUMS ", rescale");
}

// Logits up to 1e30 times as large stay finite when they are divided by it.
static const float MIN_TEMPERATURE = 1e-6f;

static void loss_terms(Op op, const LossTerms *a, int64_t vocab_size) {
  if (!(a->label_smoothing >= 0 && a->label_smoothing <= 1))
    fail("%s: label_smoothing is %g, which is not in [0, 1]", op, (double)a->label_smoothing);
  if (!(a->z_loss >= 0 && isfinite(a->z_loss)))
    fail("%s: z_loss is %g, which is not 0 or more and finite", op, (double)a->z_loss);
  if (!(a->softcap >= 0 && isfinite(a->softcap)))
    fail("%s: softcap is %g, which is not 0 or more and finite", op, (double)a->softcap);
  if (!(a->temperature == 0 || (a->temperature >= MIN_TEMPERATURE && isfinite(a->temperature))))
    fail("%s: temperature is %g, which is neither 0 (none) nor a finite number from %g on", op,
         (double)a->temperature, (double)MIN_TEMPERATURE);
  bool weighted_sum = tensor_exists(a->class_weights) && a->label_smoothing > 0;
  CHECK(SIZE(V, vocab_size), FIELD(class_weights, "fp32 [V] or absent"),
        FIELD(class_weight_sum, weighted_sum ? "fp32 [1]" : "fp32 [1] or absent"));
}

// The last four need a row's logits side by side: absent, with the reason `row_sums_only`, where only sums are known.
static void token_outputs(Op op, const TokenOutputs *a, int64_t tokens, const char *row_sums_only) {
  const char *form = row_sums_only ? row_sums_only : "fp32 [N] or absent";
  CHECK(SIZE(N, tokens), FIELD(z_loss, "fp32 [N] or absent"), FIELD(log_prob, "fp32 [N] or absent"),
        FIELD(logsumexp, "fp32 [N] or absent"), FIELD(entropy, form), FIELD(max_logit, form),
        FIELD(predicted, row_sums_only ? row_sums_only : "int32 [N] or absent"), FIELD(correct, form));
}

static void check_lce_rows(Op op, Backend *backend, LceRows *a) {
  loss_terms(op, &a->terms, a->vocab_size);
  if (a->terms.softcap > 0) fail("%s: a soft-cap does not act on whole rows", op);
  bool smoothing = a->terms.label_smoothing > 0, backward = tensor_exists(a->scaled_x);
  CHECK(FIELD(targets, "int32 [C]"), FIELD(x, "T [C, H]"), FIELD(scaled_x, "T [C, H] or absent"),
        FIELD(loss, backward ? "fp32 [C] or absent" : "fp32 [C]"), FIELD(token_weights, "fp32 [C] or absent"),
        FIELD(factor, "fp32 [1] or absent"),
        FIELD(smoothing_row, smoothing ? "fp32 [H]" : "fp32 [H] or absent"));
  token_outputs(op, &a->outputs, a->targets.shape[0], "absent: it does not follow from row sums alone");
  loss_rows(op, &a->rows, a->targets.shape[0],
            !backward    ? ROW_SUMS
            : !smoothing ? ROW_SUMS ", scale_non_target, scale_target"
                         : ROW_SUMS ", scale_non_target, scale_target, scale_uniform");
}

static void check_lce_sampled_gradients(Op op, Backend *backend, LceSampledGradients *a) {
  CHECK(FIELD(exps, "T [C, V] strided"), FIELD(weight, "T [V, H]"), FIELD(scaled_x, "T [C, H]"),
        FIELD(dx_raw, "T|fp32 [C, H]"), FIELD(dweight, "fp32 [V, H]"),
        SIZE(A, ceil_div(a->exps.shape[0], LCE_TILE_ROWS)),
        SIZE(B, ceil_div(a->exps.shape[1], LCE_TILE_COLUMNS)), FIELD(tiles, "fp32 [A, B]"),
        FIELD(tile_sums, "fp32 [C, B]"), FIELD(stats, "fp32 [3]"), FIELD(kept, "int32 [K] or absent"));
  loss_rows(op, &a->rows, a->exps.shape[0], "row_sum, target_e");
  if (!(a->full_mass > 0)) fail("%s: full_mass is %g, which is not above 0", op, (double)a->full_mass);
  if (a->alpha == 0) a->alpha = 1;
}

static void check_lce_input_gradient(Op op, Backend *backend, LceInputGradient *a) {
  bool smoothing = tensor_exists(a->smoothing_row) || tensor_exists(a->rows.scale_uniform);
  CHECK(FIELD(weight, "T [V, H] strided"), FIELD(dx, "fp32|bf16 [C, H]"), FIELD(targets, "int32 [C]"),
        FIELD(smoothing_row, smoothing ? "fp32 [H]" : "fp32 [H] or absent"));
  loss_rows(op, &a->rows, a->dx.shape[0],
            smoothing ? "scale_non_target, scale_target, scale_uniform" : "scale_non_target, scale_target");
}

CHECK_FIELDS(lce_target_gradient, LceTargetGradient, FIELD(x, "T [C, H]"), FIELD(dweight, "fp32|bf16 [V, H]"),
             FIELD(scale_target, "fp32 [C]"), FIELD(targets, "int32 [C]"))

static void check_cross_entropy_in_place(Op op, Backend *backend, CrossEntropyInPlace *a) {
  CHECK(FIELD(logits, "T [N, V] strided"), FIELD(targets, "int32 [N]"), FIELD(loss, "fp32 [N]"),
        FIELD(token_weights, "fp32 [N] or absent"), FIELD(entropy_weights, "fp32 [N] or absent"),
        FIELD(factor, "fp32 [1] or absent"), FIELD(bias, "fp32|bf16 [V] or absent"),
        FIELD(dlogits, "fp32|bf16 [N, V] strided or absent"));
  token_outputs(op, &a->outputs, a->logits.shape[0], NULL);
  loss_terms(op, &a->terms, a->logits.shape[1]);
  size_t from = dtype_bytes(a->logits.dtype), to = dtype_bytes(a->dlogits.dtype);
  if (tensor_exists(a->dlogits) && (a->dlogits.data != a->logits.data || to > from ||
                                    (size_t)a->dlogits.stride * to != (size_t)a->logits.stride * from))
    fail("%s: dlogits is %s and does not lie in the place of logits, %s", op, tensor_text(a->dlogits).text,
         tensor_text(a->logits).text);
}

CHECK_FIELDS(loss_factor, LossFactor, FIELD(targets, "int32 [N]"), FIELD(factor, "fp32 [1]"),
             FIELD(class_weights, "fp32 [V] or absent"))

CHECK_FIELDS(read_targets, ReadTargets, FIELD(ids, "int32|int64 [N]"), FIELD(targets, "int32 [N] or absent"),
             FIELD(loss, "fp32 [N] or absent"))

static void check_scale_by(Op op, Backend *backend, ScaleBy *a) {
  const char *form = backend->device == ON_CUDA ? "fp32|bf16 [N]" : "fp32 [N]";
  CHECK(FIELD(x, form), FIELD(out, form), FIELD(factor, "fp32 [1]"));
}

CHECK_FIELDS(add_outer, AddOuter, FIELD(out, "fp32 [V, H]"), FIELD(rows, "fp32 [V] or absent"),
             FIELD(columns, "fp32 [H]"))

// Row i of `few` and row rows[i] of `many` change places; vectors count as matrices of one column.
static void moved_rows(Op op, const MoveRows *a, Tensor few, Tensor many) {
  CHECK(FIELD(out, "any [...]"), FIELD(x, "any [...]"), SIZE(C, few.shape[0]), FIELD(rows, "int32 [C]"));
  if (few.dtype != many.dtype || few.rank != many.rank || few.rank > 2 ||
      (few.rank == 2 && few.shape[1] != many.shape[1]))
    fail("%s: out is %s and x is %s; their rows differ", op, tensor_text(a->out).text,
         tensor_text(a->x).text);
}

static void check_gather_rows(Op op, Backend *backend, MoveRows *a) {
  moved_rows(op, a, a->out, a->x);
}

static void check_scatter_rows(Op op, Backend *backend, MoveRows *a) {
  moved_rows(op, a, a->x, a->out);
}

// --- the optimizer -----------------------------------------------------------------------------------------

static void check_adamw(Op op, Backend *backend, AdamW *a) {
  CHECK(FIELD(weight, "fp32|bf16 [N]"), FIELD(master, "fp32 [N] or absent"), FIELD(m, "fp32|bf16 [N]"),
        FIELD(v, "fp32|bf16 [N]"), FIELD(grad, "fp32|bf16 [N]"), FIELD(grad_scale, "fp32 [1]"));
  if (a->step < 1) fail("%s: step %lld, but steps count from 1", op, (long long)a->step);
}

CHECK_FIELDS(reduce, Reduce, FIELD(x, "fp32|bf16 [...]"), FIELD(sum, "fp32 [1]"))

CHECK_FIELDS(clip_scale, ClipScale, FIELD(norm, "fp32 [1]"), FIELD(scale, "fp32 [1]"),
             FIELD(sum_of_squares, "fp32 [1]"))

CHECK_FIELDS(fill_zero, Tensor, NAMED("t", *a, "any [...]"))

// --- collectives -------------------------------------------------------------------------------------------

// `rounds` is how often a ring of the ranks passes the larger of the two tensors around.
static void check_collective(Op op, Backend *backend, const Collective *a, const char *form,
                             int64_t out_parts, int64_t x_parts, int rounds) {
  CHECK(FIELD(x, form), FIELD(out, form));
  int64_t out = tensor_count(a->out), x = tensor_count(a->x);
  if (a->out.dtype != a->x.dtype || out * out_parts != x * x_parts)
    fail("%s over %d ranks: out is %s and x is %s", op, backend->ranks, tensor_text(a->out).text,
         tensor_text(a->x).text);
  double bytes = (double)max_i64(out, x) * (double)dtype_bytes(a->x.dtype);
  backend->wire_bytes += rounds * bytes * (backend->ranks - 1) / backend->ranks;
}

static void check_all_reduce(Op op, Backend *backend, Collective *a) {
  check_collective(op, backend, a, "fp32|bf16 [...]", 1, 1, 2);
}

static void check_reduce_scatter(Op op, Backend *backend, Collective *a) {
  check_collective(op, backend, a, "fp32|bf16 [...]", backend->ranks, 1, 1);
}

static void check_all_gather(Op op, Backend *backend, Collective *a) {
  check_collective(op, backend, a, "any [...]", 1, backend->ranks, 1);
}

static void check_broadcast(Op op, Backend *backend, Collective *a) {
  check_collective(op, backend, a, "any [...]", 1, 1, 1);
}

static void check_copy_in(Op op, Backend *backend, Copy *a) {
  CHECK(FIELD(out, "any [N]"), FIELD(x, "any [N]"));
  if (a->out.dtype != a->x.dtype) fail("%s: out and x are of different types", op);
}

static void check_copy_out(Op op, Backend *backend, Copy *a) {
  check_copy_in(op, backend, a);
}

// --- the entry points ---------------------------------------------------------------------------------------

// The watchdog reports where a rank waits for others.
#define ENTRY(name, Arguments, group)                                                                        \
  void name(Backend *backend, Arguments a) {                                                                 \
    check_##name(#name, backend, &a);                                                                        \
    ranks_enter(PROFILE_##group == PROFILE_COMMUNICATION ? #name : NULL);                                    \
    if (backend->ops->name) backend->ops->name(backend, &a);                                                 \
    ranks_leave();                                                                                           \
  }
#define ENTRY_WITH_SCRATCH(name, Arguments, group)                                                           \
  void name(Backend *backend, Arguments a) {                                                                 \
    check_##name(#name, backend, &a);                                                                        \
    MemoryMark mark = memory_mark(&backend->memory);                                                         \
    size_t bytes = backend->scratch->name ? backend->scratch->name(&a) : 0;                                  \
    a.workspace = push_scratch(backend, #name, PROFILE_##group, bytes);                                      \
    ranks_alive();                                                                                           \
    if (backend->ops->name) backend->ops->name(backend, &a);                                                 \
    memory_pop_to(&backend->memory, mark);                                                                   \
  }

static Tensor push_scratch(Backend *backend, Op op, ProfileGroup group, size_t bytes) {
  if (!bytes) return (Tensor){0};
  MemoryCategory category = group == PROFILE_HEAD_LOSS ? MEMORY_HEAD : MEMORY_WORKSPACE;
  return memory_push_1d(&backend->memory, op, category, DTYPE_I32, (int64_t)((bytes + 3) / 4));
}

OPERATIONS(ENTRY, ENTRY_WITH_SCRATCH)

// A backend remembers the ends of the last ASYNC_EVENTS operations.
static void check_behind(Op op, int64_t behind) {
  if (behind < 0 || behind >= ASYNC_EVENTS)
    fail("internal: %s leaves out the last %lld operations, and can leave out at most %d", op,
         (long long)behind, ASYNC_EVENTS - 1);
}

void collectives_join(Backend *backend, int64_t behind) {
  check_behind(__func__, behind);
  if (backend->ops->collectives_join) backend->ops->collectives_join(backend, behind);
}

void copies_join(Backend *backend, int64_t in, int64_t out) {
  check_behind(__func__, in);
  check_behind(__func__, out);
  if (backend->ops->copies_join) backend->ops->copies_join(backend, in, out);
}

// --- copies and life ---------------------------------------------------------------------------------------

void backend_to_device(Backend *backend, Tensor destination, const void *host) {
  check_fields("backend_to_device", (const Field[]){NAMED("destination", destination, "any [...]"), {0}});
  if (backend->ops->to_device) backend->ops->to_device(backend, destination, host);
}

void backend_to_host(Backend *backend, void *host, Tensor source) {
  check_fields("backend_to_host", (const Field[]){NAMED("source", source, "any [...]"), {0}});
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

static _Thread_local Backend *unfinished;

Backend *backend_begin(const BackendOps *ops, DeviceKind device, Dtype dtype, size_t state_bytes) {
  Backend *backend = host_alloc(1, sizeof *backend + state_bytes, "a backend");
  *backend = (Backend){.ops = ops, .device = device, .dtype = dtype, .ranks = 1, .state = backend + 1};
  return unfinished = backend;
}

Backend *backend_finish(Backend *backend) {
  unfinished = NULL;
  return backend;
}

void backend_abandon(void) {
  backend_destroy(backend_finish(unfinished));
}

void backend_destroy(Backend *backend) {
  if (!backend) return;
  backend_synchronize(backend);
  memory_destroy(&backend->memory);
  profile_end(backend);
  if (backend->ops->destroy) backend->ops->destroy(backend);
  free(backend);
}
