// PTX wrappers for sm_90a, one function per instruction: clusters, mbarriers, TMA, wgmma. Used by the GEMMs
// (hopper_kernel.cuh) and by attention (attention_hopper.cuh).
//
// A tile in shared memory starts on a multiple of 1024 bytes and has rows of 128 bytes (64 bf16) in TMA's
// SWIZZLE_128B: 16-byte chunk c of row r lies at chunk c ^ (r & 7). SwiGLU stores tiles with rows of 64 bytes
// in SWIZZLE_64B: chunk c of row r lies at c ^ (r / 2 & 3).
#pragma once

#include <cudaTypedefs.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_common.cuh"

// Only sm_90a code has these instructions; HOPPER_CODE says whether this compilation is for it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE 1
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#error "build for sm_90a rather than sm_90: these kernels use instructions that only sm_90a has"
#endif

// --- host: the device and TMA descriptors ------------------------------------------------------------------

// True if the current device is a Hopper for which `kernel` was compiled (sm_90a), and LCE_HOPPER is not 0.
static inline bool hopper_has_code(const void *kernel) {
  const char *wanted = getenv("LCE_HOPPER");
  if (wanted && strcmp(wanted, "0") == 0) return false;
  int device = 0, major = 0, minor = 0;
  cudaFuncAttributes attributes;
  cuda_check(cudaGetDevice(&device), "querying the device");
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "querying its compute capability");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "querying its compute capability");
  if (major != 9 || minor != 0) return false;
  cuda_check(cudaFuncGetAttributes(&attributes, kernel), "querying a kernel's attributes");
  return attributes.binaryVersion == 90;
}

// The driver's cuTensorMapEncodeTiled, or NULL.
static inline PFN_cuTensorMapEncodeTiled_v12000 tma_encoder() {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

// --- clusters ----------------------------------------------------------------------------------------------

static DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// True in one lane of a converged warp.
static DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n\t.reg .pred elected;\n\telect.sync _|elected, 0xffffffff;\n\t"
               "selp.u32 %0, 1, 0, elected;\n\t}"
               : "=r"(elected));
  return elected;
}

static DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

// A value that all lanes share, known as such to the compiler: it can then live in a uniform register.
template <class T> static DEVICE T uniform(T x) {
  return __shfl_sync(~0u, x, 0);
}

// --- named barriers: 1 to 15, for THREADS threads of the block in whole warps ------------------------------

template <int THREADS> static DEVICE void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS> static DEVICE void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// --- relaxed accesses to global memory that all CTAs share -------------------------------------------------

static DEVICE void red_add_relaxed(unsigned long long *to, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

static DEVICE unsigned long long load_relaxed(const unsigned long long *at) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}

// --- mbarriers: a phase ends when `count` threads have arrived and all expected bytes are there ------------

static DEVICE void mbarrier_init(uint64_t *barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

// Makes initialised barriers visible to TMA and to the other CTAs of the cluster.
static DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static DEVICE void mbarrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

static DEVICE void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives at the barrier at the same address in CTA `rank` of the cluster.
static DEVICE void mbarrier_arrive_remote(uint64_t *barrier, uint32_t rank) {
  asm volatile("{\n\t.reg .b32 remote;\n\t"
               "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(shared_address(barrier)),
               "r"(rank)
               : "memory");
}

// Writes a word and counts 4 bytes at a barrier, at the same addresses in CTA `rank` of the cluster.
static DEVICE void store_async_remote(int *to, int x, uint64_t *barrier, uint32_t rank) {
  asm volatile("{\n\t.reg .b32 there, counts;\n\t"
               "mapa.shared::cluster.u32 there, %0, %3;\n\t"
               "mapa.shared::cluster.u32 counts, %2, %3;\n\t"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [counts];\n\t}" ::"r"(
                   shared_address(to)),
               "r"(x), "r"(shared_address(barrier)), "r"(rank)
               : "memory");
}

// Returns once the phase of this parity has ended.
static DEVICE void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile("{\n\t.reg .pred done;\n"
               "again:\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
               "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
}

// --- TMA: tiles of a tensor, at its innermost coordinate first. Entries outside of it read as 0
// and are not written; the bytes that arrive count at the barrier.

static DEVICE void tma_load_2d(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
               : "memory");
}

// Loads into every CTA of the cluster whose bit `ctas` has, at the same address and barrier in each.
static DEVICE void tma_load_2d_multicast(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y,
                                         uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}

