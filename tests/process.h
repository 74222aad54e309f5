// The test program itself as the ranks of a job, and the text of a file.
#pragma once

#include "tests/harness.h"

// Starts the program as 1 to 4 ranks under mpirun or, with LCE_GPU_RANKS=N, as 2 and N ranks with a GPU each
// under tools/launch; after two minutes they are killed. Skips the test where nothing can be started.
void check_on_ranks(void);
// Main begins with it: true in such a rank, which has then run the cases on both backends of the CPU or of
// CUDA. A check that fails ends the process, and with it the job.
bool ran_as_rank(int argc, char **argv, void (*cases)(Harness *h));

// The whole of a file, which must be there; the caller frees it.
char *read_text(const char *path);
