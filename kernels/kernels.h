// The arithmetic: every operation of a transformer's training step, one interface for all backends. An
// operation takes one struct of tensors and scalars, whose comments give types and shapes:
//
//     norm_forward(backend, (NormForward){.out = y, .rstd = rstd, .x = x, .weight = w, .epsilon = 1e-5f});
//
// An absent tensor's data is NULL; only fields marked "or absent" may be absent. The entry point of an
// operation (kernels.c) checks shapes and dtypes, fails with a sentence that names both shapes, pushes the
// backend's scratch (`workspace`, which callers leave out), and calls the backend, which checks nothing.
//
// Backends: cpu (fp32, the readable reference), cuda (bf16 or fp32 operands, fp32 accumulation and
// statistics), plan (runs nothing; the ledger counts). Calls are asynchronous in the order of one stream:
// only backend_to_host and backend_synchronize wait. Results are bitwise repeatable on one machine and build.
//
// Letters: N rows (tokens; N = B*T), B sequences, T positions, H hidden size, V vocabulary, F intermediate
// size, C rows of a chunk. "fp32/bf16" is one of the two, the same within one call unless said otherwise; a
// tensor is dense unless it "may be strided". Gradients of weights are written, or added to with
// `accumulate`; they may be fp32 where the operands are bf16. Sums run in fp32 or wider.
#pragma once

#include "kernels/base/integers.h"
#include "kernels/base/memory.h"
#include "kernels/base/tensor.h"

__BEGIN_DECLS

typedef struct Backend Backend;

enum {
  IGNORE_INDEX = -100, // a target that is not counted: no loss, no gradient (PyTorch's ignore_index default)
  ELSEWHERE = -1       // internal, callers never pass it: a token in another rank's part (ShardIndices)
};

// --- tokens to vectors -------------------------------------------------------------------------------------

// out[n] = token_weight[tokens[n]] + position_weight[position].   Llama and Qwen have only the first.
// A position is n mod T or, where a sequence packs documents, the place in its document: positions[n].
typedef struct {
  Tensor out;             // fp32/bf16 [N, H]
  Tensor tokens;          // int32 [N], each in [0, V)
  Tensor token_weight;    // fp32/bf16 [V, H]
  Tensor position_weight; // fp32/bf16 [P, H] with P >= T, or absent
  Tensor positions;       // int32 [N], each in [0, T); or absent
  int64_t seq_len;        // T, divides N
} EmbeddingForward;

// dtoken_weight[v] (+)= sum of dout[n] with tokens[n] = v;  dposition_weight[t] (+)= sum of those at t.
// Sorted, then summed segment by segment: no atomics. Without accumulate, rows that nothing names become 0.
typedef struct {
  Tensor dtoken_weight;    // fp32 or bf16 [V, H]; absent: the positions' alone
  Tensor dposition_weight; // fp32 or bf16 [P, H], or absent
  Tensor dout;             // fp32/bf16 [N, H]
  Tensor tokens;           // int32 [N]; ELSEWHERE names no row
  Tensor positions;        // int32 [N], or absent
  int64_t seq_len;
  bool accumulate_token, accumulate_position;
  Tensor workspace;
} EmbeddingBackward;

// --- normalisation -----------------------------------------------------------------------------------------
// The GEMM before a norm adds the residual (LinearForward.residual), or the norm after a GEMM does (OLMo 2).
// A row may hold M heads of H elements, each normalised on its own with the same weight (Qwen3's q and k).

typedef enum {
  NORM_LAYER, // (x - mean) * rstd * weight + bias, rstd = 1/sqrt(variance + epsilon)   (Ba et al. 2016)
  NORM_RMS    // x * rstd * weight,                 rstd = 1/sqrt(mean(x^2) + epsilon)  (Zhang, Sennrich 2019)
} NormKind;

typedef struct {
  NormKind kind;
  Tensor out;          // fp32/bf16 [N, M H]; may be strided
  Tensor mean, rstd;   // fp32 [N M], saved for the backward pass; no mean for NORM_RMS
  Tensor x;            // fp32/bf16 [N, M H]; may be strided
  Tensor weight, bias; // fp32/bf16 [H]; no bias for NORM_RMS
  Tensor residual;     // fp32/bf16 [N, M H], or absent: added to the norm; for NORM_RMS
  Tensor amax;         // fp32 [1], or absent: max |out|, for quantize
  float epsilon;
} NormForward;

// With g = dout * weight and xhat = (x - mean) * rstd (mean 0 for NORM_RMS):
//   dx (+)= rstd * (g - [mean(g)] - xhat * mean(g * xhat)),  mean(g) only for NORM_LAYER
//   dweight (+)= sum_n dout[n] * xhat[n],   dbias (+)= sum_n dout[n]
//   dx_sum (+)= sum_n dx[n] before the addition: the bias gradient of the linear layer that computed x
typedef struct {
  NormKind kind;
  Tensor dx; // fp32/bf16 [N, M H]; with accumulate_dx the residual stream's gradient, which is added to
  Tensor dweight, dbias; // fp32 or bf16 [H]; no dbias for NORM_RMS
  Tensor dx_sum;         // of dbias' dtype [H], or absent: for NORM_LAYER with accumulate_dx, M = 1
  // Either may be dx itself without accumulate_dx, x for NORM_RMS alone. All three may be strided.
  Tensor dout, x;     // fp32/bf16 [N, M H]
  Tensor weight;      // fp32/bf16 [H]
  Tensor mean, rstd;  // as in the forward pass
  Tensor amax;        // fp32 [1], or absent: max |dx|, for quantize
  bool accumulate_dx; // add to dx rather than write it
  bool accumulate;    // likewise for dweight, dbias, dx_sum
  Tensor workspace;
} NormBackward;

// --- a matrix in FP8 ---------------------------------------------------------------------------------------

