// AdamW, and Muon for the layers' matrices (q, k and v each, out, gate and up each, down): with u from m and
// g by Nesterov's momentum and NS by Newton-Schulz (kernels.h),
//   w = w - lr (0.2 sqrt(max(rows, columns)) NS(u) + weight_decay w)
// whose factor makes updates as large as AdamW's, so that its rate and decay serve (Liu et al. 2025, "Muon is
// scalable"; "match_rms_adamw" of torch.optim.Muon).
#include <math.h>

#include "kernels/base/profile.h"
#include "model/shards.h"

// The settings with the tensors of this rank's slice of a bucket.
static Update slice_update(const ParameterSet *p, ParameterGroup group, Range bucket, Update u) {
  Range mine = shards_slice(p, bucket);
  u.weight = shards_rows(p, p->value, group, mine);
  u.master = shards_rows(p, p->master, group, mine);
  u.m = shards_rows(p, p->state[0], group, mine);
  u.v = shards_rows(p, p->state[1], group, mine);
  u.grad = shards_rows(p, p->grad_sum, group, mine);
  u.seed = u.seed * GROUP_COUNT + (uint64_t)group; // of stochastic rounding
  u.first = mine.offset;
  if (group == GROUP_VECTORS) u.weight_decay = 0;
  return u;
}

// --- Muon --------------------------------------------------------------------------------------------------

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
    int64_t columns = t->shape[1] / t->column_blocks;
    Tensor layer = tensor_rows(updates, from * s->layer + t->offset, parameter_elements(t));
    for (int b = 0; b < t->column_blocks; b++) {
      Tensor x = tensor_columns(tensor_reshape_2d(layer, t->shape[0], t->shape[1]), b * columns, columns);
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

// A rank makes its slices of u, gathers all, orthogonalizes some layers and leaves zeros for the others, so
// that the ranks' sums are the updates, again in slices.
static void update_some(Backend *backend, const ParameterSet *p, Range some, Update settings) {
  const ParameterGroup group = GROUP_MATRICES;
  int64_t part = p->sharding.part, parts = p->sharding.parts, count = some.size / p->sharding.layer;
  MemoryMark mark = memory_mark(&backend->memory);
  Tensor updates =
      memory_push_1d(&backend->memory, "Muon's updates", MEMORY_WORKSPACE, backend->dtype, some.size);
  for (Range b = {0}; shards_next(p, group, some, &b);) {
    Update u = slice_update(p, group, b, settings);
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
    Update u = slice_update(p, group, b, settings);
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

static void update_layers_muon(Backend *backend, const ParameterSet *p, Update settings) {
  int64_t layers = LAYERS_BYTES / (p->sharding.layer * (int64_t)dtype_bytes(backend->dtype));
  int64_t most = p->sharding.layer * max_i64(layers / p->sharding.parts, 1) * p->sharding.parts;
  for (int64_t end = p->group_elements[GROUP_MATRICES], first; end > 0; end = first) {
    first = max_i64(end - most, 0);
    update_some(backend, p, (Range){first, end - first}, settings);
  }
}

// --- a step ------------------------------------------------------------------------------------------------

// What is updated in one call: this rank's slice of a bucket; where nothing is sharded a layer's matrices, or
// the rest of a group.
typedef struct {
  int place; // of the group, in the order of the updates
  ParameterGroup group;
  Range bucket;
} UpdateRange;

// Steps to the next range, from {0} to the first; false after the last. A group's last elements come first.
static bool next_range(const ParameterSet *p, UpdateRange *range) {
  static const ParameterGroup order[GROUP_COUNT] = {GROUP_MATRICES, GROUP_EMBEDDINGS, GROUP_HEAD,
                                                    GROUP_VECTORS};
  int64_t end = range->bucket.size ? range->bucket.offset : p->group_elements[order[range->place]];
  while (end == 0 && ++range->place < GROUP_COUNT) end = p->group_elements[order[range->place]];
  if (range->place == GROUP_COUNT) return false;
  range->group = order[range->place];
  range->bucket = (Range){0};
  if (p->sharding.parts > 1) return shards_next(p, range->group, (Range){0, end}, &range->bucket);
  int64_t size = range->group == GROUP_MATRICES ? p->sharding.layer : end;
  range->bucket = (Range){end - size, size};
  return true;
}

bool squares_summed_by_layer(const ParameterSet *p, const Backend *backend) {
  return tensor_exists(p->layer_grads) && backend->ranks == 1;
}

void parameters_sum_squares(Backend *backend, const ParameterSet *p) {
  profile_phase(backend, PHASE_UPDATE);
  bool started = false;
  for (UpdateRange range = {0}; next_range(p, &range); started = true) {
    if (range.group == GROUP_MATRICES && squares_summed_by_layer(p, backend)) continue;
    sum_elements(backend,
                 (SumElements){.sum = p->squares,
                               .x = shards_rows(p, p->grad_sum, range.group, shards_slice(p, range.bucket)),
                               .squares = true,
                               .accumulate = started});
  }
  if (p->sharding.parts > 1) all_reduce(backend, (Collective){.out = p->squares, .x = p->squares});
}

void parameters_update(Backend *backend, const ParameterSet *p, Update settings) {
  if (p->muon) update_layers_muon(backend, p, settings);
  for (UpdateRange range = {0}; next_range(p, &range);) {
    if (p->muon && range.group == GROUP_MATRICES) continue;
    adamw(backend, slice_update(p, range.group, range.bucket, settings));
    shards_gather(p, backend, range.group, range.bucket);
  }
  collectives_join(backend, 0);
}
