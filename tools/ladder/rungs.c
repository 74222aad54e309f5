#include "tools/ladder/ladder.h"

#include <string.h>

#include "base/fail.h"
#include "kernels/linear_cross_entropy.h"

// --- shared by the rungs -----------------------------------------------------------------------------------

static const LadderRows *rows_of(const Ladder *l) {
#ifdef HAVE_CUDA
  if (strcmp(l->backend->name, "cuda") == 0) {
    if (l->x.dtype != DTYPE_BF16)
      fail("the ladder's CUDA kernels take bf16; x is %s", tensor_text(l->x).text);
    return &ladder_rows_cuda;
  }
#endif
  (void)l;
  return &ladder_rows_cpu;
}

// [rows, V], with rows as far apart as the backend's matmuls like them.
static Tensor push_logits(const Ladder *l, const char *name, Dtype dtype, int64_t rows) {
  int64_t vocab = l->weight.shape[0], stride = l->backend->scratch->logits_stride(vocab, dtype);
  Tensor padded = memory_push_2d(&l->backend->memory, name, MEMORY_HEAD, dtype, rows, stride);
  return tensor_columns(padded, 0, vocab);
}

static Tensor push_vector(const Ladder *l, const char *name, int64_t count) {
  return memory_push_1d(&l->backend->memory, name, MEMORY_HEAD, DTYPE_F32, count);
}

// The fp32 matrix's memory, row for row, for elements of `dtype`.
static Tensor in_place(Tensor t, Dtype dtype) {
  t.stride = t.stride * (int64_t)sizeof(float) / (int64_t)dtype_bytes(dtype);
  t.dtype = dtype;
  return t;
}

// Tokens [first, first + chunk) of the call, or what is left of them.
static Ladder chunk_at(const Ladder *l, int64_t first) {
  int64_t left = l->x.shape[0] - first, count = left < l->chunk ? left : l->chunk;
  Ladder c = *l;
  c.x = tensor_rows(l->x, first, count);
  c.dx = tensor_rows(l->dx, first, count);
  c.loss = tensor_rows(l->loss, first, count);
  c.targets = tensor_rows(l->targets, first, count);
  return c;
}

// dX = dlogits W;  dW (+)= dlogits^T X.
static void backward(const Ladder *c, Tensor dlogits, bool accumulate) {
  linear_backward_input(c->backend, (LinearBackwardInput){.dx = c->dx, .dout = dlogits, .weight = c->weight});
  linear_backward_weight(
      c->backend,
      (LinearBackwardWeight){
          .dweight = c->dweight, .dout = dlogits, .x = c->x, .alpha = 1, .accumulate = accumulate});
}

// --- rung 1: all logits, then all gradients ----------------------------------------------------------------
// What autograd does with F.cross_entropy(x @ W.T, y). Two matrices of N rows.

static void materialized(const Ladder *l) {
  const LadderRows *rows = rows_of(l);
  Backend *backend = l->backend;
  int64_t tokens = l->x.shape[0];
  Tensor logits = push_logits(l, "logits", DTYPE_F32, tokens), lse = push_vector(l, "lse", tokens);
  linear_forward(backend, (LinearForward){.out = logits, .x = l->x, .weight = l->weight});
  rows->losses(backend, l->loss, lse, logits, l->targets);

  Tensor dlogits = push_logits(l, "dlogits", l->x.dtype, tokens);
  rows->gradients(backend, dlogits, logits, lse, l->targets, l->scale);
  backward(l, dlogits, false);
}

// --- rung 2: chunks, and the logits twice ------------------------------------------------------------------
// A token's loss needs no other token, so the forward pass keeps C rows at a time and throws them away. The
// backward pass then needs them again: a fourth matmul. torch.utils.checkpoint on each chunk does this.

