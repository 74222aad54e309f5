// Rank 0 speaks first: whoever connects hears a greeting with the job's number, and answers with its own
// rank. So a rank that knocks at a port where somebody else listens (torchrun's own store does) hears nothing
// or something else, says nothing, and tries the next port.
#include "kernels/ranks/meet.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/fail.h"

enum { PORTS = 16 }; // tried from the launcher's on

static const uint64_t MAGIC = 0x6C63652E72616E6Bu;

typedef struct {
  uint64_t magic, job;
} Greeting;

typedef struct {
  uint64_t magic, job;
  int32_t rank, ranks;
  int64_t pid;
  char host[64];
} Answer;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool meet_send(int socket, const void *bytes, size_t count) {
  for (const char *at = bytes; count;) {
    ssize_t sent = send(socket, at, count, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    count -= (size_t)sent;
  }
  return true;
}

bool meet_receive(int socket, void *bytes, size_t count) {
  for (char *at = bytes; count;) {
    ssize_t got = recv(socket, at, count, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    count -= (size_t)got;
  }
  return true;
}

static void set_patience(int socket, double seconds) {
  struct timeval t = {.tv_sec = (time_t)seconds,
                      .tv_usec = (suseconds_t)(1e6 * (seconds - (double)(time_t)seconds))};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
}

static void make_ready(int socket) {
  int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  set_patience(socket, 10); // for the rest of a message that has begun
}

// --- rank 0 ------------------------------------------------------------------------------------------------

// A socket that listens for both kinds of addresses where the machine has both.
static int listen_at(int port) {
  int both = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
  if (both >= 0) {
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    setsockopt(both, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    setsockopt(both, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!bind(both, (struct sockaddr *)&any, sizeof any) && !listen(both, 1024)) return both;
    close(both);
    if (errno == EADDRINUSE) return -1;
  }
  int plain = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (plain < 0) return -1;
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  setsockopt(plain, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!bind(plain, (struct sockaddr *)&any, sizeof any) && !listen(plain, 1024)) return plain;
  close(plain);
  return -1;
}

int meet_listen(const Launch *l, int *port) {
  int listener = -1;
  for (int i = 0; i < (l->port ? PORTS : 1) && listener < 0; i++)
    listener = listen_at(l->port ? l->port + i : 0);
  if (listener < 0)
    fail("rank 0 cannot listen at port %d or the %d after it: %s", l->port, PORTS - 1, strerror(errno));
  struct sockaddr_storage bound;
  socklen_t length = sizeof bound;
  getsockname(listener, (struct sockaddr *)&bound, &length);
  // The port stands at the same place in both kinds of address.
  *port = ntohs(((struct sockaddr_in *)&bound)->sin_port);
  return listener;
}

static void welcome(const Launch *l, int socket, Peer *peers, int *present) {
  Greeting greeting = {MAGIC, l->job};
  Answer answer;
  set_patience(socket, 5);
  bool heard = meet_send(socket, &greeting, sizeof greeting) &&
               meet_receive(socket, &answer, sizeof answer) && answer.magic == MAGIC && answer.job == l->job;
  if (!heard) { // somebody else's, or one that has given up
    close(socket);
    return;
  }
  if (answer.ranks != l->ranks || answer.rank <= 0 || answer.rank >= l->ranks ||
      peers[answer.rank].socket >= 0)
    fail("a process came as rank %d of %d to a job of %d: the launcher's environment is not the same "
         "everywhere",
         answer.rank, answer.ranks, l->ranks);
  make_ready(socket);
  Peer *peer = &peers[answer.rank];
  peer->socket = socket;
  peer->pid = (pid_t)answer.pid;
  memcpy(peer->host, answer.host, sizeof peer->host);
  peer->host[sizeof peer->host - 1] = 0;
  (*present)++;
}

static void require_all(const Launch *l, const Peer *peers, int present, double seconds) {
  if (present == l->ranks) return;
  int missing = 1;
  while (peers[missing].socket >= 0) missing++;
  fail("rank %d has not come within %.0f s (%d of %d ranks are there): was it started, and can it reach rank "
       "0?",
       missing, seconds, present, l->ranks);
}

static void wait_for_all(const Launch *l, int listener, Peer *peers, double seconds) {
  double end = now() + seconds;
  int present = 1;
  while (present < l->ranks && now() < end) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    if (poll(&ready, 1, 200) <= 0) continue;
    int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (socket >= 0) welcome(l, socket, peers, &present);
  }
  close(listener);
  require_all(l, peers, present, seconds);
}

// --- the others --------------------------------------------------------------------------------------------

static int connect_to(const char *address, int port) {
  char service[16];
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
  snprintf(service, sizeof service, "%d", port);
  if (getaddrinfo(address, service, &hints, &found)) return -1;
  int connected = -1;
  for (struct addrinfo *at = found; at && connected < 0; at = at->ai_next) {
    connected = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    if (connected < 0 || !connect(connected, at->ai_addr, at->ai_addrlen)) continue;
    close(connected);
    connected = -1;
  }
  freeaddrinfo(found);
  return connected;
}

// A connection to this job's rank 0, or -1.
static int knock(const Launch *l, const char *address, int port) {
  int socket = connect_to(address, port);
  if (socket < 0) return -1;
  Greeting greeting;
  set_patience(socket, 1);
  Answer answer = {MAGIC, l->job, l->rank, l->ranks, getpid(), ""};
  gethostname(answer.host, sizeof answer.host - 1);
  bool ours = meet_receive(socket, &greeting, sizeof greeting) && greeting.magic == MAGIC &&
              greeting.job == l->job && meet_send(socket, &answer, sizeof answer);
  if (!ours) {
    close(socket);
    return -1;
  }
  make_ready(socket);
  return socket;
}

static int reach(const Launch *l, const char *address, int port, double seconds) {
  double end = now() + seconds;
  int ports = l->port ? PORTS : 1;
  for (;;) {
    for (int i = 0; i < ports; i++) {
      int socket = knock(l, address, port + i);
      if (socket >= 0) return socket;
    }
    if (now() > end)
      fail("rank %d cannot reach rank 0 at %s, port %d: tried for %.0f s", l->rank, address, port, seconds);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
  }
}

void meet_everyone(const Launch *l, int listener, const char *address, int port, double seconds,
                   Peer *peers) {
  if (l->rank == 0)
    wait_for_all(l, listener, peers, seconds);
  else
    peers[0].socket = reach(l, address, port, seconds + 5); // rank 0 knows better who is missing
}
