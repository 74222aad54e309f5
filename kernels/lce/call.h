// Inside linear_cross_entropy: what its files know of a call and of a chunk of it.
#pragma once

#include "kernels/lce/linear_cross_entropy.h"

// Some of a call's tokens: views of the caller's tensors, or what all ranks gave.
#define TOKEN_FIELDS                                                                                         \
  Tensor x, targets, token_weights; /* read */                                                               \
  Tensor loss, dx;                  /* written */                                                            \
  TokenOutputs outputs;
typedef union {
  struct {
    TOKEN_FIELDS
  };
  Tensor all[sizeof(struct {TOKEN_FIELDS}) / sizeof(Tensor)];
} Tokens;

enum { TOKENS_READ = 3, TOKENS_ALL = sizeof(Tokens) / sizeof(Tensor) };

// What a call holds besides its chunks.
typedef struct {
  Backend *backend;
  const LinearCrossEntropy *a;
  Tokens tokens;        // all of the call's
  int ranks;            // that the head's rows are split over; 1: all are here
  bool backward;        // dx, dweight or both
  bool targets_in_exps; // dweight is written once, in W's dtype, by the GEMM that has the targets' part, too
  int64_t vocab_size;   // of the whole head
  Tensor class_weights; // of this rank's rows of W
  Tensor factor;        // fp32 [1], or absent
  bool sampled;         // E's tiles are sampled for the gradients
  size_t kept_bytes;    // of Chunk.kept
  Tensor smoothing_row, smoothing_bias; // fp32 [H], [1]: sum_j w[j] W[j] and w[j] b[j], over all rows of W
  Tensor smoothing_local;               // fp32 [H]: over this rank's rows
  // fp32 [H], [1]: sum_n scale_uniform[n] x[n] and sum_n scale_uniform[n], over all chunks (and ranks)
  Tensor smoothing_x, smoothing_sum;
} Call;

// A chunk of C tokens (of every rank), or the buffers of the largest one.
typedef struct {
  Tokens tokens;
  Tensor targets;          // int32 [C]: as rows of this rank's W, else ELSEWHERE
  LossRows rows;           // fp32 [C] each, of the whole vocabulary
  LossRows local_rows;     // of this rank's rows of W
  Tensor exps;             // [C, V]
  Tensor tile_sums, tiles; // sampled: fp32 [C, B], [A, B], as LceSampledGradients has them
  Tensor kept;             // likewise, for all chunks
  int64_t kept_rows;
  Tensor scaled_x; // [C, H]; pushed by each chunk, to lie where the logits-exp pass had its scratch
} Chunk;

static inline Tensor push_vector(const Call *c, const char *name, Dtype dtype, int64_t count) {
  return memory_push_1d(&c->backend->memory, name, MEMORY_HEAD, dtype, count);
}

static inline Tensor push_matrix(const Call *c, const char *name, Dtype dtype, int64_t rows,
                                 int64_t columns) {
  return memory_push_2d(&c->backend->memory, name, MEMORY_HEAD, dtype, rows, columns);
}

// [rows, V] of x's type, with V that of this rank.
static inline Tensor push_logits(const Call *c, const char *name, int64_t rows) {
  int64_t vocab_rows = c->a->weight.shape[0];
  Dtype dtype = c->a->x.dtype;
  int64_t stride = c->backend->scratch->logits_stride(vocab_rows, dtype);
  return tensor_columns(push_matrix(c, name, dtype, rows, stride), 0, vocab_rows);
}

// A vector as a matrix of one column.
static inline Tensor as_column(Tensor vector) {
  return tensor_reshape_2d(vector, vector.shape[0], 1);
}

// Rows of a tensor that may be absent.
static inline Tensor first_rows(Tensor t, int64_t first, int64_t count) {
  return tensor_exists(t) ? tensor_rows(t, first, count) : t;
}

static inline Tokens tokens_range(const Tokens *t, int64_t first, int64_t count) {
  Tokens range;
  for (int i = 0; i < TOKENS_ALL; i++) range.all[i] = first_rows(t->all[i], first, count);
  return range;
}

// steps.c: what the loops are made of.
Chunk lce_push_buffers(const Call *c, int64_t rows,
                       int64_t lasting);                  // of a chunk; of what is kept for all tokens
Chunk lce_first_rows(const Chunk *buffers, int64_t rows); // without its tokens
void lce_target_z(const Call *c, Tensor target_z, Tensor x, Tensor targets); // the logits of these targets
void lce_exponentials(const Call *c, const Chunk *k);                        // E, R, dX = E W
// Losses, outputs, scales and scaled x of the tokens, those that are there; exps may be absent.
void lce_rows_of(const Call *c, const Tokens *t, LossRows rows, Tensor scaled_x, Tensor exps);
void lce_push_scaled_x(const Call *c, Chunk *k);
void lce_add_non_targets(const Call *c, const Chunk *k, bool accumulate);           // dW (+)= E^T (r X)
void lce_add_targets(const Call *c, Tensor scale_target, Tensor x, Tensor targets); // dW[y] += c x
void lce_finish_dx(const Call *c, const Chunk *k);                                  // dX = r dX + c W[y]

// The ways to compute a call, each with a loop of its own.
void lce_materialized(const Call *c); // logits, not exponentials
void lce_split_head(const Call *c);   // the head's rows are split over ranks
static inline bool lce_holds_logits(const LinearCrossEntropy *a) {
  return a->mode == LCE_MATERIALIZED || (a->terms.softcap > 0 && a->terms.label_smoothing > 0);
}

// check.c: fails with a sentence where the call cannot be.
void lce_check(const Backend *backend, const LinearCrossEntropy *a);

// terms.c: terms of the loss that need more than a row's sums.
void lce_terms_begin(Call *c, LinearCrossEntropy *a); // completes `a` with the sum of the class weights
void lce_terms_add(const Call *c, const Chunk *k, bool first);
void lce_terms_end(const Call *c);
void lce_bias_non_targets(const Call *c, const Chunk *k, bool accumulate);

// sampling.c: a random part of E's tiles makes the gradients, where that saves time.
void lce_sampling_begin(Call *c, LinearCrossEntropy *a); // completes `a` with memory for the statistics
void lce_sampling_buffers(const Call *c, Chunk *b, int64_t rows);
void lce_sampling_gradients(const Call *c, const Chunk *k, int64_t chunk, bool last);
