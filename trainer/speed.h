// The machine's practical speed of light.
#pragma once

#include "base/system.h" // now_seconds
#include "kernels/kernels.h"

// Flops a second that one large square GEMM of the backend's dtype reaches on random values (zeros would draw less
// power and run faster): the median of several, after a warm-up. The stack must be empty and is freed afterwards.
double measure_gemm_rate(Backend *backend);

// What NVIDIA's data sheets give for dense bf16 GEMMs, as MFU divides by it.
typedef struct {
  const char *gpu; // part of its name, as CUDA tells it
  double flops_per_second;
} GpuPeak;

// That of the GPU with this name, or NULL: not in the table, or a part of one (MIG).
const GpuPeak *gpu_peak(const char *name);

// The middle one of `count` values, or the mean of the middle two. Sorts them.
double median(double *values, int64_t count);
