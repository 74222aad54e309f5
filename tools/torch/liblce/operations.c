// The entry points of the package's operations, as kernels.c has those of the core.
#include "tools/torch/liblce/operations.h"

#include "kernels/cuda/cuda_ops.h"
#include "kernels/needs.h"

#define GRADIENT_FACTORS                                                                                     \
  NAMED("log_total", a->factors.log_total, "fp32 [N]"), NAMED("per_p", a->factors.per_p, "fp32 [N]"),        \
      NAMED("per_distance", a->factors.per_distance, "fp32 [N]"),                                            \
      NAMED("at_target", a->factors.at_target, "fp32 [N]"), FIELD(targets, "int32 [N]")

static void check_lce_gradient_factors(Op op, Backend *backend, LceGradientFactors *a) {
  check_loss_terms(op, &a->terms, a->vocab_size);
  CHECK(REFUSE(a->terms.label_smoothing > 0, "label smoothing does not follow from log_prob"),
        GRADIENT_FACTORS, FIELD(target_z, "fp32 [N]"), FIELD(log_prob, "fp32 [N]"),
        FIELD(row_sum, "fp32 [N] or absent"),
        FIELD(entropy, tensor_exists(a->entropy_weights) ? "fp32 [N]" : "fp32 [N] or absent"),
        FIELD(token_weights, "fp32 [N] or absent"), FIELD(entropy_weights, "fp32 [N] or absent"),
        FIELD(factor, "fp32 [1] or absent"));
}

NEEDS(lce_logits_gradient, LceLogitsGradient, GRADIENT_FACTORS, FIELD(x, "T [N, H] or absent"),
      FIELD(weight, tensor_exists(a->x) ? "T [V, H]" : "absent: x is absent, so dlogits holds exponentials"),
      FIELD(bias, tensor_exists(a->x) ? "T [V] or absent" : "absent: x is absent"),
      FIELD(anchor, tensor_exists(a->x) ? "fp32 [N]" : "absent: x is absent"),
      REFUSE(a->softcap > 0 && !tensor_exists(a->x), "exponentials under a soft-cap"),
      FIELD(dlogits, "T [N, V] strided"))

#define GIVEN_IDS(rows)                                                                                      \
  FIELD(log_probs, "fp32 [M]"), FIELD(ids, "int32 [M]"), SIZE(O, (rows) + 1),                                \
      FIELD(offsets, "int64 [O] or absent"),                                                                 \
      REFUSE(!tensor_exists(a->offsets) && a->ids.shape[0] % max_i64(1, rows), "%lld ids for %lld rows",     \
             a->ids.shape[0], rows)
#define ID_LOG_PROBS                                                                                         \
  FIELD(x, "T [N, H]"), FIELD(weight, "T [V, H]"), FIELD(bias, "T [V] or absent"),                           \
      FIELD(anchors, "int32 [N]"), FIELD(anchor_nll, "fp32 [N]"), GIVEN_IDS(a->x.shape[0])
NEEDS(lce_id_logits, LceIdLogProbs, ID_LOG_PROBS)
NEEDS(lce_id_log_probs, LceIdLogProbs, ID_LOG_PROBS)

#define ID_GRADIENTS                                                                                         \
  FIELD(lse, "fp32 [N]"), GRADIENT_FACTORS, FIELD(anchors, "int32 [N]"), GIVEN_IDS(a->lse.shape[0]),         \
      FIELD(dlog_probs, "fp32 [M]"), FIELD(dlse, "fp32 [N] or absent"),                                      \
      FIELD(dentropy, "fp32 [N] or absent"),                                                                 \
      FIELD(entropy, tensor_exists(a->dentropy) ? "fp32 [N]" : "fp32 [N] or absent")
NEEDS(lce_id_factors, LceIdGradients, ID_GRADIENTS)
NEEDS(lce_id_gradients, LceIdGradients, ID_GRADIENTS, FIELD(dlogits, "fp32|bf16 [N, W] strided"))

NEEDS(read_targets, ReadTargets, FIELD(ids, "int32|int64 [N]"), FIELD(targets, "int32 [N] or absent"),
      FIELD(loss, "fp32 [N] or absent"))

#define GRADIENT(field) FIELD(field, backend->device == ON_CUDA ? "fp32|bf16 [N]" : "fp32 [N]")
NEEDS(scale_by, ScaleBy, GRADIENT(x), GRADIENT(out), FIELD(factor, "fp32 [1] or absent"))

// On a GPU lce_logits_gradient has a tile of logits as scratch.
static Tensor push_scratch(Backend *backend, const LceLogitsGradient *a) {
  if (backend->device == ON_CPU || !tensor_exists(a->x)) return (Tensor){0};
  size_t bytes = cuda_lce_tiles_bytes(a->x.shape[0], a->weight.shape[0]) / CUDA_LCE_TILES;
  return memory_push_1d(&backend->memory, "scratch of lce_logits_gradient", MEMORY_HEAD, DTYPE_I32,
                        (int64_t)((bytes + 3) / 4));
}

#define ENTRY(name, Arguments)                                                                               \
  void name(Backend *backend, Arguments a) {                                                                 \
    check_##name(#name, backend, &a);                                                                        \
    if (!backend->memory.planning) ON_DEVICE(name)(backend, &a);                                             \
  }
#define ENTRY_WITH_SCRATCH(name, Arguments)                                                                  \
  void name(Backend *backend, Arguments a) {                                                                 \
    check_##name(#name, backend, &a);                                                                        \
    MemoryMark mark = memory_mark(&backend->memory);                                                         \
    a.workspace = push_scratch(backend, &a);                                                                 \
    if (!backend->memory.planning) ON_DEVICE(name)(backend, &a);                                             \
    memory_pop_to(&backend->memory, mark);                                                                   \
  }
TORCH_OPERATIONS(ENTRY, ENTRY_WITH_SCRATCH)

void backend_follow(Backend *backend, void *stream, void **event) {
#ifdef HAVE_CUDA
  if (backend->device == ON_CUDA) cuda_follow(backend, stream, event);
#endif
}

void backend_precede(Backend *backend, void *stream, void **event) {
#ifdef HAVE_CUDA
  if (backend->device == ON_CUDA) cuda_precede(backend, stream, event);
#endif
}

void hand_over_end(Backend *backend, void **event) {
#ifdef HAVE_CUDA
  if (backend->device == ON_CUDA) cuda_hand_over_end(event);
#endif
}

void batch_invariant(Backend *backend, BackendOps *ops, bool on) {
  backend->fixed_order = on;
#ifdef HAVE_CUDA
  if (backend->device == ON_CUDA) cuda_batch_invariant(ops, on);
#endif
}
