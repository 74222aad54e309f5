// What the backward pass needs of every query; 64 queries are one aligned piece of 512 bytes:
// statistics[b * Q + h][t / 64][0][t % 64] = -lse log2(e), [t / 64][1][t % 64] = -delta, zeros beyond T.
// P = 2^(S log2(e) / sqrt(D) + the first); dP starts at the second.
#ifndef LCE_KERNELS_CUDA_ATTENTION_STATISTICS_CUH
#define LCE_KERNELS_CUDA_ATTENTION_STATISTICS_CUH

#include <stdint.h>

namespace attention {

constexpr int STATISTICS_TILE = 64;

// Of the head'th (of all batches' heads).
static __device__ __forceinline__ const float *statistics_of(const float *statistics, int64_t head,
                                                             int seq_len) {
  return statistics + head * ((seq_len + STATISTICS_TILE - 1) / STATISTICS_TILE) * (2 * STATISTICS_TILE);
}

// Where -lse log2(e) of query t lies; -delta lies STATISTICS_TILE further on.
static __device__ __forceinline__ int64_t statistics_place(int64_t t) {
  return t / STATISTICS_TILE * (2 * STATISTICS_TILE) + t % STATISTICS_TILE;
}

} // namespace attention

#endif
