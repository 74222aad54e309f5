#include "tools/ladder/ladder.h"

#include "kernels/base/fail.h"
#include "kernels/base/random.h"
#include "kernels/lce/call.h"

// --- shared by the rungs -----------------------------------------------------------------------------------

static Tensor push_floats(Backend *backend, const char *name, int64_t count) {
  return memory_push_1d(&backend->memory, name, MEMORY_HEAD, DTYPE_F32, count);
}

LinearCrossEntropy ladder_chunk(const LinearCrossEntropy *call, int64_t first) {
  int64_t left = call->x.shape[0] - first, count = left < call->chunk ? left : call->chunk;
  LinearCrossEntropy c = *call;
  // Exercise 3: c's x, dx, loss and targets are the chunk's; its dweight is the sum over all chunks.
  Tensor *const per_token[] = {&c.x, &c.dx, &c.loss, &c.targets};
  for (int i = 0; i < 4; i++) *per_token[i] = tensor_rows(*per_token[i], first, count);
  c.accumulate = first > 0;
  // end of exercise 3
  c.sampling.seed = random_bits(call->sampling.seed, 0, (uint64_t)first); // chunks draw separately
  return c;
}

int64_t ladder_dweight_bytes(const LinearCrossEntropy *call, int64_t first) {
  int64_t bytes = tensor_count(call->dweight) * (int64_t)dtype_bytes(call->dweight.dtype);
  // Exercise 6: `bytes` is the size of dweight; make it the bytes of dweight that the chunk from token
  // `first` on reads and writes.
  if (first > 0) bytes *= 2; // a sum is read, then written
  // end of exercise 6
  return bytes;
}

// z = X W^T.
static void forward(Backend *backend, const LinearCrossEntropy *c, Tensor z) {
  linear_forward(backend, (LinearForward){.out = z, .x = c->x, .weight = c->weight});
}

// dX = dz W;  dW (+)= alpha dz^T X.
static void backward(Backend *backend, const LinearCrossEntropy *c, Tensor dz, Tensor x, float alpha) {
  linear_backward_input(backend, (LinearBackwardInput){.dx = c->dx, .dout = dz, .weight = c->weight});
  linear_backward_weight(
      backend, (LinearBackwardWeight){
                   .dweight = c->dweight, .dout = dz, .x = x, .alpha = alpha, .accumulate = c->accumulate});
}

// --- rung 0: no loss ---------------------------------------------------------------------------------------
// The three matmuls that no rung can do without: the baseline of the others.

static void matmuls(Backend *backend, const LinearCrossEntropy *l) {
  Tensor logits = push_logit_rows(backend, "logits", l->x.dtype, l->chunk, l->weight.shape[0]);
  for (int64_t first = 0; first < l->x.shape[0]; first += l->chunk) {
    LinearCrossEntropy c = ladder_chunk(l, first);
    Tensor z = tensor_rows(logits, 0, c.x.shape[0]);
    forward(backend, &c, z);
    backward(backend, &c, z, c.x, 1);
  }
}

// --- rung 1: all logits, then all gradients ----------------------------------------------------------------
// Autograd does the same with F.cross_entropy(x @ W.T, y). Two matrices of N rows.

static void materialized(Backend *backend, const LinearCrossEntropy *l) {
  int64_t tokens = l->x.shape[0], vocab = l->weight.shape[0];
  Tensor logits = push_logit_rows(backend, "logits", DTYPE_F32, tokens, vocab);
  Tensor lse = push_floats(backend, "lse", tokens);
  forward(backend, l, logits);
  ladder_losses(l->loss, lse, logits, l->targets);

  Tensor dlogits = push_logit_rows(backend, "dlogits", l->x.dtype, tokens, vocab);
  ladder_gradients(dlogits, logits, lse, l->targets, l->scale);
  backward(backend, l, dlogits, l->x, 1);
}

// --- rung 2: chunks, and the logits twice ------------------------------------------------------------------
// A token's loss needs no other token, so the forward pass keeps C rows at a time and throws them away. The
// backward pass then needs them again: a fourth matmul. torch.utils.checkpoint on each chunk does this.

