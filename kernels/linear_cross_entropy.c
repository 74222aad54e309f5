// linear_cross_entropy: LM head and loss without the [N, V] logits. kernels/LCE.md derives it and lists what was tried.
//
// A token's loss and gradient need no other token, and the loss is the last operation of the forward pass. So the fused
// mode takes the tokens in chunks of C and computes their gradients at once, while the chunk's [C, V] exponentials are at
// hand. For a row with logits z and target y:
//
//     a     = z[y]                                  the anchor: one dot product in fp32
//     E[j]  = exp(z[j] - a), j != y;  E[y] = 0      logits-exp pass: final as soon as the GEMM's tile is there
//     R     = sum_j E[j]                            in fp32, before E is rounded for storage
//     loss  = log1p(R)                              p_y = 1 / (1 + R)
//     dX    = r (E W)  + c W[y]                     r = 1 / (1 + R),  c = p_y - 1 = -R / (1 + R)
//     dW   += E^T (r X), and row y += c X
//
// No pass waits for a row's maximum or sum: only r and c depend on the whole row, and both act on vectors of length H.
// The target's entry, which dominates the gradient and cancels (p_y - 1), is never computed from a rounded logit. A row
// whose R exceeds a limit below fp32's range (2^96 on the CPU, 2^100 on a GPU: one logit that leads the target's by 66 or 69)
// is computed again with its maximum as the anchor. (In the code `a` is the call's arguments and `c` the call.)
//
// Weights of tokens and classes, z-loss and temperature change r and c alone; label smoothing adds two rank-one terms. A
// bias, a soft-cap, entropy and its gradient need single logits: a chunk then holds them in fp32 and they become their own
// gradient in place, as those of all tokens do at once in the materialized mode.
//
// Cost of a chunk, with e bytes an element: three GEMMs of 2 C V H flops. W is read twice (logits, dX), e V H bytes each;
// dW (fp32) is read and written, 8 V H; E is written once and read twice, 3 e C V. In bf16 W and dW make 12 V H bytes, on
// a GPU with 200 flops a byte 39% of the GEMMs' time at C = 1024 and 10% at 4096, were it not overlapped with them.
#include "kernels/linear_cross_entropy.h"

#include <math.h>

#include "base/fail.h"
#include "base/integers.h"

const char *lce_mode_name(LceMode mode) {
  return mode == LCE_FUSED ? "fused" : "materialized";
}

// --- a call ------------------------------------------------------------------------------------------------

// A full mass below which so many tiles are kept that skipping the others costs more than it saves. Measured on an H200
// (GPT-2 124M after 540 steps, chunk 4096), in times of the exact gradients: 1.00 at 2^-5, 1.12 at 2^-6; with all tiles 1.06.
static const float DENSE_BELOW = 0x1p-5f;

// What a call holds besides its chunks.
typedef struct {
  Backend *backend;
  const LinearCrossEntropy *a;
  bool backward; // dx, dweight or both
  bool logits;   // chunks hold logits, not exponentials
  bool packed;   // the counted tokens of a chunk are copied to its buffers
  bool split;    // the head's rows are split over ranks
  bool at_once;  // target logits and target gradients are those of all tokens, not of a chunk
  int64_t vocab_size;
  Tensor class_weights;   // of this rank's rows of W
  Tensor factor;          // fp32 [1], or absent
  bool sampling, dense;   // of E's tiles, for the gradients; most are expected to be kept
  Tensor smoothing_row;   // fp32 [H]: sum_j w[j] W[j] over all rows of W
  Tensor smoothing_local; // fp32 [H]: over this rank's rows
  Tensor smoothing_x;     // fp32 [H]: sum_n scale_uniform[n] x[n], over all chunks (and ranks)
} Call;

static Tensor push_vector(Backend *backend, const char *name, int64_t count) {
  return memory_push_1d(&backend->memory, name, MEMORY_HEAD, DTYPE_F32, count);
}

static Tensor push_matrix(Backend *backend, const char *name, Dtype dtype, int64_t rows, int64_t columns) {
  return memory_push_2d(&backend->memory, name, MEMORY_HEAD, dtype, rows, columns);
}

// Rows of a tensor that may be absent.
static Tensor first_rows(Tensor t, int64_t first, int64_t count) {
  return tensor_exists(t) ? tensor_rows(t, first, count) : t;
}

