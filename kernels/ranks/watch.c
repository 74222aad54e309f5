// Every rank sends rank 0 a beat a second: how often it has shown life, how many collectives it has entered,
// where it is. Rank 0 beats back. From that follow:
//
//   a connection that ends before its rank has said goodbye: that rank is dead
//   no sign of life from anyone for the timeout: the job hangs, and the rank that is silent, or that has entered the
//   fewest collectives, is the one that the others wait for
//   no beat of rank 0 for the timeout: rank 0 itself is stopped, and rank 1 says so
//
// Whoever finds out speaks once; the rest leave silently. The process ends by _exit: libraries that wait for
// dead peers have no say in it.
#include "kernels/ranks/watch.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/fail.h"

typedef enum { BEAT, SHARED, FAILED, QUIT, DONE } Kind;

typedef struct {
  int32_t kind, shares;
  uint64_t signs, collectives;
  char text[RANKS_SHARED]; // BEAT: where it is; FAILED: why; SHARED: the bytes
} Message;

// What rank 0 knows of a rank from its beats; on the others only that of rank 0.
typedef struct {
  double heard; // when
  uint64_t signs, collectives;
  char where[160];
  bool done;
} Known;

static struct {
  const Launch *launch;
  Peer *peers;
  Known *known;
  pthread_t thread;
  bool running;
  pthread_mutex_t sending, speaking, lock;
  pthread_cond_t changed;
  bool all_done; // under lock, as is what follows
  int shares;    // how many have come
  char shared[RANKS_SHARED];
  double last_sign; // when any rank showed life
  RanksDevice device;
  void *device_context;
} watch = {.sending = PTHREAD_MUTEX_INITIALIZER,
           .speaking = PTHREAD_MUTEX_INITIALIZER,
           .lock = PTHREAD_MUTEX_INITIALIZER,
           .changed = PTHREAD_COND_INITIALIZER};

static _Atomic(const char *) doing;
static _Atomic uint64_t signs, collectives;
static _Atomic double timeout = 300;

void ranks_enter(const char *operation, bool collective) {
  atomic_store_explicit(&doing, operation, memory_order_relaxed);
  if (collective) atomic_fetch_add_explicit(&collectives, 1, memory_order_relaxed);
  ranks_alive();
}

void ranks_leave(void) {
  atomic_store_explicit(&doing, NULL, memory_order_relaxed);
  ranks_alive();
}

void ranks_alive(void) {
  atomic_fetch_add_explicit(&signs, 1, memory_order_relaxed);
}

void ranks_set_timeout(double seconds) {
  timeout = seconds;
}

void ranks_watch_device(RanksDevice device, void *context) {
  pthread_mutex_lock(&watch.lock);
  watch.device_context = context;
  watch.device = device;
  pthread_mutex_unlock(&watch.lock);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pause_for(double seconds) {
  nanosleep(&(struct timespec){.tv_sec = (time_t)seconds,
                               .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))},
            NULL);
}

// --- speaking ----------------------------------------------------------------------------------------------

static void send_to(int rank, const Message *message) {
  if (watch.peers[rank].socket < 0) return;
  pthread_mutex_lock(&watch.sending);
  meet_send(watch.peers[rank].socket, message,
            sizeof *message); // one that is gone shows when it is read from
  pthread_mutex_unlock(&watch.sending);
}

static void send_to_all(const Message *message) {
  for (int r = 0; r < watch.launch->ranks; r++) send_to(r, message);
}

// Prints the sentence, tells everyone to leave, and leaves. Who comes second waits for the end here.
static _Noreturn void speak_and_leave(const char *sentence) {
  pthread_mutex_lock(&watch.speaking);
  if (!ftrylockfile(stdout)) { // the other thread may hold it for good
    fflush(stdout);
    funlockfile(stdout);
  }
  dprintf(STDERR_FILENO, "lce: %s\n", sentence);
  send_to_all(&(Message){.kind = QUIT});
  _exit(1);
}

static void tell(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void tell(char *text, size_t size, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, size, format, arguments);
  va_end(arguments);
}

static void where_am_i(char *text, size_t size) {
  const char *operation = atomic_load(&doing);
  tell(text, size, "%s", operation ? operation : "its own work");
}

// fail() in the main thread.
static void on_fail(const char *sentence) {
  const Launch *l = watch.launch;
  // A collective often fails because a rank is gone: the watch may know which. Give it time to speak first.
  if (atomic_load(&doing)) pause_for(1.5);
  if (l->rank == 0) speak_and_leave(sentence);
  char named[RANKS_SHARED + 32];
  tell(named, sizeof named, "rank %d: %.*s", l->rank, RANKS_SHARED - 1, sentence);
  if (watch.peers[0].socket < 0) speak_and_leave(named);
  Message message = {.kind = FAILED};
  tell(message.text, sizeof message.text, "%s", named);
  send_to(0, &message);
  pause_for(10); // rank 0 ends us
  speak_and_leave(named);
}

