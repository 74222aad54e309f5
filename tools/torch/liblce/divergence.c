// The loop over chunks of C tokens. A token's gradient needs both heads' logits and no other token, so it is computed
// in the forward pass while they are at hand:
//
//     Z  = x W^T,  Z' = x' W'^T       [C, V] each, stored in x's dtype; Z' in two halves on a GPU
//     Z  = its own gradient           lce_divergence: a pass for each row's two softmaxes, one or two for the rest
//     dX = Z W,  dW += Z^T x
//
// Four GEMMs. A row's anchors are its two maxima: there is no target whose logit is known beforehand, and the logits
// are stored anyway. On Hopper the GEMM of the logits sums each tile of a row over its own maximum, and the parts are
// joined: there is no pass for the softmaxes, and nothing to repair. Each probability then comes from a difference of its
// own row's logits, and log q - log p from two such differences, not from the probabilities: it stays exact where one of
// them underflows.
#include "tools/torch/liblce/divergence.h"

#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/lce/call.h"

int64_t divergence_chunk(const Backend *backend, int64_t tokens) {
  return backend->device == ON_CUDA ? 2048 : lce_default_chunk(backend->device, tokens);
}

// The operations check what they get: parts of these tensors.
static void check(const LinearDivergence *a) {
  const char *op = "linear_divergence";
  int64_t tokens = a->x.shape[0];
  Tensor bias = a->divergence.student.bias;
  if (a->chunk < 1) fail("%s: a chunk of %lld tokens; give 1 or more", op, (long long)a->chunk);
  if (a->teacher_x.shape[0] != tokens || a->teacher_weight.shape[0] != a->weight.shape[0])
    fail("%s: the student has x %s and weight %s, the teacher %s and %s; they need the same tokens and "
         "vocabulary",
         op, tensor_text(a->x).text, tensor_text(a->weight).text, tensor_text(a->teacher_x).text,
         tensor_text(a->teacher_weight).text);
  if (a->divergence.kind == JSD && !(a->divergence.beta > 0 && a->divergence.beta < 1))
    fail("%s: beta is %g; the JSD needs one between 0 and 1, and at them it is a KL, a kind of its own", op,
         (double)a->divergence.beta);
  if (tensor_exists(a->dbias) != (tensor_exists(bias) && tensor_exists(a->dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(bias).text, tensor_text(a->dbias).text);
  int64_t least = ceil_div(tokens, DIVERGENCE_NARROW_CHUNKS);
  if (tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32 && a->chunk < least)
    fail(
        "%s: dweight is %s, and a sum over more than %d chunks is fp32; give an fp32 one, or a chunk of %lld "
        "tokens",
        op, tensor_text(a->dweight).text, DIVERGENCE_NARROW_CHUNKS, (long long)least);
}

// A head's place for a chunk's logits, and on a GPU for their tiles.
static DivergenceHead push_head(Backend *backend, const char *name, DivergenceHead head, Dtype dtype,
                                int64_t rows, int64_t vocab_size) {
  head.logits = push_logit_rows(backend, name, dtype, rows, vocab_size);
  if (backend->device == ON_CPU || dtype != DTYPE_BF16) return head;
  int64_t tiles = ceil_div(vocab_size, LCE_TILE_COLUMNS);
  head.best = memory_push_2d(&backend->memory, "tiles' largest logits", MEMORY_HEAD, DTYPE_I64, rows, tiles);
  head.sums = memory_push_2d(&backend->memory, "tiles' sums", MEMORY_HEAD, DTYPE_F32, rows, tiles);
  return head;
}

static DivergenceHead head_rows(DivergenceHead head, int64_t first, int64_t count) {
  head.logits = tensor_rows(head.logits, first, count);
  head.best = tensor_rows(head.best, first, count);
  head.sums = tensor_rows(head.sums, first, count);
  return head;
}

// The first rows of `head`, filled from x.
static DivergenceHead head_of(Backend *backend, DivergenceHead head, Tensor x, Tensor weight) {
  head = head_rows(head, 0, x.shape[0]);
  LogitTiles tiles = {head.logits, x, weight, head.best, head.sums, head.temperature};
  bool plain = tensor_exists(head.best) && !tensor_exists(head.bias) && head.softcap == 0;
  if (backend->memory.planning || !plain || !lce_logit_tiles(backend, tiles)) {
    linear_forward(backend, (LinearForward){.out = head.logits, .x = x, .weight = weight});
    head.best = head.sums = (Tensor){0};
  }
  return head;
}

void linear_divergence(Backend *backend, LinearDivergence a) {
  check(&a);
  int64_t tokens = a.x.shape[0], vocab_size = a.weight.shape[0], size = lce_used_chunk(tokens, a.chunk);
  int64_t half = backend->device == ON_CUDA ? ceil_div(size, 2) : size; // of a chunk, for the teacher
  MemoryMark mark = memory_mark(&backend->memory);
  LceDivergence all = a.divergence, part = all;
  Tensor terms = {0};
  DivergenceHead student =
      push_head(backend, "student's logits", all.student, a.weight.dtype, size, vocab_size);
  DivergenceHead teacher =
      push_head(backend, "teacher's logits", all.teacher, a.teacher_weight.dtype, half, vocab_size);
  if (backend->device == ON_CUDA)
    terms = memory_push_2d(&backend->memory, "rows' softmaxes", MEMORY_HEAD, DTYPE_F32, half,
                           DIVERGENCE_ROW_FLOATS);
  part.backward = tensor_exists(a.dx) || tensor_exists(a.dweight);
  for (int64_t first = 0; first < tokens; first += size) {
    int64_t count = min_i64(size, tokens - first);
    Tensor x = tensor_rows(a.x, first, count), dx = tensor_rows(a.dx, first, count);
    DivergenceHead own = head_of(backend, student, x, a.weight);
    for (int64_t at = 0, rows; at < count; at += rows) {
      rows = min_i64(half, count - at);
      Tensor teacher_x = tensor_rows(a.teacher_x, first + at, rows);
      part.student = head_rows(own, at, rows);
      part.teacher = head_of(backend, teacher, teacher_x, a.teacher_weight);
      part.rows = tensor_rows(terms, 0, rows);
      part.loss = tensor_rows(all.loss, first + at, rows);
      part.entropy = tensor_rows(all.entropy, first + at, rows);
      part.mask = tensor_rows(all.mask, first + at, rows);
      part.weights = tensor_rows(all.weights, first + at, rows);
      lce_divergence(backend, part);
    }
    if (tensor_exists(dx))
      linear_backward_input(backend, (LinearBackwardInput){.dx = dx, .dout = own.logits, .weight = a.weight});
    if (tensor_exists(a.dweight))
      linear_backward_weight(
          backend,
          (LinearBackwardWeight){
              .dweight = a.dweight, .dbias = a.dbias, .dout = own.logits, .x = x, .accumulate = first > 0});
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
  memory_pop_to(&backend->memory, mark);
}
