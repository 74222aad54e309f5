// How much of the host's memory this process may use, where that is less than the machine has.
#pragma once

#include <stddef.h>

// The lowest limit in bytes of this process's cgroup, v1 or v2, and of those that hold it; SIZE_MAX: none.
// /proc/self/cgroup and /sys/fs/cgroup are read below the folder `root`: "" but for tests.
size_t cgroup_memory_limit(const char *root);

// What the host has available, no more than the cgroup allows; 0: unknown.
size_t host_memory_left(void);

// Address space that `ulimit -v` leaves, in bytes; SIZE_MAX: there is no limit.
size_t address_space_left(void);

// OpenBLAS allocates this much for each thread, most before main, and tries for ever where there is no room.
#define OPENBLAS_THREAD_BYTES ((size_t)128 << 20)
