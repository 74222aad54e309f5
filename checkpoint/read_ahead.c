#include "checkpoint/read_ahead.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/fail.h"

enum { PIECE = 8 << 20, AHEAD = 256 << 20 }; // bytes asked for at once, and beyond the reader at most

struct ReadAhead {
  Mapping file;
  size_t reached;
  bool started, over;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
};

static void *ask(void *given) {
  ReadAhead *r = given;
  for (size_t at = 0; at < r->file.size; at += PIECE) {
    pthread_mutex_lock(&r->lock);
    while (!r->over && at >= r->reached + AHEAD) pthread_cond_wait(&r->changed, &r->lock);
    if (at < r->reached) at = r->reached;
    bool over = r->over;
    pthread_mutex_unlock(&r->lock);
    if (over) break;
    file_will_need(&r->file, at, PIECE);
  }
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
  if (!r->started) r->started = pthread_create(&r->thread, NULL, ask, r) == 0;
  pthread_cond_signal(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

void read_ahead_destroy(ReadAhead *r) {
  if (!r) return;
  pthread_mutex_lock(&r->lock);
  r->over = true;
  pthread_cond_signal(&r->changed);
  pthread_mutex_unlock(&r->lock);
  if (r->started) pthread_join(r->thread, NULL);
  pthread_cond_destroy(&r->changed);
  pthread_mutex_destroy(&r->lock);
  free(r);
}
