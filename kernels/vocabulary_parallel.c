// linear_cross_entropy with the head's rows split over ranks, each of which has tokens of its own.
//
// Tokens travel, and the head stays. A chunk is C tokens of each of the R ranks: x [R C, H] is gathered, and
// every rank multiplies it with its own V / R rows of W. So a chunk's E takes as much memory and as many
// flops as C tokens would against the whole head, but the gradient of a row of W is made at one place, for
// all tokens: it is neither summed over ranks nor held by any other.
//
// A row of the logits now has its parts on R ranks, and little passes between them, because nothing but
// scalars depends on the whole row. The target's logit, the anchor, is computed where the target's row of W
// is and summed over the ranks (the others add 0); each rank then makes its E and its sum R_r as ever. A part
// in which some logit beats the anchor by far has its own anchor a_r, its maximum. One gather of the pairs
// (a_r, R_r), and every rank knows
//
//     a = max_r a_r;   R = sum_r R_r exp(a_r - a);   rescale = exp(a_r - a), which E on this rank lacks
//
// and with R the scales of dX and dW. dX = r (E W) + c W[y] is a sum over the vocabulary, so over ranks: each
// makes its part for all R C tokens, and a reduce_scatter hands every rank the sum for its own.
//
// What travels for a chunk, in each direction and per rank: (R - 1) C H numbers of x and as many of dX, and
// 12 R C bytes of scalars, against 6 C V H flops: at V 128,256 and 4 GPUs with 450 GB/s each way, 3% of the
// products' time. Most of it is hidden: dX leaves, and the next chunk's x arrives, while dW is computed.
//
// Beyond the layer on one rank it holds x and dX of all ranks' tokens in a chunk, 2 R C H numbers; and of as
// many of scaled x what exceeds the sweep's scratch, in whose place they lie.
//
// Measured on H200s over NVLink with N 16,384 on each, H 4,096, V 128,256 (tools/bench_lce under
// tools/launch): the layer takes 1.02 to 1.04 of the time that it takes on one GPU by itself when split over
// 2, in chunks of 1,024 to 4,096, and 1.03 to 1.06 split over 4.
#include "kernels/linear_cross_entropy_parts.h"

// A chunk's tokens of all ranks, rank by rank, and what each of them has.
typedef struct {
  Tensor x, targets, token_weights; // gathered
  Tensor local_targets;             // int32 [R C]
  Tensor local_sums, all_sums;      // fp32 [2 R C]: anchors, row sums; fp32 [R * 2 R C]
  LossRows loss;                    // of the whole vocabulary
  Tensor scaled_x, dx;              // [R C, H]; the first only after the logits-exp pass
  Tensor exps;                      // [R C, V / R]
} Gathered;

// What a call holds besides its chunks.
typedef struct {
  LossTerms terms;       // with class_weight_sum
  Tensor class_weights;  // of the own rows
  Tensor smoothing_row;  // fp32 [H]: sum_j w[j] W[j] over all rows
  Tensor smoothing_part; // over the own rows: what the own part of dx takes
  Tensor smoothing_x;    // fp32 [H]: sum_n scale_uniform[n] x[n], over all chunks and ranks
} Common;

static Common push_common(Backend *backend, const LinearCrossEntropy *a) {
  Common c = {.terms = a->terms};
  int64_t hidden_size = a->x.shape[1];
  c.class_weights = first_rows(a->terms.class_weights, a->shard.first, a->weight.shape[0]);
  if (!(a->terms.label_smoothing > 0)) return c;
  if (tensor_exists(a->terms.class_weights)) {
    c.terms.class_weight_sum = push_column(backend, "sum of class weights", 1);
    reduce(backend, (Reduce){.sum = c.terms.class_weight_sum, .x = a->terms.class_weights});
  }
  c.smoothing_row = push_column(backend, "weighted sum of W", hidden_size);
  c.smoothing_part = push_column(backend, "weighted sum of own W", hidden_size);
  if (tensor_exists(a->dx)) c.smoothing_x = push_column(backend, "weighted sum of x", hidden_size);
  weighted_column_sum(
      backend, (WeightedColumnSum){.out = c.smoothing_part, .x = a->weight, .coefficients = c.class_weights});
  all_reduce(backend, (Collective){.out = c.smoothing_row, .x = c.smoothing_part});
  return c;
}

