// The little of MPI that the start and the end of a job need.
#ifndef LCE_KERNELS_RANKS_MPI_H
#define LCE_KERNELS_RANKS_MPI_H

#include "kernels/ranks/launch.h"

#include <stddef.h>

// Initialises MPI; false when the program was built without. Fails when MPI sees another job than the
// launcher's.
bool mpi_begin(const Launch *launch);
void mpi_share(void *bytes, int count); // rank 0's to everyone
void mpi_end(void);                     // nothing where mpi_begin was not called
bool mpi_is_there(void);                // between the two

#endif