static DEVICE void tma_load_3d(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

static DEVICE void tma_load_4d(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z,
                               int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
               "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Loads into every CTA of the cluster whose bit `ctas` has, at the same address and barrier in each.
static DEVICE void tma_load_4d_multicast(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y,
                                         int z, int w, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "h"(ctas)
      : "memory");
}

// Loads a contiguous piece of global memory.
static DEVICE void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Loads a tile into L2.
static DEVICE void tma_prefetch_2d(const CUtensorMap *map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y)
               : "memory");
}

static DEVICE void tma_store_2d(const CUtensorMap *map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y)
               : "memory");
}

static DEVICE void tma_store_3d(const CUtensorMap *map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}

static DEVICE void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's committed stores still read shared memory.
template <int N> static DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits at the CTA's end: TMA may still read its shared memory. PTX's memory model demands it; no test does.
static DEVICE void tma_store_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders ordinary accesses to shared memory and TMA's.
static DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- wgmma -------------------------------------------------------------------------------------------------

template <int N> static DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

static DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N committed groups are unfinished.
template <int N> static DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The same for all groups, after x (not negative) is computed: ptxas moves a wait above arithmetic that
// should run under the MMAs, but not above a store; this store is never executed.
static DEVICE void wgmma_wait_after(float x) {
  asm volatile("{\n\t.reg .pred negative;\n\t"
               "setp.lt.f32 negative, %0, 0f00000000;\n\t"
               "@negative st.shared.f32 [%1], %0;\n\t"
               "wgmma.wait_group.sync.aligned 0;\n\t}" ::"f"(x),
               "r"(0)
               : "memory");
}

// Descriptors of an operand in shared memory. K-major: a tile's rows run along k, and the 16 columns from
// `address` on are multiplied. MN-major: a tile's rows run along m or n, 64 entries for one k, and its 16
// rows from `address` on are multiplied; the next 64 entries along m or n lie `next_tile` bytes further. The
// lower half holds both, in units of 16 bytes; the upper half is constant: 8 rows are 1024 bytes. An address
// has its CTA's rank in the cluster from bit 24 on, and a descriptor's has 18 bits.
#define DESCRIPTOR_HIGH "0x40000040"

static DEVICE uint32_t descriptor_k_major(uint32_t address) {
  return (address & 0x3FFFF) >> 4 | 1 << 16;
}
static DEVICE uint32_t descriptor_mn_major(uint32_t address, uint32_t next_tile) {
  return (address & 0x3FFFF) >> 4 | next_tile >> 4 << 16;
}

// A whole descriptor (MN-major with the next tile 8 KiB further), and the same `bytes` further on: nothing
// carries into the upper half. The GEMMs' main loop takes 10% fewer instructions with whole descriptors,
// attention's kernels with lower halves.
static DEVICE uint64_t descriptor(uint32_t address, bool k_major) {
  uint64_t leading = k_major ? 1 : 8192 / 16, group = 1024 / 16, swizzle_128 = 1;
  return (address & 0x3FFFF) >> 4 | leading << 16 | group << 32 | swizzle_128 << 62;
}
static DEVICE uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & ~0xffffffffull) | ((uint32_t)descriptor + (bytes >> 4));
}

#define ACC_16(i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),                \
      "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]),      \
      "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define ACC_64 ACC_16(0), ACC_16(16)
#define ACC_80                                                                                               \
  ACC_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]),         \
      "+f"(d[39])
#define ACC_128 ACC_64, ACC_16(32), ACC_16(48)
#define ACC_192 ACC_128, ACC_16(64), ACC_16(80)
#define REGS_64                                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                   \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_80 REGS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGS_128                                                                                             \
  REGS_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_192                                                                                             \
  REGS_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "              \
           "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_OF(TYPES, COLUMNS, SETUP, A, B, KEEP, MAJOR, ...)                                              \
  asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " KEEP ", 0;\n\t" SETUP                           \
               "wgmma.mma_async.sync.aligned.m64n" #COLUMNS TYPES " {" REGS_##COLUMNS                        \
               "}, " A ", " B ", keep, 1, 1" MAJOR ";\n\t}"                                                  \
               : ACC_##COLUMNS                                                                               \
               : __VA_ARGS__, "r"((int)keep), "n"(B_MN_MAJOR))
#define WGMMA(COLUMNS, SETUP, A, B, KEEP, MAJOR, ...)                                                        \
  WGMMA_OF("k16.f32.bf16.bf16", COLUMNS, SETUP, A, B, KEEP, ", " MAJOR, __VA_ARGS__)
#define WIDEN(WHAT, LOW) ".reg .b64 " WHAT ";\n\tmov.b64 " WHAT ", {" LOW ", " DESCRIPTOR_HIGH "};\n\t"

