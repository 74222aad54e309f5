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
// The exponential overflows when a logit beats the target's by more than 88, a loss no working model has. Those
// rows, and a few short of it whose sums would leave r no normal number, are found by R and redone with the row's
// maximum as anchor (LceSweep).
//
// Memory traffic per chunk, with e bytes an element: W is read three times (logits, dX, and nothing for dW),
// E is written once and read twice, dW (fp32) is read and written once. So small chunks cost traffic of W and
// dW, (2 e + 8) V H bytes each, against 6 C V H flops: on a GPU with 200 flops a byte a chunk of 1024 pays
// about 8% for it, one of 4096 next to nothing.
#include "kernels/linear_cross_entropy.h"

#include "base/fail.h"

const char *lce_mode_name(LceMode mode) {
  return mode == LCE_FUSED ? "fused" : "materialized";
}

// --- the materialized mode: the honest baseline ------------------------------------------------------------

static Tensor push_logits(Backend *backend, const char *name, int64_t rows, int64_t vocab_size, Dtype dtype) {
  int64_t stride = backend->scratch->logits_stride(vocab_size, dtype);
  Tensor padded = memory_push_2d(&backend->memory, name, MEMORY_HEAD, dtype, rows, stride);
  return tensor_columns(padded, 0, vocab_size);
}

static void materialized(Backend *backend, const LinearCrossEntropy *a) {
  bool forward_only = !tensor_exists(a->dx);
  Tensor logits = push_logits(backend, "logits", a->x.shape[0], a->weight.shape[0], a->x.dtype);
  linear_forward(backend, (LinearForward){.out = logits, .x = a->x, .weight = a->weight});
  cross_entropy_in_place(backend, (CrossEntropyInPlace){.loss = a->loss,
                                                        .logits = logits,
                                                        .targets = a->targets,
                                                        .alpha = a->scale,
                                                        .forward_only = forward_only});
  if (forward_only) return;
  linear_backward_input(backend, (LinearBackwardInput){.dx = a->dx, .dout = logits, .weight = a->weight});
  linear_backward_weight(
      backend,
      (LinearBackwardWeight){
          .dweight = a->dweight, .dout = logits, .x = a->x, .alpha = 1, .accumulate = a->accumulate});
}

// --- the fused mode ----------------------------------------------------------------------------------------

// What a chunk of C tokens needs; everything is pushed once and used by every chunk.
typedef struct {
  Tensor exps;                                // [C, V]
  Tensor row_sum, target_e, target_z, anchor; // fp32 [C]
  Tensor scale_others, scale_target;          // fp32 [C]
  Tensor scaled_x;                            // [C, H]
  Tensor x, targets, loss, dx;                // the counted tokens, packed: only where some may be ignored
} Chunk;

static Tensor push_column(Backend *backend, const char *name, int64_t rows) {
  return memory_push_1d(&backend->memory, name, MEMORY_HEAD, DTYPE_F32, rows);
}

static Chunk push_chunk(Backend *backend, const LinearCrossEntropy *a, int64_t rows) {
  Memory *memory = &backend->memory;
  int64_t hidden_size = a->x.shape[1];
  Chunk c = {.row_sum = push_column(backend, "row sums", rows),
             .target_e = push_column(backend, "target exponentials", rows),
             .target_z = push_column(backend, "target logits", rows),
             .anchor = push_column(backend, "anchors", rows)};
  if (tensor_exists(a->rows)) {
    c.x = memory_push_2d(memory, "counted rows of x", MEMORY_HEAD, a->x.dtype, rows, hidden_size);
    c.targets = memory_push_1d(memory, "counted targets", MEMORY_HEAD, DTYPE_I32, rows);
    c.loss = push_column(backend, "counted losses", rows);
  }
  if (!tensor_exists(a->dx)) return c;
  if (tensor_exists(a->rows))
    c.dx = memory_push_2d(memory, "counted rows of dx", MEMORY_HEAD, a->dx.dtype, rows, hidden_size);
  c.scale_others = push_column(backend, "scales of the others", rows);
  c.scale_target = push_column(backend, "scales of the target", rows);
  c.scaled_x = memory_push_2d(memory, "scaled x", MEMORY_HEAD, a->x.dtype, rows, hidden_size);
  c.exps = push_logits(backend, "exponentials", rows, a->weight.shape[0], a->x.dtype);
  return c;
}

