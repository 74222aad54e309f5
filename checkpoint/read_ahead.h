// Reading a large file while doing something with what has been read: threads ask for the pages that come
// next. Asking is a system call that waits while the disk has enough to do, so whoever uses the pages would
// ask too late by the time of every use.
#ifndef LCE_CHECKPOINT_READ_AHEAD_H
#define LCE_CHECKPOINT_READ_AHEAD_H

#include "checkpoint/files.h"

typedef struct ReadAhead ReadAhead;

// For a file that stays mapped until the end. Nothing is asked for before read_ahead_reached.
ReadAhead *read_ahead_create(Mapping file);
// The reader has come to byte `offset`, and goes on from there. Only a hint: without threads to be had, the
// pages come when they are touched.
void read_ahead_reached(ReadAhead *ahead, size_t offset);
void read_ahead_destroy(ReadAhead *ahead);

#endif
