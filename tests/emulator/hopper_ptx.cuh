// kernels/cuda/hopper_ptx.cuh for the emulator: the same functions, which do what that file says.
#pragma once

#include <cudaTypedefs.h>

#include "kernels/cuda/cuda_common.cuh"

static inline bool hopper_has_code(const void *) {
  const char *wanted = getenv("LCE_HOPPER");
  return !wanted || strcmp(wanted, "0") != 0;
}
static inline PFN_cuTensorMapEncodeTiled_v12000 tma_encoder() {
  return (PFN_cuTensorMapEncodeTiled_v12000)emulator::tensor_map;
}

using emulator::bulk_load, emulator::cluster_rank, emulator::cluster_sync, emulator::mbarrier_init,
    emulator::mbarrier_wait, emulator::tma_store_commit, emulator::wgmma_commit;
#define tma_load_2d  emulator::tma_load_at
#define tma_load_3d  emulator::tma_load_at
#define tma_load_4d  emulator::tma_load_at
#define tma_store_2d emulator::tma_store_at
#define tma_store_3d emulator::tma_store_at

// A function, or a template of one number, that is this of the emulator's.
#define HOPPER(type, name, parameters, ...)                                                                  \
  static inline type name parameters {                                                                       \
    return __VA_ARGS__;                                                                                      \
  }
#define HOPPER_OF(type, name, parameters, ...) template <int N> HOPPER(type, name, parameters, __VA_ARGS__)

HOPPER(bool, elect_one, (), emulator::exchange(emulator::thread->lane, 0) == (uint64_t)emulator::thread->lane)
HOPPER(auto, uniform, (auto x), emulator::shuffle(x, 0))
HOPPER_OF(void, named_barrier_sync, (int barrier), emulator::bar_sync(barrier, N))
HOPPER_OF(void, named_barrier_arrive, (int barrier), emulator::bar_arrive(barrier, N))

HOPPER(void, red_add_relaxed, (unsigned long long *to, unsigned long long x), (void)(*to += x))
HOPPER(unsigned long long, load_relaxed, (const unsigned long long *at), emulator::let_others_run(), *at)

HOPPER(void, mbarrier_init_fence, ())
HOPPER(void, mbarrier_arrive, (uint64_t * barrier), emulator::mbarrier_arrive(barrier, cluster_rank(), 0))
HOPPER(void, mbarrier_arrive_expect_tx, (uint64_t * barrier, uint32_t bytes),
       emulator::mbarrier_arrive(barrier, cluster_rank(), bytes))
HOPPER(void, mbarrier_arrive_remote, (uint64_t * barrier, uint32_t rank),
       emulator::mbarrier_arrive(barrier, rank, 0))

HOPPER(void, tma_load_2d_multicast,
       (uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y, uint16_t ctas),
       emulator::tma_load(to, map, barrier, {x, y}, ctas))
HOPPER(void, tma_load_4d_multicast,
       (uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z, int w, uint16_t ctas),
       emulator::tma_load(to, map, barrier, {x, y, z, w}, ctas))
HOPPER(void, store_async_remote, (int *to, int x, uint64_t *barrier, uint32_t rank),
       emulator::store_async(to, x, barrier, rank))
HOPPER(void, tma_prefetch_2d, (const CUtensorMap *, int, int))
HOPPER_OF(void, tma_store_wait_read, (), emulator::tma_store_wait(N))
HOPPER(void, tma_store_wait_all, (), emulator::tma_store_wait(0))
HOPPER(void, fence_proxy_async, ())

HOPPER_OF(void, setmaxnreg_dec, ())
HOPPER_OF(void, setmaxnreg_inc, ())
HOPPER(void, wgmma_fence, ())
HOPPER_OF(void, wgmma_wait, (), emulator::wgmma_wait(N))
HOPPER(void, wgmma_wait_after, (float), emulator::wgmma_wait(0))

HOPPER(uint32_t, descriptor_k_major, (uint32_t address), (address & 0x3FFFF) >> 4 | 1 << 16)
HOPPER(uint32_t, descriptor_mn_major, (uint32_t address, uint32_t next_tile),
       (address & 0x3FFFF) >> 4 | next_tile >> 4 << 16)
HOPPER(uint64_t, descriptor, (uint32_t address, bool k_major),
       k_major ? descriptor_k_major(address) : descriptor_mn_major(address, 8192))
HOPPER(uint64_t, descriptor_advance, (uint64_t descriptor, uint32_t bytes), descriptor + (bytes >> 4))

HOPPER_OF(void, wgmma_fence_operand, (float (&)[N]))
HOPPER_OF(void, wgmma_fence_operand, (uint32_t(&)[N][4]))
HOPPER(void, stmatrix_x4, (uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d),
       emulator::stmatrix(row, {a, b, c, d}))
HOPPER(void, ldmatrix_x4, (uint32_t(&r)[4], uint32_t row),
       emulator::ldmatrix({&r[0], &r[1], &r[2], &r[3]}, row, false))

template <int COLUMNS, bool A_MN_MAJOR, bool B_MN_MAJOR>
static inline void wgmma(float (&d)[96], uint64_t a, uint64_t b, bool keep) {
  emulator::wgmma(d, COLUMNS, {(uint32_t)a, A_MN_MAJOR}, {(uint32_t)b, B_MN_MAJOR}, keep);
}
static inline void wgmma_codes(float (&d)[96], uint64_t a, uint64_t b) {
  emulator::wgmma(d, 192, {(uint32_t)a, false}, {(uint32_t)b, false}, true, true);
}
template <int COLUMNS> static inline void wgmma(float (&d)[COLUMNS / 2], uint32_t a, uint32_t b, bool keep) {
  emulator::wgmma(d, COLUMNS, {a, false}, {b, false}, keep);
}
template <int COLUMNS>
static inline void wgmma(float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint32_t b, bool keep) {
  emulator::wgmma(d, COLUMNS, {0, false, a}, {b, true}, keep);
}
