// The time that passes.
#ifndef LCE_BASE_CLOCK_H
#define LCE_BASE_CLOCK_H

#if defined(__cplusplus)
extern "C" {
#endif

double now_seconds(void); // monotonic; its zero means nothing

#if defined(__cplusplus)
}
#endif
#endif
