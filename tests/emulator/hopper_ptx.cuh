// kernels/cuda/hopper_ptx.cuh for the emulator: the same functions, which do what that file says.
#ifndef LCE_KERNELS_CUDA_HOPPER_PTX_CUH
#define LCE_KERNELS_CUDA_HOPPER_PTX_CUH

#include <cudaTypedefs.h>

#include "kernels/cuda/cuda_common.cuh"

static inline bool hopper_has_code(const void *) {
  const char *wanted = getenv("LCE_HOPPER");
  return !wanted || strcmp(wanted, "0") != 0;
}
static inline PFN_cuTensorMapEncodeTiled_v12000 tma_encoder() {
  return (PFN_cuTensorMapEncodeTiled_v12000)emulator::tensor_map;
}

static inline uint32_t cluster_rank() {
  return emulator::cluster_rank();
}
static inline bool elect_one() {
  return emulator::exchange(emulator::thread->lane, 0) == (uint64_t)emulator::thread->lane;
}
static inline void cluster_sync() {
  emulator::cluster_sync();
}
template <class T> static inline T uniform(T x) {
  return emulator::shuffle(x, 0);
}

template <int THREADS> static inline void named_barrier_sync(int barrier) {
  emulator::bar_sync(barrier, THREADS);
}
template <int THREADS> static inline void named_barrier_arrive(int barrier) {
  emulator::bar_arrive(barrier, THREADS);
}

static inline void red_add_relaxed(unsigned long long *to, unsigned long long x) {
  *to += x;
}
static inline unsigned long long load_relaxed(const unsigned long long *at) {
  emulator::let_others_run();
  return *at;
}

static inline void mbarrier_init(uint64_t *barrier, uint32_t count) {
  emulator::mbarrier_init(barrier, count);
}
static inline void mbarrier_init_fence() {}
static inline void mbarrier_arrive(uint64_t *barrier) {
  emulator::mbarrier_arrive(barrier, cluster_rank(), 0);
}
static inline void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
  emulator::mbarrier_arrive(barrier, cluster_rank(), bytes);
}
static inline void mbarrier_arrive_remote(uint64_t *barrier, uint32_t rank) {
  emulator::mbarrier_arrive(barrier, rank, 0);
}
static inline void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
  emulator::mbarrier_wait(barrier, parity);
}

static inline void tma_load_2d(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y) {
  emulator::tma_load(to, map, barrier, {x, y});
}
static inline void tma_load_2d_multicast(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y,
                                         uint16_t ctas) {
  emulator::tma_load(to, map, barrier, {x, y}, ctas);
}
static inline void tma_load_3d(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z) {
  emulator::tma_load(to, map, barrier, {x, y, z});
}
static inline void tma_load_4d(uint32_t to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z,
                               int w) {
  emulator::tma_load(to, map, barrier, {x, y, z, w});
}
static inline void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  emulator::bulk_load(to, from, bytes, barrier);
}
static inline void tma_prefetch_2d(const CUtensorMap *, int, int) {}
static inline void tma_store_2d(const CUtensorMap *map, uint32_t from, int x, int y) {
  emulator::tma_store(map, from, {x, y});
}
static inline void tma_store_3d(const CUtensorMap *map, uint32_t from, int x, int y, int z) {
  emulator::tma_store(map, from, {x, y, z});
}
static inline void tma_store_commit() {
  emulator::tma_store_commit();
}
template <int N> static inline void tma_store_wait_read() {
  emulator::tma_store_wait(N);
}
static inline void tma_store_wait_all() {
  emulator::tma_store_wait(0);
}
static inline void fence_proxy_async() {}

template <int N> static inline void setmaxnreg_dec() {}
template <int N> static inline void setmaxnreg_inc() {}
static inline void wgmma_fence() {}
static inline void wgmma_commit() {
  emulator::wgmma_commit();
}
template <int N> static inline void wgmma_wait() {
  emulator::wgmma_wait(N);
}
static inline void wgmma_wait_after(float) {
  emulator::wgmma_wait(0);
}

static inline uint32_t descriptor_k_major(uint32_t address) {
  return address >> 4 | 1 << 16;
}
static inline uint32_t descriptor_mn_major(uint32_t address, uint32_t next_tile) {
  return address >> 4 | next_tile >> 4 << 16;
}
static inline uint64_t descriptor(uint32_t address, bool k_major) {
  return k_major ? descriptor_k_major(address) : descriptor_mn_major(address, 8192);
}
static inline uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

template <int COLUMNS, bool A_MN_MAJOR, bool B_MN_MAJOR>
static inline void wgmma(float (&d)[96], uint64_t a, uint64_t b, bool keep) {
  emulator::wgmma(d, COLUMNS, {(uint32_t)a, A_MN_MAJOR}, {(uint32_t)b, B_MN_MAJOR}, keep);
}
template <int COLUMNS> static inline void wgmma(float (&d)[COLUMNS / 2], uint32_t a, uint32_t b, bool keep) {
  emulator::wgmma(d, COLUMNS, {a, false}, {b, false}, keep);
}
template <int COLUMNS>
static inline void wgmma(float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint32_t b, bool keep) {
  emulator::wgmma(d, COLUMNS, {0, false, a}, {b, true}, keep);
}
template <int N> static inline void wgmma_fence_operand(float (&)[N]) {}
template <int N> static inline void wgmma_fence_operand(uint32_t (&)[N][4]) {}

static inline void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulator::stmatrix(row, {a, b, c, d});
}
static inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  emulator::ldmatrix({&r[0], &r[1], &r[2], &r[3]}, row, false);
}

#endif
