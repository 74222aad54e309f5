// The last layer for any language: linear_cross_entropy behind a plain C interface, as liblce.so (`make
// liblce.so`).
//
//   lce_context *lce = lce_create("cuda", 0, "bf16");
//   lce_args args = {.tokens = N, .hidden_size = H, .vocab_size = V, .x = x, .weight = w, .targets = y, .loss = loss,
//                    .dx = dx, .dweight = dw, .scale = 1, .mean = 1};
//   if (lce_linear_cross_entropy(lce, &args) || lce_synchronize(lce)) puts(lce_last_error());
//   lce_destroy(lce);
//
// Pointers are to the device's memory (a GPU's, or the host's for "cpu"), dense and row-major; the caller
// owns all of it. What the layer needs beyond them it allocates once for the largest call so far and keeps
// until lce_destroy. A call on CUDA is asynchronous and takes its place on the caller's stream (args.stream), as a
// kernel launched there would: it reads what earlier work of that stream has written, later work of that stream finds
// its results, and nobody needs to wait; lce_synchronize is for those who want to. Calls of one context run one after
// the other, whatever their streams. On the CPU a call returns when it is done. One thread at a time may use a
// context; on CUDA the context's device must be that thread's current one, which lce_create makes it.
//
// A target that is neither in [0, V) nor -100 is a mistake that only the device sees: nothing outside of the tensors
// is read for it, the token counts as one with -100, but its loss is NaN.
//
// Functions that can fail return 0 when all went well; lce_last_error then tells, in a sentence, what did not.
#ifndef LCE_LIBRARY_LCE_H
#define LCE_LIBRARY_LCE_H

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

typedef struct lce_context lce_context;

// N tokens, H hidden size, V vocabulary. "real" is the context's dtype. NULL stands for an absent tensor.
// Terms, their formulas and sources: kernels/kernels.h, "the loss".
typedef struct {
  int64_t tokens, hidden_size, vocab_size; // N, H, V
  int64_t chunk;                           // tokens at a time; 0 lets the library choose
  int32_t materialized;                    // hold the logits of all tokens, to compare with
  int32_t mean;                            // scale by 1 / (sum of the counted tokens' class weights) as well
  int32_t accumulate;                      // add to dweight and dbias rather than write them
  int32_t targets_int64;                   // targets are int64, as PyTorch's; otherwise int32
  float scale;                             // of the gradients
  float label_smoothing, z_loss, softcap, temperature; // 0: none (temperature 0 is read as 1)
  const void *x;                                       // real [N, H]
  const void *weight;                                  // real [V, H]
  const void *bias;                                    // real [V], or NULL
  const void *targets;        // int32 or int64 [N], each in [0, V) or -100, which does not count
  const float *class_weights; // [V], or NULL
  const float *token_weights; // [N], or NULL: what each token's gradient is multiplied by
  const float
      *entropy_weights; // [N], or NULL: adds sum of these times the entropies to what is differentiated
  float *loss;          // [N]: per token, before scale, mean and token weights
  void *dx;             // real [N, H], or NULL: forward only
  float *dweight;       // [V, H], or NULL with dx
  float *dbias;         // [V]; there when bias and dx are
  float *token_z_loss, *log_prob, *logsumexp, *entropy, *max_logit, *correct; // [N] each, or NULL
  int32_t *predicted;                                                         // [N], or NULL
  void *stream; // a cudaStream_t of the context's device; NULL is its default stream. Ignored on the CPU
} lce_args;

// A context on "cpu" (dtype "fp32") or on CUDA device `ordinal` (dtype "bf16" or "fp32"). NULL when there is
// none.
lce_context *lce_create(const char *device, int ordinal, const char *dtype);
void lce_destroy(lce_context *context); // NULL is fine

// Losses, and the gradients of scale * factor * sum_n (token_weights[n] (loss[n] + z_loss[n]) +
// entropy_weights[n] entropy[n]), where factor is 1 or the mean's.
int lce_linear_cross_entropy(lce_context *context, const lce_args *args);
int lce_synchronize(lce_context *context);

// Bytes that the last call held at its peak beyond the caller's tensors, without the fixed workspace of
// matrix products that a context on CUDA has from the start; 0 for NULL and before the first call.
int64_t lce_held_bytes(const lce_context *context);

// Why the last call of this thread failed.
const char *lce_last_error(void);

#if defined(__cplusplus)
}
#endif
#endif