static void push_smoothing(Call *c) {
  Backend *backend = c->backend;
  int64_t hidden_size = c->a->x.shape[1];
  c->smoothing_row = push_vector(backend, "weighted sum of W", hidden_size);
  c->smoothing_local =
      c->split ? push_vector(backend, "weighted sum of local W", hidden_size) : c->smoothing_row;
  if (tensor_exists(c->a->dweight)) c->smoothing_x = push_vector(backend, "weighted sum of x", hidden_size);
  weighted_column_sum(
      backend,
      (WeightedColumnSum){.out = c->smoothing_local, .x = c->a->weight, .coefficients = c->class_weights});
  if (c->split) all_reduce(backend, (Collective){.out = c->smoothing_row, .x = c->smoothing_local});
}

// Completes `a` with the sum of the class weights and with memory for sampling.stats, where these are needed.
static Call begin_call(Backend *backend, LinearCrossEntropy *a) {
  Call c = {.backend = backend,
            .a = a,
            .backward = tensor_exists(a->dx) || tensor_exists(a->dweight),
            .logits = a->mode == LCE_MATERIALIZED || lce_needs_logits(a),
            .packed = a->mode == LCE_FUSED && tensor_exists(a->rows),
            .split = a->shard.vocab_size > 0};
  int64_t vocab_rows = a->weight.shape[0];
  c.at_once = !c.logits && !c.packed && !c.split;
  c.vocab_size = c.split ? a->shard.vocab_size : vocab_rows;
  c.class_weights =
      c.split ? first_rows(a->terms.class_weights, a->shard.first, vocab_rows) : a->terms.class_weights;
  bool smoothing = a->terms.label_smoothing > 0;
  if (smoothing && tensor_exists(a->terms.class_weights)) {
    a->terms.class_weight_sum = push_vector(backend, "sum of class weights", 1);
    reduce(backend, (Reduce){.sum = a->terms.class_weight_sum, .x = a->terms.class_weights});
  }
  if (a->mean) {
    c.factor = push_vector(backend, "the mean's factor", 1);
    loss_factor(
        backend,
        (LossFactor){.factor = c.factor, .targets = a->targets, .class_weights = a->terms.class_weights});
  }
  if (a->sampling.full_mass > 0) {
    if (!tensor_exists(a->sampling.stats)) a->sampling.stats = push_vector(backend, "tiles dropped", 3);
    fill_zero(backend, a->sampling.stats);
    c.sampling = c.backward;
    c.dense = a->sampling.full_mass < DENSE_BELOW || !tensor_exists(a->dweight);
  }
  if (smoothing && !c.logits) push_smoothing(&c);
  return c;
}

// --- tokens ------------------------------------------------------------------------------------------------

// Some of a call's tokens: views of the caller's tensors, or copies of the counted ones, packed.
typedef union {
  struct {
    Tensor x, targets, token_weights, entropy_weights; // read
    Tensor loss, dx;                                   // written
    TokenOutputs outputs;
  };
  Tensor all[13];
} Tokens;

enum { TOKENS_READ = 4, TOKENS_ALL = sizeof(Tokens) / sizeof(Tensor) };

static Tokens tokens_of_call(const LinearCrossEntropy *a) {
  return (Tokens){.x = a->x,
                  .targets = a->targets,
                  .token_weights = a->token_weights,
                  .entropy_weights = a->entropy_weights,
                  .loss = a->loss,
                  .dx = a->dx,
                  .outputs = a->outputs};
}

static Tokens tokens_range(const Tokens *t, int64_t first, int64_t count) {
  Tokens range;
  for (int i = 0; i < TOKENS_ALL; i++) range.all[i] = first_rows(t->all[i], first, count);
  return range;
}

// Buffers for `rows` packed tokens, of what the caller gave.
static Tokens push_packed(const Call *c, int64_t rows) {
  static const char *const names[] = {"counted rows of x",       "counted targets", "counted token weights",
                                      "counted entropy weights", "counted losses",  "counted rows of dx"};
  Tokens t = tokens_of_call(c->a);
  for (int i = 0; i < TOKENS_ALL; i++) {
    const char *name = i < (int)(sizeof names / sizeof *names) ? names[i] : "counted outputs";
    Tensor *like = &t.all[i];
    if (!tensor_exists(*like)) continue;
    *like = like->rank == 2 ? push_matrix(c->backend, name, like->dtype, rows, like->shape[1])
                            : memory_push_1d(&c->backend->memory, name, MEMORY_HEAD, like->dtype, rows);
  }
  return t;
}

static void gather_tokens(const Call *c, const Tokens *packed, Tensor positions) {
  Tokens all = tokens_of_call(c->a);
  for (int i = 0; i < TOKENS_READ; i++)
    if (tensor_exists(all.all[i]))
      gather_rows(c->backend, (MoveRows){.out = packed->all[i], .x = all.all[i], .rows = positions});
}

