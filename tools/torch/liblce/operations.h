// The package's operations: the gradients of log-probabilities, which a backward pass of its own makes, and what
// a caller's tensors need. kernels.h ("the loss") defines the terms. As the core's they check what they are given,
// run on the backend's device, and do nothing on a plan but count.
#pragma once

#include "kernels/kernels.h"

__BEGIN_DECLS

// Computes the gradients of a token's logits from log_prob = log p[y] and entropy of an earlier forward
// pass. With nll = -log_prob, s = alpha factor[0] token_weights[n] / T and t = alpha factor[0]
// entropy_weights[n] / T:
//   log_total    = nll, or with row_sum log(R + target_e), where target_e = p[y] (R + target_e)
//   per_p        = s (w[y] + 2 lambda (v[y] + nll)) - t entropy
//   per_distance = -t
//   at_target    = s (w[y] expm1(-nll) + 2 lambda (v[y] + nll) p[y]) - t p[y] (entropy - nll)
// with a soft-cap times du/dz of the target; all 0 where the target is IGNORE_INDEX.
typedef union {
  struct {
    Tensor log_total, per_p, per_distance, at_target; // fp32 [N]
  };
  Tensor all[4];
} GradientFactors;

typedef struct {
  GradientFactors factors;               // written
  Tensor target_z, log_prob;             // fp32 [N]; target_z as LceTargetLogits leaves it
  Tensor row_sum;                        // fp32 [N], as LceLogitsExp leaves it with E, or absent
  Tensor entropy;                        // fp32 [N]; given when entropy_weights are
  Tensor targets;                        // int32 [N], each in [0, V) or IGNORE_INDEX
  Tensor token_weights, entropy_weights; // fp32 [N], or absent
  Tensor factor;                         // fp32 [1], or absent
  LossTerms terms;                       // label_smoothing is 0
  int64_t vocab_size;
  float alpha;
} LceGradientFactors;

// The gradient of the logits of some of W's rows, each entry final as soon as its logit is there:
//   dlogits[n, j] = p (per_p[n] + per_distance[n] d) du/dz,  d = (u - anchor[n]) / T - log_total[n]
//                   at_target[n] at j = targets[n];  0 for IGNORE_INDEX
// with p = exp(d), but at most 1: d is as exact as the logits, and log_prob, of which it is a difference.
// Without x, weight, bias and soft-cap dlogits holds E (LceLogitsExp) and becomes the gradient in place: p =
// E exp(-log_total[n]), d = log E - log_total[n]. E's rounding to bf16, by at most 2^-8 of it, moves d by as
// much.
typedef struct {
  Tensor dlogits;          // fp32/bf16 [N, V], may be strided; zeros may follow, as in LceLogitsExp
  GradientFactors factors; // read
  Tensor x, weight;        // fp32/bf16 [N, H] and [V, H], or both absent
  Tensor anchor;           // fp32 [N]: u[y], as LceTargetLogits leaves it for W; given when x is
  Tensor bias;             // fp32/bf16 [V], or absent
  Tensor targets;          // int32 [N], each in [0, V), ELSEWHERE or IGNORE_INDEX
  float softcap, temperature;
  Tensor workspace;
} LceLogitsGradient;

// Log-probabilities of given ids: ids[m] in [0, V), or IGNORE_INDEX, which does not count. Those of row n are
// entries offsets[n] to offsets[n + 1] - 1, or without offsets M / N for every row. An id may repeat.
//
// lce_id_logits: log_probs[m] = u of z = x[n] . W[ids[m]] + bias[ids[m]], in fp32; 0 for IGNORE_INDEX.
//   anchors[n] = the id of the row's largest u, the first of several; 0 where no id counts
// lce_id_log_probs: log_probs[m] = (u - u of the anchor) / T - anchor_nll[n], from those u, so that an id
//   that is nearly certain keeps its digits
typedef struct {
  Tensor log_probs, anchors; // fp32 [M], int32 [N]
  Tensor anchor_nll;         // fp32 [N]: -log p of the anchor
  Tensor x, weight, bias;    // fp32/bf16 [N, H], [V, H], and [V] or absent
  Tensor ids, offsets;       // int32 [M], int64 [N + 1] or absent
  float softcap, temperature;
} LceIdLogProbs;

