// WMMA of CUDA C++ for the emulator: 16 x 16 fragments, of which a lane keeps all of A and B, and 8 entries of C.
#pragma once

#include <type_traits>

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major };

template <typename Use, int, int, int, typename T, typename Layout = row_major> struct fragment {
  T at[256];
};
template <typename T> struct fragment<accumulator, 16, 16, 16, T> { T at[8]; };
template <typename T> using Sum = fragment<accumulator, 16, 16, 16, T>;

static inline int entry(int i) {
  return emulator::thread->lane * 8 + i;
}

template <typename T> void fill_fragment(Sum<T> &f, std::type_identity_t<T> value) {
  for (T &x : f.at) x = value;
}

// B in column-major order lies as its transpose in row-major order does, and is kept so.
template <typename Fragment, typename T> void load_matrix_sync(Fragment &f, const T *from, unsigned stride) {
  emulator::warp_sync();
  for (int i = 0; i < 256; i++) f.at[i] = from[i / 16 * stride + i % 16];
}

template <typename T> void store_matrix_sync(T *to, const Sum<T> &f, unsigned stride, layout_t) {
  for (int i = 0; i < 8; i++) to[entry(i) / 16 * stride + entry(i) % 16] = f.at[i];
  emulator::warp_sync();
}

template <typename T, typename A, typename B>
void mma_sync(Sum<T> &d, const A &a, const B &b, const Sum<T> &c) {
  for (int i = 0; i < 8; i++) {
    T sum = c.at[i];
    for (int k = 0; k < 16; k++) sum += (T)a.at[entry(i) / 16 * 16 + k] * (T)b.at[entry(i) % 16 * 16 + k];
    d.at[i] = sum;
  }
}

} // namespace nvcuda::wmma
