// linear_cross_entropy with the head split over G ranks. Tokens travel and W stays: every rank multiplies the chunk's G C
// tokens with its V / G rows, which takes as much memory for E and as many flops as C tokens against the whole head.
//
// For each row of logits, ranks share nothing but scalars: the target's logit is summed over them (all but one add 0), the
// pairs (a_g, R_g), and with them what outputs need, are gathered, and LceCombine gives each rank the whole row's. A rank's dX
// is its part of a sum over V: a reduce_scatter gives every rank the sum for its tokens. kernels/LCE.md counts what is sent.
// Most of it overlaps: dX leaves and the next x arrives while dW is computed.
#include "kernels/lce_call.h"

void lce_split_buffers(const Call *c, Chunk *b, int64_t rows) {
  const LinearCrossEntropy *a = c->a;
  int64_t hidden_size = a->x.shape[1];
  b->global.x = push_matrix(c, "x of all ranks", a->x.dtype, rows, hidden_size);
  b->global.targets = push_vector(c, "targets of all ranks", DTYPE_I32, rows);
  b->local_targets = push_vector(c, "targets in local rows", DTYPE_I32, rows);
  int64_t parts = lce_row_parts(&b->rows) * rows;
  b->local_sums = push_vector(c, "local anchors and row sums", DTYPE_F32, parts);
  b->all_sums = push_vector(c, "anchors and row sums", DTYPE_F32, parts * c->backend->ranks);
  if (tensor_exists(a->token_weights))
    b->global.token_weights = push_vector(c, "token weights of all ranks", DTYPE_F32, rows);
  if (tensor_exists(a->dx)) b->global.dx = push_matrix(c, "parts of dx", a->dx.dtype, rows, hidden_size);
}

// The chunk's part of the buffers. Its tokens start for all ranks, and have arrived after collectives_join.
void lce_split_gather(const Call *c, Chunk *k, const Chunk *buffers, int64_t rows) {
  k->global = tokens_range(&buffers->global, 0, rows);
  k->local_targets = tensor_rows(buffers->local_targets, 0, rows);
  int64_t parts = lce_row_parts(&k->rows) * rows;
  k->local_sums = tensor_rows(buffers->local_sums, 0, parts);
  k->all_sums = tensor_rows(buffers->all_sums, 0, parts * c->backend->ranks);
  Tensor *local[] = {&k->local_rows.anchor, &k->local_rows.row_sum, &k->local_rows.e_distance,
                     &k->local_rows.max, &k->local_rows.best};
  for (int64_t i = 0, first = 0; i < 5; i++) {
    if (!tensor_exists(*local[i])) continue;
    Dtype dtype = local[i]->dtype; // as wide as fp32
    *local[i] = tensor_rows(k->local_sums, first, rows);
    local[i]->dtype = dtype;
    first += rows;
  }
  for (int i = 0; i < TOKENS_READ; i++)
    if (tensor_exists(k->local.all[i]))
      all_gather(c->backend, (Collective){.out = k->global.all[i], .x = k->local.all[i], .async = true});
}

// The targets' logits, each from the rank that has its row of W.
void lce_split_targets(const Call *c, const Chunk *k) {
  shard_indices(c->backend, (ShardIndices){.out = k->local_targets,
                                           .indices = k->global.targets,
                                           .first = c->a->shard.first,
                                           .count = c->a->weight.shape[0]});
  lce_target_z(c, k->rows.target_z, k->global.x, k->local_targets);
  all_reduce(c->backend, (Collective){.out = k->rows.target_z, .x = k->rows.target_z});
}

// Each row's sums over the whole vocabulary.
void lce_split_combine(const Call *c, const Chunk *k) {
  all_gather(c->backend, (Collective){.out = k->all_sums, .x = k->local_sums});
  lce_combine(c->backend, (LceCombine){.rows = k->rows,
                                       .parts = k->all_sums,
                                       .targets = k->global.targets,
                                       .temperature = c->a->terms.temperature});
}

// Losses and outputs of the local tokens.
void lce_split_losses(const Call *c, const Chunk *k) {
  int64_t count = k->local.x.shape[0];
  lce_rows_of(c, &k->local, loss_rows_range(&k->rows, c->backend->rank * count, count), (Tensor){0},
              (Tensor){0});
}
