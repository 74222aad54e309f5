// The clock, copies of large blocks, and how much of the host's memory this process may use.
#pragma once

#include <stddef.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

double now_seconds(void); // monotonic

// A line such as "VmHWM:   12345 kB" of /proc/self/status or /proc/meminfo, in bytes; 0 if absent.
size_t system_bytes(const char *path, const char *field);

// memcpy, with all threads if it is large: one alone saturates neither the memory nor its page faults.
void copy_bytes(void *to, const void *from, size_t bytes);

// The lowest limit in bytes of this process's cgroup, v1 or v2, and of its parents; SIZE_MAX: none.
// /proc/self/cgroup and /sys/fs/cgroup are read below the folder `root`: "" but for tests.
size_t cgroup_memory_limit(const char *root);

// Bytes that the host has available, no more than the cgroup allows; 0: unknown.
size_t host_memory_left(void);

// Address space that `ulimit -v` and `-d` leave, in bytes; SIZE_MAX: no limit.
size_t address_space_left(void);

// OpenBLAS allocates this much for each thread, most before main, and without room tries for ever.
#define OPENBLAS_THREAD_BYTES ((size_t)128 << 20)

__END_DECLS
