// The clock, and copies of large blocks.
#pragma once

#include <stddef.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

double now_seconds(void); // monotonic

// A figure of the system's, in bytes: in /proc/self/status or /proc/meminfo a line such as "VmHWM:   12345 kB"; 0 when there
// is none.
size_t system_bytes(const char *path, const char *field);

// memcpy with all threads where that pays: one thread alone neither saturates the memory's bandwidth nor
// handles the page faults of a mapped file or of fresh memory fast enough.
void copy_bytes(void *to, const void *from, size_t bytes);

__END_DECLS
