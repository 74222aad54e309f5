// Reading a large file while doing something with what has been read: threads ask for the pages that come
// next. Asking is a system call that waits while the disk has enough to do, so whoever uses the pages would
// ask too late by the time of every use.
#ifndef LCE_MODEL_CHECKPOINT_READ_AHEAD_H
#define LCE_MODEL_CHECKPOINT_READ_AHEAD_H

#include "model/checkpoint/files.h"

typedef struct ReadAhead ReadAhead;

// For a file that stays mapped until the end; a missing or empty one needs nothing. The caller gives it to
// read_ahead_destroy. Nothing is asked for before read_ahead_reached.
ReadAhead *read_ahead_create(Mapping file);
// The reader (one thread) has come to byte `offset`, and goes on from there: the 256 MiB from it on are asked
// for, each page once and none that was leapt over. Does not wait. Only a hint: without threads to be had,
// the pages come when they are touched.
void read_ahead_reached(ReadAhead *ahead, size_t offset);
// Waits for what is just being asked for; afterwards no thread is left and the file may be unmapped. NULL is
// fine.
void read_ahead_destroy(ReadAhead *ahead);

#endif
