// The CPU backend: where its memory comes from, what the system reports about it, and the table of operations.
//
// Memory is zero pages from mmap, which cost nothing until they are touched: VmRSS and VmHWM show what a step used.
// Large blocks lie on 2 MiB boundaries and request huge pages: a row of logits is half a megabyte long, and a walk
// down its columns would otherwise miss the TLB at every step.
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/system.h"
#include "kernels/cpu/cpu.h"

#ifdef HAVE_CBLAS
#include <cblas.h>
#endif

static const size_t HUGE_PAGE = (size_t)2 << 20;

static void *pages_allocate(void *context, size_t bytes) {
  (void)context;
  size_t margin = bytes >= HUGE_PAGE ? HUGE_PAGE : 0, length = bytes ? bytes : 1;
  char *base = mmap(NULL, length + margin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return NULL;
  if (!margin) return base;
  // Give back what lies before the boundary; what lies behind the block stays in its last pages' mapping.
  size_t before = (HUGE_PAGE - (uintptr_t)base % HUGE_PAGE) % HUGE_PAGE;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (length + page - 1) / page * page;
  if (before) munmap(base, before);
  size_t mapped = (length + margin + page - 1) / page * page;
  if (mapped > before + used) munmap(base + before + used, mapped - before - used);
  madvise(base + before, length, MADV_HUGEPAGE); // a wish: the kernel may have huge pages switched off
  return base + before;
}

static void pages_release(void *context, void *data, size_t bytes) {
  (void)context;
  munmap(data, bytes ? bytes : 1);
}

static void pages_poison(void *context, void *data, size_t bytes) {
  (void)context;
  memset(data, 0xFF, bytes);
}

// A figure such as "VmHWM:   12345 kB" from /proc/self/status, in bytes; 0 when the system has none.
static size_t status_bytes(const char *field) {
  FILE *file = fopen("/proc/self/status", "r");
  if (!file) return 0;
  char line[256];
  size_t kib = 0, length = strlen(field);
  while (fgets(line, sizeof line, file))
    if (!strncmp(line, field, length) && line[length] == ':') kib = strtoull(line + length + 1, NULL, 10);
  fclose(file);
  return kib * 1024;
}

static size_t bytes_now(Backend *backend) {
  (void)backend;
  return status_bytes("VmRSS");
}

static size_t bytes_peak(Backend *backend) {
  (void)backend;
  return status_bytes("VmHWM");
}

// Where the kernel does not let a process reset its mark, the mark stays the whole run's.
static void peak_reset(Backend *backend) {
  (void)backend;
  FILE *file = fopen("/proc/self/clear_refs", "w");
  if (!file) return;
  fputs("5", file);
  fclose(file);
}

void cpu_fill_zero(Backend *backend, const Tensor *t) {
  (void)backend;
  enum { BLOCK = 1 << 20 };
  size_t bytes = tensor_bytes(*t);
#pragma omp parallel for schedule(static)
  for (size_t first = 0; first < bytes; first += BLOCK)
    memset((char *)t->data + first, 0, bytes - first < BLOCK ? bytes - first : BLOCK);
}

static void to_device(Backend *backend, Tensor destination, const void *host) {
  (void)backend;
  copy_bytes(destination.data, host, tensor_bytes(destination));
}

static void to_host(Backend *backend, void *host, Tensor source) {
  (void)backend;
  copy_bytes(host, source.data, tensor_bytes(source));
}

static void destroy(Backend *backend) {
  cpu_collectives_end(backend);
}

// --- scratch: from shapes alone, whatever the machine and its threads, so that a plan holds everywhere --------

static size_t embedding_backward_bytes(const EmbeddingBackward *a) {
  return (size_t)a->dout.shape[0] * sizeof(uint64_t); // sort keys
}

static size_t lce_target_gradient_bytes(const LceTargetGradient *a) {
  return (size_t)a->x.shape[0] * sizeof(uint64_t); // sort keys
}

static size_t reduce_bytes(const Reduce *a) {
  return (size_t)ceil_div(tensor_count(a->x), CPU_REDUCE_BLOCK) * sizeof(double);
}

// Rows start on a cache line. Their length is no multiple of 4096 bytes: a column would fall into few cache sets.
static int64_t logits_stride(int64_t vocab_size, Dtype dtype) {
  int64_t line = 64 / (int64_t)dtype_bytes(dtype);
  return (ceil_div(vocab_size, line) | 1) * line;
}

const BackendScratch cpu_scratch = {.embedding_backward = embedding_backward_bytes,
                                    .lce_logits_exp = cpu_lce_logits_exp_scratch,
                                    .lce_sampled_gradients = cpu_lce_sampled_gradients_scratch,
                                    .lce_target_gradient = lce_target_gradient_bytes,
                                    .reduce = reduce_bytes,
                                    .logits_stride = logits_stride};

// --- life --------------------------------------------------------------------------------------------------

static const BackendOps cpu_ops = {.collectives_join = cpu_collectives_join,
                                   .to_device = to_device,
                                   .to_host = to_host,
                                   .device_bytes_now = bytes_now,
                                   .device_bytes_peak = bytes_peak,
                                   .device_peak_reset = peak_reset,
                                   .destroy = destroy,
#define ENTRY(name, Arguments) .name = cpu_##name,
                                   OPERATIONS(ENTRY, ENTRY)
#undef ENTRY
};

#if defined(HAVE_CBLAS) && defined(OPENBLAS_VERSION)
#define GEMM_LIBRARY "OpenBLAS"
#elif defined(HAVE_CBLAS)
#define GEMM_LIBRARY "CBLAS"
#else
#define GEMM_LIBRARY "plain loops"
#endif

Backend *cpu_backend_create(bool plain_loops) {
  Backend *backend = backend_begin(&cpu_ops, ON_CPU, DTYPE_F32, sizeof(CpuState));
  ((CpuState *)backend->state)->plain_loops = plain_loops;
  MemorySource pages = {.allocate = pages_allocate, .release = pages_release, .poison = pages_poison};
  backend->name = "cpu";
  backend->scratch = &cpu_scratch;
  backend->memory = memory_create(&pages);
  int threads = omp_get_max_threads();
  snprintf(backend->description, sizeof backend->description, "CPU, %d thread%s, %s", threads,
           threads == 1 ? "" : "s", plain_loops ? "plain loops" : GEMM_LIBRARY);
  backend->device_capacity = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
  backend->device_overhead = bytes_now(backend);
  return backend_finish(backend);
}
