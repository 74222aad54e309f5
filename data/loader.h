// Batches of a source. The batch of a step is a function of data, seed, step and where the loader starts
// (loader_start), so ranks need no state, and no memory beyond the struct.
//
// A training window is T + 1 consecutive tokens: T inputs and, shifted by one, T targets. Windows do not
// overlap, and the last tokens that fill none are left out. A fixed fraction of the windows, at least one, is
// held back for validation, picked by a permutation that is the same for every seed. Epoch e visits the
// others once each, in the order random_permute(seed, e, .).
//
// In sequential order windows overlap by one token and follow each other as in the file, epoch after epoch;
// the last ones are held back. So do llm.c's, within a shard and unshuffled.
//
//     number of a row's window = ((step * micro_steps + micro_step) * ranks + rank) * batch + row
//
// so R ranks with M micro-steps see in a step exactly what one rank with R * M micro-steps sees.
//
// A separate validation source is read in windows of T + 1 tokens at stride T, the last one padded: every
// token but the first is predicted once. A packed source (source_pack) has windows of its own.
#pragma once

#include "data/source.h"

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

// A place in the training data, which stays the same if a run resumes with other batches.
typedef struct {
  int64_t pass;   // or epoch, from 0
  int64_t tokens; // that this pass has read: whole windows, but see loader_start
} DataPlace;

// A plain value: copy it, drop it.
typedef struct {
  LoaderOptions options;
  int64_t first_step; // loader_start's, or 0
  DataPlace start;
  int64_t train_windows;      // in an epoch; at least 1
  int64_t validation_windows; // 0 when there is no validation
  int64_t validation_batches; // ceil(validation_windows / batch)
} Loader;

// Packs a source's documents into windows by best-fit decreasing (Ding et al. 2024, "Fewer Truncations
// Improve Language Modeling"): a document of n tokens is n - 1 pairs of input and target, cut into pieces of
// at most T; the longest pieces come first, each into the fullest window with space for it. The rest of a
// window is padding. The windows depend on the data and T alone. A piece takes 24 bytes of memory.
// end_of_text as in source_document_ends.
void source_pack(Source *source, int64_t seq_len, int64_t end_of_text);

// Fails if the data are too few for one window of each requested kind.
Loader loader_create(LoaderOptions options);

// Makes step `step` begin at `place`. In sequential order T may have changed: if the tokens are no multiple
// of it, the rest of the pass has windows from there on, one less at its end.
void loader_start(Loader *loader, int64_t step, DataPlace place);
// The place at which `step` begins, with steps of `windows` windows.
DataPlace loader_place(const Loader *loader, int64_t step, int64_t windows);
// Identifies the order of the training windows, with T unless it is sequential: places in the same order can
// be compared. "windows in file order; checksum 0a1b2c3d", cut to `size` bytes.
void loader_describe_order(const Loader *loader, char *out, size_t size);

// Fills tokens and targets ([B T], the caller's) with training batch `index` of a step's micro_steps * ranks
// `batches`; returns how many targets count. Masked ones and padding are IGNORED_TARGET. documents ([2, B T],
// or NULL): how many tokens of its document lie before each token in its row, then how many after it; 0 for
// padding.
int64_t loader_train_batch(const Loader *loader, int64_t step, int64_t index, int64_t batches,
                           int32_t *tokens, int32_t *targets, int32_t *documents);

// The same for validation batch `index` of `batches` (0: all), spread evenly. Further rows are padding.
int64_t loader_validation_batch(const Loader *loader, int64_t index, int64_t batches, int32_t *tokens,
                                int32_t *targets, int32_t *documents);

// Fails if no target of training, or of so many validation batches (0: all), counts.
void loader_require_targets(const Loader *loader, bool training, int64_t validation_batches);

// "byte-level text, 63 files, 512,345 tokens; 480 training and 25 validation windows of 1,024; checksum
// 0a1b2c3d", cut to `size` bytes. The checksum is of a sample of all sources and masks.
void loader_describe(const Loader *loader, char *out, size_t size);
