// The machine's practical speed of light.
#pragma once

#include "base/system.h" // now_seconds
#include "kernels/kernels.h"

// Flops a second that one large square GEMM of the backend's dtype (as large as fits the memory's limit) reaches on random
// values (zeros would draw less power and run faster): the median of several, after a warm-up. The stack must be empty and
// is freed afterwards.
double measure_gemm_rate(Backend *backend);

// Flops a second of dense bf16 GEMMs by NVIDIA's data sheet for the GPU with this name; NaN for others, and parts (MIG).
double gpu_peak_flops(const char *name);

// The middle one of `count` values, or the mean of the middle two. Sorts them.
double median(double *values, int64_t count);
