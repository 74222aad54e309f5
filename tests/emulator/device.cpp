// The emulator's device: threads, barriers, TMA and the tensor cores (emulator.h).
#include "tests/emulator/emulator.h"

#undef blockIdx
#undef threadIdx

#include <sys/mman.h>

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

extern "C" {
#include "kernels/base/fail.h"
}

namespace emulator {

// --- what there is -----------------------------------------------------------------------------------------

// The MMAs that a warp has begun and not finished, oldest first, and their accumulators' values until then.
struct Mma {
  float *d[32];
  int columns, group;
  MmaOperand a, b;
  const uint32_t *registers[32]; // of a, by lane
  bool keep, e4m3;
};
struct Accumulators {
  std::vector<float> values; // [32, columns / 2]
  int pending;
};

struct Warp {
  Block *block;
  int index, live = 0;
  Thread *lanes[32] = {}; // as many as there are
  double pace = 1;        // the probability that it runs when it is drawn
  // Lanes that act together: the number that have come, and the value that each brings, until all come again.
  int arrived = 0;
  const char *what = "";
  uint64_t generation = 0, brought[32] = {}, values[32];
  Warp **group; // the four warps of its warpgroup
  std::deque<Mma> mmas;
  std::map<float *, Accumulators> accumulators; // by lane 0's
  Mma next;
  int groups = 0; // of MMAs, committed
};

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Mbarrier {
  int count = 0, pending = 0;
  int64_t bytes = 0; // expected and not there
  uint32_t phase = 0;
};

struct Block {
  uint3 index;
  int rank, live; // in the cluster; threads
  unsigned char *shared;
  size_t bytes, static_bytes = 0;
  std::map<int, void *> statics;
  std::vector<Block *> *cluster;
  Barrier all, named[16], *whole_cluster;
  int any = 0;
  std::unordered_map<const void *, Mbarrier> mbarriers;
};

// A TMA transfer or a cp.async that has begun and not ended.
struct Transfer {
  Thread *of;
  enum { LOAD, STORE, COPY } kind;
  int group;
  std::function<void()> run;
};

// As on a GPU, an address in shared memory has the block's rank in its cluster from bit RANK_SHIFT on.
enum {
  STATIC_SHARED = 34 << 10, // beside 217 KiB of dynamic memory, which then ends within 18 bits of address
  STACK = 64 << 10,
  FIRST_ADDRESS = 1024,
  SHARED_MAX = 227 << 10,
  RANK_SHIFT = 24
};

Thread *thread;
uint3 grid, threads_of_block;
static void *scheduler;
static std::mt19937 random;
static const std::function<void()> *kernel;
static std::vector<std::unique_ptr<Warp>> warps;
static std::list<Transfer> transfers;
static std::unordered_map<Thread *, int> copies; // committed groups of cp.async
static long progress;                            // counts whatever may let another thread go on

#define EMULATOR_FAILS(...) fail("emulator: " __VA_ARGS__)

static double chance() {
  return std::uniform_real_distribution<>()(random);
}

uint3 block_index() {
  return thread->block->index;
}

// --- fibers ------------------------------------------------------------------------------------------------

#ifndef __x86_64__
#error "the emulator switches between threads on x86-64 alone: emulator_switch has its instructions"
#endif

// Saves the registers that a function keeps on the stack, and goes on where the other stack was left.
extern "C" void emulator_switch(void **from, void *to);
asm(R"(
  .text
  .globl emulator_switch
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

static void yield(const char *waits_for = "its turn") {
  thread->waits_for = waits_for;
  emulator_switch(&thread->stack_pointer, scheduler);
}

void let_others_run() {
  progress++;
  yield();
}

static void check_barrier(Barrier &barrier, int count) {
  progress++;
  if (barrier.arrived > count) EMULATOR_FAILS("more threads than expected at a barrier");
  if (barrier.arrived == count && count > 0) barrier.arrived = 0, barrier.generation++;
}

static void run_thread() {
  (*kernel)();
  Block &block = *thread->block;
  thread->done = true, thread->warp->live--, block.live--;
  check_barrier(block.all, block.live);
  for (;;) yield();
}

// --- barriers ----------------------------------------------------------------------------------------------

static void pass(Barrier &barrier, int count, bool wait = true) {
  uint64_t generation = barrier.generation;
  barrier.arrived++;
  check_barrier(barrier, count);
  while (wait && barrier.generation == generation) yield("a barrier");
}

void block_sync() {
  pass(thread->block->all, thread->block->live);
}

int block_or(int x) {
  Block &block = *thread->block;
  block_sync();
  block.any = 0;
  block_sync();
  block.any |= x;
  block_sync();
  return block.any;
}

void bar_sync(int id, int threads) {
  pass(thread->block->named[id], threads);
}
void bar_arrive(int id, int threads) {
  pass(thread->block->named[id], threads, false);
}

uint32_t cluster_rank() {
  return (uint32_t)thread->block->rank;
}

void cluster_sync() {
  int threads = 0;
  for (Block *block : *thread->block->cluster) threads += block->live;
  pass(*thread->block->whole_cluster, threads);
}

// Waits for all lanes, the last of which calls `last`.
template <typename F> static void together(const char *what, uint64_t x, F last) {
  Warp &warp = *thread->warp;
  if (warp.arrived > 0 && strcmp(warp.what, what) != 0)
    EMULATOR_FAILS("thread %u of block %u is at %s, and others of its warp are at %s", thread->index.x,
                   thread->block->index.x, what, warp.what);
  warp.what = what;
  warp.brought[thread->lane] = x;
  uint64_t generation = warp.generation;
  if (++warp.arrived < warp.live) {
    while (warp.generation == generation) yield(what);
    return;
  }
  memcpy(warp.values, warp.brought, sizeof warp.values);
  last(warp);
  warp.arrived = 0, warp.generation++, progress++;
}

void warp_sync() {
  together("__syncwarp", 0, [](Warp &) {});
}

uint64_t exchange(uint64_t x, int lane) {
  together("a shuffle", x, [](Warp &) {});
  return thread->warp->values[lane];
}

// Combines the values of all lanes, in every lane.
template <typename F> static uint32_t combined(uint64_t x, F combine) {
  together("a reduction", x, [](Warp &) {});
  uint32_t all = 0;
  for (int lane = 0; lane < 32; lane++) all = combine(all, (uint32_t)thread->warp->values[lane], lane);
  return all;
}
uint32_t ballot(bool x) {
  return combined(x, [](uint32_t all, uint32_t x, int lane) { return all | x << lane; });
}
uint32_t warp_max(uint32_t x) {
  return combined(x, [](uint32_t all, uint32_t x, int) { return std::max(all, x); });
}

// --- shared memory -----------------------------------------------------------------------------------------

void *static_shared(size_t bytes, int id) {
  Block &block = *thread->block;
  void *&at = block.statics[id];
  if (!at) {
    at = block.shared + block.static_bytes;
    block.static_bytes += (bytes + 15) / 16 * 16;
    if (block.static_bytes > STATIC_SHARED)
      EMULATOR_FAILS("over %d bytes in __shared__ variables", STATIC_SHARED);
  }
  return at;
}

void *dynamic_shared() {
  return thread->block->shared + STATIC_SHARED;
}

uint32_t shared_address(const void *p) {
  const Block &block = *thread->block;
  ptrdiff_t offset = (const unsigned char *)p - block.shared;
  if (offset < 0 || (size_t)offset > block.bytes) EMULATOR_FAILS("an address that is not in shared memory");
  return (uint32_t)offset + FIRST_ADDRESS + ((uint32_t)block.rank << RANK_SHIFT);
}

static char *pointer_in(const Block &block, uint32_t address) {
  address &= (1u << RANK_SHIFT) - 1;
  if (address < FIRST_ADDRESS || address - FIRST_ADDRESS >= block.bytes)
    EMULATOR_FAILS("shared memory is accessed beyond its end");
  return (char *)block.shared + (address - FIRST_ADDRESS);
}

char *shared_pointer(uint32_t address) {
  return pointer_in(*thread->block, address);
}

// --- instructions of all GPUs ------------------------------------------------------------------------------

// The address of row `row` of 8x8 matrix `matrix`, which lane 8 * matrix + row gives.
static char *matrix_row(int matrix, int row) {
  return shared_pointer((uint32_t)thread->warp->values[8 * matrix + row]);
}

void ldmatrix(std::initializer_list<uint32_t *> out, uint32_t row, bool transposed) {
  together("ldmatrix", row, [](Warp &) {});
  const int first = thread->lane / 4, second = thread->lane % 4 * 2;
  for (int matrix = 0; matrix < 4; matrix++) {
    uint16_t pair[2];
    for (int i = 0; i < 2; i++)
      memcpy(&pair[i],
             transposed ? matrix_row(matrix, second + i) + first * 2
                        : matrix_row(matrix, first) + (second + i) * 2,
             2);
    *out.begin()[matrix] = pair[0] | (uint32_t)pair[1] << 16;
  }
  warp_sync();
}

void stmatrix(uint32_t row, std::initializer_list<uint32_t> values) {
  together("stmatrix", row, [](Warp &) {});
  for (int matrix = 0; matrix < 4; matrix++)
    memcpy(matrix_row(matrix, thread->lane / 4) + thread->lane % 4 * 4, &values.begin()[matrix], 4);
  warp_sync();
}

static float widened(uint32_t pair, int half) {
  return emulator_bits<float>(half ? pair & 0xFFFF0000u : pair << 16);
}

void mma(std::initializer_list<float *> c, std::initializer_list<uint32_t> a_b) {
  const int g = thread->lane / 4, q = thread->lane % 4;
  uint32_t r[6][32];
  for (int i = 0; i < 6; i++) {
    together("mma", a_b.begin()[i], [](Warp &) {});
    for (int lane = 0; lane < 32; lane++) r[i][lane] = (uint32_t)thread->warp->values[lane];
  }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      int pair = k % 8 / 2;
      *c.begin()[i] += widened(r[k / 8 * 2 + i / 2][g * 4 + pair], k % 2) *
                       widened(r[4 + k / 8][(2 * q + i % 2) * 4 + pair], k % 2);
    }
}

float exp2_flushed(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}

template <typename F> static void end_transfers(F ends) {
  transfers.remove_if([&](const Transfer &t) { return ends(t) && (t.run(), true); });
}

// Ends the thread's transfers of a kind whose group lies before `end`.
static void finish_transfers(int kind, int end) {
  end_transfers([=](const Transfer &t) { return t.of == thread && t.kind == kind && t.group < end; });
}

void copy_16(uint32_t to, const void *from, int bytes) {
  char *at = shared_pointer(to);
  memset(at, 0xFF, 16);
  transfers.push_back({thread, Transfer::COPY, copies[thread], [=] {
                         memset(at, 0, 16);
                         memcpy(at, from, (size_t)bytes);
                       }});
}
void copies_commit() {
  copies[thread]++;
}
void copies_wait(int groups) {
  finish_transfers(Transfer::COPY, copies[thread] - groups);
}

// --- mbarriers ---------------------------------------------------------------------------------------------

static Mbarrier &mbarrier_in(Block &block, const void *barrier) {
  auto found = block.mbarriers.find(barrier);
  if (found == block.mbarriers.end()) EMULATOR_FAILS("an mbarrier is used before mbarrier_init");
  return found->second;
}

// The address in another block of the cluster that corresponds to `p` in this one.
static const void *same_place(const Block &block, const void *p) {
  return block.shared + ((const unsigned char *)p - thread->block->shared);
}

static void end_phase(Mbarrier &m) {
  if (m.pending == 0 && m.bytes == 0) m.phase ^= 1, m.pending = m.count;
  progress++;
}

void mbarrier_init(uint64_t *barrier, uint32_t count) {
  thread->block->mbarriers[barrier] = {(int)count, (int)count};
}

void mbarrier_arrive(uint64_t *barrier, uint32_t rank, uint32_t bytes) {
  Block &block = *(*thread->block->cluster)[rank];
  Mbarrier &m = mbarrier_in(block, same_place(block, barrier));
  if (m.pending == 0) EMULATOR_FAILS("an mbarrier has more arrivals than it expects");
  m.bytes += bytes, m.pending--;
  end_phase(m);
}

void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
  const Mbarrier &m = mbarrier_in(*thread->block, barrier);
  while (m.phase == parity) yield("an mbarrier");
  progress++;
}