static Tensor first_rows(Tensor t, int64_t count) {
  return tensor_exists(t) ? tensor_rows(t, 0, count) : t;
}

// Counted tokens [first, first + count): sweep, row statistics, the two gradients.
static void one_chunk(Backend *backend, const LinearCrossEntropy *a, const Chunk *buffers, int64_t first,
                      int64_t count) {
  Chunk c = {.exps = first_rows(buffers->exps, count),
             .row_sum = first_rows(buffers->row_sum, count),
             .target_e = first_rows(buffers->target_e, count),
             .target_z = first_rows(buffers->target_z, count),
             .anchor = first_rows(buffers->anchor, count),
             .scale_others = first_rows(buffers->scale_others, count),
             .scale_target = first_rows(buffers->scale_target, count),
             .scaled_x = first_rows(buffers->scaled_x, count),
             .x = first_rows(buffers->x, count),
             .targets = first_rows(buffers->targets, count),
             .loss = first_rows(buffers->loss, count),
             .dx = first_rows(buffers->dx, count)};
  bool packed = tensor_exists(a->rows), backward = tensor_exists(a->dx);
  Tensor rows = {0};
  if (packed) {
    rows = tensor_rows(a->rows, first, count);
    gather_rows(backend, (MoveRows){.out = c.x, .x = a->x, .rows = rows});
    gather_rows(backend, (MoveRows){.out = c.targets, .x = a->targets, .rows = rows});
  } else {
    c.x = tensor_rows(a->x, first, count);
    c.targets = tensor_rows(a->targets, first, count);
    c.loss = tensor_rows(a->loss, first, count);
    if (backward) c.dx = tensor_rows(a->dx, first, count);
  }

  lce_sweep(backend, (LceSweep){.exps = c.exps,
                                .dx_raw = c.dx,
                                .row_sum = c.row_sum,
                                .target_e = c.target_e,
                                .target_z = c.target_z,
                                .anchor = c.anchor,
                                .x = c.x,
                                .weight = a->weight,
                                .targets = c.targets});
  lce_rows(backend, (LceRows){.loss = c.loss,
                              .scale_others = c.scale_others,
                              .scale_target = c.scale_target,
                              .scaled_x = c.scaled_x,
                              .row_sum = c.row_sum,
                              .target_e = c.target_e,
                              .target_z = c.target_z,
                              .anchor = c.anchor,
                              .x = c.x,
                              .token_weight = 1});
  if (packed) scatter_rows(backend, (MoveRows){.out = a->loss, .x = c.loss, .rows = rows});
  if (!backward) return;

  lce_input_gradient(backend, (LceInputGradient){.dx = c.dx,
                                                 .scale_others = c.scale_others,
                                                 .scale_target = c.scale_target,
                                                 .weight = a->weight,
                                                 .targets = c.targets,
                                                 .alpha = a->scale});
  if (packed) scatter_rows(backend, (MoveRows){.out = a->dx, .x = c.dx, .rows = rows});
  // The mean's factor rides on the products' alpha, so that r X stays within the normal numbers.
  linear_backward_weight(backend, (LinearBackwardWeight){.dweight = a->dweight,
                                                         .dout = c.exps,
                                                         .x = c.scaled_x,
                                                         .alpha = a->scale,
                                                         .accumulate = a->accumulate || first > 0});
  lce_target_gradient(backend, (LceTargetGradient){.dweight = a->dweight,
                                                   .scale_target = c.scale_target,
                                                   .x = c.x,
                                                   .targets = c.targets,
                                                   .alpha = a->scale});
}

static int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// As many chunks of at most `most` tokens as needed, all nearly alike, in steps of 128 where there is room for
// steps: how many tokens each then has.
static int64_t even_chunk(int64_t tokens, int64_t most) {
  int64_t even = divide_up(tokens, divide_up(tokens, most)), stepped = divide_up(even, 128) * 128;
  return stepped <= most ? stepped : even;
}

// How many tokens count is up to the data, and with it the size of a sweep's scratch: the ledger sees that of a
// full chunk once, so that what it says does not depend on the data.
static void show_full_scratch(Backend *backend, const LinearCrossEntropy *a, const Chunk *c) {
  LceSweep sweep = {.exps = c->exps, .dx_raw = c->dx, .x = c->x, .weight = a->weight, .targets = c->targets};
  size_t bytes = backend->scratch->lce_sweep ? backend->scratch->lce_sweep(&sweep) : 0;
  MemoryMark mark = memory_mark(&backend->memory);
  memory_push_1d(&backend->memory, "lce_sweep", MEMORY_HEAD, DTYPE_I32, (int64_t)((bytes + 3) / 4));
  memory_pop_to(&backend->memory, mark);
}

