// Starts a program several times on this machine, as the ranks of one job: what torchrun does on one node, in
// C.
//
//   tools/launch 8 ./train --model llama-1b ...
//
// Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Signals are
// forwarded to all of them, once: they have process groups of their own, which the terminal's Ctrl-C does not
// reach. When one fails, the launcher prints which and how, ends the others by SIGTERM and two seconds later
// by SIGKILL, and exits with the status of the one that failed.
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/fail.h"
#include "base/system.h"

enum { MAX_RANKS = 1024, SIGTERM_SECONDS = 2 };

static pid_t children[MAX_RANKS]; // 0: gone
static int count;
static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP};
enum { FORWARDED = sizeof forwarded / sizeof *forwarded };

static void signal_all(int number) {
  for (int i = 0; i < count; i++)
    if (children[i] > 0) kill(children[i], number);
}

static void forward(int number) {
  int before = errno;
  signal_all(number);
  errno = before;
}

// A port of the loopback interface that is free now, for the one socket of a job: NCCL's, where rank 0 listens while the
// ranks connect (mpirun's ranks have none). No other machine reaches it. NCCL does not authenticate who connects to a
// port that it is told, so another user of this machine could take the port, or a rank's place: start the ranks with
// mpirun where that matters, since NCCL's id is then a secret of theirs.
static int free_port(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int probe = socket(AF_INET, SOCK_STREAM, 0);
  if (probe < 0 || bind(probe, (struct sockaddr *)&address, sizeof address) ||
      getsockname(probe, (struct sockaddr *)&address, &length))
    fail("there is no free port on this machine: %s", strerror(errno));
  close(probe);
  int port = ntohs(address.sin_port);
  return port > 65000 ? 65000 : port;
}

static void set_number(const char *name, int value) {
  char text[16];
  snprintf(text, sizeof text, "%d", value);
  setenv(name, text, 1);
}

static void start(int rank, int port, char **command, const sigset_t *signals) {
  pid_t parent = getpid(), child = fork();
  if (child < 0) fail("cannot start rank %d: %s", rank, strerror(errno));
  if (child > 0) {
    children[rank] = child;
    return;
  }
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL); // no rank outlives the launcher
  if (getppid() != parent) _exit(1);
  sigprocmask(SIG_SETMASK, signals, NULL);
  set_number("RANK", rank);
  set_number("LOCAL_RANK", rank);
  set_number("WORLD_SIZE", count);
  set_number("LOCAL_WORLD_SIZE", count);
  set_number("MASTER_PORT", port);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("LCE_LAUNCHER", "tools/launch", 1);
  unsetenv("TORCHELASTIC_RUN_ID"); // this is not torchrun, even when run under it
  execvp(command[0], command);
  fprintf(stderr, "lce: cannot start %s: %s\n", command[0], strerror(errno));
  _exit(127);
}

static void report(int rank, int status) {
  if (WIFSIGNALED(status))
    fprintf(stderr,
            "tools/launch: rank %d (process %d) was killed by signal %d (%s); the other ranks are ended\n",
            rank, (int)children[rank], WTERMSIG(status), strsignal(WTERMSIG(status)));
  else
    fprintf(stderr, "tools/launch: rank %d (process %d) exited with status %d; the other ranks are ended\n",
            rank, (int)children[rank], WEXITSTATUS(status));
}

// Waits for all; returns the status of the first that failed.
static int wait_for_all(void) {
  int left = count, result = 0;
  double failed_at = 0;
  while (left) {
    int status, rank = 0;
    pid_t gone = waitpid(-1, &status, result ? WNOHANG : 0);
    if (gone > 0) {
      while (rank < count && children[rank] != gone) rank++;
      if (rank == count) continue; // started by what became this process by exec
      if (status && !result) {
        result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        failed_at = now_seconds();
        report(rank, status);
        signal_all(SIGTERM);
      }
      children[rank] = 0;
      left--;
      continue;
    }
    if (gone < 0 && errno != EINTR) break;
    if (!result) continue; // a signal came, and was forwarded
    if (now_seconds() - failed_at > SIGTERM_SECONDS) signal_all(SIGKILL);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  }
  return result;
}

int main(int argc, char **argv) {
  char *end = NULL;
  long ranks = argc > 2 ? strtol(argv[1], &end, 10) : 0;
  if (argc < 3 || *end || ranks < 1 || ranks > MAX_RANKS) {
    fprintf(stderr, "usage: tools/launch RANKS ./train ...   (RANKS processes on this machine, 1 to %d)\n",
            MAX_RANKS);
    return 64;
  }
  count = (int)ranks;
  // Held back until all are there, so that none misses one.
  sigset_t held, before;
  sigemptyset(&held);
  for (int i = 0; i < FORWARDED; i++) sigaddset(&held, forwarded[i]);
  sigprocmask(SIG_BLOCK, &held, &before);
  struct sigaction action = {.sa_handler = forward};
  for (int i = 0; i < FORWARDED; i++) {
    struct sigaction old;
    sigaction(forwarded[i], &action, &old);
    if (forwarded[i] == SIGHUP && old.sa_handler == SIG_IGN)
      signal(SIGHUP, SIG_IGN); // nohup: the ranks', too
  }
  int port = free_port();
  for (int rank = 0; rank < count; rank++) start(rank, port, argv + 2, &before);
  sigprocmask(SIG_SETMASK, &before, NULL);
  return wait_for_all();
}