// --- TMA ---------------------------------------------------------------------------------------------------

struct TensorMap {
  char *data;
  int rank, element;
  int64_t dims[5], strides[5]; // elements, bytes
  int tile[5];
  uint32_t swizzle; // of the bits of an address above the lowest 7, how many enter bits 4 and up

  int64_t tile_bytes() const {
    int64_t bytes = element;
    for (int i = 0; i < rank; i++) bytes *= tile[i];
    return bytes;
  }
  uint32_t swizzled(uint32_t address) const { return address ^ (address >> 7 & swizzle) << 4; }
};

CUresult tensor_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                    const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *tile,
                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap m = {};
  m.data = (char *)data, m.rank = (int)rank,
  m.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
              : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                                                      : 2;
  m.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 7 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 3 : 0;
  bool fits = (uintptr_t)data % 16 == 0 && (int)tile[0] * m.element <= 16 * ((int)m.swizzle + 1);
  for (unsigned i = 0; i < rank; i++) {
    m.dims[i] = (int64_t)dims[i], m.tile[i] = (int)tile[i];
    m.strides[i] = i ? (int64_t)strides[i - 1] : m.element;
    fits = fits && tile[i] <= 256 && (i == 0 || m.strides[i] % 16 == 0);
  }
  auto *kept = new TensorMap(m); // a CUtensorMap has 128 bytes; tests are short
  memset(map, 0, sizeof *map);
  memcpy(map, &kept, sizeof kept);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static const TensorMap &map_of(const CUtensorMap *map) {
  const TensorMap *m;
  memcpy(&m, map, sizeof m);
  return *m;
}