// A matrix x in FP8, and its transpose: tensor cores read FP8 along the inner dimension alone.
//   codes[i, j] = e4m3(x[i, j] E4M3_MAX / amax),   so that x is nearly codes amax / E4M3_MAX
typedef struct {
  Tensor codes;      // e4m3 [N, K], or absent
  Tensor transposed; // e4m3 [K, N], or absent: the same codes
  Tensor amax;     // fp32 [1]: max |x|; NaN or infinite where some x is, and then so is every matmul with it
  bool amax_known; // quantize reads amax, which the operation that computed x has written
} Quantized;

// An activation function writes codes as it computes the elements, and so needs amax before it has their
// maximum: amax is then FP8_MARGIN times the largest element of a sample of rows at equal distances or, if
// the sample is all rows, that itself. If an element is larger, the codes are computed again with max |x|.
// The margin costs the smallest elements bits, and the others none.
enum { FP8_SAMPLED_ROWS = 256, FP8_MARGIN = 8 };
static inline int64_t fp8_rows_apart(int64_t rows) {
  return max_i64(1, rows / FP8_SAMPLED_ROWS);
}

// --- activations -------------------------------------------------------------------------------------------

// An activation of F columns reads P = F or, if gated, 2F: gates in columns [0, F), their ups in [F, 2F).
typedef enum {
  ACTIVATION_NONE,
  ACTIVATION_GELU,   // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))   (Hendrycks, Gimpel 2016; GPT-2)
  ACTIVATION_SWIGLU, // gated: g / (1 + exp(-g)) * up                      (Shazeer 2020; Llama)
} Activation;        // each switch over them names all, so that a compiler names the switch that lacks one

static inline bool is_gated(Activation activation) {
  switch (activation) {
  case ACTIVATION_NONE:
  case ACTIVATION_GELU:
    return false;
  case ACTIVATION_SWIGLU:
    return true;
  }
  return false;
}

// out = activation(x), as it is, as codes, or both. Runs separately if out was not kept, or in FP8; else it
// is a part of LinearForward.
typedef struct {
  Activation activation;
  Tensor out;          // fp32/bf16 [N, F]; or absent if quantized is given
  Tensor x;            // fp32/bf16 [N, P]
  Quantized quantized; // of out, N and F multiples of 16; or absent
  Tensor workspace;
} ActivationForward;

// dx = the gradient of x, given that of out.
typedef struct {
  Activation activation;
  Tensor dx;           // fp32/bf16 [N, P]; may be x itself, or dout if P = F; or absent if quantized is given
  Tensor dout;         // fp32/bf16 [N, F]
  Tensor x;            // fp32/bf16 [N, P]
  Quantized quantized; // of dx, N and P multiples of 16; or absent
  Tensor workspace;
} ActivationBackward;

// --- linear layers -----------------------------------------------------------------------------------------
// Three GEMMs. `in_out_layout`: the weight is [in, out], as GPT-2's Conv1D, not torch.nn.Linear's [out, in].

// pre = x W^T + bias;   out = residual + activation(pre), each of bias, activation, residual if given. P is
// the activation's; without one it is O.
typedef struct {
  Tensor out;    // fp32/bf16 [N, O]; may be strided, and fp32 with bf16 operands; neither with a gated one
  Tensor x;      // fp32/bf16 [N, I]; may be strided
  Tensor weight; // fp32/bf16 [P, I], or [I, P] when in_out_layout
  bool in_out_layout;
  Tensor bias; // fp32/bf16 [P], or absent
  Activation activation;
  Tensor pre_activation; // fp32/bf16 [N, P]; given with an activation; receives pre, for the backward
  Tensor residual;       // fp32/bf16 [N, O], or absent; may be out itself. Not together with pre_activation
} LinearForward;

// dx (+)= dout W or, where the input is the activation of pre_activation, the gradient of pre_activation.
typedef struct {
  Tensor dx;     // fp32/bf16 [N, P]; may be strided or, with a gated activation, pre_activation itself
  Tensor dout;   // fp32/bf16 [N, O]; may be strided
  Tensor weight; // fp32/bf16 [O, I], or [I, O] when in_out_layout
  bool in_out_layout;
  Activation activation; // its output, of I columns, is the layer's input
  Tensor pre_activation; // fp32/bf16 [N, P]; given with an activation
  Tensor dactivation;    // fp32/bf16 [N, I] with a gated activation, else absent: scratch, may hold dout W
  bool accumulate;       // not together with pre_activation
} LinearBackwardInput;

// dweight (+)= alpha * dout^T x (in the weight's layout);  dbias (+)= alpha * sum_n dout[n].
typedef struct {
  Tensor dweight; // fp32 or bf16 [O, I], or [I, O] when in_out_layout
  Tensor dbias;   // fp32 or bf16 [O], or absent
  Tensor dout, x; // fp32/bf16 [N, O] and [N, I]; may be strided
  bool in_out_layout;
  float alpha; // 0 is read as 1
  bool accumulate;
  Tensor workspace;
} LinearBackwardWeight;

// sum[m] (+)= alpha * sum_n coefficients[n] x[n, m], in a fixed order: for biases and label smoothing.
typedef struct {
  Tensor sum;          // fp32 or bf16 [M]
  Tensor x;            // fp32/bf16 [N, M]; may be strided
  Tensor coefficients; // fp32 [N], or absent: all are 1
  float alpha;         // 0 is read as 1
  bool accumulate;
  Tensor workspace;
} SumColumns;

// --- FP8 ---------------------------------------------------------------------------------------------------

typedef struct {
  Quantized out;
  Tensor x; // fp32/bf16 [N, K], N and K multiples of 16
} Quantize;

// A matrix x in FP8 with a scale for each row, or one for all: x is nearly scale codes.
//   codes = e4m3(x E4M3_MAX / max |x|),   scale = (sum x^2 / sum x codes)
// Such a scale makes the rounding error orthogonal to x (lce/REFERENCE.md: or else the loss shrinks). Maximum
// and sums are over the row, or over all rows; the sums over all take at most FP8_SUMMED_ROWS of them, at
// equal distances.
enum { FP8_SUMMED_ROWS = 1024 };
typedef struct {
  Tensor codes; // e4m3 [N, K]
  Tensor scale; // fp32 [N] or [1]: 1 for zeros, NaN where x has a NaN or an infinity
} QuantizedRows;

