// Hopper's own instructions, one function each, under the names that the kernel (hopper_kernel.cuh) uses.
//
// Three engines work side by side in a multiprocessor. The copy engine (TMA) moves boxes of a matrix between
// global and shared memory: one thread starts it, and an mbarrier in shared memory counts the bytes as they
// arrive. The tensor cores (wgmma) multiply tiles that lie in shared memory, started by a warpgroup of 128
// threads and waited for later. What is left to the threads is to say when, and to work on the sums.
//
// Only sm_90a code has these instructions; HOPPER_CODE says whether this compilation is for it.
#ifndef LCE_KERNELS_CUDA_HOPPER_PTX_CUH
#define LCE_KERNELS_CUDA_HOPPER_PTX_CUH

#include <cuda.h>
#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE 1
#endif

#if defined(HOPPER_CODE)

static __device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

// --- clusters: blocks that run together on neighbouring multiprocessors and see each other's shared memory

static __device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// True in one lane of a warp that is here together.
static __device__ __forceinline__ bool one_lane() {
  uint32_t chosen;
  asm volatile("{\n\t.reg .pred chosen;\n\telect.sync _|chosen, 0xffffffff;\n\t"
               "selp.u32 %0, 1, 0, chosen;\n\t}"
               : "=r"(chosen));
  return chosen;
}

static __device__ __forceinline__ void cluster_synchronize() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

// --- numbers in device memory that all blocks see

static __device__ __forceinline__ void memory_add(unsigned long long *to, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Its latency shows only where the number is used.
static __device__ __forceinline__ unsigned long long memory_look(const unsigned long long *at) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}

// --- mbarriers: a phase ends when `count` threads have arrived and all announced bytes are there

static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

// Makes the initialised barriers visible to the copy engine and to the other blocks of the cluster.
static __device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive_expecting(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at the same place.
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, uint32_t rank) {
  asm volatile("{\n\t.reg .b32 there;\n\t"
               "mapa.shared::cluster.u32 there, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(barrier)),
               "r"(rank)
               : "memory");
}

// Returns once the phase of this parity has ended.
static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile("{\n\t.reg .pred done;\n"
               "again:\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
               "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// --- the copy engine: boxes of a matrix, at column x and row y. What lies outside the matrix reads as zero
// and is not written.

// Into the shared memory of every block of the cluster that `blocks` has a bit for, at the same place in
// each; the bytes count at each one's own barrier.
static __device__ __forceinline__ void box_load_multicast(uint32_t to, const CUtensorMap *matrix,
                                                          uint64_t *barrier, int x, int y, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(matrix), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

static __device__ __forceinline__ void box_load(uint32_t to, const CUtensorMap *matrix, uint64_t *barrier,
                                                int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(matrix), "r"(shared_address(barrier)), "r"(x), "r"(y)
               : "memory");
}

static __device__ __forceinline__ void box_store(const CUtensorMap *matrix, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(matrix),
               "r"(from), "r"(x), "r"(y)
               : "memory");
}

static __device__ __forceinline__ void stores_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most N of this thread's committed stores still read shared memory.
template <int N> static __device__ __forceinline__ void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

static __device__ __forceinline__ void stores_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Between ordinary writes to shared memory and the copy engine's reads of it.
static __device__ __forceinline__ void copy_engine_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- the tensor cores

// Registers of a thread, given up or taken over between the roles of a block.
template <int N> static __device__ __forceinline__ void registers_shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void registers_grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

static __device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// How a tile lies in shared memory, for the tensor cores: 128-byte rows whose 16-byte pieces are permuted
// within groups of 8 rows (the copy engine's SWIZZLE_128B), groups 1024 bytes apart. The rows run along k
// when the operand is stored with k innermost. Otherwise they hold 64 entries along m or n for one k, and
// the blocks of 64 entries are 8 KiB apart (64 values of k).
static __device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, bool k_innermost) {
  uint64_t leading = k_innermost ? 1 : 8192 / 16, group = 1024 / 16, swizzle_128 = 1;
  return (address & 0x3FFFF) >> 4 | leading << 16 | group << 32 | swizzle_128 << 62;
}

// The same `bytes` further on. The address stays within its bits, so nothing carries into the upper half.
static __device__ __forceinline__ uint64_t tile_further(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~0xffffffffull) | ((uint32_t)descriptor + (bytes >> 4));
}

#define SUMS_16(i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),                \
      "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]),      \
      "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define SUMS_64  SUMS_16(0), SUMS_16(16)
#define SUMS_128 SUMS_64, SUMS_16(32), SUMS_16(48)
#define SUMS_192 SUMS_128, SUMS_16(64), SUMS_16(80)
#define NAMES_64                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                   \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_128                                                                                            \
  NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
           "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_192                                                                                            \
  NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA(COLUMNS, A, B, KEEP, B_TURNED)                                                                 \
  asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " KEEP ", 0;\n\t"                                 \
               "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" NAMES_##COLUMNS            \
               "}, " A ", " B ", keep, 1, 1, 0, " B_TURNED ";\n\t}"                                          \
               : SUMS_##COLUMNS                                                                              \
               : "l"(a), "l"(b), "r"((int)keep), "n"(B_K_INNERMOST ? 0 : 1))

// d[64, COLUMNS] = (keep ? d : 0) + a[64, 16] b[16, COLUMNS], fp32 sums of bf16 products. Thread t of the
// warpgroup, in warp w = t / 32 with lane l = t % 32, holds rows 16 w + l / 4 (d[4j], d[4j+1]) and 8 below
// that (d[4j+2], d[4j+3]), columns 8 j + 2 (l % 4) and the next.
template <int COLUMNS, bool B_K_INNERMOST>
static __device__ __forceinline__ void wgmma_64_by(float (&d)[96], uint64_t a, uint64_t b, bool keep) {
  static_assert(COLUMNS == 64 || COLUMNS == 128 || COLUMNS == 192, "a multiple of 64 that fits in d");
  if constexpr (COLUMNS == 64)
    WGMMA(64, "%32", "%33", "%34", "%35");
  else if constexpr (COLUMNS == 128)
    WGMMA(128, "%64", "%65", "%66", "%67");
  else
    WGMMA(192, "%96", "%97", "%98", "%99");
}
#undef WGMMA
#undef SUMS_16
#undef SUMS_64
#undef SUMS_128
#undef SUMS_192
#undef NAMES_64
#undef NAMES_128
#undef NAMES_192

// Four 8x8 blocks of bf16 from the registers of a warp, laid out as wgmma leaves its sums, into rows of
// shared memory: lane l gives the address of row l % 8 of block l / 8.
static __device__ __forceinline__ void store_blocks(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                                    uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// 2^x, within 2 units in the last place; results below the normal numbers become 0.
static __device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
#endif
