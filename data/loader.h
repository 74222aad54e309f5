// Batches of a source: the batch of any step is a function of the data, the seed and the step alone, so a
// resumed run asks for its step, and a rank for its share. Needs no memory beyond the struct, however large
// the data.
//
// A training window is T + 1 consecutive tokens, T of them inputs and, shifted by one, T targets. Windows do
// not overlap, so nothing that is validated is trained on. The last tokens that fill no window are left out.
//
// Of n windows, a fixed fraction is held back for validation (at least one, and at least one is left to train
// on), picked by a permutation that is the same for every seed. Epoch e visits the remaining ones in the
// order random_permute(seed, e, .): each once an epoch.
//
// In sequential order windows overlap by one token, the last target of the one before, and follow each other
// as in the file, epoch after epoch; the last ones are held back. So do llm.c's, within a shard and
// unshuffled.
//
// A step takes ranks * micro_steps * batch windows that follow each other in that order:
//
//     number of a row's window = ((step * micro_steps + micro_step) * ranks + rank) * batch + row
//
// so R ranks with M micro-steps see in a step exactly what one rank with R * M micro-steps sees.
//
// A separate validation source is read from end to end: windows of T + 1 tokens at stride T, the last one
// padded, so that every token but the first is predicted exactly once. The windows of a packed source
// (source_pack) are its own.
#pragma once

#include "data/source.h"

#include <stddef.h>
#include <stdint.h>

typedef enum { ORDER_SHUFFLED, ORDER_SEQUENTIAL } DataOrder;

typedef struct {
  const Source *source;            // borrowed, as is the next: close them after the last batch
  const Source *validation_source; // or NULL: hold back a fraction of `source`
  double validation_fraction;      // in [0, 1), used without a validation source; 0 holds back nothing
  int64_t batch;                   // B, rows of a batch on one rank
  int64_t seq_len;                 // T
  uint64_t seed;                   // of the training order
  DataOrder order;                 // of the training windows
} LoaderOptions;

// A plain value: copy it, drop it.
typedef struct {
  LoaderOptions options;
  int64_t train_windows;      // in an epoch; at least 1
  int64_t validation_windows; // 0 when there is no validation
  int64_t validation_batches; // ceil(validation_windows / batch)
} Loader;

// Packs a source's documents into windows by best fit, so that few are cut and little of a window is padding.
// Takes 24 bytes of memory for each piece. end_of_text as in source_document_ends.
//
// A document of n tokens gives n - 1 pairs of an input and its target, the next token. One with more than T
// pairs is cut into pieces of T and a rest, all others stay whole. The longest pieces come first, each into
// the fullest window that has space for it (best-fit decreasing; Ding et al. 2024, "Fewer Truncations Improve
// Language Modeling"). Every pair is in exactly one window, and what is left of a window is padding. The
// windows depend on the data and T alone; the seed orders them.
void source_pack(Source *source, int64_t seq_len, int64_t end_of_text);

// Fails when the data are too few for one window of each requested kind.
Loader loader_create(LoaderOptions options);

typedef struct {
  int64_t step;       // of the optimizer, from 0
  int64_t micro_step; // in [0, micro_steps)
  int64_t micro_steps;
  int64_t rank; // in [0, ranks)
  int64_t ranks;
} LoaderPlace;

// Fills tokens[B*T] and targets[B*T] (the caller's) with the training batch at `place` and returns how many
// targets count; those that a mask leaves out, and padding, are IGNORED_TARGET. documents[2*B*T], or NULL:
// how many tokens of its document (with a packing: piece of one) a row has before each token, then how many
// after each. A token of padding, which is 0, is a document of its own.
int64_t loader_train_batch(const Loader *loader, LoaderPlace place, int32_t *tokens, int32_t *targets,
                           int32_t *documents);

// The same for validation batch `index` of `batches` (0: all), whose windows are spread evenly over all. Rows
// past the last window have token 0 and ignored targets; a batch past the last one has such rows alone
// (returns 0).
int64_t loader_validation_batch(const Loader *loader, int64_t index, int64_t batches, int32_t *tokens,
                                int32_t *targets, int32_t *documents);

// Fails when masks leave out every target that training, or so many validation batches (0: all), would have.
// Reads up to the first one that counts.
void loader_require_targets(const Loader *loader, bool training, int64_t validation_batches);

// "byte-level text, 63 files, 512,345 tokens; 480 training and 25 validation windows of 1,024; checksum
// 0a1b2c3d", cut to `size` bytes. The checksum is of a sample of all sources, with their masks, so that
// changed data are noticed.
void loader_describe(const Loader *loader, char *out, size_t size);
