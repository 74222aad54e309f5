// The entry points: every operation checks that its tensors fit together, pushes the backend's scratch, and
// calls the backend. So backends check nothing, and a plan, whose operations are NULL, checks and counts as a
// run does.
#include "kernels/kernels.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/profile.h"
#include "kernels/needs.h"
#include "kernels/ranks/ranks.h"

// --- checks ------------------------------------------------------------------------------------------------

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

static void fail_refused(Op op, const Field *f) {
  char sentence[256];
  const long long *n = f->numbers;
  snprintf(sentence, sizeof sentence, f->refused, n[0], n[1], n[2], n[3], n[4]);
  fail("%s: %s", op, sentence);
}

// Called for every operation of every step, so it only walks short strings. From the axes on, only "strided"
// has a d, and only "absent" an a.
void check_fields(Op op, const Field *fields) {
  int64_t sizes[LETTERS];
  memset(sizes, -1, sizeof sizes);
  Dtype operand = DTYPE_COUNT; // T; not known yet
  for (const Field *f = fields; f->name; f++) {
    const Tensor *t = &f->tensor;
    const char *axes = f->form ? strchr(f->form, '[') : NULL;
    if (f->refused) {
      if (*f->refused) fail_refused(op, f);
    } else if (!f->form) {
      sizes[*f->name % LETTERS] = f->size;
    } else if (!axes) {
      if (tensor_exists(*t)) fail("%s: %s is %s, but %s", op, f->name, tensor_text(*t).text, f->form + 8);
    } else if (tensor_exists(*t)) {
      if (!shape_fits(*t, axes, sizes)) fail_shape(op, f, axes, sizes);
      unsigned types = types_of(f->form, operand);
      if (!(types >> t->dtype & 1)) fail_type(op, f, types);
      if (f->form[0] == 'T' && operand == DTYPE_COUNT) operand = t->dtype;
      if (t->rank > 1 && !tensor_is_dense(*t) && !strchr(axes, 'd'))
        fail("%s: %s is %s with gaps between its rows", op, f->name, tensor_text(*t).text);
    } else if (!strchr(axes, 'a')) {
      fail("%s: %s is missing", op, f->name);
    }
  }
}

// --- each operation's needs: check_NAME, in the order of kernels.h -----------------------------------------

// --- tokens to vectors -------------------------------------------------------------------------------------

#define WHOLE_SEQUENCES                                                                                      \
  REFUSE(a->seq_len < 1 || a->tokens.shape[0] % a->seq_len, "%lld rows are not whole sequences of %lld",     \
         a->tokens.shape[0], a->seq_len)