// each(where an element lies in the tile, where in the tensor or NULL).
template <typename F> static void for_elements(const TensorMap &m, const std::vector<int> &at, F each) {
  const int64_t bytes = m.tile_bytes();
  for (int64_t offset = 0; offset < bytes; offset += m.element) {
    int64_t rest = offset / m.element;
    char *place = m.data;
    bool inside = true;
    for (int i = 0; i < m.rank; i++) {
      int64_t x = at[(size_t)i] + rest % m.tile[i];
      rest /= m.tile[i];
      inside = inside && x >= 0 && x < m.dims[i];
      place += x * m.strides[i];
    }
    each((uint32_t)offset, inside ? place : nullptr);
  }
}

static void arrive_bytes(Block &block, const void *barrier, int64_t bytes) {
  Mbarrier &m = mbarrier_in(block, barrier);
  m.bytes -= bytes;
  end_phase(m);
}

static void check_tile(const TensorMap &m, uint32_t address, size_t rank) {
  if ((int)rank != m.rank) EMULATOR_FAILS("a TMA instruction for another number of dimensions");
  if (address % 128) EMULATOR_FAILS("a TMA tile that does not start on 128 bytes");
}

void tma_load(uint32_t to, const CUtensorMap *map, uint64_t *barrier, std::initializer_list<int> at,
              uint32_t ctas) {
  const TensorMap &m = map_of(map);
  check_tile(m, to, at.size());
  for (Block *block : *thread->block->cluster) {
    if (ctas ? !(ctas >> block->rank & 1) : block != thread->block) continue;
    const void *there = same_place(*block, barrier);
    memset(pointer_in(*block, to), 0xFF, (size_t)m.tile_bytes());
    transfers.push_back({thread, Transfer::LOAD, 0, [&m, to, block, there, at = std::vector<int>(at)] {
                           for_elements(m, at, [&](uint32_t offset, const char *from) {
                             char *out = pointer_in(*block, m.swizzled(to + offset));
                             if (from)
                               memcpy(out, from, (size_t)m.element);
                             else
                               memset(out, 0, (size_t)m.element);
                           });
                           arrive_bytes(*block, there, m.tile_bytes());
                         }});
  }
}