// --- listening ---------------------------------------------------------------------------------------------

// On other ranks than 0 about rank 0: rank 1 speaks, if it is there.
static _Noreturn void say_as_rank_1(const char *text) {
  if (watch.launch->rank == 1) speak_and_leave(text);
  pause_for(2);
  _exit(1);
}

static _Noreturn void say_lost(int rank) {
  char text[512], where[160];
  where_am_i(where, sizeof where);
  const Peer *p = &watch.peers[rank];
  if (watch.launch->rank == 0) {
    tell(text, sizeof text,
         "rank %d (process %d on %s) ended without a word, when rank 0 was in %s; the job ends", rank,
         (int)p->pid, p->host, where);
    speak_and_leave(text);
  }
  tell(text, sizeof text, "rank 0 ended without a word, when rank %d was in %s; the job ends",
       watch.launch->rank, where);
  say_as_rank_1(text);
}

static _Noreturn void say_rank_0_is_silent(double seconds) {
  char text[512], where[160];
  where_am_i(where, sizeof where);
  tell(text, sizeof text,
       "rank 0 has not been heard of for %.0f s, while rank %d waits in %s; the job ends (--timeout)",
       seconds, watch.launch->rank, where);
  say_as_rank_1(text);
}

static void note_done(int rank) {
  watch.known[rank].done = true;
  if (watch.launch->rank != 0) {
    watch.all_done = true;
  } else {
    bool all = true;
    for (int r = 1; r < watch.launch->ranks; r++) all = all && watch.known[r].done;
    watch.all_done = all;
  }
  pthread_cond_broadcast(&watch.changed);
}

static void hear(int rank, const Message *m) {
  Known *k = &watch.known[rank];
  k->heard = now();
  switch ((Kind)m->kind) {
  case BEAT:
    if (m->signs != k->signs) watch.last_sign = k->heard;
    k->signs = m->signs;
    k->collectives = m->collectives;
    tell(k->where, sizeof k->where, "%.*s", (int)sizeof k->where - 1, m->text);
    break;
  case SHARED:
    pthread_mutex_lock(&watch.lock);
    memcpy(watch.shared, m->text, sizeof watch.shared);
    watch.shares = m->shares;
    pthread_cond_broadcast(&watch.changed);
    pthread_mutex_unlock(&watch.lock);
    break;
  case FAILED: {
    char text[RANKS_SHARED];
    tell(text, sizeof text, "%.*s", RANKS_SHARED - 1, m->text);
    pause_for(0.5); // where all fail for the same reason, rank 0 says it in its own name
    speak_and_leave(text);
  }
  case QUIT:
    _exit(1);
  case DONE:
    pthread_mutex_lock(&watch.lock);
    note_done(rank);
    pthread_mutex_unlock(&watch.lock);
    break;
  }
}

static void listen_for(int milliseconds) {
  int ranks = watch.launch->ranks, count = 0, whose[ranks];
  struct pollfd ready[ranks];
  for (int r = 0; r < ranks; r++) {
    if (watch.peers[r].socket < 0) continue;
    whose[count] = r;
    ready[count++] = (struct pollfd){.fd = watch.peers[r].socket, .events = POLLIN};
  }
  if (poll(ready, (nfds_t)count, milliseconds) <= 0) return;
  for (int i = 0; i < count; i++) {
    if (!ready[i].revents) continue;
    Message message;
    if (meet_receive(ready[i].fd, &message, sizeof message)) {
      hear(whose[i], &message);
      continue;
    }
    if (!watch.known[whose[i]].done) say_lost(whose[i]);
    close(ready[i].fd);
    watch.peers[whose[i]].socket = -1;
  }
}

// --- hanging -----------------------------------------------------------------------------------------------

