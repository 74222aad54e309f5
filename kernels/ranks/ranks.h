// A process that trains together with others, from its first line to its last.
//
// Rank 0 speaks for all: the others' standard output goes nowhere, and what they fail() with travels to rank
// 0, which prints it with the rank's name, ends everyone and exits with status 1. A thread in every process
// watches over the job: when a rank ends without a word, or when none has got on for a while, it says so in
// one sentence and the job ends. Without a launcher all of this is nothing: no thread, no socket, no MPI.
#ifndef LCE_KERNELS_RANKS_RANKS_H
#define LCE_KERNELS_RANKS_RANKS_H

#include "kernels/ranks/launch.h"

#include <stddef.h>

#if defined(__cplusplus)
extern "C" {
#endif

// Reads what the launcher says, meets the other ranks and starts the watch. Call it first in main; ranks_end
// follows at exit by itself. MPI is initialised only where mpirun, or an srun that speaks to MPI, started the
// process.
const Launch *ranks_begin(void);

// This process's place; rank 0 of 1 before ranks_begin and without a launcher.
const Launch *ranks_self(void);

// Rank 0's bytes, at most RANKS_SHARED, to everyone. Call it on all ranks. Waits.
enum { RANKS_SHARED = 1024 };
void ranks_share(void *bytes, size_t count);

// Nobody gets on for so many seconds: then the job ends. 300 until somebody says otherwise.
void ranks_set_timeout(double seconds);

// Where this process is, for the watch: `operation` (a literal) until ranks_leave. Collectives are counted,
// so that a rank that has not come to one can be named.
void ranks_enter(const char *operation, bool collective);
void ranks_leave(void);
// A sign of life, from whatever may take long.
void ranks_alive(void);

// What the watch asks about the device from its own thread, now and then: a failure as a sentence (true), or
// where the device stands (false; may be left empty). NULL: nothing.
typedef bool (*RanksDevice)(void *context, char *text, size_t size);
void ranks_watch_device(RanksDevice device, void *context);

// Errors of the others' command lines are those of rank 0's: while muted, the others' standard error goes
// nowhere.
void ranks_mute_others(bool muted);

#if defined(__cplusplus)
}
#endif
#endif
