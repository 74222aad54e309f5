// Reads this process's rank among how many from the environment that launchers set. Nothing is started here.
//
//   torchrun and tools/launch   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   mpirun                      OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE} (Open MPI); PMI_RANK,
//                               PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH and its derivatives)
//   srun                        SLURM_STEP_ID, SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST
//
// MASTER_ADDR and MASTER_PORT count under every launcher. A job of one process is one without a launcher.
#pragma once

#include <stdbool.h>

typedef struct {
  const char *launcher;        // "torchrun", "mpirun", "srun"; NULL: this is the only process
  int rank, ranks;             // 0 and 1 without a launcher
  int local_rank, local_ranks; // on this machine; local_ranks: 0 if the launcher does not say
  char address[256];           // rank 0's machine; empty if the launcher does not say
  int port;                    // free on that machine; 0 if the launcher does not say
  bool mpi;                    // MPI_Init finds the other ranks
  bool forwarded; // the launcher gives standard output a terminal, whatever its own is; for one rank too
} Launch;

// Fails with a sentence if the environment contradicts itself.
Launch launch_read(void);

// The first host of a Slurm list such as "gpu[03-06,9],login": "gpu03". Writes at most `size` bytes.
void launch_first_host(const char *list, char *host, int size);
