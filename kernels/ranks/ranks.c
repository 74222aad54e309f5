#include "kernels/ranks/ranks.h"

#include <fcntl.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fail.h"
#include "kernels/ranks/mpi.h"
#include "kernels/ranks/watch.h"

enum { MEETING_SECONDS = 300 };

static Launch self = {.ranks = 1};

const Launch *ranks_self(void) {
  return &self;
}

// Where rank 0 listens, which a launcher without MASTER_ADDR leaves to MPI to tell.
typedef struct {
  char address[sizeof self.address];
  int port;
} Place;

static Place agree_on_place(int port) {
  Place place = {.port = self.port};
  if (*self.address) {
    memcpy(place.address, self.address, sizeof place.address);
    return place;
  }
  place.port = port;
  if (self.local_ranks == self.ranks)
    strcpy(place.address, "127.0.0.1");
  else
    gethostname(place.address, sizeof place.address - 1);
  if (mpi_is_there()) mpi_share(&place, sizeof place);
  return place;
}

static void require_a_way_to_meet(void) {
  if (*self.address || mpi_is_there()) return;
  if (self.rank) _exit(1); // rank 0 says it
  fail("%s started %d ranks, and this build has no MPI to find them with; set MASTER_ADDR and MASTER_PORT, "
       "or start them with torchrun or tools/launch",
       self.launcher, self.ranks);
}

// Ranks of one machine share its cores, unless the launcher has given each its own.
static void share_cores(void) {
  int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), local = self.local_ranks ? self.local_ranks : self.ranks;
  if (getenv("OMP_NUM_THREADS") || omp_get_num_procs() < cores) return;
  omp_set_num_threads(cores / local > 1 ? cores / local : 1);
}

static void end(void) {
  watch_end();
  mpi_end();
}

const Launch *ranks_begin(void) {
  self = launch_read();
  if (self.ranks == 1) return &self;
  if (self.rank != 0 && !freopen("/dev/null", "w", stdout)) fail("rank %d cannot open /dev/null", self.rank);
  Peer *peers = calloc((size_t)self.ranks, sizeof *peers); // the watch's until the process ends
  if (!peers) fail("out of host memory for %d ranks", self.ranks);
  for (int r = 0; r < self.ranks; r++) peers[r].socket = -1;
  watch_prepare(&self, peers);
  if (self.mpi) mpi_begin(&self);
  require_a_way_to_meet();
  int listener = -1, port = 0;
  if (self.rank == 0) listener = meet_listen(&self, &port);
  Place place = agree_on_place(port);
  meet_everyone(&self, listener, place.address, place.port, MEETING_SECONDS, peers);
  watch_begin();
  atexit(end);
  share_cores();
  return &self;
}

void ranks_mute_others(bool muted) {
  static int before = -1;
  if (self.rank == 0) return;
  if (muted) {
    before = dup(STDERR_FILENO);
    int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (nowhere >= 0) dup2(nowhere, STDERR_FILENO), close(nowhere);
  } else if (before >= 0) {
    dup2(before, STDERR_FILENO);
    close(before);
  }
}
