// cp.async as CUDA C++ calls it, for the emulator.
#pragma once

static inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes, size_t zeros = 0) {
  emulator::copy_16(emulator::shared_address(to), from, (int)(bytes - zeros));
}
static inline void __pipeline_commit() {
  emulator::copies_commit();
}
static inline void __pipeline_wait_prior(int groups) {
  emulator::copies_wait(groups);
}
