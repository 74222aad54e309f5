// Building blocks of the tensor-core attention kernels, portable to sm_80 and later: tiles of bf16 rows in
// swizzled shared memory, asynchronous copies into them, and warp-wide fragments out of them.
//
// A tile holds rows of D numbers, D/8 chunks of 16 bytes each. Chunk c of row r lies at chunk c ^ (r & 7), so
// the eight rows that one ldmatrix phase reads fall into eight different bank groups without padding. Every
// fragment below starts at a row that is a multiple of 8, so r & 7 is lane & 7 and the swizzle costs one xor.
//
// Fragments follow the PTX manual's mma.m16n8k16: with g = lane / 4 and q = lane % 4, an accumulator's four
// numbers are (row g, columns 2q, 2q + 1) and (row g + 8, the same columns). Two neighbouring accumulators,
// rounded to bf16, are exactly one A operand of the next product: probabilities never leave the registers.
#ifndef LCE_KERNELS_CUDA_ATTENTION_MMA_CUH
#define LCE_KERNELS_CUDA_ATTENTION_MMA_CUH

#include <stdint.h>

#include "kernels/cuda/cuda_common.cuh"

namespace attention {

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, or zeros when `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_16(uint32_t destination, const void *source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0));
}

__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;\n");
}

template <int PENDING> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING));
}

// Rows [row, row + ROWS) of a matrix into a tile; rows at and after `limit` become zeros.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16 *matrix, int64_t stride, int row,
                                          int limit) {
  constexpr int CHUNKS = D / 8;
  static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
#pragma unroll
  for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
    int index = i * THREADS + threadIdx.x, r = index / CHUNKS, c = index % CHUNKS;
    bool valid = row + r < limit;
    copy_16(tile + (r * CHUNKS + (c ^ (r & 7))) * 16, matrix + (valid ? row + r : 0) * stride + c * 8, valid);
  }
}

__device__ __forceinline__ void ldmatrix(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], bf16 operands, fp32 sums.
__device__ __forceinline__ void mma(float c[4], const uint32_t a[4], const uint32_t *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
               "%9}, {%0, %1, %2, %3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Where this lane's ldmatrix addresses start in a tile of D columns. `rows` walks down the tile's rows and
// must be a multiple of 8; `column` is a multiple of 16.
template <int D> struct Lane {
  uint32_t row_major; // a [16 rows, 16 columns] block, fragments by row: A operands, transposed B operands
  uint32_t row_xor;
  uint32_t
      pair_major; // two [8 rows, 16 columns] blocks: B operands whose tile rows are the product's columns
  uint32_t pair_xor;

  __device__ __forceinline__ Lane() {
    uint32_t lane = threadIdx.x % 32;
    row_major = (lane & 15) * (D * 2);
    row_xor = ((lane >> 4) ^ (lane & 7)) * 16;
    pair_major = ((lane & 7) + ((lane >> 4) << 3)) * (D * 2);
    pair_xor = (((lane >> 3) & 1) ^ (lane & 7)) * 16;
  }

  // A operand: rows [row, row + 16), columns [column, column + 16) of the tile.
  __device__ __forceinline__ void a(uint32_t r[4], uint32_t tile, int row, int column) const {
    ldmatrix(r, tile + row * (D * 2) + row_major + (row_xor ^ (column * 2)));
  }
  // B operands of two products: b[k][n] = tile[row + n][column + k] for n < 16, the second pair has n >= 8.
  __device__ __forceinline__ void b_rows(uint32_t r[4], uint32_t tile, int row, int column) const {
    ldmatrix(r, tile + row * (D * 2) + pair_major + (pair_xor ^ (column * 2)));
  }
  // B operands of two products: b[k][n] = tile[row + k][column + n] for n < 16, the second pair has n >= 8.
  __device__ __forceinline__ void b_columns(uint32_t r[4], uint32_t tile, int row, int column) const {
    ldmatrix_transposed(r, tile + row * (D * 2) + row_major + (row_xor ^ (column * 2)));
  }
};

// Writes a warp's [16 * M, D] accumulators as bf16 rows of a matrix, `scale` times, through the warp's own
// part of shared memory (16 * M rows of D), so that whole rows leave in 16-byte pieces.
template <int M, int D>
__device__ __forceinline__ void store_rows(float (&sums)[M][D / 8][4], float scale, uint32_t scratch,
                                           bf16 *matrix, int64_t stride, int row, int limit) {
  constexpr int CHUNKS = D / 8;
  int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int r = m * 16 + half * 8 + g;
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(scratch + (r * CHUNKS + (n ^ (r & 7))) * 16 + q * 4),
                     "r"(pack(sums[m][n][2 * half] * scale, sums[m][n][2 * half + 1] * scale))
                     : "memory");
      }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * M * CHUNKS / 32; i++) {
    int index = i * 32 + lane, r = index / CHUNKS, c = index % CHUNKS;
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(scratch + (r * CHUNKS + (c ^ (r & 7))) * 16)
                 : "memory");
    if (row + r < limit) *reinterpret_cast<uint4 *>(matrix + (row + r) * stride + c * 8) = v;
  }
}

} // namespace attention

#endif
