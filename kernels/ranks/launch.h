// Which of how many processes this one is, from what launchers leave in the environment. Nothing is started
// here.
//
//   torchrun and tools/launch   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   mpirun                      OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE} (Open MPI); PMI_RANK, PMI_SIZE,
//                               MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH and its kin)
//   srun                        SLURM_STEP_ID, SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST
//
// MASTER_ADDR and MASTER_PORT count under every launcher. A job of one process is one without a launcher.
#ifndef LCE_KERNELS_RANKS_LAUNCH_H
#define LCE_KERNELS_RANKS_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
  const char *launcher;        // "torchrun", "mpirun", "srun"; NULL: this is the only process
  int rank, ranks;             // 0 of 1 without a launcher
  int local_rank, local_ranks; // on this machine; local_ranks is 0 where the launcher does not say
  char address[256];           // where rank 0 listens; empty where the launcher does not say
  int port;                    // the first of the ports that rank 0 tries; 0: any
  uint64_t job;                // tells jobs on one machine apart; the same on all ranks
  bool mpi;                    // a library of MPI would find the other ranks
} Launch;

// Fails in one sentence when the environment contradicts itself.
Launch launch_read(void);

// The first host of a Slurm list such as "gpu[03-06,9],login": "gpu03". Writes at most `size` bytes.
void launch_first_host(const char *list, char *host, int size);

#endif
