// Runs the kernels of kernels/cuda/ on the CPU, so that tests of the CUDA backend need no GPU (`make
// VARIANT=emulated test`). tests/emulator/nvcc includes this before each .cu file: what CUDA C has beyond
// C++, and a function for each instruction. For small shapes, on x86-64: threads are fibers on one core.
//
// Blocks run one after the other, those of a cluster together, and warps in a random order that leaves some
// far behind. What the hardware does asynchronously happens at a random time between the instruction that
// starts it and the one that waits for it; until then its destination holds NaN: wgmma's accumulators, and
// what TMA and cp.async load. So a missing wait, a stage that is released or loaded too early and a barrier
// that is one arrival short give wrong results, an error or a deadlock, which ends the program with what each
// thread waits for. EMULATOR_SEED=N chooses another order; with EMULATOR_LAG=1 lanes of a warp lag too.
//
// Not emulated: fences, registers, memory order between blocks, streams (a call is done when it returns), and
// the order in which a GPU adds up.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>

namespace emulator {

// --- threads -----------------------------------------------------------------------------------------------

struct Block;
struct Warp;

struct Thread {
  void *stack_pointer;
  bool done;
  uint3 index;
  Block *block;
  Warp *warp;
  int lane, stores; // committed groups of TMA stores
  const char *waits_for;
};
extern Thread *thread; // that runs
extern uint3 grid, threads_of_block;
uint3 block_index();
void let_others_run();

// Returns when all threads have run; fails in a sentence if they never would.
struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  int cluster = 1; // blocks that run at the same time
  void run(const std::function<void()> &thread_body) const;
};

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Params...),
                               const Args &...args) {
  Launch launch = {config->gridDim, config->blockDim, config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; i++) {
    const cudaLaunchAttribute &attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) launch.cluster = (int)attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeCooperative) launch.cluster = (int)config->gridDim.x;
  }
  launch.run([&] { kernel(args...); });
  return cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel) {
  return cudaSuccess;
}
enum { MULTIPROCESSORS = 4 }; // few, so that small problems take several rounds
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int *count, Kernel, const cudaLaunchConfig_t *) {
  *count = MULTIPROCESSORS / 2;
  return cudaSuccess;
}

// --- a block's shared memory and barriers ------------------------------------------------------------------

void *static_shared(size_t bytes, int id);
void *dynamic_shared();
uint32_t shared_address(const void *p);
char *shared_pointer(uint32_t address);
void block_sync();
int block_or(int x);
void bar_sync(int id, int threads);
void bar_arrive(int id, int threads);
uint32_t cluster_rank();
void cluster_sync();

// --- what the lanes of a warp do together ------------------------------------------------------------------

// Returns the x that lane `lane` passes.
uint64_t exchange(uint64_t x, int lane);
void warp_sync();
uint32_t ballot(bool x);
uint32_t warp_max(uint32_t x);

template <typename T> T shuffle(T x, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = exchange(bits, lane);
  memcpy(&x, &bits, sizeof x);
  return x;
}

// --- instructions ------------------------------------------------------------------------------------------

void ldmatrix(std::initializer_list<uint32_t *> out, uint32_t row, bool transposed);
void stmatrix(uint32_t row, std::initializer_list<uint32_t> values);
void mma(std::initializer_list<float *> c, std::initializer_list<uint32_t> a_b);
void copy_16(uint32_t to, const void *from, int bytes);
void copies_commit();
void copies_wait(int groups);
float exp2_flushed(float x);

template <typename... T> void load_shared(uint32_t address, T &...out) {
  const char *from = shared_pointer(address);
  ((memcpy(&out, from, sizeof out), from += sizeof out), ...);
}
template <typename T> void store_shared(uint32_t address, T x) {
  memcpy(shared_pointer(address), &x, sizeof x);
}

// --- Hopper's (hopper_ptx.cuh has the descriptions) --------------------------------------------------------

void mbarrier_init(uint64_t *barrier, uint32_t count);
void mbarrier_arrive(uint64_t *barrier, uint32_t rank, uint32_t bytes);
void mbarrier_wait(uint64_t *barrier, uint32_t parity);
CUresult tensor_map(CUtensorMap *, CUtensorMapDataType, cuuint32_t rank, void *data, const cuuint64_t *dims,
                    const cuuint64_t *strides, const cuuint32_t *tile, const cuuint32_t *steps,
                    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                    CUtensorMapFloatOOBfill);
