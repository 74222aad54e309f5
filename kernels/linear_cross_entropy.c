// linear_cross_entropy: where the memory of a large vocabulary goes, and how not to spend it.
//
// The logits of N tokens over a vocabulary of V are an [N, V] matrix that exists only to be reduced to N
// losses and turned into a gradient of the same size. At N = 32,768 and V = 128,256 that is 7.8 GiB in bf16
// and 15.7 GiB in fp32, more than everything else in the step of a small model. But a token's loss and
// gradient need no other token, so the layer walks the tokens in chunks of C and holds [C, V] at a time. And
// because the loss is the last operation, its gradients can be computed right there, in the forward pass,
// while the chunk is at hand.
//
// The arithmetic is anchored at the target. For a row with logits z and target y:
//
//     a     = z[y]                                  the anchor, one dot product in fp32
//     E[j]  = exp(z[j] - a), j != y;  E[y] = 0      final as soon as the product's tile is there
//     R     = sum_j E[j]                            in fp32, before E is rounded for storage
//     loss  = log1p(R)                              p_y = 1/(1+R)
//     dX    = r (E W)  + c W[y]                     r = 1/(1+R),  c = p_y - 1 = -R/(1+R)
//     dW   += E^T (r X), and row y += c X
//
// Usual softmax code finds the row maximum, then the sum, then the gradient: the logits are read and written
// again and again. Here no pass waits for another, since nothing but r and c depends on the whole row and
// both act on vectors of length H. And the target's own entry, the one that dominates the gradient and
// cancels (p_y - 1), never meets a rounded logit: it is -R/(1+R), applied in fp32 beside the products. A
// nearly certain token has a loss of R itself, with all its digits.
//
// The exponential overflows when a logit beats the target's by more than 88, a loss no working model has.
// Those rows, and a few short of it whose sums would leave r no normal number, are found by R and redone with
// the row's maximum as anchor (LceLogitsExp).
//
// Most other terms of the loss (kernels.h) act on whole rows, and so on r and c alone: weights of tokens and
// classes, z-loss, temperature. Label smoothing subtracts the same vector, eps/V sum_j w[j] W[j], from every
// token's dX, and from every row of dW the same sum of x: two rank-one terms, one pass over W and one over
// dW. A bias, a soft-cap, entropy and its gradient act on single logits: a chunk then holds its logits in
// fp32, and they become their own gradient in place, as all tokens' do at once in the materialized mode.
//
// A filter (LossTerms.filter) leaves what is too small to matter in E out of the products that are still to
// come. It must know R first, so dX is then made after the sweep, from the tiles that are left, like dW.
//
// Memory traffic per chunk, with e bytes an element: W is read three times (logits, dX, and nothing for dW),
// E is written once and read twice, dW (fp32) is read and written once. So small chunks cost traffic of W and
// dW, (2 e + 8) V H bytes each, against 6 C V H flops: on a GPU with 200 flops a byte a chunk of 1024 pays
// about 8% for it, one of 4096 next to nothing.
#include "kernels/linear_cross_entropy_parts.h"

#include "base/fail.h"
#include "base/integers.h"

const char *lce_mode_name(LceMode mode) {
  return mode == LCE_FUSED ? "fused" : "materialized";
}

// --- what a call holds besides its chunks ------------------------------------------------------------------

typedef struct {
  LossTerms terms;      // with class_weight_sum
  Tensor factor;        // fp32 [1], or absent
  Tensor smoothing_row; // fp32 [H]: sum_j w[j] W[j]
  Tensor smoothing_x;   // fp32 [H]: sum_n scale_uniform[n] x[n], over all chunks
  Tensor filtered;      // fp32 [3]: see LinearCrossEntropy; there when terms.filter is
} Common;

Tensor push_column(Backend *backend, const char *name, int64_t rows) {
  return memory_push_1d(&backend->memory, name, MEMORY_HEAD, DTYPE_F32, rows);
}

