// linear_cross_entropy with the head split over G ranks. Tokens travel and W stays: every rank multiplies the
// chunk's G C tokens with its V / G rows, which takes as much memory for E and as many flops as C tokens
// against the whole head.
//
// For each row, ranks share scalars: the target's logit is summed over them (all but one add 0), the pairs
// (a_g, R_g) and the outputs' sums are gathered, and LceCombine gives each rank the whole row's. A rank's dX
// is its part of a sum over V, which a reduce_scatter adds. lce/REFERENCE.md counts what is sent. dX leaves
// and the next x arrives while dW is computed.
#include <math.h>

#include "kernels/base/integers.h"
#include "kernels/lce/call.h"

// A chunk: this rank's C tokens, and in `all` the G ranks' tokens, with this rank's part of dx.
typedef struct {
  Tokens local;
  Chunk all;                       // its rows have the sums over the whole vocabulary
  SoftmaxStatistics local_softmax; // the sums over this rank's rows of W
  Tensor local_sums, sums;         // fp32 [P G C], this rank's part for LceCombine; fp32 [G * P G C]
} Split;

static Split push_buffers(const Call *call, int64_t count) {
  const LinearCrossEntropy *args = call->args;
  int64_t rows = count * call->ranks, hidden_size = args->x.shape[1];
  Split b = {.all = lce_push_buffers(call, rows, rows)};
  Tokens *t = &b.all.tokens;
  t->x = push_matrix(call, "x of all ranks", args->x.dtype, rows, hidden_size);
  t->targets = push_vector(call, "targets of all ranks", DTYPE_I32, rows);
  b.all.targets = push_vector(call, "targets in local rows", DTYPE_I32, rows);
  int64_t parts = lce_row_parts(&b.all.softmax) * rows;
  b.local_sums = push_vector(call, "local anchors and row sums", DTYPE_F32, parts);
  b.sums = push_vector(call, "anchors and row sums", DTYPE_F32, parts * call->ranks);
  if (tensor_exists(args->token_weights))
    t->token_weights = push_vector(call, "token weights of all ranks", DTYPE_F32, rows);
  if (tensor_exists(args->dx)) t->dx = push_matrix(call, "parts of dx", args->dx.dtype, rows, hidden_size);
  return b;
}

// Starts to gather the chunk of `count` tokens from `first` on, which arrives by collectives_join.
static Split gather(const Call *call, const Split *buffers, int64_t first, int64_t count) {
  Split s = *buffers;
  int64_t rows = count * call->ranks, parts = lce_row_parts(&buffers->all.softmax) * rows;
  s.local = tokens_range(&call->tokens, first, count);
  s.all = lce_first_rows(&buffers->all, rows);
  s.all.tokens = tokens_range(&buffers->all.tokens, 0, rows);
  s.all.targets = tensor_rows(buffers->all.targets, 0, rows);
  s.local_sums = tensor_rows(buffers->local_sums, 0, parts);
  s.sums = tensor_rows(buffers->sums, 0, parts * call->ranks);
  s.local_softmax = s.all.softmax;
#define LOCAL(name, ...) &s.local_softmax.name,
  Tensor *local[] = {PARTIAL_STATISTICS(LOCAL)};
#undef LOCAL
  int64_t at = 0;
  for (size_t i = 0; i < sizeof local / sizeof *local; i++) {
    if (!tensor_exists(*local[i])) continue;
    Dtype dtype = local[i]->dtype; // as wide as fp32
    *local[i] = tensor_rows(s.local_sums, at, rows);
    local[i]->dtype = dtype;
    at += rows;
  }
  for (int i = 0; i < TOKENS_READ; i++)
    if (tensor_exists(s.local.all[i]))
      all_gather(call->backend, (Collective){.out = s.all.tokens.all[i], .x = s.local.all[i], .async = true});
  return s;
}

