// The clock, and copies of large blocks.
#pragma once

#include <stddef.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

double now_seconds(void); // monotonic

// A line such as "VmHWM:   12345 kB" of /proc/self/status or /proc/meminfo, in bytes; 0 when there is none.
size_t system_bytes(const char *path, const char *field);

// memcpy with all threads where it is large: one alone saturates neither the memory nor its page faults.
void copy_bytes(void *to, const void *from, size_t bytes);

__END_DECLS