static Common push_common(Backend *backend, const LinearCrossEntropy *a, bool rank_one_terms) {
  Common c = {.terms = a->terms};
  bool smoothing = a->terms.label_smoothing > 0;
  if (smoothing && tensor_exists(a->terms.class_weights)) {
    c.terms.class_weight_sum = push_column(backend, "sum of class weights", 1);
    reduce(backend, (Reduce){.sum = c.terms.class_weight_sum, .x = a->terms.class_weights});
  }
  if (a->mean) {
    c.factor = push_column(backend, "the mean's factor", 1);
    loss_factor(
        backend,
        (LossFactor){.factor = c.factor, .targets = a->targets, .class_weights = a->terms.class_weights});
  }
  if (a->terms.filter > 0) {
    c.filtered = tensor_exists(a->filtered) ? a->filtered : push_column(backend, "what is filtered", 3);
    fill_zero(backend, c.filtered);
  }
  if (!smoothing || !rank_one_terms) return c;
  c.smoothing_row = push_column(backend, "weighted sum of W", a->x.shape[1]);
  if (tensor_exists(a->dx)) c.smoothing_x = push_column(backend, "weighted sum of x", a->x.shape[1]);
  weighted_column_sum(
      backend,
      (WeightedColumnSum){.out = c.smoothing_row, .x = a->weight, .coefficients = a->terms.class_weights});
  return c;
}

// --- tokens of a call --------------------------------------------------------------------------------------

enum { OUTPUTS = sizeof(TokenOutputs) / sizeof(Tensor) };

Tensor first_rows(Tensor t, int64_t first, int64_t count) {
  return tensor_exists(t) ? tensor_rows(t, first, count) : t;
}

Tokens tokens_range(const Tokens *t, int64_t first, int64_t count) {
  Tokens part = {.x = first_rows(t->x, first, count),
                 .targets = first_rows(t->targets, first, count),
                 .token_weights = first_rows(t->token_weights, first, count),
                 .entropy_weights = first_rows(t->entropy_weights, first, count),
                 .loss = first_rows(t->loss, first, count),
                 .dx = first_rows(t->dx, first, count)};
  for (int i = 0; i < OUTPUTS; i++) part.outputs.all[i] = first_rows(t->outputs.all[i], first, count);
  return part;
}

Tokens tokens_of_call(const LinearCrossEntropy *a) {
  return (Tokens){.x = a->x,
                  .targets = a->targets,
                  .token_weights = a->token_weights,
                  .entropy_weights = a->entropy_weights,
                  .loss = a->loss,
                  .dx = a->dx,
                  .outputs = a->outputs};
}

static Tensor push_like(Backend *backend, const char *name, Tensor t, int64_t rows) {
  if (!tensor_exists(t)) return t;
  return t.rank == 1 ? memory_push_1d(&backend->memory, name, MEMORY_HEAD, t.dtype, rows)
                     : memory_push_2d(&backend->memory, name, MEMORY_HEAD, t.dtype, rows, t.shape[1]);
}

Tokens push_packed(Backend *backend, const LinearCrossEntropy *a, int64_t rows) {
  Tokens t = {.x = push_like(backend, "counted rows of x", a->x, rows),
              .targets = push_like(backend, "counted targets", a->targets, rows),
              .token_weights = push_like(backend, "counted token weights", a->token_weights, rows),
              .entropy_weights = push_like(backend, "counted entropy weights", a->entropy_weights, rows),
              .loss = push_like(backend, "counted losses", a->loss, rows),
              .dx = push_like(backend, "counted rows of dx", a->dx, rows)};
  for (int i = 0; i < OUTPUTS; i++)
    t.outputs.all[i] = push_like(backend, "counted outputs", a->outputs.all[i], rows);
  return t;
}

static void gather(Backend *backend, Tensor packed, Tensor x, Tensor rows) {
  if (tensor_exists(packed)) gather_rows(backend, (MoveRows){.out = packed, .x = x, .rows = rows});
}

static void scatter(Backend *backend, Tensor out, Tensor packed, Tensor rows) {
  if (tensor_exists(packed)) scatter_rows(backend, (MoveRows){.out = out, .x = packed, .rows = rows});
}

void gather_tokens(Backend *backend, const Tokens *packed, const LinearCrossEntropy *a, Tensor rows) {
  gather(backend, packed->x, a->x, rows);
  gather(backend, packed->targets, a->targets, rows);
  gather(backend, packed->token_weights, a->token_weights, rows);
  gather(backend, packed->entropy_weights, a->entropy_weights, rows);
}