void tma_load(uint32_t to, const CUtensorMap *, uint64_t *barrier, std::initializer_list<int> at,
              uint32_t ctas = 0);
template <typename... At> void tma_load_at(uint32_t to, const CUtensorMap *map, uint64_t *barrier, At... at) {
  tma_load(to, map, barrier, {at...});
}
void tma_store(const CUtensorMap *, uint32_t from, std::initializer_list<int> at);
template <typename... At> void tma_store_at(const CUtensorMap *map, uint32_t from, At... at) {
  tma_store(map, from, {at...});
}
void tma_store_commit();
void tma_store_wait(int groups);
void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier);
void store_async(int *to, int x, uint64_t *barrier, uint32_t rank);
// An operand: the lower half of a descriptor, or four registers.
struct MmaOperand {
  uint32_t descriptor;
  bool mn_major;
  const uint32_t *registers = nullptr;
};
void wgmma(float *d, int columns, MmaOperand a, MmaOperand b, bool keep, bool e4m3 = false);
void wgmma_commit();
void wgmma_wait(int groups);

} // namespace emulator

// --- CUDA C ------------------------------------------------------------------------------------------------

#define HOPPER_CODE 1
#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)

using std::isfinite, std::isinf, std::isnan, std::max, std::min;
static inline int min(int x, int y) { // also of an enum and an int
  return std::min(x, y);
}
static uint3 &gridDim = emulator::grid, &blockDim = emulator::threads_of_block;
#define blockIdx  (emulator::block_index())
#define threadIdx (emulator::thread->index)

#define EMULATOR_INTRINSIC(type, name, parameters, ...)                                                      \
  static inline type name parameters {                                                                       \
    return __VA_ARGS__;                                                                                      \
  }
EMULATOR_INTRINSIC(void, __syncthreads, (), emulator::block_sync())
EMULATOR_INTRINSIC(int, __syncthreads_or, (int x), emulator::block_or(x))
EMULATOR_INTRINSIC(void, __syncwarp, (), emulator::warp_sync())
EMULATOR_INTRINSIC(unsigned, __ballot_sync, (unsigned, int x), emulator::ballot(x))
EMULATOR_INTRINSIC(int, __any_sync, (unsigned, int x), emulator::ballot(x) != 0)
EMULATOR_INTRINSIC(unsigned, __reduce_max_sync, (unsigned, unsigned x), emulator::warp_max(x))
EMULATOR_INTRINSIC(auto, __shfl_sync, (unsigned, auto x, int lane), emulator::shuffle(x, lane % 32))
EMULATOR_INTRINSIC(auto, __shfl_xor_sync, (unsigned, auto x, int mask),
                   emulator::shuffle(x, emulator::thread->lane ^ mask))
EMULATOR_INTRINSIC(auto, __shfl_up_sync, (unsigned, auto x, unsigned by),
                   emulator::shuffle(x, std::max(0, emulator::thread->lane - (int)by)))
EMULATOR_INTRINSIC(float, rsqrtf, (float x), 1 / sqrtf(x))
EMULATOR_INTRINSIC(float, __fdividef, (float x, float y), x / y)
EMULATOR_INTRINSIC(int, __popc, (unsigned x), __builtin_popcount(x))
EMULATOR_INTRINSIC(size_t, __cvta_generic_to_shared, (const void *p), emulator::shared_address(p))

#define EMULATOR_ATOMIC(name, result)                                                                        \
  template <typename T, typename U> T name(T *at, U x) {                                                     \
    T old = *at;                                                                                             \
    *at = result;                                                                                            \
    return old;                                                                                              \
  }
EMULATOR_ATOMIC(atomicAdd, old + (T)x)
EMULATOR_ATOMIC(atomicMax, std::max(old, (T)x))
EMULATOR_ATOMIC(atomicMin, std::min(old, (T)x))

template <typename T> static inline T emulator_bits(auto x) {
  static_assert(sizeof(T) == sizeof x);
  T out;
  memcpy(&out, &x, sizeof out);
  return out;
}
#define __float_as_uint(x) emulator_bits<unsigned>((float)(x))
#define __float_as_int(x)  emulator_bits<int>((float)(x))
#define __uint_as_float(x) emulator_bits<float>((unsigned)(x))
#define __expf             expf
#define __logf             logf
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = (uint64_t)y << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}