typedef struct {
  QuantizedRows out;
  Tensor x; // fp32/bf16 [N, K], K a multiple of 16
} QuantizeRows;

// out = a b^T + bias + residual, with the values that codes and amax stand for, summed in fp32.
typedef struct {
  Tensor out;      // fp32 or bf16 [N, O]; may be strided
  Quantized a, b;  // codes [N, K] and [O, K], N, O and K multiples of 16; `transposed` is not read
  Tensor bias;     // bf16, on the CPU of out's type [O]; or absent
  Tensor residual; // of out's type [N, O], or absent; may be out itself
  Tensor workspace;
} MatmulQuantized;

// --- attention ---------------------------------------------------------------------------------------------
// qkv packs, for each row n = b*T + t, the heads [q_0 .. q_{Q-1} | k_0 .. k_{K-1} | v_0 .. v_{K-1}], each of
// D elements. Query head h reads key/value head h / (Q / K) (grouped-query attention; Ainslie et al. 2023).

typedef struct {
  int64_t batch, seq_len;                 // B, T
  int64_t num_heads, num_key_value_heads; // Q; K, divides Q
  int64_t head_dim;                       // D
} AttentionShape;

// Rotary positions (Su et al. 2021) in Hugging Face's half-split order, in place on the q and k heads: for
// i < A/2, with c, s = cos_sin[t, i]:  x[i], x[i + A/2] = x[i] c - x[i + A/2] s,  x[i + A/2] c + x[i] s. A is
// D, or less where the last elements of a head do not rotate (Phi-3).
// `inverse` rotates by the negative angle, which is the backward pass.
typedef struct {
  Tensor qkv;       // fp32/bf16 [N, (Q + 2K) D]
  Tensor cos_sin;   // fp32 [T', A]: row t holds cos for i < A/2, then sin; T' >= T, A even
  Tensor positions; // int32 [N], or absent: t, the row of cos_sin, is n mod T
  AttentionShape shape;
  bool inverse;
} Rope;

// Causal: out[b, t, h] = sum_{u <= t} softmax_u(q_t . k_u / sqrt(D)) v_u;  lse[b, h, t] = the logsumexp.
// Never a T x T matrix (Dao et al. 2022): tiles, running maximum and sum. With `documents` a token attends to
// its own document, which has documents[0, n] tokens before it (t - documents[0, n] <= u) and documents[1, n]
// after it.
typedef struct {
  Tensor out;       // fp32/bf16 [N, Q D]
  Tensor lse;       // fp32 [B, Q * T], row b holds head after head
  Tensor qkv;       // fp32/bf16 [N, (Q + 2K) D]
  Tensor documents; // int32 [2, N], or absent: a sequence is one document
  AttentionShape shape;
  Tensor workspace;
} AttentionForward;

// With P = softmax as above, recomputed from lse: dv = P^T dout;  dS = P * (dout v^T - rowsum(dout * out));
// dq = dS k / sqrt(D);  dk = dS^T q / sqrt(D).  dbias (+)= sum_n dqkv[n], for a bias that was added to qkv.
typedef struct {
  Tensor dqkv;                // shaped as qkv, but not qkv itself; written whole
  Tensor dbias;               // fp32 or bf16 [(Q + 2K) D], or absent
  Tensor dout, out;           // fp32/bf16 [N, Q D]
  Tensor lse, qkv, documents; // as in the forward pass
  AttentionShape shape;
  bool accumulate; // add to dbias rather than write it
  Tensor workspace;
} AttentionBackward;

// Attention of S new tokens per sequence (shape.seq_len = S) that follow `past` earlier ones. The caches have
// their keys and values: position u of head kv of sequence b lies at row b K + kv, columns [u D, (u+1) D).
// The new tokens' keys and values are stored at positions past .. past + S - 1, then
//   out[b, s, h] = sum_{u <= past + s} softmax_u(q_s . k_u / sqrt(D)) v_u.
typedef struct {
  Tensor out;          // fp32/bf16 [B S, Q D]
  Tensor keys, values; // fp32/bf16 [B K, P D], P >= past + S
  Tensor qkv;          // fp32/bf16 [B S, (Q + 2K) D], rotated for its positions
  AttentionShape shape;
  int64_t past;
} AttentionDecode;

// --- the loss ----------------------------------------------------------------------------------------------
// One definition, PyTorch's, for every mode and backend. With z = x W^T + bias for a token, y its target:
//
//   u       = c tanh(z / c)  (soft-cap c; none: u = z)       v = u / T  (temperature T)
//   p       = softmax(v)                                     lse = logsumexp(v)
//   loss    = (1 - eps) w[y] (lse - v[y]) + eps / V sum_j w[j] (lse - v[j])   (class weights w, smoothing)
//   z_loss  = lambda lse^2                                                    (PaLM; Chowdhery et al. 2022)
//   entropy = lse - sum_j p[j] v[j]
//
// and the gradients are those of
//
//   alpha factor[0] sum_n (token_weights[n] (loss[n] + z_loss[n]) + entropy_weights[n] entropy[n])
//
// with absent weights read as 1, but entropy_weights as 0. Where the target is IGNORE_INDEX everything is 0.

// The numbers among the terms, each 0 for none: X(name, smallest, largest, these in a message's words).
// clang-format off
#define LOSS_TERMS(X) \
  X(label_smoothing, 0, 1, "in [0, 1]")                                  /* eps */ \
  X(z_loss, 0, FLT_MAX, "0 or more and finite")                          /* lambda */ \
  X(softcap, 0, FLT_MAX, "0 or more and finite")                         /* c */ \
  X(temperature, 1e-6f, FLT_MAX, "0 (none) or a finite number from 1e-06 on") /* T; 0 is read as 1 */
// clang-format on

