#include "kernels/ranks/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/fail.h"
#include "kernels/base/random.h"

// An environment variable as a number; `otherwise` if it is not set.
static int number(const char *name, int otherwise) {
  const char *text = name ? getenv(name) : NULL;
  if (!text || !*text) return otherwise;
  char *end;
  long value = strtol(text, &end, 10);
  if (*end || value < 0 || value > 1 << 24) fail("the environment says %s=%s, which is no count", name, text);
  return (int)value;
}

// A launcher's variables. It has started this process where `rank`, `ranks` and `required` are all set.
typedef struct {
  const char *name, *rank, *ranks, *local_rank, *local_ranks, *required;
} Launcher;

static const Launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", NULL},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_LOCALNRANKS"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL, "SLURM_STEP_ID"},
};

static bool is_set(const char *name) {
  return !name || (getenv(name) && *getenv(name));
}

static const Launcher *find_launcher(void) {
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
    if (is_set(launchers[i].rank) && is_set(launchers[i].ranks) && is_set(launchers[i].required))
      return &launchers[i];
  return NULL;
}

void launch_first_host(const char *list, char *host, int size) {
  int stem = (int)strcspn(list, "[,");
  const char *numbers = list[stem] == '[' ? list + stem + 1 : "";
  snprintf(host, (size_t)size, "%.*s%.*s", stem, list, (int)strcspn(numbers, "-,]"), numbers);
}

// Hashes a job step's id, so that steps on one machine differ; unhashed, ids in a pattern would meet.
static int slurm_port(void) {
  const char *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
  uint64_t id = strtoull(job ? job : "0", NULL, 10) << 32 ^ strtoull(step ? step : "0", NULL, 10);
  return 20000 + (int)(random_bits(id, 0, 0) % 20000);
}

static void find_address(Launch *l) {
  const char *address = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
  bool slurm = strcmp(l->launcher, "srun") == 0;
  l->port = number("MASTER_PORT", slurm ? slurm_port() : 0);
  if (!nodes) nodes = getenv("SLURM_NODELIST");
  if (address)
    snprintf(l->address, sizeof l->address, "%s", address);
  else if (slurm && nodes)
    launch_first_host(nodes, l->address, sizeof l->address);
  else if (slurm && getenv("SLURM_LAUNCH_NODE_IPADDR"))
    snprintf(l->address, sizeof l->address, "%s", getenv("SLURM_LAUNCH_NODE_IPADDR"));
  // torchrun's own store often listens at MASTER_PORT itself.
  if (getenv("TORCHELASTIC_RUN_ID") && l->port) l->port++;
  if (*l->address && !l->port && strcmp(l->launcher, "mpirun") != 0)
    fail("MASTER_ADDR is set and MASTER_PORT is not: the launcher sets both, or neither");
}

Launch launch_read(void) {
  const Launcher *from = find_launcher();
  if (!from) return (Launch){.ranks = 1};
  int rank = number(from->rank, 0), ranks = number(from->ranks, 1);
  if (rank >= ranks)
    fail("the environment says %s=%d and %s=%d; ranks count from 0", from->rank, rank, from->ranks, ranks);
  bool mpirun = strcmp(from->name, "mpirun") == 0, torchrun = strcmp(from->name, "torchrun") == 0;
  if (ranks == 1) return (Launch){.ranks = 1, .forwarded = mpirun};
  Launch l = {.launcher = from->name,
              .rank = rank,
              .ranks = ranks,
              .local_rank = number(from->local_rank, rank),
              .local_ranks = number(from->local_ranks, 0),
              .mpi = mpirun || (!torchrun && (getenv("PMIX_RANK") || getenv("PMI_RANK"))),
              .forwarded = mpirun};
  if (number("SLURM_STEP_NUM_NODES", 0) == 1 && !l.local_ranks) l.local_ranks = ranks;
  find_address(&l);
  if (getenv("LCE_LAUNCHER")) l.launcher = getenv("LCE_LAUNCHER"); // tools/launch sets torchrun's variables
  return l;
}
