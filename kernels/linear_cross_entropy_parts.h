// What linear_cross_entropy.c and vocabulary_parallel.c share; nobody else's business.
#ifndef LCE_KERNELS_LINEAR_CROSS_ENTROPY_PARTS_H
#define LCE_KERNELS_LINEAR_CROSS_ENTROPY_PARTS_H

#include "kernels/linear_cross_entropy.h"

// Some of a call's tokens: views of the caller's tensors, or copies of the counted ones, packed.
typedef struct {
  Tensor x, targets, token_weights, entropy_weights; // what is read
  Tensor loss, dx;                                   // what is written
  TokenOutputs outputs;
} Tokens;

Tokens tokens_of_call(const LinearCrossEntropy *a);
Tokens tokens_range(const Tokens *t, int64_t first, int64_t count);
// Room for `rows` packed tokens, of what the caller gave; filled and emptied by the positions in `rows`.
Tokens push_packed(Backend *backend, const LinearCrossEntropy *a, int64_t rows);
void gather_tokens(Backend *backend, const Tokens *packed, const LinearCrossEntropy *a, Tensor rows);
void scatter_tokens(Backend *backend, const Tokens *packed, const LinearCrossEntropy *a, Tensor rows);
// Zeros to all that is told of the call's tokens.
void zero_tokens(Backend *backend, const LinearCrossEntropy *a);

// The first rows of a tensor that may be absent.
Tensor first_rows(Tensor t, int64_t first, int64_t count);
Tensor push_column(Backend *backend, const char *name, int64_t rows);
// The vectors of LossRows for `rows` tokens; those that are kept longer for `lasting`.
LossRows push_loss_rows(Backend *backend, const LinearCrossEntropy *a, int64_t rows, int64_t lasting);
Tensor push_logits(Backend *backend, const char *name, int64_t rows, int64_t vocab_size, Dtype dtype);

// Room for r X of a chunk, once its sweep is over.
Tensor push_scaled_x(Backend *backend, Tensor x);

// target_z = x W[targets], of each token.
void find_target_logits(Backend *backend, const LinearCrossEntropy *a, Tensor target_z, Tensor x,
                        Tensor targets);
// dweight (+)= scale E^T (r X). The caller's scale rides on the product's alpha, so that r X stays within the
// normal numbers.
void add_non_targets(Backend *backend, const LinearCrossEntropy *a, Tensor exps, Tensor scaled_x,
                     bool accumulate);
// The targets' rows of dweight += scale c x.
void add_targets(Backend *backend, const LinearCrossEntropy *a, Tensor scale_target, Tensor x,
                 Tensor targets);

// As many chunks of at most `most` tokens as needed, all nearly alike, in steps of 128 where there is room
// for steps: how many tokens each then has.
int64_t even_chunk(int64_t tokens, int64_t most);

// Shows the ledger an operation's scratch.
void show_scratch(Backend *backend, const char *op, size_t bytes);
// And what a chunk of tokens x takes once its sweep is over.
void show_behind_sweep(Backend *backend, const LinearCrossEntropy *a, Tensor x);

// vocabulary_parallel.c: the call where weight is a part of the head.
void vocabulary_parallel(Backend *backend, const LinearCrossEntropy *a);

#endif
