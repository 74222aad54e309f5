// Cooperative groups for the emulator: a grid, whose blocks run together like those of a cluster.
#pragma once

namespace cooperative_groups {
struct grid_group {
  void sync() const { emulator::cluster_sync(); }
  unsigned long long size() const { return (unsigned long long)gridDim.x * blockDim.x; }
  unsigned long long thread_rank() const { return (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; }
};
static inline grid_group this_grid() {
  return {};
}
} // namespace cooperative_groups
