// Building blocks of the tensor-core attention kernels, for sm_80 and later: tiles of bf16 rows in swizzled
// shared memory, asynchronous copies into them, and warp-wide fragments out of them.
//
// A tile holds rows of D elements, D/8 chunks of 16 bytes each. Chunk c of row r lies at chunk c ^ (r & 7),
// so the eight rows of an ldmatrix phase fall into different bank groups without padding. Every fragment
// starts at a row that is a multiple of 8, so r & 7 is lane & 7 and the swizzle costs one xor.
//
// Fragments follow the PTX manual's mma.m16n8k16: with g = lane / 4 and q = lane % 4, an accumulator's four
// elements are (row g, columns 2q, 2q + 1) and (row g + 8, the same columns). Two neighbouring accumulators,
// rounded to bf16, are exactly one A operand of the next MMA: probabilities never leave the registers.
#pragma once

#include <stdint.h>

#include "kernels/cuda/attention_documents.cuh"

namespace attention {

// --- what the backward pass reads about every query -------------------------------------------------------

// 64 queries are one aligned piece of 512 bytes:
// statistics[b * Q + h][t / 64][0][t % 64] = -lse log2(e), [t / 64][1][t % 64] = -delta, zeros beyond T.
// P = 2^(S log2(e) / sqrt(D) + the first); dP starts at the second.
constexpr int STATISTICS_TILE = 64;

// Returns the statistics of head number `head`, counted over all batches' heads.
static DEVICE const float *statistics_of(const float *statistics, int64_t head, int seq_len) {
  return statistics + head * ((seq_len + STATISTICS_TILE - 1) / STATISTICS_TILE) * (2 * STATISTICS_TILE);
}

// Returns the place of query t's -lse log2(e); -delta lies STATISTICS_TILE further on.
static DEVICE int64_t statistics_place(int64_t t) {
  return t / STATISTICS_TILE * (2 * STATISTICS_TILE) + t % STATISTICS_TILE;
}

// One step of a reduce-scatter over a warp's lanes: of x's first 2 `half` elements a lane keeps the upper
// half if its number has the bit `mask`, else the lower, and adds its partner's.
template <int N> DEVICE void add_halves(float (&x)[N], int half, int mask) {
  const bool upper = threadIdx.x & mask;
  EACH (i, N / 2) {
    if (i >= half) break;
    const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], mask);
    x[i] = (upper ? x[i + half] : x[i]) + other;
  }
}

// --- asynchronous copies -----------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory, or writes zeros if `valid` is false (nothing is read then).
DEVICE void copy_16(uint32_t destination, const void *source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0));
}

DEVICE void copies_commit() {
  asm volatile("cp.async.commit_group;\n");
}

template <int PENDING> DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING));
}

// Copies rows [row, row + ROWS) of a matrix into a tile; rows at and after `limit` become zeros.
template <int ROWS, int D, int THREADS>
DEVICE void load_tile(uint32_t tile, const bf16 *matrix, int64_t stride, int row, int limit) {
  constexpr int CHUNKS = D / 8;
  static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
  EACH (i, ROWS * CHUNKS / THREADS) {
    int index = i * THREADS + threadIdx.x, r = index / CHUNKS, c = index % CHUNKS;
    bool valid = row + r < limit;
    copy_16(tile + (r * CHUNKS + (c ^ (r & 7))) * 16, matrix + (valid ? row + r : 0) * stride + c * 8, valid);
  }
}

// --- fragments ---------------------------------------------------------------------------------------------