static void scatter_tokens(const Call *c, const Tokens *packed, Tensor positions) {
  Tokens all = tokens_of_call(c->a);
  for (int i = TOKENS_READ; i < TOKENS_ALL; i++)
    if (tensor_exists(all.all[i]))
      scatter_rows(c->backend, (MoveRows){.out = all.all[i], .x = packed->all[i], .rows = positions});
}

// What is written of tokens that do not count.
static void zero_tokens(const Call *c) {
  Tokens all = tokens_of_call(c->a);
  for (int i = TOKENS_READ; i < TOKENS_ALL; i++)
    if (tensor_exists(all.all[i])) fill_zero(c->backend, all.all[i]);
}

// --- chunks ------------------------------------------------------------------------------------------------

// A chunk of C tokens, or the buffers of the largest one. With a split head each of the G ranks gives C tokens, and all
// that follows `positions` is about G C.
typedef struct {
  Tokens local;     // this rank's; of buffers that are not packed: all of the call's
  Tensor positions; // int32 [C] of them in the call, where they are packed
  // With a split head those of all ranks, rank by rank, and dx is what this rank's rows of W add to it; else `local`.
  Tokens global;
  Tensor local_targets;        // int32 [G C]: targets as rows of this rank's W, else ELSEWHERE
  LossRows rows;               // fp32 [G C] each, of the whole vocabulary
  Tensor local_sums, all_sums; // split: fp32 [2 G C] anchors, row sums of this rank's W; fp32 [G * 2 G C]
  Tensor exps, logits;         // [G C, V / G]; one of them
  Tensor tile_sums, tiles;     // of sampling: fp32 [G C, B], [A, B], as LceSampledGradients has them
  Tensor kept;                 // likewise, for all chunks
  int64_t kept_rows;
  Tensor scaled_x; // [G C, H]; pushed by each chunk, to lie where the logits-exp pass had its scratch
} Chunk;

// At once, the target logits and scales of all tokens are kept: target rows of W and dW are then touched for thousands of
// tokens at a time, which keeps a GPU busy where a chunk of a thousand takes almost as long.
static LossRows push_loss_rows(const Call *c, int64_t rows) {
  Backend *backend = c->backend;
  int64_t lasting = c->at_once ? c->a->x.shape[0] : rows;
  LossRows r = {.row_sum = push_vector(backend, "row sums", rows),
                .target_e = push_vector(backend, "target exponentials", rows),
                .target_z = push_vector(backend, "target logits", lasting),
                .anchor = push_vector(backend, "anchors", rows)};
  if (c->split) r.rescale = push_vector(backend, "scales between anchors", rows);
  if (!c->backward) return r;
  r.scale_non_target = push_vector(backend, "scales of non-targets", rows);
  r.scale_target = push_vector(backend, "scales of the target", lasting);
  if (c->a->terms.label_smoothing > 0) r.scale_uniform = push_vector(backend, "scales of all", rows);
  return r;
}

static Tensor push_logits(const Call *c, const char *name, int64_t rows, Dtype dtype) {
  int64_t vocab_rows = c->a->weight.shape[0], stride = c->backend->scratch->logits_stride(vocab_rows, dtype);
  return tensor_columns(push_matrix(c->backend, name, dtype, rows, stride), 0, vocab_rows);
}

static void push_split(const Call *c, Chunk *b, int64_t rows) {
  Backend *backend = c->backend;
  const LinearCrossEntropy *a = c->a;
  int64_t hidden_size = a->x.shape[1];
  b->global.x = push_matrix(backend, "x of all ranks", a->x.dtype, rows, hidden_size);
  b->global.targets = memory_push_1d(&backend->memory, "targets of all ranks", MEMORY_HEAD, DTYPE_I32, rows);
  b->local_targets = memory_push_1d(&backend->memory, "targets in local rows", MEMORY_HEAD, DTYPE_I32, rows);
  b->local_sums = push_vector(backend, "local anchors and row sums", 2 * rows);
  b->all_sums = push_vector(backend, "anchors and row sums", 2 * rows * backend->ranks);
  if (tensor_exists(a->token_weights))
    b->global.token_weights = push_vector(backend, "token weights of all ranks", rows);
  if (tensor_exists(a->dx))
    b->global.dx = push_matrix(backend, "parts of dx", a->dx.dtype, rows, hidden_size);
}

