// The loss as a ladder: seven complete versions of LM head + cross-entropy, each one idea further than the
// one before it. kernels/lce/LCE.md explains the ideas; tools/bench_lce --ladder measures the rungs.
//
// rungs.c has the rungs: matmuls are the backend's linear_*, the work on single rows is in rows_cpu.c. Rungs
// 1 to 5 run on the CPU, 6 on Hopper GPUs (hopper.cu), 7, linear_cross_entropy, on both.
#pragma once

#include <sys/cdefs.h>

#include "kernels/lce/linear_cross_entropy.h"

__BEGIN_DECLS

enum { RUNGS = 7 };
extern const char *const ladder_names[RUNGS];
extern const int ladder_gemms[RUNGS]; // a rung's number of matmuls of 2 N V H flops each

// True if the backend runs the rung.
bool ladder_has(const Backend *backend, int rung);

// Runs a rung, 1 to RUNGS, on a fused call of loss, dx, dweight, x, weight, targets, chunk (rung 1 takes all
// tokens at once) and scale; only rung 7 reads the other fields, except that rungs 4 and 5 sample as well.
// Rung 0 is the three matmuls alone, on any device. Rung 6 takes bf16 and a hidden size that 8 divides.
// Scratch is pushed as MEMORY_HEAD and popped.
void ladder_run(Backend *backend, int rung, LinearCrossEntropy call);

// The call on tokens [first, first + chunk), or the rest of them; all but the first add to dweight.
LinearCrossEntropy ladder_chunk(const LinearCrossEntropy *call, int64_t first);
// Counts the bytes of dweight that this chunk reads and writes.
int64_t ladder_dweight_bytes(const LinearCrossEntropy *call, int64_t first);

// Errors of a rung's results against float64, in the Frobenius norm, over the right values' size: at 16 tokens
// and 16 rows of dweight. `certain` is the error of token 0's dx over the target's part of it, c W[y].
typedef struct {
  double loss, dx, dweight, certain;
} LadderErrors;
LadderErrors ladder_errors(const LinearCrossEntropy *call, const double *exact_losses); // on the CPU, in fp32
double *ladder_exact_losses(const LinearCrossEntropy *call);                            // [N], for free()

// --- work on rows: rows_cpu.c, in fp32 ---------------------------------------------------------------------

// A chunk of C tokens, and their results in rungs 4 and 5.
typedef struct {
  LinearCrossEntropy call; // the chunk's
  Tensor target_z;         // [C]: z[y]
  Tensor anchor;           // [C]: a, which is z[y] but in repaired rows
  Tensor target_e;         // [C]: exp(z[y] - a), so 1 but in repaired rows
  Tensor row_sum;          // [C]: R
  Tensor r, c;             // [C]: the factors of E W and W[y] in dx
  Tensor scaled_x;         // [C, H]: r x
  Tensor exps;             // E [C, V]
} Anchored;

// lse[n] = logsumexp(z[n]), loss[n] = lse[n] - z[n, y].
void ladder_losses(Tensor loss, Tensor lse, Tensor logits, Tensor targets);
// dlogits[n] = scale (softmax(z[n]) - onehot(y)); may lie at the logits' address.
void ladder_gradients(Tensor dlogits, Tensor logits, Tensor lse, Tensor targets, float scale);
// target_z[n] = x[n] . W[y], anchor = target_z (infinity where the target is IGNORE_INDEX), target_e = 1.
void ladder_anchors(const Anchored *a);
// E = exp(z - a), 0 at the target, in the place of the logits z; row_sum.
void ladder_exponentials(const Anchored *a);
// The same from x and W, without storing a logit.
void ladder_matmul_exponentials(Backend *backend, const Anchored *a);
// Computes rows whose sum exceeds LCE_LARGEST_SUM (loss_row.h) once more, with their maximum as anchor.
void ladder_repair(const Anchored *a);
// loss, r, c and scaled_x from row_sum and target_e.
void ladder_finish(const Anchored *a);
// dx = scale (r dx + c W[y]);  dweight[y] += scale c x.
void ladder_add_targets(const Anchored *a);
// Two ranks have some columns of E each, relative to anchors of their own. Both get the whole row's anchor,
// the larger of the two, row_sum and target_e; rescale [2, C] makes each rank's E relative to that anchor.
void ladder_join(const Anchored ranks[2], Tensor rescale);
// Keeps a random part of E's tiles (call.sampling), scaled so that E keeps its expectation.
void ladder_sample(const Anchored *a);

// --- hopper.cu ---------------------------------------------------------------------------------------------

// E [C, V] from bf16 x and W, anchored at rows' target_z; anchor, target_e and row_sum. Rows whose sum went
// out of range are repaired. Needs ladder_hopper().
void ladder_hopper_exponentials(Backend *backend, Tensor exps, const SoftmaxStatistics *softmax, Tensor x,
                                Tensor weight, Tensor targets);
bool ladder_hopper(void); // true if the GPU and the build support it

__END_DECLS