static void recomputed(const Ladder *l) {
  const LadderRows *rows = rows_of(l);
  Backend *backend = l->backend;
  int64_t tokens = l->x.shape[0];
  Tensor lse = push_vector(l, "lse", tokens);
  Tensor logits = push_logits(l, "logits", DTYPE_F32, l->chunk);
  for (int64_t first = 0; first < tokens; first += l->chunk) { // forward
    Ladder c = chunk_at(l, first);
    int64_t count = c.x.shape[0];
    Tensor z = tensor_rows(logits, 0, count);
    linear_forward(backend, (LinearForward){.out = z, .x = c.x, .weight = c.weight});
    rows->losses(backend, c.loss, tensor_rows(lse, first, count), z, c.targets);
  }

  Tensor dlogits = push_logits(l, "dlogits", l->x.dtype, l->chunk);
  for (int64_t first = 0; first < tokens; first += l->chunk) { // backward
    Ladder c = chunk_at(l, first);
    int64_t count = c.x.shape[0];
    Tensor z = tensor_rows(logits, 0, count), dz = tensor_rows(dlogits, 0, count);
    linear_forward(backend, (LinearForward){.out = z, .x = c.x, .weight = c.weight});
    rows->gradients(backend, dz, z, tensor_rows(lse, first, count), c.targets, c.scale);
    backward(&c, dz, first > 0);
  }
}

// --- rung 3: the gradient in the forward pass --------------------------------------------------------------
// The loss is the last operation of the network, so what arrives from above is a constant known beforehand
// (`scale`): nothing keeps us from making the gradient while the chunk's logits are there, in their place.

static void gradient_in_forward(const Ladder *l) {
  const LadderRows *rows = rows_of(l);
  Backend *backend = l->backend;
  int64_t tokens = l->x.shape[0];
  Tensor logits = push_logits(l, "logits", DTYPE_F32, l->chunk), lse = push_vector(l, "lse", l->chunk);
  for (int64_t first = 0; first < tokens; first += l->chunk) {
    Ladder c = chunk_at(l, first);
    Tensor z = tensor_rows(logits, 0, c.x.shape[0]), dz = in_place(z, c.x.dtype);
    Tensor chunk_lse = tensor_rows(lse, 0, c.x.shape[0]);
    linear_forward(backend, (LinearForward){.out = z, .x = c.x, .weight = c.weight});
    rows->losses(backend, c.loss, chunk_lse, z, c.targets);
    rows->gradients(backend, dz, z, chunk_lse, c.targets, c.scale);
    backward(&c, dz, first > 0);
  }
}

// --- rungs 4 and 5: anchored at the target -----------------------------------------------------------------
// The softmax is the same whatever constant is subtracted from a row. The target's logit a is one dot product,
// known before the row's other logits, so E = exp(z - a) is final as soon as a logit is there, and
//
//   R = sum_j E[j] (j != y),  loss = log1p(R),  r = 1 / (1 + R),  c = -R / (1 + R)
//   dX = r (E W) + c W[y],    dW += E^T (r X),  dW[y] += c x
//
// The normaliser acts on rows of length H, never on rows of length V.

static Anchored push_anchored(const Ladder *l, int64_t rows, Dtype dtype) {
  return (Anchored){.target_z = push_vector(l, "target logits", rows),
                    .anchor = push_vector(l, "anchors", rows),
                    .target_e = push_vector(l, "target exponentials", rows),
                    .row_sum = push_vector(l, "row sums", rows),
                    .r = push_vector(l, "r", rows),
                    .c = push_vector(l, "c", rows),
                    .scaled_x = memory_push_2d(&l->backend->memory, "scaled x", MEMORY_HEAD, l->x.dtype, rows,
                                               l->x.shape[1]),
                    .exps = push_logits(l, "exponentials", dtype, rows)};
}

