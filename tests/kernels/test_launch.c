// What launchers say in the environment is understood.
#include "kernels/ranks/launch.h"
#include "tests/data_files.h"
#include "tests/test.h"

// Sets pairs of names and values, and unsets all else that a launcher may set.
static void set(const char *const *pairs) {
  char known[] = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID "
                 "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
                 "OMPI_COMM_WORLD_LOCAL_SIZE SLURM_STEP_ID SLURM_JOB_ID SLURM_PROCID SLURM_NTASKS "
                 "SLURM_LOCALID SLURM_STEP_NODELIST PMIX_RANK PMI_RANK PMI_SIZE ";
  for (char *name = strtok(known, " "); name; name = strtok(NULL, " ")) unsetenv(name);
  for (; *pairs; pairs += 2) setenv(pairs[0], pairs[1], 1);
}

#define LAUNCHED(...) (set((const char *const[]){__VA_ARGS__, NULL}), launch_read())

TEST(variables_of_launchers_are_read) {
  set((const char *const[]){NULL});
  Launch l = launch_read();
  assert_null(l.launcher);
  assert_int_equal(l.ranks, 1);
  l = LAUNCHED("RANK", "3", "WORLD_SIZE", "8", "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2", "MASTER_ADDR",
               "a.b", "MASTER_PORT", "29500");
  assert_string_equal(l.launcher, "torchrun");
  assert_true(l.rank == 3 && l.ranks == 8 && l.local_rank == 1 && l.local_ranks == 2 && l.port == 29500 &&
              !l.mpi);
  assert_string_equal(l.address, "a.b");
  l = LAUNCHED("RANK", "3", "WORLD_SIZE", "8", "MASTER_ADDR", "a.b", "MASTER_PORT", "29500",
               "TORCHELASTIC_RUN_ID", "x");
  assert_int_equal(l.port, 29501); // torchrun's own store listens at the other
  l = LAUNCHED("OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_RANK", "0",
               "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  assert_string_equal(l.launcher, "mpirun");
  assert_true(l.rank == 2 && l.ranks == 4 && l.local_rank == 0 && l.local_ranks == 2 && l.mpi);
  l = LAUNCHED("SLURM_STEP_ID", "0", "SLURM_JOB_ID", "77", "SLURM_PROCID", "5", "SLURM_NTASKS", "16",
               "SLURM_LOCALID", "1", "SLURM_STEP_NODELIST", "gpu[03-06,9],x7");
  assert_string_equal(l.launcher, "srun");
  assert_true(l.rank == 5 && l.ranks == 16 && l.local_rank == 1 && l.port >= 20000 && !l.mpi);
  assert_string_equal(l.address, "gpu03");
  int port = l.port; // of job 77; that of job 277 is another
  l = LAUNCHED("SLURM_STEP_ID", "0", "SLURM_JOB_ID", "277", "SLURM_PROCID", "5", "SLURM_NTASKS", "16",
               "SLURM_STEP_NODELIST", "gpu03");
  assert_int_not_equal(l.port, port);
  // A batch script of Slurm is no step; a job of one process needs no others.
  l = LAUNCHED("SLURM_PROCID", "0", "SLURM_NTASKS", "16");
  assert_int_equal(l.ranks, 1);
  l = LAUNCHED("OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_SIZE", "1");
  assert_null(l.launcher);
  ASSERT_FAILS(LAUNCHED("RANK", "8", "WORLD_SIZE", "8"), "RANK=8", "WORLD_SIZE=8");
  ASSERT_FAILS(LAUNCHED("RANK", "x", "WORLD_SIZE", "8"), "RANK=x");
  ASSERT_FAILS(LAUNCHED("RANK", "1", "WORLD_SIZE", "8", "MASTER_ADDR", "a"), "MASTER_PORT");
  set((const char *const[]){NULL});
}

TEST(the_first_host_of_a_list) {
  static const char *const lists[][2] = {{"node", "node"},         {"a1,b2", "a1"},    {"gpu-[1-3]", "gpu-1"},
                                         {"n[007,9]-x,m", "n007"}, {"c[12],d", "c12"}, {"", ""}};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    char host[64];
    launch_first_host(lists[i][0], host, sizeof host);
    assert_string_equal(host, lists[i][1]);
  }
}

int main(void) {
  return tests_run("launch", NULL, NULL);
}