typedef struct {
#define MEMBER(name, ...) float name;
  LOSS_TERMS(MEMBER)
#undef MEMBER
  Tensor class_weights;    // w: fp32 [V], or absent
  Tensor class_weight_sum; // sum_j w[j]: fp32 [1]; given when class_weights and label_smoothing are
} LossTerms;

// A call's optional outputs for each token, besides its loss: X(name, type, the one of SOFTMAX_STATISTICS
// that it derives from). All have [N] elements.
// clang-format off
#define TOKEN_OUTPUTS(X) \
  X(token_z_loss, F32, row_sum)       /* z_loss */ \
  X(log_prob, F32, row_sum)           /* log p[y] */ \
  X(logsumexp, F32, row_sum)          /* lse */ \
  X(entropy, F32, e_distance) \
  X(log_sum_sq_probs, F32, e_squared) /* log sum_j p[j]^2; not of the materialized mode */ \
  X(max_logit, F32, max)              /* max_j v[j] */ \
  X(predicted, I32, max)              /* the j of that maximum, the first of several */ \
  X(correct, F32, max)                /* 1 where that is the target, else 0 */
// clang-format on

typedef union { // each may be absent
  struct {
#define MEMBER(name, ...) Tensor name;
    TOKEN_OUTPUTS(MEMBER)
  };
#define ONE(...) +1
  Tensor all[TOKEN_OUTPUTS(ONE)];
} TokenOutputs;

// The materialized mode's one pass: logits become their own gradient in place. Writes loss and outputs.
typedef struct {
  Tensor loss;          // fp32 [N]
  TokenOutputs outputs; // any of them
  Tensor logits;  // z: fp32/bf16 [N, V], still without the bias; may be strided; overwritten in any case
  bool backward;  // false: the forward pass alone
  Tensor bias;    // of logits' type [V], or absent: added to z
  Tensor targets; // int32 [N]
  Tensor token_weights, entropy_weights; // fp32 [N], or absent
  Tensor factor;                         // fp32 [1], or absent
  LossTerms terms;
  float alpha;
} CrossEntropyInPlace;

// factor[0] = 1 / sum of w[targets[n]] over the tokens that count, 0 when none does: makes a sum their mean.
typedef struct {
  Tensor factor;        // fp32 [1]
  Tensor targets;       // int32 [N]
  Tensor class_weights; // fp32 [V], or absent
} LossFactor;

// --- the fused LM head and loss ----------------------------------------------------------------------------
// linear_cross_entropy.c combines these and says why the anchor is the target. z, u and v as above.

// Statistics of each row (token) of a chunk: X(name, type, its name in the ledger). All have [C] elements. If
// the vocabulary is split, the partial ones cover a rank's part until LceCombine combines them. LceLogitsExp
// writes these and target_e; LceRowLosses writes the scales, which multiply E, are the target's own entry of
// the gradient, and (label smoothing) scale every entry alike.
// clang-format off
#define PARTIAL_STATISTICS(X) \
  X(anchor, F32, "anchors")               /* a: u[target], or higher (a repaired row); infinite for IGNORE_INDEX */ \
  X(row_sum, F32, "row sums")             /* R = sum of E[j] over j != target */ \
  X(e_distance, F32, "sums of distances") /* sum of E[j] (u[j] - anchor) / T over j != target */ \
  X(e_squared, F32, "sums of squares")    /* 2^-66 times the sum of E[j]^2 over j != target (LCE_SQUARED) */ \
  X(max, F32, "largest logits")           /* max_j u[j] */ \
  X(best, I32, "columns of the largest logits") /* the first such j; given when max is */
#define SOFTMAX_STATISTICS(X) \
  X(target_z, F32, "target logits")       /* u[target], from LceTargetLogits; 0 where the target is ELSEWHERE */ \
  X(target_e, F32, "target exponentials") /* exp((u[target] - anchor) / T): 1 unless the row was repaired */ \
  PARTIAL_STATISTICS(X) \
  X(rescale, F32, "scales between anchors") /* multiplies E in a split vocabulary (LceCombine); absent: 1 */ \
  X(scale_non_target, F32, "scales of non-targets") \
  X(scale_target, F32, "scales of the target") \
  X(scale_uniform, F32, "scales of all")
// clang-format on

typedef union { // each is absent where unused
  struct {
    SOFTMAX_STATISTICS(MEMBER)
  };
  Tensor all[SOFTMAX_STATISTICS(ONE)];
#undef MEMBER
#undef ONE
} SoftmaxStatistics;

// Rows [first, first + count) of every vector given.
SoftmaxStatistics softmax_statistics_range(const SoftmaxStatistics *softmax, int64_t first, int64_t count);
// Counts the PARTIAL_STATISTICS that are given.
int64_t lce_row_parts(const SoftmaxStatistics *softmax);

// Each rank's part of a vocabulary that is split over ranks:
//   out[n] = indices[n] - first where that lies in [0, count), else ELSEWHERE; IGNORE_INDEX stays
typedef struct {
  Tensor out, indices;  // int32 [N]; may be the same tensor
  int64_t first, count; // the part's rows
} ShardIndices;

// target_z[n] = u of z = x[n] . W[targets[n]] + bias[targets[n]], in fp32; 0 for ELSEWHERE and IGNORE_INDEX.
typedef struct {
  Tensor target_z;  // fp32 [C]
  Tensor x, weight; // fp32/bf16 [C, H] and [V, H]
  Tensor bias;      // fp32/bf16 [V], or absent
  Tensor targets;   // int32 [C], each in [0, V), ELSEWHERE or IGNORE_INDEX
  float softcap;    // c; 0 for none
} LceTargetLogits;