// The first rows of the buffers, with the chunk's tokens.
static Anchored anchored_at(const Anchored *buffers, const Ladder *chunk) {
  Anchored a = *buffers;
  Tensor *const all[] = {&a.target_z, &a.anchor, &a.target_e, &a.row_sum, &a.r, &a.c, &a.scaled_x, &a.exps};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] = tensor_rows(*all[i], 0, chunk->x.shape[0]);
  a.x = chunk->x, a.weight = chunk->weight, a.targets = chunk->targets;
  a.loss = chunk->loss, a.dx = chunk->dx, a.dweight = chunk->dweight, a.scale = chunk->scale;
  return a;
}

// What follows from E and R.
static void anchored_gradients(const Ladder *l, const Anchored *a, bool accumulate) {
  const LadderRows *rows = rows_of(l);
  rows->repair(l->backend, a);
  rows->finish(l->backend, a);
  linear_backward_input(l->backend, (LinearBackwardInput){.dx = a->dx, .dout = a->exps, .weight = a->weight});
  linear_backward_weight(l->backend, (LinearBackwardWeight){.dweight = a->dweight,
                                                            .dout = a->exps,
                                                            .x = a->scaled_x,
                                                            .alpha = a->scale,
                                                            .accumulate = accumulate});
  rows->add_targets(l->backend, a);
}

// Rung 4: a chunk's logits in fp32, then their exponentials in place, in one pass. No maximum, no second pass.
static void anchored(const Ladder *l) {
  const LadderRows *rows = rows_of(l);
  Anchored buffers = push_anchored(l, l->chunk, DTYPE_F32);
  for (int64_t first = 0; first < l->x.shape[0]; first += l->chunk) {
    Ladder c = chunk_at(l, first);
    Anchored a = anchored_at(&buffers, &c);
    Tensor logits = a.exps;
    a.exps = in_place(logits, c.x.dtype);
    rows->anchors(l->backend, &a);
    linear_forward(l->backend, (LinearForward){.out = logits, .x = c.x, .weight = c.weight});
    rows->exponentials(l->backend, &a, logits);
    anchored_gradients(l, &a, first > 0);
  }
}

// Rung 5: the exponential where the matmul's sums are, before they are stored. No logit is ever in memory, and
// E takes half the bytes of fp32 logits where operands are bf16.
static void in_epilogue(const Ladder *l) {
  const LadderRows *rows = rows_of(l);
  Anchored buffers = push_anchored(l, l->chunk, l->x.dtype);
  for (int64_t first = 0; first < l->x.shape[0]; first += l->chunk) {
    Ladder c = chunk_at(l, first);
    Anchored a = anchored_at(&buffers, &c);
    rows->anchors(l->backend, &a);
    rows->matmul_exponentials(l->backend, &a);
    anchored_gradients(l, &a, first > 0);
  }
}

// --- rung 6: linear_cross_entropy --------------------------------------------------------------------------

static void fused(const Ladder *l) {
  linear_cross_entropy(l->backend, (LinearCrossEntropy){.mode = LCE_FUSED,
                                                        .chunk = l->chunk,
                                                        .loss = l->loss,
                                                        .dx = l->dx,
                                                        .dweight = l->dweight,
                                                        .x = l->x,
                                                        .weight = l->weight,
                                                        .targets = l->targets,
                                                        .scale = l->scale});
}

// --- all of them -------------------------------------------------------------------------------------------

static void (*const runs[RUNGS])(const Ladder *) = {materialized, recomputed,  gradient_in_forward,
                                                    anchored,     in_epilogue, fused};

const char *const ladder_names[RUNGS] = {"1 materialized fp32 logits",     "2 logits recomputed in chunks",
                                         "3 gradient in the forward pass", "4 anchored at the target",
                                         "5 exponential in the epilogue",  "6 linear_cross_entropy"};

void ladder_run(int rung, Ladder l) {
  MemoryMark mark = memory_mark(&l.backend->memory);
  if (l.chunk > l.x.shape[0]) l.chunk = l.x.shape[0];
  runs[rung - 1](&l);
  memory_pop_to(&l.backend->memory, mark);
}