static void recomputed(Backend *backend, const LinearCrossEntropy *l) {
  int64_t tokens = l->x.shape[0], vocab = l->weight.shape[0];
  Tensor lse = push_floats(backend, "lse", tokens);
  Tensor logits = push_logit_rows(backend, "logits", DTYPE_F32, l->chunk, vocab);
  for (int64_t first = 0; first < tokens; first += l->chunk) { // forward
    LinearCrossEntropy c = ladder_chunk(l, first);
    int64_t count = c.x.shape[0];
    Tensor z = tensor_rows(logits, 0, count);
    forward(backend, &c, z);
    ladder_losses(c.loss, tensor_rows(lse, first, count), z, c.targets);
  }

  Tensor dlogits = push_logit_rows(backend, "dlogits", l->x.dtype, l->chunk, vocab);
  for (int64_t first = 0; first < tokens; first += l->chunk) { // backward
    LinearCrossEntropy c = ladder_chunk(l, first);
    int64_t count = c.x.shape[0];
    Tensor z = tensor_rows(logits, 0, count), dz = tensor_rows(dlogits, 0, count);
    forward(backend, &c, z);
    ladder_gradients(dz, z, tensor_rows(lse, first, count), c.targets, c.scale);
    backward(backend, &c, dz, c.x, 1);
  }
}

// --- rung 3: the gradient in the forward pass --------------------------------------------------------------
// The loss is the last operation of the network, so the gradient from above is a constant known in advance
// (`scale`): we can compute the gradient while the chunk's logits are still there, in their place.

static void gradient_in_forward(Backend *backend, const LinearCrossEntropy *l) {
  // Exercise 2: losses and gradients, with three matmuls per chunk and one matrix of a chunk's logits.
  Tensor logits = push_logit_rows(backend, "logits", DTYPE_F32, l->chunk, l->weight.shape[0]);
  Tensor lse = push_floats(backend, "lse", l->chunk);
  for (int64_t first = 0; first < l->x.shape[0]; first += l->chunk) {
    LinearCrossEntropy c = ladder_chunk(l, first);
    Tensor z = tensor_rows(logits, 0, c.x.shape[0]), dz = z; // in their place
    Tensor chunk_lse = tensor_rows(lse, 0, c.x.shape[0]);
    forward(backend, &c, z);
    ladder_losses(c.loss, chunk_lse, z, c.targets);
    ladder_gradients(dz, z, chunk_lse, c.targets, c.scale);
    backward(backend, &c, dz, c.x, 1);
  }
  // end of exercise 2
}

// --- rungs 4 and 5: anchored at the target ----------------------------------------------------------------
// The softmax is the same whatever constant is subtracted from a row. The target's logit a is one dot
// product, known before the row's other logits, so E = exp(z - a) is final once a logit is computed, and
//
//   R = sum_j E[j] (j != y),  loss = log1p(R),  r = 1 / (1 + R),  c = -R / (1 + R)
//   dX = r (E W) + c W[y],    dW += E^T (r X),  dW[y] += c x
//
// The normaliser acts on rows of length H, never on rows of length V.

static Anchored push_anchored(Backend *backend, LinearCrossEntropy c) {
  int64_t rows = c.x.shape[0], hidden = c.x.shape[1];
  Memory *memory = &backend->memory;
  return (Anchored){.call = c,
                    .target_z = push_floats(backend, "target logits", rows),
                    .anchor = push_floats(backend, "anchors", rows),
                    .target_e = push_floats(backend, "target exponentials", rows),
                    .row_sum = push_floats(backend, "row sums", rows),
                    .r = push_floats(backend, "r", rows),
                    .c = push_floats(backend, "c", rows),
                    .scaled_x = memory_push_2d(memory, "scaled x", MEMORY_HEAD, c.x.dtype, rows, hidden),
                    .exps = push_logit_rows(backend, "exponentials", c.x.dtype, rows, c.weight.shape[0])};
}

// Computes E and R, then losses and gradients from them, chunk by chunk.
static void anchored_chunks(Backend *backend, const LinearCrossEntropy *l,
                            void (*exponentials)(Backend *, const Anchored *)) {
  MemoryMark mark = memory_mark(&backend->memory);
  for (int64_t first = 0; first < l->x.shape[0]; first += l->chunk) {
    Anchored a = push_anchored(backend, ladder_chunk(l, first));
    ladder_anchors(&a);
    exponentials(backend, &a);
    ladder_repair(&a);
    ladder_finish(&a);
    if (l->sampling.full_mass > 0) ladder_sample(&a);
    backward(backend, &a.call, a.exps, a.scaled_x, a.call.scale);
    ladder_add_targets(&a);
    memory_pop_to(&backend->memory, mark);
  }
}

