// The matrix products of the last layer on Hopper's own instructions; hopper_kernel.cuh tells how. Each
// function says whether it did the work: false (or 0) means "not on this device, or not with rows like
// these", or where it says so, that cuBLASLt is faster; and nothing has been touched then.
#ifndef LCE_KERNELS_CUDA_HOPPER_GEMM_H
#define LCE_KERNELS_CUDA_HOPPER_GEMM_H

#include "kernels/kernels.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Whether the device has what they need, and LCE_HOPPER=0 in the environment does not ask for the portable
// way.
bool hopper_runs(Backend *backend);

// How many parts the sum of a row over V columns comes in.
int64_t hopper_sums_across(int64_t vocab_size);

// E[c, j] = exp((x[c] . weight[j] - anchor[c]) * sharpness) for j != targets[c], 0 for j = targets[c] and in
// rows whose target is IGNORE_INDEX, written to exps (bf16, may be strided) unless that is absent. The parts
// of sum_j E[c, j], from before E is rounded, go to sums[c, hopper_sums_across(V)]. x [C, H] and weight [V,
// H] are bf16 with rows that start on 16 bytes. `sums` holds `bytes`: as many of the first rows are done as
// there is room for. Returns how many; 0 where it does not run, or not even 256 rows fit.
int64_t hopper_exponentials(Backend *backend, Tensor exps, float *sums, size_t bytes, const float *anchor,
                            float sharpness, Tensor x, Tensor weight, const int32_t *targets);

// out [C, H] (bf16 or fp32) = exps [C, V] weight [V, H], both bf16 with rows that start on 16 bytes. When
// the tiles of out do not fill the device evenly, sums over parts of V meet in `scratch`, in a fixed order.
// Unless `always`, it is only done where it takes less time than cuBLASLt's product.
bool hopper_exps_times_weight(Backend *backend, Tensor out, Tensor exps, Tensor weight, void *scratch,
                              size_t bytes, bool always);

// The same over the tiles of exps that count (LceFilter; the others must be 0), skipping the steps of 64
// vocabulary entries in which no tile of 256 rows counts. Always done where it can be. `list` has room for
// cuda_lce_list_bytes(C, V), and is only there to be written.
bool hopper_filtered_exps_times_weight(Backend *backend, Tensor out, Tensor exps, Tensor weight,
                                       const float *tiles, int32_t *list, void *scratch, size_t bytes);

#if defined(__cplusplus)
}
#endif
#endif
