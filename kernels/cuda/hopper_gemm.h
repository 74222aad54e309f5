// The LM head's and SwiGLU's GEMMs on Hopper (hopper_kernel.cuh). Each function returns true if it did the
// work; false, with nothing touched, means that the device or rows do not suit or that cuBLASLt is faster.
#pragma once

#include "kernels/cuda/cuda_ops.h"

__BEGIN_DECLS

// True if the device and the build support these kernels. LCE_HOPPER=0 in the environment makes it false.
bool hopper_runs(Backend *backend);

// For each row and each tile of LCE_TILE_COLUMNS, [rows, tiles] each: the sum of E before it is rounded and,
// where LceLogitsExp has e_distance, e_squared and max, their parts and the largest logit (Ranked).
typedef struct {
  float *sums, *distances, *squares;
  unsigned long long *best;
} RowParts;
RowParts row_parts(const LceLogitsExp *a, void *base, int64_t rows);

// E of LceLogitsExp with target_z as anchor, written to exps if given, and its row_parts. Tensors are bf16
// with rows that start on 16 bytes.
bool hopper_logits_exp(Backend *backend, const LceLogitsExp *a, void *parts);

// out [C, H] (bf16 or fp32) = exps [C, V] weight [V, H], both bf16 with rows that start on 16 bytes. Split-K
// partials go through `scratch`, added in a fixed order. Unless `always`, only where faster than cuBLASLt.
bool hopper_dx(Backend *backend, Tensor out, Tensor exps, Tensor weight, void *scratch, size_t bytes,
               bool always);

// out [rows, H] = the chunk's kept tiles times weight. `scratch` begins with cuda_lce_dx_list_bytes of lists.
void hopper_sampled_dx(Backend *backend, Tensor out, const KeptTiles *kept, int64_t rows, Tensor weight,
                       void *scratch, size_t bytes);

// dweight (+)= alpha times the transposed kept tiles times x, over the lists' k-steps, perhaps none.
void hopper_sampled_dweight(Backend *backend, Tensor dweight, const KeptTiles *kept, float alpha);

// gate_up [N, 2F] = x [N, I] weight[2F, I]^T;  out [N, F] = silu(gate) * up, of the stored gate and up. All
// bf16 with rows that start on 16 bytes, F a multiple of 8, and tiles enough for the whole device.
bool hopper_swiglu(Backend *backend, Tensor out, Tensor gate_up, Tensor x, Tensor weight);

// dgate_up [N, 2F], which may be gate_up itself: the gradients of gate and up. The product dout weight (dout
// [N, O], weight [O, F]) stays in fp32. Tensors as above.
bool hopper_swiglu_gradient(Backend *backend, Tensor dgate_up, Tensor gate_up, Tensor dout, Tensor weight);

__END_DECLS