static Chunk push_buffers(const Call *c, int64_t count) {
  const LinearCrossEntropy *a = c->a;
  Chunk b = {.local = c->packed ? push_packed(c, count) : tokens_of_call(a)};
  int64_t rows = c->split ? count * c->backend->ranks : count;
  if (c->logits) {
    b.logits = push_logits(c, "logits", rows, a->mode == LCE_MATERIALIZED ? a->x.dtype : DTYPE_F32);
    return b;
  }
  if (c->split) push_split(c, &b, rows);
  b.rows = push_loss_rows(c, rows);
  if (!c->backward) return b;
  b.exps = push_logits(c, "exponentials", rows, a->x.dtype);
  if (!c->sampling) return b;
  int64_t across = ceil_div(a->weight.shape[0], LCE_TILE_COLUMNS);
  b.tile_sums = push_matrix(c->backend, "row sums of tiles", DTYPE_F32, rows, across);
  b.tiles = push_matrix(c->backend, "tiles", DTYPE_F32, ceil_div(rows, LCE_TILE_ROWS), across);
  if (c->dense || !c->backend->scratch->lce_kept_bytes) return b;
  size_t bytes = c->backend->scratch->lce_kept_bytes(a->x.dtype, rows, a->weight.shape[0], a->x.shape[1],
                                                     a->sampling.full_mass);
  if (bytes)
    b.kept = memory_push_1d(&c->backend->memory, "kept tiles", MEMORY_HEAD, DTYPE_I32, (int64_t)(bytes / 4));
  b.kept_rows = rows;
  return b;
}

// The part of the buffers that `count` tokens from number `first` on need. Copies of tokens start: packed ones, and those
// of all ranks, which have arrived once finish_chunk has joined the collectives.
static Chunk start_chunk(const Call *c, const Chunk *buffers, int64_t first, int64_t count) {
  Chunk k = *buffers;
  int64_t ranks = c->backend->ranks, rows = c->split ? count * ranks : count;
  k.local = tokens_range(&buffers->local, c->packed ? 0 : first, count);
  if (c->packed) {
    k.positions = tensor_rows(c->a->rows, first, count);
    gather_tokens(c, &k.local, k.positions);
  }
  k.exps = first_rows(k.exps, 0, rows);
  k.logits = first_rows(k.logits, 0, rows);
  k.tile_sums = first_rows(k.tile_sums, 0, rows);
  k.tiles = first_rows(k.tiles, 0, ceil_div(rows, LCE_TILE_ROWS));
  k.rows = loss_rows_range(&buffers->rows, 0, rows);
  if (c->at_once) {
    k.rows.target_z = first_rows(buffers->rows.target_z, first, count);
    k.rows.scale_target = first_rows(buffers->rows.scale_target, first, count);
  }
  if (!c->split) {
    k.global = k.local, k.local_targets = k.local.targets;
    return k;
  }
  k.global = tokens_range(&buffers->global, 0, rows);
  k.local_targets = tensor_rows(k.local_targets, 0, rows);
  k.local_sums = tensor_rows(k.local_sums, 0, 2 * rows);
  k.all_sums = tensor_rows(k.all_sums, 0, 2 * rows * ranks);
  for (int i = 0; i < TOKENS_READ; i++)
    if (tensor_exists(k.local.all[i]))
      all_gather(c->backend, (Collective){.out = k.global.all[i], .x = k.local.all[i], .async = true});
  return k;
}

// The chunk's dx is complete, and the tokens of the next one have arrived.
static void finish_chunk(const Call *c, const Chunk *k) {
  if (c->split) collectives_join(c->backend, 0);
  if (tensor_exists(k->positions)) scatter_tokens(c, &k->local, k->positions);
}

// --- logits, and their gradient in place -------------------------------------------------------------------
// With all tokens in one chunk this is the materialized mode, the baseline.

// The same memory, row for row, as elements of `dtype`.
static Tensor in_place_as(Tensor t, Dtype dtype) {
  t.stride = t.stride * (int64_t)dtype_bytes(t.dtype) / (int64_t)dtype_bytes(dtype);
  t.dtype = dtype;
  return t;
}

static void logits_and_gradient(const Call *c, const Chunk *k, bool accumulate) {
  const LinearCrossEntropy *a = c->a;
  const Tokens *t = &k->local;
  Tensor dlogits = c->backward ? in_place_as(k->logits, a->x.dtype) : (Tensor){0};
  linear_forward(c->backend, (LinearForward){.out = k->logits, .x = t->x, .weight = a->weight});
  cross_entropy_in_place(c->backend, (CrossEntropyInPlace){.loss = t->loss,
                                                           .outputs = t->outputs,
                                                           .logits = k->logits,
                                                           .bias = a->bias,
                                                           .dlogits = dlogits,
                                                           .targets = t->targets,
                                                           .token_weights = t->token_weights,
                                                           .entropy_weights = t->entropy_weights,
                                                           .factor = c->factor,
                                                           .terms = a->terms,
                                                           .alpha = a->scale});
  if (tensor_exists(t->dx))
    linear_backward_input(c->backend,
                          (LinearBackwardInput){.dx = t->dx, .dout = dlogits, .weight = a->weight});
  if (!tensor_exists(a->dweight)) return;
  linear_backward_weight(c->backend, (LinearBackwardWeight){.dweight = a->dweight,
                                                            .dbias = a->dbias,
                                                            .dout = dlogits,
                                                            .x = t->x,
                                                            .alpha = 1,
                                                            .accumulate = accumulate});
}

