// The host's memory: zero pages from mmap, which cost nothing until they are touched, so that VmRSS and VmHWM
// show what a step used. Large blocks request huge pages, against TLB misses.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/base/memory.h"

static const size_t HUGE_PAGE = (size_t)2 << 20;

static void *pages_allocate(void *context, size_t bytes) {
  size_t margin = bytes >= HUGE_PAGE ? HUGE_PAGE : 0, length = bytes ? bytes : 1;
  char *base = mmap(NULL, length + margin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return NULL;
  if (!margin) return base;
  // Give back the bytes before the boundary and behind the block's last page.
  size_t before = (HUGE_PAGE - (uintptr_t)base % HUGE_PAGE) % HUGE_PAGE;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (length + page - 1) / page * page;
  if (before) munmap(base, before);
  munmap(base + before + used, margin - before);
  madvise(base + before, length, MADV_HUGEPAGE); // a wish: the kernel may have huge pages switched off
  return base + before;
}

static void pages_release(void *context, void *data, size_t bytes) {
  munmap(data, bytes ? bytes : 1);
}

static void pages_poison(void *context, void *data, size_t bytes) {
  memset(data, 0xFF, bytes);
}

const MemorySource memory_pages = {pages_allocate, pages_release, .allocate_host = pages_allocate,
                                   .release_host = pages_release, .poison = pages_poison};