void scatter_tokens(Backend *backend, const Tokens *packed, const LinearCrossEntropy *a, Tensor rows) {
  scatter(backend, a->loss, packed->loss, rows);
  scatter(backend, a->dx, packed->dx, rows);
  for (int i = 0; i < OUTPUTS; i++) scatter(backend, a->outputs.all[i], packed->outputs.all[i], rows);
}

void zero_tokens(Backend *backend, const LinearCrossEntropy *a) {
  fill_zero(backend, a->loss);
  if (tensor_exists(a->dx)) fill_zero(backend, a->dx);
  for (int i = 0; i < OUTPUTS; i++)
    if (tensor_exists(a->outputs.all[i])) fill_zero(backend, a->outputs.all[i]);
}

// --- logits, and their gradient in place -------------------------------------------------------------------
// All tokens at once this is the materialized mode, the honest baseline. A chunk at a time it is the way of
// the terms that need a row's logits side by side.

Tensor push_logits(Backend *backend, const char *name, int64_t rows, int64_t vocab_size, Dtype dtype) {
  int64_t stride = backend->scratch->logits_stride(vocab_size, dtype);
  Tensor padded = memory_push_2d(&backend->memory, name, MEMORY_HEAD, dtype, rows, stride);
  return tensor_columns(padded, 0, vocab_size);
}

// The same memory, row for row, as numbers of `dtype`.
static Tensor in_place_as(Tensor t, Dtype dtype) {
  t.stride = t.stride * (int64_t)dtype_bytes(t.dtype) / (int64_t)dtype_bytes(dtype);
  t.dtype = dtype;
  return t;
}

static void logits_and_gradient(Backend *backend, const LinearCrossEntropy *a, const Common *common,
                                Tensor logits, const Tokens *t, bool accumulate) {
  bool backward = tensor_exists(t->dx);
  Tensor dlogits = backward ? in_place_as(logits, a->x.dtype) : (Tensor){0};
  linear_forward(backend, (LinearForward){.out = logits, .x = t->x, .weight = a->weight});
  cross_entropy_in_place(backend, (CrossEntropyInPlace){.loss = t->loss,
                                                        .outputs = t->outputs,
                                                        .logits = logits,
                                                        .bias = a->bias,
                                                        .dlogits = dlogits,
                                                        .targets = t->targets,
                                                        .token_weights = t->token_weights,
                                                        .entropy_weights = t->entropy_weights,
                                                        .factor = common->factor,
                                                        .terms = common->terms,
                                                        .alpha = a->scale});
  if (!backward) return;
  linear_backward_input(backend, (LinearBackwardInput){.dx = t->dx, .dout = dlogits, .weight = a->weight});
  linear_backward_weight(backend, (LinearBackwardWeight){.dweight = a->dweight,
                                                         .dbias = a->dbias,
                                                         .dout = dlogits,
                                                         .x = t->x,
                                                         .alpha = 1,
                                                         .accumulate = accumulate});
}

static void materialized(Backend *backend, const LinearCrossEntropy *a) {
  Common common = push_common(backend, a, false);
  Tensor logits = push_logits(backend, "logits", a->x.shape[0], a->weight.shape[0], a->x.dtype);
  Tokens all = tokens_of_call(a);
  logits_and_gradient(backend, a, &common, logits, &all, a->accumulate);
}

// --- exponentials anchored at the target -------------------------------------------------------------------

// What a chunk of C tokens needs, pushed once and used by every chunk; but scaled_x is pushed by each, to
// lie where the sweep's scratch has been. Only the targets' logits and scales are kept for all tokens: the
// targets' rows of weight and dweight are touched for thousands of tokens at a time, which keeps a GPU busy
// where a chunk of a thousand takes almost as long. Packed tokens come and go with their chunk, and so do
// these.
typedef struct {
  LossRows loss;
  Tensor scaled_x; // [C, H]
  Tensor exps;     // [C, V]
  Tensor tiles;    // of the filter: see LceFilter
} Rows;

LossRows push_loss_rows(Backend *backend, const LinearCrossEntropy *a, int64_t rows, int64_t lasting) {
  LossRows r = {.row_sum = push_column(backend, "row sums", rows),
                .target_e = push_column(backend, "target exponentials", rows),
                .target_z = push_column(backend, "target logits", lasting),
                .anchor = push_column(backend, "anchors", rows)};
  if (!tensor_exists(a->dx)) return r;
  r.scale_non_target = push_column(backend, "scales of non-targets", rows);
  r.scale_target = push_column(backend, "scales of the target", lasting);
  if (a->terms.label_smoothing > 0) r.scale_uniform = push_column(backend, "scales of all", rows);
  return r;
}