// With z = x W^T + bias, u and T as above:
//   a      = u[target], the anchor                         target_e = 1
//   E[j]   = exp((u[j] - a) / T), j != target;  E[target] = 0, unless the target is ELSEWHERE
//   R      = sum_j E[j], in fp32 before E is rounded
//   exps   = E, with a soft-cap times du/dz                dx_raw = exps W
// If R exceeds LCE_LARGEST_SUM (loss_row.h), or u[target] is minus infinity, the row is repaired: its anchor
// is max_j u[j] (a GPU computes the row again), or about T log R (a CPU scales what it has), and target_e =
// exp((u[target] - anchor) / T). For IGNORE_INDEX E and R are 0, and the anchor infinite. With codes, x W^T
// multiplies the values that they stand for; the target's logit, rows that a GPU repairs and dx_raw still use
// x and W. A GPU that does not run Hopper's kernels reads no codes.
typedef struct {
  // fp32/bf16 [C, V], may be strided, or absent: forward only. Zeros may pad a row to a multiple of 16 bytes.
  Tensor exps;
  Tensor dx_raw; // fp32 or x's dtype [C, H]; absent if exps is, or if LceSampledGradients writes it
  // fp32 [C, ceil(V / LCE_TILE_COLUMNS)], or absent: R's parts, for LceSampledGradients; excludes a soft-cap
  Tensor tile_sums;
  SoftmaxStatistics softmax;  // reads target_z; writes anchor, row_sum, target_e, and given partial ones
  Tensor x, weight;           // fp32/bf16 [C, H] and [V, H]
  QuantizedRows x_codes;      // of x, scale [C]; or absent: x W^T is exact
  QuantizedRows weight_codes; // of weight, scale [1]; likewise
  Tensor bias;                // fp32/bf16 [V], or absent
  Tensor targets;             // int32 [C], each in [0, V), ELSEWHERE or IGNORE_INDEX
  int64_t first;              // added to softmax.best
  float softcap, temperature; // c, 0 for none; T, 0 is read as 1
  Tensor workspace;
} LceLogitsExp;

// Combines R ranks' sums of the rows, each over its part of the vocabulary and with its own anchor a_r, in
// the order of the ranks:
//   a          = max_r a_r                                 target_e = exp((target_z - a) / T)
//   row_sum    = sum_r R_r exp((a_r - a) / T)
//   rescale    = exp((a_r - a) / T) <= 1 with this rank's a_r, which brings its E to the common anchor
//   e_distance = sum_r exp((a_r - a) / T) (e_distance_r + R_r (a_r - a) / T)
//   e_squared  = sum_r exp((a_r - a) / T)^2 e_squared_r
//   max, best  = the largest, of the lowest rank
// As a rule all anchors are the target's logit, and target_e and rescale exactly 1.
typedef struct {
  SoftmaxStatistics softmax; // reads target_z; writes all but the scales
  // fp32 [R * P C]: from each rank the [C] of every one of PARTIAL_STATISTICS that is given
  Tensor parts;
  Tensor targets; // int32 [C]; rows with IGNORE_INDEX stay as LceLogitsExp has them
  float temperature;
} LceCombine;

// Computes losses and scales from row sums. With D = R + target_e, s = factor[0] token_weights[n] / T, omega
// = (1 - eps) w[y] + eps / V sum w, and smoothing_row S = sum_j w[j] W[j], smoothing_bias = sum_j w[j] b[j]:
//   lse              = anchor / T + log(D);  lse - v[y] computed as log1p(R) where target_e = 1
//   sum_j w[j] v[j]  = (x . S + smoothing_bias) / T
//   scale_non_target = s (omega + 2 lambda lse) / D               multiplies E; times rescale, where given
//   scale_target     = s (-(1 - eps) w[y] R / D + (eps / V sum w + 2 lambda lse) target_e / D)
//                                                the target's own entry: p - 1 without the cancellation
//   scale_uniform    = -s eps / V                                 multiplies S in dx, and w x in dweight
//   scaled_x         = scale_non_target * x
// With a soft-cap scale_target is multiplied by du/dz of the target, and there is no label smoothing.
typedef struct {
  Tensor loss;          // fp32 [C], or absent if scaled_x is given
  TokenOutputs outputs; // any whose statistic is given
  Tensor scaled_x;      // fp32/bf16 [C, H], or absent: forward only, and no scale is written
  // fp32/bf16 [C, V], may be strided, or absent: gets E[target] = scale_target / scale_non_target, the
  // latter not 0 where the former is not: what it then adds to the row's gradient is below rounding
  Tensor exps;
  SoftmaxStatistics softmax; // reads all but the scales; writes these (scale_uniform with label smoothing)
  Tensor x, targets;         // fp32/bf16 [C, H]; int32 [C]
  Tensor token_weights;      // fp32 [C], or absent
  Tensor factor;             // fp32 [1], or absent; alpha comes later, through the GEMMs
  Tensor smoothing_row;      // fp32 [H]; given when terms.label_smoothing is
  Tensor smoothing_bias;     // fp32 [1], or absent: sum_j w[j] b[j]
  LossTerms terms;
  int64_t vocab_size;
} LceRowLosses;

// Sampling of the softmax gradient, unbiased (lce/REFERENCE.md has the proof). E is cut into tiles of
// LCE_TILE_ROWS rows, counted from the chunk's first, by LCE_TILE_COLUMNS vocabulary entries. A tile's mass
// is its sum of probabilities,
//   m = sum over its rows of rescale tile_sums[n, t] / (R + target_e)
// It is kept with probability q = min(1, m / full_mass), rounded to a power of two from 2^-32 on (by at most
// a factor of sqrt(2)), and then multiplied by 1 / q; else it is dropped. A NaN keeps its tile, a mass of 0
// drops it. With S the E that results,
//   dx_raw = S W,   dweight (+)= alpha S^T scaled_x        (the target's own entry is added separately)
//   tiles[b, t]  1 / q where the tile is kept, -m where it is dropped
//   stats       += {tiles dropped, all tiles, the mass dropped}, in a fixed order
// The draws of a row of tiles are systematic (Madow and Madow 1944), the same on every device: with u the
// upper 32 bits of random_bits(seed, stream, b) as a fraction and S(t) = u + q[b, 0] + ... + q[b, t], tile t
// is kept where S passes a whole number. E's contents afterwards are unspecified.
//
// A call takes its chunks in turn. A backend may keep tiles of several chunks in `kept` and add them
// together: dweight is complete only after a chunk with `flush`.
enum { LCE_TILE_ROWS = 128, LCE_TILE_COLUMNS = 192 };