// Their gradients, from upstream gradients dlog_probs, dlse and dentropy.
//
// lce_id_factors: what LceLogitsGradient makes all entries of but those of given ids. With S the entropy and
//   t[n] = dentropy[n]:
//     per_p[n] = (dlse[n] - sum of the row's dlog_probs - t[n] S[n]) / T;  per_distance[n] = -t[n] / T
//   anchors[n] = the likeliest given id, and log_total[n] = -log p of it, a difference of logits, so that an offset
//   common to a row's logits costs p no digits; IGNORE_INDEX and lse[n] where no id is possible
//   targets[n] = ELSEWHERE, or IGNORE_INDEX where no id counts, and dlse and t are 0
// lce_id_gradients writes the entries of given ids into the gradient of the logits of W's rows from `first`
//   on. With p and g the id's probability and the sum of its own dlog_probs:
//     dlogits[n, id - first] = (g (1 - p) + p (dlse[n] - sum of the other ids' dlog_probs - t (log p + S))) / T du/dz
typedef struct {
  GradientFactors factors; // written by lce_id_factors; at_target: 0
  Tensor anchors, targets; // int32 [N]; likewise
  Tensor dlogits;          // fp32/bf16 [N, W], may be strided; lce_id_factors: absent
  Tensor log_probs, lse;   // fp32 [M], fp32 [N]
  Tensor entropy;          // fp32 [N]; given when dentropy is
  Tensor dlog_probs;       // fp32 [M]
  Tensor dlse, dentropy;   // fp32 [N], or absent: 0
  Tensor ids, offsets;     // int32 [M], int64 [N + 1] or absent
  int64_t first;
  float softcap, temperature;
} LceIdGradients;

// out = factor[0] x, rounded to out's dtype: gradients, once it is known what they are multiplied by.
typedef struct {
  Tensor out, x; // fp32/bf16 [N]; out may be x itself, and a factor of 1 then leaves it alone
  Tensor factor; // fp32 [1], or absent: 1
} ScaleBy;

// A caller's token ids: targets[n] = ids[n] where that is in [0, V), else IGNORE_INDEX. And once the losses
// are written: loss[n] = NaN where ids[n] is neither, so that the mistake shows in every sum.
typedef struct {
  Tensor targets; // int32 [N], or absent
  Tensor loss;    // fp32 [N], or absent; of other tokens it is left alone
  Tensor ids;     // int32 or int64 [N]
  int64_t vocab_size;
} ReadTargets;

// The function of the backend's device.
#ifdef HAVE_CUDA
#define ON_DEVICE(name) (backend->device == ON_CUDA ? cuda_##name : cpu_##name)
#else
#define ON_DEVICE(name) cpu_##name
#endif

// S: with scratch of its own.
#define TORCH_OPERATIONS(X, S)                                                                               \
  X(lce_gradient_factors, LceGradientFactors)                                                                \
  S(lce_logits_gradient, LceLogitsGradient)                                                                  \
  X(lce_id_logits, LceIdLogProbs)                                                                            \
  X(lce_id_log_probs, LceIdLogProbs)                                                                         \
  X(lce_id_factors, LceIdGradients)                                                                          \
  X(lce_id_gradients, LceIdGradients)                                                                        \
  X(read_targets, ReadTargets)                                                                               \
  X(scale_by, ScaleBy)
#define DECLARE(name, Arguments)                                                                             \
  void name(Backend *backend, Arguments a);                                                                  \
  void cpu_##name(Backend *backend, const Arguments *a);                                                     \
  void cuda_##name(Backend *backend, const Arguments *a);
TORCH_OPERATIONS(DECLARE, DECLARE)
#undef DECLARE

// For callers with a stream of their own (a cudaStream_t of the backend's device; NULL: the default one).
// Operations after backend_follow wait for what the stream holds by then, and what it is given after
// backend_precede waits for the operations before it: on the device, not the host. The CPU has no streams.
// *event is the caller's, NULL before the first call; hand_over_end destroys it.
void backend_follow(Backend *backend, void *stream, void **event);
void backend_precede(Backend *backend, void *stream, void **event);
void hand_over_end(Backend *backend, void **event);
void cuda_follow(Backend *backend, void *stream, void **event);
void cuda_precede(Backend *backend, void *stream, void **event);
void cuda_hand_over_end(void **event);

// From here on a row gets the same bits whatever rows are beside it, or not. `ops` is the backend's own copy of its
// operations, of which some are others then.
void batch_invariant(Backend *backend, BackendOps *ops, bool on);
void cuda_batch_invariant(BackendOps *ops, bool on);

__END_DECLS
