// Muon for the layers' matrices (q, k and v each, out, gate and up each, down): with u from m and g by
// Nesterov's momentum and NS by Newton-Schulz (kernels.h),
//   w = w - lr (0.2 sqrt(max(rows, columns)) NS(u) + weight_decay w)
// whose factor makes updates as large as AdamW's, so that its rate and decay serve (Liu et al. 2025, "Muon is
// scalable"; "match_rms_adamw" of torch.optim.Muon).
#include <math.h>

#include "model/shards.h"

// Bound of the updates of layers that are updated together: small GEMMs alone would leave a GPU idle.
enum { LAYERS_BYTES = 256 << 20 };

// Every matrix of layers [from, from + count) in `updates`; those of one shape together, which fills a GPU.
static void orthogonalize_layers(Backend *backend, const ParameterSet *p, Tensor updates, int64_t from,
                                 int64_t count) {
  enum { MOST = 7 }; // q, k, v, out, gate, up, down
  const Sharding *s = &p->sharding;
  Matrices found[MOST], alike[MOST];
  int all = 0;
  for (const Parameter *t = p->items; t < p->items + p->count; t++) {
    if (t->group != GROUP_MATRICES || t->offset >= s->layer) continue; // of the first layer
    Tensor layer = tensor_rows(updates, from * s->layer + t->offset, parameter_elements(t));
    layer = tensor_reshape_2d(layer, t->shape[0], t->shape[1]);
    int64_t at = 0;
    for (int i = 0; i < 3 && t->matrices[i]; at += t->matrices[i++]) {
      Tensor x = (t->outputs_in_rows ? tensor_rows : tensor_columns)(layer, at, t->matrices[i]);
      found[all++] = (Matrices){x, s->layer};
    }
  }
  for (int first = 0; first < all; first++) {
    Tensor like = found[first].first;
    if (!tensor_exists(like)) continue; // done, with an earlier one
    int kinds = 0;
    for (int i = first; i < all; i++) {
      if (!tensor_same_shape(found[i].first, like)) continue;
      alike[kinds++] = found[i];
      found[i].first = (Tensor){0};
    }
    float scale = 0.2f * sqrtf((float)max_i64(like.shape[0], like.shape[1]));
    orthogonalize(backend, alike, kinds, count, scale);
  }
}

// A rank computes its slices of u, gathers all, orthogonalizes some layers and leaves zeros for the others,
// so that the ranks' sums are the updates, again in slices.
static void update_some(Backend *backend, const ParameterSet *p, Range some, Update settings) {
  const ParameterGroup group = GROUP_MATRICES;
  int64_t part = p->sharding.part, parts = p->sharding.parts, count = some.size / p->sharding.layer;
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor updates =
      memory_push_1d(&backend->memory, "Muon's updates", MEMORY_WORKSPACE, backend->dtype, some.size);
  for (Range b = {0}; shards_next(p, group, some, &b);) {
    Update u = shards_update(p, group, b, settings);
    u.weight = tensor_rows(updates, u.first - some.offset, u.grad.shape[0]);
    u.master = (Tensor){0};
    nesterov(backend, u);
    Tensor whole = tensor_rows(updates, b.offset - some.offset, b.size);
    if (parts > 1) all_gather(backend, (Collective){.out = whole, .x = u.weight, .async = true});
  }
  collectives_join(backend, 0);
  int64_t mine = ceil_div(count * part, parts),
          after = ceil_div(count * (part + 1), parts); // rank 0 has the most
  fill_zero(backend, tensor_rows(updates, 0, mine * p->sharding.layer));
  fill_zero(backend, tensor_rows(updates, after * p->sharding.layer, (count - after) * p->sharding.layer));
  if (mine < after) orthogonalize_layers(backend, p, updates, mine, after - mine);
  for (Range b = {0}; shards_next(p, group, some, &b);) {
    Update u = shards_update(p, group, b, settings);
    u.grad = tensor_rows(updates, u.first - some.offset, u.grad.shape[0]);
    u.m = (Tensor){0};
    Tensor whole = tensor_rows(updates, b.offset - some.offset, b.size);
    if (parts > 1) reduce_scatter(backend, (Collective){.out = u.grad, .x = whole});
    sgd(backend, u);
    shards_gather(p, backend, group, b);
  }
  collectives_join(backend, 0);
  memory_pop_to(&backend->memory, mark);
}

void muon_update(Backend *backend, const ParameterSet *p, Update settings) {
  int64_t layers = LAYERS_BYTES / (p->sharding.layer * (int64_t)dtype_bytes(backend->dtype));
  int64_t most = p->sharding.layer * max_i64(layers / p->sharding.parts, 1) * p->sharding.parts;
  for (int64_t end = p->group_elements[GROUP_MATRICES], first; end > 0; end = first) {
    first = max_i64(end - most, 0);
    update_some(backend, p, (Range){first, end - first}, settings);
  }
}
