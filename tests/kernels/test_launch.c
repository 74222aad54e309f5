// The launchers' environment variables are understood.
#include "kernels/ranks/launch.h"
#include "tests/data_files.h"

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

// launcher rank/ranks local rank/local ranks address:port.
static void check(Launch l, const char *want) {
  char got[512];
  snprintf(got, sizeof got, "%s %d/%d %d/%d %s:%d%s", l.launcher ? l.launcher : "none", l.rank, l.ranks,
           l.local_rank, l.local_ranks, l.address, l.port, l.mpi ? " mpi" : "");
  assert_string_equal(got, want);
}

#define TORCHRUN  "RANK", "3", "WORLD_SIZE", "8", "MASTER_ADDR", "a.b", "MASTER_PORT", "29500"
#define SRUN(job) "SLURM_STEP_ID", "0", "SLURM_JOB_ID", job, "SLURM_PROCID", "5", "SLURM_NTASKS", "16"

TEST(variables_of_launchers_are_read) {
  check(LAUNCHED("HOME", "/"), "none 0/1 0/0 :0");
  check(LAUNCHED(TORCHRUN, "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2"), "torchrun 3/8 1/2 a.b:29500");
  // torchrun's own store listens at the port it names.
  check(LAUNCHED(TORCHRUN, "LOCAL_RANK", "1", "LOCAL_WORLD_SIZE", "2", "TORCHELASTIC_RUN_ID", "x"),
        "torchrun 3/8 1/2 a.b:29501");
  check(LAUNCHED("OMPI_COMM_WORLD_RANK", "2", "OMPI_COMM_WORLD_SIZE", "4", "OMPI_COMM_WORLD_LOCAL_RANK", "0",
                 "OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        "mpirun 2/4 0/2 :0 mpi");
  Launch l = LAUNCHED(SRUN("77"), "SLURM_LOCALID", "1", "SLURM_STEP_NODELIST", "gpu[03-06,9],x7");
  assert_true(l.rank == 5 && l.ranks == 16 && l.local_rank == 1 && l.port >= 20000 && !l.mpi);
  assert_string_equal(l.launcher, "srun");
  assert_string_equal(l.address, "gpu03");
  assert_int_not_equal(LAUNCHED(SRUN("277"), "SLURM_STEP_NODELIST", "gpu03").port, l.port);
  // A batch script of Slurm is no step; a job of one process needs no others.
  assert_int_equal(LAUNCHED("SLURM_PROCID", "0", "SLURM_NTASKS", "16").ranks, 1);
  assert_null(LAUNCHED("OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_SIZE", "1").launcher);
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

TEST_MAIN(tests_run("launch", NULL, NULL))
