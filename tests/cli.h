// What the tests of ./train's command line share.
#ifndef LCE_TESTS_CLI_H
#define LCE_TESTS_CLI_H

#include "tests/data_files.h"
#include "tests/process.h"

// A model that trains in no time.
#define TINY                                                                                                 \
  "--device cpu --model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 2 "      \
  "--num-attention-heads 2 --num-key-value-heads 1 --seq-len 16 --batch 3 "

// ./train fails with one sentence on stderr that holds `part`.
void assert_refused(const char *arguments, const char *part);

#endif
