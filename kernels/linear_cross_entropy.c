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
// No pass waits for a row's maximum or sum: only r and c depend on the whole row, and both act on vectors of length H. Where R
// exceeds LCE_LARGEST_SUM, the row is computed again with its maximum as the anchor. (In the code `a` is the call's arguments
// and `c` the call.)
//
// Files of their own have what this one calls in a line each: lce_counted.c (only some tokens count), lce_split_head.c (a head
// split over ranks), lce_sampling.c, lce_terms.c (label smoothing, and a bias's gradient), lce_known.c (gradients where log p[y] is
// known), lce_materialized.c (logits, not exponentials), lce_check.c.
#include "kernels/integers.h"
#include "kernels/lce_call.h"

static Chunk start_chunk(const Call *c, const Chunk *buffers, int64_t first, int64_t count);
static void finish_chunk(const Call *c, const Chunk *k);
static void logits_exp(const Call *c, const Chunk *k);
static void input_gradient(const Call *c, const Chunk *k);
static void add_non_targets(const Call *c, const Chunk *k, bool accumulate);
static void add_targets(const Call *c, Tensor scale_target, Tensor x, Tensor targets);

void lce_chunks(const Call *c, const Chunk *buffers, int64_t counted, int64_t size) {
  Memory *memory = &c->backend->memory;
  bool of_weight = tensor_exists(c->a->dweight), gemm_of_weight = of_weight && !c->sampled;
  Chunk before = {0}, chunk = start_chunk(c, buffers, 0, size), next = {0};
  for (int64_t first = 0; first < counted; first += size, before = chunk, chunk = next) {
    int64_t left = counted - first - size;
    bool accumulate = c->a->accumulate || first > 0;
    MemoryMark mark = memory_mark(memory);
    finish_chunk(c, &before);
    logits_exp(c, &chunk); // E, R, dX = E W
    if (c->backward)
      chunk.scaled_x = push_matrix(c, "scaled x", c->a->x.dtype, chunk.global.x.shape[0], c->a->x.shape[1]);
    if (c->split) lce_split_losses(c, &chunk);
    if (c->backward || !c->split)
      lce_rows_of(c, &chunk.global, chunk.rows, chunk.scaled_x,
                  c->targets_in_exps ? chunk.exps : (Tensor){0}); // loss, r, c, r X
    if (c->backward) {
      if (c->sampled) lce_sampling_gradients(c, &chunk, first / size, left <= 0);
      // The first GEMM of dweight may write it, before anything is added. The others overlap the collectives.
      if (gemm_of_weight && first == 0) add_non_targets(c, &chunk, accumulate);
      if (tensor_exists(c->a->dbias)) lce_bias_non_targets(c, &chunk, accumulate);
      input_gradient(c, &chunk); // dX = r dX + c W[y]
      if (of_weight && !c->at_once && !c->targets_in_exps)
        add_targets(c, chunk.rows.scale_target, chunk.global.x, chunk.local_targets);
      lce_terms_add(c, &chunk, first == 0);
    }
    if (left > 0) next = start_chunk(c, buffers, first + size, min_i64(left, size));
    if (gemm_of_weight && first > 0) add_non_targets(c, &chunk, true); // dW += E^T (r X)
    memory_pop_to(memory, mark);
    if (memory->planning) break; // the chunks after the first need no more
  }
  finish_chunk(c, &before);
}

// --- a chunk's steps ---------------------------------------------------------------------------------------

static void logits_exp(const Call *c, const Chunk *k) {
  if (c->split)
    lce_split_targets(c, k);
  else if (!c->at_once)
    lce_target_z(c, k->rows.target_z, k->global.x, k->local_targets);
  Tensor dx = {0};
  if (!c->sampled) dx = k->global.dx; // sampling needs R first
  lce_logits_exp(c->backend, (LceLogitsExp){.exps = k->exps,
                                            .dx_raw = dx,
                                            .tile_sums = k->tile_sums,
                                            .rows = k->local_rows,
                                            .x = k->global.x,
                                            .weight = c->a->weight,
                                            .bias = c->a->bias,
                                            .targets = k->local_targets,
                                            .first = c->a->shard.first,
                                            .softcap = c->a->terms.softcap,
                                            .temperature = c->a->terms.temperature});
  if (c->split) lce_split_combine(c, k);
}