// --- exponentials anchored at the target -------------------------------------------------------------------
//
// With the head split over G ranks, tokens travel and W stays: every rank multiplies the chunk's G C tokens with its V / G
// rows, which takes as much memory for E and as many flops as C tokens against the whole head, and makes the gradient of its
// rows for all tokens. For each row of logits, ranks share nothing but scalars: the target's logit is summed over them (all
// but one add 0), the pairs (a_g, R_g) are gathered, and LceCombine gives each rank the whole row's R. A rank's dX is its part
// of a sum over V: a reduce_scatter gives every rank the sum for its tokens. kernels/LCE.md counts what is sent. Most of it
// overlaps: dX leaves and the next x arrives while dW is computed.

// E and dx_raw of this rank's rows of W, and each token's sums over the whole vocabulary.
static void logits_exp(const Call *c, const Chunk *k) {
  Backend *backend = c->backend;
  const LinearCrossEntropy *a = c->a;
  const Tokens *t = &k->global;
  LossRows local = k->rows;
  const Tensor none = {0};
  if (c->split) {
    int64_t rows = t->x.shape[0];
    local.anchor = tensor_rows(k->local_sums, 0, rows);
    local.row_sum = tensor_rows(k->local_sums, rows, rows);
    shard_indices(backend, (ShardIndices){.out = k->local_targets,
                                          .indices = t->targets,
                                          .first = a->shard.first,
                                          .count = a->weight.shape[0]});
  }
  if (!c->at_once)
    lce_target_logits(backend, (LceTargetLogits){.target_z = local.target_z,
                                                 .x = t->x,
                                                 .weight = a->weight,
                                                 .targets = k->local_targets});
  if (c->split) all_reduce(backend, (Collective){.out = local.target_z, .x = local.target_z});
  lce_logits_exp(backend, (LceLogitsExp){.exps = k->exps,
                                         .dx_raw = c->sampling ? none : t->dx, // sampling needs R first
                                         .tile_sums = k->tile_sums,
                                         .rows = local,
                                         .x = t->x,
                                         .weight = a->weight,
                                         .targets = k->local_targets,
                                         .temperature = a->terms.temperature});
  if (!c->split) return;
  all_gather(backend, (Collective){.out = k->all_sums, .x = k->local_sums});
  lce_combine(backend, (LceCombine){.rows = k->rows,
                                    .parts = k->all_sums,
                                    .targets = t->targets,
                                    .temperature = a->terms.temperature});
}

static void rows_of_tokens(const Call *c, const Tokens *t, LossRows rows, Tensor scaled_x) {
  lce_rows(c->backend, (LceRows){.loss = t->loss,
                                 .outputs = t->outputs,
                                 .scaled_x = scaled_x,
                                 .rows = rows,
                                 .x = t->x,
                                 .targets = t->targets,
                                 .token_weights = t->token_weights,
                                 .factor = c->factor,
                                 .smoothing_row = c->smoothing_row,
                                 .terms = c->a->terms,
                                 .vocab_size = c->vocab_size});
}

// Losses and outputs of the local tokens; scales and r X of all that the chunk has.
static void losses_and_scales(const Call *c, const Chunk *k) {
  if (c->split) {
    int64_t count = k->local.x.shape[0];
    rows_of_tokens(c, &k->local, loss_rows_range(&k->rows, c->backend->rank * count, count), (Tensor){0});
    if (!c->backward) return;
  }
  rows_of_tokens(c, &k->global, k->rows, k->scaled_x);
}

// dx_raw from the tiles that are drawn, and their part of dweight. Chunks and ranks have streams of their own.
static void sampled_gradients(const Call *c, const Chunk *k, int64_t chunk, bool last) {
  const LinearCrossEntropy *a = c->a;
  const TileSampling *sampling = &a->sampling;
  const Tensor none = {0};
  lce_sampled_gradients(
      c->backend,
      (LceSampledGradients){.dx_raw = k->global.dx,
                            .dweight = c->dense ? none : a->dweight,
                            .tiles = k->tiles,
                            .stats = sampling->stats,
                            .exps = k->exps,
                            .tile_sums = k->tile_sums,
                            .rows = k->rows,
                            .weight = a->weight,
                            .scaled_x = k->scaled_x,
                            .full_mass = sampling->full_mass,
                            .seed = sampling->seed,
                            .stream = (uint64_t)(chunk * c->backend->ranks + c->backend->rank),
                            .alpha = a->scale,
                            .kept = k->kept,
                            .kept_rows = k->kept_rows,
                            .first = chunk == 0,
                            .flush = last || !c->at_once, // else a chunk's targets would be added before
                            .accumulate = a->accumulate});
}

