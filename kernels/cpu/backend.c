// The CPU backend: the system's figures of memory, the operations and their scratch.
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/fail.h"
#include "kernels/base/system.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ranks/ranks.h"

static size_t bytes_now(Backend *backend) {
  return system_bytes("/proc/self/status", "VmRSS");
}

static size_t bytes_peak(Backend *backend) {
  return system_bytes("/proc/self/status", "VmHWM");
}

// If the kernel does not let a process reset its mark, the mark stays the whole run's.
static void peak_reset(Backend *backend) {
  FILE *file = fopen("/proc/self/clear_refs", "w");
  if (!file) return;
  fputs("5", file);
  fclose(file);
}

static void to_device(Backend *backend, Tensor destination, const void *host) {
  copy_bytes(destination.data, host, tensor_bytes(destination));
}

static void to_host(Backend *backend, void *host, Tensor source) {
  copy_bytes(host, source.data, tensor_bytes(source));
}

static void destroy(Backend *backend) {
  cpu_collectives_end(backend);
  free(((CpuState *)backend->state)->queue);
}

// --- scratch: from shapes alone, whatever the machine and its threads, so that a plan holds everywhere -----

static size_t embedding_backward_bytes(const EmbeddingBackward *a) {
  return (size_t)a->dout.shape[0] * sizeof(uint64_t); // sort keys
}

static size_t lce_target_gradient_bytes(const LceTargetGradient *a) {
  return (size_t)a->x.shape[0] * sizeof(uint64_t); // sort keys
}

static size_t sum_elements_bytes(const SumElements *a) {
  return (size_t)ceil_div(tensor_count(a->x), CPU_REDUCE_BLOCK) * sizeof(double);
}

static size_t matmul_quantized_bytes(const MatmulQuantized *a) { // the codes' values
  return (size_t)(tensor_count(a->a.codes) + tensor_count(a->b.codes)) * sizeof(float);
}

// Holds the values if only codes are requested.
static size_t activation_forward_bytes(const ActivationForward *a) {
  return tensor_exists(a->out) ? 0 : tensor_bytes(a->x) / (is_gated(a->activation) ? 2 : 1);
}

static size_t activation_backward_bytes(const ActivationBackward *a) {
  return tensor_exists(a->dx) ? 0 : tensor_bytes(a->x);
}

// Rows start on a cache line, and are no multiple of 4096 bytes: a column would fall into few cache sets.
static int64_t logits_stride(int64_t vocab_size, Dtype dtype) {
  int64_t line = 64 / (int64_t)dtype_bytes(dtype);
  return (ceil_div(vocab_size, line) | 1) * line;
}

const BackendScratch cpu_scratch = {.embedding_backward = embedding_backward_bytes,
                                    .lce_logits_exp = cpu_lce_logits_exp_scratch,
                                    .lce_sampled_gradients = cpu_lce_sampled_gradients_scratch,
                                    .matmul_quantized = matmul_quantized_bytes,
                                    .activation_forward = activation_forward_bytes,
                                    .activation_backward = activation_backward_bytes,
                                    .lce_target_gradient = lce_target_gradient_bytes,
                                    .sum_elements = sum_elements_bytes,
                                    .logits_stride = logits_stride};

// --- life --------------------------------------------------------------------------------------------------

static const BackendOps cpu_ops = {.join_ranks = cpu_join_ranks,
                                   .collectives_join = cpu_collectives_join,
                                   .copies_join = cpu_copies_join,
                                   .to_device = to_device,
                                   .to_host = to_host,
                                   .device_bytes_now = bytes_now,
                                   .device_bytes_peak = bytes_peak,
                                   .device_peak_reset = peak_reset,
                                   .destroy = destroy,
#define ENTRY(name, Arguments, group) .name = cpu_##name,
                                   OPERATIONS(ENTRY, ENTRY)
#undef ENTRY
};

// OpenBLAS's: returns 1 if it has threads of its own, which get in the way of ours when tiles are multiplied.
extern int openblas_get_parallel(void) __attribute__((weak));

// The machine's memory, or its cgroup's, in equal parts for the ranks on it; less if `ulimit -v` or `-d` says so.
static size_t capacity(size_t overhead, int blas_threads) {
  size_t memory = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE),
         limit = cgroup_memory_limit(""), left = address_space_left(),
         blas = openblas_get_parallel ? (size_t)blas_threads * OPENBLAS_THREAD_BYTES : 0;
  int ranks = ranks_self()->local_ranks;
  memory = (limit < memory ? limit : memory) / (size_t)(ranks > 1 ? ranks : 1);
  if (left == SIZE_MAX) return memory;
  if (left <= blas)
    fail("`ulimit -v` or `-d` leaves %zu MiB of memory, and OpenBLAS needs up to %zu for its %d threads; "
         "raise it, or set OMP_NUM_THREADS=1",
         left >> 20, blas >> 20, blas_threads);
  return overhead + left - blas < memory ? overhead + left - blas : memory;
}

Backend *cpu_backend_create(bool no_blas) {
  const char *blas = no_blas ? NULL : cpu_blas();
  Backend *backend = backend_begin(&cpu_ops, &cpu_scratch, ON_CPU, DTYPE_F32, sizeof(CpuState));
  ((CpuState *)backend->state)->no_blas = !blas;
  backend->memory = memory_create(&memory_pages);
  int threads = omp_get_max_threads();
  snprintf(backend->description, sizeof backend->description, "CPU, %d thread%s, %s", threads,
           threads == 1 ? "" : "s", blas ? blas : "no BLAS");
  if (!no_blas && openblas_get_parallel && openblas_get_parallel() == 1)
    warn("this OpenBLAS has threads of its own, which slow attention and the loss down; "
         "install libopenblas-openmp-dev and build again");
  backend->device_overhead = bytes_now(backend);
  backend->device_capacity = capacity(backend->device_overhead, no_blas ? 0 : threads);
  return backend_finish(backend);
}
