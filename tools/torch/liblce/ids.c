// Forward, a row's anchor is its likeliest given id: the loss gives -log p of it and lse, and a difference of
// logits leads from it to the others. Backward, the gradient of the logits,
//
//     G[n, j] = (sum of g of the ids that are j + p[j] (dlse[n] - sum of the row's g - t[n] (log p[j] + S[n]))) / T du/dz
//
// is dense but for the given ids, whose entries are written into each block of it. So the block's GEMMs take
// all entries alike, and dW needs no sum in fp32. The row's likeliest given id is the anchor of p again.
#include "tools/torch/liblce/ids.h"

#include "kernels/lce/call.h"
#include "tools/torch/liblce/log_probs.h"
#include "tools/torch/liblce/operations.h"

void id_log_probs(Backend *backend, IdLogProbs a) {
  LinearCrossEntropy call = a.call;
  Memory *memory = &backend->memory;
  MemoryMark mark = memory_mark(memory);
  call.dx = call.dweight = call.dbias = (Tensor){0};
  call.targets = memory_push_1d(memory, "anchors", MEMORY_HEAD, DTYPE_I32, call.x.shape[0]);
  call.loss = memory_push_1d(memory, "losses of the anchors", MEMORY_HEAD, DTYPE_F32, call.x.shape[0]);
  call.outputs.logsumexp = a.lse, call.outputs.entropy = a.entropy;
  LceIdLogProbs given = {
      a.log_probs,        call.targets,          call.loss, call.x, call.weight, call.bias, a.ids, a.offsets,
      call.terms.softcap, call.terms.temperature};
  lce_id_logits(backend, given);
  linear_cross_entropy(backend, call);
  lce_id_log_probs(backend, given);
  memory_pop_to(memory, mark);
}

void id_log_prob_gradients(Backend *backend, IdLogProbs a) {
  LinearCrossEntropy *call = &a.call;
  check_gradients(call, &(Exponentials){0});
  if (!tensor_exists(call->dx) && !tensor_exists(call->dweight)) return;
  Call c = lce_begin(backend, call);
  int64_t tokens = call->x.shape[0];
  call->targets = push_vector(&c, "rows that count", DTYPE_I32, tokens);
  LceIdGradients given = {.factors = push_factors(&c, tokens),
                          .anchors = push_vector(&c, "anchors", DTYPE_I32, tokens),
                          .targets = call->targets,
                          .log_probs = a.log_probs,
                          .lse = a.lse,
                          .entropy = a.entropy,
                          .dlog_probs = a.dlog_probs,
                          .dlse = a.dlse,
                          .dentropy = a.dentropy,
                          .ids = a.ids,
                          .offsets = a.offsets,
                          .softcap = call->terms.softcap,
                          .temperature = call->terms.temperature};
  lce_id_factors(backend, given);
  Tensor anchor_u = push_vector(&c, "logits of the anchors", DTYPE_F32, tokens);
  lce_target_z(&c, anchor_u, call->x, given.anchors);
  gradients_by_blocks(&c, given.factors, anchor_u, (Tensor){0}, &given);
  lce_end(&c);
}