void lce_rows_of(const Call *c, const Tokens *t, LossRows rows, Tensor scaled_x, Tensor exps) {
  lce_rows(c->backend, (LceRows){.loss = t->loss,
                                 .outputs = t->outputs,
                                 .scaled_x = scaled_x,
                                 .exps = exps,
                                 .rows = rows,
                                 .x = t->x,
                                 .targets = t->targets,
                                 .token_weights = t->token_weights,
                                 .factor = c->factor,
                                 .smoothing_row = c->smoothing_row,
                                 .smoothing_bias = c->smoothing_bias,
                                 .terms = c->a->terms,
                                 .vocab_size = c->vocab_size});
}

static void input_gradient(const Call *c, const Chunk *k) {
  if (!tensor_exists(k->global.dx)) return;
  lce_input_gradient(c->backend, (LceInputGradient){.dx = k->global.dx,
                                                    .rows = k->rows,
                                                    .smoothing_row = c->smoothing_local,
                                                    .weight = c->a->weight,
                                                    .targets = k->local_targets,
                                                    .alpha = c->a->scale});
  if (c->split)
    reduce_scatter(c->backend, (Collective){.out = k->local.dx, .x = k->global.dx, .async = true});
}

// The caller's scale is the GEMM's alpha, so that r X stays within the normal numbers.
static void add_non_targets(const Call *c, const Chunk *k, bool accumulate) {
  linear_backward_weight(c->backend, (LinearBackwardWeight){.dweight = c->a->dweight,
                                                            .dout = k->exps,
                                                            .x = k->scaled_x,
                                                            .alpha = c->a->scale,
                                                            .accumulate = accumulate});
}

