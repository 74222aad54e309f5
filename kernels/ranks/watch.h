// The thread that keeps the ranks of a job together; see ranks.h for what it is for. One a process.
#ifndef LCE_KERNELS_RANKS_WATCH_H
#define LCE_KERNELS_RANKS_WATCH_H

#include "kernels/ranks/meet.h"
#include "kernels/ranks/ranks.h"

// From here on fail() is told to rank 0. `peers` may still lack their sockets; they must stay where they are.
void watch_prepare(const Launch *launch, Peer *peers);
// Starts the thread, when all sockets are there.
void watch_begin(void);
// Tells the others that this process is done, and waits until all are.
void watch_end(void);

#endif