static Rows push_rows(Backend *backend, const LinearCrossEntropy *a, int64_t rows) {
  int64_t lasting = tensor_exists(a->rows) ? rows : a->x.shape[0];
  Rows r = {.loss = push_loss_rows(backend, a, rows, lasting)};
  if (!tensor_exists(a->dx)) return r;
  r.exps = push_logits(backend, "exponentials", rows, a->weight.shape[0], a->x.dtype);
  if (a->terms.filter > 0)
    r.tiles =
        memory_push_2d(&backend->memory, "tiles to filter", MEMORY_HEAD, DTYPE_F32,
                       ceil_div(rows, LCE_FILTER_ROWS), ceil_div(a->weight.shape[0], LCE_FILTER_COLUMNS));
  return r;
}

// The first `count` of a chunk whose first token's target is number `target_first`.
static Rows rows_range(const Rows *r, int64_t target_first, int64_t count) {
  Rows range = {.loss = loss_rows_range(&r->loss, 0, count),
                .exps = first_rows(r->exps, 0, count),
                .tiles = first_rows(r->tiles, 0, ceil_div(count, LCE_FILTER_ROWS))};
  range.loss.target_z = first_rows(r->loss.target_z, target_first, count);
  range.loss.scale_target = first_rows(r->loss.scale_target, target_first, count);
  return range;
}

Tensor push_scaled_x(Backend *backend, Tensor x) {
  return memory_push_2d(&backend->memory, "scaled x", MEMORY_HEAD, x.dtype, x.shape[0], x.shape[1]);
}

void find_target_logits(Backend *backend, const LinearCrossEntropy *a, Tensor target_z, Tensor x,
                        Tensor targets) {
  lce_target_logits(backend,
                    (LceTargetLogits){.target_z = target_z, .x = x, .weight = a->weight, .targets = targets});
}

void add_non_targets(Backend *backend, const LinearCrossEntropy *a, Tensor exps, Tensor scaled_x,
                     bool accumulate) {
  linear_backward_weight(
      backend,
      (LinearBackwardWeight){
          .dweight = a->dweight, .dout = exps, .x = scaled_x, .alpha = a->scale, .accumulate = accumulate});
}

void add_targets(Backend *backend, const LinearCrossEntropy *a, Tensor scale_target, Tensor x,
                 Tensor targets) {
  lce_target_gradient(backend, (LceTargetGradient){.dweight = a->dweight,
                                                   .scale_target = scale_target,
                                                   .x = x,
                                                   .targets = targets,
                                                   .alpha = a->scale});
}

// What the sweep makes of dx: nothing where the filter must look at E first.
static Tensor swept_dx(const LinearCrossEntropy *a, const Tokens *t) {
  const Tensor none = {0};
  return a->terms.filter > 0 ? none : t->dx;
}

// dx_raw and the others' part of dweight, from the tiles that the filter leaves.
static LceFilteredGemms filtered_gemms(const LinearCrossEntropy *a, const Rows *r, const Tokens *t,
                                       bool accumulate) {
  return (LceFilteredGemms){.dx_raw = t->dx,
                            .dweight = a->dweight,
                            .tiles = r->tiles,
                            .exps = r->exps,
                            .weight = a->weight,
                            .scaled_x = r->scaled_x,
                            .alpha = a->scale,
                            .accumulate = accumulate};
}

