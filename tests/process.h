// The test program itself as the ranks of a job, and the text of a file.
#pragma once

#include <stdbool.h>
#include <stdio.h>

typedef struct {
  int status; // 0: all ranks ended well
  char *text; // all that they wrote; the caller frees it
} Output;

// As `ranks` ranks, started by mpirun without a GPU or, where LCE_GPU_RANKS is set, by tools/launch. After
// two minutes they are killed.
Output launch_self(int ranks, const char *arguments);
// Whether launch_self can start anything here; prints why not.
bool can_launch(void);

// The whole of a file, which must be there; the caller frees it.
char *read_text(const char *path);
