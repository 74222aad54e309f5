// The corpus that every checkout has: the program's own source tree.
#ifndef LCE_DATA_CORPUS_H
#define LCE_DATA_CORPUS_H

#include "data/source.h"

#include <stdint.h>

// The sources and prose of the tree (*.c *.h *.cu *.cuh *.py *.sh *.md, Makefile, LICENSE; not build/, runs/,
// hidden names) as one text source: so a log or a data set that a run leaves in the tree is never trained on.
// The tree is looked for upward from the executable, then in the current directory. Fails when neither is a
// checkout. The caller closes it.
Source *corpus_open(int64_t vocab_size);

enum { CORPUS_ENTROPY_SAMPLE = 64 << 20 };

// The unigram entropy of a source in nats per token, -sum p ln p over its token frequencies: the loss of the
// best predictor that looks at no context, so a trained model must fall below it. Counts the first
// CORPUS_ENTROPY_SAMPLE tokens when there are more.
double corpus_entropy(const Source *source);

#endif