// dweight (+)= scale E^T (r X). The caller's scale is the GEMM's alpha, so that r X stays within the normal numbers.
static void add_non_targets(const Call *c, const Chunk *k, bool accumulate) {
  linear_backward_weight(c->backend, (LinearBackwardWeight){.dweight = c->a->dweight,
                                                            .dout = k->exps,
                                                            .x = k->scaled_x,
                                                            .alpha = c->a->scale,
                                                            .accumulate = accumulate});
}

// The targets' rows of dweight += scale c x.
static void add_targets(const Call *c, Tensor scale_target, Tensor x, Tensor targets) {
  lce_target_gradient(c->backend, (LceTargetGradient){.dweight = c->a->dweight,
                                                      .scale_target = scale_target,
                                                      .x = x,
                                                      .targets = targets,
                                                      .alpha = c->a->scale});
}

static void add_all_targets(const Call *c, const Chunk *buffers) {
  enum { AT_ONCE = 16384 };
  const LinearCrossEntropy *a = c->a;
  for (int64_t first = 0, tokens = a->x.shape[0]; first < tokens; first += AT_ONCE) {
    int64_t count = min_i64(tokens - first, AT_ONCE);
    add_targets(c, tensor_rows(buffers->rows.scale_target, first, count), tensor_rows(a->x, first, count),
                tensor_rows(a->targets, first, count));
    if (c->backend->memory.planning) break;
  }
}

// dx from dx_raw, and what else needs x; the next chunk's may come then.
static void gradients_of_x(const Call *c, const Chunk *k, bool first) {
  const Tokens *t = &k->global;
  bool of_x = tensor_exists(t->dx), of_weight = tensor_exists(c->a->dweight);
  if (of_x)
    lce_input_gradient(c->backend, (LceInputGradient){.dx = t->dx,
                                                      .rows = k->rows,
                                                      .smoothing_row = c->smoothing_local,
                                                      .weight = c->a->weight,
                                                      .targets = k->local_targets,
                                                      .alpha = c->a->scale});
  if (of_x && c->split)
    reduce_scatter(c->backend, (Collective){.out = k->local.dx, .x = t->dx, .async = true});
  if (of_weight && !c->at_once) add_targets(c, k->rows.scale_target, t->x, k->local_targets);
  if (tensor_exists(c->smoothing_x))
    weighted_column_sum(c->backend, (WeightedColumnSum){.out = c->smoothing_x,
                                                        .x = t->x,
                                                        .coefficients = k->rows.scale_uniform,
                                                        .accumulate = !first});
}

// --- the chunk loop ----------------------------------------------------------------------------------------

static void run_chunks(const Call *c, const Chunk *buffers, int64_t counted, int64_t size) {
  Memory *memory = &c->backend->memory;
  bool all_of_e =
      tensor_exists(c->a->dweight) && !c->logits && (!c->sampling || c->dense); // goes into dweight
  Chunk before = {0}, chunk = start_chunk(c, buffers, 0, size), next = {0};
  for (int64_t first = 0; first < counted; first += size, before = chunk, chunk = next) {
    int64_t left = counted - first - size;
    bool accumulate = c->a->accumulate || first > 0;
    MemoryMark mark = memory_mark(memory);
    finish_chunk(c, &before);
    if (c->logits) {
      logits_and_gradient(c, &chunk, accumulate);
    } else {
      logits_exp(c, &chunk);
      if (c->backward)
        chunk.scaled_x =
            push_matrix(c->backend, "scaled x", c->a->x.dtype, chunk.global.x.shape[0], c->a->x.shape[1]);
      losses_and_scales(c, &chunk);
      if (c->backward) {
        if (c->sampling) sampled_gradients(c, &chunk, first / size, left <= 0);
        // The first GEMM of dweight may write it, before anything is added. The others overlap the collectives.
        if (all_of_e && first == 0) add_non_targets(c, &chunk, accumulate);
        gradients_of_x(c, &chunk, first == 0);
      }
    }
    if (left > 0) next = start_chunk(c, buffers, first + size, min_i64(left, size));
    if (all_of_e && first > 0) add_non_targets(c, &chunk, true);
    memory_pop_to(memory, mark);
    if (memory->planning) break; // the chunks after the first need no more
  }
  finish_chunk(c, &before);
}