void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  if ((uintptr_t)from % 16 || bytes % 16) EMULATOR_FAILS("a bulk load that is not aligned to 16 bytes");
  memset(to, 0xFF, bytes);
  transfers.push_back({thread, Transfer::LOAD, 0, [=, block = thread->block] {
                         memcpy(to, from, bytes);
                         arrive_bytes(*block, barrier, bytes);
                       }});
}

void store_async(int *to, int x, uint64_t *barrier, uint32_t rank) {
  Block *block = (*thread->block->cluster)[rank];
  auto *place = (int *)same_place(*block, to);
  const void *there = same_place(*block, barrier);
  transfers.push_back({thread, Transfer::LOAD, 0, [=] {
                         *place = x;
                         arrive_bytes(*block, there, sizeof x);
                       }});
}

void tma_store(const CUtensorMap *map, uint32_t from, std::initializer_list<int> at) {
  const TensorMap &m = map_of(map);
  check_tile(m, from, at.size());
  transfers.push_back(
      {thread, Transfer::STORE, thread->stores, [&m, from, block = thread->block, at = std::vector<int>(at)] {
         for_elements(m, at, [&](uint32_t offset, char *out) {
           if (out) memcpy(out, pointer_in(*block, m.swizzled(from + offset)), (size_t)m.element);
         });
       }});
}
void tma_store_commit() {
  thread->stores++;
}
void tma_store_wait(int groups) {
  finish_transfers(Transfer::STORE, thread->stores - groups);
}

