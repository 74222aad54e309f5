// The loop over chunks of C tokens. A token's gradient needs both heads' logits and no other token, so it is computed
// in the forward pass while they are at hand:
//
//     Z  = x W^T,  Z' = x' W'^T       [C, V] each, stored in x's dtype
//     Z  = its own gradient           lce_divergence: one pass for each row's two softmaxes, one or two for the rest
//     dX = Z W,  dW += Z^T x
//
// Four GEMMs. A row's anchors are its two maxima: there is no target whose logit is known beforehand, and the logits
// are stored anyway. Each probability then comes from a difference of its own row's logits, and log q - log p from two
// such differences, not from the probabilities: it stays exact where one of them underflows.
#include "tools/torch/liblce/divergence.h"

#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/lce/linear_cross_entropy.h"

int64_t divergence_chunk(const Backend *backend, int64_t tokens) {
  return backend->device == ON_CUDA ? 2048 : lce_default_chunk(backend->device, tokens);
}

// The operations check what they get: parts of these tensors.
static void check(const LinearDivergence *a) {
  const char *op = "linear_divergence";
  int64_t tokens = a->student.x.shape[0];
  if (a->chunk < 1) fail("%s: a chunk of %lld tokens; give 1 or more", op, (long long)a->chunk);
  if (a->teacher.x.shape[0] != tokens || a->teacher.weight.shape[0] != a->student.weight.shape[0])
    fail("%s: the student has x %s and weight %s, the teacher %s and %s; they need the same tokens and "
         "vocabulary",
         op, tensor_text(a->student.x).text, tensor_text(a->student.weight).text,
         tensor_text(a->teacher.x).text, tensor_text(a->teacher.weight).text);
  if (a->kind == JSD && !(a->beta > 0 && a->beta < 1))
    fail("%s: beta is %g; the JSD needs one between 0 and 1, and at them it is a KL, a kind of its own", op,
         (double)a->beta);
  if (tensor_exists(a->dbias) != (tensor_exists(a->student.bias) && tensor_exists(a->dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(a->student.bias).text, tensor_text(a->dbias).text);
  if (tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32 && a->chunk < tokens)
    fail("%s: dweight is %s, and a sum over chunks is fp32; give an fp32 one, or a chunk of %lld tokens", op,
         tensor_text(a->dweight).text, (long long)tokens);
}

static Tensor push_logits(Backend *backend, const char *name, int64_t rows, const DivergenceHead *head) {
  int64_t vocab_size = head->weight.shape[0],
          stride = backend->scratch->logits_stride(vocab_size, head->x.dtype);
  Tensor logits = memory_push_2d(&backend->memory, name, MEMORY_HEAD, head->x.dtype, rows, stride);
  return tensor_columns(logits, 0, vocab_size);
}

void linear_divergence(Backend *backend, LinearDivergence a) {
  check(&a);
  const DivergenceHead *student = &a.student, *teacher = &a.teacher;
  int64_t tokens = student->x.shape[0], size = lce_used_chunk(tokens, a.chunk);
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor buffer = push_logits(backend, "student's logits", size, student);
  Tensor teacher_buffer = push_logits(backend, "teacher's logits", size, teacher);
  for (int64_t first = 0; first < tokens; first += size) {
    int64_t count = min_i64(size, tokens - first);
    Tensor x = tensor_rows(student->x, first, count), logits = tensor_rows(buffer, 0, count);
    Tensor teacher_x = tensor_rows(teacher->x, first, count);
    Tensor teacher_logits = tensor_rows(teacher_buffer, 0, count);
    linear_forward(backend, (LinearForward){.out = logits, .x = x, .weight = student->weight});
    linear_forward(backend,
                   (LinearForward){.out = teacher_logits, .x = teacher_x, .weight = teacher->weight});
    lce_divergence(backend, (LceDivergence){.loss = tensor_rows(a.loss, first, count),
                                            .entropy = tensor_rows(a.entropy, first, count),
                                            .logits = logits,
                                            .teacher_logits = teacher_logits,
                                            .bias = student->bias,
                                            .teacher_bias = teacher->bias,
                                            .mask = tensor_rows(a.mask, first, count),
                                            .weights = tensor_rows(a.token_weights, first, count),
                                            .softcap = student->softcap,
                                            .temperature = student->temperature,
                                            .teacher_softcap = teacher->softcap,
                                            .teacher_temperature = teacher->temperature,
                                            .beta = a.beta,
                                            .kind = a.kind,
                                            .backward = tensor_exists(a.dx) || tensor_exists(a.dweight)});
    if (tensor_exists(a.dx))
      linear_backward_input(backend, (LinearBackwardInput){.dx = tensor_rows(a.dx, first, count),
                                                           .dout = logits,
                                                           .weight = student->weight});
    if (tensor_exists(a.dweight))
      linear_backward_weight(
          backend,
          (LinearBackwardWeight){
              .dweight = a.dweight, .dbias = a.dbias, .dout = logits, .x = x, .accumulate = first > 0});
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
  memory_pop_to(&backend->memory, mark);
}