// Sweep, row statistics, the gradients but for the targets' rows of weight and dweight, for tokens from
// number `first` on. `accumulate`: a chunk has been before this one, or the caller adds.
static void anchored(Backend *backend, const LinearCrossEntropy *a, const Common *common,
                     const Rows *all_rows, const Tokens *t, int64_t first, bool accumulate) {
  bool packed = tensor_exists(a->rows), filter = a->terms.filter > 0;
  Rows r = rows_range(all_rows, packed ? 0 : first, t->x.shape[0]);
  if (packed) find_target_logits(backend, a, r.loss.target_z, t->x, t->targets);
  lce_logits_exp(backend, (LceLogitsExp){.exps = r.exps,
                                         .dx_raw = swept_dx(a, t),
                                         .rows = r.loss,
                                         .x = t->x,
                                         .weight = a->weight,
                                         .targets = t->targets,
                                         .temperature = common->terms.temperature});
  MemoryMark mark = memory_mark(&backend->memory);
  if (tensor_exists(t->dx)) r.scaled_x = push_scaled_x(backend, t->x);
  lce_rows(backend, (LceRows){.loss = t->loss,
                              .outputs = t->outputs,
                              .scaled_x = r.scaled_x,
                              .rows = r.loss,
                              .x = t->x,
                              .targets = t->targets,
                              .token_weights = t->token_weights,
                              .factor = common->factor,
                              .smoothing_row = common->smoothing_row,
                              .terms = common->terms,
                              .vocab_size = a->weight.shape[0]});
  if (!tensor_exists(t->dx)) return;
  bool smoothing = tensor_exists(common->smoothing_row);
  if (filter) {
    lce_filter(backend, (LceFilter){.tiles = r.tiles,
                                    .stats = common->filtered,
                                    .exps = r.exps,
                                    .rows = r.loss,
                                    .epsilon = a->terms.filter});
    lce_filtered_gemms(backend, filtered_gemms(a, &r, t, accumulate));
  }
  lce_input_gradient(backend, (LceInputGradient){.dx = t->dx,
                                                 .rows = r.loss,
                                                 .smoothing_row = common->smoothing_row,
                                                 .weight = a->weight,
                                                 .targets = t->targets,
                                                 .alpha = a->scale});
  if (!filter) add_non_targets(backend, a, r.exps, r.scaled_x, accumulate);
  if (packed) add_targets(backend, a, r.loss.scale_target, t->x, t->targets);
  if (smoothing)
    weighted_column_sum(backend, (WeightedColumnSum){.out = common->smoothing_x,
                                                     .x = t->x,
                                                     .coefficients = r.loss.scale_uniform,
                                                     .accumulate = first > 0});
  memory_pop_to(&backend->memory, mark);
}

// --- the fused mode ----------------------------------------------------------------------------------------

int64_t even_chunk(int64_t tokens, int64_t most) {
  int64_t even = ceil_div(tokens, ceil_div(tokens, most)), stepped = ceil_div(even, 128) * 128;
  return stepped <= most ? stepped : even;
}

void show_scratch(Backend *backend, const char *op, size_t bytes) {
  MemoryMark mark = memory_mark(&backend->memory);
  memory_push_1d(&backend->memory, op, MEMORY_HEAD, DTYPE_I32, (int64_t)((bytes + 3) / 4));
  memory_pop_to(&backend->memory, mark);
}

void show_behind_sweep(Backend *backend, const LinearCrossEntropy *a, Tensor x) {
  const BackendScratch *scratch = backend->scratch;
  LceTargetGradient targets = {.dweight = a->dweight, .x = x};
  WeightedColumnSum sum = {.x = x};
  MemoryMark mark = memory_mark(&backend->memory);
  push_scaled_x(backend, x);
  show_scratch(backend, "lce_target_gradient",
               scratch->lce_target_gradient ? scratch->lce_target_gradient(&targets) : 0);
  if (a->terms.label_smoothing > 0)
    show_scratch(backend, "weighted_column_sum",
                 scratch->weighted_column_sum ? scratch->weighted_column_sum(&sum) : 0);
  memory_pop_to(&backend->memory, mark);
}

// How many tokens count is up to the data, and with it the size of the operations' scratch: the ledger sees
// that of a full chunk once, so that what it says does not depend on the data.
static void show_full_scratch(Backend *backend, const LinearCrossEntropy *a, const Tokens *t, const Rows *r,
                              Tensor logits) {
  const BackendScratch *scratch = backend->scratch;
  bool filter = a->terms.filter > 0 && tensor_exists(t->dx);
  LceLogitsExp sweep = {
      .exps = r->exps, .dx_raw = swept_dx(a, t), .x = t->x, .weight = a->weight, .targets = t->targets};
  if (!tensor_exists(logits))
    show_scratch(backend, "lce_logits_exp", scratch->lce_logits_exp ? scratch->lce_logits_exp(&sweep) : 0);
  if (filter) {
    LceFilteredGemms products = filtered_gemms(a, r, t, false);
    show_scratch(backend, "lce_filtered_gemms",
                 scratch->lce_filtered_gemms ? scratch->lce_filtered_gemms(&products) : 0);
  }
  if (tensor_exists(t->dx) && !tensor_exists(logits)) show_behind_sweep(backend, a, t->x);
  if (tensor_exists(a->dbias)) {
    LinearBackwardWeight weight = {.dweight = a->dweight, .dbias = a->dbias, .dout = logits, .x = t->x};
    show_scratch(backend, "linear_backward_weight",
                 scratch->linear_backward_weight ? scratch->linear_backward_weight(&weight) : 0);
  }
}