// Whom the others wait for: one that is silent, or that has entered the fewest collectives.
static _Noreturn void say_hung(double seconds) {
  const Launch *l = watch.launch;
  Known *known = watch.known;
  char text[1024];
  int last = 0, first = 0, silent = -1;
  for (int r = 0; r < l->ranks; r++) {
    if (known[r].collectives < known[last].collectives) last = r;
    if (known[r].collectives > known[first].collectives) first = r;
    if (r && silent < 0 && now() - known[r].heard > seconds / 2) silent = r;
  }
  if (silent >= 0)
    tell(text, sizeof text,
         "rank %d (process %d on %s) has not been heard of for %.0f s, while rank %d waits in %s; the job "
         "ends "
         "(--timeout)",
         silent, (int)watch.peers[silent].pid, watch.peers[silent].host, now() - known[silent].heard, first,
         known[first].where);
  else if (known[last].collectives < known[first].collectives)
    tell(text, sizeof text,
         "no rank has got on for %.0f s: rank %d is in %s and does not come to %s, where rank %d waits for "
         "it; the job "
         "ends (--timeout)",
         seconds, last, known[last].where, known[first].where, first);
  else
    tell(text, sizeof text,
         "no rank has got on for %.0f s: rank %d is in %s, rank %d in %s; the job ends (--timeout)", seconds,
         0, known[0].where, l->ranks - 1, known[l->ranks - 1].where);
  speak_and_leave(text);
}

static void look_for_hang(void) {
  double limit = timeout, time = now();
  if (watch.launch->rank == 0 && time - watch.last_sign > limit) say_hung(limit);
  double silent = time - watch.known[0].heard;
  if (watch.launch->rank != 0 && silent > limit + 5)
    say_rank_0_is_silent(silent); // if it could, it would have spoken
}

// --- the thread --------------------------------------------------------------------------------------------

static void look_at_device(char *text, size_t size) {
  char about[480] = "";
  pthread_mutex_lock(&watch.lock);
  bool broken = watch.device && watch.device(watch.device_context, about, sizeof about);
  pthread_mutex_unlock(&watch.lock);
  if (broken) {
    pause_for(1.5); // a rank that is gone explains it better
    char named[512];
    tell(named, sizeof named, "rank %d: %s", watch.launch->rank, about);
    if (watch.launch->rank == 0) speak_and_leave(named);
    Message message = {.kind = FAILED};
    tell(message.text, sizeof message.text, "%s", named);
    send_to(0, &message);
  }
  size_t length = strlen(text);
  if (*about) tell(text + length, size - length, " (%s)", about);
}

static void beat(void) {
  Message m = {.kind = BEAT, .signs = atomic_load(&signs), .collectives = atomic_load(&collectives)};
  where_am_i(m.text, sizeof m.text);
  look_at_device(m.text, sizeof m.text);
  if (watch.launch->rank != 0) {
    send_to(0, &m);
    return;
  }
  hear(0, &m);
  for (int r = 1; r < watch.launch->ranks; r++)
    if (now() - watch.known[r].heard < 30) send_to(r, &m); // a stopped one would let its connection fill up
}

static void *run(void *nothing) {
  double beaten = 0;
  for (;;) {
    if (now() - beaten >= 1) {
      beaten = now();
      beat();
      look_for_hang();
    }
    listen_for(200);
  }
  return nothing;
}

void watch_prepare(const Launch *launch, Peer *peers) {
  watch.launch = launch;
  watch.peers = peers;
  watch.known = calloc((size_t)launch->ranks, sizeof *watch.known);
  if (!watch.known) fail("out of host memory for %d ranks", launch->ranks);
  fail_set_handler(on_fail);
}

void watch_begin(void) {
  watch.last_sign = now();
  for (int r = 0; r < watch.launch->ranks; r++) watch.known[r].heard = watch.last_sign;
  // Signals are the main thread's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&watch.thread, NULL, run, NULL))
    fail("cannot start the thread that watches over the ranks");
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  watch.running = true;
}

void watch_end(void) {
  if (!watch.running) return;
  fflush(stdout);
  if (watch.launch->rank != 0) send_to(0, &(Message){.kind = DONE});
  pthread_mutex_lock(&watch.lock);
  while (!watch.all_done) pthread_cond_wait(&watch.changed, &watch.lock);
  pthread_mutex_unlock(&watch.lock);
  if (watch.launch->rank == 0) send_to_all(&(Message){.kind = DONE});
  watch.running = false;
}

// --- sharing -----------------------------------------------------------------------------------------------

void ranks_share(void *bytes, size_t count) {
  static int shares; // so far; all ranks call as often
  shares++;
  if (count > RANKS_SHARED) fail("internal: %zu bytes are too many to share at once", count);
  if (!watch.running) return;
  Message message = {.kind = SHARED, .shares = shares};
  ranks_enter("sharing with the other ranks", false);
  if (watch.launch->rank == 0) {
    memcpy(message.text, bytes, count);
    send_to_all(&message);
  } else {
    pthread_mutex_lock(&watch.lock);
    while (watch.shares < shares) pthread_cond_wait(&watch.changed, &watch.lock);
    memcpy(bytes, watch.shared, count);
    pthread_mutex_unlock(&watch.lock);
  }
  ranks_leave();
}
