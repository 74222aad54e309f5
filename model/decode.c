#include "model/pass.h"

KeyValueCache key_value_cache_push(Backend *backend, const ModelConfig *c, int64_t batch, int64_t capacity) {
  int64_t rows = 2 * c->num_hidden_layers * batch * c->num_key_value_heads;
  return (KeyValueCache){capacity, memory_push_2d(&backend->memory, "key/value cache", MEMORY_ACTIVATIONS,
                                                  backend->dtype, rows, capacity * c->head_dim)};
}

static void attend_to_cache(const Pass *p, int64_t l, const LayerState *s) {
  int64_t heads = p->heads.batch * p->heads.num_key_value_heads, first = 2 * heads * l;
  attention_decode(p->backend, (AttentionDecode){.out = s->attention.x,
                                                 .keys = tensor_rows(p->cache->data, first, heads),
                                                 .values = tensor_rows(p->cache->data, first + heads, heads),
                                                 .qkv = s->qkv,
                                                 .shape = p->heads,
                                                 .past = p->past});
}

void transformer_logits(Backend *backend, Model *model, const Batch *batch, const KeyValueCache *cache,
                        int64_t past, Tensor indices, Tensor logits) {
  Pass p = pass_begin(backend, model, batch, &(TransformerOptions){0});
  p.cache = cache; // attention_decode refuses tokens that do not fit
  if (cache) p.attend = attend_to_cache;
  p.past = past;
  Tensor stream = layers_forward(&p);
  if (tensor_exists(logits)) {
    Norm norm = final_norm(&p, stream, none);
    Tensor picked = memory_push_2d(&backend->memory, "rows to predict from", MEMORY_ACTIVATIONS,
                                   backend->dtype, indices.shape[0], model->config.hidden_size);
    gather_rows(backend, (MoveRows){.out = picked, .x = norm.out.x, .indices = indices});
    linear_forward(backend, (LinearForward){.out = logits, .x = picked, .weight = model->head.value});
  }
  pass_end(&p);
}