typedef struct {
  Tensor dx_raw;    // fp32 or x's dtype [C, H]
  Tensor dweight;   // fp32 [V, H]
  Tensor tiles;     // fp32 [A, B]: A = ceil(C / LCE_TILE_ROWS), B = ceil(V / LCE_TILE_COLUMNS)
  Tensor stats;     // fp32 [3]
  Tensor exps;      // fp32/bf16 [C, V], may be strided: as LceLogitsExp left it, with zeros that may follow
  Tensor tile_sums; // fp32 [C, B], from LceLogitsExp
  SoftmaxStatistics softmax; // reads row_sum, target_e, and rescale where given
  Tensor weight;             // fp32/bf16 [V, H]
  Tensor scaled_x;           // fp32/bf16 [C, H]
  float full_mass;           // above 0: the mass from which a tile is always kept
  uint64_t seed, stream;
  float alpha; // 0 is read as 1, as in LinearBackwardWeight
  Tensor kept; // int32 [K], or absent: the bytes of BackendScratch.lce_kept_bytes, for the chunks of one call
  int64_t kept_rows; // that K was counted for, at least C
  bool first, flush; // the call's first chunk; see above
  bool accumulate;   // the first chunk adds to dweight rather than write it, as the others do
  Tensor workspace;
} LceSampledGradients;

// dx = alpha (scale_non_target dx_raw + scale_target W[target] + scale_uniform smoothing_row), in place over
// dx_raw. Without the second term where the target is ELSEWHERE; 0 where it is IGNORE_INDEX.
typedef struct {
  Tensor dx;                 // [C, H], holds dx_raw
  SoftmaxStatistics softmax; // reads the scales
  Tensor smoothing_row;      // fp32 [H]; with softmax.scale_uniform, or absent
  Tensor weight;             // fp32/bf16 [V, H]
  Tensor targets;            // int32 [C]
  float alpha;
} LceInputGradient;

// dweight[target[n]] += alpha * scale_target[n] * x[n], in a fixed order; targets below 0 add nothing.
typedef struct {
  Tensor dweight;      // fp32 or bf16 [V, H]
  Tensor scale_target; // fp32 [C], or absent: 1
  Tensor x;            // fp32/bf16 [C, H]
  Tensor targets;      // int32 [C]
  float alpha;
  Tensor workspace;
} LceTargetGradient;

// out[v, h] += alpha rows[v] columns[h].
typedef struct {
  Tensor out;           // fp32 [V, H], dense
  Tensor rows, columns; // fp32 [V], or absent: all 1; fp32 [H]
  float alpha;
} AddOuter;

// out[i] = x[indices[i]] for i < C (gather);  out[indices[i]] = x[i], all distinct (scatter). 16 or 32 bits
//                                             each.
typedef struct {
  Tensor out, x;
  Tensor indices; // int32 [C]
} MoveRows;

// --- the optimizer -----------------------------------------------------------------------------------------

// AdamW with decoupled decay (Loshchilov, Hutter 2019), over n elements at once.
// With g = grad * grad_scale[0]:
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay w)
// in fp32, on `master` if given (weight then receives the rounded copy), else on weight itself. Where a bf16
// element is the only copy (no master, bf16 moments) it is rounded stochastically, by bits of (seed, step,
// first + index) alone.
//
// Muon (Jordan et al. 2024; torch.optim.Muon but for its polynomials) is nesterov, orthogonalize and sgd:
//   nesterov  m = momentum m + (1 - momentum) g;  weight = (1 - momentum) g + momentum m, rounded to nearest
//   sgd       w = w - lr (grad + weight_decay w), with weight and master as above
typedef struct {
  Tensor weight, master; // fp32/bf16 [n]; fp32 [n], or absent; nesterov: the output, and absent
  Tensor m, v, grad;     // fp32 or bf16 [n]; nesterov has no v, sgd has neither m nor v
  Tensor grad_scale;     // fp32 [1], on the device; not for sgd
  float lr;
  double beta1, beta2, epsilon, momentum, weight_decay; // used in fp32
  int64_t step;                                         // t, from 1
  uint64_t seed;
  int64_t first; // the index of the first of these n elements among all that share the seed; even
  // adamw alone: it begins when the copies in before it are done, and counts as a copy out (copies_join).
  bool after_copies;
} Update;

// Matrices of one shape.
typedef struct {
  Tensor first;  // fp32/bf16; may be strided
  int64_t apart; // elements from one to the next: a multiple of 128, or there is only one
} Matrices;

// Scales each of `count` matrices, given its gram x x^T: s[i] = 1 / sqrt(max(1e-20, sum_j |gram[i, j]|)), out
// = diag(s) x and, in place, gram = diag(s) gram diag(s). No singular value of out is above 1 (Prach, Lampert
// 2022, "Almost-orthogonal layers"). If M > N, gram is x^T x and out = x diag(s).
typedef struct {
  Matrices out, x; // [M, N]
  Matrices gram;   // [S, S], S = min(M, N)
  Tensor s;        // fp32 [count, S]
  int64_t count;
} AolScale;

// For each matrix: out = alpha left right + beta addend + diagonal I, where left or right may be transposed.
typedef struct {
  Matrices out, left, right, addend; // [M, N], [M, K], [K, N]; addend [M, N], or absent
  int64_t count;
  bool left_transposed, right_transposed;
  float alpha, beta, diagonal; // diagonal: added after rounding
} BatchedGemm;

// sum[0] (+)= sum of x, or of x^2. A fixed order of summation, in double or in fp32 trees.
typedef struct {
  Tensor sum; // fp32 [1]
  Tensor x;   // fp32 or bf16, dense
  bool squares;
  bool accumulate;
  Tensor workspace;
} SumElements;

