// The loop over chunks of C tokens. A token's gradient needs both heads' logits and no other token, so it is computed
// in the forward pass while they are at hand:
//
//     Z  = x W^T,  Z' = x' W'^T       [C, V] each, stored in x's dtype; Z' in two halves on a GPU
//     Z  = its own gradient           lce_divergence: one pass for each row's two softmaxes, one or two for the rest
//     dX = Z W,  dW += Z^T x
//
// Four GEMMs. A row's anchors are its two maxima: there is no target whose logit is known beforehand, and the logits
// are stored anyway. Each probability then comes from a difference of its own row's logits, and log q - log p from two
// such differences, not from the probabilities: it stays exact where one of them underflows.
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

// Rows of `buffer` = x W^T.
static Tensor logits_of(Backend *backend, Tensor buffer, Tensor x, Tensor weight) {
  Tensor logits = tensor_rows(buffer, 0, x.shape[0]);
  linear_forward(backend, (LinearForward){.out = logits, .x = x, .weight = weight});
  return logits;
}

// A chunk's logits become their gradient. The teacher's, which nothing else needs, come in parts.
static void chunk_divergence(Backend *backend, const LinearDivergence *a, int64_t first, Tensor logits,
                             Tensor teacher_buffer, Tensor scratch) {
  const LceDivergence *all = &a->divergence;
  LceDivergence part = *all;
  part.backward = tensor_exists(a->dx) || tensor_exists(a->dweight);
  int64_t rows = teacher_buffer.shape[0];
  for (int64_t at = 0; at < logits.shape[0]; at += rows) {
    int64_t count = min_i64(rows, logits.shape[0] - at);
    part.student.logits = tensor_rows(logits, at, count);
    part.teacher.logits =
        logits_of(backend, teacher_buffer, tensor_rows(a->teacher_x, first + at, count), a->teacher_weight);
    part.loss = tensor_rows(all->loss, first + at, count);
    part.entropy = tensor_rows(all->entropy, first + at, count);
    part.mask = tensor_rows(all->mask, first + at, count);
    part.weights = tensor_rows(all->weights, first + at, count);
    part.parts = tensor_rows(scratch, 0, count);
    lce_divergence(backend, part);
  }
}

void linear_divergence(Backend *backend, LinearDivergence a) {
  check(&a);
  bool cuda = backend->device == ON_CUDA;
  int64_t tokens = a.x.shape[0], vocab_size = a.weight.shape[0], size = lce_used_chunk(tokens, a.chunk),
          teacher_rows = cuda ? ceil_div(size, 2) : size;
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor buffer = push_logit_rows(backend, "student's logits", a.weight.dtype, size, vocab_size);
  Tensor teacher_buffer =
      push_logit_rows(backend, "teacher's logits", a.teacher_weight.dtype, teacher_rows, vocab_size);
  Tensor scratch = {0};
  if (cuda)
    scratch = memory_push_2d(&backend->memory, "scratch of lce_divergence", MEMORY_HEAD, DTYPE_F32,
                             teacher_rows, DIVERGENCE_PARTS);
  for (int64_t first = 0; first < tokens; first += size) {
    int64_t count = min_i64(size, tokens - first);
    Tensor x = tensor_rows(a.x, first, count), dx = tensor_rows(a.dx, first, count);
    Tensor logits = logits_of(backend, buffer, x, a.weight);
    chunk_divergence(backend, &a, first, logits, teacher_buffer, scratch);
    if (tensor_exists(dx))
      linear_backward_input(backend, (LinearBackwardInput){.dx = dx, .dout = logits, .weight = a.weight});
    if (tensor_exists(a.dweight))
      linear_backward_weight(
          backend,
          (LinearBackwardWeight){
              .dweight = a.dweight, .dbias = a.dbias, .dout = logits, .x = x, .accumulate = first > 0});
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
  memory_pop_to(&backend->memory, mark);
}