// Rung 4: a chunk's logits in fp32, then their exponentials in place, in one pass, without a maximum.
static void exponentials_in_place(Backend *backend, const Anchored *a) {
  Tensor logits = a->exps;
  forward(backend, &a->call, logits);
  ladder_exponentials(a);
}

static void anchored(Backend *backend, const LinearCrossEntropy *l) {
  anchored_chunks(backend, l, exponentials_in_place);
}

// Rung 5: exponentiates the matmul's sums before they are stored. No logit is ever in memory, and E takes
// half the bytes of fp32 logits if operands are bf16.
static void in_epilogue(Backend *backend, const LinearCrossEntropy *l) {
  anchored_chunks(backend, l, ladder_matmul_exponentials);
}

// --- rung 6: rung 5 on Hopper ------------------------------------------------------------------------------
// The same by a matmul that keeps Hopper's tensor cores busy (hopper.cu); the library's steps do the rest.

#ifdef HAVE_CUDA
static void on_hopper(Backend *backend, const LinearCrossEntropy *l) {
  int64_t tokens = l->x.shape[0], hidden = l->x.shape[1];
  if (l->x.dtype != DTYPE_BF16) fail("rung 6 takes bf16; x is %s", tensor_text(l->x).text);
  if (hidden % 8) fail("rung 6 copies 8 elements at a time; a hidden size of %d is no multiple", (int)hidden);
  Call call = lce_begin(backend, l);
  Chunk buffers = lce_push_buffers(&call, l->chunk, tokens);
  lce_target_z(&call, buffers.softmax.target_z, l->x, l->targets);
  for (int64_t first = 0; first < tokens; first += l->chunk) {
    Chunk k = lce_chunk_at(&call, &buffers, first);
    MemoryMark mark = memory_mark(&backend->memory);
    ladder_hopper_exponentials(backend, k.exps, &k.softmax, k.tokens.x, l->weight, k.targets);
    lce_losses(&call, &k);
    linear_backward_input(backend,
                          (LinearBackwardInput){.dx = k.tokens.dx, .dout = k.exps, .weight = l->weight});
    lce_add_non_targets(&call, &k, first > 0);
    lce_finish_dx(&call, &k);
    memory_pop_to(&backend->memory, mark);
  }
  lce_add_all_targets(&call, &buffers);
  lce_end(&call);
}
#else
#define on_hopper       NULL
#define ladder_hopper() false
#endif

// --- all of them; rung 7 is linear_cross_entropy -----------------------------------------------------------

static void (*const runs[RUNGS])(Backend *, const LinearCrossEntropy *) = {
    matmuls, materialized, recomputed, gradient_in_forward, anchored, in_epilogue, on_hopper};

const char *const ladder_names[RUNGS] = {"1 materialized fp32 logits",     "2 logits recomputed in chunks",
                                         "3 gradient in the forward pass", "4 anchored at the target",
                                         "5 exponential in the epilogue",  "6 the same with TMA and wgmma",
                                         "7 linear_cross_entropy"};

const int ladder_gemms[RUNGS] = {3, 4, 3, 3, 3, 3, 3};

bool ladder_has(const Backend *backend, int rung) {
  bool on_gpu = backend->device == ON_CUDA;
  if (rung == 6) return on_gpu && ladder_hopper();
  return rung == 0 || rung == RUNGS || !on_gpu;
}

void ladder_run(Backend *backend, int rung, LinearCrossEntropy call) {
  if (rung == RUNGS) {
    linear_cross_entropy(backend, call);
    return;
  }
  if (!ladder_has(backend, rung))
    fail("rung %d is for %s alone", rung, rung == 6 ? "Hopper GPUs" : "the CPU");
  MemoryMark mark = memory_mark(&backend->memory);
  if (call.chunk > call.x.shape[0]) call.chunk = call.x.shape[0];
  runs[rung](backend, &call);
  memory_pop_to(&backend->memory, mark);
}
