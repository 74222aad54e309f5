// Shared by the files of linear_cross_entropy: a call, and a chunk of it. They call each other one way:
//
//     linear_cross_entropy.c -> split_head.c -> sampling.c -> steps.c -> call.c
//                            -> materialized.c
#pragma once

#include "kernels/lce/linear_cross_entropy.h"

// Some of a call's tokens: views of the caller's tensors, or all ranks' tokens.
enum { TOKENS_READ = 3, TOKENS_ALL = TOKENS_READ + 2 + sizeof(TokenOutputs) / sizeof(Tensor) };
typedef union {
  struct {
    Tensor x, targets, token_weights; // read
    Tensor loss, dx;                  // written
    TokenOutputs outputs;
  };
  Tensor all[TOKENS_ALL];
} Tokens;

// Label smoothing's sums over all rows of W and over all tokens. All are absent without it.
typedef struct {
  Tensor row, bias; // fp32 [H], [1]: sum_j w[j] W[j] and w[j] b[j], over all rows of W
  Tensor local_row; // fp32 [H]: over this rank's rows
  Tensor x, scales; // fp32 [H], [1]: sum_n scale_uniform[n] x[n] and sum_n scale_uniform[n], over all chunks
} Smoothing;

// A call's state, apart from its chunks.
typedef struct {
  Backend *backend;
  const LinearCrossEntropy *args;
  MemoryMark mark;
  Tokens tokens;        // the whole call's
  int ranks;            // ranks that share the head's rows; 1: this one has all
  bool backward;        // dx, dweight or both
  int64_t vocab_size;   // of the whole head
  Tensor class_weights; // for this rank's rows of W
  LossTerms terms;      // with the sum of the class weights
  Tensor factor;        // the mean's, fp32 [1], or absent
  Smoothing smoothing;
} Call;

// A chunk of C tokens (of every rank), or the buffers of the largest one.
typedef struct {
  Tokens tokens;
  Tensor targets;            // int32 [C]: as rows of this rank's W, else ELSEWHERE
  SoftmaxStatistics softmax; // fp32 [C] each
  Tensor exps;               // [C, V]
  Tensor scaled_x;           // [C, H]; pushed by each chunk, to lie where the logits-exp pass had its scratch
} Chunk;

static inline Tensor push_vector(const Call *call, const char *name, Dtype dtype, int64_t count) {
  return memory_push_1d(&call->backend->memory, name, MEMORY_HEAD, dtype, count);
}

static inline Tensor push_matrix(const Call *call, const char *name, Dtype dtype, int64_t rows,
                                 int64_t columns) {
  return memory_push_2d(&call->backend->memory, name, MEMORY_HEAD, dtype, rows, columns);
}

// Pushes [rows, V], with the row stride that the backend's matmuls prefer.
static inline Tensor push_logit_rows(Backend *backend, const char *name, Dtype dtype, int64_t rows,
                                     int64_t vocab) {
  int64_t stride = backend->scratch->logits_stride(vocab, dtype);
  return tensor_columns(memory_push_2d(&backend->memory, name, MEMORY_HEAD, dtype, rows, stride), 0, vocab);
}

// Pushes [rows, V] of x's type; V: this rank's.
static inline Tensor push_logits(const Call *call, const char *name, int64_t rows) {
  return push_logit_rows(call->backend, name, call->args->x.dtype, rows, call->args->weight.shape[0]);
}

// A vector as a matrix of one column.
static inline Tensor as_column(Tensor vector) {
  return tensor_reshape_2d(vector, vector.shape[0], 1);
}

static inline Tokens tokens_range(const Tokens *t, int64_t first, int64_t count) {
  Tokens range;
  for (int i = 0; i < TOKENS_ALL; i++) range.all[i] = tensor_rows(t->all[i], first, count);
  return range;
}

// --- call.c, check.c ---------------------------------------------------------------------------------------

// Fails with a sentence if the call is invalid.
void lce_check(const Backend *backend, const LinearCrossEntropy *args);
void lce_check_shard(const Backend *backend, const LinearCrossEntropy *args);
// `args` must outlive the call.
Call lce_begin(Backend *backend, const LinearCrossEntropy *args);
// Label smoothing's sums over the chunk's tokens.
void lce_add_smoothing(const Call *call, const Chunk *k);
// Label smoothing's part of dweight and dbias; pops what the call has pushed.
void lce_end(const Call *call);

// --- steps.c: the loops' steps. Each computes those of dx, dweight and dbias that are given ----------------

// Buffers for `rows` tokens, with target logits and target scales for `lasting` tokens.
Chunk lce_push_buffers(const Call *call, int64_t rows, int64_t lasting);
// The part of the buffers that `rows` tokens need, without the tokens.
Chunk lce_first_rows(const Chunk *buffers, int64_t rows);
// The call's tokens from `first` on, as many as the buffers hold; target logits and scales of all stay.
Chunk lce_chunk_at(const Call *call, const Chunk *buffers, int64_t first);
// target_z = the logits of these targets.
void lce_target_z(const Call *call, Tensor target_z, Tensor x, Tensor targets);
// The same for a split head: each comes from the rank with its row of W. local = the targets in this rank's
// rows, or ELSEWHERE.
void lce_split_target_z(const Call *call, Tensor target_z, Tensor local, Tensor x, Tensor targets);
// E, R, dX = E W: runs the operation; lce_logits_exp_of pushes codes of x and returns its arguments.
void lce_exponentials(const Call *call, const Chunk *k);
LceLogitsExp lce_logits_exp_of(const Call *call, const Chunk *k);
// loss and outputs; with gradients r, c, and r X in scaled_x, which it pushes.
void lce_losses(const Call *call, Chunk *k);
// loss and outputs alone.
void lce_losses_only(const Call *call, const Tokens *t, SoftmaxStatistics softmax);
// dW (+)= E^T (r X), db (+)= E^T r.
void lce_add_non_targets(const Call *call, const Chunk *k, bool accumulate);
// dX = r dX + c W[y].
void lce_finish_dx(const Call *call, const Chunk *k);
// dW[y] += c X, db[y] += c: for these tokens, and for all.
void lce_add_targets(const Call *call, Tensor scale_target, Tensor x, Tensor targets);
void lce_add_all_targets(const Call *call, const Chunk *buffers);

// --- sampling.c: gradients from a random part of E's tiles -------------------------------------------------

typedef struct {
  Tensor stats;            // fp32 [3]
  Tensor tile_sums, tiles; // fp32 [C, B], [A, B], as LceSampledGradients has them
  Tensor kept;             // likewise, for all chunks
  int64_t rows;            // C of the largest chunk
} Sampling;

// True if sampling is requested and saves time; otherwise the gradients are exact.
bool lce_samples(const Call *call);
Sampling lce_push_sampling(const Call *call, int64_t rows);
// E, R and the sums of E's tiles.
void lce_sampled_exponentials(const Call *call, const Sampling *s, LceLogitsExp exponentials);
// dX = E W and dW (+)= E^T (r X) over the drawn tiles; chunk and rank choose the random stream.
void lce_sampled_gradients_of(const Call *call, const Sampling *s, const Chunk *k, int64_t chunk, bool last);

// --- the ways to compute a call, each with a loop of its own -----------------------------------------------

void lce_materialized(const Call *call, Tensor entropy_weights); // logits; the weights fp32 [N], or absent
void lce_split_head(const Call *call);                           // the head's rows are split over ranks
void lce_sampled(const Call *call);                              // gradients from a part of E