static Gathered push_gathered(Backend *backend, const LinearCrossEntropy *a, int64_t rows) {
  Memory *m = &backend->memory;
  Dtype dtype = a->x.dtype;
  int64_t hidden_size = a->x.shape[1], vocab_rows = a->weight.shape[0];
  Gathered g = {.x = memory_push_2d(m, "x of all ranks", MEMORY_HEAD, dtype, rows, hidden_size),
                .targets = memory_push_1d(m, "targets of all ranks", MEMORY_HEAD, DTYPE_I32, rows),
                .local_targets = memory_push_1d(m, "targets in own rows", MEMORY_HEAD, DTYPE_I32, rows),
                .local_sums = push_column(backend, "local anchors and row sums", 2 * rows),
                .all_sums = push_column(backend, "anchors and row sums", 2 * rows * backend->ranks),
                .loss = push_loss_rows(backend, a, rows, rows)};
  g.loss.rescale = push_column(backend, "scales between anchors", rows);
  if (tensor_exists(a->token_weights))
    g.token_weights = push_column(backend, "token weights of all ranks", rows);
  if (!tensor_exists(a->dx)) return g;
  g.dx = memory_push_2d(m, "parts of dx", MEMORY_HEAD, a->dx.dtype, rows, hidden_size);
  g.exps = push_logits(backend, "exponentials", rows, vocab_rows, dtype);
  return g;
}

// Room for `rows` tokens of the larger.
static Gathered gathered_range(const Gathered *g, int64_t rows, int ranks) {
  return (Gathered){.x = first_rows(g->x, 0, rows),
                    .targets = first_rows(g->targets, 0, rows),
                    .token_weights = first_rows(g->token_weights, 0, rows),
                    .local_targets = first_rows(g->local_targets, 0, rows),
                    .local_sums = first_rows(g->local_sums, 0, 2 * rows),
                    .all_sums = first_rows(g->all_sums, 0, 2 * rows * ranks),
                    .loss = loss_rows_range(&g->loss, 0, rows),
                    .dx = first_rows(g->dx, 0, rows),
                    .exps = first_rows(g->exps, 0, rows)};
}

static void gather_beside(Backend *backend, Tensor out, Tensor x) {
  if (tensor_exists(x)) all_gather(backend, (Collective){.out = out, .x = x, .async = true});
}

// A chunk's tokens set out for all ranks. They are here when the collectives are joined.
static void send_tokens(Backend *backend, const Gathered *g, const Tokens *own) {
  gather_beside(backend, g->x, own->x);
  gather_beside(backend, g->targets, own->targets);
  gather_beside(backend, g->token_weights, own->token_weights);
}

// E of the own rows of W for all tokens, their part of dx, and every token's sums over the whole vocabulary.
static void sweep(Backend *backend, const LinearCrossEntropy *a, const Gathered *g) {
  int64_t rows = g->x.shape[0];
  shard_indices(backend, (ShardIndices){.out = g->local_targets,
                                        .indices = g->targets,
                                        .first = a->shard.first,
                                        .count = a->weight.shape[0]});
  LossRows local = {.target_z = g->loss.target_z,
                    .anchor = tensor_rows(g->local_sums, 0, rows),
                    .row_sum = tensor_rows(g->local_sums, rows, rows),
                    .target_e = g->loss.target_e};
  find_target_logits(backend, a, local.target_z, g->x, g->local_targets);
  all_reduce(backend, (Collective){.out = local.target_z, .x = local.target_z});
  lce_logits_exp(backend, (LceLogitsExp){.exps = g->exps,
                                         .dx_raw = g->dx,
                                         .rows = local,
                                         .x = g->x,
                                         .weight = a->weight,
                                         .targets = g->local_targets,
                                         .temperature = a->terms.temperature});
  all_gather(backend, (Collective){.out = g->all_sums, .x = g->local_sums});
  lce_combine(backend, (LceCombine){.rows = g->loss,
                                    .parts = g->all_sums,
                                    .targets = g->targets,
                                    .temperature = a->terms.temperature});
}

// What the own tokens, a part of all, are told.
static void tell_own(Backend *backend, const LinearCrossEntropy *a, const Common *c, const Gathered *g,
                     const Tokens *own) {
  int64_t count = own->x.shape[0], first = backend->rank * count;
  lce_rows(backend, (LceRows){.loss = own->loss,
                              .outputs = own->outputs,
                              .rows = loss_rows_range(&g->loss, first, count),
                              .x = tensor_rows(g->x, first, count),
                              .targets = tensor_rows(g->targets, first, count),
                              .smoothing_row = c->smoothing_row,
                              .terms = c->terms,
                              .vocab_size = a->shard.vocab_size});
}

static void scale_all(Backend *backend, const LinearCrossEntropy *a, const Common *c, const Gathered *g) {
  lce_rows(backend, (LceRows){.scaled_x = g->scaled_x,
                              .rows = g->loss,
                              .x = g->x,
                              .targets = g->targets,
                              .token_weights = g->token_weights,
                              .smoothing_row = c->smoothing_row,
                              .terms = c->terms,
                              .vocab_size = a->shard.vocab_size});
}

