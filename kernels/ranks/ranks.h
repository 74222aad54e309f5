// A process as one rank of a job: its standard output, how it fails, and a watchdog against hangs. Ranks
// exchange data through collectives alone (kernels/*/collectives.*), and launchers end a job if one of its
// processes fails.
//
//   standard output   rank 0's alone; the others' goes nowhere, and they print no warnings
//   fail()            prints "lce: rank K: sentence" and ends this process with status 1, and under MPI the
//                     job. Ranks other than 0 wait a moment first: where all fail alike, rank 0's sentence
//                     comes and the launcher ends the others.
//   the watchdog      a thread that ends the job when this process makes no progress for the timeout, or when
//                     the device reports an error
//
// Without a launcher there is no thread and no MPI.
#pragma once

#include "kernels/ranks/launch.h"

#include <stddef.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

// Reads the launcher's environment, initialises MPI where mpirun (or srun with PMI) started the process, and
// starts the watchdog. Call it first in main; MPI_Finalize follows at exit.
const Launch *ranks_begin(void);

// This process's place; rank 0 of 1 before ranks_begin and without a launcher.
const Launch *ranks_self(void);

bool ranks_have_mpi(void);
// Rank 0's bytes to all ranks, by MPI_Bcast; without MPI nothing.
void ranks_broadcast(void *bytes, int count);

// The watchdog ends the job after `seconds` without progress; 300 before the first call. A process that waits
// for others (between ranks_enter and ranks_leave) has a few seconds more: the one that hangs reports first.
void ranks_set_timeout(double seconds);
void ranks_alive(void);                  // progress, reported by whatever may take long
void ranks_enter(const char *operation); // a literal; waits for other ranks or the device
void ranks_leave(void);

// The watchdog calls this from its own thread, five times a second. True: the device has an error, a sentence
// in `text`; false: `text` tells its progress in unfinished collectives (empty: none). NULL: no queries.
typedef bool (*RanksDevice)(void *context, char *text, size_t size);
void ranks_watch_device(RanksDevice device, void *context);

__END_DECLS