// How many tokens count depends on the data, and with it the size of the operations' scratch. The ledger counts a full chunk
// first, by a backend that does nothing, so that what it says does not depend on the data.
static void plan_full_chunk(const Call *c, const Chunk *buffers, int64_t size) {
  static const BackendOps nothing;
  Backend *backend = c->backend;
  const BackendOps *ops = backend->ops;
  double wire_bytes = backend->wire_bytes;
  backend->ops = &nothing;
  run_chunks(c, buffers, size, size);
  backend->ops = ops;
  backend->wire_bytes = wire_bytes;
}

static void run_call(Backend *backend, LinearCrossEntropy *a) {
  Call c = begin_call(backend, a);
  int64_t tokens = a->x.shape[0], counted = c.packed ? a->counted : tokens;
  // The memory is that of all tokens counted: it must not depend on the data.
  int64_t max = a->mode == LCE_MATERIALIZED ? tokens : lce_used_chunk(tokens, a->chunk);
  Chunk buffers = push_buffers(&c, max);
  if (c.packed) {
    plan_full_chunk(&c, &buffers, max);
    zero_tokens(&c);
  }
  if (counted == 0) {
    if (tensor_exists(a->dweight) && !a->accumulate) fill_zero(backend, a->dweight);
    if (tensor_exists(a->dbias) && !a->accumulate) fill_zero(backend, a->dbias);
    return;
  }
  if (c.at_once)
    lce_target_logits(backend, (LceTargetLogits){.target_z = buffers.rows.target_z,
                                                 .x = a->x,
                                                 .weight = a->weight,
                                                 .targets = a->targets});
  run_chunks(&c, &buffers, counted, lce_used_chunk(counted, max));
  if (c.at_once && tensor_exists(a->dweight)) add_all_targets(&c, &buffers);
  if (tensor_exists(c.smoothing_x))
    add_outer(
        backend,
        (AddOuter){.out = a->dweight, .rows = c.class_weights, .columns = c.smoothing_x, .alpha = a->scale});
}

// --- the entry point, which checks -------------------------------------------------------------------------

bool lce_needs_logits(const LinearCrossEntropy *a) {
  return tensor_exists(a->bias) || a->terms.softcap > 0 || tensor_exists(a->entropy_weights) ||
         tensor_exists(a->outputs.entropy) || tensor_exists(a->outputs.max_logit) ||
         tensor_exists(a->outputs.predicted) || tensor_exists(a->outputs.correct);
}

// The operations get only a chunk's part, so what belongs to all tokens is measured here.
static void per_token(const char *field, Tensor t, int64_t tokens) {
  if (tensor_exists(t) && (t.rank != 1 || t.shape[0] != tokens))
    fail("linear_cross_entropy: %s is %s for %lld tokens", field, tensor_text(t).text, (long long)tokens);
}

static void check_sampling(const LinearCrossEntropy *a) {
  double mass = (double)a->sampling.full_mass;
  Tensor stats = a->sampling.stats;
  if (!(mass >= 0 && isfinite(mass)))
    fail("linear_cross_entropy: sampling.full_mass is %g, which is not 0 or more and finite", mass);
  if (tensor_exists(stats) && (stats.rank != 1 || stats.shape[0] != 3 || mass == 0))
    fail("linear_cross_entropy: sampling.stats is %s with a full_mass of %g; give fp32 [3] with sampling, "
         "and nothing without",
         tensor_text(stats).text, mass);
  if (mass > 0 && tensor_exists(a->dweight) && !tensor_exists(a->dx))
    fail("linear_cross_entropy: sampling makes dx where it makes dweight; give dx, too");
  if (mass > 0 && (a->mode == LCE_MATERIALIZED || lce_needs_logits(a)))
    fail("linear_cross_entropy: sampling acts on exponentials; leave it out, or the materialized mode, "
         "a bias, soft-cap, entropy, largest logits and predictions, which need logits");
}

static void check_shard(const Backend *backend, const LinearCrossEntropy *a) {
  const VocabShard *s = &a->shard;
  int64_t rows = a->weight.shape[0];
  if (!s->vocab_size) return;
  if (s->first < 0 || s->first > s->vocab_size - rows)
    fail("linear_cross_entropy: %lld rows from %lld on are no part of a vocabulary of %lld", (long long)rows,
         (long long)s->first, (long long)s->vocab_size);
  if (a->mode == LCE_MATERIALIZED || lce_needs_logits(a) || a->mean)
    fail("linear_cross_entropy: a head split over %d ranks supports the fused mode, and sums over row "
         "statistics alone: no bias, soft-cap, entropy, largest logits, predictions or mean",
         backend->ranks);
}