// --- wgmma -------------------------------------------------------------------------------------------------

// Element (i, k) of an operand in shared memory, i along m or n.
static float operand(const Block &block, MmaOperand o, int i, int k, bool e4m3) {
  uint32_t start = (o.descriptor & 0x3FFF) << 4, next_tile = (o.descriptor >> 16 & 0x3FFF) << 4;
  uint32_t address = o.mn_major ? start + (uint32_t)(i / 64 * (int)next_tile + k * 128 + i % 64 * 2)
                                : start + (uint32_t)(i * 128 + k * (e4m3 ? 1 : 2));
  uint16_t bits = 0;
  memcpy(&bits, pointer_in(block, address ^ (address >> 7 & 7) << 4), e4m3 ? 1 : 2);
  if (e4m3) return __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)bits, __NV_E4M3)));
  return widened(bits, 0);
}

// Adds products of codes as Hopper does: to 14 bits of the largest of them and of the sum, without rounding.
static float sum_of_codes(float sum, const float *a, const float (*b)[256], int j) {
  float largest = fabsf(sum);
  for (int k = 0; k < 32; k++) largest = fmaxf(largest, fabsf(a[k] * b[k][j]));
  if (!(largest > 0) || std::isinf(sum) || std::isnan(sum)) largest = 1;
  float unit = ldexpf(1, std::ilogb(largest) - 13), units = truncf(sum / unit);
  for (int k = 0; k < 32; k++) units += truncf(a[k] * b[k][j] / unit);
  return units * unit;
}

// A warp's 16 of the 64 rows of its oldest MMA.
static void multiply(Warp &warp) {
  const Mma op = warp.mmas.front();
  warp.mmas.pop_front();
  Accumulators &acc = warp.accumulators[op.d[0]];
  const int size = op.columns / 2, first_row = warp.index % 4 * 16, depth = op.e4m3 ? 32 : 16;
  static float a[16][32], b[32][256];
  for (int k = 0; k < depth; k++) {
    for (int row = 0; row < 16; row++)
      a[row][k] = op.a.registers ? widened(op.registers[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8], k % 2)
                                 : operand(*warp.block, op.a, first_row + row, k, op.e4m3);
    for (int j = 0; j < op.columns; j++) b[k][j] = operand(*warp.block, op.b, j, k, op.e4m3);
  }
  for (int row = 0; row < 16; row++) {
    float sum[256] = {};
    for (int k = 0; k < depth; k++)
      for (int j = 0; j < op.columns; j++) sum[j] += a[row][k] * b[k][j];
    for (int j = 0; j < op.columns; j++) {
      int lane = row % 8 * 4 + j % 8 / 2;
      float &d = acc.values[(size_t)(lane * size + j / 8 * 4 + row / 8 * 2 + j % 2)];
      if (op.e4m3)
        d = sum_of_codes(op.keep ? d : 0, a[row], b, j);
      else
        d = (op.keep ? d : 0) + sum[j];
    }
  }
  if (--acc.pending > 0) return;
  for (int lane = 0; lane < 32; lane++)
    memcpy(op.d[lane], &acc.values[(size_t)(lane * size)], (size_t)size * sizeof(float));
  warp.accumulators.erase(op.d[0]);
}