// The targets' rows of dweight += scale c x, and of dbias += scale c.
static void add_targets(const Call *c, Tensor scale_target, Tensor x, Tensor targets) {
  LceTargetGradient of_weight = {.dweight = c->a->dweight,
                                 .scale_target = scale_target,
                                 .x = x,
                                 .targets = targets,
                                 .alpha = c->a->scale};
  lce_target_gradient(c->backend, of_weight);
  if (!tensor_exists(c->a->dbias)) return;
  LceTargetGradient of_bias = of_weight;
  of_bias.dweight = as_column(c->a->dbias), of_bias.x = as_column(scale_target);
  of_bias.scale_target = (Tensor){0};
  lce_target_gradient(c->backend, of_bias);
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

// --- chunks of the buffers ---------------------------------------------------------------------------------

// At once, the target logits and scales of all tokens are kept: target rows of W and dW are then touched for thousands of
// tokens at a time, which keeps a GPU busy where a chunk of a thousand takes almost as long.
static LossRows push_loss_rows(const Call *c, int64_t rows) {
  int64_t lasting = c->at_once ? c->a->x.shape[0] : rows;
  LossRows r = {.row_sum = c->a->exps_sum,
                .target_e = push_vector(c, "target exponentials", DTYPE_F32, rows),
                .target_z = push_vector(c, "target logits", DTYPE_F32, lasting),
                .anchor = push_vector(c, "anchors", DTYPE_F32, rows)};
  if (!tensor_exists(r.row_sum)) r.row_sum = push_vector(c, "row sums", DTYPE_F32, rows);
  if (tensor_exists(c->a->outputs.entropy))
    r.e_distance = push_vector(c, "sums of distances", DTYPE_F32, rows);
  if (token_outputs_need_max(&c->a->outputs)) {
    r.max = push_vector(c, "largest logits", DTYPE_F32, rows);
    r.best = push_vector(c, "columns of the largest logits", DTYPE_I32, rows);
  }
  if (c->split) r.rescale = push_vector(c, "scales between anchors", DTYPE_F32, rows);
  if (!c->backward) return r;
  r.scale_non_target = push_vector(c, "scales of non-targets", DTYPE_F32, rows);
  r.scale_target = push_vector(c, "scales of the target", DTYPE_F32, lasting);
  if (c->a->terms.label_smoothing > 0) r.scale_uniform = push_vector(c, "scales of all", DTYPE_F32, rows);
  return r;
}

static Chunk push_buffers(const Call *c, int64_t count) {
  Chunk b = {.local = c->counted ? lce_counted_buffers(c, count) : c->tokens};
  int64_t rows = c->split ? count * c->backend->ranks : count;
  b.rows = push_loss_rows(c, rows);
  if (c->split) lce_split_buffers(c, &b, rows);
  b.exps = c->backward ? push_logits(c, "exponentials", rows) : c->a->exps;
  if (c->sampled) lce_sampling_buffers(c, &b, rows);
  return b;
}

// The part of the buffers that `count` tokens from number `first` on need.
static Chunk start_chunk(const Call *c, const Chunk *buffers, int64_t first, int64_t count) {
  Chunk k = *buffers;
  int64_t rows = c->split ? count * c->backend->ranks : count;
  k.local = tokens_range(&buffers->local, c->counted ? 0 : first, count);
  if (c->counted) lce_counted_gather(c, &k, first, count);
  k.global = k.local, k.local_targets = k.local.targets;
  k.exps = first_rows(k.exps, 0, rows);
  k.tile_sums = first_rows(k.tile_sums, 0, rows);
  k.tiles = first_rows(k.tiles, 0, ceil_div(rows, LCE_TILE_ROWS));
  k.rows = loss_rows_range(&buffers->rows, 0, rows);
  if (c->at_once) {
    k.rows.target_z = first_rows(buffers->rows.target_z, first, count);
    k.rows.scale_target = first_rows(buffers->rows.scale_target, first, count);
  }
  k.local_rows = k.rows;
  if (c->split) lce_split_gather(c, &k, buffers, rows);
  return k;
}

// The chunk's dx is complete, and the tokens of the next one have arrived.
static void finish_chunk(const Call *c, const Chunk *k) {
  if (c->split) collectives_join(c->backend, 0);
  if (tensor_exists(k->positions)) lce_counted_scatter(c, k);
}

// --- the call ----------------------------------------------------------------------------------------------

const char *lce_mode_name(LceMode mode) {
  return mode == LCE_FUSED ? "fused" : "materialized";
}

int64_t lce_default_chunk(DeviceKind device, int64_t tokens) {
  return min_i64(4096,
                 device == ON_CUDA ? max_i64(1024, ceil_div(tokens, 8)) : max_i64(112, ceil_div(tokens, 9)));
}

int64_t lce_used_chunk(int64_t tokens, int64_t chunk) {
  int64_t max = min_i64(chunk, tokens), even = ceil_div(tokens, ceil_div(tokens, max));
  int64_t rounded = round_up(even, 128);
  return rounded <= max ? rounded : even;
}

static Call begin_call(Backend *backend, LinearCrossEntropy *a) {
  Call c = {.backend = backend,
            .a = a,
            .tokens = {.x = a->x,
                       .targets = a->targets,
                       .token_weights = a->token_weights,
                       .loss = a->loss,
                       .dx = a->dx,
                       .outputs = a->outputs},
            .backward = tensor_exists(a->dx) || tensor_exists(a->dweight),
            .counted = tensor_exists(a->rows),
            .split = a->shard.vocab_size > 0,
            .vocab_size = a->weight.shape[0],
            .class_weights = a->terms.class_weights};
  c.targets_in_exps = tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32;
  c.at_once = !c.counted && !c.split && !c.targets_in_exps;
  if (c.split) {
    c.vocab_size = a->shard.vocab_size;
    c.class_weights = first_rows(a->terms.class_weights, a->shard.first, a->weight.shape[0]);
  }
  lce_sampling_begin(&c, a);
  lce_terms_begin(&c, a);
  return c;
}

static void fused(const Call *c) {
  const LinearCrossEntropy *a = c->a;
  int64_t tokens = a->x.shape[0], counted = c->counted ? a->counted : tokens;
  // The memory is that of all tokens counted: it must not depend on the data.
  int64_t max = lce_used_chunk(tokens, a->chunk);
  Chunk buffers = push_buffers(c, max);
  if (c->counted) lce_counted_begin(c, &buffers, max);
  if (counted == 0) {
    if (tensor_exists(a->dweight) && !a->accumulate) fill_zero(c->backend, a->dweight);
    if (tensor_exists(a->dbias) && !a->accumulate) fill_zero(c->backend, a->dbias);
    return;
  }
  if (c->at_once) lce_target_z(c, buffers.rows.target_z, a->x, a->targets);
  lce_chunks(c, &buffers, counted, lce_used_chunk(counted, max));
  if (c->at_once && tensor_exists(a->dweight)) add_all_targets(c, &buffers);
  lce_terms_end(c);
}

void linear_cross_entropy(Backend *backend, LinearCrossEntropy a) {
  lce_check(backend, &a);
  MemoryMark mark = memory_mark(&backend->memory);
  Call c = begin_call(backend, &a);
  if (tensor_exists(a.known_log_prob))
    lce_known_gradients(&c);
  else if (lce_holds_logits(&a))
    lce_materialized(&c);
  else
    fused(&c);
  memory_pop_to(&backend->memory, mark);
}
