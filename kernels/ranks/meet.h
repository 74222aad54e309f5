// The ranks' telephone: every rank holds one TCP connection to rank 0, and rank 0 one to every other. It
// carries what keeps the job together (who is alive, why somebody gave up), never numbers of the training.
#ifndef LCE_KERNELS_RANKS_MEET_H
#define LCE_KERNELS_RANKS_MEET_H

#include "kernels/ranks/launch.h"

#include <stddef.h>
#include <sys/types.h>

typedef struct {
  int socket; // -1 for the rank itself, and on all ranks but 0 for everyone but rank 0
  pid_t pid;  // known on rank 0 alone, as is its machine
  char host[64];
} Peer;

// Listens on rank 0: at the first free port from launch->port on (16 are tried), or at any. *port receives it.
// Fails when none is free.
int meet_listen(const Launch *launch, int *port);

// Waits until all others have come (rank 0, which then closes `listener`), or reaches rank 0 at `address` and
// a port from `port` on. Fills the `ranks` peers, whose sockets are -1 before. Fails within `seconds` naming
// who is missing.
void meet_everyone(const Launch *launch, int listener, const char *address, int port, double seconds,
                   Peer *peers);

// Whole messages; false when the other side is gone.
bool meet_send(int socket, const void *bytes, size_t count);
bool meet_receive(int socket, void *bytes, size_t count);

#endif
