// The loss as a ladder: seven complete versions of LM head + cross-entropy, each one idea further than the one
// before it. kernels/lce/LCE.md explains the ideas; tools/bench_lce --ladder measures the rungs.
//
// rungs.c holds what a rung does, for both devices: matmuls are the backend's linear_*, and what happens to
// single rows is in rows_cpu.c (plain loops: read these) and rows_cuda.cu (the same as kernels).
#pragma once

#include "kernels/lce/linear_cross_entropy.h"

#if defined(__cplusplus)
extern "C" {
#endif

enum { RUNGS = 7 };
extern const char *const ladder_names[RUNGS];

// Whether the backend has the rung: the sixth is for Hopper GPUs alone.
bool ladder_has(const Backend *backend, int rung);

// Runs a rung, 1 to RUNGS, on a fused call of loss, dx, dweight, x, weight, targets, chunk (rung 1 takes all tokens at
// once) and scale; no rung but the last reads its other fields, except that rungs 4 and 5 sample on the CPU. Rung 0 is the three
// matmuls alone. Rungs 1 to 6 take bf16 on CUDA, and rungs 5 and 6 need a hidden size there that 8 divides. What a rung needs
// beyond the call's tensors is pushed as MEMORY_HEAD and popped.
void ladder_run(Backend *backend, int rung, LinearCrossEntropy call);

// --- what happens to rows ----------------------------------------------------------------------------------

// The tokens of a chunk, and what rungs 4 to 6 know of them.
typedef struct {
  Tensor x, weight, targets, loss, dx, dweight; // of the chunk's call
  Tensor target_z;                              // fp32 [C]: z[y]
  Tensor anchor;                                // fp32 [C]: a, which is z[y] but in repaired rows
  Tensor target_e;                              // fp32 [C]: exp(z[y] - a), so 1 but in repaired rows
  Tensor row_sum;                               // fp32 [C]: R
  Tensor r, c;                                  // fp32 [C]: what multiplies E W and W[y] in dx
  Tensor scaled_x;                              // [C, H]: r x
  Tensor exps;                                  // E [C, V], of x's dtype
  float scale;
} Anchored;

typedef struct {
  // lse[n] = logsumexp(z[n]), loss[n] = lse[n] - z[n, y].
  void (*losses)(Backend *, Tensor loss, Tensor lse, Tensor logits, Tensor targets);
  // dlogits[n] = scale (softmax(z[n]) - onehot(y)); may lie at the logits' address.
  void (*gradients)(Backend *, Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, float scale);
  // target_z[n] = x[n] . W[y], anchor = target_z (infinity where the target is IGNORE_INDEX), target_e = 1.
  void (*anchors)(Backend *, const Anchored *);
  // E = exp(z - a), 0 at the target, in the place of the fp32 logits z; row_sum.
  void (*exponentials)(Backend *, const Anchored *);
  // The same from x and W, without storing a logit.
  void (*matmul_exponentials)(Backend *, const Anchored *);
  // The same with Hopper's instructions, where ladder_hopper(); NULL on the CPU.
  void (*hopper_exponentials)(Backend *, const Anchored *);
  // Rows whose sum went out of range: once more, with the row's maximum as anchor.
  void (*repair)(Backend *, const Anchored *);
  // loss, r, c and scaled_x from row_sum and target_e.
  void (*finish)(Backend *, const Anchored *);
  // dx = scale (r dx + c W[y]);  dweight[y] += scale c x.
  void (*add_targets)(Backend *, const Anchored *);
  // A random part of E's tiles remains, scaled so that E keeps its expectation. NULL on CUDA.
  void (*sample)(Backend *, const Anchored *, const TileSampling *);
} LadderRows;

extern const LadderRows ladder_rows_cpu, ladder_rows_cuda;
bool ladder_hopper(void); // of rows_cuda.cu

// Row sums above this are out of range, as that of one logit which beats the target's by 66.
#define LADDER_SUM_LIMIT 0x1p96f

#if defined(__cplusplus)
}
#endif
