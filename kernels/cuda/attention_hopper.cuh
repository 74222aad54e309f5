// Hopper's own instructions (sm_90a) for the attention kernels: matrix products by whole warpgroups (wgmma),
// bulk copies by the tensor memory accelerator (TMA), and the barriers in shared memory that they signal.
//
// A tile is [rows, 64] bf16, 128 bytes a row, swizzled by TMA: 16-byte chunk c of row r lies at c ^ (r & 7).
// Tiles start on multiples of 1024 bytes. Heads of 128 are two tiles, columns [0, 64) and [64, 128).
#ifndef LCE_KERNELS_CUDA_ATTENTION_HOPPER_CUH
#define LCE_KERNELS_CUDA_ATTENTION_HOPPER_CUH

#include <cudaTypedefs.h>

#include "kernels/cuda/attention_mma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "build for sm_90a rather than sm_90: these kernels use instructions that only sm_90a has"
#endif

namespace attention {

enum { TILE_BYTES = 64 * 128 }; // of 64 rows

// --- barriers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_create(uint64_t *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that bulk copies will bring.
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, int parity) {
  asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
               "@over bra done;\nbra again;\ndone:\n}\n" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// --- bulk copies -------------------------------------------------------------------------------------------

// A box of a [batch, token, head, number] tensor into a tile; what lies beyond the last token becomes zeros.
__device__ __forceinline__ void bulk_tile(uint32_t tile, const CUtensorMap *map, uint64_t *barrier,
                                          int number, int head, int token, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6}], [%2];\n" ::"r"(tile),
      "l"(map), "r"(shared_address(barrier)), "r"(number), "r"(head), "r"(token), "r"(batch)
      : "memory");
}

__device__ __forceinline__ void bulk_bytes(void *destination, const void *source, int bytes,
                                           uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
          shared_address(destination)),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// --- products ----------------------------------------------------------------------------------------------

// Where wgmma finds an operand in shared memory: the lower half of its descriptor, which counts addresses in
// units of 16 bytes. By rows: the product's rows (of a) or columns (of b) are the tile's rows, and the 16
// columns from `address` on are summed over. By columns: b's columns are the tile's, and the 16 rows from
// `address` on are summed over; a second tile of columns lies `next_tile` bytes further. The upper half, the
// same for all, says: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
#define ATTENTION_OPERAND "0x40000040"

__device__ __forceinline__ uint32_t operand_by_rows(uint32_t address) {
  return address >> 4 | 1 << 16;
}

__device__ __forceinline__ uint32_t operand_by_columns(uint32_t address, int next_tile) {
  return address >> 4 | next_tile >> 4 << 16;
}

// A value that all lanes share, known as such to the compiler: it can then live in a uniform register.
template <class T> __device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(~0u, x, 0);
}

// Before products, when registers they use were written by other instructions.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most `PENDING` committed groups are unfinished.
template <int PENDING> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

// The compiler does not know that products write their sums later: this keeps it from touching them early.
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N> __device__ __forceinline__ void pin(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++)
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// d[64, 64] (+)= a[64, 16] b[16, 64], a in registers.
template <bool TRANSPOSED_B>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %37, 0;\nmov.b64 b, {%36, " ATTENTION_OPERAND "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, b, add, 1, 1, %38;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)add), "n"(TRANSPOSED_B));
}

// d[64, 128] (+)= a[64, 16] b[16, 128], a in registers.
template <bool TRANSPOSED_B>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %69, 0;\nmov.b64 b, {%68, " ATTENTION_OPERAND "};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, b, add, 1, 1, %70;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
        "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]),
        "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)add), "n"(TRANSPOSED_B));
}

// The same with a in shared memory, rows of 16 numbers as b's columns are.
__device__ __forceinline__ void wgmma(float (&d)[32], uint32_t a, uint32_t b, bool add) {
  asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %34, 0;\n"
               "mov.b64 a, {%32, " ATTENTION_OPERAND "};\nmov.b64 b, {%33, " ATTENTION_OPERAND "};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "a, b, add, 1, 1, 0, 0;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "r"(a), "r"(b), "r"((int)add));
}

} // namespace attention

#endif