void linear_cross_entropy(Backend *backend, LinearCrossEntropy a) {
  const char *op = "linear_cross_entropy";
  if (a.x.rank != 2 || a.weight.rank != 2 || a.x.shape[1] != a.weight.shape[1])
    fail("%s: x is %s and weight is %s, whose hidden sizes differ", op, tensor_text(a.x).text,
         tensor_text(a.weight).text);
  int64_t tokens = a.x.shape[0];
  if (tokens < 1) fail("%s: x is %s, which holds no token", op, tensor_text(a.x).text);
  if (a.mode == LCE_FUSED && a.chunk < 1) fail("%s: a chunk of %lld tokens", op, (long long)a.chunk);
  if (!isfinite(a.scale)) fail("%s: scale is %g, which is not finite", op, (double)a.scale);
  if (tensor_exists(a.dx) && !tensor_same_shape(a.dx, a.x))
    fail("%s: dx is %s and x is %s", op, tensor_text(a.dx).text, tensor_text(a.x).text);
  if (tensor_exists(a.dbias) != (tensor_exists(a.bias) && tensor_exists(a.dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(a.bias).text, tensor_text(a.dbias).text);
  if (tensor_exists(a.dweight) && a.dweight.dtype != DTYPE_F32)
    fail("%s: dweight is %s, but sums over chunks need fp32", op, tensor_text(a.dweight).text);
  if (a.loss.rank != 1 || a.loss.shape[0] != tokens || a.targets.rank != 1 || a.targets.shape[0] != tokens)
    fail("%s: loss is %s and targets is %s for %lld tokens", op, tensor_text(a.loss).text,
         tensor_text(a.targets).text, (long long)tokens);
  per_token("token_weights", a.token_weights, tokens);
  per_token("entropy_weights", a.entropy_weights, tokens);
  per_token("rows", a.rows, tokens);
  for (size_t i = 0; i < sizeof a.outputs.all / sizeof *a.outputs.all; i++)
    per_token("an output", a.outputs.all[i], tokens);
  check_sampling(&a);
  check_shard(backend, &a);
  if (tensor_exists(a.rows) && (a.counted < 0 || a.counted > tokens))
    fail("%s: %lld tokens count, but rows is %s", op, (long long)a.counted, tensor_text(a.rows).text);

  MemoryMark mark = memory_mark(&backend->memory);
  run_call(backend, &a);
  memory_pop_to(&backend->memory, mark);
}

// --- how large a chunk -------------------------------------------------------------------------------------

int64_t lce_default_chunk(int64_t tokens) {
  int64_t chunk = ceil_div(tokens, 8);
  return chunk < 128 ? 128 : chunk > 4096 ? 4096 : chunk;
}

int64_t lce_used_chunk(int64_t tokens, int64_t chunk) {
  int64_t max = min_i64(chunk, tokens), even = ceil_div(tokens, ceil_div(tokens, max));
  int64_t rounded = round_up(even, 128);
  return rounded <= max ? rounded : even;
}

size_t lce_bytes(const Backend *backend, LceMode mode, int64_t chunk, LceShape s) {
  Backend *plan = plan_backend_create(backend->device, s.dtype);
  Memory *m = &plan->memory;
  MemoryCategory other = MEMORY_ACTIVATIONS;
  plan->ranks = s.ranks > 1 ? s.ranks : 1;
  int64_t vocab_rows = ceil_div(s.vocab_size, plan->ranks);
  LinearCrossEntropy a = {.mode = mode,
                          .chunk = chunk,
                          .loss = memory_push_1d(m, "loss", other, DTYPE_F32, s.tokens),
                          .dx = memory_push_2d(m, "dx", other, s.dtype, s.tokens, s.hidden_size),
                          .dweight =
                              memory_push_2d(m, "dweight", other, DTYPE_F32, vocab_rows, s.hidden_size),
                          .x = memory_push_2d(m, "x", other, s.dtype, s.tokens, s.hidden_size),
                          .weight = memory_push_2d(m, "weight", other, s.dtype, vocab_rows, s.hidden_size),
                          .targets = memory_push_1d(m, "targets", other, DTYPE_I32, s.tokens)};
  if (s.ranks > 1) a.shard.vocab_size = s.vocab_size;
  if (s.logits) a.terms.softcap = 1;
  linear_cross_entropy(plan, a);
  size_t bytes = m->ledger.highest[MEMORY_HEAD];
  backend_destroy(plan);
  return bytes;
}

typedef struct {
  const Backend *backend;
  size_t bytes;
  LceShape shape;
} Budget;

static bool chunk_fits(const void *budget, int64_t chunk) {
  const Budget *b = budget;
  return lce_bytes(b->backend, LCE_FUSED, chunk, b->shape) <= b->bytes;
}

int64_t lce_chunk_within(const Backend *backend, size_t bytes, LceShape shape) {
  Budget budget = {backend, bytes, shape};
  return largest_that_fits(chunk_fits, &budget, shape.tokens);
}