#define ENOUGH_POSITIONS(field, length)                                                                      \
  REFUSE(tensor_exists(a->field) && a->field.shape[0] < length,                                              \
         #field " has %lld rows, too few positions for sequences of %lld", a->field.shape[0], length)

NEEDS(embedding_forward, EmbeddingForward, FIELD(token_weight, "T [V, H]"), FIELD(tokens, "int32 [N]"),
      FIELD(out, "T [N, H]"), FIELD(position_weight, "T [P, H] or absent"),
      FIELD(positions, "int32 [N] or absent"), WHOLE_SEQUENCES, ENOUGH_POSITIONS(position_weight, a->seq_len))

NEEDS(embedding_backward, EmbeddingBackward, FIELD(dout, "T [N, H]"), FIELD(tokens, "int32 [N]"),
      FIELD(positions, "int32 [N] or absent"), FIELD(dposition_weight, "fp32|bf16 [P, H] or absent"),
      FIELD(dtoken_weight,
            tensor_exists(a->dposition_weight) ? "fp32|bf16 [V, H] or absent" : "fp32|bf16 [V, H]"),
      WHOLE_SEQUENCES, ENOUGH_POSITIONS(dposition_weight, a->seq_len))

// --- normalisation -----------------------------------------------------------------------------------------

// N rows of width W = M H, and their M heads (R of all rows).
static int64_t heads_of(Tensor x, Tensor weight) {
  int64_t size = weight.shape[0];
  return size && x.shape[1] > size && x.shape[1] % size == 0 ? x.shape[1] / size : 1;
}

#define NORM_FIELDS                                                                                          \
  FIELD(weight, "T [H]"), SIZE(W, (heads_of(a->x, a->weight) * a->weight.shape[0])),                         \
      SIZE(R, (heads_of(a->x, a->weight) * a->x.shape[0])), FIELD(x, "T [N, W] strided"),                    \
      FIELD(rstd, "fp32 [R]"),                                                                               \
      FIELD(mean, a->kind == NORM_LAYER ? "fp32 [R]" : "absent: an RMS norm has no mean")
#define NORM_BIAS(field, form) FIELD(field, a->kind == NORM_LAYER ? form : "absent: an RMS norm has no bias")

NEEDS(norm_forward, NormForward, NORM_FIELDS, FIELD(out, "T [N, W] strided"), NORM_BIAS(bias, "T [H]"),
      FIELD(amax, "fp32 [1] or absent"),
      FIELD(residual, a->kind == NORM_RMS ? "T [N, W] or absent" : "absent: it is for an RMS norm"))

NEEDS(norm_backward, NormBackward, NORM_FIELDS, FIELD(dout, "T [N, W] strided"),
      FIELD(dx, "T [N, W] strided"), FIELD(amax, "fp32 [1] or absent"), FIELD(dweight, "fp32|bf16 [H]"),
      NORM_BIAS(dbias, "fp32|bf16 [H]"),
      FIELD(dx_sum, a->kind == NORM_LAYER && a->accumulate_dx && a->x.shape[1] == a->weight.shape[0]
                        ? "fp32|bf16 [H] or absent"
                        : "absent: it is for a LayerNorm of whole rows that adds to dx"),
      REFUSE(a->accumulate_dx && (a->dx.data == a->dout.data || a->dx.data == a->x.data),
             "dx, which is added to, and dout or x are the same tensor"))

// --- linear layers -----------------------------------------------------------------------------------------

#define COLUMNS_OF(activation, count) ((is_gated(activation) ? 2 : 1) * (count))

#define PRE_ACTIVATION FIELD(pre_activation, a->activation ? "T [N, P]" : "absent: it is for an activation")

NEEDS(linear_forward, LinearForward, FIELD(x, "T [N, I] strided"),
      FIELD(out, is_gated(a->activation) ? "T [N, O]" : "T|fp32 [N, O] strided"),
      SIZE(P, COLUMNS_OF(a->activation, a->out.shape[1])),
      FIELD(weight, a->in_out_layout ? "T [I, P]" : "T [P, I]"), FIELD(bias, "T [P] or absent"),
      PRE_ACTIVATION,
      FIELD(residual, a->activation               ? "absent: an activation and a residual do not go together"
                      : a->out.dtype == DTYPE_F32 ? "fp32 [N, O] strided or absent"
                                                  : "T [N, O] strided or absent"))

NEEDS(linear_backward_input, LinearBackwardInput, FIELD(dout, "T [N, O] strided"),
      FIELD(weight, a->in_out_layout ? "T [I, O]" : "T [O, I]"),
      SIZE(P, COLUMNS_OF(a->activation, a->weight.shape[!a->in_out_layout])),
      FIELD(dx, is_gated(a->activation) ? "T [N, P]" : "T|fp32 [N, P] strided"), PRE_ACTIVATION,
      FIELD(dactivation, is_gated(a->activation) ? "T [N, I]" : "absent: it is for a gated activation"),
      REFUSE(a->activation && a->accumulate, "an activation's gradient cannot be accumulated"))

static void check_linear_backward_weight(Op op, Backend *backend, LinearBackwardWeight *a) {
  CHECK(FIELD(dout, "T [N, O] strided"), FIELD(x, "T [N, I] strided"),
        FIELD(dweight, a->in_out_layout ? "fp32|bf16 [I, O]" : "fp32|bf16 [O, I]"),
        FIELD(dbias, "fp32|bf16 [O] or absent"));
  if (a->alpha == 0) a->alpha = 1;
}

static void check_sum_columns(Op op, Backend *backend, SumColumns *a) {
  CHECK(FIELD(x, "T [N, M] strided"), FIELD(sum, "fp32|bf16 [M]"), FIELD(coefficients, "fp32 [N] or absent"));
  if (a->alpha == 0) a->alpha = 1;
}

// --- FP8 ---------------------------------------------------------------------------------------------------

// A plan may ask what any size would need.
#define MULTIPLES_OF_16(field)                                                                               \
  REFUSE(!backend->memory.planning && (a->field.shape[0] % 16 || a->field.shape[1] % 16),                    \
         "FP8 takes multiples of 16 rows and columns, and not " #field " of %lld by %lld",                   \
         a->field.shape[0], a->field.shape[1])

NEEDS(quantize, Quantize, FIELD(x, "T [N, K]"), FIELD(out.codes, "e4m3 [N, K] or absent"),
      FIELD(out.transposed, "e4m3 [K, N] or absent"), FIELD(out.amax, "fp32 [1]"), MULTIPLES_OF_16(x))

NEEDS(quantize_rows, QuantizeRows, FIELD(x, "T [N, K]"), FIELD(out.codes, "e4m3 [N, K]"),
      FIELD(out.scale, a->out.scale.shape[0] == 1 ? "fp32 [1]" : "fp32 [N]"),
      REFUSE(!backend->memory.planning && a->x.shape[1] % 16,
             "FP8 takes multiples of 16 columns, and not x of %lld", a->x.shape[1]))

NEEDS(matmul_quantized, MatmulQuantized, FIELD(a.codes, "e4m3 [N, K]"), FIELD(b.codes, "e4m3 [O, K]"),
      FIELD(out, "T [N, O] strided"), FIELD(a.amax, "fp32 [1]"), FIELD(b.amax, "fp32 [1]"),
      FIELD(residual, "T [N, O] strided or absent"),
      FIELD(bias, backend->device == ON_CUDA && a->out.dtype == DTYPE_F32 ? "bf16 [O] or absent"
                                                                          : "T [O] or absent"),
      MULTIPLES_OF_16(a.codes), MULTIPLES_OF_16(b.codes))

// --- activations -------------------------------------------------------------------------------------------

#define NAMED_ACTIVATION REFUSE(!a->activation, "no activation is named")

// A matrix of this shape, which may be absent if codes are given.
#define MATRIX_OR_CODES(matrix, rows, columns)                                                               \
  FIELD(matrix, tensor_exists(a->quantized.amax) ? "T [" rows ", " columns "] or absent"                     \
                                                 : "T [" rows ", " columns "]"),                             \
      FIELD(quantized.codes, "e4m3 [" rows ", " columns "] or absent"),                                      \
      FIELD(quantized.transposed, "e4m3 [" columns ", " rows "] or absent"),                                 \
      FIELD(quantized.amax, tensor_exists(a->quantized.codes) || tensor_exists(a->quantized.transposed)      \
                                ? "fp32 [1]"                                                                 \
                                : "fp32 [1] or absent"),                                                     \
      MULTIPLES_OF_16(quantized.codes), MULTIPLES_OF_16(quantized.transposed)

static int64_t columns_out(const ActivationForward *a) {
  return tensor_exists(a->out) ? a->out.shape[1] : a->x.shape[1] / COLUMNS_OF(a->activation, 1);
}

NEEDS(activation_forward, ActivationForward, NAMED_ACTIVATION, SIZE(F, columns_out(a)),
      MATRIX_OR_CODES(out, "N", "F"), SIZE(P, COLUMNS_OF(a->activation, columns_out(a))),
      FIELD(x, "T [N, P]"))

NEEDS(activation_backward, ActivationBackward, NAMED_ACTIVATION, FIELD(dout, "T [N, F]"),
      SIZE(P, COLUMNS_OF(a->activation, a->dout.shape[1])), FIELD(x, "T [N, P]"),
      MATRIX_OR_CODES(dx, "N", "P"))

// --- attention ---------------------------------------------------------------------------------------------

static bool is_attention(AttentionShape s) {
  return s.batch >= 1 && s.seq_len >= 1 && s.num_heads >= 1 && s.num_key_value_heads >= 1 &&
         s.head_dim >= 1 && s.num_heads % s.num_key_value_heads == 0;
}

// N rows of the packed q, k and v (P) and of the output (O); lse is [B, L].
#define ATTENTION_SIZES                                                                                      \
  REFUSE(!is_attention(a->shape),                                                                            \
         "batch %lld, seq_len %lld, num_heads %lld, num_key_value_heads %lld, head_dim %lld do not "         \
         "describe an attention",                                                                            \
         a->shape.batch, a->shape.seq_len, a->shape.num_heads, a->shape.num_key_value_heads,                 \
         a->shape.head_dim),                                                                                 \
      SIZE(N, (a->shape.batch * a->shape.seq_len)), SIZE(D, a->shape.head_dim),                              \
      SIZE(P, (a->shape.num_heads + 2 * a->shape.num_key_value_heads) * a->shape.head_dim),                  \
      SIZE(O, (a->shape.num_heads * a->shape.head_dim)), SIZE(B, a->shape.batch),                            \
      SIZE(L, (a->shape.num_heads * a->shape.seq_len)), FIELD(qkv, "T [N, P]")

NEEDS(rope, Rope, ATTENTION_SIZES, FIELD(positions, "int32 [N] or absent"),
      REFUSE(a->shape.head_dim % 2, "head_dim %lld is odd", a->shape.head_dim),
      SIZE(A, (a->cos_sin.shape[1] & ~(int64_t)1)), FIELD(cos_sin, "fp32 [R, A]"),
      REFUSE(a->cos_sin.shape[1] > a->shape.head_dim, "cos_sin turns more than a head has"),
      ENOUGH_POSITIONS(cos_sin, a->shape.seq_len))

NEEDS(attention_forward, AttentionForward, ATTENTION_SIZES, FIELD(out, "T [N, O]"), FIELD(lse, "fp32 [B, L]"),
      FIELD(documents, "int32 [2, N] or absent"))

NEEDS(attention_backward, AttentionBackward, ATTENTION_SIZES, FIELD(out, "T [N, O]"),
      FIELD(lse, "fp32 [B, L]"), FIELD(dqkv, "T [N, P]"), FIELD(dout, "T [N, O]"),
      FIELD(documents, "int32 [2, N] or absent"), FIELD(dbias, "fp32|bf16 [P] or absent"),
      REFUSE(a->dqkv.data == a->qkv.data, "dqkv and qkv are the same tensor"))

NEEDS(attention_decode, AttentionDecode, ATTENTION_SIZES, FIELD(out, "T [N, O]"),
      SIZE(R, a->shape.batch * a->shape.num_key_value_heads), FIELD(keys, "T [R, C]"),
      FIELD(values, "T [R, C]"),
      REFUSE(a->past<0 || a->past> a->keys.shape[1] / max_i64(a->shape.head_dim, 1) - a->shape.seq_len,
             "%lld tokens after %lld do not fit into keys and values of %lld elements a head",
             a->shape.seq_len, a->past, a->keys.shape[1]))

// --- the LM head and its loss ------------------------------------------------------------------------------

SoftmaxStatistics softmax_statistics_range(const SoftmaxStatistics *softmax, int64_t first, int64_t count) {
  SoftmaxStatistics range = *softmax;
  for (size_t i = 0; i < sizeof range.all / sizeof *range.all; i++)
    range.all[i] = tensor_rows(range.all[i], first, count);
  return range;
}

int64_t lce_row_parts(const SoftmaxStatistics *softmax) {
#define GIVEN(name, ...) +tensor_exists(softmax->name)
  return PARTIAL_STATISTICS(GIVEN);
#undef GIVEN
}

#define FORM_F32 "fp32"
#define FORM_I32 "int32"

// A set of statistics has a bit for each.
#define BIT(name) (1u << offsetof(SoftmaxStatistics, name) / sizeof(Tensor))
#define ROW_SUMS  (BIT(target_z) | BIT(anchor) | BIT(row_sum) | BIT(target_e)) // what a row's loss needs
#define SCALES    (BIT(scale_non_target) | BIT(scale_target))

// Checks that given vectors have `rows` elements, and that those `needed` are given.
static void check_softmax(Op op, const SoftmaxStatistics *softmax, int64_t rows, unsigned needed) {
#define ROW(name, type, label)                                                                               \
  NAMED("softmax." #name, softmax->name,                                                                     \
        (needed & BIT(name)) ? FORM_##type " [C]" : FORM_##type " [C] or absent"),
  CHECK(SIZE(C, rows),
        SOFTMAX_STATISTICS(ROW) REFUSE(tensor_exists(softmax->max) != tensor_exists(softmax->best),
                                       "one of softmax.max and softmax.best is absent"));
#undef ROW
}

NEEDS(shard_indices, ShardIndices, FIELD(indices, "int32 [N]"), FIELD(out, "int32 [N]"),
      REFUSE(a->first < 0 || a->count < 0, "a part of %lld entries from %lld on", a->count, a->first))

NEEDS(lce_target_logits, LceTargetLogits, FIELD(x, "T [C, H]"), FIELD(weight, "T [V, H]"),
      FIELD(bias, "T [V] or absent"), FIELD(targets, "int32 [C]"), FIELD(target_z, "fp32 [C]"))

#define BACKWARD(field, form)                                                                                \
  FIELD(field, tensor_exists(a->exps) ? form " or absent"                                                    \
                                      : "absent: exps is absent, so this is the forward pass alone")

#define CODED(field, form)                                                                                   \
  FIELD(field, tensor_exists(a->weight_codes.codes) ? form : "absent: weight_codes.codes are absent")

static void check_lce_logits_exp(Op op, Backend *backend, LceLogitsExp *a) {
  CHECK(FIELD(x, "T [C, H]"), FIELD(weight, "T [V, H]"), FIELD(weight_codes.codes, "e4m3 [V, H] or absent"),
        CODED(weight_codes.scale, "fp32 [1]"), CODED(x_codes.codes, "e4m3 [C, H]"),
        CODED(x_codes.scale, "fp32 [C]"), FIELD(bias, "T [V] or absent"), FIELD(targets, "int32 [C]"),
        FIELD(exps, "T [C, V] strided or absent"), BACKWARD(dx_raw, "T|fp32 [C, H]"),
        SIZE(B, ceil_div(a->weight.shape[0], LCE_TILE_COLUMNS)), BACKWARD(tile_sums, "fp32 [C, B]"),
        REFUSE(tensor_exists(a->tile_sums) && (lce_row_parts(&a->softmax) > 2 || a->softcap > 0),
               "tile_sums exclude softmax.e_distance, e_squared and max, and a soft-cap"));
  check_softmax(op, &a->softmax, a->x.shape[0], ROW_SUMS);
}

static void check_lce_combine(Op op, Backend *backend, LceCombine *a) {
  CHECK(FIELD(targets, "int32 [C]"),
        SIZE(P, lce_row_parts(&a->softmax) * a->targets.shape[0] * backend->ranks), FIELD(parts, "fp32 [P]"));
  check_softmax(op, &a->softmax, a->targets.shape[0], ROW_SUMS | BIT(rescale));
}

void check_loss_terms(Op op, const LossTerms *a, int64_t vocab_size) {
  // Logits up to 1e30 times as large stay finite when they are divided by the lowest temperature.
#define IN_RANGE(name, lowest, highest, needed)                                                              \
  if (a->name != 0 && !(a->name >= lowest && a->name <= highest))                                            \
    fail("%s: " #name " is %g, which is not " needed, op, (double)a->name);
  LOSS_TERMS(IN_RANGE)
#undef IN_RANGE
  bool weighted_sum = tensor_exists(a->class_weights) && a->label_smoothing > 0;
  CHECK(SIZE(V, vocab_size), FIELD(class_weights, "fp32 [V] or absent"),
        FIELD(class_weight_sum, weighted_sum ? "fp32 [1]" : "fp32 [1] or absent"));
}

#define OUTPUT(name, type, statistic) FIELD(outputs.name, FORM_##type " [N] or absent"),
#define OUTPUT_KNOWN(name, type, statistic)                                                                  \
  REFUSE(tensor_exists(a->outputs.name) && !tensor_exists(a->softmax.statistic),                             \
         "outputs." #name " needs softmax." #statistic),

static void check_lce_row_losses(Op op, Backend *backend, LceRowLosses *a) {
  check_loss_terms(op, &a->terms, a->vocab_size);
  bool smoothing = a->terms.label_smoothing > 0, backward = tensor_exists(a->scaled_x);
  CHECK(FIELD(targets, "int32 [C]"), SIZE(N, a->targets.shape[0]),
        TOKEN_OUTPUTS(OUTPUT) TOKEN_OUTPUTS(OUTPUT_KNOWN) FIELD(x, "T [C, H]"),
        FIELD(scaled_x, "T [C, H] or absent"), SIZE(V, a->vocab_size),
        FIELD(exps, backward ? "T [C, V] strided or absent" : "absent: scaled_x is absent"),
        FIELD(loss, backward ? "fp32 [C] or absent" : "fp32 [C]"), FIELD(token_weights, "fp32 [C] or absent"),
        FIELD(factor, "fp32 [1] or absent"),
        FIELD(smoothing_row, smoothing ? "fp32 [H]" : "fp32 [H] or absent"),
        FIELD(smoothing_bias, "fp32 [1] or absent"));
  check_softmax(op, &a->softmax, a->targets.shape[0],
                ROW_SUMS | (backward ? SCALES : 0) | (backward && smoothing ? BIT(scale_uniform) : 0));
}

static void check_lce_sampled_gradients(Op op, Backend *backend, LceSampledGradients *a) {
  CHECK(FIELD(exps, "T [C, V] strided"), FIELD(weight, "T [V, H]"), FIELD(scaled_x, "T [C, H]"),
        FIELD(dx_raw, "T|fp32 [C, H]"), FIELD(dweight, "fp32 [V, H]"),
        SIZE(A, ceil_div(a->exps.shape[0], LCE_TILE_ROWS)),
        SIZE(B, ceil_div(a->exps.shape[1], LCE_TILE_COLUMNS)), FIELD(tiles, "fp32 [A, B]"),
        FIELD(tile_sums, "fp32 [C, B]"), FIELD(stats, "fp32 [3]"), FIELD(kept, "int32 [K] or absent"));
  check_softmax(op, &a->softmax, a->exps.shape[0], BIT(row_sum) | BIT(target_e));
  if (!(a->full_mass > 0)) fail("%s: full_mass is %g, which is not above 0", op, (double)a->full_mass);
  if (a->alpha == 0) a->alpha = 1;
}

static void check_lce_input_gradient(Op op, Backend *backend, LceInputGradient *a) {
  bool smoothing = tensor_exists(a->smoothing_row) || tensor_exists(a->softmax.scale_uniform);
  CHECK(FIELD(weight, "T [V, H] strided"), FIELD(dx, "fp32|bf16 [C, H]"), FIELD(targets, "int32 [C]"),
        FIELD(smoothing_row, smoothing ? "fp32 [H]" : "fp32 [H] or absent"));
  check_softmax(op, &a->softmax, a->dx.shape[0], SCALES | (smoothing ? BIT(scale_uniform) : 0));
}

NEEDS(lce_target_gradient, LceTargetGradient, FIELD(x, "T [C, H]"), FIELD(dweight, "fp32|bf16 [V, H]"),
      FIELD(scale_target, "fp32 [C] or absent"), FIELD(targets, "int32 [C]"))

static void check_cross_entropy_in_place(Op op, Backend *backend, CrossEntropyInPlace *a) {
  check_loss_terms(op, &a->terms, a->logits.shape[1]);
  CHECK(FIELD(logits, "T [N, V] strided"), FIELD(targets, "int32 [N]"), FIELD(loss, "fp32 [N]"),
        TOKEN_OUTPUTS(OUTPUT) FIELD(token_weights, "fp32 [N] or absent"),
        FIELD(entropy_weights, "fp32 [N] or absent"), FIELD(factor, "fp32 [1] or absent"),
        FIELD(bias, "T [V] or absent"));
}

NEEDS(loss_factor, LossFactor, FIELD(targets, "int32 [N]"), FIELD(factor, "fp32 [1]"),
      FIELD(class_weights, "fp32 [V] or absent"))

NEEDS(add_outer, AddOuter, FIELD(out, "fp32 [V, H]"), FIELD(rows, "fp32 [V] or absent"),
      FIELD(columns, "fp32 [H]"))

// Row i of `few` and row indices[i] of `many` change places; vectors count as matrices of one column.
#define MOVED(few, many)                                                                                     \
  FIELD(out, "any [...]"), FIELD(x, "any [...]"), SIZE(C, a->few.shape[0]), FIELD(indices, "int32 [C]"),     \
      REFUSE(a->few.dtype != a->many.dtype || a->few.rank != a->many.rank || a->few.rank > 2 ||              \
                 (a->few.rank == 2 && a->few.shape[1] != a->many.shape[1]),                                  \
             "the rows of out and x differ")

NEEDS(gather_rows, MoveRows, MOVED(out, x))
NEEDS(scatter_rows, MoveRows, MOVED(x, out))

// --- the optimizer -----------------------------------------------------------------------------------------

#define UPDATED                                                                                              \
  FIELD(weight, "fp32|bf16 [N]"), FIELD(grad, "fp32|bf16 [N]"),                                              \
      REFUSE(a->step < 1, "step %lld, but steps count from 1", a->step)

NEEDS(adamw, Update, UPDATED, FIELD(master, "fp32 [N] or absent"), FIELD(m, "fp32|bf16 [N]"),
      FIELD(v, "fp32|bf16 [N]"), FIELD(grad_scale, "fp32 [1]"))

NEEDS(nesterov, Update, UPDATED, FIELD(master, "absent: nesterov has none"), FIELD(m, "fp32|bf16 [N]"),
      FIELD(grad_scale, "fp32 [1]"))

NEEDS(sgd, Update, UPDATED, FIELD(master, "fp32 [N] or absent"))

#define MATRICES(field, form)                                                                                \
  FIELD(field.first, form), REFUSE(a->count > 1 && a->field.apart % 128,                                     \
                                   #field "'s matrices lie %lld elements apart", a->field.apart)

NEEDS(aol_scale, AolScale, SIZE(C, a->count), MATRICES(x, "T [M, N] strided"),
      MATRICES(out, "T [M, N] strided"), SIZE(S, min_i64(a->x.first.shape[0], a->x.first.shape[1])),
      MATRICES(gram, "T [S, S] strided"), FIELD(s, "fp32 [C, S]"))

NEEDS(batched_gemm, BatchedGemm, MATRICES(out, "T [M, N] strided"),
      MATRICES(addend, "T [M, N] strided or absent"),
      MATRICES(left, a->left_transposed ? "T [K, M] strided" : "T [M, K] strided"),
      MATRICES(right, a->right_transposed ? "T [N, K] strided" : "T [K, N] strided"))

NEEDS(sum_elements, SumElements, FIELD(x, "fp32|bf16 [...]"), FIELD(sum, "fp32 [1]"))

NEEDS(clip_scale, ClipScale, FIELD(norm, "fp32 [1]"), FIELD(scale, "fp32 [1]"),
      FIELD(sum_of_squares, "fp32 [1]"))

NEEDS(fill_zero, Tensor, NAMED("t", *a, "any [...]"))

// --- collectives and copies --------------------------------------------------------------------------------

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

#define COLLECTIVE(name, ...)                                                                                \
  static void check_##name(Op op, Backend *backend, Collective *a) {                                         \
    check_collective(op, backend, a, __VA_ARGS__);                                                           \
  }
COLLECTIVE(all_reduce, "fp32|bf16 [...]", 1, 1, 2)
COLLECTIVE(reduce_scatter, "fp32|bf16 [...]", backend->ranks, 1, 1)
COLLECTIVE(all_gather, "any [...]", 1, backend->ranks, 1)
COLLECTIVE(broadcast_rank_0, "any [...]", 1, 1, 1)

#define COPIED                                                                                               \
  FIELD(out, "any [N]"), FIELD(x, "any [N]"),                                                                \
      REFUSE(a->out.dtype != a->x.dtype, "out and x are of different types")
NEEDS(copy_in, Copy, COPIED)
NEEDS(copy_out, Copy, COPIED)

// --- the entry points --------------------------------------------------------------------------------------

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
    a.workspace = push_scratch(backend, "scratch of " #name, PROFILE_##group, bytes);                        \
    ranks_alive();                                                                                           \
    if (backend->ops->name) backend->ops->name(backend, &a);                                                 \
    memory_pop_to(&backend->memory, mark);                                                                   \
  }

static Tensor push_scratch(Backend *backend, const char *name, ProfileGroup group, size_t bytes) {
  if (!bytes) return (Tensor){0};
  MemoryCategory category = group == PROFILE_HEAD_LOSS ? MEMORY_HEAD : MEMORY_WORKSPACE;
  return memory_push_1d(&backend->memory, name, category, DTYPE_I32, (int64_t)((bytes + 3) / 4));
}

OPERATIONS(ENTRY, ENTRY_WITH_SCRATCH)

void collectives_join(Backend *backend, int64_t behind) {
  if (backend->ops->collectives_join) backend->ops->collectives_join(backend, behind);
}

void copies_join(Backend *backend, int64_t in, int64_t out) {
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

void backend_join_ranks(Backend *backend) {
  const Launch *l = ranks_self();
  if (l->ranks == 1) return;
  backend->rank = l->rank;
  backend->ranks = l->ranks;
  backend->ops->join_ranks(backend);
}

static _Thread_local Backend *unfinished;

Backend *backend_begin(const BackendOps *ops, const BackendScratch *scratch, DeviceKind device, Dtype dtype,
                       size_t state_bytes) {
  Backend *backend = host_alloc(1, sizeof *backend + state_bytes, "a backend");
  *backend = (Backend){
      .ops = ops, .scratch = scratch, .device = device, .dtype = dtype, .ranks = 1, .state = backend + 1};
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
