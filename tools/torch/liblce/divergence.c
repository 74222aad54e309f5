// The loop over chunks of C tokens. A token's gradient needs both heads' logits and no other token, so it is computed
// in the forward pass while they are at hand:
//
//     Z  = x W^T,  Z' = x' W'^T       [C, V] each, stored in x's dtype
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
#include "tools/torch/liblce/operations.h"

int64_t divergence_chunk(const Backend *backend, int64_t tokens) {
  return backend->device == ON_CUDA ? 2048 : lce_default_chunk(backend->device, tokens);
}

static void check(Op op, const LinearDivergence *a) {
  const DivergenceHead heads[] = {a->student, a->teacher};
  for (int i = 0; i < 2; i++)
    check_loss_terms(op, &(LossTerms){.softcap = heads[i].softcap, .temperature = heads[i].temperature},
                     heads[i].weight.shape[0]);
  if (a->kind == JSD && !(a->beta > 0 && a->beta < 1))
    fail("%s: beta is %g; the JSD needs one between 0 and 1, and at them it is a KL, a kind of its own", op,
         (double)a->beta);
  bool biased = tensor_exists(a->student.bias) && tensor_exists(a->dweight);
  int64_t least = ceil_div(a->student.x.shape[0], DIVERGENCE_NARROW_CHUNKS);
  CHECK(
      FIELD(dbias, biased ? "fp32 [V]" : "absent: a bias has a gradient where weight has one"),
      REFUSE(
          tensor_exists(a->dweight) && a->dweight.dtype != DTYPE_F32 && a->chunk < least,
          "a dweight summed over more than %lld chunks is fp32; give an fp32 one, or a chunk of %lld tokens",
          DIVERGENCE_NARROW_CHUNKS, least));
}

static LinearDivergence rows_of(LinearDivergence a, int64_t first, int64_t count) {
  Tensor *per_token[] = {&a.student.x, &a.teacher.x, &a.loss, &a.entropy, &a.mask, &a.token_weights, &a.dx};
  for (size_t i = 0; i < sizeof per_token / sizeof *per_token; i++)
    *per_token[i] = tensor_rows(*per_token[i], first, count);
  return a;
}

// Computes x's logits, and on Hopper their tiles' parts, in memory that it pushes.
static void push_logits_of(Backend *backend, const char *name, DivergenceHead *head) {
  int64_t rows = head->x.shape[0], vocab_size = head->weight.shape[0];
  head->logits = push_logit_rows(backend, name, head->x.dtype, rows, vocab_size);
#ifdef HAVE_CUDA
  if (head->x.dtype == DTYPE_BF16 && !tensor_exists(head->bias) && head->softcap == 0) {
    int64_t tiles = ceil_div(vocab_size, LCE_TILE_COLUMNS);
    head->best =
        memory_push_2d(&backend->memory, "tiles' largest logits", MEMORY_HEAD, DTYPE_I64, rows, tiles);
    head->sums = memory_push_2d(&backend->memory, "tiles' sums", MEMORY_HEAD, DTYPE_F32, rows, tiles);
    if (!backend->memory.planning && cuda_logit_tiles(backend, head)) return;
    head->best = head->sums = (Tensor){0};
  }
#endif
  linear_forward(backend, (LinearForward){.out = head->logits, .x = head->x, .weight = head->weight});
}

void linear_divergence(Backend *backend, LinearDivergence a) {
  check(__func__, &a);
  Memory *memory = &backend->memory;
  int64_t tokens = a.student.x.shape[0], size = lce_used_chunk(tokens, a.chunk);
  for (int64_t first = 0; first < tokens; first += size) {
    MemoryMark mark = memory_mark(memory);
    int64_t count = min_i64(size, tokens - first);
    LinearDivergence chunk = rows_of(a, first, count);
    push_logits_of(backend, "student's logits", &chunk.student);
    MemoryMark teachers = memory_mark(memory);
    push_logits_of(backend, "teacher's logits", &chunk.teacher);
    if (backend->device == ON_CUDA)
      chunk.row_terms =
          memory_push_2d(memory, "rows' softmaxes", MEMORY_HEAD, DTYPE_F32, count, DIVERGENCE_ROW_FLOATS);
    if (!memory->planning) ON_DEVICE(divergence)(backend, &chunk);
    memory_pop_to(memory, teachers);
    Tensor dout = chunk.student.logits, x = chunk.student.x, weight = a.student.weight;
    if (tensor_exists(a.dx))
      linear_backward_input(backend, (LinearBackwardInput){.dx = chunk.dx, .dout = dout, .weight = weight});
    if (tensor_exists(a.dweight))
      linear_backward_weight(
          backend,
          (LinearBackwardWeight){
              .dweight = a.dweight, .dbias = a.dbias, .dout = dout, .x = x, .accumulate = first > 0});
    memory_pop_to(memory, mark);
    if (memory->planning) break; // the chunks after the first need no more
  }
}
