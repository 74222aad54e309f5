// Computes how far a student's distribution p is from a teacher's, q, and the gradient, without logits of all tokens.
#pragma once

#include "kernels/kernels.h"

__BEGIN_DECLS

// With z a logit of either head, its bias added, u = c tanh(z / c) under a soft-cap c, else z, p = softmax(u / T), each
// head with its own c and T:
//   FORWARD_KL  loss = KL(q || p)    d = p - q
//   REVERSE_KL  loss = KL(p || q)    d = p (log p - log q - loss)
//   JSD         loss = beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta q
//               d = (1 - beta) p (log p - log m - KL(p || m))
// The gradient of a token's logit is token_weights[n] d / T du/dz, without a factor of T^2. Where mask[n] is 0, loss,
// entropy and gradient are 0. An entry that a bias of minus infinity masks in both heads counts as none.
typedef enum { FORWARD_KL, REVERSE_KL, JSD } DivergenceKind;

typedef struct {
  Tensor x, weight, bias; // fp32/bf16 [N, H], with an H of its own, [V, H], and [V] or absent
  float softcap, temperature;
  Tensor logits; // of a chunk, as all that follows: strided; the student's become their gradient
  // On Hopper each tile of LCE_TILE_COLUMNS has its largest logit (a Ranked) and the sum of exp((z - that) / T).
  Tensor best, sums;
} DivergenceHead;

typedef struct {
  DivergenceKind kind;
  float beta;
  DivergenceHead student, teacher; // without what is of a chunk
  int64_t chunk;                   // tokens at a time
  Tensor loss, entropy;            // fp32 [N]; entropy: the student's, or absent
  Tensor mask, token_weights;      // int32 [N], fp32 [N]; or absent: 1
  // Each may be absent: x's dtype [N, H]; fp32, or in few chunks W's dtype, [V, H]; fp32 [V].
  Tensor dx, dweight, dbias;
  Tensor row_terms; // fp32 [C, DIVERGENCE_ROW_FLOATS]: scratch of a chunk on a GPU
} LinearDivergence;

// So many chunks may be summed in bf16: their roundings come to 1.6 to 1.9 times the one of a sum in fp32.
enum { DIVERGENCE_NARROW_CHUNKS = 4, DIVERGENCE_ROW_FLOATS = 8 };

// The library's choice of a chunk.
int64_t divergence_chunk(const Backend *backend, int64_t tokens);

// The caller owns every tensor; a call pushes both heads' logits [C, V] as MEMORY_HEAD, and pops them before it
// returns.
void linear_divergence(Backend *backend, LinearDivergence a);

// Losses and entropies of a chunk, whose logits are there, and with dx or dweight the gradient in their place.
void cpu_divergence(Backend *backend, const LinearDivergence *a);
void cuda_divergence(Backend *backend, const LinearDivergence *a);
// Computes the logits, best and sums of a head in bf16; false, with nothing touched, if not on Hopper.
bool cuda_logit_tiles(Backend *backend, const DivergenceHead *head);

__END_DECLS
