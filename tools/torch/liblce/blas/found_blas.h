// BLAS for a library that others install (liblce.so): what is there when it is loaded, not when it is built.
#pragma once

#include "kernels/cpu/cpu.h"

// Looks once, in this order: in the library that the environment's LCE_BLAS names (empty: in none), in PyTorch
// where it is loaded, in OpenBLAS, MKL and FlexiBLAS. Returns the library's name, or NULL after a warning.
// Fails where LCE_BLAS names none that has sgemm_.
const char *found_blas(void);

// cpu_gemm by what was found, on the calling thread alone inside an OpenMP region. Axes are at most INT_MAX.
void found_sgemm(Tensor out, Tensor a, bool a_transposed, Tensor b, bool b_transposed, float alpha,
                 bool accumulate);
