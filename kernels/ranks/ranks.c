#include "kernels/ranks/ranks.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/base/fail.h"
#include "kernels/base/system.h"

#ifdef HAVE_MPI
#include <mpi.h>
#endif

// Waits: ranks other than 0 before they print why they fail; the watchdog between looks; for MPI_Abort.
enum { RANK_0_FIRST_MILLISECONDS = 1500, WATCH_MILLISECONDS = 200, ABORT_SECONDS = 5 };

static Launch self = {.ranks = 1};
static bool mpi; // initialised

const Launch *ranks_self(void) {
  return &self;
}

static void pause_for(int milliseconds) {
  nanosleep(&(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L},
            NULL);
}

// --- MPI ---------------------------------------------------------------------------------------------------

bool ranks_have_mpi(void) {
  return mpi;
}

#ifdef HAVE_MPI
static void mpi_begin(void) {
  int level, rank, ranks;
  // The watchdog calls MPI_Abort while the main thread may be in a collective.
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level)) fail("MPI_Init_thread failed");
  mpi = true;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  bool slurm = strcmp(self.launcher, "srun") == 0;
  if (rank != self.rank || ranks != self.ranks)
    fail("%s started rank %d of %d, and the MPI that this program was built with reports rank %d of %d: use "
         "the %s of that MPI%s",
         self.launcher, self.rank, self.ranks, rank, ranks, slurm ? "plug-in" : "mpirun",
         slurm ? " (srun --mpi=pmix)" : "");
}

static void mpi_end(void) {
  ranks_enter("MPI_Finalize");
  MPI_Finalize();
}

// Ends all ranks; alarm() ends this one should MPI itself hang.
static void mpi_abort(int status) {
  alarm(ABORT_SECONDS);
  MPI_Abort(MPI_COMM_WORLD, status);
}

void ranks_broadcast(void *bytes, int count) {
  if (!mpi) return;
  ranks_enter("MPI_Bcast");
  if (MPI_Bcast(bytes, count, MPI_BYTE, 0, MPI_COMM_WORLD)) fail("MPI failed to broadcast %d bytes", count);
  ranks_leave();
}
#else
#define mpi_begin()       ((void)0)
#define mpi_end()         ((void)0)
#define mpi_abort(status) ((void)(status))

void ranks_broadcast(void *bytes, int count) {}
#endif

// --- failing -----------------------------------------------------------------------------------------------

// When several threads fail, only the first prints. `sentence` may be NULL on rank 0. Other ranks wait, one a
// little longer than the other. The process ends by _exit: libraries that wait for other ranks at exit would
// never return.
static void end_job(const char *sentence, int status, int milliseconds, int more_each) {
  static pthread_mutex_t printing = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&printing);
  if (self.rank) {
    signal(SIGTERM, SIG_DFL); // from the launcher, when rank 0 has printed it
    pause_for(milliseconds + more_each * (self.rank < 16 ? self.rank : 16));
  }
  if (!ftrylockfile(stdout)) { // another thread may never release it
    fflush(stdout);
    funlockfile(stdout);
  }
  if (self.rank)
    dprintf(STDERR_FILENO, "lce: rank %d: %s\n", self.rank, sentence);
  else if (sentence)
    dprintf(STDERR_FILENO, "lce: %s\n", sentence);
  if (mpi) mpi_abort(status);
  _exit(status);
}

static void on_fail(const char *sentence) {
  end_job(sentence, 1, RANK_0_FIRST_MILLISECONDS, 100);
}

// --- the watchdog ------------------------------------------------------------------------------------------

static _Atomic(const char *) waiting_in; // of ranks_enter; NULL outside
static _Atomic uint64_t progress;        // counts ranks_alive
static _Atomic double timeout = 300;
static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;
static RanksDevice device;
static void *device_context;

void ranks_set_timeout(double seconds) {
  timeout = seconds;
}

void ranks_alive(void) {
  atomic_fetch_add_explicit(&progress, 1, memory_order_relaxed);
}

void ranks_enter(const char *operation) {
  atomic_store_explicit(&waiting_in, operation, memory_order_relaxed);
  ranks_alive();
}

void ranks_leave(void) {
  ranks_enter(NULL);
}

void ranks_watch_device(RanksDevice function, void *context) {
  pthread_mutex_lock(&device_lock);
  device = function;
  device_context = context;
  pthread_mutex_unlock(&device_lock);
}

static void end_without_progress(double seconds, const char *operation, const char *where) {
  char sentence[1024], about[520] = "";
  if (*where) snprintf(about, sizeof about, " (%s)", where);
  snprintf(sentence, sizeof sentence, "no progress for %.0f s%s%s%s: %s; the job ends (--timeout)", seconds,
           operation ? " in " : ", between collectives", operation ? operation : "", about,
           operation ? "another rank has not reached it, or has ended" : "this rank holds up the others");
  end_job(sentence, 1, 0, 50);
}

static void *watch(void *unused) {
  uint64_t seen = 0;
  double idle = 0;
  for (double before = now_seconds();;) {
    pause_for(WATCH_MILLISECONDS);
    double passed = now_seconds() - before;
    before += passed;
    idle += fmin(passed, 1); // a process that was stopped and continued has not hung
    char about[480] = "";
    pthread_mutex_lock(&device_lock);
    bool broken = device && device(device_context, about, sizeof about);
    pthread_mutex_unlock(&device_lock);
    if (broken) on_fail(about);
    const char *operation = atomic_load(&waiting_in);
    if (!operation && *about) operation = "collectives"; // the host runs ahead of the GPU
    uint64_t now = atomic_load(&progress);
    if (now != seen) idle = 0;
    seen = now;
    double more = operation ? fmin(1 + timeout / 75, 5) : 0; // who holds up the others says so before they do
    if (idle >= timeout + more) end_without_progress(idle, operation, about);
  }
  return unused;
}

static void start_watchdog(void) {
  pthread_t thread;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
  if (pthread_create(&thread, NULL, watch, NULL)) fail("cannot start the thread that watches this rank");
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_detach(thread);
}

// --- the start ---------------------------------------------------------------------------------------------

// Ranks of one machine share its cores, unless the launcher has given each its own.
static void share_cores(void) {
  int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), local = self.local_ranks ? self.local_ranks : self.ranks;
  if (getenv("OMP_NUM_THREADS") || omp_get_num_procs() < cores) return;
  omp_set_num_threads(cores / local > 1 ? cores / local : 1);
}

// At exit. A rank that exits with an error, and not by fail(), ends the job too.
static void end(int status, void *unused) {
  char sentence[96];
  snprintf(sentence, sizeof sentence, "exits with status %d; its command run alone may say why", status);
  if (status) end_job(self.rank ? sentence : NULL, status, RANK_0_FIRST_MILLISECONDS, 100);
  if (mpi) mpi_end();
}

const Launch *ranks_begin(void) {
  self = launch_read();
  if (self.ranks == 1) return &self;
  if (self.rank) {
    warn_mute();
    if (!freopen("/dev/null", "w", stdout)) fail("rank %d cannot open /dev/null", self.rank);
  }
  fail_set_handler(on_fail);
  ranks_enter("MPI_Init");
  start_watchdog();
  if (self.mpi) mpi_begin();
  ranks_leave();
  on_exit(end, NULL);
  share_cores();
  return &self;
}
