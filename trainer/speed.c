#include "trainer/speed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"

// One block of random values in [-1, 1), repeated.
static void fill_random(Backend *backend, Tensor t) {
  enum { BLOCK = 1 << 16 };
  static float values[BLOCK];
  static uint16_t rounded[BLOCK];
  for (int i = 0; i < BLOCK; i++) {
    values[i] = (float)(2 * random_uniform(1, 2, (uint64_t)i) - 1);
    rounded[i] = bf16_from_f32(values[i]);
  }
  Tensor flat = tensor_flat(t);
  const void *block = t.dtype == DTYPE_F32 ? (const void *)values : (const void *)rounded;
  for (int64_t first = 0; first < flat.shape[0]; first += BLOCK)
    backend_to_device(backend, tensor_rows(flat, first, min_i64(flat.shape[0] - first, BLOCK)), block);
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double median(double *values, int64_t count) {
  qsort(values, (size_t)count, sizeof *values, by_size);
  return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

double gpu_peak_flops(const char *name) {
  static const struct {
    const char *part; // of the name; the first counts
    double flops;
  } peaks[] = {{"H100 PCIe", 756e12}, {"H800 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H200 NVL", 835e12},
               {"H100", 989e12},      {"H200", 989e12},      {"H800", 989e12},     {"GB200", 2500e12},
               {"B200", 2250e12},     {"A100", 312e12},      {"A800", 312e12},     {"L40S", 362e12}};
  for (size_t i = 0; i < sizeof peaks / sizeof *peaks && !strstr(name, "MIG"); i++)
    if (strstr(name, peaks[i].part)) return peaks[i].flops;
  return NAN;
}

static size_t gemm_bytes(int64_t n, Dtype dtype) {
  return 3 * memory_padded((size_t)(n * n) * dtype_bytes(dtype));
}

double measure_gemm_rate(Backend *backend) {
  enum { WARM_UP = 2, TIMES = 5 };
  Memory *memory = &backend->memory;
  int64_t n = backend->device == ON_CUDA ? 8192 : 1024; // large enough to fill the device
  while (n > 1 && memory->limit && gemm_bytes(n, backend->dtype) > memory->limit) n /= 2;
  memory_set_stack(memory, gemm_bytes(n, backend->dtype));
  Tensor x = memory_push_2d(memory, "x", MEMORY_WORKSPACE, backend->dtype, n, n);
  Tensor w = memory_push_2d(memory, "w", MEMORY_WORKSPACE, backend->dtype, n, n);
  Tensor out = memory_push_2d(memory, "out", MEMORY_WORKSPACE, backend->dtype, n, n);
  fill_random(backend, x);
  fill_random(backend, w);
  double seconds[TIMES] = {0};
  for (int i = -WARM_UP; i < TIMES; i++) {
    backend_synchronize(backend);
    double start = now_seconds();
    linear_forward(backend, (LinearForward){.out = out, .x = x, .weight = w});
    backend_synchronize(backend);
    if (i >= 0) seconds[i] = now_seconds() - start;
  }
  memory_pop_to(memory, 0);
  memory_set_stack(memory, 0);
  ledger_reset_peak(&memory->ledger);
  return 2.0 * (double)n * (double)n * (double)n / median(seconds, TIMES);
}