// The own part of all tokens' dx sets out; what else needs x is done, so that the next chunk's may come.
static void send_gradients(Backend *backend, const LinearCrossEntropy *a, const Common *c, const Gathered *g,
                           const Tokens *own, bool first) {
  lce_input_gradient(backend, (LceInputGradient){.dx = g->dx,
                                                 .rows = g->loss,
                                                 .smoothing_row = c->smoothing_part,
                                                 .weight = a->weight,
                                                 .targets = g->local_targets,
                                                 .alpha = a->scale});
  reduce_scatter(backend, (Collective){.out = own->dx, .x = g->dx, .async = true});
  add_targets(backend, a, g->loss.scale_target, g->x, g->local_targets);
  if (tensor_exists(c->smoothing_x))
    weighted_column_sum(backend, (WeightedColumnSum){.out = c->smoothing_x,
                                                     .x = g->x,
                                                     .coefficients = g->loss.scale_uniform,
                                                     .accumulate = !first});
}

// How many tokens count is up to the data: the ledger sees the scratch of a full chunk once.
static void show_full_scratch(Backend *backend, const LinearCrossEntropy *a, const Gathered *g) {
  const BackendScratch *scratch = backend->scratch;
  LceLogitsExp sweep = {
      .exps = g->exps, .dx_raw = g->dx, .x = g->x, .weight = a->weight, .targets = g->local_targets};
  if (scratch->lce_logits_exp) show_scratch(backend, "lce_logits_exp", scratch->lce_logits_exp(&sweep));
  if (tensor_exists(a->dx)) show_behind_sweep(backend, a, g->x);
}

// Some tokens of every rank on their way through the layer.
typedef struct {
  Tokens own;
  Tensor positions; // of the own tokens in the call, where they are packed
  Gathered g;
} Chunk;

static Chunk send_chunk(Backend *backend, const LinearCrossEntropy *a, const Tokens *all,
                        const Gathered *room, int64_t first, int64_t count) {
  bool packed = tensor_exists(a->rows);
  Chunk chunk = {.own = tokens_range(all, packed ? 0 : first, count),
                 .g = gathered_range(room, count * backend->ranks, backend->ranks)};
  if (packed) {
    chunk.positions = tensor_rows(a->rows, first, count);
    gather_tokens(backend, &chunk.own, a, chunk.positions);
  }
  send_tokens(backend, &chunk.g, &chunk.own);
  return chunk;
}

// What has been sent is here; the chunk before this one is complete.
static void join(Backend *backend, const LinearCrossEntropy *a, const Chunk *before) {
  collectives_join(backend, 0);
  if (tensor_exists(before->positions)) scatter_tokens(backend, &before->own, a, before->positions);
}

void vocabulary_parallel(Backend *backend, const LinearCrossEntropy *a) {
  bool packed = tensor_exists(a->rows), backward = tensor_exists(a->dx);
  int64_t tokens = a->x.shape[0], counted = packed ? a->counted : tokens;
  Common common = push_common(backend, a);
  int64_t most = even_chunk(tokens, a->chunk < tokens ? a->chunk : tokens);
  Tokens all = packed ? push_packed(backend, a, most) : tokens_of_call(a);
  Gathered room = push_gathered(backend, a, most * backend->ranks);
  if (packed) {
    show_full_scratch(backend, a, &room);
    zero_tokens(backend, a);
  }
  if (counted == 0) {
    if (backward && !a->accumulate) fill_zero(backend, a->dweight);
    return;
  }
  int64_t size = even_chunk(counted, most);
  Chunk before = {0}, chunk = send_chunk(backend, a, &all, &room, 0, size), next = {0};
  for (int64_t first = 0; first < counted; first += size, before = chunk, chunk = next) {
    join(backend, a, &before);
    sweep(backend, a, &chunk.g);
    tell_own(backend, a, &common, &chunk.g, &chunk.own);
    MemoryMark mark = memory_mark(&backend->memory);
    if (backward) {
      chunk.g.scaled_x = push_scaled_x(backend, chunk.g.x);
      scale_all(backend, a, &common, &chunk.g);
      // The first product may have to write dweight, before anything is added to it. The others go while the
      // next chunk's tokens come.
      if (first == 0) add_non_targets(backend, a, chunk.g.exps, chunk.g.scaled_x, a->accumulate);
      send_gradients(backend, a, &common, &chunk.g, &chunk.own, first == 0);
    }
    int64_t left = counted - first - size;
    if (left > 0) next = send_chunk(backend, a, &all, &room, first + size, left < size ? left : size);
    if (backward && first > 0) add_non_targets(backend, a, chunk.g.exps, chunk.g.scaled_x, true);
    memory_pop_to(&backend->memory, mark);
    if (backend->memory.planning) return; // the chunks after the first need no more
  }
  join(backend, a, &before);
  if (tensor_exists(common.smoothing_x))
    add_outer(backend, (AddOuter){.out = a->dweight,
                                  .rows = common.class_weights,
                                  .columns = common.smoothing_x,
                                  .alpha = a->scale});
}