// d[64, COLUMNS] = (keep ? d : 0) + a[64, 16] b[16, COLUMNS], bf16 operands, fp32 accumulators; a and b
// K-major or MN-major, in shared memory. Lane l of warp w holds rows 16 w + l / 4 (d[4j], d[4j+1]) and 8
// below that (d[4j+2], d[4j+3]), columns 8 j + 2 (l % 4) and the next.
template <int COLUMNS, bool A_MN_MAJOR, bool B_MN_MAJOR>
static DEVICE void wgmma(float (&d)[96], uint64_t a, uint64_t b, bool keep) {
  static_assert(COLUMNS == 64 || COLUMNS == 128 || COLUMNS == 192, "a multiple of 64 that fits in d");
  if constexpr (COLUMNS == 64)
    WGMMA(64, "", "%32", "%33", "%35", "%34, %36", "l"(a), "l"(b), "n"(A_MN_MAJOR));
  else if constexpr (COLUMNS == 128)
    WGMMA(128, "", "%64", "%65", "%67", "%66, %68", "l"(a), "l"(b), "n"(A_MN_MAJOR));
  else
    WGMMA(192, "", "%96", "%97", "%99", "%98, %100", "l"(a), "l"(b), "n"(A_MN_MAJOR));
}

// The same by the lower halves of K-major descriptors.
template <int COLUMNS> static DEVICE void wgmma(float (&d)[COLUMNS / 2], uint32_t a, uint32_t b, bool keep) {
  static_assert(COLUMNS == 64 || COLUMNS == 80 || COLUMNS == 128, "columns of a tile of attention's scores");
  constexpr bool B_MN_MAJOR = false;
  if constexpr (COLUMNS == 64)
    WGMMA(64, WIDEN("a", "%32") WIDEN("b", "%33"), "a", "b", "%34", "0, %35", "r"(a), "r"(b));
  else if constexpr (COLUMNS == 80)
    WGMMA(80, WIDEN("a", "%40") WIDEN("b", "%41"), "a", "b", "%42", "0, %43", "r"(a), "r"(b));
  else
    WGMMA(128, WIDEN("a", "%64") WIDEN("b", "%65"), "a", "b", "%66", "0, %67", "r"(a), "r"(b));
}

// d[64, 192] += a[64, 32] b[32, 192], of K-major codes (e4m3).
static DEVICE void wgmma_codes(float (&d)[96], uint64_t a, uint64_t b) {
  constexpr bool keep = true;
  constexpr bool B_MN_MAJOR = false; // nor has the instruction a word for it
  WGMMA_OF("k32.f32.e4m3.e4m3", 192, "", "%96", "%97", "%98", "", "l"(a), "l"(b));
}

// With a in registers: two accumulators of 8 columns, rounded to bf16, are an a of 16 columns. b MN-major.
template <int COLUMNS>
static DEVICE void wgmma(float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint32_t b, bool keep) {
  static_assert(COLUMNS == 64 || COLUMNS == 128, "as many columns as a head");
  constexpr bool B_MN_MAJOR = true;
  if constexpr (COLUMNS == 64)
    WGMMA(64, WIDEN("b", "%36"), "{%32, %33, %34, %35}", "b", "%37", "%38", "r"(a[0]), "r"(a[1]), "r"(a[2]),
          "r"(a[3]), "r"(b));
  else
    WGMMA(128, WIDEN("b", "%68"), "{%64, %65, %66, %67}", "b", "%69", "%70", "r"(a[0]), "r"(a[1]), "r"(a[2]),
          "r"(a[3]), "r"(b));
}
#undef ACC_16
#undef ACC_64
#undef ACC_80
#undef ACC_128
#undef ACC_192
#undef REGS_64
#undef REGS_80
#undef REGS_128
#undef REGS_192
#undef WGMMA
#undef WGMMA_OF
#undef WIDEN
#undef DESCRIPTOR_HIGH

// wgmma writes its accumulators later: this keeps the compiler from touching them early.
template <int N> static DEVICE void wgmma_fence_operand(float (&d)[N]) {
  EACH (i, N) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> static DEVICE void wgmma_fence_operand(uint32_t (&a)[N][4]) {
  EACH (i, N) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// Stores four 8x8 blocks of bf16 from a warp's registers, laid out as wgmma leaves its accumulators, in rows
// of shared memory: lane l gives the address of row l % 8 of block l / 8.
static DEVICE void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Loads the same four blocks back into registers.
static DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