DEVICE void ldmatrix(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

DEVICE void ldmatrix_transposed(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], bf16 operands, fp32 sums.
DEVICE void mma(float c[4], const uint32_t a[4], const uint32_t *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
               "%9}, {%0, %1, %2, %3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The start of this lane's ldmatrix addresses in a tile of D columns. `rows` walks down the tile's rows and
// must be a multiple of 8; `column` is a multiple of 16.
template <int D> struct Lane {
  uint32_t row_major; // a [16 rows, 16 columns] block, fragments by row: A operands, transposed B operands
  uint32_t row_xor;
  uint32_t pair_major; // two [8 rows, 16 columns] blocks: B operands whose tile rows are the MMA's columns
  uint32_t pair_xor;

  DEVICE Lane() {
    uint32_t lane = threadIdx.x % 32;
    row_major = (lane & 15) * (D * 2);
    row_xor = ((lane >> 4) ^ (lane & 7)) * 16;
    pair_major = ((lane & 7) + ((lane >> 4) << 3)) * (D * 2);
    pair_xor = (((lane >> 3) & 1) ^ (lane & 7)) * 16;
  }

  // A operand: rows [row, row + 16), columns [column, column + 16) of the tile.
  DEVICE void a(uint32_t r[4], uint32_t tile, int row, int column) const {
    ldmatrix(r, tile + row * (D * 2) + row_major + (row_xor ^ (column * 2)));
  }
  // B operands of two MMAs: b[k][n] = tile[row + n][column + k] for n < 16, the second pair has n >= 8.
  DEVICE void b_rows(uint32_t r[4], uint32_t tile, int row, int column) const {
    ldmatrix(r, tile + row * (D * 2) + pair_major + (pair_xor ^ (column * 2)));
  }
  // B operands of two MMAs: b[k][n] = tile[row + k][column + n] for n < 16, the second pair has n >= 8.
  DEVICE void b_columns(uint32_t r[4], uint32_t tile, int row, int column) const {
    ldmatrix_transposed(r, tile + row * (D * 2) + row_major + (row_xor ^ (column * 2)));
  }
};

// --- GEMMs of a warp ---------------------------------------------------------------------------------------

// s[16 M, 8 N] += x y^T over D columns. x(a, m, d): A of row 16 m, column d; y: tile rows from `row`.
template <int D, int M, int N, class X>
DEVICE void scores(float (&s)[M][N][4], const Lane<D> &lane, X x, uint32_t y, int row) {
#pragma unroll
  for (int d = 0; d < D; d += 16) {
    uint32_t a[M][4], b[4];
    EACH (m, M) x(a[m], m, d);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      lane.b_rows(b, y, row + n * 8, d);
      EACH (m, M) mma(s[m][n], a[m], b), mma(s[m][n + 1], a[m], b + 2);
    }
  }
}

// sums[16 M, D] += p y: p[16 M, 8 N] rounded to bf16, y rows of a tile from `row` on.
template <int D, int M, int N>
DEVICE void accumulate(float (&sums)[M][D / 8][4], const Lane<D> &lane, const float (&p)[M][N][4], uint32_t y,
                       int row) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t a[M][4], b[4];
    EACH (m, M)
      EACH (i, 4) a[m][i] = pack_bf16(p[m][n + i / 2][i % 2 * 2], p[m][n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      lane.b_columns(b, y, row + n * 8, d);
      EACH (m, M) mma(sums[m][d / 8], a[m], b), mma(sums[m][d / 8 + 1], a[m], b + 2);
    }
  }
}

// --- masks and results -------------------------------------------------------------------------------------

// Sets a warp's accumulators to -infinity: if BEFORE, up to column bound(row), else from it on.
template <bool BEFORE, int M, int N, class Bound> DEVICE void mask_columns(float (&s)[M][N][4], Bound bound) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  EACH (m, M)
    EACH (half, 2) {
      const int at = bound(m * 16 + half * 8 + g);
      EACH (n, N)
        EACH (i, 2)
          if ((n * 8 + 2 * q + i < at) == BEFORE) s[m][n][2 * half + i] = -INFINITY;
    }
}

// Writes a warp's [16 * M, D] accumulators, `scale` times, as bf16 rows of a matrix, through its own shared
// memory. sum(m, n, i): accumulator i at row 16 m, column 8 n; place(r, c): chunk c of row r.
template <int M, int D, class Sum, class Place>
DEVICE void store_rows(Sum sum, float scale, Place place, bf16 *matrix, int64_t stride, int row, int limit) {
  constexpr int CHUNKS = D / 8;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  EACH (m, M)
    EACH (n, CHUNKS)
      EACH (half, 2)
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(place(m * 16 + half * 8 + g, n) + q * 4),
                     "r"(pack_bf16(sum(m, n, 2 * half) * scale, sum(m, n, 2 * half + 1) * scale))
                     : "memory");
  __syncwarp();
  EACH (i, 16 * M * CHUNKS / 32) {
    int index = i * 32 + lane, r = index / CHUNKS, c = index % CHUNKS;
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(place(r, c))
                 : "memory");
    if (row + r < limit) *reinterpret_cast<uint4 *>(matrix + (row + r) * stride + c * 8) = v;
  }
}

// The same through a tile of D columns, which starts on a multiple of 8 rows.
template <int M, int D>
DEVICE void store_tile_rows(float (&sums)[M][D / 8][4], float scale, uint32_t tile, bf16 *matrix,
                            int64_t stride, int row, int limit) {
  store_rows<M, D>([&](int m, int n, int i) { return sums[m][n][i]; }, scale,
                   [=](int r, int c) { return tile + (r * (D / 8) + (c ^ (r & 7))) * 16; }, matrix, stride,
                   row, limit);
}

// --- blocks ------------------------------------------------------------------------------------------------

// A block's rows: `ROWS` of one head of one sequence.
struct Place {
  int first_row, head;
  int64_t batch, first_token; // of the sequence
};

// Blocks of a head follow one another, those with most work first: queries' last rows, keys' first.
template <int ROWS> static DEVICE Place place(int seq_len, int heads, bool queries) {
  const unsigned blocks = (seq_len + ROWS - 1) / ROWS, block = blockIdx.x % blocks;
  const int64_t batch = blockIdx.x / blocks / heads;
  return {(int)(queries ? blocks - 1 - block : block) * ROWS, (int)(blockIdx.x / blocks % heads), batch,
          batch * seq_len};
}

template <int THREADS, int ROWS, int SHARED_BYTES, class Operation>
static void launch(void (*kernel)(Operation), const Operation &a, int64_t heads, cudaStream_t stream) {
  int64_t blocks = ceil_div(a.shape.seq_len, ROWS) * heads * a.shape.batch;
  launch_kernel({"attention", stream, blocks, THREADS, false, SHARED_BYTES}, kernel, a);
}

} // namespace attention
