#include "kernels/ranks/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"

// The number in an environment variable; `otherwise` where it is not set.
static int number(const char *name, int otherwise) {
  const char *text = name ? getenv(name) : NULL;
  if (!text || !*text) return otherwise;
  char *end;
  long value = strtol(text, &end, 10);
  if (*end || value < 0 || value > 1 << 24) fail("the environment says %s=%s, which is no count", name, text);
  return (int)value;
}

// The variables of one launcher. It has started this process where all of `rank`, `ranks` and `only_with` are
// set.
typedef struct {
  const char *name, *rank, *ranks, *local_rank, *local_ranks, *only_with, *job;
} Dialect;

static const Dialect dialects[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL, "TORCHELASTIC_RUN_ID"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", NULL, "PMIX_NAMESPACE"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_LOCALNRANKS", NULL},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL, "SLURM_STEP_ID", "SLURM_JOB_ID"},
};

static bool is_set(const char *name) {
  return !name || (getenv(name) && *getenv(name));
}

static const Dialect *spoken(void) {
  for (size_t i = 0; i < sizeof dialects / sizeof *dialects; i++)
    if (is_set(dialects[i].rank) && is_set(dialects[i].ranks) && is_set(dialects[i].only_with))
      return &dialects[i];
  return NULL;
}

void launch_first_host(const char *list, char *host, int size) {
  int stem = (int)strcspn(list, "[,");
  const char *numbers = list[stem] == '[' ? list + stem + 1 : "";
  snprintf(host, (size_t)size, "%.*s%.*s", stem, list, (int)strcspn(numbers, "-,]"), numbers);
}

static uint64_t mixed(uint64_t hash, const char *text) {
  for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 0x100000001B3u; // FNV-1a
  return hash;
}

// Where rank 0 listens. A job of Slurm names its machines and has a number, from which a port follows.
static void find_address(Launch *l) {
  const char *address = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
  l->port = number("MASTER_PORT", 0);
  if (address) snprintf(l->address, sizeof l->address, "%s", address);
  if (strcmp(l->launcher, "srun") == 0) {
    if (!nodes) nodes = getenv("SLURM_NODELIST");
    if (!address && nodes) launch_first_host(nodes, l->address, sizeof l->address);
    const char *from = getenv("SLURM_LAUNCH_NODE_IPADDR");
    if (!address && !nodes && from) snprintf(l->address, sizeof l->address, "%s", from);
    if (!l->port) l->port = 20000 + (int)(l->job % 20000);
  }
  // torchrun's own store often listens at MASTER_PORT itself.
  if (getenv("TORCHELASTIC_RUN_ID") && l->port) l->port++;
  if (*l->address && !l->port && strcmp(l->launcher, "mpirun") != 0)
    fail("MASTER_ADDR is set and MASTER_PORT is not: the launcher sets both, or neither");
}

Launch launch_read(void) {
  Launch l = {.ranks = 1};
  const Dialect *d = spoken();
  if (!d) return l;
  int rank = number(d->rank, 0), ranks = number(d->ranks, 1);
  if (rank >= ranks)
    fail("the environment says %s=%d and %s=%d; ranks count from 0", d->rank, rank, d->ranks, ranks);
  if (ranks == 1) return l;
  l = (Launch){.launcher = d->name, .rank = rank, .ranks = ranks};
  l.local_rank = number(d->local_rank, rank);
  l.local_ranks = number(d->local_ranks, 0);
  if (number("SLURM_STEP_NUM_NODES", 0) == 1 && !l.local_ranks) l.local_ranks = ranks;
  l.job = mixed(0xCBF29CE484222325u, d->name);
  if (d->job && getenv(d->job)) l.job = mixed(l.job, getenv(d->job));
  if (getenv("SLURM_STEP_ID")) l.job = mixed(l.job, getenv("SLURM_STEP_ID"));
  if (getenv("MASTER_PORT")) l.job = mixed(l.job, getenv("MASTER_PORT"));
  l.mpi = strcmp(d->name, "mpirun") == 0 || getenv("PMIX_RANK") || getenv("PMI_RANK");
  if (strcmp(d->name, "torchrun") == 0) l.mpi = false;
  find_address(&l);
  if (getenv("LCE_LAUNCHER")) l.launcher = getenv("LCE_LAUNCHER"); // tools/launch speaks torchrun's dialect
  return l;
}
