// BLAS for a library that others install (liblce.so): what is there when it is loaded, not when it is built.
// The core is built as with a CBLAS, whose cblas_sgemm is this folder's.
#pragma once

// Looks once, in this order: in the library that the environment's LCE_BLAS names (empty: in none), in PyTorch
// where it is loaded, in OpenBLAS, MKL and FlexiBLAS. Returns the library's name, or NULL after a warning: then
// cblas_sgemm must not be called. Fails where LCE_BLAS names none that has sgemm_.
const char *found_blas(void);
