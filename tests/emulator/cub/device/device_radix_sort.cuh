// CUB's sort for the emulator: stable, by bits [begin, end) of the keys.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

namespace cub {
struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void *space, size_t &bytes, const Key *keys, Key *sorted_keys,
                               const Value *values, Value *sorted_values, int count, int begin, int end,
                               cudaStream_t) {
    if (!space) return bytes = 1, cudaSuccess;
    std::vector<int> order((size_t)count);
    std::iota(order.begin(), order.end(), 0);
    auto bits = [=](int i) {
      return (((uint64_t)(uint32_t)keys[i] ^ 1u << 31) & ((1ull << end) - 1)) >> begin;
    };
    std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return bits(i) < bits(j); });
    for (int i = 0; i < count; i++) sorted_keys[i] = keys[order[i]], sorted_values[i] = values[order[i]];
    return cudaSuccess;
  }
};
} // namespace cub