static void fused(Backend *backend, const LinearCrossEntropy *a) {
  int64_t tokens = a->x.shape[0], counted = tensor_exists(a->rows) ? a->counted : tokens;
  // The memory is that of all tokens counted: it must not depend on the data.
  int64_t most = even_chunk(tokens, a->chunk < tokens ? a->chunk : tokens);
  Chunk buffers = push_chunk(backend, a, most);
  if (tensor_exists(a->rows)) {
    show_full_scratch(backend, a, &buffers);
    fill_zero(backend, a->loss);
    if (tensor_exists(a->dx)) fill_zero(backend, a->dx);
  }
  if (counted == 0 && tensor_exists(a->dweight) && !a->accumulate) fill_zero(backend, a->dweight);
  int64_t size = counted ? even_chunk(counted, most) : 0;
  for (int64_t first = 0; first < counted; first += size) {
    one_chunk(backend, a, &buffers, first, first + size < counted ? size : counted - first);
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
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
  if (tensor_exists(a.dweight) && a.dweight.dtype != DTYPE_F32)
    fail("%s: dweight is %s, but sums over chunks need fp32", op, tensor_text(a.dweight).text);
  if (a.loss.rank != 1 || a.loss.shape[0] != tokens || a.targets.rank != 1 || a.targets.shape[0] != tokens)
    fail("%s: loss is %s and targets is %s for %lld tokens", op, tensor_text(a.loss).text,
         tensor_text(a.targets).text, (long long)tokens);
  if (tensor_exists(a.rows) && (a.counted < 0 || a.counted > a.rows.shape[0]))
    fail("%s: %lld tokens count, but rows is %s", op, (long long)a.counted, tensor_text(a.rows).text);

  MemoryMark mark = memory_mark(&backend->memory);
  if (a.mode == LCE_MATERIALIZED)
    materialized(backend, &a);
  else
    fused(backend, &a);
  memory_pop_to(&backend->memory, mark);
}

// --- how large a chunk -------------------------------------------------------------------------------------

int64_t lce_default_chunk(int64_t tokens) {
  int64_t chunk = divide_up(tokens, 8);
  return chunk < 128 ? 128 : chunk > 4096 ? 4096 : chunk;
}

size_t lce_bytes(const Backend *backend, LceMode mode, int64_t chunk, LceShape s) {
  Backend *plan = plan_backend_create(backend->scratch == &cuda_scratch ? "cuda" : "cpu", s.dtype);
  Memory *m = &plan->memory;
  MemoryCategory other = MEMORY_ACTIVATIONS;
  LinearCrossEntropy a = {.mode = mode,
                          .chunk = chunk,
                          .loss = memory_push_1d(m, "loss", other, DTYPE_F32, s.tokens),
                          .dx = memory_push_2d(m, "dx", other, s.dtype, s.tokens, s.hidden_size),
                          .dweight =
                              memory_push_2d(m, "dweight", other, DTYPE_F32, s.vocab_size, s.hidden_size),
                          .x = memory_push_2d(m, "x", other, s.dtype, s.tokens, s.hidden_size),
                          .weight = memory_push_2d(m, "weight", other, s.dtype, s.vocab_size, s.hidden_size),
                          .targets = memory_push_1d(m, "targets", other, DTYPE_I32, s.tokens)};
  if (s.ignores) a.rows = memory_push_1d(m, "rows", other, DTYPE_I32, s.tokens);
  a.counted = s.tokens;
  linear_cross_entropy(plan, a);
  size_t bytes = m->ledger.highest[MEMORY_HEAD];
  backend_destroy(plan);
  return bytes;
}

int64_t lce_chunk_within(const Backend *backend, size_t bytes, LceShape shape) {
  int64_t fits = 0, above = shape.tokens + 1; // bytes grow with the chunk: bisect
  while (above - fits > 1) {
    int64_t middle = fits + (above - fits) / 2;
    if (lce_bytes(backend, LCE_FUSED, middle, shape) <= bytes)
      fits = middle;
    else
      above = middle;
  }
  return fits;
}
