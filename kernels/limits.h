// How much of the host's memory this process may use, where that is less than the machine has.
#pragma once

#include <stddef.h>

// The lowest memory limit among this process's cgroup and those that hold it, v1 or v2, in bytes; SIZE_MAX:
// none. What it reads (/proc/self/cgroup, /proc/self/mountinfo, the cgroups' files) lies below the folder
// `root`: "" but for tests.
size_t cgroup_memory_limit(const char *root);

// Bytes that the host can still give to this process: what is available, and no more than its cgroup allows; 0: unknown.
size_t host_memory_left(void);

// Address space that `ulimit -v` leaves, in bytes; SIZE_MAX: there is no limit.
size_t address_space_left(void);

// OpenBLAS allocates this much for each thread, most before main, and tries for ever where there is no room.
#define OPENBLAS_THREAD_BYTES ((size_t)128 << 20)
