#include "model/checkpoint/read_ahead.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/fail.h"

enum { PIECE = 8 << 20, AHEAD = 256 << 20 }; // bytes asked for at once, and beyond the reader at most
enum { THREADS = 4 };                        // a disk is faster when several ask

struct ReadAhead {
  Mapping file;
  size_t reached, next; // the reader's place; what nobody has asked for yet
  bool over;
  int started;
  pthread_t threads[THREADS];
  pthread_mutex_t lock;
  pthread_cond_t changed;
};

// Where the next piece begins, once it is time for it; the file's size when there is none.
static size_t next_piece(ReadAhead *r) {
  pthread_mutex_lock(&r->lock);
  while (!r->over && r->next < r->file.size && r->next >= r->reached + AHEAD)
    pthread_cond_wait(&r->changed, &r->lock);
  if (r->next < r->reached) r->next = r->reached;
  size_t at = r->over || r->next > r->file.size ? r->file.size : r->next;
  r->next = at + PIECE;
  pthread_mutex_unlock(&r->lock);
  return at;
}

static void *ask(void *given) {
  ReadAhead *r = given;
  for (size_t at; (at = next_piece(r)) < r->file.size;) file_will_need(&r->file, at, PIECE);
  return NULL;
}

ReadAhead *read_ahead_create(Mapping file) {
  ReadAhead *r = calloc(1, sizeof *r);
  if (!r) fail("out of host memory for a file's pages to come");
  r->file = file;
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->changed, NULL);
  return r;
}

void read_ahead_reached(ReadAhead *r, size_t offset) {
  pthread_mutex_lock(&r->lock);
  r->reached = offset;
  while (r->started < THREADS && pthread_create(&r->threads[r->started], NULL, ask, r) == 0) r->started++;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

void read_ahead_destroy(ReadAhead *r) {
  if (!r) return;
  pthread_mutex_lock(&r->lock);
  r->over = true;
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
  for (int i = 0; i < r->started; i++) pthread_join(r->threads[i], NULL);
  pthread_cond_destroy(&r->changed);
  pthread_mutex_destroy(&r->lock);
  free(r);
}