// Finishes a warpgroup's oldest MMA; false as long as one of its warps has not come to it.
static bool finish_mma(Warp &warp) {
  for (int i = 0; i < 4; i++)
    if (warp.group[i]->mmas.empty()) return false;
  for (int i = 0; i < 4; i++) multiply(*warp.group[i]);
  progress++;
  return true;
}

void wgmma(float *d, int columns, MmaOperand a, MmaOperand b, bool keep, bool e4m3) {
  Warp &warp = *thread->warp;
  warp.next.d[thread->lane] = d;
  warp.next.registers[thread->lane] = a.registers;
  together("wgmma", (uint64_t)a.descriptor << 32 | b.descriptor, [&](Warp &warp) {
    for (uint64_t value : warp.values)
      if (value != warp.values[0]) EMULATOR_FAILS("a warp's lanes pass different descriptors to wgmma");
    Mma op = warp.next;
    op.columns = columns, op.group = warp.groups, op.a = a, op.b = b, op.keep = keep, op.e4m3 = e4m3;
    const size_t size = (size_t)columns / 2;
    Accumulators &acc = warp.accumulators[op.d[0]];
    if (acc.values.empty()) {
      acc.values.resize(32 * size);
      for (size_t lane = 0; lane < 32; lane++) {
        memcpy(&acc.values[lane * size], op.d[lane], size * sizeof(float));
        std::fill_n(op.d[lane], size, NAN);
      }
    }
    acc.pending++;
    warp.mmas.push_back(op);
  });
}

void wgmma_commit() {
  together("wgmma_commit", 0, [](Warp &warp) { warp.groups++; });
}

void wgmma_wait(int groups) {
  together("wgmma_wait", 0, [](Warp &) {});
  Warp &warp = *thread->warp;
  while (!warp.mmas.empty() && warp.mmas.front().group < warp.groups - groups)
    if (!finish_mma(warp)) yield("the other warps' wgmma");
  warp_sync(); // what comes next may begin another
}

// --- the scheduler -----------------------------------------------------------------------------------------

// Lets a warp's threads run until each waits, a few times over. With EMULATOR_LAG=1 one lane may lag behind.
static void run_warp(Warp &warp) {
  static const bool lags = getenv("EMULATOR_LAG") != nullptr;
  const int lagging = lags && chance() < 0.25 ? (int)(random() % 32) : -1;
  for (int pass = 1 + (int)(random() % 64); pass > 0; pass--) {
    long before = progress;
    bool skipped = false;
    for (Thread *t : warp.lanes) {
      if (!t || t->done) continue;
      if (t->lane == lagging && chance() < 0.95) {
        skipped = true;
        continue;
      }
      thread = t;
      emulator_switch(&scheduler, t->stack_pointer);
    }
    if (!warp.mmas.empty() && chance() < 0.1) finish_mma(warp);
    if (progress == before && !skipped) break;
  }
}

static void end_some_transfers(double share) {
  end_transfers([=](const Transfer &) { return chance() < share; });
}

static bool anyone_lives() {
  for (auto &warp : warps)
    if (warp->live > 0) return true;
  return false;
}

static void fail_waiting() {
  for (auto &warp : warps)
    for (const Thread *t : warp->lanes)
      if (t && !t->done && (t->lane == 0 || strcmp(t->waits_for, warp->lanes[t->lane - 1]->waits_for) != 0))
        fprintf(stderr, "block %u, thread %d waits for %s\n", warp->block->index.x,
                warp->index * 32 + t->lane, t->waits_for);
  EMULATOR_FAILS("the threads wait for each other for ever");
}

// Until all threads have ended. Every hundred draws each warp gets another pace, and transfers another speed.
static void run_all() {
  double share = 0.1;
  long last = 0, idle = 0;
  for (long draw = 0; anyone_lives(); draw++) {
    if (draw % 100 == 0) {
      static const double paces[] = {1, 1, 0.1, 0.01}, shares[] = {0.5, 0.1, 0.01};
      for (auto &warp : warps) warp->pace = paces[random() % 4];
      share = shares[random() % 3];
    }
    Warp &warp = *warps[random() % warps.size()];
    if (warp.live > 0 && chance() < warp.pace) run_warp(warp);
    if (!transfers.empty()) end_some_transfers(share);
    idle = progress == last ? idle + 1 : 0, last = progress;
    if (idle < 20 * (long)warps.size()) continue;
    for (auto &each : warps)
      if (each->live > 0) run_warp(*each);
    if (progress == last && !transfers.empty())
      end_some_transfers(1);
    else if (progress == last && idle > 1000 + 200 * (long)warps.size())
      fail_waiting();
  }
  end_some_transfers(1);
}

