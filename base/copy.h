// Copies of large blocks.
#ifndef LCE_BASE_COPY_H
#define LCE_BASE_COPY_H

#include <stddef.h>

#if defined(__cplusplus)
extern "C" {
#endif

// memcpy by all threads where that pays: one alone neither fills the memory's bandwidth nor is quick enough
// with the page faults of a mapped file or of fresh memory.
void copy_bytes(void *to, const void *from, size_t bytes);

#if defined(__cplusplus)
}
#endif

#endif