// norm[0] = sqrt(sum_of_squares[0]);  scale[0] = min(1, max_norm / norm), or 1 when max_norm is 0.
// A norm that is not finite gives scale NaN: the update then shows what happened instead of hiding it.
typedef struct {
  Tensor norm, scale, sum_of_squares; // fp32 [1]
  float max_norm;
} ClipScale;

// --- collectives over ranks (nothing to do when there is one), and copies ----------------------------------

// With R ranks, x of n elements:
//   all_reduce        out [n] = the sum of all ranks' x; out may be x itself
//   reduce_scatter    out [n / R] (+)= the sum of all ranks' slice r of x, on rank r; out may be that slice
//   all_gather        out [n R] = the ranks' x one after the other; x may be out's slice r
//   broadcast_rank_0  out [n] = rank 0's x
// All ranks call the same collectives in the same order. The order of summation depends on R and n alone. If
// x of a sum, or out of an all_reduce or all_gather, lies in a reservation of weights or gradients, it lies
// on all ranks at the same place of a reservation of the same size.
typedef struct {
  Tensor out, x;   // fp32 or bf16, dense; all_gather, broadcast_rank_0: or int32
  bool accumulate; // reduce_scatter alone: out is added to, and must not lie in x, whose slice r is then lost
  bool async; // it overlaps the operations that follow; they leave out and x alone until collectives_join
} Collective;

// Large sums are cut into such buckets: enough for the links' full speed, and for a backend's scratch.
enum { BUCKET_BYTES = 32 << 20 };

// copy_in: out = x, with out in the device's memory and x reserved with memory_reserve_host; copy_out: the
// other way. A copy begins when the operations before it are done, and overlaps those that follow, which must
// leave out alone, and not write x, until copies_join. Copies of one direction run in their order. With
// after_out one also waits for the copies out before it, but for the last `behind` of them.
typedef struct {
  Tensor out, x;  // of one type and size, dense
  bool after_out; // copy_in alone
  int64_t behind; // below ASYNC_EVENTS
} Copy;

// --- the operations ----------------------------------------------------------------------------------------

// Every operation once: X(name, its struct, its group in a profile), or S(...) where a backend may need
// scratch. Entry points and the tables of backends and profile come from here. cpu_NAME and cuda_NAME
// implement NAME.
// clang-format off
#define OPERATIONS(X, S) \
  X(embedding_forward, EmbeddingForward, EMBEDDING) \
  S(embedding_backward, EmbeddingBackward, EMBEDDING) \
  X(norm_forward, NormForward, ELEMENTWISE) \
  S(norm_backward, NormBackward, ELEMENTWISE) \
  X(linear_forward, LinearForward, GEMMS) \
  X(linear_backward_input, LinearBackwardInput, GEMMS) \
  S(linear_backward_weight, LinearBackwardWeight, GEMMS) \
  S(sum_columns, SumColumns, ELEMENTWISE) \
  X(quantize, Quantize, QUANTIZING) \
  X(quantize_rows, QuantizeRows, QUANTIZING) \
  S(matmul_quantized, MatmulQuantized, GEMMS) \
  S(activation_forward, ActivationForward, ELEMENTWISE) \
  S(activation_backward, ActivationBackward, ELEMENTWISE) \
  X(rope, Rope, ELEMENTWISE) \
  S(attention_forward, AttentionForward, ATTENTION_FORWARD) \
  S(attention_backward, AttentionBackward, ATTENTION_BACKWARD) \
  X(attention_decode, AttentionDecode, ATTENTION_FORWARD) \
  X(shard_indices, ShardIndices, EMBEDDING) \
  X(lce_target_logits, LceTargetLogits, HEAD_LOSS) \
  S(lce_logits_exp, LceLogitsExp, HEAD_LOSS) \
  X(lce_combine, LceCombine, HEAD_LOSS) \
  X(lce_row_losses, LceRowLosses, HEAD_LOSS) \
  S(lce_sampled_gradients, LceSampledGradients, HEAD_LOSS) \
  X(lce_input_gradient, LceInputGradient, HEAD_LOSS) \
  S(lce_target_gradient, LceTargetGradient, HEAD_LOSS) \
  X(cross_entropy_in_place, CrossEntropyInPlace, HEAD_LOSS) \
  X(loss_factor, LossFactor, HEAD_LOSS) \
  X(add_outer, AddOuter, HEAD_LOSS) \
  X(gather_rows, MoveRows, HEAD_LOSS) \
  X(scatter_rows, MoveRows, HEAD_LOSS) \
  X(adamw, Update, OPTIMIZER) \
  X(nesterov, Update, OPTIMIZER) \
  X(aol_scale, AolScale, OPTIMIZER) \
  X(batched_gemm, BatchedGemm, OPTIMIZER) \
  X(sgd, Update, OPTIMIZER) \
  S(sum_elements, SumElements, OPTIMIZER) \
  X(clip_scale, ClipScale, OPTIMIZER) \
  X(fill_zero, Tensor, ELEMENTWISE) \
  X(all_reduce, Collective, COMMUNICATION) \
  X(reduce_scatter, Collective, COMMUNICATION) \
  X(all_gather, Collective, COMMUNICATION) \
  X(broadcast_rank_0, Collective, COMMUNICATION) \
  X(copy_in, Copy, COPIES) \
  X(copy_out, Copy, COPIES)
// clang-format on

// Stands for S or X where a list leaves those operations out.
#define NO_OPERATION(name, Arguments, group)

// The checked entry points (kernels.c). fill_zero's tensor is dense.
#define DECLARE(name, Arguments, group) void name(Backend *backend, Arguments a);
OPERATIONS(DECLARE, DECLARE)
#undef DECLARE

// x = scale NS(x) of each matrix (newton_schulz.c): all singular values become about `scale`. There are
// `count` of each kind, all kinds of one shape.
void orthogonalize(Backend *backend, const Matrices *x, int kinds, int64_t count, float scale);