// Stacks are kept from launch to launch.
static char *stack_of(size_t i) {
  static std::vector<char *> stacks;
  while (stacks.size() <= i) {
    void *stack =
        mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) EMULATOR_FAILS("out of memory for a thread's stack");
    stacks.push_back(static_cast<char *>(stack));
  }
  return stacks[i];
}

// The blocks of a cluster, or one block, and all that they consist of.
struct Cluster {
  std::vector<unsigned char> memory;
  std::vector<Block> blocks;
  std::vector<Block *> pointers;
  std::vector<Thread> threads;
  std::vector<Warp *> groups; // warps, by fours
  Barrier barrier;

  Cluster(const Launch &launch, unsigned first, unsigned size) {
    const auto count = (unsigned)launch.cluster;
    const dim3 grid = launch.grid, block = launch.block;
    const size_t bytes = STATIC_SHARED + launch.shared_bytes, padded = (bytes + 2047) / 1024 * 1024;
    memory.assign(padded * count + 1024, 0xFF);
    auto *shared = (unsigned char *)(((uintptr_t)memory.data() + 1023) / 1024 * 1024);
    blocks.resize(count);
    threads.resize((size_t)count * size);
    groups.resize((size + 31) / 32 * count + 4);
    warps.clear();
    for (unsigned t = 0; t < count * size; t++) {
      const unsigned rank = t / size, within = t % size, i = first + rank;
      Block &at = blocks[rank];
      if (within == 0) {
        at.index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        at.rank = (int)rank, at.live = (int)size, at.shared = shared + rank * padded, at.bytes = bytes;
        at.cluster = &pointers, at.whole_cluster = &barrier;
        pointers.push_back(&at);
      }
      if (within % 32 == 0) {
        groups[warps.size()] = new Warp();
        warps.emplace_back(groups[warps.size()]);
        Warp &warp = *warps.back();
        warp.block = &at, warp.index = (int)(within / 32), warp.group = &groups[(warps.size() - 1) / 4 * 4];
      }
      Thread &of = threads[t];
      of.index = {within % block.x, within / block.x % block.y, within / block.x / block.y};
      of.block = &at, of.warp = warps.back().get(), of.lane = (int)(within % 32);
      of.warp->lanes[of.lane] = &of, of.warp->live++;
      // Six registers, then where to begin, whose frame is aligned as if it had been called.
      void **top = (void **)(stack_of(t) + STACK - 64);
      *--top = nullptr, *--top = (void *)run_thread;
      of.stack_pointer = top - 6;
    }
  }

  void check_end() const {
    for (auto &warp : warps)
      if (!warp->mmas.empty()) EMULATOR_FAILS("a warp ends before its MMAs");
    for (const Block &block : blocks)
      for (auto &[address, m] : block.mbarriers)
        if (m.bytes) EMULATOR_FAILS("a block ends before its loads");
  }
};

void Launch::run(const std::function<void()> &thread_body) const {
  const unsigned count = grid.x * grid.y * grid.z, size = block.x * block.y * block.z;
  if (count == 0 || size == 0) return;
  if (shared_bytes > SHARED_MAX) EMULATOR_FAILS("a launch with %zu bytes of shared memory", shared_bytes);
  const char *seed = getenv("EMULATOR_SEED");
  random.seed(seed ? (unsigned)atoi(seed) : 1);
  kernel = &thread_body;
  emulator::grid = {grid.x, grid.y, grid.z};
  threads_of_block = {block.x, block.y, block.z};
  for (unsigned first = 0; first < count; first += (unsigned)cluster) {
    Cluster blocks(*this, first, size);
    run_all();
    blocks.check_end();
    copies.clear();
  }
}

} // namespace emulator
