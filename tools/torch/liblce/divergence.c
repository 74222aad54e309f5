// The loop over chunks of C tokens. A token's gradient needs both heads' logits and no other token, so it is computed
// in the forward pass while they are at hand:
//
//     Z  = x W^T,  Z' = x' W'^T       [C, V] each, stored in x's dtype; Z' in two halves on a GPU
//     Z  = its own gradient           a pass for each row's two softmaxes, one or two for the rest
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
#include "kernels/needs.h"

int64_t divergence_chunk(const Backend *backend, int64_t tokens) {
  return backend->device == ON_CUDA ? 2048 : lce_default_chunk(backend->device, tokens);
}

static void check(const LinearDivergence *a) {
  const char *op = "linear_divergence";
  Tensor bias = a->student.bias;
  const DivergenceHead *heads[] = {&a->student, &a->teacher};
  for (int i = 0; i < 2; i++)
    check_loss_terms(op, &(LossTerms){.softcap = heads[i]->softcap, .temperature = heads[i]->temperature},
                     a->student.weight.shape[0]);
  if (a->kind == JSD && !(a->beta > 0 && a->beta < 1))
    fail("%s: beta is %g; the JSD needs one between 0 and 1, and at them it is a KL, a kind of its own", op,
         (double)a->beta);
  if (tensor_exists(a->dbias) != (tensor_exists(bias) && tensor_exists(a->dweight)))
    fail("%s: bias is %s and dbias is %s; a bias has a gradient where weight has one", op,
         tensor_text(bias).text, tensor_text(a->dbias).text);
  int64_t least = ceil_div(a->student.x.shape[0], DIVERGENCE_NARROW_CHUNKS);
  if (tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32 && a->chunk < least)
    fail(
        "%s: dweight is %s, and a sum over more than %d chunks is fp32; give an fp32 one, or a chunk of %lld "
        "tokens",
        op, tensor_text(a->dweight).text, DIVERGENCE_NARROW_CHUNKS, (long long)least);
}

static LinearDivergence rows_of(LinearDivergence a, int64_t first, int64_t count) {
  Tensor *per_token[] = {&a.student.x, &a.student.logits, &a.student.best, &a.student.sums,  &a.teacher.x,
                         &a.loss,      &a.entropy,        &a.mask,         &a.token_weights, &a.dx};
  for (size_t i = 0; i < sizeof per_token / sizeof *per_token; i++)
    *per_token[i] = tensor_rows(*per_token[i], first, count);
  return a;
}

// The head with a place for its logits of so many rows, and on a GPU for their tiles.
static DivergenceHead push_head(Backend *backend, const char *name, DivergenceHead head, int64_t rows) {
  int64_t vocab_size = head.weight.shape[0], tiles = ceil_div(vocab_size, LCE_TILE_COLUMNS);
  head.logits = push_logit_rows(backend, name, head.weight.dtype, rows, vocab_size);
  if (backend->device == ON_CPU || head.weight.dtype != DTYPE_BF16) return head;
  head.best = memory_push_2d(&backend->memory, "tiles' largest logits", MEMORY_HEAD, DTYPE_I64, rows, tiles);
  head.sums = memory_push_2d(&backend->memory, "tiles' sums", MEMORY_HEAD, DTYPE_F32, rows, tiles);
  return head;
}

// The head with x's logits, in its first rows.
static DivergenceHead logits_of(Backend *backend, DivergenceHead head, Tensor x) {
  Tensor *places[] = {&head.logits, &head.best, &head.sums};
  for (int i = 0; i < 3; i++) *places[i] = tensor_rows(*places[i], 0, x.shape[0]);
  head.x = x;
#ifdef HAVE_CUDA
  bool plain = tensor_exists(head.best) && !tensor_exists(head.bias) && head.softcap == 0;
  if (plain && !backend->memory.planning && cuda_logit_tiles(backend, &head)) return head;
#endif
  linear_forward(backend, (LinearForward){.out = head.logits, .x = x, .weight = head.weight});
  head.best = head.sums = (Tensor){0};
  return head;
}

static void divergence(Backend *backend, const LinearDivergence *a) {
  if (backend->memory.planning) return;
#ifdef HAVE_CUDA
  if (backend->device == ON_CUDA) return cuda_divergence(backend, a);
#endif
  cpu_divergence(backend, a);
}

void linear_divergence(Backend *backend, LinearDivergence a) {
  check(&a);
  int64_t tokens = a.student.x.shape[0], size = lce_used_chunk(tokens, a.chunk);
  bool gpu = backend->device == ON_CUDA;
  int64_t half = gpu ? ceil_div(size, 2) : size; // of a chunk, for the teacher
  MemoryMark mark = memory_mark(&backend->memory);
  DivergenceHead student = push_head(backend, "student's logits", a.student, size),
                 teacher = push_head(backend, "teacher's logits", a.teacher, half);
  if (gpu)
    a.row_terms = memory_push_2d(&backend->memory, "rows' softmaxes", MEMORY_HEAD, DTYPE_F32, half,
                                 DIVERGENCE_ROW_FLOATS);
  for (int64_t first = 0; first < tokens; first += size) {
    int64_t count = min_i64(size, tokens - first);
    LinearDivergence chunk = rows_of(a, first, count);
    chunk.student = logits_of(backend, student, chunk.student.x);
    for (int64_t at = 0; at < count; at += half) {
      LinearDivergence part = rows_of(chunk, at, min_i64(half, count - at));
      part.teacher = logits_of(backend, teacher, part.teacher.x);
      divergence(backend, &part);
    }
    Tensor dout = chunk.student.logits;
    if (tensor_exists(a.dx))
      linear_backward_input(backend,
                            (LinearBackwardInput){.dx = chunk.dx, .dout = dout, .weight = a.student.weight});
    if (tensor_exists(a.dweight))
      linear_backward_weight(backend, (LinearBackwardWeight){.dweight = a.dweight,
                                                             .dbias = a.dbias,
                                                             .dout = dout,
                                                             .x = chunk.student.x,
                                                             .accumulate = first > 0});
    if (backend->memory.planning) break; // the chunks after the first need no more
  }
  memory_pop_to(&backend->memory, mark);
}