static void fill(Backend *backend, Tensor vector, float value) {
  enum { PART = 256 };
  float values[PART];
  for (int i = 0; i < PART; i++) values[i] = value;
  for (int64_t n = 0; n < vector.shape[0]; n += PART)
    backend_to_device(backend, tensor_rows(vector, n, min_i64(PART, vector.shape[0] - n)), values);
}

// Without a row of W a rank's sums are 0 about an anchor below all others, and its part of dX is 0.
static void sum_no_rows(const Call *call, const Split *s) {
  fill_zero(call->backend, s->local_sums);
  fill(call->backend, s->local_softmax.anchor, -INFINITY);
  if (tensor_exists(s->local_softmax.max)) fill(call->backend, s->local_softmax.max, -INFINITY);
  if (tensor_exists(s->all.tokens.dx)) fill_zero(call->backend, s->all.tokens.dx);
}

void lce_split_target_z(const Call *call, Tensor target_z, Tensor local, Tensor x, Tensor targets) {
  shard_indices(call->backend, (ShardIndices){.out = local,
                                              .indices = targets,
                                              .first = call->args->shard.first,
                                              .count = call->args->weight.shape[0]});
  lce_target_z(call, target_z, x, local);
  all_reduce(call->backend, (Collective){.out = target_z, .x = target_z});
}

// Computes E, and each row's sums over the whole vocabulary.
static void exponentials(const Call *call, const Split *s, const Sampling *sampling) {
  const Chunk *k = &s->all;
  lce_split_target_z(call, k->softmax.target_z, k->targets, k->tokens.x, k->tokens.targets);
  LceLogitsExp exponentials = lce_logits_exp_of(call, k);
  exponentials.softmax = s->local_softmax;
  if (call->args->weight.shape[0] == 0)
    sum_no_rows(call, s);
  else if (sampling)
    lce_sampled_exponentials(call, sampling, exponentials);
  else
    lce_logits_exp(call->backend, exponentials);
  all_gather(call->backend, (Collective){.out = s->sums, .x = s->local_sums});
  lce_combine(call->backend, (LceCombine){.softmax = k->softmax,
                                          .parts = s->sums,
                                          .targets = k->tokens.targets,
                                          .temperature = call->args->terms.temperature});
}

void lce_split_head(const Call *call) {
  const LinearCrossEntropy *args = call->args;
  Memory *memory = &call->backend->memory;
  int64_t tokens = args->x.shape[0], size = lce_used_chunk(tokens, args->chunk), left = tokens;
  Split buffers = push_buffers(call, size), now = gather(call, &buffers, 0, size), next = {0};
  Sampling sampled, *sampling = NULL;
  if (lce_samples(call)) sampled = lce_push_sampling(call, size * call->ranks), sampling = &sampled;
  for (int64_t first = 0; left > 0; first += size, left -= size, now = next) {
    Chunk *k = &now.all;
    bool accumulate = args->accumulate || first > 0;
    MemoryMark mark = memory_mark(memory);
    collectives_join(call->backend, 0); // the chunk before has its dx, and this one its tokens
    exponentials(call, &now, sampling);
    int64_t count = now.local.x.shape[0];
    lce_losses_only(call, &now.local,
                    softmax_statistics_range(&k->softmax, call->backend->rank * count, count));
    if (call->backward) lce_losses(call, k);
    // dweight is written before it is added to. Later chunks' GEMMs overlap the collectives.
    if (sampling)
      lce_sampled_gradients_of(call, sampling, k, first / size, true);
    else if (first == 0)
      lce_add_non_targets(call, k, accumulate);
    lce_finish_dx(call, k);
    if (tensor_exists(args->dx))
      reduce_scatter(call->backend, (Collective){.out = now.local.dx, .x = k->tokens.dx, .async = true});
    lce_add_targets(call, k->softmax.scale_target, k->tokens.x, k->targets);
    if (left > size) next = gather(call, &buffers, first + size, min_i64(left - size, size));
    if (!sampling && first > 0) lce_add_non_targets(call, k, accumulate);
    memory_pop_to(memory, mark);
  }
  collectives_join(call->backend, 0);
}