static void add_all_targets(Backend *backend, const LinearCrossEntropy *a, const Rows *r) {
  enum { AT_ONCE = 16384 };
  for (int64_t first = 0, tokens = a->x.shape[0]; first < tokens; first += AT_ONCE) {
    int64_t count = tokens - first < AT_ONCE ? tokens - first : AT_ONCE;
    add_targets(backend, a, tensor_rows(r->loss.scale_target, first, count), tensor_rows(a->x, first, count),
                tensor_rows(a->targets, first, count));
    if (backend->memory.planning) break;
  }
}

static void fused(Backend *backend, const LinearCrossEntropy *a) {
  bool packed = tensor_exists(a->rows), backward = tensor_exists(a->dx), needs_logits = lce_needs_logits(a);
  int64_t tokens = a->x.shape[0], counted = packed ? a->counted : tokens;
  Common common = push_common(backend, a, !needs_logits);
  // The memory is that of all tokens counted: it must not depend on the data.
  int64_t most = even_chunk(tokens, a->chunk < tokens ? a->chunk : tokens);
  Tokens all = packed ? push_packed(backend, a, most) : tokens_of_call(a);
  Rows rows = {0};
  Tensor logits = {0};
  if (needs_logits)
    logits = push_logits(backend, "logits", most, a->weight.shape[0], DTYPE_F32);
  else
    rows = push_rows(backend, a, most);
  if (packed) {
    show_full_scratch(backend, a, &all, &rows, logits);
    zero_tokens(backend, a);
  }
  if (counted == 0 && backward && !a->accumulate) {
    fill_zero(backend, a->dweight);
    if (tensor_exists(a->dbias)) fill_zero(backend, a->dbias);
  }
  if (!needs_logits && !packed) find_target_logits(backend, a, rows.loss.target_z, a->x, a->targets);
  int64_t size = counted ? even_chunk(counted, most) : 0;
  for (int64_t first = 0; first < counted; first += size) {
    int64_t count = first + size < counted ? size : counted - first;
    Tokens t = tokens_range(&all, packed ? 0 : first, count);
    Tensor positions = packed ? tensor_rows(a->rows, first, count) : (Tensor){0};
    if (packed) gather_tokens(backend, &t, a, positions);
    bool accumulate = a->accumulate || first > 0;
    if (needs_logits)
      logits_and_gradient(backend, a, &common, tensor_rows(logits, 0, count), &t, accumulate);
    else
      anchored(backend, a, &common, &rows, &t, first, accumulate);
    if (packed) scatter_tokens(backend, &t, a, positions);
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
  if (backward && !needs_logits && !packed) add_all_targets(backend, a, &rows);
  if (counted && tensor_exists(common.smoothing_x))
    add_outer(backend, (AddOuter){.out = a->dweight,
                                  .rows = a->terms.class_weights,
                                  .columns = common.smoothing_x,
                                  .alpha = a->scale});
}

// --- the door ----------------------------------------------------------------------------------------------

bool lce_needs_logits(const LinearCrossEntropy *a) {
  return tensor_exists(a->bias) || a->terms.softcap > 0 || tensor_exists(a->entropy_weights) ||
         tensor_exists(a->outputs.entropy) || tensor_exists(a->outputs.max_logit) ||
         tensor_exists(a->outputs.predicted) || tensor_exists(a->outputs.correct);
}

// The operations see a chunk's part only, so what belongs to all tokens is measured here.
static void per_token(const char *field, Tensor t, int64_t tokens) {
  if (tensor_exists(t) && (t.rank != 1 || t.shape[0] != tokens))
    fail("linear_cross_entropy: %s is %s for %lld tokens", field, tensor_text(t).text, (long long)tokens);
}

static void check_filter(const LinearCrossEntropy *a) {
  double filter = (double)a->terms.filter;
  if (!(filter >= 0 && filter < 1))
    fail("linear_cross_entropy: filter is %g, which is not in [0, 1)", filter);
  if (tensor_exists(a->filtered) && (a->filtered.rank != 1 || a->filtered.shape[0] != 3 || filter == 0))
    fail("linear_cross_entropy: filtered is %s with a filter of %g; give fp32 [3] with a filter, and nothing "
         "without",
         tensor_text(a->filtered).text, filter);
  if (filter > 0 && a->mode == LCE_MATERIALIZED)
    fail("linear_cross_entropy: a filter of %g needs the fused mode; the materialized one has no "
         "exponentials",
         filter);
  if (filter > 0 && lce_needs_logits(a))
    fail("linear_cross_entropy: a filter of %g acts on exponentials; leave it out, or a bias, soft-cap, "
         "entropy, largest logits and predictions, which need logits",
         filter);
}

static void check_shard(const Backend *backend, const LinearCrossEntropy *a) {
  const VocabShard *s = &a->shard;
  int64_t rows = a->weight.shape[0];
  if (!s->vocab_size) return;
  if (s->first < 0 || s->first + rows > s->vocab_size)
    fail("linear_cross_entropy: %lld rows from %lld on are no part of a vocabulary of %lld", (long long)rows,
         (long long)s->first, (long long)s->vocab_size);
  if (a->mode == LCE_MATERIALIZED || lce_needs_logits(a) || a->terms.filter > 0 || a->mean)
    fail(
        "linear_cross_entropy: a head split over %d ranks knows the fused mode, and sums over row statistics "
        "alone: no bias, soft-cap, entropy, largest logits, predictions, filter or mean",
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
  if (tensor_exists(a.dx) != tensor_exists(a.dweight))
    fail("%s: dx is %s and dweight is %s; give both, or neither for the forward pass alone", op,
         tensor_text(a.dx).text, tensor_text(a.dweight).text);
  if (tensor_exists(a.dx) && !tensor_same_shape(a.dx, a.x))
    fail("%s: dx is %s and x is %s", op, tensor_text(a.dx).text, tensor_text(a.x).text);
  if (tensor_exists(a.dbias) != (tensor_exists(a.bias) && tensor_exists(a.dx)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where x has one", op,
         tensor_text(a.bias).text, tensor_text(a.dbias).text);
  if (tensor_exists(a.dweight) && a.dweight.dtype != DTYPE_F32)
    fail("%s: dweight is %s, but sums over chunks need fp32", op, tensor_text(a.dweight).text);
  if (a.loss.rank != 1 || a.loss.shape[0] != tokens || a.targets.rank != 1 || a.targets.shape[0] != tokens)
    fail("%s: loss is %s and targets is %s for %lld tokens", op, tensor_text(a.loss).text,
         tensor_text(a.targets).text, (long long)tokens);
  per_token("token_weights", a.token_weights, tokens);
  per_token("entropy_weights", a.entropy_weights, tokens);
  for (int i = 0; i < OUTPUTS; i++) per_token("an output", a.outputs.all[i], tokens);
  check_filter(&a);
  check_shard(backend, &a);
  if (tensor_exists(a.rows) && (a.counted < 0 || a.counted > a.rows.shape[0]))
    fail("%s: %lld tokens count, but rows is %s", op, (long long)a.counted, tensor_text(a.rows).text);

  MemoryMark mark = memory_mark(&backend->memory);
  if (a.shard.vocab_size)
    vocabulary_parallel(backend, &a);
  else if (a.mode == LCE_MATERIALIZED)
    materialized(backend, &a);
  else
    fused(backend, &a);
  memory_pop_to(&backend->memory, mark);
}

// --- how large a chunk -------------------------------------------------------------------------------------

int64_t lce_default_chunk(int64_t tokens) {
  int64_t chunk = ceil_div(tokens, 8);
  return chunk < 128 ? 128 : chunk > 4096 ? 4096 : chunk;
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
  return largest_that_fits(chunk_fits, &budget, 0, shape.tokens + 1);
}