// Later operations wait for all asynchronous collectives but the last `behind`, below ASYNC_EVENTS.
enum { ASYNC_EVENTS = 64 };
void collectives_join(Backend *backend, int64_t behind);
// Later operations wait for all copies but the last `in` and `out`, each below ASYNC_EVENTS.
void copies_join(Backend *backend, int64_t in, int64_t out);

// Copies of dense tensors. `host` may change when to_device returns; to_host waits for everything before it.
void backend_to_device(Backend *backend, Tensor destination, const void *host);
void backend_to_host(Backend *backend, void *host, Tensor source);
void backend_synchronize(Backend *backend);

// --- backends ----------------------------------------------------------------------------------------------

// The streams on which operations run: in the order of all, or concurrently with them.
typedef enum { STREAM_COMPUTE, STREAM_COLLECTIVES, STREAM_COPY_IN, STREAM_COPY_OUT, STREAMS } StreamKind;

// The operations. A member that is NULL does nothing, which is all that a plan needs.
typedef struct {
  void (*join_ranks)(Backend *); // connects to the other ranks, if any
  void (*collectives_join)(Backend *, int64_t behind);
  void (*copies_join)(Backend *, int64_t in, int64_t out);
  void (*to_device)(Backend *, Tensor, const void *);
  void (*to_host)(Backend *, void *, Tensor);
  void (*synchronize)(Backend *);
  // For profile.c; all NULL on the CPU, whose clock serves. *event (NULL: a new one) keeps the time at which
  // a stream has done its work so far; false without such a stream. event_seconds waits.
  bool (*event_record)(Backend *, void **event, StreamKind stream);
  double (*event_seconds)(void *from, void *to);
  void (*event_destroy)(void *event);
  void (*range)(const char *name); // begins a range that a profiler shows (NVTX); NULL: ends the last one
  // Bytes that the process or the GPU holds by the system's count, now and at most since peak_reset.
  size_t (*device_bytes_now)(Backend *);
  size_t (*device_bytes_peak)(Backend *);
  void (*device_peak_reset)(Backend *);
  void (*destroy)(Backend *);
#define MEMBER(name, Arguments, group) void (*name)(Backend *, const Arguments *);
  OPERATIONS(MEMBER, MEMBER)
#undef MEMBER
} BackendOps;

// Scratch bytes of operations, from shapes and dtypes alone, so that a plan needs no device. NULL: none.
typedef struct {
  // The row length (elements) to give a [C, V] matrix of this dtype: at least V, more where alignment pays.
  int64_t (*logits_stride)(int64_t vocab_size, Dtype dtype);
  // LceSampledGradients.kept's, for chunks up to `rows`; 0: such tensors are not sampled. NULL: all are.
  size_t (*lce_kept_bytes)(Tensor weight, Tensor dx, Tensor dweight, int64_t rows, float full_mass);
  // Bytes the backend reserves for itself when it starts (the GEMMs' workspace), named in the ledger.
  size_t resident_bytes;
  // Bytes it reserves for sums over ranks when it joins others.
  size_t ranks_bytes;
#define MEMBER(name, Arguments, group) size_t (*name)(const Arguments *);
  OPERATIONS(NO_OPERATION, MEMBER)
#undef MEMBER
} BackendScratch;

extern const BackendScratch cpu_scratch;  // kernels/cpu/backend.c
extern const BackendScratch cuda_scratch; // kernels/cuda/scratch.c, compiled everywhere

typedef enum { ON_CPU, ON_CUDA } DeviceKind;

static inline const char *device_name(DeviceKind device) {
  return device == ON_CUDA ? "cuda" : "cpu";
}

struct Backend {
  char description[128]; // "CPU, 2 threads, OpenBLAS for Zen", "NVIDIA H200, CUDA 13.0"
  DeviceKind device;     // what it computes on, or what a plan counts for
  const BackendOps *ops;
  const BackendScratch *scratch;
  Memory memory;
  Dtype dtype;            // of weights and activations
  bool no_fp8;            // the GPU has no FP8
  bool no_sampling;       // it does not run the Hopper kernels: LceSampledGradients and codes are not for it
  bool fixed_order;       // the loss sums a row in an order that other rows do not change; off by default
  int rank, ranks;        // 0 of 1 without a launcher
  double wire_bytes;      // what collectives have sent from this rank so far, as a ring sends it
  size_t device_capacity; // bytes that the device has for this rank; 0 when unknown
  size_t device_overhead; // bytes the device held when the backend stood ready and the ledger was still empty
  struct Profile *profile; // NULL unless profile_begin was called
  void *state;             // of the backend
};

// The reference: fp32, OpenMP, CBLAS if it was found at build time, unless no_blas is set.
Backend *cpu_backend_create(bool no_blas);
// The fast one, on CUDA device `ordinal`, in bf16 or fp32. NULL if none can be used; *reason says why.
Backend *cuda_backend_create(int ordinal, Dtype dtype, const char **reason);
// Connects the backend to a job's ranks (kernels/ranks/ranks.h), through MPI or NCCL; fails with a sentence
// if it cannot. Call it on all ranks at once; with one rank it does nothing.
void backend_join_ranks(Backend *backend);
// Creates a backend that runs nothing and counts what the given kind of device would need.
Backend *plan_backend_create(DeviceKind device, Dtype dtype);
// Plans as rank 0 of `ranks`.
void plan_join_ranks(Backend *plan, int ranks);
// The seconds that all it has run so far takes on a card (cost.h; NULL, as at first: an H100).
typedef struct Card Card;
void plan_set_card(Backend *plan, const Card *card);
double plan_seconds(const Backend *plan);
void backend_destroy(Backend *backend);
// The creation of a backend begins and ends with these: one rank, `state_bytes` of zeros as its state. If a
// failure between them is caught, backend_abandon destroys the backend that this thread has begun.
Backend *backend_begin(const BackendOps *ops, const BackendScratch *scratch, DeviceKind device, Dtype dtype,
                       size_t state_bytes);
Backend *backend_finish(Backend *backend);
void backend_abandon(void);

__END_DECLS
