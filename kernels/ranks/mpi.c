#include "kernels/ranks/mpi.h"

#include "base/fail.h"

#ifdef HAVE_MPI
#include <mpi.h>

static bool begun;

bool mpi_begin(const Launch *l) {
  int level, rank, ranks;
  // The watch runs beside in a thread of its own and never calls MPI.
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level)) fail("MPI_Init_thread failed");
  begun = true;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (rank != l->rank || ranks != l->ranks)
    fail("%s started rank %d of %d, and the MPI that this program was built with sees rank %d of %d: take "
         "the %s of "
         "that MPI%s",
         l->launcher, l->rank, l->ranks, rank, ranks, l->launcher[0] == 's' ? "plug-in" : "mpirun",
         l->launcher[0] == 's' ? " (srun --mpi=pmix)" : "");
  return true;
}

void mpi_share(void *bytes, int count) {
  if (MPI_Bcast(bytes, count, MPI_BYTE, 0, MPI_COMM_WORLD)) fail("MPI failed to broadcast %d bytes", count);
}

void mpi_end(void) {
  if (begun) MPI_Finalize();
  begun = false;
}

bool mpi_is_there(void) {
  return begun;
}

#else

bool mpi_begin(const Launch *l) {
  (void)l;
  return false;
}

void mpi_share(void *bytes, int count) {
  (void)bytes;
  (void)count;
}

void mpi_end(void) {}

bool mpi_is_there(void) {
  return false;
}

#endif
